"""A run's life on this machine: claim it, restore it, train to the end or until it is handed over.

Recovery is always the same: start from the newest checkpoint, on the server or in the run's folder. When the server
comes back empty or older, the learner saves a checkpoint to the folder and makes another attempt, which restores it.
When an update leaves values that are not finite, the learner goes back to the newest checkpoint, once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from ddrl import celery, trackers
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.envs import requirements
from ddrl.envs.requirements import UnfitError
from ddrl.learner.core import Core
from ddrl.learner.dispatcher import Dispatcher
from ddrl.learner.evaluations import EvaluationScheduler
from ddrl.learner.loop import Learner, NotFiniteError
from ddrl.learner.rendezvous import AWAY_S, AwayError, Peer
from ddrl.networks.device import set_up
from ddrl.networks.ranks import RankLostError, StateLostError
from ddrl.runs import artifacts, monitoring
from ddrl.runs.prune import Retention
from ddrl.store import connection, learners, leases, local_checkpoints, logs, runs, weights
from ddrl.store.connection import LeaseLostError, Redis, RunGoneError, StoreError

log = logging.getLogger(__name__)

POLL_S = 0.25
RETRY_S = 1.0
HANDOVER_S = 5.0  # a requested run is taken by force after this time
RETURN_S = 15.0  # after a run is lost, other learners wait this long for its holder to restore it
SKIP_S = 10.0  # `serve` skips a run this long that another learner requested, or that cannot be learned here
ROUND_S = 0.05  # between two rounds of the publisher, unless it is woken
SHADOW_S = 3.0  # without an update, after which a shadow of a run that has ended ends, too
TICK_S = 0.1  # between two looks at messages, evaluations and the end of the run
SIGNALS_S = 0.25
LAST_LINES_S = 2.0  # for the log to be sent; less than a lease lasts, which ends then
HANG_S = 120.0  # a service thread without a round for this long counts as hung; above redis-py's retries
OTHER_BYTES = (
    80 * 1024**2
)  # metrics (18 MiB at their cap), history, logs, journal, episodes and the like, of one run
EXTRA_VERSIONS = 3  # kept besides the newest: the best one, the one being evaluated, the one being published
LOST = (RunGoneError, runs.UnknownRunError)  # the server came back empty or older
EXPLAINED = (StoreError, ConfigError, NotFiniteError, UnfitError)  # their messages are enough for the log


class _RegroupError(Exception):
    """A learner joined or was lost; the next attempt begins with those that are there."""


class _WentBackError(Exception):
    """An update left values that are not finite; the next attempt starts from the newest checkpoint."""


def handle_signals() -> Event:
    """Return an event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    stop, signals = Event(), list[int]()

    def handle(signum: int, _: object) -> None:
        if signals:
            os._exit(128 + signum)
        signals.append(signum)
        # The thread that is interrupted may hold the event's lock.
        Thread(target=stop.set, daemon=True).start()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handle)
    return stop


def serve(client: Redis, folder: Path, stop: Event, *, retention: Retention | None = None) -> None:
    """Learn the runs that wait for a learner, one after another, until interrupted.

    Args:
        client: connection to the server.
        folder: of the runs' folders.
        stop: once set, the process ends; the run stays active for the next learner.
        retention: deletes ended runs from the server in each round; None deletes nothing.
    """
    log.info("waits for runs")
    skipped_until: dict[tuple[str, str], float] = {}  # by run and the learner that requested it, if any
    away_until: dict[str, float] = {}  # by run, whose other learners are not reached
    reported: dict[str, str] = {}  # run -> why it was not learned
    outage = connection.Outage(client)
    while not stop.is_set():
        try:
            if retention is not None:
                retention.apply(client)
            names = runs.active_names(client, *runs.ENDED)
            reached = [run for run in names if away_until.get(run, 0.0) < time.monotonic()]
            wanting = [(run, "") for run in learners.wanting(client, reached)]
            for run, requester in (free := leases.free(client, names)) + wanting:
                if requester:  # it takes the run soon, unless it died
                    skipped_until.setdefault((run, requester), time.monotonic() + SKIP_S)
                if skipped_until.get((run, requester), 0.0) > time.monotonic() or stop.is_set():
                    continue
                skipped_until.pop((run, requester), None)
                try:
                    is_free = (run, requester) in free
                    learn(client, run, folder, stop, waits=not is_free, joins=not is_free)
                except LeaseLostError as error:
                    log.error("%s", error)
                except AwayError as error:
                    log.warning("%s", error)
                    away_until[run] = time.monotonic() + AWAY_S
                except Exception as error:  # the other runs still need a learner
                    if str(error) != reported.get(run):  # once, not in each round
                        reported[run] = str(error)
                        log.error("%s: %s", run, error, exc_info=not isinstance(error, EXPLAINED))
                        logs.add(client, run, f"learner {socket.gethostname()}", "ERROR", str(error))
                    skipped_until[run, ""] = time.monotonic() + SKIP_S
            outage.over()
        except connection.OUTAGES as error:
            outage.note(error)
        stop.wait(POLL_S)


