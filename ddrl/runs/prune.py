"""Deletes ended runs from the server: by age, and by the bytes that they take together."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ddrl.store import keys, runs
from ddrl.store.connection import StoreError

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

EVERY_S = 600.0
BATCH = 500  # keys in one request for their sizes


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
    """Prunes every `every_s` seconds, in a process that stays.

    Args:
        older_than_s, max_bytes: as in `prune`.
        every_s: time between two rounds.
    """

    def __init__(
        self, older_than_s: float | None, max_bytes: int | None, *, every_s: float = EVERY_S
    ) -> None:
        self._older_than_s, self._max_bytes, self._every_s = older_than_s, max_bytes, every_s
        self._next = 0.0

    def apply(self, client: Redis) -> list[Pruned]:
        """Prune if it is time; return what was deleted."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + self._every_s
        return prune(client, self._older_than_s, self._max_bytes)


def prune(
    client: Redis, older_than_s: float | None, max_bytes: int | None, dry_run: bool = False
) -> list[Pruned]:
    """Delete ended runs that are too old, then the oldest ones until the rest fits.

    A run that is active, paused, or still held by its learner, which writes its results, is never deleted.

    Args:
        client: connection to the server.
        older_than_s: runs that ended longer ago are deleted; None: age does not matter.
        max_bytes: that all ended runs together may take; None: no limit.
        dry_run: delete nothing.

    Returns:
        What was deleted, or would be, in the order in which the runs ended.
    """
    ended = _ended(client)
    if not ended:
        return []
    sizes = _sizes(client, [state.run for state in ended])
    now_s, total = runs.server_ms(client) / 1e3, sum(sizes.values())
    deleted: list[Pruned] = []
    for state in sorted(ended, key=lambda state: state.ended_s):
        size = sizes[state.run]
        if older_than_s is not None and now_s - state.ended_s > older_than_s:
            reason = "too old"
        elif max_bytes is not None and total > max_bytes:
            reason = f"ended runs take {total / 1e6:.1f} MB, more than {max_bytes / 1e6:.1f} MB"
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


def _ended(client: Redis) -> list[runs.RunState]:
    """Return the states of the runs that may be deleted."""
    found = []
    for run in runs.names(client):
        try:
            state = runs.state(client, run)
        except runs.UnknownRunError:  # deleted meanwhile
            continue
        if state.ended and not state.leased:
            found.append(state)
    return found


def _sizes(client: Redis, names: Iterable[str]) -> dict[str, int]:
    """Return the bytes that each run's keys take, as the server estimates them."""
    sizes = dict.fromkeys(names, 0)
    run_of = re.compile(re.escape(keys.of_run("*", "*")).replace(r"\*", "(.+?)", 1).replace(r"\*", ".*"))
    found = []
    for key in client.scan_iter(match=keys.run_pattern("*"), count=1000):
        match = run_of.fullmatch(key.decode(errors="replace"))
        if match is not None and match[1] in sizes:
            found.append((match[1], key))
    for begin in range(0, len(found), BATCH):
        batch = found[begin : begin + BATCH]
        with client.pipeline(transaction=False) as pipe:
            for _, key in batch:
                pipe.memory_usage(key)
            for (run, _), size in zip(batch, pipe.execute(), strict=True):
                sizes[run] += cast("int | None", size) or 0  # None: deleted meanwhile
    return sizes
