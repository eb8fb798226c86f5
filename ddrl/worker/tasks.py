"""The two tasks: play a segment, evaluate a version. Each is fetch, call one function, store."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ddrl import policy
from ddrl.celery import EVALUATE, ROLLOUT, app, process_memory_bytes, queues
from ddrl.config import ConfigError, RunConfig, first_line
from ddrl.envs import versions
from ddrl.envs.versions import UnfitError
from ddrl.runs.evaluation import evaluate as play_episodes
from ddrl.runs.evaluation import with_noops
from ddrl.store import connection, evaluations, logs, requests, runs, segments
from ddrl.worker.heartbeat import without_spaces
from ddrl.worker.segment import Players, play
from ddrl.worker.watchdog import Watchdog

if TYPE_CHECKING:
    from redis import Redis

T = TypeVar("T")

PAUSE_S = 1.0  # between a task that could not be played and the next, so that none of them spins
PATIENCE_S = 60.0  # for storing what was played, while the server cannot take it
REPEAT_S = 30.0  # before the same warning is logged again
SIGN_EVERY_S = 3.0  # of life, while a request is played

_SERVED = frozenset(queues("rollout"))

log = logging.getLogger(__name__)
_mine = threading.local()  # of a thread: in a pool of threads each plays for itself


def clients() -> tuple[Redis, Redis]:
    """This thread's connections: for commands, and for blocking reads."""
    if not hasattr(_mine, "clients"):
        _mine.clients = connection.connect(), connection.connect_blocking()
    return _mine.clients  # type: ignore[no-any-return]


def players() -> Players:
    """This thread's players."""
    if not hasattr(_mine, "players"):
        _mine.players = Players(watch=watchdog)
    return _mine.players  # type: ignore[no-any-return]


def _note_end(run: str, reason: str) -> None:
    segments.note_crash(connection.connect(), run, reason)


watchdog = Watchdog(_note_end, memory_bytes=process_memory_bytes())


@contextmanager
def plainly(client: Redis, run: str, node: str) -> Iterator[None]:
    """Let a task end in order whatever hinders it: say why where people look, and pause."""
    host = socket.gethostname()
    try:
        yield
    except runs.UnknownRunError:
        return  # deleted since the message was sent
    except connection.OUTAGES as error:
        if (text := connection.outage(error)) is None:
            text = f"the server refuses a command ({first_line(error)}); see the rights of the worker's user"
        _warn(run, text)
    except (UnfitError, ConfigError, connection.StoreError) as error:
        reason = str(error) if isinstance(error, UnfitError) else f"host {host}: {error}"
        _warn(run, reason)
        with suppress(*connection.OUTAGES):
            segments.note_refusal(client, run, host, reason)
    except Exception as error:
        players().drop(run)
        reason = f"host {host}: {type(error).__name__}: {first_line(error)}; fix what the run plays"
        log.exception("run %s: %s", run, reason)
        with suppress(*connection.OUTAGES):
            segments.note_crash(client, run, reason)
            logs.add(client, run, f"worker {node}", "ERROR", reason)
    else:
        return
    time.sleep(PAUSE_S)


def _warn(run: str, text: str) -> None:
    """Log a warning, but not the same again within REPEAT_S."""
    said: dict[str, float] = _mine.__dict__.setdefault("said", {})
    if time.monotonic() - said.get(text, -REPEAT_S) >= REPEAT_S:
        if len(said) > 100:
            said.clear()
        said[text] = time.monotonic()
        log.warning("run %s: %s", run, text)


@app.task(name=ROLLOUT, bind=True)  # type: ignore[untyped-decorator]
def rollout(self: Any, run: str) -> int:
    """Play one segment of a run; the transitions appended."""
    client, blocking = clients()
    node = without_spaces(self.request.hostname or "-")
    appended = 0
    with plainly(client, run, node):
        segments.begin(client, run)
        appended = play(client, blocking, players(), run, node=node, serves=_SERVED.__contains__)
    return appended


@app.task(name=EVALUATE, bind=True)  # type: ignore[untyped-decorator]
def evaluate(self: Any, run: str, evaluation_id: str) -> bool:
    """Play an open evaluation or request and store its result; False if there was nothing left to do."""
    client, _ = clients()
    stored = False
    with plainly(client, run, without_spaces(self.request.hostname or "-")):
        if requests.is_request(evaluation_id):
            stored = answer(client, run, evaluation_id)
        else:
            stored = score(client, run, evaluation_id)
    return stored


def score(client: Redis, run: str, evaluation_id: str) -> bool:
    """Play an open evaluation and store its result."""
    wanted = evaluations.get_open(client, run, evaluation_id)
    if wanted is None:
        return False
    config = fitting(client, run)
    with watchdog.watch(run, config.env.id, config.rollout.step_timeout_s):
        player = policy.from_run(client, run, wanted.version)
        result = play_episodes(
            player.policy,
            player.env,
            player.spaces,
            wanted.seeds,
            num_envs=player.config.evaluation.num_envs,
            policy_version=wanted.version,
            epsilon=player.policy.evaluation_epsilon,
            on_step=watchdog.step,
        )
    return patiently(lambda: evaluations.finish(client, run, wanted, result))


def fitting(client: Redis, run: str) -> RunConfig:
    """The run's config, if this machine plays it as its submitter would.

    Raises:
        UnknownRunError, ConfigError: it is gone, or of another version of ddrl.
        UnfitError: it does not.
    """
    config = runs.config(client, run)
    versions.check(config, runs.state(client, run).versions)
    return config


def patiently(store: Callable[[], T]) -> T:
    """What `store` gives, called again while the server cannot serve, for PATIENCE_S.

    Raises:
        RedisError: it could not all that time, or waiting does not help.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return store()
        except connection.OUTAGES as error:
            if connection.outage(error) is None or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)


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
        watchdog.step()
        if time.monotonic() >= sign_at:
            if requests.take(client, run, request_id, me) is None:
                raise Withdrawn
            sign_at = time.monotonic() + SIGN_EVERY_S

    try:
        wanted = requests.take(client, run, request_id, me)
        if wanted is None:
            return False
        config = fitting(client, run)
        with watchdog.watch(run, config.env.id, config.rollout.step_timeout_s):
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
    except connection.OUTAGES:
        raise
    except Exception as error:  # the asker plays it then, and says why
        time.sleep(PAUSE_S)  # others may do better with what is left
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        given = requests.Answer(number, (), (), reason)
    return patiently(lambda: requests.answer(client, run, request_id, given))
