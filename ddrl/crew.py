"""The processes that a command brings along: a learner and workers that live and die with it.

Each child holds the reading end of a pipe (parent.py), so that nothing is orphaned when the command is killed.
A child that dies is started again; what it leaves behind in the server is enough to go on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ddrl.parent import FD_VARIABLE

MAX_RESTARTS = 5  # in a row
QUICK_DEATH_S = 10.0  # a child that dies sooner counts as a failed start
STOP_S = 15.0


class CrewError(RuntimeError):
    """A child process cannot be kept alive; one line naming its log."""


@dataclass
class _Child:
    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    started: float
    restarts: int = 0


class Crew:
    """Children of this process, as a context manager.

    Args:
        folder: their logs go there: learner.log, rollout.log, evaluation.log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[_Child] = []
        self._reader, self._writer = os.pipe()
        os.set_inheritable(self._reader, True)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_learner(self, run: str) -> None:
        """Bring a learner for one run."""
        self._start("learner", ["learner", run])

    def start_workers(self, processes: int) -> None:
        """Bring `processes` players, and one process more for evaluations."""
        self._start("rollout", ["worker", "--role", "rollout", "--concurrency", str(processes)])
        self._start("evaluation", ["worker", "--role", "evaluate", "--concurrency", "1"])

    def check(self) -> None:
        """Start again what has died.

        Raises:
            CrewError: a child keeps dying.
        """
        for child in self._children:
            code = child.process.poll()
            if code is None or (code == 0 and child.name == "learner"):
                continue
            quick = time.monotonic() - child.started < QUICK_DEATH_S
            child.restarts = child.restarts + 1 if quick else 1
            if child.restarts > MAX_RESTARTS or (quick and child.name == "learner" and code in (1, 2)):
                raise CrewError(
                    f"{child.name} ended with code {code}: {last_line(child.log)} (see {child.log})"
                )
            child.process, child.started = self._spawn(child.command, child.log), time.monotonic()

    def wait(self, name: str, timeout_s: float) -> None:
        """Wait until a child has ended by itself, `timeout_s` at most."""
        for child in self._children:
            if child.name == name:
                try:
                    child.process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    return

    def stop(self) -> None:
        """End all children: TERM, and KILL after STOP_S."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + STOP_S
        for child in self._children:
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._children.clear()

    def _start(self, name: str, arguments: list[str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ddrl", *arguments]
        log = self._folder / f"{name}.log"
        self._children.append(_Child(name, command, log, self._spawn(command, log), time.monotonic()))

    def _spawn(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        output: IO[bytes]
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._reader],
                env={**os.environ, FD_VARIABLE: str(self._reader)},
                start_new_session=True,  # the terminal's Ctrl-C is for the command, which ends them in order
            )


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
