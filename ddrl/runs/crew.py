"""The processes that a command brings along: learners and workers that live and die with it.

Each child holds the reading end of a pipe (parent.py), so that nothing is orphaned when the command is killed.
A child that dies is started again; what it leaves behind in the server is enough to go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ddrl.runs.parent import FD_VARIABLE

MAX_RESTARTS = 5  # in a row
QUICK_DEATH_S = 10.0  # a child that dies sooner counts as a failed start
PAUSES_S = (
    0.0,
    0.5,
    1.0,
    2.0,
    4.0,
)  # before the restarts that follow quick deaths; the last one for all later ones
STOP_S = 15.0
LAST_BYTES = 65_536  # of a log, in which the reason for an end is looked for
_SERVERS_FAULT = ("OutOfMemoryError", "MISCONF", "ReadOnlyError", "BusyLoadingError")  # what Celery ends with


class CrewError(RuntimeError):
    """A child process cannot be kept alive; one line naming its log.

    Attributes:
        run: whose learner it is; None for workers.
    """

    def __init__(self, message: str, run: str | None = None) -> None:
        super().__init__(message)
        self.run = run


@dataclass
class _Child:
    """A process of the crew.

    Attributes:
        name: of its log.
        run: whose learner it is; None for workers.
        log_begin: where the log of the present process begins, in bytes.
        quick_deaths: in a row.
        again_at: when the next process is started, of `time.monotonic()`; None while one lives.
    """

    name: str
    run: str | None
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    started: float
    log_begin: int
    quick_deaths: int = 0
    again_at: float | None = None


class Crew:
    """Children of this process, as a context manager; an interrupt that leaves it kills them at once.

    Args:
        folder: the workers' logs go there: rollout.log, evaluation.log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[_Child] = []
        self._reader, self._writer = os.pipe()
        os.set_inheritable(self._reader, True)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                self.kill()
            else:
                self.stop()
        finally:
            os.close(self._reader)
            os.close(self._writer)

    def start_learner(self, run: str, folder: Path) -> None:
        """Bring a learner for one run; its log goes to `folder`."""
        self._start("learner", ["learner", run], folder, run)

    def start_workers(self, processes: int) -> None:
        """Bring `processes` players, and one process more for evaluations."""
        players = ["worker", "--role", "rollout", "--concurrency", str(processes)]
        self._start("rollout", players, self._folder)
        self._start("evaluation", ["worker", "--role", "evaluate", "--concurrency", "1"], self._folder)

    def check(self) -> None:
        """Start again what has died, after a pause where it dies quickly.

        Workers that end because the server is full, or read-only, or cannot write to its disk, are started again
        until it serves.

        Raises:
            CrewError: a child keeps dying; it is given up.
        """
        now = time.monotonic()
        for child in list(self._children):
            code = child.process.poll()
            if code is None or (code == 0 and child.run is not None):
                continue
            if child.again_at is None:
                quick = now - child.started < QUICK_DEATH_S
                child.quick_deaths = child.quick_deaths + 1 if quick else 1
                child.again_at = now + PAUSES_S[min(child.quick_deaths, len(PAUSES_S)) - 1]
                if self._is_hopeless(child, code, quick):
                    self._children.remove(child)
                    last = last_line(child.log)
                    raise CrewError(
                        f"{child.name} ended with code {code}: {last} (see {child.log})", child.run
                    )
            if now >= child.again_at:
                child.process, child.log_begin = self._spawn(child.command, child.log)
                child.started, child.again_at = time.monotonic(), None

    def wait_for_learners(self, timeout_s: float) -> None:
        """Wait until they have ended by themselves, `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        for child in self._children:
            if child.run is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """End all children: TERM, and KILL after STOP_S, or at once when interrupted in waiting for them."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + STOP_S
        try:
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            self.kill()

    def kill(self) -> None:
        """End all children at once, with their own children."""
        for child in self._children:
            if child.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
        self._children.clear()

    def _is_hopeless(self, child: _Child, code: int, quick: bool) -> bool:
        if child.run is None and _is_servers_fault(child):
            child.quick_deaths = min(child.quick_deaths, MAX_RESTARTS)
            return False
        return child.quick_deaths > MAX_RESTARTS or (quick and child.run is not None and code in (1, 2))

    def _start(self, name: str, arguments: list[str], folder: Path, run: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ddrl", *arguments]
        log = folder / f"{name}.log"
        process, begin = self._spawn(command, log)
        self._children.append(_Child(name, run, command, log, process, time.monotonic(), begin))

    def _spawn(self, command: list[str], log: Path) -> tuple[subprocess.Popen[bytes], int]:
        """A process, and where its part of the log begins."""
        output: IO[bytes]
        with log.open("ab") as output:
            begin = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._reader],
                env={**os.environ, FD_VARIABLE: str(self._reader)},
                start_new_session=True,  # the terminal's Ctrl-C is for the command, which ends them in order
            )
        return process, begin


def _is_servers_fault(child: _Child) -> bool:
    """Whether a worker ended because the server does not take writes: Celery says so and ends, with code 0."""
    with child.log.open("rb") as file:
        file.seek(max(child.log_begin, file.seek(0, os.SEEK_END) - LAST_BYTES))
        text = file.read().decode(errors="replace")
    return any(sign in text for sign in _SERVERS_FAULT)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
