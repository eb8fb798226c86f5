"""A live fleet that faults happen to: server with an append-only file, learner, worker, and a run without end.

`with fleet.survives(within_s): ...` is the frame of a fault's test: the run goes on within the bound after the block,
the ledger balances, every fragment that had been acknowledged is still accounted for once, and no process has
answered the fault with a traceback.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.private_server import WITH_FILE, PrivateServer, require_program, wait_until
from support.processes import Process, Processes, Tree, bound
from support.runs import target_tree

from ddrl.store import connection, ledger, runs, workers
from ddrl.store.ledger import Audit

ENDLESS: dict[str, Any] = {
    "stop": {"return": 10.0, "time": 3600},  # out of reach
    "evaluation": {"every_s": 3600, "near_every_s": 3600, "near": 0},
    "replay": {"samples_per_insert": 2},  # busy players, and a learner that leaves them the cores
}
ON_POLICY: dict[str, Any] = target_tree(
    stop=ENDLESS["stop"],
    evaluation=ENDLESS["evaluation"],
    env={"id": "ddrl/Pick-v0"},
    algorithm={"name": "ppo", "batch_size": 512, "minibatch_size": 128, "num_epochs": 4},
)
"""A run without end whose versions count iterations."""
ON_POLICY["replay"] = {}
del ON_POLICY["learner"]["publish_every_s"]
TRACE = "Traceback (most recent call last)"


class Fleet:
    """Server, processes and one run; makes itself whole again between faults.

    Args:
        server: it must keep its data over a kill.
        processes: where learner and workers run.
        worker_url, learner_url: other ways to the server, for example through a proxy.
        concurrency: processes of the worker.
        tree: the run's config, whole; or
        sections: of the run's config, beside those of an endless one.
    """

    def __init__(
        self,
        server: PrivateServer,
        processes: Processes,
        *,
        worker_url: str | None = None,
        learner_url: str | None = None,
        concurrency: int = 1,
        tree: Tree = None,
        **sections: Any,
    ) -> None:
        self.server, self.processes = server, processes
        self.client = server.client
        self._worker_url, self._learner_url = worker_url or server.url, learner_url or server.url
        self._concurrency = concurrency
        merged = {name: {**ENDLESS.get(name, {}), **sections.get(name, {})} for name in {*ENDLESS, *sections}}
        self.worker = self.start_worker()
        self.learner = self.start_learner()
        self.run = processes.detach(server.url, tree=tree, **merged)
        self.ready()

    def start_worker(self, **options: Any) -> Process:
        """One more worker."""
        return self.processes.worker(self._worker_url, **{"concurrency": self._concurrency, **options})

    def start_learner(self, **options: Any) -> Process:
        """One more learner: of the run when there is none, else on standby."""
        return self.processes.learner(self._learner_url, **options)

    def state(self) -> runs.RunState:
        """The run's."""
        return runs.state(self.client, self.run)

    def nodes(self) -> set[str]:
        """Workers that say they are there."""
        return {heartbeat.node for heartbeat in workers.alive(self.client)}

    def audit(self) -> Audit:
        """Of the run."""
        return ledger.audit(self.client, self.run)

    def ready(self) -> None:
        """Server, learner and worker are there, and the run goes on: whatever the fault before has left."""
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

    def goes_on(self, within_s: float, *, updates: bool = True) -> float:
        """Seconds until fragments of new play are acknowledged, and updates made; fails beyond `within_s`."""
        before, began = self.state_within(within_s), time.monotonic()

        def has_gone_on() -> bool:
            with contextlib.suppress(*connection.UNREACHABLE):
                now = self.state()
                return now.appended_fragments > before.appended_fragments and (
                    not updates or now.updates > before.updates
                )
            return False

        self.processes.until(has_gone_on, within_s)
        return time.monotonic() - began

    def state_within(self, within_s: float) -> runs.RunState:
        """The run's state, once the server tells it."""
        wait_until(self.server.answers, within_s)
        return self.state()

    @contextlib.contextmanager
    def survives(self, within_s: float, *, traces: tuple[str, ...] = ()) -> Iterator[None]:
        """What happens inside is survived: see the module's docstring.

        Args:
            within_s: bound from the block's end to new play and updates, through `bound`.
            traces: names of processes whose tracebacks are part of the fault.
        """
        self.ready()
        before = self.audit()
        said = {process.log: len(process.text()) for process in self.processes.started}
        yield
        recovery_s = self.goes_on(bound(within_s))
        print(f"went on after {recovery_s:.1f} s")
        self.accounts_for(before)
        for process in self.processes.started:
            new = process.text()[said.get(process.log, 0) :]
            assert process.name in traces or TRACE not in new, (process.log.name, new[-4000:])

    def accounts_for(self, before: Audit) -> Audit:
        """The ledger balances, and no producer has fewer acknowledged fragments than it had."""
        self.processes.until(lambda: self.audit().is_balanced, bound(5.0))
        now = self.audit()
        for producer, account in before.accounts.items():
            assert now.accounts[producer].appended >= account.appended, (producer, account, now)
        assert now.total("trimmed") == 0, now
        return now

    def says(self, process: Process, words: str, within_s: float = 20.0) -> str:
        """The line in which a process says `words`, waited for."""
        self.processes.until(lambda: words in process.text(), within_s)
        return next(line for line in process.text().splitlines() if words in line)


@contextlib.contextmanager
def fleet_of(folder: Path, **options: Any) -> Iterator[Fleet]:
    """A fleet of its own server; all of it ends with the block."""
    require_program()
    with contextlib.ExitStack() as stack:
        server = PrivateServer(*WITH_FILE)
        stack.callback(server.close)
        processes = stack.enter_context(Processes(folder))
        stack.callback(processes.kill)
        yield Fleet(server, processes, **options)
