"""The live fleet of the soak: two endless runs, their learners with one on standby, workers, a server with a file.

All clients reach the server through two proxies, which record what they are told; at the end tests/checker judges it.
Every process is watched: one that ends by itself, or that grows, is a finding. The first worker and the first learner
are never ended, so that growth is seen over the whole time.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checker.history import Recorder
from checker.raw import Follower
from checker.tagged import LOG_VARIABLE
from checker.verdict import Rules, verdict
from redis import Redis
from support.private_server import PrivateServer
from support.processes import READY, ROOT, Process, Processes
from support.proxy import Proxy
from support.runs import start, target_tree
from support.slow_disk import slow_disk

from ddrl.config import validate
from ddrl.store import connection, ledger, runs

SAMPLE_S = 2.0
WARM_UP_S, SLICE_S = 300.0, 30.0  # of a process's life; see `growth`
NUM_LEARNERS, NUM_WORKERS = 3, 2
MIB = 1024**2
BEGUN = re.compile(f"{READY}|waits for runs")
# Reasons for which a process may end while it starts; a service manager starts it again.
RESTARTS = (
    "Could not start worker processes",  # its only process was killed before it was up
    "Errors writing to the AOF file",  # the server's disk is full
    "OOM command not allowed",  # the server's memory is full
    "no server reachable",
    "Error 111 connecting",  # Celery's words for that
)
_ENDLESS: dict[str, Any] = {
    "env": {"id": "checker.tagged:Tagged", "num_envs": 4},
    "stop": {"return": 100.0, "time": "10h"},  # out of reach
    "evaluation": {"every_s": 20, "near_every_s": 20, "num_episodes": 10},
    "rollout": {"segment_s": 2},
}
_OFF: dict[str, Any] = {"samples_per_insert": 4, "capacity": 5_000, "warmup_steps": 200, "slack_steps": 500}
_NETWORK = {"network": "checker.tagged:network", "learning_rate": 1e-3}
_PPO = _NETWORK | {"name": "ppo", "estimator": "vtrace", "shared": True, "num_epochs": 2}
RUNS = {
    "off-policy": _ENDLESS | {"replay": _OFF, "algorithm": _NETWORK | {"name": "dqn", "batch_size": 64}},
    "on-policy": _ENDLESS
    | {"on_policy": {"stale": "correct"}, "algorithm": _PPO | {"batch_size": 512, "minibatch_size": 128}},
}
RULES = {"off-policy": Rules(**_OFF), "on-policy": Rules(epochs=2)}
CLOCK = """
import mmap, os, struct, time
true_time, true_time_ns = time.time, time.time_ns
shift_s = mmap.mmap(os.open(os.environ["CLOCK_FILE"], os.O_RDONLY), 8, prot=mmap.PROT_READ)
time.time = lambda: true_time() + struct.unpack("d", shift_s)[0]
time.time_ns = lambda: true_time_ns() + int(struct.unpack("d", shift_s)[0] * 1e9)
"""


@dataclass
class Sample:
    """Memory and open files of one process at one moment."""

    at_s: float
    role: str
    pid: int
    memory_bytes: int
    files: int


@dataclass
class Findings:
    """Observed faults of ddrl; any of them fails the soak."""

    words: list[str] = field(default_factory=list)

    def add(self, words: str) -> None:
        """Record and print one."""
        self.words.append(words)
        print(f"  FINDING: {words}", flush=True)


class SoakFleet:
    """The live fleet; a context manager.

    Args:
        folder: of logs and artifacts.
        num_players: that play slowly, as threads of the workers; 0: each worker has one process, which is fast.
    """

    def __init__(self, folder: Path, *, num_players: int = 0) -> None:
        self.num_players = num_players
        self._pool: tuple[str, ...] = ()
        self._slow: dict[str, Any] = {}
        if num_players:
            self._pool = ("--pool", "threads", "-c", str(num_players // NUM_WORKERS))
            self._slow = {"kwargs": {"sleep_s": 0.1}, "num_envs": 1}
        self.findings = Findings()
        self.samples: list[Sample] = []
        self._stack = contextlib.ExitStack()
        self._disk = folder / "sync_ms"
        self.server = PrivateServer(
            "--appendonly", "yes", "--appendfsync", "no", environment=slow_disk(folder, 0)
        )
        self._stack.callback(self.server.close)
        self.recorder = Recorder()
        self.proxy, other = (Proxy(self.server.url, tap=self.recorder.tap) for _ in range(2))
        self._urls = self.proxy.url, other.url
        for proxy in (self.proxy, other):
            self._stack.callback(proxy.close)
        self.processes = self._stack.enter_context(Processes(folder))
        (folder / "steps").mkdir()
        (folder / "sitecustomize.py").write_text(CLOCK)
        path = os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT)))
        self._env = {"PYTHONPATH": path, "DDRL_ALLOW_MODULES": "checker.tagged"}
        os.environ["DDRL_ALLOW_MODULES"] = "checker.tagged"  # of this process, which submits the runs
        self.client = self.server.client
        self.learners: list[Process] = []
        self.workers: list[Process] = []
        self.runs: list[str] = []
        # Processes that ended during their start and were started again, as a service manager does.
        self.restarted: list[str] = []
        self.followers: dict[str, Follower] = {}
        self._began = time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> SoakFleet:
        for _ in range(NUM_LEARNERS):
            self.start_learner()
        for _ in range(NUM_WORKERS):
            self.start_worker()
        for name, sections in RUNS.items():
            sections = sections | {"env": sections["env"] | self._slow}
            config = validate(target_tree(name=name, **sections) | {"algorithm": sections["algorithm"]})
            run = start(self.client, config)
            raw = Redis(unix_socket_path=str(self.server.socket))
            self.followers[run] = self._stack.enter_context(Follower(raw, run))
            self.runs.append(run)
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        self._stack.callback(sampler.join)
        self._stack.callback(self._ended.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the fleet was started."""
        return time.monotonic() - self._began

    # --- processes -----------------------------------------------------------------------------------

    def start_worker(self) -> Process:
        """Start one more worker; every second process reaches the server through the proxy that breaks."""
        self.workers.append(self.processes.celery(self._url(), *self._pool, env=self._environment()))
        return self.workers[-1]

    def start_learner(self) -> Process:
        """Start one more learner; every second process reaches the server through the proxy that breaks."""
        log = {LOG_VARIABLE: str(self.processes.folder / "steps")}
        self.learners.append(self.processes.learner(self._url(), env=self._environment() | log))
        return self.learners[-1]

    def _url(self) -> str:
        return self._urls[len(self.processes.started) % 2]

    def _environment(self) -> dict[str, str]:
        """Return the variables of the next process, which has a clock of its own."""
        clock = self.processes.folder / f"clock-{len(self.processes.started)}"
        clock.write_bytes(bytes(8))
        return self._env | {"CLOCK_FILE": str(clock)}

    def set_clock(self, process: Process, shift_s: float) -> None:
        """Let the clock of a process jump to the true time and so much more."""
        number = process.log.name.partition("-")[0]
        with (self.processes.folder / f"clock-{number}").open("r+b") as file:
            mmap.mmap(file.fileno(), 8)[:] = struct.pack("d", shift_s)

    @contextlib.contextmanager
    def slow_disk(self, sync_ms: int) -> Iterator[None]:
        """Let the server wait for its disk at each write, for so long, while the context lasts."""
        self._disk.write_text(str(sync_ms))
        self.client.config_set("appendfsync", "always")
        try:
            yield
        finally:
            self._disk.write_text("0")
            with contextlib.suppress(*connection.OUTAGES):  # it may have been killed
                self.client.config_set("appendfsync", "no")

    def forget(self, process: Process) -> None:
        """Stop watching a process, which is about to be ended."""
        for known in (self.workers, self.learners):
            with contextlib.suppress(ValueError):
                known.remove(process)

    def tend(self) -> None:
        """Report processes that ended by themselves, and start others in their place."""
        for process in [*self.workers, *self.learners]:
            if not process.running:
                words = (
                    f"{process.log.name} ended by itself with code {process.returncode}: {last_line(process)}"
                )
                is_known = any(reason in words for reason in RESTARTS)
                is_start = not BEGUN.search(process.text()) or RESTARTS[0] in words
                (self.restarted.append if is_known and is_start else self.findings.add)(words)
                self.forget(process)
        while len(self.workers) < NUM_WORKERS:
            self.start_worker()
        while len(self.learners) < NUM_LEARNERS:
            self.start_learner()

    # --- progress ------------------------------------------------------------------------------------

    def progress(self) -> list[tuple[int, int]]:
        """Return fragments and updates of each run."""
        states = [runs.state(self.client, run) for run in self.runs]
        return [(state.appended_fragments, state.updates) for state in states]

    def status(self) -> str:
        """Return how the runs stand, for a finding."""
        with contextlib.suppress(*connection.OUTAGES):
            states = [runs.state(self.client, run) for run in self.runs]
            return "; ".join(
                f"{one.run}: {one.status} {one.reason!r}, update {one.updates}, fragment {one.appended_fragments}"
                for one in states
            )
        return "the server does not answer"

    def recover(self, limit_s: float) -> float | None:
        """Return the seconds until each run plays and learns on; None beyond the limit."""
        began = time.monotonic()
        before: list[tuple[int, int]] | None = None
        while time.monotonic() - began < limit_s:
            with contextlib.suppress(*connection.OUTAGES):
                before = before or self.progress()
                now = self.progress()
                if all(a > b and c > d for (a, c), (b, d) in zip(now, before, strict=True)):
                    return time.monotonic() - began
            self.tend()
            time.sleep(0.05)
        return None

    # --- the verdict ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """End all processes in order, so that nothing moves any more."""
        for run in self.runs:
            runs.set_status(self.client, run, "paused", "the end of the soak")
        for process in [*self.workers, *self.learners]:
            self.forget(process)
            process.send_signal(signal.SIGTERM)
        for process in self.processes.started:
            if process.running:
                process.wait(60.0)

    def judge(self, run: str) -> ledger.Audit:
        """Report what the checker finds in a run's history, and an audit that does not agree; return the audit."""
        name = next(name for name in RUNS if run.startswith(name))
        folder = self.processes.folder
        raw = self.followers[run].finish(folder / "runs" / run)
        for words in verdict(self.recorder.history, raw, run, RULES[name], folder / "steps"):
            self.findings.add(f"{run}: {words}")
        audit = ledger.audit(self.client, run)
        if not audit.is_balanced:
            self.findings.add(f"{run}: the audit does not balance: {audit}")
        return audit

    # --- memory and files ----------------------------------------------------------------------------

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for role, pid in list(self._everybody()):
                with contextlib.suppress(OSError, IndexError):
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
                    self.samples.append(Sample(self.elapsed_s, role, pid, pages * 4096, files))

    def _everybody(self) -> Iterator[tuple[str, int]]:
        yield "server", self.server.pid
        for process in list(self.learners):
            yield "learner", process.pid
        for process in list(self.workers):
            yield "worker", process.pid
            yield from (("playing process", pid) for pid in process.pool())

    def growth(self) -> dict[str, tuple[Growth, Growth]]:
        """Return by role how memory in MiB and open files grow."""
        roles = sorted({sample.role for sample in self.samples})
        of_role = {role: [sample for sample in self.samples if sample.role == role] for role in roles}
        return {
            role: (
                growth(samples, lambda one: one.memory_bytes / MIB),
                growth(samples, lambda one: one.files),
            )
            for role, samples in of_role.items()
        }


