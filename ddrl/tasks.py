"""The two tasks: play a segment, evaluate a version. Each is fetch, call one function, store."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddrl import policy
from ddrl.celery import EVALUATE, ROLLOUT, app
from ddrl.evaluation import evaluate as play_episodes
from ddrl.segment import Players, play
from ddrl.store import connection, evaluations, messages, runs

if TYPE_CHECKING:
    from redis import Redis

CRASH_PAUSE_S = 1.0  # between a failed task and the next, so that a broken run cannot spin

players = Players()


@functools.cache
def clients() -> tuple[Redis, Redis]:
    """This process's connections: for commands, and for blocking reads."""
    return connection.connect(), connection.connect_blocking()


@contextmanager
def reporting(client: Redis, run: str) -> Iterator[None]:
    """Tell the run's state why it could not be played here, and give the server a moment."""
    try:
        yield
    except connection.UNREACHABLE:
        raise
    except Exception as error:
        players.drop(run)
        runs.note_error(client, run, f"{type(error).__name__}: {error}")
        time.sleep(CRASH_PAUSE_S)
        raise


@app.task(name=ROLLOUT)  # type: ignore[untyped-decorator]
def rollout(run: str) -> int:
    """Play one segment of a run; the transitions appended."""
    client, blocking = clients()
    messages.taken(client, run)
    with reporting(client, run):
        return play(client, blocking, players, run)


@app.task(name=EVALUATE)  # type: ignore[untyped-decorator]
def evaluate(run: str, evaluation_id: str) -> bool:
    """Play an open evaluation and store its result; False if there was nothing left to do."""
    client, _ = clients()
    wanted = evaluations.get_open(client, run, evaluation_id)
    if wanted is None:
        return False
    with reporting(client, run):
        player = policy.from_run(client, run, wanted.version)
        result = play_episodes(
            player.policy,
            player.env,
            player.spaces,
            wanted.seeds,
            num_envs=player.config.evaluation.num_envs,
            policy_version=wanted.version,
        )
        return evaluations.finish(client, run, wanted, result)
