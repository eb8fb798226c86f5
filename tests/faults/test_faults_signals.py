"""SIGTERM and Ctrl-C, once and twice: once is a clean end, twice an immediate one, and neither loses anything."""

from __future__ import annotations

import signal
import time

import pytest
from support.fault_fleet import TRACE, Fleet
from support.private_server import PrivateServer
from support.processes import EXACT, Process, Processes, bound, descendants, is_alive

from ddrl.store import ledger, runs

pytestmark = pytest.mark.faults
ENDS = [(signal.SIGTERM, 1), (signal.SIGINT, 2)]
ENDS += [(signal.SIGTERM, 2), (signal.SIGINT, 1)] if EXACT else []
TWICE = [signum for signum, times in ENDS if times == 2]


def end(process: Process, signum: signal.Signals, times: int, within_s: float = 5.0) -> int:
    """Send the signal so often; the exit code."""
    process.send_signal(signum)
    if times == 2:
        time.sleep(0.1)  # or the second one of a kind is merged with the first
        process.send_signal(signum)
    return process.wait(bound(within_s))


def submit(processes: Processes, server: PrivateServer) -> tuple[Process, str]:
    """Start `ddrl submit` with a worker and a learner; return it and its endless run, once that has made updates."""
    config, client = str(processes.config(stop={"return": 10.0})), server.client
    words = ("-m", "ddrl", "submit", config, "--workers", "1", "--learner")
    command = processes.start("submit", server.url, *words)
    processes.until(lambda: any(runs.state(client, run).updates for run in runs.names(client)))
    return command, runs.names(client)[0]


@pytest.mark.parametrize("signum", TWICE)
def test_submit_twice_ends_at_once_and_can_be_resumed(signum, server, processes: Processes) -> None:
    command, run = submit(processes, server)
    children = descendants(command.pid)
    assert end(command, signum, 2) in (130, 128 + signum)
    assert TRACE not in command.text()
    processes.until(lambda: not any(map(is_alive, children)), bound(3.0))
    processes.ddrl(server.url, "resume", run, "--time", "1s", "--workers", "0", "--learner")
    assert runs.status(server.client, run) == "time"
    assert ledger.audit(server.client, run).is_balanced


@pytest.mark.long
def test_submit_by_sigterm_once_stops_cleanly(server, processes: Processes) -> None:
    command, run = submit(processes, server)
    assert end(command, signal.SIGTERM, 1, within_s=15.0) == 130  # checkpoint, artifacts, then workers
    assert TRACE not in command.text() and "ddrl resume" in command.text()
    assert runs.state(server.client, run).status == "stopped"
    assert ledger.audit(server.client, run).is_balanced


@pytest.mark.parametrize(("signum", "times"), ENDS)
def test_worker_and_learner_end_and_others_go_on(fleet: Fleet, signum: signal.Signals, times: int) -> None:
    """The learner is ended while the worker plays, then the worker while the next learner comes up."""
    with fleet.survives(10.0):
        pool, ended = fleet.worker.pool(), fleet.learner
        code = end(fleet.learner, signum, times)
        assert code in ({0} if times == 1 else {0, 128 + signum, -signum}), (code, fleet.learner.text())
        fleet.learner = fleet.start_learner()
        code = end(fleet.worker, signum, times)
        assert code in ({0} if times == 1 else {0, 1, 128 + signum, -signum}), (code, fleet.worker.text())
        fleet.processes.until(lambda: not any(map(is_alive, pool)), bound(3.0))
        fleet.worker = fleet.start_worker()
    assert TRACE not in ended.text()