@dataclass(frozen=True)
class Growth:
    """How a figure of a role's processes grows within each of them.

    Attributes:
        mean: of the figure.
        per_hour: slope, common to all processes.
        error: half the width of its interval of 95 %; infinite where too little was seen.
    """

    mean: float
    per_hour: float
    error: float

    @property
    def is_leak(self) -> bool:
        """The whole interval of the slope is above 5 % of the mean an hour."""
        return self.per_hour - self.error > 0.05 * self.mean


def growth(samples: list[Sample], figure: Callable[[Sample], float]) -> Growth:
    """Fit a line to a figure over the age of processes: one slope, and a level for each process.

    Means of SLICE_S are fitted, so that what follows one another closely does not count as many observations; the first
    WARM_UP_S of each process, in which it loads libraries and fills its caches, are left out.
    """
    born: dict[int, float] = {}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in samples:
        age_s = one.at_s - born.setdefault(one.pid, one.at_s)
        if age_s >= WARM_UP_S:
            slices.setdefault((one.pid, int(age_s / SLICE_S)), []).append((age_s / 3600, figure(one)))
    mean = float(np.mean([figure(one) for one in samples]))
    points = {key: np.mean(values, axis=0) for key, values in slices.items()}
    pids = {pid for pid, _ in points}
    groups = [np.array([point for (pid, _), point in points.items() if pid == one]) for one in pids]
    hours, values = np.concatenate([np.zeros((0, 2)), *(group - group.mean(axis=0) for group in groups)]).T
    freedom, spread = len(hours) - len(groups) - 1, float((hours**2).sum())
    if freedom < 10 or spread == 0:
        return Growth(mean, 0.0, math.inf)
    slope = float((hours * values).sum()) / spread
    residual = float(((values - slope * hours) ** 2).sum()) / freedom
    return Growth(mean, slope, 2.2 * math.sqrt(residual / spread))  # Student's t for 10 degrees of freedom


def last_line(process: Process) -> str:
    """Return the last line of a process's log."""
    lines = process.text().strip().splitlines()
    return lines[-1] if lines else "(nothing)"