def learn(
    client: Redis,
    run: str,
    folder: Path,
    stop: Event,
    *,
    waits: bool = True,
    joins: bool = False,
    take_over: bool = False,
) -> str | None:
    """Learn one run until it ends, is handed over, or the process must stop; restore it if the server has lost it.

    Args:
        client: connection of the service thread.
        run: its id.
        folder: of the runs' folders.
        stop: once set, the process ends; the run stays active for the next learner.
        waits: wait for the lease instead of returning at once.
        joins: wait no longer than the run wants another learner.
        take_over: request the run from the learner that holds it; take it if that learner does not hand it over.

    Returns:
        The status with which the run ended; None when it goes on without this learner.

    Raises:
        StoreError: the run is not active, or is unknown and has no local checkpoint; or its leader has other versions.
        LeaseLostError: another learner took over.
        UnfitError: this machine lacks a module of the run, which goes on.
        ConfigError, ValueError: the run cannot be learned here; it has failed, unless only this machine's device is
            missing.
    """
    outage, token = connection.Outage(client), None
    with Peer(client, run) as peer, contextlib.ExitStack() as held:  # what lasts as long as a lease
        claim = _Claim(client, run, folder / run, peer, waits=waits, joins=joins, take_over=take_over)
        while not stop.is_set():
            is_kept = False  # the lease, for the next attempt
            try:
                if token is None:
                    if (token := claim.take(stop)) is None:
                        return None
                    config = runs.config(client, run)
                    held.enter_context(trackers.following(config, run, token, folder / run))
                with monitoring.learning(run):
                    return _Attempt(claim, token, stop, outage).learn()
            except connection.OUTAGES as error:
                outage.note(error)
                stop.wait(RETRY_S)
            except _RegroupError as error:
                log.info("%s: %s; forms a new group", run, str(error))  # a record must not keep its traceback
                is_kept = not stop.is_set()
            except (*LOST, _WentBackError) as error:
                if token is None:  # no lease was taken: the run is unknown here and has no local checkpoint
                    raise
                log.warning("%s; restoring the run", str(error))
                claim = replace(claim, take_over=False, is_again=True, holder="")
            finally:
                if token is not None and not is_kept:
                    with leases.kept(run, token), logs.sending(run, f"learner {socket.gethostname()}"):
                        held.close()
                    with contextlib.suppress(*connection.OUTAGES):  # else the lease expires
                        leases.release(client, run, token)
                    token = None
    return None


