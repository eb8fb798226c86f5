"""The worker and learner processes that `ddrl submit` and `ddrl resume` start on this machine.

They live as long as the command that started them. Each child holds the reading end of a pipe whose writing end the
kernel closes when the command ends, however it ends, so none is orphaned. A child that dies is started again: the
server has all that it needs to go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddrl.store import connection, leases, local_checkpoints, server
from ddrl.store import runs as store
from ddrl.store.connection import Redis

PARENT_VARIABLE = "DDRL_PARENT_FD"  # file descriptor of the pipe from the parent
FOLLOW_S = 10.0  # for a child to end after its parent, before it is ended by force
MAX_RESTARTS = 5  # in a row
QUICK_DEATH_S = 10.0  # a child that dies sooner counts as a failed start
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0)  # before the restarts after quick deaths; the last for all later ones
POLL_S = 0.1
STOP_S = 15.0  # for children to end, before they are killed


class ProcessError(RuntimeError):
    """A child process keeps dying; the message is one line that names its log.

    Attributes:
        run: whose learner it is; None for workers.
    """

    def __init__(self, message: str, run: str | None = None) -> None:
        super().__init__(message)
        self.run = run


@dataclass
class _Child:
    """One child process, and those that replace it when it dies.

    Attributes:
        run: whose learner it is; None for workers.
        rank: of a learner among those of this machine.
        started: of `time.monotonic()`.
        quick_deaths: in a row.
        restart_at: when the next process starts, of `time.monotonic()`; None while one runs.
    """

    run: str | None
    command: list[str]
    log: Path
    rank: int
    process: subprocess.Popen[bytes]
    started: float
    quick_deaths: int = 0
    restart_at: float | None = None


class Processes:
    """Child processes as a context manager; leaving it stops them, or kills them after a KeyboardInterrupt.

    Args:
        folder: for the workers' logs, rollout.log and evaluation.log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[_Child] = []
        self._reader, self._writer = os.pipe()

    def __enter__(self) -> Processes:
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

    def start_learner(self, run: str, folder: Path, number: int = 1) -> None:
        """Start a learner of one run, the first or a further one; its log goes to `folder`."""
        self._start("learner" if number == 1 else f"learner-{number}", ["learner", run], folder, run)

    def start_workers(self, num_players: int, num_evaluators: int = 1) -> None:
        """Start a rollout worker of so many processes, if any, and an evaluation worker."""
        roles = (("rollout", "rollout", num_players), ("evaluation", "evaluate", num_evaluators))
        for name, role, num in roles if num_players else roles[1:]:
            self._start(name, ["worker", "--role", role, "--concurrency", str(num)], self._folder)

    def learns(self, run: str) -> bool:
        """Return whether a learner of the run is among them that has not finished."""
        return any(child.run == run and child.process.poll() != 0 for child in self._children)

    def check(self) -> None:
        """Restart the children that have died, after a pause if they die quickly.

        A worker that ends with code 0 is restarted without limit: Celery ends so if the server is full or read-only.

        Raises:
            ProcessError: a child keeps dying, or a learner refuses its run; it is not restarted any more.
        """
        now = time.monotonic()
        for child in list(self._children):
            code = child.process.poll()
            if code is None or (code == 0 and child.run is not None):
                continue
            if child.restart_at is None:
                is_quick = now - child.started < QUICK_DEATH_S
                child.quick_deaths = child.quick_deaths + 1 if is_quick else 1
                child.restart_at = now + PAUSES_S[min(child.quick_deaths, len(PAUSES_S)) - 1]
                is_refusal = is_quick and child.run is not None and code in (1, 2)
                if is_refusal or (code != 0 and child.quick_deaths > MAX_RESTARTS):
                    self._children.remove(child)
                    last = server.last_line(child.log).removeprefix("ddrl: error: ") or "no output"
                    reason = f"{child.log.stem} ended with code {code}: {last} (see {child.log})"
                    raise ProcessError(reason, child.run)
            if now >= child.restart_at:
                child.process = self._spawn(child.command, child.log, child.rank)
                child.started, child.restart_at = time.monotonic(), None

    def wait_for_learners(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the learners have ended by themselves."""
        self._wait([child for child in self._children if child.run is not None], timeout_s)

    def stop(self) -> None:
        """Send SIGTERM to all children, and kill those that still run after STOP_S or at a KeyboardInterrupt."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.terminate()
        try:
            self._wait(self._children, STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all children and their own children."""
        for child in self._children:
            if child.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
        self._children.clear()

    def _wait(self, children: Sequence[_Child], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))

    def _start(self, name: str, arguments: list[str], folder: Path, run: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command, log = [sys.executable, "-m", "ddrl", *arguments], folder / f"{name}.log"
        rank = sum(child.run is not None for child in self._children)
        process = self._spawn(command, log, rank)
        self._children.append(_Child(run, command, log, rank, process, time.monotonic()))

    def _spawn(self, command: list[str], log: Path, rank: int) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._reader],
                env={**os.environ, PARENT_VARIABLE: str(self._reader), "LOCAL_RANK": str(rank)},
                start_new_session=True,  # the terminal's Ctrl-C goes to the command, which ends them in order
            )


def follow_parent(signum: signal.Signals) -> None:
    """In a child: send `signum` to this process when its parent has ended, and end it by force after FOLLOW_S.

    Does nothing in a process that `Processes` did not start.
    """
    if (fd := os.environ.pop(PARENT_VARIABLE, None)) is None:
        return

    def wait() -> None:
        os.read(int(fd), 1)
        os.kill(os.getpid(), signum)
        time.sleep(FOLLOW_S)
        os._exit(1)

    threading.Thread(target=wait, name="follow-parent", daemon=True).start()


# --- the processes of runs ---------------------------------------------------------------------------


def start(client: Redis, processes: Processes, runs: Sequence[str], workers: int, with_learner: bool) -> None:
    """Start workers that the runs share, and the learners of each run."""
    if workers:
        processes.start_workers(workers)
    for run in runs if with_learner else ():
        for number in range(store.config(client, run).learner.num_learners):
            processes.start_learner(run, Path("runs") / run, 1 + number)


def check_folder(folder: Path = Path("runs")) -> None:
    """Refuse to start processes whose logs and results cannot be written.

    Raises:
        StoreError: the folder cannot be made, or not be written.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise connection.StoreError(
            f"{folder}: cannot be made ({error.strerror}); start in another folder"
        ) from None
    if not os.access(folder, os.W_OK):
        raise connection.StoreError(f"{folder}: cannot be written; start in another folder")


def start_detached(runs: Sequence[str], workers: int, with_learner: bool) -> None:
    """Start the processes of runs, if any, under `ddrl detached`, a process that outlives this one."""
    if not workers and not with_learner:
        return
    command = [sys.executable, "-m", "ddrl", "detached", *runs, "--workers", str(workers)]
    command.append("--learner" if with_learner else "--no-learner")
    folder = Path("runs") / runs[0]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "detached.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    threading.Thread(target=process.wait, name="detached", daemon=True).start()  # else it stays as a zombie


def keep_running(
    client: Redis, processes: Processes, runs: Sequence[str], report: Callable[[str], None]
) -> None:
    """Restart what has died; a run whose learners keep dying fails, unless another one learns it.

    Args:
        client: connection to the server.
        processes: of the runs.
        runs: their ids.
        report: receives a message about a learner that keeps dying, while others go on.

    Raises:
        ProcessError: the workers, or all learners of the only run, keep dying.
    """
    try:
        processes.check()
    except ProcessError as error:
        if error.run is not None and processes.learns(error.run):  # several learners: the others go on
            report(str(error))
            return
        for run in [error.run] if error.run is not None else runs:
            with contextlib.suppress(*connection.UNREACHABLE):
                until = time.monotonic() + 2 * leases.TTL_MS / 1e3
                while (state := store.state(client, run)).leased and error.run and time.monotonic() < until:
                    time.sleep(POLL_S)  # the one that has just died may have held it
                if not state.leased and not state.ended:
                    store.set_status(client, run, "failed", str(error))
                    finish(client, run)
        if error.run is None or len(runs) == 1:
            raise
        report(f"{error.run}: {error}")


def any_active(client: Redis, runs: Sequence[str]) -> bool:
    """Return whether a run has not ended; True also while the server does not answer or has lost a run."""
    with contextlib.suppress(*connection.UNREACHABLE, store.UnknownRunError):
        return not all(store.state(client, run).ended for run in runs)
    return True


def finish(client: Redis, run: str) -> store.RunState:
    """Return the run's state once its end, if it has one, is complete; complete it here if no learner holds it.

    Raises:
        StoreError: its folder cannot be written.
    """
    while (state := store.state(client, run)).status == "ending":
        is_here = state.folder and state.host == socket.gethostname()
        folder = Path(state.folder if is_here else f"runs/{run}")
        if (token := local_checkpoints.acquire(client, run, folder)) is None:
            time.sleep(POLL_S)
            continue
        from ddrl.runs import artifacts  # takes a second

        with leases.kept(run, token):
            artifacts.complete(client, run, token, folder)
        leases.release(client, run, token)
    return state
