"""Processes and machines that play are killed, leave and join: the run goes on, nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until
from fault_fleet import Fleet, fleet_of
from processes import EXACT, bound

from ddrl import keys
from ddrl.store import runs, segments

pytestmark = pytest.mark.faults

SLOW_TO_MAKE = '''
import os, pathlib, time
from ddrl.envs import toy

def make():
    """The target toy, whose first process can be killed while it is made."""
    pathlib.Path(os.environ["MAKING_FOLDER"], str(os.getpid())).touch()
    time.sleep(0.5)
    return toy.target()
'''


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet"), concurrency=2) as fleet:
        yield fleet


def producers(fleet: Fleet) -> int:
    return int(fleet.client.hlen(keys.producers(fleet.run)))


def test_a_process_killed_in_mid_episode(fleet: Fleet) -> None:
    with fleet.survives(2.0):
        playing = segments.players(fleet.client, fleet.run)
        wait_until(lambda: segments.players(fleet.client, fleet.run))
        before, killed = producers(fleet), fleet.worker.pool()[0]
        os.kill(killed, signal.SIGKILL)
    fleet.processes.until(lambda: producers(fleet) > before, bound(10.0))  # its replacement plays too
    assert fleet.worker.running and killed not in fleet.worker.pool(), playing


def test_a_process_killed_between_its_message_and_its_first_fragment(fleet: Fleet, tmp_path: Path) -> None:
    folder = fleet.processes.folder
    (folder / "slow_to_make.py").write_text(SLOW_TO_MAKE)
    modules = {"PYTHONPATH": f"{folder}{os.pathsep}{Path.cwd()}", "DDRL_ALLOW_MODULES": "slow_to_make"}
    config = fleet.processes.config(name="slow", env={"id": "slow_to_make:make"}, stop={"return": 10.0})
    submitted = fleet.processes.ddrl(
        fleet.server.url, "submit", str(config), "--detach", "--json", env=modules
    )
    run = json.loads(submitted.stdout)["run"]
    worker = fleet.start_worker(env={**modules, "MAKING_FOLDER": str(tmp_path)})
    fleet.processes.until(lambda: os.listdir(tmp_path))
    assert runs.state(fleet.client, run).appended_fragments == 0
    os.kill(int(os.listdir(tmp_path)[0]), signal.SIGKILL)
    fleet.processes.until(lambda: runs.state(fleet.client, run).appended_fragments > 0, bound(2.0))
    fleet.processes.ddrl(fleet.server.url, "stop", run)
    worker.kill_group()


def test_a_machine_gone_while_another_is_there(fleet: Fleet) -> None:
    other = fleet.start_worker(concurrency=1)
    fleet.processes.until(lambda: len(fleet.nodes()) == 2)
    with fleet.survives(2.0):
        other.kill_group()
    fleet.processes.until(lambda: len(fleet.nodes()) == 1, bound(8.0))


def test_the_last_machine_gone_is_said_and_a_new_one_takes_over(fleet: Fleet) -> None:
    fleet.ready()
    before = fleet.audit()
    fleet.worker.kill_group()

    def status() -> str:
        return fleet.processes.ddrl(fleet.server.url, "status", fleet.run).stdout

    fleet.processes.until(lambda: not fleet.nodes(), bound(8.0))
    assert "no worker plays it" in " ".join(status().split())
    fleet.processes.until(lambda: fleet.state().lost_producers > 0, bound(8.0))
    assert (
        json.loads(fleet.processes.ddrl(fleet.server.url, "status", fleet.run, "--json").stdout)["workers"]
        == []
    )
    fleet.worker = fleet.start_worker()
    fleet.processes.until(fleet.nodes)
    fleet.goes_on(bound(5.0))
    fleet.accounts_for(before)


def test_machines_that_join_and_leave_every_few_seconds(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        joined, until = [], time.monotonic() + (120.0 if EXACT else 20.0)
        while time.monotonic() < until:
            joined.append(fleet.start_worker(concurrency=1))
            time.sleep(3.0)
            if len(joined) > 1:
                leaving = joined.pop(0)
                if len(fleet.processes.started) % 2:
                    leaving.kill_group()
                else:
                    leaving.send(signal.SIGTERM)
        for process in joined:
            process.send(signal.SIGTERM)
    for process in joined:
        assert process.wait() == 0
    fleet.processes.until(lambda: len(fleet.nodes()) == 1, bound(8.0))
