"""Deletes ended runs from the server, by age and by their total size, and keys that belong to none."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ddrl.store import bounded, capped_streams, connection, evaluations, keys, runs, server, workers
from ddrl.store.connection import Redis, StoreError

log = logging.getLogger(__name__)

EVERY_S = 600.0
BATCH, SAMPLED = 500, 5_000  # keys in one request, and whose bytes are asked for
EXACT_LENGTH = 100_000  # members of a key up to which its size is found member by member
LENGTHS = {b"hash": "hlen", b"list": "llen", b"set": "scard", b"stream": "xlen", b"zset": "zcard"}
EMBEDDED_AGE_S, EMBEDDED_BYTES = 30 * 86_400.0, 1024**3  # of ended runs on the embedded server
EMBEDDED_SHARE = 0.25  # of its memory, if that is less
WRITTEN_BYTES = 4 * 1024**2  # most in a run's key but for fragments, weights and checkpoints
BROKEN_BYTES = 16 * 1024**2  # above what workers keep


@dataclass(frozen=True)
class Pruned:
    """An ended run that was deleted, or would be.

    Attributes:
        run: its id.
        status: how it ended.
        ended_s: when, server's clock.
        bytes: that its keys take on the server.
        reason: for deleting it.
    """

    run: str
    status: str
    ended_s: float
    bytes: int
    reason: str


class Retention:
    """Prunes at most every EVERY_S seconds, for a long-lived process that calls `apply` regularly.

    Args:
        older_than_s, max_bytes: as in `prune`.
    """

    def __init__(self, older_than_s: float | None, max_bytes: int | None) -> None:
        self._older_than_s, self._max_bytes = older_than_s, max_bytes
        self._next = 0.0

    def apply(self, client: Redis) -> list[Pruned]:
        """Prune if it is time; return what was deleted."""
        if (now := time.monotonic()) < self._next:
            return []
        self._next = now + EVERY_S
        return prune(client, self._older_than_s, self._max_bytes)


def prune_embedded(client: Redis) -> list[Pruned]:
    """Prune the embedded server by age and size; a server that `DDRL_REDIS_URL` names is left alone."""
    if not connection.is_embedded():
        return []
    share = int(EMBEDDED_SHARE * server.memory_limit())
    return prune(client, EMBEDDED_AGE_S, min(EMBEDDED_BYTES, share or EMBEDDED_BYTES))


def prune(
    client: Redis, older_than_s: float | None, max_bytes: int | None, dry_run: bool = False
) -> list[Pruned]:
    """Delete ended runs that are too old, then the oldest ones until the rest takes at most `max_bytes`.

    A run that is active, paused, still held by a learner that is writing its results, or learned from by another run
    is never deleted.

    Args:
        client: connection to the server.
        older_than_s: runs that ended longer ago are deleted; None: age does not matter.
        max_bytes: most bytes of all ended runs together; None: no limit.
        dry_run: delete nothing.

    Returns:
        What was deleted, or would be, in the order in which the runs ended.
    """
    sources = runs.sources(client)
    states = (state for state in _states(client) if state.run not in sources)
    deletable = [state for state in states if state.ended and not state.leased]
    sizes = _sizes(client, [state.run for state in deletable])
    sizes |= {state.run: min(sizes[state.run], state.bytes) for state in deletable if state.bytes}
    now_s, total = runs.server_ms(client) / 1e3, sum(sizes.values())
    deleted: list[Pruned] = []
    for state in sorted(deletable, key=lambda state: state.ended_s):
        size = sizes[state.run]
        if older_than_s is not None and now_s - state.ended_s > older_than_s:
            reason = f"ended more than {older_than_s / 86_400:.3g} days ago"
        elif max_bytes is not None and total > max_bytes:
            reason = f"ended runs take {total / 1024**2:.1f} MB, more than {max_bytes / 1024**2:.1f} MB"
        else:
            continue
        if not dry_run:
            try:
                runs.delete(client, state.run)
            except StoreError as error:  # resumed or deleted meanwhile
                log.info("%s", error)
                continue
            log.info("%s: pruned", state.run)
        total -= size
        deleted.append(Pruned(state.run, state.status, state.ended_s, size, reason))
    return deleted


def _states(client: Redis) -> Iterator[runs.RunState]:
    for run in runs.names(client):
        with contextlib.suppress(runs.UnknownRunError):  # deleted meanwhile
            yield runs.state(client, run)


def size(client: Redis, run: str) -> int:
    """Return the bytes that a run's keys take, at most those that it may need."""
    return _sizes(client, [run])[run]


