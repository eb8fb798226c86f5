"""The long-lived learner process: takes runs, hands them over, brings back what a server has lost."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddrl.config import ConfigError
from ddrl.learner.preparation import warm_up
from ddrl.learner.session import GONE, Rescued, Session
from ddrl.runs import monitoring
from ddrl.runs.prune import Retention
from ddrl.store import connection, copies, runs
from ddrl.store import leases as lease
from ddrl.store.connection import Outage, StoreError

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

POLL_S = 0.25
RETRY_S = 1.0
POLITE_S = 5.0  # between asking for a run and taking it
RETURN_S = 15.0  # for which a run that has gone may come back by the learner that had it
SPARE_S = (
    10.0  # for which a service leaves a run alone: it was asked for by another, or cannot be learned here
)


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


def serve(
    client: Redis,
    folder: Path,
    interrupt: Interrupt,
    *,
    poll_s: float = POLL_S,
    retention: Retention | None = None,
) -> None:
    """Learn whatever runs wait for a learner, one after another, until interrupted; between them ended ones go.

    Args:
        client: connection to the server.
        folder: the runs' artifacts go to folders in it.
        interrupt: the process's wish to end.
        poll_s: time between two looks.
        retention: which ended runs go from the server; None: none.
    """
    log.info("waits for runs")
    spared: dict[str, float] = {}  # run -> until when it is left alone
    outage = Outage(client)
    while not interrupt.event.is_set():
        try:
            if retention is not None:
                retention.apply(client)
            now = time.monotonic()
            for run, asker in lease.free(client, runs.active_names(client)):
                if asker:  # it takes the run in a moment, unless it has died
                    spared.setdefault(run, now + SPARE_S)
                if spared.get(run, 0.0) <= time.monotonic() and not interrupt.event.is_set():
                    spared.pop(run, None)
                    if not _learn_or_tell(client, run, folder, interrupt):
                        spared[run] = time.monotonic() + SPARE_S
            outage.over()
        except connection.OUTAGES as error:
            outage.note(error)
        interrupt.event.wait(poll_s)


def _learn_or_tell(client: Redis, run: str, folder: Path, interrupt: Interrupt) -> bool:
    """Learn a run; what ends it here must not end the service for the others. False if it may end it again."""
    try:
        learn(client, run, folder, interrupt, waits=False)
    except lease.LeaseLostError as error:
        log.error("%s", error)
    except Exception as error:
        log.error("%s: %s", run, error, exc_info=not isinstance(error, (StoreError, ConfigError)))
        return False
    return True


def learn(
    client: Redis,
    run: str,
    folder: Path,
    interrupt: Interrupt,
    *,
    waits: bool = True,
    take_over: bool = False,
) -> str | None:
    """Learn one run until it ends, is handed over, or this process is told to stop.

    A run that the server has lost is planted there again: from what this learner holds, else from the copy of its
    newest checkpoint in `folder / run`.

    Args:
        client: connection of the service thread.
        run: its id.
        folder: the run's artifacts go to `folder / run`.
        interrupt: the process's wish to end.
        waits: for the lease, as long as the run is active.
        take_over: ask the learner that holds the run for it, and take it from one that does not let go.

    Returns:
        The status with which the run ended; None when it goes on without this learner.

    Raises:
        StoreError: the run is not active.
        LeaseLostError: another learner took over.
    """
    claim = _Claim(client, run, folder / run, waits=waits, take_over=take_over)
    outage = Outage(client)
    rescued: Rescued | None = None
    while not interrupt.event.is_set():
        try:
            if rescued is not None:
                is_planted = copies.plant(client, run, folder / run, rescued.seed)
                if not is_planted and runs.status(client, run) is None:  # emptied again meanwhile
                    interrupt.event.wait(RETRY_S)
                    continue
            token = claim.take(interrupt.event)
            outage.over()
            if token is None:
                return None
            session = None
            try:
                session = Session(client, run, token, folder / run, interrupt.event, rescued)
                rescued = None
                with monitoring.learning(run):
                    status = session.go()
                if status is not None or not session.is_ahead:
                    return status
            except GONE:
                rescued = rescued if session is None else session.rescued
            finally:
                _release(client, run, token)
        except connection.OUTAGES as error:
            outage.note(error)
            interrupt.event.wait(RETRY_S)
    return None


def _release(client: Redis, run: str, token: int) -> None:
    """Let go of the run; where the server cannot be told, the lease expires."""
    with contextlib.suppress(*connection.OUTAGES):
        lease.release(client, run, token)


class _Claim:
    """How one learner comes by one run.

    Args:
        client: connection to the server.
        run: its id.
        folder: the run's.
        waits: until the run is free, as long as it is active.
        take_over: ask its holder for it, then take it.
    """

    def __init__(self, client: Redis, run: str, folder: Path, *, waits: bool, take_over: bool) -> None:
        self._client, self._run, self._folder = client, run, folder
        self._waits, self._take_over = waits, take_over
        self._host = socket.gethostname()
        self._told = ""  # whom the log names as the holder
        self._seen = False
        self._gone_at = self._asked_at = 0.0

    def take(self, interrupted: threading.Event) -> int | None:
        """The lease's token; None where others learn the run, or the process is to end.

        Raises:
            StoreError: the run is not active.
        """
        while not interrupted.is_set():
            now = self._look()
            if now is not None:
                if now.ended and self._told:
                    log.info("%s: %s, by the learner on %s", self._run, now.status, now.host)
                    return None
                if now.status != "active" and not now.leased:
                    if now.status == "paused" and self._told:  # whom this waited for has died
                        interrupted.wait(POLL_S)
                        continue
                    raise StoreError(
                        f"run {self._run}: is {now.status}, not active; continue it with `ddrl resume {self._run}`"
                    )
                token = self._acquire()
                if token is not None:
                    return token
                if not self._waits:
                    return None
                self._ask_or_wait(now.host)
            interrupted.wait(POLL_S)
        return None

    def _look(self) -> runs.RunState | None:
        """The run's state; None while it has gone and may yet be brought back by whoever held it."""
        try:
            now = runs.state(self._client, self._run)
        except runs.UnknownRunError:
            self._gone_at = self._gone_at or time.monotonic()
            if not self._seen or time.monotonic() - self._gone_at >= RETURN_S:
                copies.plant(self._client, self._run, self._folder)
                self._gone_at = 0.0
            return None
        self._seen, self._gone_at = True, 0.0
        return now

    def _acquire(self) -> int | None:
        force = self._asked_at > 0 and time.monotonic() - self._asked_at >= POLITE_S
        folder = str(self._folder.resolve())
        token = lease.acquire(self._client, self._run, host=self._host, folder=folder, force=force)
        if token is not None:
            if force:
                log.warning("takes %s from the learner on %s, which did not let go", self._run, self._told)
            self._asked_at, self._take_over = 0.0, False
        return token

    def _ask_or_wait(self, host: str) -> None:
        """Say on whom this waits, once for each; ask it for the run, if told to."""
        if host != self._told:
            if not self._told:
                warm_up(runs.config(self._client, self._run), runs.spaces(self._client, self._run))
            verb = "asks" if self._take_over else "waits for"
            log.info("%s is held by the learner on %s; %s it", self._run, host, verb)
            self._told = host
        if self._take_over and not self._asked_at:
            runs.request_handover(self._client, self._run, f"{self._host} (process {os.getpid()})")
            self._asked_at = time.monotonic()
