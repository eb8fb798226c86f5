"""The two tasks: play a segment, evaluate a version. Each is fetch, call one function, store."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from ddrl import codec
from ddrl.algorithms import base
from ddrl.celery import EVALUATE, ROLLOUT, app
from ddrl.evaluation import evaluate as play_episodes
from ddrl.segment import Players, play
from ddrl.store import connection, evaluations, messages, runs, weights

if TYPE_CHECKING:
    from redis import Redis

CRASH_PAUSE_S = 1.0  # between a failed task and the next, so that a broken run cannot spin

players = Players()


@functools.cache
def clients() -> tuple[Redis, Redis]:
    """This process's connections: for commands, and for blocking reads."""
    return connection.connect(), connection.connect_blocking()


@app.task(name=ROLLOUT)  # type: ignore[untyped-decorator]
def rollout(run: str) -> int:
    """Play one segment of a run; the transitions appended."""
    client, blocking = clients()
    messages.taken(client, run)
    try:
        return play(client, blocking, players, run)
    except connection.UNREACHABLE:
        raise
    except Exception as error:
        players.drop(run)
        runs.note_error(client, run, f"{type(error).__name__}: {error}")
        time.sleep(CRASH_PAUSE_S)
        raise


@app.task(name=EVALUATE)  # type: ignore[untyped-decorator]
def evaluate(run: str, evaluation_id: str) -> bool:
    """Play an open evaluation and store its result; False if there was nothing left to do."""
    client, _ = clients()
    wanted = evaluations.get_open(client, run, evaluation_id)
    blob = weights.get(client, run, wanted.version) if wanted else None
    if wanted is None or blob is None:
        return False
    config = runs.config(client, run)
    policy = base.resolve(config, runs.spaces(client, run)).policy()
    policy.load(codec.decode_weights(blob))
    num_envs = config.evaluation.num_envs
    result = play_episodes(policy, config.env, wanted.seeds, num_envs=num_envs, policy_version=wanted.version)
    return evaluations.finish(client, run, wanted, result)
