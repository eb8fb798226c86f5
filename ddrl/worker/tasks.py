"""The two tasks: play a segment, evaluate a version. Each is fetch, call one function, store."""

from __future__ import annotations

import _thread
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from ddrl import celery, policy
from ddrl.config import ConfigError, first_line
from ddrl.envs import requirements
from ddrl.envs.requirements import UnfitError
from ddrl.runs.evaluation import score
from ddrl.store import connection, evaluations, logs, runs, segments, workers
from ddrl.store.connection import Redis
from ddrl.store.segments import Process
from ddrl.worker.segment import Players, play
from ddrl.worker.watchdog import Watchdog, ends_without_memory

PAUSE_S = 1.0  # after a task that failed, before the process takes the next one
STORE_TIMEOUT_S = 60.0  # for storing a result during an outage of the server
IDLE_S = 0.25  # after a message that found no run to play
REFUSED_S = 30.0  # before a process tries a run again that it could not play
REPEAT_S = 30.0  # before the same warning is logged again
BEAT_S = 1.0  # between two reports that an evaluation is still played

log = logging.getLogger(__name__)
_local = threading.local()  # in a pool of threads each plays for itself


def _note_end(run: str, reason: str) -> None:
    segments.note_crash(connection.connect(), run, reason)


watchdog = Watchdog(_note_end, memory_bytes=celery.process_memory_bytes())


class Kept:
    """Connections and players that a thread keeps from task to task.

    Args:
        client, blocking: connections for commands, and for blocking reads.
    """

    def __init__(self, client: Redis, blocking: Redis) -> None:
        self.client, self.blocking = client, blocking
        self.players = Players(watch=watchdog)
        self.refused: dict[str, float] = {}  # run that cannot be played here -> until when it is left out
        self.logged: dict[str, float] = {}  # warning -> when it was logged


def kept() -> Kept:
    """Return what this thread keeps."""
    if not hasattr(_local, "kept"):
        _local.kept = Kept(connection.connect(), connection.connect_blocking())
    return cast(Kept, _local.kept)


@contextmanager
def failures_reported(mine: Kept, run: str, node: str) -> Iterator[None]:
    """Report an error of the block to the log, and to the run if there is one; then pause instead of raising it."""
    client, host = mine.client, socket.gethostname()
    try:
        with ends_without_memory():
            yield
    except runs.UnknownRunError:
        return  # deleted since the message was sent
    except connection.OUTAGES as error:
        if (text := connection.outage(error)) is None:
            text = f"the server refuses a command ({first_line(error)}); see the rights of the worker's user"
        _warn(mine.logged, run, text)
    except (UnfitError, ConfigError, connection.StoreError) as error:
        reason = str(error) if isinstance(error, UnfitError) else f"host {host}: {error}"
        _warn(mine.logged, run, reason)
        mine.refused[run] = time.monotonic() + REFUSED_S
        with suppress(*connection.OUTAGES):
            segments.note_refusal(client, run, host, reason)
    except Exception as error:
        mine.players.drop(run)
        reason = f"host {host}: {type(error).__name__}: {first_line(error)}; fix what the run plays"
        log.exception("run %s: %s", run, reason)
        with suppress(*connection.OUTAGES):
            segments.note_crash(client, run, reason)
            logs.add(client, run, f"worker {node}", "ERROR", reason)
    else:
        return
    time.sleep(PAUSE_S)


def _warn(logged: dict[str, float], run: str, text: str) -> None:
    """Log a warning, but not the same again within REPEAT_S."""
    if time.monotonic() - logged.get(text, -REPEAT_S) >= REPEAT_S:
        if len(logged) > 100:
            logged.clear()
        logged[text] = time.monotonic()
        log.warning("%s%s", f"run {run}: " if run else "", text)


