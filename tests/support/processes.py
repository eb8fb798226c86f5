"""Real processes for tests: workers, learners and commands with their logs; the time bounds of faults."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from support.private_server import end_with_parent, until
from support.runs import start, target_config, target_tree

from ddrl.store import connection

Env = Mapping[str, str] | None
READY = " ready: "
"""In the log of a worker that takes messages."""
ROOT = Path(__file__).resolve().parents[2]
SLOW_S = 120.0  # generous: the machine may be busy
EXACT = os.environ.get("DDRL_FAULT_BOUNDS") == "exact"
"""Whether faults must end within their bounds (`make faults`), not ten times their bounds (`make test`)."""


def bound(seconds: float) -> float:
    """Return how long a recovery may take: `seconds` in `make faults`, ten times that in `make test`."""
    return seconds if EXACT else 10.0 * seconds


def descendants(pid: int) -> list[int]:
    """Return the ids of the children of a process, and of theirs."""
    children = []
    for task in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                children += [int(child), *descendants(int(child))]
    return children


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Process(subprocess.Popen[bytes]):
    """A started process with a log.

    Args:
        name: its role.
        command: its arguments.
        folder: its current directory.
        environment: all of its variables.
        log: file for its output and errors.
    """

    def __init__(
        self, name: str, command: list[str], folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        self.name, self.log = name, log

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # `&` in a script ignores it
            end_with_parent()

        with log.open("w") as output:
            super().__init__(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=prepare,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self.poll() is None

    def kill(self) -> None:
        """Kill it, but not its children."""
        super().kill()
        self.wait()

    def kill_group(self) -> None:
        """Kill it and its process group, as a machine that fails does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float | None = SLOW_S) -> int:
        """Return its exit code; fail with its log if it does not end."""
        try:
            return super().wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} runs on after {timeout} s:\n{self.text()[-3000:]}") from None

    def text(self) -> str:
        """Return its log."""
        return self.log.read_text(errors="replace")

    def pool(self) -> list[int]:
        """Return the ids of a worker's pool processes."""
        return [pid for pid in descendants(self.pid) if "spawn_main" in command_of(pid)]


class Processes(contextlib.AbstractContextManager["Processes"]):
    """Starts processes in a folder, and ends them.

    Args:
        folder: their current directory, with logs `<number>-<name>.log`, configs and `runs/`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Process] = []

    def worker(self, url: str, *options: str, env: Env = None) -> Process:
        """Start `ddrl worker` with one process for rollouts, unless the options say otherwise."""
        command = ("-m", "ddrl", "worker", "--role", "rollout", "-c", "1")
        return self.start("worker", url, *command, *options, env=env)

    def celery(self, url: str, *options: str, env: Env = None) -> Process:
        """Start `celery -A ddrl worker` with one process and all queues, unless the options say otherwise."""
        command = ("-m", "celery", "-A", "ddrl", "worker", "-c", "1")
        return self.start("celery", url, *command, *options, env=env)

    def learner(self, url: str, *options: str, env: Env = None) -> Process:
        """Start `ddrl learner`, for every run that waits unless the options name one."""
        return self.start("learner", url, "-m", "ddrl", "learner", "--folder", "runs", *options, env=env)

    def start(self, name: str, url: str | None, *arguments: str, env: Env = None) -> Process:
        """Start Python with any arguments, such as `start("up", None, "-m", "ddrl", "up")`."""
        log = self.folder / f"{len(self.started)}-{name}.log"
        command = [sys.executable, *arguments]
        self.started.append(Process(name, command, self.folder, self.environment(url, env), log))
        return self.started[-1]

    def ddrl(self, url: str | None, *arguments: str, env: Env = None) -> subprocess.CompletedProcess[str]:
        """Run a command of the CLI that must succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "ddrl", *arguments], cwd=self.folder, env=self.environment(url, env),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SLOW_S,
        )  # fmt: skip
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done

    def detach(self, url: str | None, **sections: Any) -> str:
        """Submit a run of `target_config(**sections)` that has neither learner nor workers; return its id."""
        with connection.connect(url) as client:
            return start(client, target_config(**sections))

    def config(self, **sections: Any) -> Path:
        """Write the config `target_tree(**sections)`; return its path."""
        path = self.folder / "target.yaml"
        path.write_text(yaml.safe_dump(target_tree(**sections)))
        return path

    def environment(self, url: str | None, env: Env = None) -> dict[str, str]:
        """Return the variables of a process that uses the server at `url`, or the embedded one if None."""
        inherited = {name: value for name, value in os.environ.items() if name != connection.URL_VARIABLE}
        named = {} if url is None else {connection.URL_VARIABLE: url}
        return {**inherited, **named, "PYTHONPATH": str(ROOT), **(env or {})}

    def until(self, condition: Callable[[], object], timeout_s: float = SLOW_S) -> float:
        """Return the seconds until `condition()` holds; fail with all logs after `timeout_s`."""
        try:
            return until(condition, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def logs(self, last_chars: int = 3000) -> str:
        """Return the ends of all logs in the folder."""
        texts = {path: path.read_text(errors="replace") for path in sorted(self.folder.glob("**/*.log"))}
        return "\n".join(f"== {path.name}\n{text[-last_chars:]}" for path, text in texts.items())

    def kill(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            if process.running:
                process.kill_group()

    def __exit__(self, *_: object) -> None:
        """Kill the workers and learners that still run, and end commands in order, with the children they started."""
        running = [process for process in self.started if process.running]
        for process in running:
            if process.name in ("worker", "celery", "learner"):
                process.kill_group()
            else:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        with contextlib.suppress(AssertionError):
            until(lambda: not any(process.running for process in running), 10.0)
        self.kill()
