"""The two tasks: play a segment, evaluate a version. Each is fetch, call one function, store."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddrl import policy
from ddrl.celery import EVALUATE, ROLLOUT, app
from ddrl.evaluation import evaluate as play_episodes
from ddrl.evaluation import with_noops
from ddrl.segment import Players, play
from ddrl.store import connection, evaluations, messages, requests, runs

if TYPE_CHECKING:
    from redis import Redis

CRASH_PAUSE_S = 1.0  # between a failed task and the next, so that a broken run cannot spin
SIGN_EVERY_S = 3.0  # of life, while a request is played

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
    """Play an open evaluation or request and store its result; False if there was nothing left to do."""
    client, _ = clients()
    if requests.is_request(evaluation_id):
        return answer(client, run, evaluation_id)
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
            epsilon=player.policy.evaluation_epsilon,
        )
        return evaluations.finish(client, run, wanted, result)


class Withdrawn(Exception):
    """Nobody waits any more for what is being played."""


def answer(client: Redis, run: str, request_id: str) -> bool:
    """Play a request and answer it, be it with the reason why it cannot be played here."""
    number = requests.number_of(request_id)
    if number is None:
        return False
    me = secrets.token_hex(8)
    sign_at = time.monotonic() + SIGN_EVERY_S

    def give_sign() -> None:
        nonlocal sign_at
        if time.monotonic() >= sign_at:
            if requests.take(client, run, request_id, me) is None:
                raise Withdrawn
            sign_at = time.monotonic() + SIGN_EVERY_S

    try:
        wanted = requests.take(client, run, request_id, me)
        if wanted is None:
            return False
        player = policy.from_run(client, run, wanted.version)
        result = play_episodes(
            player.policy,
            with_noops(player.env, wanted.noop_max),
            player.spaces,
            wanted.seeds,
            num_envs=wanted.num_envs,
            policy_version=wanted.version,
            epsilon=wanted.epsilon,
            on_step=give_sign,
        )
        given = requests.Answer(number, result.returns, result.lengths)
    except Withdrawn:
        return False
    except connection.UNREACHABLE:
        raise
    except Exception as error:  # the asker plays it then, and says why
        time.sleep(CRASH_PAUSE_S)  # others may do better with what is left
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        given = requests.Answer(number, (), (), reason)
    return requests.answer(client, run, request_id, given)
