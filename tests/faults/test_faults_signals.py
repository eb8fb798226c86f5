"""SIGTERM and Ctrl-C, once and twice: once is a clean end, twice an immediate one, and neither loses anything."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fault_fleet import TRACE, Fleet, fleet_of
from support.processes import Process, Processes, bound

from ddrl.store import ledger, runs

pytestmark = pytest.mark.faults
BOTH = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(module_fleet: Fleet) -> Iterator[Fleet]:
    yield module_fleet
    module_fleet.tidy()


def end(process: Process, signum: signal.Signals, times: int, within_s: float = 5.0) -> int:
    """Send the signal so often; the exit code."""
    process.send(signum)
    if times == 2:
        time.sleep(0.1)  # or the second one of a kind is merged with the first
        process.send(signum)
    return process.wait(bound(within_s))


@pytest.mark.parametrize("signum", BOTH)
def test_submit_twice_ends_at_once_and_its_run_can_be_resumed(
    signum: signal.Signals, server, processes: Processes
) -> None:
    command = processes.submit(
        server.url, processes.config(stop={"return": 10.0}), "--workers", "1", "--learner"
    )
    processes.until(lambda: "updates" in command.text())
    children = [pid for pid in command.descendants() if Path(f"/proc/{pid}").exists()]
    assert end(command, signum, 2) in (130, 128 + signum)
    assert TRACE not in command.text()
    processes.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), bound(3.0))
    run = runs.names(server.client)[-1]
    processes.until(lambda: not runs.state(server.client, run).leased, 30.0)
    done = processes.ddrl(server.url, "resume", run, "--time", "1s", "--workers", "1", "--learner")
    assert done.returncode == 0
    assert ledger.audit(server.client, run).is_balanced


def test_submit_by_sigterm_once_stops_cleanly(server, processes: Processes) -> None:
    command = processes.submit(
        server.url, processes.config(stop={"return": 10.0}), "--workers", "1", "--learner"
    )
    processes.until(lambda: "updates" in command.text())
    assert end(command, signal.SIGTERM, 1, within_s=15.0) == 130  # checkpoint, artifacts, then workers
    assert TRACE not in command.text() and "ddrl resume" in command.text()
    run = runs.names(server.client)[-1]
    assert runs.state(server.client, run).status == "stopped"
    assert ledger.audit(server.client, run).is_balanced


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("signum", BOTH)
def test_worker_and_learner_end_and_others_go_on(fleet: Fleet, signum: signal.Signals, times: int) -> None:
    """The learner is ended while the worker plays, then the worker while the next learner comes up."""
    with fleet.survives(10.0):
        pool, ended = fleet.worker.pool(), fleet.learner
        code = end(fleet.learner, signum, times)
        assert code in ({0} if times == 1 else {0, 128 + signum, -signum}), (code, fleet.learner.text())
        fleet.learner = fleet.start_learner()
        code = end(fleet.worker, signum, times)
        assert code in ({0} if times == 1 else {0, 1, 128 + signum, -signum}), (code, fleet.worker.text())
        fleet.processes.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pool), bound(3.0))
        fleet.worker = fleet.start_worker()
    assert TRACE not in ended.text()
