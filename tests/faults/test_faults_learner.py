"""Learners are killed, stopped, or find no room: players wait and are counted, nothing is consumed twice."""

from __future__ import annotations

import json
import random
import resource
import signal
import time
from collections.abc import Iterator

import pytest
from support.fault_fleet import Fleet, fleet_of
from support.processes import EXACT, bound

pytestmark = pytest.mark.faults
PAUSE_S = 4.0  # while there is no room


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(module_fleet: Fleet) -> Iterator[Fleet]:
    yield module_fleet
    module_fleet.tidy()


@pytest.mark.timeout(900)
def test_learners_killed_at_random_points(fleet: Fleet) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    kills = 20 if EXACT else 4
    for _ in range(kills):
        with fleet.survives(10.0):
            time.sleep(draw.uniform(0.0, 1.5))
            fleet.learner.kill()
            fleet.learner = fleet.start_learner()
    fleet.processes.until(lambda: fleet.audit().total("consumed") > 0, bound(5.0))
    assert fleet.audit().total("refused") == fleet.audit().unknown == 0


def test_a_slow_learner_keeps_players_waiting_which_is_counted_and_shown(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        waited = fleet.state().allowance_wait_s
        fleet.learner.send(signal.SIGSTOP)
        time.sleep(4.0)
        held = fleet.state()
        assert held.appended_steps >= held.allowance > 0, held  # the allowance is used up
        fleet.learner.send(signal.SIGCONT)
    fleet.processes.until(lambda: fleet.state().allowance_wait_s >= waited + 1.0, bound(5.0))
    shown = json.loads(fleet.processes.ddrl(fleet.server.url, "status", fleet.run, "--json").stdout)
    assert shown["sharing"]["allowance_wait"] > 0, shown


def test_a_disk_that_is_full_where_the_copy_of_the_checkpoint_goes(fleet: Fleet) -> None:
    fleet.ready()
    copy = fleet.processes.folder / "runs" / fleet.run / "checkpoint"
    fleet.processes.until(copy.exists)
    with fleet.survives(5.0):
        soft, hard = resource.prlimit(fleet.learner.pid, resource.RLIMIT_FSIZE)
        lines = len(fleet.learner.text())
        resource.prlimit(fleet.learner.pid, resource.RLIMIT_FSIZE, (max(lines, 4096) + 4096, hard))
        said = fleet.says(fleet.learner, "checkpoint")
        assert "File too large" in said or "disk" in said, said
        resource.prlimit(fleet.learner.pid, resource.RLIMIT_FSIZE, (soft, hard))
    changed = max(path.stat().st_mtime_ns for path in copy.iterdir())
    fleet.processes.until(
        lambda: max(path.stat().st_mtime_ns for path in copy.iterdir()) > changed, bound(10.0)
    )


def test_the_server_at_its_limit_of_memory(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        fleet.server.fill_memory(for_s=PAUSE_S)
        assert "the server's memory is full" in fleet.says(fleet.learner, "memory")
    assert fleet.worker.running and fleet.learner.running
    tasks = fleet.worker.text().count("received")
    fleet.processes.until(lambda: fleet.worker.text().count("received") > tasks)  # neither gone nor stuck


def test_the_servers_disk_is_full(fleet: Fleet) -> None:
    server = fleet.server
    server.rewrite_file()  # the file that follows is the one that a server may spoil
    file = server.file()
    with fleet.survives(5.0):
        with server.full_disk():
            fleet.processes.until(lambda: not server.is_writable())
            time.sleep(PAUSE_S)
            assert "the server cannot write to its disk" in fleet.says(fleet.learner, "disk")
        fleet.processes.until(server.is_writable, 10.0)
    assert fleet.worker.running and fleet.learner.running
    fleet.processes.until(lambda: server.file() != file and not server.is_rewriting(), 20.0)
    with fleet.survives(5.0):  # what the server acknowledged when its disk was full, it finds again
        server.kill()
        server.start()
