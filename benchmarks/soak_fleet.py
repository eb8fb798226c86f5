"""The live fleet of the soak: two endless runs, their learners with one on standby, workers, a server with a file.

Every process is watched: one that ends by itself, or that grows, is a finding.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from support.fault_fleet import ON_POLICY, lost_fragments
from support.private_server import PrivateServer
from support.processes import READY, Process, Processes
from support.proxy import Proxy

from ddrl.store import connection, ledger, runs, segments

SAMPLE_S = 2.0
NUM_LEARNERS, NUM_WORKERS = 3, 2
MIB = 1024**2
BEGUN = re.compile(f"{READY}|waits for runs")
# Celery finds only after "ready" that the only process of a worker was killed before that.
NOT_BEGUN = "Could not start worker processes"
_ENDLESS: dict[str, Any] = {
    "stop": {"return": 100.0, "time": "10h"},  # out of reach
    "evaluation": {"every_s": 20, "near_every_s": 20, "num_episodes": 10},
    "rollout": {"segment_s": 2},
}
RUNS = {
    "off-policy": _ENDLESS | {"replay": {"samples_per_insert": 1, "capacity": 5_000}},
    "on-policy": ON_POLICY | _ENDLESS,
}


@dataclass
class Sample:
    """Memory and open files of one process at one moment."""

    at_s: float
    role: str
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
    """

    def __init__(self, folder: Path) -> None:
        self.findings = Findings()
        self.samples: list[Sample] = []
        self._stack = contextlib.ExitStack()
        self.server = PrivateServer("--appendonly", "yes", "--appendfsync", "no")
        self._stack.callback(self.server.close)
        self.proxy = Proxy(self.server.url)
        self._stack.callback(self.proxy.close)
        self.processes = self._stack.enter_context(Processes(folder))
        self.client = self.server.client
        self.learners: list[Process] = []
        self.workers: list[Process] = []
        self.runs: list[str] = []
        # Processes that ended during their start and were started again, as a service manager does.
        self.restarted: list[str] = []
        self._seen: dict[str, ledger.Audit] = {}  # by run, the newest audit
        self._began = time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> SoakFleet:
        for _ in range(NUM_LEARNERS):
            self.start_learner()
        for _ in range(NUM_WORKERS):
            self.start_worker()
        for name, sections in RUNS.items():
            self.runs.append(self.processes.detach(self.server.url, name=name, **sections))
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

    def start_worker(self, **options: Any) -> Process:
        """Start one more worker; every second process reaches the server through the proxy."""
        self.workers.append(self.processes.celery(self._url(), **options))
        return self.workers[-1]

    def start_learner(self, **options: Any) -> Process:
        """Start one more learner; every second process reaches the server through the proxy."""
        self.learners.append(self.processes.learner(self._url(), **options))
        return self.learners[-1]

    def _url(self) -> str:
        return self.proxy.url if len(self.processes.started) % 2 else self.server.url

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
                if BEGUN.search(process.text()) and NOT_BEGUN not in words:
                    self.findings.add(words)
                else:
                    self.restarted.append(words)
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

    def audit(self, run: str, within_s: float = 30.0) -> ledger.Audit:
        """Return a run's audit once it balances; report it if it does not, or if acknowledged fragments are gone."""
        deadline = time.monotonic() + within_s
        found = ledger.audit(self.client, run)
        while not found.is_balanced and time.monotonic() < deadline:
            time.sleep(0.2)
            found = ledger.audit(self.client, run)
        for producer, account in found.accounts.items():
            if account.difference:
                self.findings.add(f"{run}: producer {producer} does not balance: {account}")
        if found.total("trimmed"):
            self.findings.add(f"{run}: {found.total('trimmed')} fragments went before they were read")
        for producer, num in lost_fragments(self._seen.get(run, found), found).items():
            self.findings.add(f"{run}: producer {producer} has {num} acknowledged fragments less than before")
        self._seen[run] = found
        return found

    def playing(self) -> int:
        """Return the number of producers that play now."""
        return sum(len(segments.playing(self.client, run)) for run in self.runs)

    # --- memory and files ----------------------------------------------------------------------------

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for role, pid in list(self._everybody()):
                with contextlib.suppress(OSError, IndexError):
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
                    self.samples.append(Sample(self.elapsed_s, role, pages * 4096, files))

    def _everybody(self) -> Iterator[tuple[str, int]]:
        yield "server", self.server.pid
        for process in list(self.learners):
            yield "learner", process.pid
        for process in list(self.workers):
            yield "worker", process.pid
            yield from (("playing process", pid) for pid in process.pool())

    def growth(self) -> dict[str, tuple[Sample, Sample]]:
        """Return the ninth deciles of memory and files by role, in the second and in the last quarter of the time."""
        found = {}
        for role in sorted({sample.role for sample in self.samples}):
            of_role = [sample for sample in self.samples if sample.role == role]
            quarters = [
                [s for s in of_role if first <= s.at_s / self.elapsed_s < last]
                for first, last in ((0.25, 0.5), (0.75, 1.01))
            ]
            if all(len(quarter) > 2 for quarter in quarters):
                early, late = (_decile(quarter) for quarter in quarters)
                found[role] = early, late
        return found


def is_flat(early: Sample, late: Sample) -> bool:
    """Return whether a role holds no more late than early, with 20 % and a little for noise."""
    return late.memory_bytes <= 1.2 * early.memory_bytes + 16 * MIB and late.files <= 1.2 * early.files + 8


def last_line(process: Process) -> str:
    """Return the last line of a process's log."""
    lines = process.text().strip().splitlines()
    return lines[-1] if lines else "(nothing)"


def _decile(samples: list[Sample]) -> Sample:
    """Return the ninth deciles of memory and files."""
    memory = quantiles([sample.memory_bytes for sample in samples], n=10)[-1]
    files = quantiles([sample.files for sample in samples], n=10)[-1]
    return Sample(samples[-1].at_s, samples[0].role, round(memory), round(files))