@celery.app.task(name=celery.ROLLOUT, bind=True)  # type: ignore[untyped-decorator]
def rollout(self: Any, *_: object) -> dict[str, Any] | None:
    """Play one segment of the run that the server chooses; return run and steps, None if there was none to play.

    Arguments are ignored: a message of an earlier version of ddrl names a run.
    """
    mine, node = kept(), self.request.hostname or "-"
    names = os.environ.get(celery.QUEUES_VARIABLE)
    served = names.split(",") if names else celery.queues("rollout")
    run = None
    with failures_reported(mine, "", node):
        mine.players.report_end(mine.client)
        run = segments.choose(
            mine.client,
            Process.this(node),
            served,
            task=self.request.id or "",
            limit_s=(self.request.timelimit or (None,))[0],
            cannot_play=[one for one, until in mine.refused.items() if time.monotonic() < until],
        )
    if run is None:  # there is none for this process, or the server has an outage
        time.sleep(IDLE_S)
    if not run:
        return None
    steps = 0
    with failures_reported(mine, run, node):
        # Events show the run as the argument of the task, whose message names none. The thread is not started by
        # `Thread.start`, which waits for ever for one that finds no memory.
        event = {"uuid": self.request.id, "args": repr((run,))}
        _thread.start_new_thread(celery.show, (self.request.hostname, "task-started"), event)
        steps = play(mine.client, mine.blocking, mine.players, run, node=node, serves=served.__contains__)
    return {"run": run, "steps": steps}


@celery.app.task(name=celery.EVALUATE, bind=True)  # type: ignore[untyped-decorator]
def evaluate(self: Any, run: str, message: str) -> bool:
    """Play an open evaluation of a run or of a command; return whether its result was stored.

    One of a run that could not be played here is left to others for a while.
    """
    mine, stored = kept(), False
    if time.monotonic() < mine.refused.get(run, 0.0):
        return False
    with failures_reported(mine, run, self.request.hostname or "-"):
        stored = play_evaluation(mine.client, run, message, node=self.request.hostname or "-")
    return stored


class Withdrawn(Exception):
    """The evaluation being played was withdrawn, another worker plays it, or this one leaves."""


def play_evaluation(client: Redis, run: str, message: str, *, node: str = "-") -> bool:
    """Play an open evaluation and store its result; return False if there is nothing to do, or a command's fails.

    Where the worker, named `node`, leaves, the evaluation is sent again for another one.
    The reason of a failure is noted with the evaluation. An error in one of the run's own is also raised, unless only
    its weights are gone.
    """
    player = secrets.token_hex(8)
    beat_at = time.monotonic() + BEAT_S

    def beat() -> None:
        nonlocal beat_at
        watchdog.step()
        if time.monotonic() < beat_at:
            return
        beat_at = time.monotonic() + BEAT_S
        with watchdog.paused(), suppress(*connection.OUTAGES):  # the result can wait for the server
            if evaluations.take(client, run, message, player) is None:
                raise Withdrawn
            if workers.is_draining(client, node, int(os.environ.get(celery.PID_VARIABLE) or os.getpid())):
                evaluations.fail(client, run, message, "")
                celery.send_evaluation(run, message, runs.state(client, run).evaluation_queue)
                raise Withdrawn

    try:
        if (evaluation := evaluations.take(client, run, message, player)) is None:
            return False
        config = runs.config(client, run)
        requirements.check_machine(config, runs.state(client, run).versions)
        loaded = policy.from_run(client, run, evaluation.version)
        with watchdog.watch(run, config.env.id, config.rollout.step_timeout_s):
            result = score(
                loaded,
                evaluation.seeds,
                num_envs=evaluation.num_envs,
                epsilon=evaluation.epsilon,
                noop_max=evaluation.noop_max,
                opponent=evaluation.opponent,
                on_step=beat,
            )
    except Withdrawn:
        return False
    except connection.OUTAGES:
        raise
    except Exception as error:
        evaluations.fail(client, run, message, f"{type(error).__name__}: {' '.join(str(error).split())}")
        if evaluations.is_of_run(message) and not isinstance(error, policy.NoWeightsError):
            raise
        time.sleep(PAUSE_S)  # other workers may do better with what is left
        return False
    return connection.retry(
        lambda: evaluations.finish(client, run, message, evaluation, result), timeout_s=STORE_TIMEOUT_S
    )
