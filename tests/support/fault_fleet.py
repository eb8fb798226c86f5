"""A live fleet that faults happen to: server with an append-only file, learner, worker, and a run without end.

`with fleet.survives(within_s): ...` is the frame of a fault's test: the run goes on within the bound after the block,
the ledger balances, tests/checker finds nothing in what clients were told, and no process has answered the fault with a
traceback.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checker.history import Recorder
from checker.raw import Follower
from checker.verdict import Rules, verdict
from redis import Redis
from support.private_server import PrivateServer, require_program, until
from support.processes import Env, Process, Processes, bound
from support.proxy import Proxy
from support.runs import start, target_config

from ddrl.store import connection, ledger, runs, workers
from ddrl.store.ledger import Audit

Sections = Mapping[str, Any]
OUT_OF_REACH: dict[str, Any] = {
    "stop": {"return": 100.0, "time": 3600},
    "evaluation": {"every_s": 3600, "near_every_s": 3600, "near": 0},
}
ENDLESS = OUT_OF_REACH | {"replay": {"samples_per_insert": 2}}  # the learner leaves the cores to players
PPO = {"name": "ppo", "hidden_sizes": [32, 32], "learning_rate": 3e-3, "gamma": 0.5, "num_epochs": 4}
PICK = {"env": {"id": "ddrl/Pick-v0"}, "algorithm": PPO | {"batch_size": 512, "minibatch_size": 128}}
ON_POLICY = OUT_OF_REACH | PICK
"""A run without end whose versions count iterations."""
TRACE = "Traceback (most recent call last)"


class Fleet:
    """Server, processes and one run; makes itself whole again between faults.

    Args:
        server: it must keep its data over a kill.
        processes: where learner and workers run.
        sections: of the run's config.
        recorder: of what clients are told.
        proxies: through which worker and learner reach the server.
        concurrency: processes of the worker.
    """

    def __init__(
        self,
        server: PrivateServer,
        processes: Processes,
        sections: Sections,
        recorder: Recorder,
        proxies: list[Proxy],
        concurrency: int,
    ) -> None:
        self.server, self.processes, self.proxies = server, processes, proxies
        self.client = server.client
        self.recorder = recorder
        self._worker_url, self._learner_url = (proxy.url for proxy in proxies)
        self._concurrency = str(concurrency)
        self.worker = self.start_worker()
        self.learner = self.start_learner()
        self.run = start(self.client, target_config(**sections))
        self.follower = Follower(Redis(unix_socket_path=str(server.socket)), self.run)
        self.ready()

    def start_worker(self, *options: str, env: Env = None) -> Process:
        """Start one more worker."""
        return self.processes.worker(self._worker_url, "-c", self._concurrency, *options, env=env)

    def start_learner(self, env: Env = None) -> Process:
        """Start one more learner: of the run when there is none, else on standby."""
        return self.processes.learner(self._learner_url, env=env)

    def state(self) -> runs.RunState:
        """Return the state of the run."""
        return runs.state(self.client, self.run)

    def nodes(self) -> set[str]:
        """Return the names of the workers that have a heartbeat."""
        return {heartbeat.node for heartbeat in workers.alive(self.client)}

    def audit(self) -> Audit:
        """Return an audit of the run."""
        return ledger.audit(self.client, self.run)

    def ready(self) -> None:
        """Start again what the fault before has ended, and wait until the run goes on."""
        if not self.server.answers():
            self.server.kill()
            self.server.start()
        if not self.worker.running:
            self.worker = self.start_worker()
        if not self.learner.running:
            self.learner = self.start_learner()
        self.goes_on(60.0)

    def tidy(self) -> None:
        """End what a test has started beside the fleet's own worker and learner."""
        for process in self.processes.started:
            if process.running and process not in (self.worker, self.learner):
                process.kill_group()

    def goes_on(self, within_s: float) -> float:
        """Return the seconds until new fragments are acknowledged and updates made; fail beyond `within_s`."""
        until(self.server.answers, within_s)
        before, began = self.state(), time.monotonic()

        def has_gone_on() -> bool:
            with contextlib.suppress(*connection.UNREACHABLE):
                now = self.state()
                return now.appended_fragments > before.appended_fragments and now.updates > before.updates
            return False

        self.processes.until(has_gone_on, within_s)
        return time.monotonic() - began

    @contextlib.contextmanager
    def survives(self, within_s: float) -> Iterator[None]:
        """Check that the run survives the block, see the module's docstring; `within_s` goes through `bound`."""
        self.ready()
        said = {process.log: len(process.text()) for process in self.processes.started}
        yield
        recovery_s = self.goes_on(bound(within_s))
        print(f"went on after {recovery_s:.1f} s")
        self.judge()
        for process in self.processes.started:
            new = process.text()[said.get(process.log, 0) :]
            assert TRACE not in new, (process.log.name, new[-4000:])

    def judge(self) -> None:
        """Check that the ledger balances, and that the checker finds nothing."""
        self.processes.until(lambda: self.audit().is_balanced, bound(5.0))
        assert (now := self.audit()).total("trimmed") == 0, now
        history = self.recorder.history.copy()
        findings = verdict(history, self.follower.finish(), self.run, Rules())
        assert not findings, "\n".join(findings)

    def says(self, process: Process, words: str) -> str:
        """Return the line of a process's log with `words`, once it is there."""
        self.processes.until(lambda: words in process.text(), 20.0)
        return next(line for line in process.text().splitlines() if words in line)


@contextlib.contextmanager
def fleet_of(folder: Path, sections: Sections = ENDLESS, *, concurrency: int = 1) -> Iterator[Fleet]:
    """Run a fleet with a server of its own while the context lasts."""
    require_program()
    with contextlib.ExitStack() as stack:
        server = PrivateServer("--appendonly", "yes", "--appendfsync", "no")
        stack.callback(server.close)
        recorder = Recorder()
        proxies = [Proxy(server.url, tap=recorder.tap) for _ in range(2)]
        for proxy in proxies:
            stack.callback(proxy.close)
        processes = stack.enter_context(Processes(folder))
        stack.callback(processes.kill)
        fleet = Fleet(server, processes, sections, recorder, proxies, concurrency)
        with fleet.follower:
            yield fleet
