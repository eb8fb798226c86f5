"""Retention of ended runs on the server: by age, and by the bytes that they take together."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ddrl.store import deletion, keys, runs
from ddrl.store.connection import StoreError

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

EVERY_S = 600.0
BATCH = 500  # keys asked for their size at once


@dataclass(frozen=True)
class Pruned:
    """An ended run that goes, or would go.

    Attributes:
        run: its id.
        status: how it ended.
        ended_s: when, server's clock.
        num_bytes: that its keys take in the server.
        reason: why it goes.
    """

    run: str
    status: str
    ended_s: float
    num_bytes: int
    reason: str


class Retention:
    """Prunes again and again, for a process that stays.

    Args:
        older_than_s, max_bytes: as `prune` takes them.
        every_s: time between two rounds.
    """

    def __init__(
        self, older_than_s: float | None, max_bytes: int | None, *, every_s: float = EVERY_S
    ) -> None:
        self._older_than_s, self._max_bytes, self._every_s = older_than_s, max_bytes, every_s
        self._next = 0.0

    def apply(self, client: Redis) -> list[Pruned]:
        """Prune where it is time to; what went."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + self._every_s
        return prune(client, self._older_than_s, self._max_bytes)


def prune(
    client: Redis, older_than_s: float | None, max_bytes: int | None, dry_run: bool = False
) -> list[Pruned]:
    """Delete ended runs that are too old, then the oldest until the rest fits; never one that goes on or is paused.

    A run whose learner still holds it, to write its results, stays too, and so does one that is resumed meanwhile.

    Args:
        client: connection to the server.
        older_than_s: runs that ended longer ago go; None: whatever their age.
        max_bytes: what all ended runs together may take; None: however much.
        dry_run: delete nothing.

    Returns:
        What went, or would go: the first to have ended first.
    """
    ended = _ended(client)
    if not ended:
        return []
    sizes = _sizes(client, [state.run for state in ended])
    now_s, total = runs.server_ms(client) / 1e3, sum(sizes.values())
    gone: list[Pruned] = []
    for state in sorted(ended, key=lambda state: state.ended_s):
        age_s, size = now_s - state.ended_s, sizes[state.run]
        if older_than_s is not None and age_s > older_than_s:
            reason = "too old"
        elif max_bytes is not None and total > max_bytes:
            reason = f"ended runs take {total / 1e6:.1f} MB, more than {max_bytes / 1e6:.1f} MB"
        else:
            continue
        if not dry_run and not _deleted(client, state.run):
            continue
        total -= size
        gone.append(Pruned(state.run, state.status, state.ended_s, size, reason))
    return gone


def _ended(client: Redis) -> list[runs.RunState]:
    """States of the runs that may go."""
    found = []
    for run in runs.names(client):
        try:
            state = runs.state(client, run)
        except runs.UnknownRunError:  # deleted meanwhile
            continue
        if state.ended and not state.leased:
            found.append(state)
    return found


def _deleted(client: Redis, run: str) -> bool:
    try:
        deletion.delete(client, run)
    except StoreError as error:  # resumed or deleted meanwhile
        log.info("%s", error)
        return False
    log.info("%s: pruned", run)
    return True


def _sizes(client: Redis, names: Iterable[str]) -> dict[str, int]:
    """Bytes that each run's keys take, as the server estimates them."""
    sizes = dict.fromkeys(names, 0)
    run_of = re.compile(re.escape(keys.of_run("*", "*")).replace(r"\*", "(.+?)", 1).replace(r"\*", ".*"))
    batch: list[tuple[str, bytes]] = []

    def add_up() -> None:
        with client.pipeline(transaction=False) as pipe:
            for _, key in batch:
                pipe.memory_usage(key)
            for (run, _), size in zip(batch, pipe.execute(), strict=True):
                sizes[run] += cast("int | None", size) or 0
        batch.clear()

    for key in client.scan_iter(match=keys.run_pattern("*"), count=1000):
        found = run_of.fullmatch(key.decode(errors="replace"))
        if found is not None and found[1] in sizes:
            batch.append((found[1], key))
        if len(batch) >= BATCH:
            add_up()
    add_up()
    return sizes
