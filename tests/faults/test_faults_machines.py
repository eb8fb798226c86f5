"""Processes and machines that play are killed, leave, join, get messages twice, have wrong clocks: the run goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.fault_fleet import Fleet
from support.processes import EXACT, ROOT, Process, bound
from support.runs import start, target_config

from ddrl.celery import ROLLOUT
from ddrl.store import keys, runs, segments, workers

pytestmark = pytest.mark.faults
FLEET = {"concurrency": 2}

SLOW_TO_MAKE = """
import os, pathlib, time
from ddrl.envs import toy

def make():  # the target toy, whose first process can be killed while it is made
    if "MAKING_FOLDER" in os.environ:
        pathlib.Path(os.environ["MAKING_FOLDER"], str(os.getpid())).touch()
        time.sleep(0.3)
    return toy.target()
"""

LATE = """
# ddrl's application as nobody should run it: late acknowledgment, and early redelivery.
from kombu import Queue
from ddrl.celery import app
app.conf.task_acks_late = True
app.conf.task_queues = [Queue(q.name, q.exchange, routing_key=q.routing_key) for q in app.conf.task_queues]
app.conf.broker_transport_options |= {"ack_emulation": True, "visibility_timeout": 0.2}
app.conf.broker_transport_options |= {"unacked_restore_interval": 0.5, "unacked_restore_throttle": 1}
"""
SHIFTED = '''
"""A clock that is off: imported by every Python process that finds this folder on its path."""
import os, time
shift_s, true_time, true_time_ns = float(os.environ["CLOCK_SHIFT_S"]), time.time, time.time_ns
time.time = lambda: true_time() + shift_s
time.time_ns = lambda: true_time_ns() + int(shift_s * 1e9)
'''


def importing(folder: Path, **env: str) -> dict[str, str]:
    """Variables of a process that finds the modules in a folder."""
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **env}


def producers(fleet: Fleet) -> int:
    return int(fleet.client.hlen(keys.producers(fleet.run)))


def test_a_process_killed_in_mid_episode(fleet: Fleet) -> None:
    with fleet.survives(2.0):
        found: list[int] = []  # between two segments none plays
        fleet.processes.until(
            lambda: (
                found.extend(one.pid for one in segments.playing(fleet.client, fleet.run).values()) or found
            )
        )
        before, killed = producers(fleet), found[0]
        os.kill(killed, signal.SIGKILL)
    fleet.processes.until(lambda: producers(fleet) > before, bound(10.0))  # its replacement plays too
    fleet.processes.until(lambda: fleet.state().lost_producers > 0, bound(8.0))
    assert fleet.worker.running and killed not in fleet.worker.pool()


def test_a_process_killed_before_its_first_fragment(fleet: Fleet, tmp_path: Path, monkeypatch) -> None:
    folder = fleet.processes.folder
    (folder / "slow_to_make.py").write_text(SLOW_TO_MAKE)
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "slow_to_make")
    monkeypatch.syspath_prepend(folder)
    run = start(fleet.client, target_config(env={"id": "slow_to_make:make"}, stop={"return": 10.0}))
    runs.set_status(fleet.client, fleet.run, "paused", "by the test")
    try:
        fleet.start_learner()
        fleet.start_worker(env=importing(folder, MAKING_FOLDER=str(tmp_path)))
        fleet.processes.until(lambda: os.listdir(tmp_path))
        assert runs.state(fleet.client, run).appended_fragments == 0
        os.kill(int(os.listdir(tmp_path)[0]), signal.SIGKILL)
        fleet.processes.until(lambda: runs.state(fleet.client, run).appended_fragments > 0, bound(2.0))
    finally:  # the other tests share the fleet
        runs.set_status(fleet.client, run, "stopped", "by the test")
        runs.reactivate(fleet.client, fleet.run)


@pytest.mark.long
def test_a_machine_gone_while_another_is_there(fleet: Fleet) -> None:
    other = fleet.start_worker("-c", "1")
    fleet.processes.until(lambda: len(fleet.nodes()) == 2)
    with fleet.survives(2.0):
        other.kill_group()
    fleet.processes.until(lambda: len(fleet.nodes()) == 1, bound(8.0))


def test_the_last_machine_gone_is_shown_and_a_new_one_takes_over(fleet: Fleet) -> None:
    fleet.ready()
    fleet.processes.until(lambda: segments.playing(fleet.client, fleet.run))  # else none may be lost
    before = fleet.state().lost_producers
    fleet.worker.kill_group()
    killed = len(segments.playing(fleet.client, fleet.run))
    fleet.processes.until(lambda: not fleet.nodes(), bound(8.0))
    shown = fleet.processes.ddrl(fleet.server.url, "status", fleet.run).stdout
    assert "no worker plays ddrl.rollout" in shown
    fleet.processes.until(lambda: fleet.state().lost_producers >= before + killed, bound(8.0))
    fleet.worker = fleet.start_worker()
    fleet.processes.until(fleet.nodes)
    fleet.goes_on(bound(5.0))
    fleet.judge()


def test_machines_that_join_and_leave_every_few_seconds(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        joined, until = [], time.monotonic() + (120.0 if EXACT else 8.0)
        while time.monotonic() < until:
            joined.append(fleet.start_worker("-c", "1"))
            time.sleep(3.0)
            if len(joined) > 1:
                leaving = joined.pop(0)
                if len(fleet.processes.started) % 2:
                    leaving.kill_group()
                else:
                    leaving.send_signal(signal.SIGTERM)
        for process in joined:
            process.send_signal(signal.SIGTERM)
    codes = {process.wait() for process in joined}
    assert codes <= {0, -signal.SIGTERM, 128 + signal.SIGTERM}  # the last one may not have been up
    fleet.processes.until(lambda: len(fleet.nodes()) == 1, bound(8.0))


def deliveries(*workers: Process) -> int:
    """Return how often any one rollout task was received, at most."""
    text = "".join(worker.text() for worker in workers)
    return max(Counter(re.findall(r"ddrl\.rollout\[([0-9a-f-]+)\] received", text)).values(), default=0)


def test_a_message_delivered_twice(fleet: Fleet) -> None:
    queue = keys.queue(ROLLOUT)
    other = fleet.start_worker()
    with fleet.survives(5.0):

        def double() -> bool:
            for message in fleet.client.lrange(queue, 0, 0):
                fleet.client.lpush(queue, message)
            return deliveries(fleet.worker, other) > 1

        fleet.processes.until(double, 60.0)
    assert fleet.audit().total("duplicates") == 0  # two tasks played: two producers, nothing repeated


@pytest.mark.long
def test_messages_delivered_again_as_they_are_acknowledged_late(fleet: Fleet) -> None:
    (fleet.processes.folder / "late.py").write_text(LATE)
    command = ("late", fleet.server.url, *["-m", "celery", "-A", "late", "worker", "-c", "1", "-l", "info"])
    late = [fleet.processes.start(*command, env=importing(fleet.processes.folder)) for _ in range(2)]
    with fleet.survives(5.0):
        fleet.processes.until(lambda: deliveries(*late, fleet.worker) > 1, 60.0)


@pytest.mark.long
def test_clocks_that_are_an_hour_off(fleet: Fleet) -> None:
    folder = fleet.processes.folder / "shifted"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SHIFTED)
    with fleet.survives(5.0):
        before = fleet.nodes()
        fleet.worker.kill_group()
        fleet.learner.kill()
        fleet.worker = fleet.start_worker(env=importing(folder, CLOCK_SHIFT_S="3600"))
        fleet.learner = fleet.start_learner(env=importing(folder, CLOCK_SHIFT_S="-3600"))
        fleet.processes.until(lambda: fleet.nodes() - before)
    hour_ahead = re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", fleet.worker.text())
    assert hour_ahead is not None
    assert time.mktime(time.strptime(hour_ahead[1], "%Y-%m-%d %H:%M:%S")) > time.time() + 3000
    state = fleet.state()
    assert state.leased and abs(state.first_step_s - time.time()) < 600  # times are the server's
    fleet.processes.until(lambda: fleet.state().updates > state.updates + 100, bound(5.0))
    fleet.processes.until(lambda: len(workers.alive(fleet.client)) == 1, bound(8.0))
