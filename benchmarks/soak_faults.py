"""The faults of the soak: each does one thing to a live fleet, for a random time, and returns a description."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from soak_fleet import SoakFleet
from support.poison import COUNTERS, POISON, UNKNOWN_PRODUCER
from support.processes import ROOT

from ddrl.celery import ROLLOUT
from ddrl.store import keys, runs

Fault = Callable[[SoakFleet, random.Random], str]

CLOCK = """
import os, time
shift_s, true_time = float(os.environ["CLOCK_SHIFT_S"]), time.time
time.time = lambda: true_time() + shift_s
"""


def playing_process_killed(fleet: SoakFleet, draw: random.Random) -> str:
    pool, signum = draw.choice(fleet.workers).pool(), draw.choice([signal.SIGKILL, signal.SIGSEGV])
    for pid in pool[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return signum.name if pool else "none was there"


def playing_process_stopped(fleet: SoakFleet, draw: random.Random) -> str:
    pool, for_s = draw.choice(fleet.workers).pool(), draw.uniform(0.5, 6.0)
    with paused(pool[:1]):
        time.sleep(for_s)
    return f"{for_s:.1f} s"


def worker_machine_gone(fleet: SoakFleet, draw: random.Random) -> str:
    worker, after_s = draw.choice(fleet.workers), draw.uniform(0.0, 5.0)
    fleet.forget(worker)
    worker.kill_group()
    time.sleep(after_s)
    fleet.start_worker()
    return f"{worker.log.name}; another after {after_s:.1f} s"


def worker_asked_to_leave(fleet: SoakFleet, draw: random.Random) -> str:
    worker, signum = draw.choice(fleet.workers), draw.choice([signal.SIGTERM, signal.SIGINT])
    fleet.forget(worker)
    worker.send_signal(signum)
    fleet.start_worker()
    began = time.monotonic()
    try:
        worker.wait(60.0)
    except AssertionError:
        fleet.findings.add(f"{worker.log.name} did not leave within 60 s of {signum.name}")
        worker.kill_group()
    return f"{signum.name}, left after {time.monotonic() - began:.1f} s"


def worker_joins_for_a_while(fleet: SoakFleet, draw: random.Random) -> str:
    for_s = draw.uniform(3.0, 12.0)
    worker = fleet.start_worker()
    time.sleep(for_s)
    fleet.forget(worker)
    worker.kill_group()
    return f"{for_s:.1f} s"


def worker_with_a_wrong_clock(fleet: SoakFleet, draw: random.Random) -> str:
    folder = fleet.processes.folder / "clock"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CLOCK)
    hours = draw.choice([-1.0, 1.0])
    path = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CLOCK_SHIFT_S": str(hours * 3600)}
    worker = draw.choice(fleet.workers)
    fleet.forget(worker)
    worker.kill_group()
    fleet.start_worker(env=path)
    return f"{hours:+.0f} h"


def learner_killed(fleet: SoakFleet, draw: random.Random) -> str:
    learner, after_s = draw.choice(fleet.learners), draw.uniform(0.0, 5.0)
    fleet.forget(learner)
    learner.kill()
    time.sleep(after_s)
    fleet.start_learner()
    return f"{learner.log.name}; another after {after_s:.1f} s"


def learner_asked_to_leave(fleet: SoakFleet, draw: random.Random) -> str:
    learner, signum = draw.choice(fleet.learners), draw.choice([signal.SIGTERM, signal.SIGINT])
    fleet.forget(learner)
    learner.send_signal(signum)
    if draw.random() < 0.5:
        time.sleep(0.1)
        learner.send_signal(signum)
    try:
        learner.wait(60.0)
    except AssertionError:
        fleet.findings.add(f"{learner.log.name} did not leave within 60 s of {signum.name}")
        learner.kill()
    fleet.start_learner()
    return signum.name


def learner_stopped(fleet: SoakFleet, draw: random.Random) -> str:
    learner, for_s = draw.choice(fleet.learners), draw.uniform(1.0, 8.0)
    with paused([learner.pid]):
        time.sleep(for_s)
    time.sleep(0.5)
    if not learner.running:  # another took over meanwhile: it ends, as it should
        fleet.forget(learner)
        fleet.start_learner()
    return f"{for_s:.1f} s"


def server_killed(fleet: SoakFleet, draw: random.Random) -> str:
    after_s = draw.uniform(0.0, 5.0)
    fleet.server.kill()
    time.sleep(after_s)
    fleet.server.start()
    return f"back after {after_s:.1f} s"


def server_frozen(fleet: SoakFleet, draw: random.Random) -> str:
    for_s = draw.uniform(1.0, 12.0)
    with fleet.server.frozen():
        time.sleep(for_s)
    return f"{for_s:.1f} s"


def connections_cut(fleet: SoakFleet, draw: random.Random) -> str:
    return f"{fleet.proxy.cut()} half-open"


def connections_frozen(fleet: SoakFleet, draw: random.Random) -> str:
    for_s = draw.uniform(1.0, 8.0)
    fleet.proxy.freeze(for_s)
    time.sleep(for_s)
    return f"{for_s:.1f} s"


def connections_refused(fleet: SoakFleet, draw: random.Random) -> str:
    for_s = draw.uniform(1.0, 5.0)
    fleet.proxy.refuse()
    time.sleep(for_s)
    fleet.proxy.accept()
    return f"{for_s:.1f} s"


def server_out_of_memory(fleet: SoakFleet, draw: random.Random) -> str:
    for_s = draw.uniform(2.0, 6.0)
    fleet.server.fill_memory(for_s)
    return f"{for_s:.1f} s"


def server_disk_full(fleet: SoakFleet, draw: random.Random) -> str:
    for_s = draw.uniform(2.0, 6.0)
    with fleet.server.full_disk():
        time.sleep(for_s)
    while not fleet.server.is_writable():  # what it acknowledged meanwhile is in its memory only
        time.sleep(0.1)
    return f"{for_s:.1f} s"


def entries_poisoned(fleet: SoakFleet, draw: random.Random) -> str:
    run, kind = draw.choice(fleet.runs), draw.choice(sorted(POISON))
    if kind == "another dtype of actions" and "on-policy" in run:
        kind = "checksum"  # actions of that run are integers already
    for fields in newest_entry(fleet, run):
        forged = {**POISON[kind][0](fields), **UNKNOWN_PRODUCER, **draw.choice([{}, *COUNTERS])}
        fleet.client.xadd(keys.experience(run), cast("Any", forged))
    return kind


def entry_repeated(fleet: SoakFleet, draw: random.Random) -> str:
    run = draw.choice(fleet.runs)
    for fields in newest_entry(fleet, run):
        fleet.client.xadd(keys.experience(run), cast("Any", fields))
    return run


def message_twice(fleet: SoakFleet, draw: random.Random) -> str:
    queue, deadline, num = keys.queue(ROLLOUT), time.monotonic() + 5.0, 0
    while num < 5 and time.monotonic() < deadline:
        for message in fleet.client.lrange(queue, 0, 0):
            num += fleet.client.lpush(queue, message) > 0
    return f"{num} messages"


def run_paused(fleet: SoakFleet, draw: random.Random) -> str:
    run, for_s = draw.choice(fleet.runs), draw.uniform(1.0, 4.0)
    runs.set_status(fleet.client, run, "paused", "soak")
    time.sleep(for_s)
    runs.set_status(fleet.client, run, "active", "")
    return f"{run}, {for_s:.1f} s"


def newest_entry(fleet: SoakFleet, run: str) -> list[dict[bytes, bytes]]:
    """Return the fields of a stream's newest entry, in a list that is empty if there is none."""
    entries = cast(
        "list[tuple[bytes, dict[bytes, bytes]]]", fleet.client.xrevrange(keys.experience(run), count=1)
    )
    return [fields for _, fields in entries]


@contextlib.contextmanager
def paused(pids: list[int]) -> Iterator[None]:
    """Stop processes while the context lasts."""
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    for pid in alive:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


FAULTS: tuple[Fault, ...] = (
    *(playing_process_killed, playing_process_stopped, worker_machine_gone, worker_asked_to_leave),
    *(worker_joins_for_a_while, worker_with_a_wrong_clock, learner_killed, learner_asked_to_leave),
    *(
        learner_stopped,
        server_killed,
        server_frozen,
        connections_cut,
        connections_frozen,
        connections_refused,
    ),
    *(server_out_of_memory, server_disk_full, entries_poisoned, entry_repeated, message_twice, run_paused),
)
