"""The server is killed, freezes, or is cut off: everybody waits with one sentence, and goes on by itself.

Worker and learner reach the server through a proxy each; the command that submitted the run does so directly.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.fault_fleet import ON_POLICY, TRACE, Fleet, fleet_of
from support.private_server import WITH_FILE, PrivateServer, require_program
from support.processes import EXACT, Processes, Proxy, Tree, bound

from ddrl.store import runs

pytestmark = pytest.mark.faults
CUT_S = 20.0  # until a half-open connection is given up: replies are awaited for 10 s


class Proxied(NamedTuple):
    fleet: Fleet
    worker: Proxy
    learner: Proxy


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    require_program()
    with contextlib.ExitStack() as stack:
        server = PrivateServer(*WITH_FILE)
        stack.callback(server.close)
        worker, learner = Proxy(server.url), Proxy(server.url)
        stack.callback(worker.close), stack.callback(learner.close)
        processes = stack.enter_context(Processes(tmp_path_factory.mktemp("fleet")))
        stack.callback(processes.kill)
        fleet = Fleet(
            server, processes, worker_url=worker.url, learner_url=learner.url, replay={"slack_steps": 20_000}
        )
        yield Proxied(fleet, worker, learner)


def test_the_server_killed_and_started_again_with_its_file(proxied: Proxied) -> None:
    fleet = proxied.fleet
    command = fleet.processes.start("resume", fleet.server.url, "-m", "ddrl", "resume", fleet.run)
    fleet.says(command, fleet.run)
    with fleet.survives(5.0):
        seen = 0
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            seen = fleet.state().appended_fragments
        fleet.server.kill()
        time.sleep(2.0)
        fleet.server.start()
        assert fleet.state().appended_fragments >= seen  # what a client has been told is there again
    assert [process.running for process in (fleet.worker, fleet.learner, command)] == [True] * 3
    command.kill()


def test_the_server_frozen(proxied: Proxied) -> None:
    fleet = proxied.fleet
    with fleet.survives(5.0), fleet.server.frozen():
        time.sleep(30.0 if EXACT else 6.0)
    assert fleet.worker.running and fleet.learner.running


def test_the_servers_port_refuses(proxied: Proxied) -> None:
    with proxied.fleet.survives(5.0):
        proxied.worker.refuse(), proxied.learner.refuse()
        time.sleep(3.0)
        proxied.worker.thaw(), proxied.learner.thaw()
    assert proxied.fleet.worker.running and proxied.fleet.learner.running


def test_half_open_connections_of_a_worker(proxied: Proxied) -> None:
    """No FIN, no RST: commands, the blocking wait for the allowance, Celery's queue, the heartbeat."""
    with proxied.fleet.survives(CUT_S):
        assert proxied.worker.cut() >= 3
    proxied.fleet.processes.until(lambda: proxied.fleet.nodes(), bound(CUT_S))
    tasks = proxied.fleet.worker.text().count("received")
    proxied.fleet.processes.until(lambda: proxied.fleet.worker.text().count("received") > tasks, bound(CUT_S))


def test_half_open_connections_of_a_learner(proxied: Proxied) -> None:
    """The feed's blocking read, the service thread's commands, the dispatcher's messages to the queue."""
    with proxied.fleet.survives(CUT_S):
        assert proxied.learner.cut() >= 3
    sent = runs.state(proxied.fleet.client, proxied.fleet.run).updates
    proxied.fleet.processes.until(lambda: proxied.fleet.state().updates > sent + 50, bound(CUT_S))


@pytest.mark.parametrize("tree", [None, ON_POLICY], ids=["off-policy", "on-policy"])
def test_a_server_that_comes_back_older(tmp_path: Path, tree: Tree) -> None:
    """Its last second is lost, as by a crash of its operating system: nothing is promised of that but to go on."""
    with fleet_of(tmp_path, tree=tree) as fleet:
        file = fleet.server.file()
        size, before = file.stat().st_size, fleet.state()
        fleet.processes.until(lambda: fleet.state().version > before.version + 20)
        newest = fleet.state().version
        fleet.server.kill()
        os.truncate(file, size)
        fleet.server.start()
        fleet.goes_on(bound(5.0))
        assert "older" in fleet.says(fleet.learner, "older")
        assert fleet.state().version > newest  # versions never go back
        assert TRACE not in fleet.learner.text() + fleet.worker.text()
