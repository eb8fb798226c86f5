"""The long-lived learner process: takes a run, wires learner and fleet, ends it and leaves its folder behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddrl import artifacts, celery, envs, evaluation, policy
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.envs import EnvError
from ddrl.fleet import Dispatcher, Progress, Referee
from ddrl.learner import Learner
from ddrl.store import connection, evaluations, lease, runs, weights
from ddrl.store.connection import StoreError

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

TICK_S = 0.05
STATUS_S = 0.25
LEASE_WAIT_S = 3 * lease.TTL_MS / 1e3


class Interrupt:
    """A wish to end, from SIGTERM or SIGINT: the run stays active for the next learner."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def install(self) -> None:
        """Take over both signals; a second one ends the process at once."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, _: object) -> None:
        if self.event.is_set():
            os._exit(128 + signum)
        self.event.set()


def serve(client: Redis, folder: Path, interrupt: Interrupt, *, poll_s: float = 1.0) -> None:
    """Learn whatever runs wait for a learner, one after another, until interrupted."""
    log.info("waits for runs")
    while not interrupt.event.is_set():
        try:
            for run in runs.names(client):
                now = runs.state(client, run)
                if now.status == "active" and not now.leased:
                    _learn_or_tell(client, run, folder, interrupt)
        except connection.UNREACHABLE as error:
            log.warning("the server does not answer (%s); waiting for it", error)
        except runs.UnknownRunError:
            log.info("a run was deleted meanwhile")
        interrupt.event.wait(poll_s)


def _learn_or_tell(client: Redis, run: str, folder: Path, interrupt: Interrupt) -> None:
    """Learn a run; what ends it here must not end the service for the others."""
    try:
        learn(client, run, folder, interrupt, wait_s=0.0)
    except connection.UNREACHABLE:
        raise
    except Exception as error:
        log.error("%s: %s", run, error, exc_info=not isinstance(error, (StoreError, ConfigError)))


def learn(
    client: Redis, run: str, folder: Path, interrupt: Interrupt, *, wait_s: float = LEASE_WAIT_S
) -> str | None:
    """Learn one run until it ends, is taken over, or this process is told to stop.

    Args:
        client: connection of the service thread.
        run: an active run.
        folder: the run's artifacts go to `folder / run`.
        interrupt: the process's wish to end.
        wait_s: for the lease of a learner that may have died.

    Returns:
        The status with which the run ended; None when it goes on without this learner.

    Raises:
        StoreError: the run is not active, or another learner holds it.
    """
    token = _take(client, run, folder / run, interrupt, wait_s)
    if token is None:
        return None
    try:
        return _Session(client, run, token, folder / run, interrupt).go()
    finally:
        with contextlib.suppress(*connection.UNREACHABLE):  # then it expires
            lease.release(client, run, token)


def _take(client: Redis, run: str, folder: Path, interrupt: Interrupt, wait_s: float) -> int | None:
    """The lease's token; None when the process is told to end."""
    deadline = time.monotonic() + wait_s
    while not interrupt.event.is_set():
        now = runs.state(client, run)
        if now.status != "active":
            raise StoreError(f"run {run}: is {now.status}, not active; continue it with `ddrl resume {run}`")
        token = lease.acquire(client, run, host=socket.gethostname(), folder=str(folder.resolve()))
        if token is not None:
            return token
        if time.monotonic() > deadline:
            raise StoreError(f"run {run}: held by the learner on {now.host}; stop that one first")
        interrupt.event.wait(0.25)
    return None


