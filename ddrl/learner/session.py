"""One learner's time with one run: the training thread, the service thread, the end."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddrl import celery
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.learner import preparation
from ddrl.learner.dispatcher import Dispatcher
from ddrl.learner.evaluations import EvaluationScheduler, Progress
from ddrl.learner.loop import Learner
from ddrl.replay.fifo import Fifo
from ddrl.replay.replay import Replay
from ddrl.runs import artifacts
from ddrl.store import checkpoints, connection, copies, logs, runs, seeds, weights
from ddrl.store import leases as lease
from ddrl.store.connection import Outage, StoreError

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

TICK_S = 0.05
DISPATCH_S = 0.1
STATUS_S = 0.25
RETRY_S = 1.0
GONE = (lease.RunGoneError, runs.UnknownRunError)
LOOK_S = 10.0  # between two looks at what the server knows of the run
SILENT_S = 120.0  # of the service thread: the learner hangs; longer than redis-py tries a command


@dataclass(frozen=True)
class Rescued:
    """What a learner holds of a run that its server has lost: all but what it had not read, and figures."""

    seed: seeds.Seed
    experience: Replay | Fifo


class Session:
    """One learner's time with one run.

    Args:
        client: connection of the service thread.
        run: its id.
        token: fencing token of the lease, which stays held until `go` returns or raises.
        folder: the run's.
        interrupted: the process is to end; the run stays active for the next learner.
        rescued: by this learner's last session with the run, whose server has lost it.
    """

    def __init__(
        self,
        client: Redis,
        run: str,
        token: int,
        folder: Path,
        interrupted: threading.Event,
        rescued: Rescued | None = None,
    ) -> None:
        self._client, self._run, self._token = client, run, token
        self._folder, self._interrupted = folder, interrupted
        self._known = seeds.known(client, run)
        self._config: RunConfig = runs.config(client, run)
        self._config_version = int(self._known.state.get("config_version", 0))
        self._copier = copies.Copier(folder)
        self._leaving = contextlib.ExitStack()
        self._outage = Outage(client)
        self._status, self._asker = "active", ""  # and who asked for the run
        self._end: tuple[str, str] | None = None  # (status, reason)
        self._error: Exception | None = None
        self._given = rescued
        self._status_at = self._dispatch_at = self._tick_at = 0.0
        self._heard_at: float | None = None  # of the service thread; None where there is none
        self._look_at = time.monotonic() + LOOK_S
        self.rescued: Rescued | None = None
        """Of a run that the server knows no more."""
        self.is_ahead = False
        """The server came back older than the learner, which has saved itself there: another session goes on."""

    def go(self) -> str | None:
        """Learn to the end; the status of the run, None when it goes on without this learner.

        Raises:
            LeaseLostError: another learner took over.
            RunGoneError, UnknownRunError: the server knows the run no more; see `rescued`.
        """
        source = f"learner {socket.gethostname()}"
        with (
            lease.kept(self._run, self._token, is_alive=self._is_alive),
            logs.sending(self._run, source),
            self._leaving,
        ):
            try:
                return self._go()
            except lease.LeaseLostError:
                self._copier.close(discard=True)
                raise lease.LeaseLostError(
                    f"run {self._run}: the learner on {self._successor()} took it over; this one has stopped writing"
                ) from None

    def _go(self) -> str | None:
        try:
            self._wire()
            self._learner.service.pinned = self._evaluations.pinned
            self._learner.restore()
            preparation.check_memory(self._client, self._run, self._token, self._config, self._learner)
        except (lease.LeaseLostError, *GONE, *connection.OUTAGES):
            raise
        except (ConfigError, StoreError, ValueError) as error:
            self._set_status("failed", str(error))
            raise
        service = threading.Thread(target=self._serve, name="service", daemon=True)
        self._heard_at = time.monotonic()
        service.start()
        try:
            self._learner.train()
        except Exception as error:
            self._error = self._error or error
        finally:
            self._learner.stopping.set()
            service.join()
        self._heard_at = None
        return self._close()

    def _is_alive(self) -> bool:
        """Whether the service thread still does anything; before and after it much may take long."""
        heard_at = self._heard_at
        return heard_at is None or time.monotonic() - heard_at < SILENT_S

    def _successor(self) -> str:
        try:
            return runs.state(self._client, self._run).host
        except (StoreError, *connection.OUTAGES):
            return "another host"

    # --- the beginning -----------------------------------------------------------------------------------

    def _wire(self) -> None:
        config, run = self._config, self._run
        with contextlib.suppress(OSError):  # the first copy will say so
            copies.set_aside(self._folder, run, self._token)
        device = preparation.choose_device(config.learner.device)
        torch.set_num_threads(config.learner.num_threads)
        resolved = base.resolve(config, runs.spaces(self._client, run))
        feed_client = connection.connect_blocking()
        self._leaving.callback(self._copier.close)
        self._leaving.callback(feed_client.close)
        self._learner = Learner(
            self._client,
            feed_client,
            run,
            self._token,
            config,
            resolved,
            device=device,
            held=self._held(),
        )
        self._leaving.callback(lambda: self._learner.leave(keep_experience=self.rescued is not None))
        self._learner.service.copy_to = self._copy
        state = runs.state(self._client, run)
        limit_s = config.rollout.segment_s + 2 * config.rollout.step_timeout_s
        self._dispatcher = Dispatcher(
            self._client,
            run,
            self._token,
            config.rollout,
            send=lambda queue, priority: celery.send_rollout(run, queue, priority, limit_s),
        )
        self._evaluations = EvaluationScheduler(
            self._client,
            run,
            self._token,
            config.evaluation,
            config.stop,
            send=lambda message: celery.send_evaluation(run, message, state.evaluation_queue),
        )
        log.info("learns %s on %s", run, device)

    def _held(self) -> Replay | Fifo | None:
        """The experience that was rescued, if the checkpoint is the one that was taken with it."""
        newest = checkpoints.meta(self._client, self._run)
        if self._given is None or newest is None:
            return None
        taken = self._given.seed.meta
        is_same = all(newest[name] == taken[name] for name in ("cursor", "updates", "env_steps"))
        return self._given.experience if is_same else None

    # --- the service thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Tell the server, keep the fleet busy, notice the end; however this ends, the training thread ends with it."""
        learner = self._learner
        try:
            while not learner.stopping.is_set():
                learner.due.wait(TICK_S)
                learner.due.clear()
                self._heard_at = time.monotonic()
                try:
                    self._tick()
                    self._outage.over()
                except connection.OUTAGES as error:
                    self._bear(error)
                except GONE as error:
                    self._error = error
                    self._rescue()
                    return
        except Exception as error:
            self._error = error
        finally:
            learner.stopping.set()

    def _bear(self, error: Exception) -> None:
        try:
            self._outage.note(error)
        except Exception as hopeless:
            self._error = hopeless
            self._learner.stopping.set()
        if self._interrupted.is_set():
            self._learner.stopping.set()
        self._learner.stopping.wait(DISPATCH_S)

    def _tick(self) -> None:
        learner, now = self._learner, time.monotonic()
        learner.service.pinned = self._evaluations.pinned
        learner.serve()
        if now < self._tick_at:  # woken for a publication alone
            return
        self._tick_at = now + TICK_S
        if now >= self._status_at:
            self._status_at = now + STATUS_S
            self._heed()
            if now >= self._look_at or "first_step_ms" not in self._known.state:
                self._look_at = now + LOOK_S
                self._known = seeds.known(self._client, self._run)
        if self._status == "active" and now >= self._dispatch_at:
            self._dispatch_at = now + DISPATCH_S
            self._dispatcher.tick()
        returns = list(learner.returns)
        self._evaluations.tick(
            Progress(
                version=learner.version,
                return_mean=sum(returns) / len(returns) if len(returns) == learner.returns.maxlen else None,
                env_steps=learner.num_steps,
                updates=learner.num_updates,
            )
        )
        self._end = self._reached()
        if self._end or self._interrupted.is_set():
            learner.stopping.set()

    def _heed(self) -> None:
        """Hear what others want of the run: pause, stop, other settings, the run itself."""
        seen = self._learner.accounts.fragments  # asked first, for they grow
        word = lease.signals(self._client, self._run)
        if word.status is None:
            raise lease.RunGoneError(f"run {self._run}: the server does not know it any more")
        self._status, self._asker = word.status, word.asker
        if word.version < self._learner.version or word.fragments < seen:
            self._learner.service.fallen_to = word.version
        if self._status == "active" and not self._asker:
            self._notice_fall()
        if self._status == "paused":
            self._learner.skip(STATUS_S)
        elif self._status != "active" or self._asker:
            self._learner.stopping.set()
        if word.config_version != self._config_version:
            self._config = runs.config(self._client, self._run)
            self._config_version = word.config_version
            self._learner.adopt(self._config)
            self._evaluations.adopt(self._config.evaluation, self._config.stop)

    def _notice_fall(self) -> None:
        """Begin anew, from what this learner is, where the server came back older."""
        service = self._learner.service
        if service.fallen_to is None or self.is_ahead:
            return
        text = f"the server came back older, at version {service.fallen_to}"
        log.warning("%s: %s; what it acknowledged since is lost", self._run, text)
        service.note("older", text)
        self.is_ahead = True
        self._learner.stopping.set()

    def _rescue(self) -> None:
        """Keep all of the run, as the server lost it; where that fails, its folder's copy is all there is."""
        try:
            counters, state = self._learner.snapshot()
            seed = self._seed(_encoded(state), asdict(counters))
        except Exception:
            log.exception("%s: what the learner holds of it cannot be kept", self._run)
            return
        self._copier.put(seed)  # were this process to end before the run is planted again
        self.rescued = Rescued(seed, self._learner.experience)

    def _seed(self, blob: bytes, meta: Mapping[str, Any]) -> seeds.Seed:
        """The run as known last, with a checkpoint."""
        state = {
            **self._known.state,
            "version": str(self._learner.version),
            "status": self._status,
        }
        known = replace(self._known, state=state, spec=self._config.model_dump_json(by_alias=True))
        return seeds.Seed(self._run, self._token, known, meta, blob)

    def _copy(self, blob: bytes, meta: Mapping[str, Any]) -> None:
        """Put a checkpoint that the server has into the folder too."""
        self._known = seeds.known(self._client, self._run)
        self._copier.put(self._seed(blob, meta))

    def _set_status(self, status: str, reason: str) -> None:
        runs.set_status(self._client, self._run, status, reason, token=self._token)

    def _reached(self) -> tuple[str, str] | None:
        """The condition of `stop` that holds now."""
        stop, learner = self._config.stop, self._learner
        if self._evaluations.solved:
            return "solved", f"return {stop.return_:g} confirmed"
        if stop.time is not None and learner.elapsed_s >= stop.time:
            return "time", f"time limit of {stop.time:g} s"
        if stop.env_steps is not None and learner.num_steps >= stop.env_steps:
            return "time", f"limit of {stop.env_steps} env steps"
        if stop.updates is not None and learner.num_updates >= stop.updates:
            return "time", f"limit of {stop.updates} updates"
        return None

    # --- the end -----------------------------------------------------------------------------------------

    def _close(self) -> str | None:
        """Save everything, set the status, write the folder."""
        if isinstance(self._error, (lease.LeaseLostError, *GONE)):
            raise self._error
        if self._end is not None:  # before anything slow: players stop at once
            status, reason = self._end
            self._patiently(lambda: self._set_status(status, reason))
        elif self._error is not None:
            self._set_status("failed", f"{type(self._error).__name__}: {self._error}")
        self._patiently(self._learner.finish)
        status = runs.status(self._client, self._run) or ""
        if self._error is not None:
            raise self._error
        if status in ("", "active", "paused"):
            if not self.is_ahead:
                self._say_who_goes_on(status)
            return None
        if status == "time":
            self._evaluations.evaluate_last(
                env_steps=self._learner.num_steps, updates=self._learner.num_updates
            )
        lease.renew(self._client, self._run, self._token)  # whoever lost the run leaves its folder alone
        artifacts.write(self._client, self._run, self._folder)
        log.info("%s: %s", self._run, status)
        return status

    def _patiently(self, write: Callable[[], object]) -> None:
        """Make a last write, however long the server cannot serve, unless the process is to end."""
        while True:
            try:
                write()
                self._outage.over()
                return
            except connection.OUTAGES as error:
                if self._has_made_room(error):
                    continue
                if self._interrupted.is_set():
                    raise
                self._outage.note(error)
                self._interrupted.wait(RETRY_S)

    def _has_made_room(self, error: Exception) -> bool:
        """Whether a full server could be given a part of the stream that the checkpoint makes dispensable."""
        with contextlib.suppress(*connection.OUTAGES):
            return connection.is_full(error) and self._learner.service.retention.shed(at_once=True)
        return False

    def _say_who_goes_on(self, status: str) -> None:
        if self._asker:
            log.info("hands %s over to the learner on %s, which asked for it", self._run, self._asker)
        else:
            log.info("leaves %s %s for the next learner", self._run, status)


def _encoded(state: Mapping[str, torch.Tensor]) -> bytes:
    return weights.encode_weights({name: tensor.numpy() for name, tensor in state.items()})
