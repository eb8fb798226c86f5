"""Messages that come twice, and clocks that are wrong: play is counted once, and nothing waits for an hour."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_fleet import Fleet, fleet_of
from processes import ROOT, bound

from ddrl import keys
from ddrl.celery import ROLLOUT
from ddrl.store import workers

pytestmark = pytest.mark.faults

LATE = '''
"""ddrl's application as nobody should run it: late acknowledgement, and impatient redelivery."""
from kombu import Queue
from ddrl.celery import app
app.conf.task_acks_late = True
app.conf.task_queues = [Queue(q.name, q.exchange, routing_key=q.routing_key) for q in app.conf.task_queues]
app.conf.broker_transport_options |= {"ack_emulation": True, "visibility_timeout": 1}
'''
SHIFTED = '''
"""A clock that is off: imported by every Python process that finds this folder on its path."""
import os, time
shift_s, true_time, true_time_ns = float(os.environ["CLOCK_SHIFT_S"]), time.time, time.time_ns
time.time = lambda: true_time() + shift_s
time.time_ns = lambda: true_time_ns() + int(shift_s * 1e9)
'''


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet"), rollout={"segment_s": 3.0}) as fleet:
        yield fleet


def deliveries(*logs: Path) -> Counter[str]:
    """How often each rollout task was received."""
    return Counter(
        task
        for log in logs
        for task in re.findall(r"ddrl\.rollout\[([0-9a-f-]+)\] received", log.read_text())
    )


def test_a_message_delivered_twice(fleet: Fleet) -> None:
    queue = keys.queue(ROLLOUT)
    other = fleet.start_worker()
    with fleet.survives(5.0):
        twice = fleet.processes.folder

        def double() -> bool:
            for message in fleet.client.lrange(queue, 0, 0):
                fleet.client.lpush(queue, message)
            logs = [process.log for process in (fleet.worker, other)]
            return max(deliveries(*logs).values(), default=0) > 1

        fleet.processes.until(double, 60.0)
        assert twice
    other.kill_group()
    assert fleet.audit().total("duplicates") == 0  # two tasks played: two producers, nothing repeated


def test_messages_delivered_again_as_they_are_acknowledged_late(fleet: Fleet) -> None:
    (fleet.processes.folder / "late.py").write_text(LATE)
    path = {"PYTHONPATH": f"{fleet.processes.folder}{os.pathsep}{ROOT}"}
    late = [
        fleet.processes.start(
            "late",
            fleet.server.url,
            "-m",
            "celery",
            "-A",
            "late",
            "worker",
            "-c",
            "1",
            "-l",
            "info",
            env=path,
        )
        for _ in range(2)
    ]
    fleet.worker.kill_group()
    with fleet.survives(5.0):
        pass
    with fleet.survives(5.0):
        fleet.processes.until(lambda: max(deliveries(*(w.log for w in late)).values(), default=0) > 1, 60.0)
    for worker in late:
        worker.kill_group()


def test_clocks_that_are_an_hour_off(fleet: Fleet) -> None:
    folder = fleet.processes.folder / "shifted"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SHIFTED)

    def shifted(hours: float) -> dict[str, str]:
        return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CLOCK_SHIFT_S": str(hours * 3600)}

    with fleet.survives(5.0):
        fleet.worker.kill_group()
        fleet.learner.kill()
        fleet.worker = fleet.start_worker(env=shifted(1))
        fleet.learner = fleet.start_learner(env=shifted(-1))
        fleet.processes.until(fleet.nodes)
    hour_ahead = re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", fleet.worker.text())
    assert hour_ahead is not None
    assert time.mktime(time.strptime(hour_ahead[1], "%Y-%m-%d %H:%M:%S")) > time.time() + 3000
    state = fleet.state()
    assert state.leased and abs(state.first_step_s - time.time()) < 600  # times are the server's
    fleet.processes.until(lambda: fleet.state().updates > state.updates + 100, bound(5.0))
    assert len(workers.alive(fleet.client)) == 1
