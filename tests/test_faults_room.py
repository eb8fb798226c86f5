"""No room: the server is at its limit of memory, or its disk is full. A sentence and a pause, no crash, no loss."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fault_fleet import Fleet, fleet_of

pytestmark = pytest.mark.faults
PAUSE_S = 4.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


def test_the_server_at_its_limit_of_memory(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        fleet.server.fill_memory(for_s=PAUSE_S)
        assert "the server's memory is full" in fleet.says(fleet.learner, "memory")
    assert fleet.worker.running and fleet.learner.running
    tasks = fleet.worker.text().count("received")
    fleet.processes.until(lambda: fleet.worker.text().count("received") > tasks)  # neither gone nor stuck


def test_the_servers_disk_is_full(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        with fleet.server.full_disk():
            fleet.processes.until(lambda: not fleet.server.is_writable())
            time.sleep(PAUSE_S)
            assert "the server cannot write to its disk" in fleet.says(fleet.learner, "disk")
        fleet.processes.until(fleet.server.is_writable, 10.0)
    assert fleet.worker.running and fleet.learner.running