@dataclass
class _Claim:
    """Gets the lease of a run for a learner.

    Attributes:
        client: connection to the server.
        run: its id.
        folder: the run's.
        peer: this learner, which follows while another holds the lease.
        waits: wait for the lease instead of returning at once.
        joins: wait no longer than the run wants another learner.
        take_over: request it from its holder, then take it.
        is_again: this learner held the run before, so it also waits while the run is paused.
        holder: host of the learner that was logged as the holder.
    """

    client: Redis
    run: str
    folder: Path
    peer: Peer
    waits: bool
    joins: bool
    take_over: bool
    is_again: bool = False
    holder: str = ""
    _was_found: bool = field(init=False, default=False)
    _lost_at: float = field(init=False, default=0.0)
    _requested_at: float = field(init=False, default=0.0)

    def take(self, interrupted: Event) -> int | None:
        """Return the lease's token; None if others learn the run, it has ended meanwhile, or the process must stop.

        Raises:
            StoreError: the run is not active, or its leader has other versions.
            ConfigError: this machine lacks its device.
        """
        while not interrupted.is_set():
            if (now := self._state()) is not None:
                if now.ended and self.holder:
                    log.info("%s ended: %s", self.run, now.status)
                    return None
                if now.status in ("active", "ending") or now.leased:
                    token = self._acquire()
                    if token is not None or not self.waits:
                        return token
                    if self.joins and self.peer.is_left_out():
                        return None
                    with contextlib.suppress(*LOST):  # the run is lost; the next look restores it
                        self._request_or_wait(now.host)
                        self.peer.follow(interrupted)
                elif now.status != "paused" or not (self.holder or self.is_again):
                    what = f"has ended ({now.status})" if now.ended else f"is {now.status}"
                    raise StoreError(f"run {self.run}: {what}; continue it with `ddrl resume {self.run}`")
            interrupted.wait(POLL_S)
        return None

    def _state(self) -> runs.RunState | None:
        """Return the run's state; None if the server has lost it.

        A lost run is restored from the folder: at once if this learner never found it on the server, else after
        RETURN_S, in which its holder may restore it.
        """
        try:
            now = runs.state(self.client, self.run)
            # Before the lease: another machine may have what it needs.
            if not self._was_found and not now.ended:
                config = runs.config(self.client, self.run)
                set_up(config.learner)
                requirements.check_learner(config)
        except runs.UnknownRunError:
            self._lost_at = self._lost_at or time.monotonic()
            if not self._was_found or time.monotonic() - self._lost_at >= RETURN_S:
                self._lost_at = 0.0
                if local_checkpoints.restore_from(self.client, self.run, self.folder):
                    return self._state()  # at once, before a standby takes the lease
            return None
        self._was_found, self._lost_at = True, 0.0
        return now

    def _acquire(self) -> int | None:
        force = self._requested_at > 0 and time.monotonic() - self._requested_at >= HANDOVER_S
        token = local_checkpoints.acquire(self.client, self.run, self.folder, force=force)
        if token is not None and force:
            log.warning("takes %s from the learner on %s, which did not hand it over", self.run, self.holder)
        return token

    def _request_or_wait(self, holder: str) -> None:
        """Log a new holder, warm up once, and request the run if this learner takes over."""
        if holder != self.holder:
            if not self.holder:  # load the libraries before the takeover
                config, spaces = runs.config(self.client, self.run), runs.spaces(self.client, self.run)
                device = set_up(config.learner)
                base.resolve(config, spaces).learner(device=device, seed=config.seed).weights()
            verb = "requests" if self.take_over else "waits for"
            log.info("%s is held by the learner on %s; %s it", self.run, holder, verb)
            self.holder = holder
        if self.take_over and not self._requested_at:
            runs.request_handover(self.client, self.run, f"{socket.gethostname()} (process {os.getpid()})")
            self._requested_at = time.monotonic()