class _Session:
    """One learner's time with one run: the training thread, the service thread, the end."""

    def __init__(self, client: Redis, run: str, token: int, folder: Path, interrupt: Interrupt) -> None:
        self._client, self._run, self._token = client, run, token
        self._folder, self._interrupt = folder, interrupt
        self._config: RunConfig = runs.config(client, run)
        self._end: tuple[str, str] | None = None  # (status, reason)
        self._error: Exception | None = None
        self._status_at = self._tick_at = 0.0

    def go(self) -> str | None:
        """Learn to the end; the status of the run, None when it goes on without this learner."""
        try:
            self._wire()
            self._learner.pinned = self._referee.pinned
            self._learner.restore()
        except lease.LeaseLostError:
            raise
        except (ConfigError, StoreError, ValueError) as error:
            self._set_status("failed", str(error))
            raise
        service = threading.Thread(target=self._serve, name="service", daemon=True)
        service.start()
        try:
            self._learner.train()
        except Exception as error:
            self._error = self._error or error
        finally:
            self._learner.stopping.set()
            service.join()
        return self._close()

    def _wire(self) -> None:
        config, run = self._config, self._run
        device = choose_device(config.learner.device)
        torch.set_num_threads(config.learner.num_threads)
        resolved = base.resolve(config, runs.spaces(self._client, run))
        self._learner = Learner(
            self._client,
            connection.connect_blocking(),
            run,
            self._token,
            config,
            resolved,
            device=device,
        )
        rollouts = envs.queue_for(celery.ROLLOUT, config.env.id)
        evaluating = envs.queue_for(celery.EVALUATE, config.env.id)
        send: Callable[[], None] = lambda: celery.send_rollout(run, rollouts)  # noqa: E731
        self._dispatcher = Dispatcher(self._client, run, weight=config.weight, queue=rollouts, send=send)
        self._referee = Referee(
            self._client,
            run,
            self._token,
            config.evaluation,
            config.stop,
            send=lambda evaluation_id: celery.send_evaluation(run, evaluation_id, evaluating),
        )
        log.info("learns %s on %s", run, device)

    def _serve(self) -> None:
        """The service thread: tell the server, keep the fleet busy, notice the end."""
        failing_since = 0.0
        while not self._learner.stopping.is_set():
            self._learner.due.wait(TICK_S)
            self._learner.due.clear()
            try:
                self._tick()
                if failing_since:
                    log.info("the server answers again after %.0f s", time.monotonic() - failing_since)
                failing_since = 0.0
            except connection.UNREACHABLE as error:
                if not failing_since:
                    failing_since = time.monotonic()
                    log.warning("the server does not answer (%s); waiting for it", error)
                if self._interrupt.event.is_set():
                    self._learner.stopping.set()
            except Exception as error:
                self._error = error
                self._learner.stopping.set()

    def _tick(self) -> None:
        learner, now = self._learner, time.monotonic()
        learner.pinned = self._referee.pinned
        learner.serve()
        if now < self._tick_at:  # woken for a publication alone
            return
        self._tick_at = now + TICK_S
        if now >= self._status_at:
            status = runs.status(self._client, self._run)
            if status == "active":
                self._dispatcher.tick()
            elif status == "paused":
                learner.skip(STATUS_S)
            else:
                learner.stopping.set()
            self._status_at = now + STATUS_S
        returns = list(learner.returns)
        self._referee.tick(
            Progress(
                version=learner.version,
                return_mean=sum(returns) / len(returns) if len(returns) == learner.returns.maxlen else None,
                env_steps=learner.num_steps,
                updates=learner.num_updates,
            )
        )
        self._end = self._reached()
        if self._end or self._interrupt.event.is_set():
            learner.stopping.set()

    def _set_status(self, status: str, reason: str) -> None:
        runs.set_status(self._client, self._run, status, reason, token=self._token)

    def _reached(self) -> tuple[str, str] | None:
        """The condition of `stop` that holds now."""
        stop, learner = self._config.stop, self._learner
        if self._referee.solved:
            return "solved", f"return {stop.return_:g} confirmed"
        if stop.time is not None and learner.elapsed_s >= stop.time:
            return "time", f"time limit of {stop.time:g} s"
        if stop.env_steps is not None and learner.num_steps >= stop.env_steps:
            return "time", f"limit of {stop.env_steps} env steps"
        if stop.updates is not None and learner.num_updates >= stop.updates:
            return "time", f"limit of {stop.updates} updates"
        return None

    def _close(self) -> str | None:
        """Save everything, set the status, write the folder."""
        if isinstance(self._error, lease.LeaseLostError):
            log.error("%s", self._error)
            raise self._error
        if self._end is not None:  # before anything slow: players stop at once
            self._set_status(*self._end)
        elif self._error is not None:
            self._set_status("failed", f"{type(self._error).__name__}: {self._error}")
        self._learner.finish()
        status = runs.status(self._client, self._run)
        if self._error is not None:
            raise self._error
        if status is None or status in ("active", "paused"):
            log.info("leaves %s %s for the next learner", self._run, status)
            return None
        if status == "time":
            self._evaluate_last()
        self._write()
        log.info("%s: %s", self._run, status)
        return status

    def _evaluate_last(self) -> None:
        """Evaluate what a limit left behind, here, unless it was evaluated already."""
        version, config = weights.index(self._client, self._run).latest, self._config.evaluation
        if version < 1 or any(
            row["version"] == version for row in evaluations.results(self._client, self._run)[0]
        ):
            return
        try:
            player = policy.from_run(self._client, self._run, version)
            wanted = evaluations.OpenEvaluation(
                version=version,
                first_seed=config.seed,
                num_episodes=config.num_episodes,
                purpose="watch",
                sent_ms=runs.server_ms(self._client),
                env_steps=self._learner.num_steps,
                updates=self._learner.num_updates,
            )
            evaluations.open_(self._client, self._run, self._token, wanted)
            result = evaluation.evaluate(
                player.policy,
                player.env,
                player.spaces,
                wanted.seeds,
                num_envs=config.num_envs,
                policy_version=version,
                epsilon=player.policy.evaluation_epsilon,
            )
        except EnvError as error:
            log.warning("the last version is not evaluated: %s", error)
            return
        evaluations.finish(self._client, self._run, wanted, result)
        self._referee.keep_best(evaluations.results(self._client, self._run)[0][-1])

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stored = weights.index(self._client, self._run)
        evaluated = runs.state(self._client, self._run).evaluation
        version = evaluated["version"] if evaluated else stored.latest
        policy.save(self._client, self._run, version, self._folder / "policy.safetensors")
        artifacts.write(self._client, self._run, self._folder)


def choose_device(name: str) -> torch.device:
    """The torch device of a config's `learner.device`.

    Raises:
        ConfigError: it is not on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"learner.device: {name!r} is not on this machine; use auto or cpu") from None
    return device