def _sizes(client: Redis, names: Iterable[str]) -> dict[str, int]:
    """Return the bytes that each run's keys take, at most those that it may need: a worker may write more.

    Those of more keys than SAMPLED are taken to be as long as these are on the average.
    """
    sizes, nums = dict.fromkeys(names, 0), Counter[str]()
    listed = bounded.names(client, keys.run_pattern("*"))
    owned = ((keys.run_of(key.decode(errors="replace")), key) for key in listed)
    while batch := list(islice((one for one in owned if one[0] in sizes), BATCH)):
        asked = [key for run, key in batch if nums[run] < SAMPLED]
        found = dict(zip(asked, _num_bytes(client, asked), strict=True))
        for run, key in batch:
            sizes[run] += _plausible(key, found.get(key, sizes[run] // max(nums[run], 1)))
            nums[run] += 1
    return {run: min(size, runs.budget(client, [run])) for run, size in sizes.items()}


def _plausible(key: bytes, num_bytes: int) -> int:
    """Return the bytes of a run's key, at most what ddrl writes to it: a worker may write more to some."""
    kind, _, detail = key.partition(b"}:")[2].partition(b":")
    if kind in (b"experience", b"weights", b"checkpoint", b"initial"):
        return num_bytes
    return 0 if detail else min(num_bytes, WRITTEN_BYTES)


def _num_bytes(client: Redis, names: Sequence[bytes]) -> list[int]:
    """Return the bytes of at most BATCH keys.

    Exactly, as an estimate by samples is whatever a worker wants it to be; but of a longer one than ddrl writes an
    estimate, as the server would stand still to look at each member.
    """
    with client.pipeline(transaction=False) as pipe:
        for key in names:
            pipe.type(key)
        for key, kind in zip(names, pipe.execute(), strict=True):
            getattr(pipe, LENGTHS.get(kind, "exists"))(key)
        for key, length in zip(names, pipe.execute(raise_on_error=False), strict=True):
            is_short = isinstance(length, int) and length <= EXACT_LENGTH  # else of another type by now
            pipe.memory_usage(key, samples=0 if is_short else 5)
        return [size or 0 for size in pipe.execute()]  # None: deleted meanwhile


def delete_strays(client: Redis, dry_run: bool = False) -> tuple[int, int]:
    """Delete keys that ddrl does not read, though a worker's password suffices to write them.

    They are those of no run, heartbeats and evaluations of a command that do not expire soon, all of the broker's but
    the lists of queues that are served or that a run which has not ended waits in, and lists of these and of bad items
    that are longer than ddrl makes them, or that take no more of them.

    Returns:
        Number of these keys, and their bytes, of more than SAMPLED as by their mean.
    """
    states = [*_states(client)]
    queues = {queue for state in states if not state.ended for queue in (state.queue, state.evaluation_queue)}
    queues |= {queue for worker in workers.alive(client) for queue in worker.queues}
    served = {key for queue in queues for key in keys.lists(queue)}
    names, num, num_bytes = bounded.names(client, keys.ALL), 0, 0
    while batch := list(islice(names, BATCH)):
        texts = [name.decode(errors="replace") for name in batch]
        with client.pipeline(transaction=False) as pipe:
            for name, key in zip(batch, texts, strict=True):
                pipe.ttl(name)
                pipe.zscore(keys.RUNS, keys.run_of(key))
            replies = pipe.execute()

        def is_stray(key: str, left_s: int, created: float | None) -> bool:
            if key.startswith(keys.BROKER_PREFIX):
                return key not in served or _num_bytes(client, [key.encode()])[0] > BROKEN_BYTES
            if "{" in key:
                begin = keys.of_run(keys.run_of(key), "")
                is_for_a_command = key.startswith((f"{begin}players:", f"{begin}evaluations:"))
                lasts = is_for_a_command and not 0 <= left_s <= evaluations.TTL_S
                return created is None or not key.startswith(begin) or lasts
            if key.startswith(keys.worker("")):
                return not 0 <= left_s <= workers.TTL_S
            return key == keys.BROKEN and (
                _num_bytes(client, [key.encode()])[0] > BROKEN_BYTES
                or capped_streams.is_exhausted(client, key)
            )

        looks = zip(batch, texts, replies[::2], replies[1::2], strict=True)
        strays = [name for name, *look in looks if is_stray(*look)]
        found = sum(_num_bytes(client, strays)) if num < SAMPLED else len(strays) * num_bytes // num
        num, num_bytes = num + len(strays), num_bytes + found
        if strays and not dry_run:
            client.unlink(*strays)
    return num, num_bytes