class _Attempt:
    """One attempt to learn a run, until it ends or the lease or the run is lost.

    Args:
        claim: for the run, which has been taken.
        token: fencing token of the lease.
        interrupted: the process must stop; the run stays active for the next learner.
        outage: of the attempt before this one, too; it is over when the learner serves the run.
    """

    def __init__(self, claim: _Claim, token: int, interrupted: Event, outage: connection.Outage) -> None:
        client, run = self._client, self._run = claim.client, claim.run
        self._folder, self._peer, self._token = claim.folder, claim.peer, token
        self._interrupted, self._outage = interrupted, outage
        self._regroup, self._began_at = "", 0.0  # why the group ends
        self._record = local_checkpoints.record(client, run)
        self._config = runs.config(client, run)
        self._config_version = int(self._record.state.get("config_version", 0))
        self._revision = int(self._record.state.get("revision", 0))
        self._reads = self._record.state.get("reads", "")
        self._updated_at, self._updates = time.monotonic(), -1  # of a shadow: when it has learned last
        self._source_ended = False
        self._status, self._requester = "active", ""  # and the host that requested the run
        self._is_restored = False
        self._error: Exception | None = None  # of either thread
        self._signals_at = self._tick_at = 0.0
        self._round_at: float | None = None  # last round of the service thread; None where there is none
        self._progress, self._stalled_s = (0, 0), 0.0  # of the training thread, and how long it has made none
        self._resources = contextlib.ExitStack()

    def learn(self) -> str | None:
        """Learn to the end; return the run's status, None when it goes on without this learner.

        Raises:
            LeaseLostError: another learner took over.
            RunGoneError, UnknownRunError: the server came back empty or older; the next attempt restores the run.
        """
        with (
            leases.kept(self._run, self._token, is_alive=self._is_alive),
            logs.sending(self._run, f"learner {socket.gethostname()}"),
            self._resources,
        ):
            try:
                self._begin()
                if self._record.state["status"] not in runs.ENDED:  # else only the end is left
                    self._train()
                return self._end()
            except LeaseLostError:
                host = "another host"
                with contextlib.suppress(StoreError, *connection.OUTAGES):
                    host = runs.state(self._client, self._run).host
                raise LeaseLostError(
                    f"run {self._run}: the learner on {host} took it over; this one has stopped writing"
                ) from None
            except LOST:
                if self._is_restored:
                    self._save_to_folder()
                raise
            finally:  # they refer to each other, and hold networks, and a lost group's connections
                self._error = None
                self.__dict__.pop("_learner", None)

    def _is_alive(self) -> bool:
        """Return whether the service thread makes rounds; True while none runs: start and end may be slow."""
        round_at = self._round_at
        return round_at is None or time.monotonic() - round_at < HANG_S

    # --- begin ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Restore the learner; a run that cannot be learned here fails."""
        try:
            runs.mirror(self._client, self._run, self._token, self._config)
            local_checkpoints.restore_newer(self._client, self._run, self._token, self._folder)
            self._find_source()
            self._wire()
            self._learner.publisher.pinned = self._evaluations.pinned
            self._learner.restore()
            self._is_restored = True
            self._check_memory()
            self._peer.complete(self._learner.core, self._interrupted)
            self._began_at = time.monotonic()
            log.info("learns %s on %s", self._run, set_up(self._config.learner))
        except (LeaseLostError, *LOST, *connection.OUTAGES):
            raise
        except RankLostError as error:
            raise _RegroupError(str(error)) from None
        except (ConfigError, StoreError, ValueError) as error:
            self._set_status("failed", str(error))
            artifacts.complete(self._client, self._run, self._token, self._folder)
            raise

    def _find_source(self) -> None:
        """Wait for the run whose experience this one learns from, which a learner restores after a loss, too.

        Raises:
            StoreError: it is not there within RETURN_S.
        """
        until = time.monotonic() + RETURN_S
        while self._reads and runs.status(self._client, self._reads) is None:
            if time.monotonic() >= until:
                text = f"learns from {self._reads}, which is not on the server any more"
                raise StoreError(f"run {self._run}: {text}")
            if self._interrupted.wait(POLL_S):
                break

    def _wire(self) -> None:
        config, run, client, token = self._config, self._run, self._client, self._token
        reader_client = self._resources.enter_context(contextlib.closing(connection.connect_blocking()))
        self._local = local_checkpoints.BackgroundWriter(self._folder)
        self._resources.callback(self._local.close)
        ranks = self._peer.form(token, config, self._interrupted)
        core = Core(reader_client, run, config, ranks)
        self._learner = Learner(client, token, core, on_checkpoint=self._save_locally)
        if config.replay.retain == "all" and not runs.state(client, run).reads:
            self._learner.publisher.folder = self._folder / "recording"
        self._resources.callback(ranks.leave)
        self._resources.callback(self._learner.close)
        max_crashes, send = config.rollout.max_crashes, celery.send_rollout
        self._dispatcher = Dispatcher(client, run, token, max_crashes=max_crashes, send=send)
        queue = runs.state(client, run).evaluation_queue
        self._evaluations = EvaluationScheduler(
            client, run, token, config, send=lambda message: celery.send_evaluation(run, message, queue)
        )

    def _check_memory(self) -> None:
        """Reserve what the run needs of the server's memory; refuse a run that has learned nothing if it is too much.

        Later a server with too little is waited for, as for any full one.

        Raises:
            ConfigError: the server's memory cannot hold the run to its end.
        """
        learner = self._learner
        parameters = _num_bytes(learner.algorithm.weights()) * (2 if self._config.weights.onnx else 1)
        checkpoint = _num_bytes(learner.algorithm.state())
        if learner.replay.state():  # a full replay adds 4 bytes of priority per item
            checkpoint += 4 * self._config.replay.capacity
        needed = needed_bytes(self._config, checkpoint_bytes=checkpoint, weights_bytes=parameters)
        taken = runs.reserve(self._client, self._run, self._token, needed)
        limit = connection.maxmemory(self._client)
        if not learner.shared.updates and 0 < limit < needed + taken:
            beside = f", and other active runs {taken >> 20} MiB" if taken else ""
            raise ConfigError(
                f"run {self._run}: needs up to {needed >> 20} MiB of the server{beside}, but its maxmemory is"
                f" {limit >> 20} MiB; lower replay.max_bytes, or raise maxmemory, and continue with `ddrl resume`"
            )

    # --- two threads ---------------------------------------------------------------------------------

    def _train(self) -> None:
        """Run the training loop here and the service thread beside it, until either ends, and keep the folder."""
        service = Thread(target=self._serve, name="service", daemon=True)
        with artifacts.following(self._run, self._token, self._folder):
            self._round_at = self._signals_at = time.monotonic()
            service.start()
            try:
                self._learner.train()
            except Exception as error:
                self._error = error if isinstance(error, StateLostError) else self._error or error
            finally:
                self._learner.stopping.set()
                self._learner.core.ranks.leave()  # so that nothing waits for a lost rank any more
                service.join()
            self._round_at = None

    def _serve(self) -> None:
        """The service thread: publish, dispatch, evaluate, notice the end."""
        learner = self._learner
        try:
            while not learner.stopping.is_set():
                learner.shared.wake.wait(ROUND_S)
                learner.shared.wake.clear()
                self._watch_training()
                self._round_at = time.monotonic()
                try:
                    self._tick()
                    self._outage.over()
                except connection.OUTAGES as error:
                    self._outage.note(error)
                    if self._interrupted.is_set():
                        return
                    learner.stopping.wait(TICK_S)
        except Exception as error:
            self._error = self._error or error
        finally:
            learner.stopping.set()

    def _watch_training(self) -> None:
        """End the process if the training thread hangs, which no thread can end; its supervisor starts another one."""
        now, progress = time.monotonic(), self._learner.progress
        # At most 1 s: a process that was stopped and goes on does not hang.
        since_s = min(now - (self._round_at or now), 1.0)
        self._stalled_s = self._stalled_s + since_s if progress == self._progress else 0.0
        self._progress = progress
        if self._stalled_s >= self._config.learner.stall_s:
            text = "%s: training hangs, no step for %.0f s (learner.stall_s); this process ends, another may take over"
            log.error(text, self._run, self._stalled_s)
            time.sleep(LAST_LINES_S)
            os._exit(1)

    def _tick(self) -> None:
        learner, now = self._learner, time.monotonic()
        learner.publisher.pinned = self._evaluations.pinned
        learner.publisher.round()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_S
        if now >= self._signals_at:
            since_s, self._signals_at = now - self._signals_at + SIGNALS_S, now + SIGNALS_S
            self._apply_signals(since_s)
        if self._status == "active":
            shared = learner.shared
            returns = list(shared.returns)
            return_mean = sum(returns) / len(returns) if len(returns) == shared.returns.maxlen else None
            self._evaluations.tick(
                shared.version, return_mean, env_steps=shared.env_steps, updates=shared.updates
            )
            if not self._evaluations.holds_play and not self._reads:
                self._dispatcher.tick(shared.ledger.consumed)
                learner.publisher.num_processes = self._dispatcher.num_processes
        if self._reached() or self._interrupted.is_set() or self._regroup:
            learner.stopping.set()

    def _apply_signals(self, since_s: float) -> None:
        """Apply what others want of the run: pause, end, handover, changed settings (`ddrl set`).

        `Learner.apply` takes changed settings; the algorithm's `apply_options` sets a new learning rate.

        Args:
            since_s: time since the call before this one.

        Raises:
            UnknownRunError, RunGoneError: the server came back without the run, or older.
        """
        learner, run = self._learner, self._run
        now = runs.state(self._client, run)
        if now.version < learner.shared.version:
            raise RunGoneError(f"run {run}: the server came back older, at version {now.version}")
        self._status, self._requester = now.outcome or now.status, now.handover
        is_paused = self._status == "paused"
        if is_paused or not learner.shared.env_steps:  # `stop.time` is time of training
            learner.shared.add_elapsed(-since_s)
        if not is_paused and (self._status != "active" or self._requester):
            learner.stopping.set()
        self._regroup = self._why_regroup(now.revision)
        if self._reads:
            self._source_ended = (runs.status(self._client, self._reads) or "time") in runs.ENDED
            if learner.shared.updates != self._updates:
                self._updated_at, self._updates = time.monotonic(), learner.shared.updates
        if learner.shared.env_steps and "first_step_ms" not in self._record.state:  # snapshots should have it
            self._record = local_checkpoints.record(self._client, run)
        if now.config_version != self._config_version:
            self._config = runs.config(self._client, run)
            self._config_version = now.config_version
            self._record = local_checkpoints.record(self._client, run)
            learner.apply(self._config)
            self._evaluations.apply(self._config)

    def _why_regroup(self, revision: int) -> str:
        """Return why the group should end and another one be formed; "" if it should not."""
        if revision != self._revision:
            return "goes back to a version, or another quarantine"
        if self._learner.leading.leaving:
            return "a learner leaves"
        is_due = time.monotonic() - self._began_at >= self._config.learner.checkpoint_every_s
        if (is_due or not self._learner.shared.updates) and self._peer.is_wanted():
            return "a learner joins"
        return ""

    def _reached(self) -> tuple[str, str] | None:
        """Return status and reason if a condition of `stop` holds."""
        stop, shared = self._config.stop, self._learner.shared
        if self._evaluations.solved:
            return "solved", f"return {stop.return_:g} confirmed"
        if stop.time is not None and shared.elapsed_s >= stop.time:
            return "time", f"time limit of {round(stop.time, 1):g} s"
        if self._source_ended and time.monotonic() - self._updated_at > SHADOW_S:
            return "time", f"end of {self._reads}, whose experience it reads"
        # A worker may append more than was allowed; such steps count once they were allowed, too.
        allowed = self._learner.publisher.allowance(shared.version)
        if stop.env_steps is not None and min(shared.env_steps, allowed) >= stop.env_steps:
            return "time", f"limit of {stop.env_steps} env steps"
        if stop.updates is not None and shared.updates >= stop.updates:
            return "time", f"limit of {stop.updates} updates"
        return None

    def _save_locally(self, blob: bytes, meta: Mapping[str, Any]) -> None:
        """Write a checkpoint that the server has stored to the run's folder too."""
        self._record = local_checkpoints.record(self._client, self._run)
        self._local.put(self._snapshot(blob, meta))

    def _snapshot(self, blob: bytes, meta: Mapping[str, Any]) -> local_checkpoints.Snapshot:
        state = {**self._record.state, "version": str(self._learner.shared.version), "status": self._status}
        record = replace(self._record, state=state, spec=self._config.model_dump_json(by_alias=True))
        return local_checkpoints.Snapshot(self._run, self._token, record, meta, blob)

    # --- end -----------------------------------------------------------------------------------------

    def _end(self) -> str | None:
        """Set the status, which stops play, save everything, evaluate, write the folder."""
        learner, error, is_lockstep = self._learner, self._error, self._config.learner.lockstep
        if isinstance(error, (LeaseLostError, *LOST)):
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and so to the replay
        if isinstance(error, NotFiniteError):
            error = self._go_back(error)
        if isinstance(error, RankLostError):
            self._regroup = str(error)
            if is_lockstep or isinstance(error, StateLostError):
                log.warning("%s: goes back to the newest checkpoint", self._run)
                raise _RegroupError(self._regroup)
            error = None
            learner.shared.updates = learner.algorithm.num_updates  # of what is saved and published
        if error is not None:
            self._set_status("failed", f"{type(error).__name__}: {error}")
        elif reached := self._reached():
            self._retry(lambda: self._set_status(*reached))
        # In lockstep, a round that failed half-way must not become a checkpoint.
        self._retry(lambda: learner.finish(saves=error is None or not is_lockstep))
        status = runs.status(self._client, self._run) or ""
        if status not in runs.ENDED:
            if self._regroup and not (self._requester or self._interrupted.is_set()):
                raise _RegroupError(self._regroup)
            if self._requester:
                log.info("hands %s over to the learner on %s, which requested it", self._run, self._requester)
            else:
                log.info("leaves %s %s for the next learner", self._run, status)
            return None
        shared = learner.shared
        self._evaluations.finish(status, env_steps=shared.env_steps, updates=shared.updates)
        artifacts.complete(self._client, self._run, self._token, self._folder)
        if error is not None:
            try:
                raise error
            finally:
                del error
        log.info("%s: %s", self._run, status)
        return status

    def _go_back(self, error: NotFiniteError) -> NotFiniteError:
        """Raise _WentBackError the first time since the run began or was resumed; later return why the run fails."""
        is_again = runs.has_gone_back(self._client, self._run)
        limit, largest = self._learner.find_huge(is_again=is_again)
        runs.go_back(self._client, self._run, self._token, limit, self._learner.shared.ledger.cursor)
        if is_again:
            remedy = "bound what the environment returns, or lower algorithm.learning_rate"
            return NotFiniteError(f"{error}, again; {largest}; {remedy}")
        self._learner.publisher.note("went back", f"to the newest checkpoint: {error}; {largest}")
        raise _WentBackError(f"run {self._run}: {error}; {largest}")

    def _set_status(self, status: str, reason: str) -> None:
        runs.set_status(self._client, self._run, status, reason, token=self._token)

    def _retry(self, action: Callable[[], object]) -> None:
        connection.retry(action, client=self._client, stop=self._interrupted)

    def _save_to_folder(self) -> None:
        """Save the learner's state where the next attempt finds it; a failure leaves the checkpoint before it."""
        self._local.close()
        try:
            counters, state = self._learner.checkpoint()
            snapshot = self._snapshot(weights.encode_weights(state), asdict(counters))
            local_checkpoints.write(self._folder, snapshot)
        except Exception:
            log.exception("%s: the learner's state cannot be saved", self._run)


# --- before learning -------------------------------------------------------------------------------------


def needed_bytes(config: RunConfig, *, checkpoint_bytes: int, weights_bytes: int) -> int:
    """Return the most bytes that a run keeps in the server.

    Args:
        config: the run's.
        checkpoint_bytes: of one; two are there while it is replaced.
        weights_bytes: of one version.
    """
    kept = (config.weights.keep_last + EXTRA_VERSIONS) * weights_bytes + int(config.weights.max_bytes)
    return int(config.replay.max_bytes) + 2 * checkpoint_bytes + kept + OTHER_BYTES


def _num_bytes(arrays: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in arrays.values())
