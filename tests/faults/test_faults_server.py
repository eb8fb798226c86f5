"""The server is killed, freezes, or is cut off: everybody waits with one sentence, and goes on by itself.

Worker and learner reach the server through a proxy each; the command that submitted the run does so directly.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.fault_fleet import ENDLESS, ON_POLICY, TRACE, Fleet, fleet_of
from support.processes import EXACT, bound

pytestmark = pytest.mark.faults
WORKER, LEARNER = 0, 1  # whose proxy
CUT_S = 8.0  # until half-open connections are given up: replies are awaited for 3 s
CELERY_S = 10.0  # until Celery, which checks twice, takes messages again
FLEET = {"sections": {**ENDLESS, "replay": {"samples_per_insert": 2, "slack_steps": 20_000}}}


def test_the_server_killed_and_started_again_with_its_file(fleet: Fleet) -> None:
    command = fleet.processes.start("resume", fleet.server.url, "-m", "ddrl", "resume", fleet.run)
    fleet.says(command, fleet.run)
    with fleet.survives(5.0):
        time.sleep(1.0)
        seen = fleet.state().appended_fragments
        fleet.server.kill()
        time.sleep(2.0)
        fleet.server.start()
        assert fleet.state().appended_fragments >= seen  # what a client has been told is there again
    assert [process.running for process in (fleet.worker, fleet.learner, command)] == [True] * 3
    command.kill()


def test_the_server_frozen(fleet: Fleet) -> None:
    with fleet.survives(5.0), fleet.server.frozen():
        time.sleep(30.0 if EXACT else 4.0)
    assert fleet.worker.running and fleet.learner.running


def test_the_servers_port_refuses(fleet: Fleet) -> None:
    before = len(fleet.learner.text())
    with fleet.survives(5.0):
        for proxy in fleet.proxies:
            proxy.refuse()
        time.sleep(3.0)
        for proxy in fleet.proxies:
            proxy.accept()
    assert fleet.worker.running and fleet.learner.running
    # An earlier outage may still end here.
    told = lambda: fleet.learner.text()[before:].partition("Connection refused")[2]  # noqa: E731
    fleet.processes.until(lambda: "serves again" in told())
    assert told().count("the server serves again") == 1  # once for all threads


@pytest.mark.parametrize("cut", [(WORKER,), (LEARNER,)] if EXACT else [(WORKER, LEARNER)])
def test_half_open_connections(fleet: Fleet, cut: tuple[int, ...]) -> None:
    """No FIN, no RST.

    A worker has commands, the blocking wait for the allowance, Celery's queue, the heartbeat; a learner has the
    blocking read of the stream, the service thread's commands, messages to the queue.
    """
    with fleet.survives(CUT_S):
        assert all(fleet.proxies[side].cut() >= 3 for side in cut)
    fleet.processes.until(fleet.nodes, bound(CUT_S))
    updates, tasks = fleet.state().updates, fleet.worker.text().count("received")
    fleet.processes.until(lambda: fleet.worker.text().count("received") > tasks, bound(CELERY_S))
    fleet.processes.until(lambda: fleet.state().updates > updates + 50, bound(CUT_S))


@pytest.mark.parametrize("sections", [ENDLESS, ON_POLICY] if EXACT else [ON_POLICY])
def test_a_server_that_comes_back_older(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Its last second is lost, as by a crash of its operating system: nothing is promised of that but to go on."""
    with fleet_of(tmp_path, sections) as fleet:
        file = fleet.server.file()
        size, before = file.stat().st_size, fleet.state()
        fleet.processes.until(lambda: fleet.state().version > before.version + 20)
        newest = fleet.state().version
        fleet.server.kill()
        os.truncate(file, size)
        fleet.server.start()
        assert "older" in fleet.says(fleet.learner, "older")
        fleet.processes.until(lambda: fleet.state().version > newest, bound(5.0))  # versions never go back
        fleet.goes_on(bound(5.0))
        assert TRACE not in fleet.learner.text() + fleet.worker.text()
