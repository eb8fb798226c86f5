"""A light stand-in for learners: takes every active run, lets it play and dispatches for it, but learns nothing.

    python tests/support/dispatching.py WEIGHTS

Runs may append `replay.warmup_steps`; all get the version 0 that is in the file WEIGHTS.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from redis import Redis

from ddrl import celery
from ddrl.learner.dispatcher import Dispatcher
from ddrl.store import connection, leases, runs, weights


def dispatch(run: str, token: int, blob: bytes) -> None:
    """Dispatch for a run until it ends, as a learner's service thread does."""
    client, config = connection.connect(), runs.config(connection.connect(), run)
    allowance = config.replay.warmup_steps
    weights.publish(client, run, token, version=0, blob=blob, allowance=allowance, updates=0)
    dispatcher = Dispatcher(client, run, token, config.rollout, send=celery.send_rollout)
    renew_at = 0.0
    while (status := runs.status(client, run)) in ("active", "paused"):
        if time.monotonic() >= renew_at:
            leases.renew(client, run, token)
            renew_at = time.monotonic() + 0.75
        if status == "active":
            dispatcher.tick()
        time.sleep(0.1)


def serve(client: Redis, blob: bytes) -> None:
    while True:
        for run in runs.active_names(client):
            token = leases.acquire(client, run, host="stand-in", folder="-")
            if token is not None:
                threading.Thread(target=dispatch, args=(run, token, blob), daemon=True).start()
        time.sleep(0.05)


if __name__ == "__main__":
    serve(connection.connect(), Path(sys.argv[1]).read_bytes())
