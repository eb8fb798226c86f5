"""Deleting a run: at once for all who look, and its keys one by one after that."""

from __future__ import annotations

from redis import Redis

from ddrl.store import keys, runs
from ddrl.store.connection import StoreError, call

DELETED_MS = 30 * 86_400_000  # for which a deleted run is known as such


def delete(client: Redis, run: str) -> int:
    """Remove an ended run with all its keys; the number of keys removed.

    Raises:
        StoreError: the run has not ended, or its learner is still at work.
        UnknownRunError: there is no such run.
    """
    now = runs.state(client, run)
    if not now.ended:
        raise StoreError(f"run {run}: is {now.status}; stop it first with `ddrl stop {run}`")
    if now.leased:
        raise StoreError(f"run {run}: its learner on {now.host} still writes its results; try again soon")
    script_keys = [keys.state(run), keys.lease(run), keys.RUNS, keys.OPEN, keys.DELETED]
    if not call(client, "delete_run", script_keys, [run, DELETED_MS, *runs.ENDED]):
        raise StoreError(f"run {run}: goes on again; stop it first with `ddrl stop {run}`")
    removed = 1
    for key in client.scan_iter(match=keys.run_pattern(run), count=1000):
        removed += client.unlink(key)
    return removed
