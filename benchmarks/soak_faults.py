"""The faults of the soak: each does one thing to a live fleet, for a random time, and returns a description.

None ends the first worker, so that one is old enough to show whether it grows.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from soak_fleet import SoakFleet
from support.poison import COUNTERS, POISON, UNKNOWN_PRODUCER

from ddrl.celery import ROLLOUT
from ddrl.store import keys, runs

Fault = Callable[[SoakFleet, random.Random], str]
REWRITTEN_S = 10.0  # within which a learner has the append-only file rewritten after a full disk


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
    worker, after_s = draw.choice(fleet.workers[1:]), draw.uniform(0.0, 5.0)
    fleet.forget(worker)
    worker.kill_group()
    time.sleep(after_s)
    fleet.start_worker()
    return f"{worker.log.name}; another after {after_s:.1f} s"


def worker_asked_to_leave(fleet: SoakFleet, draw: random.Random) -> str:
    worker, signum = draw.choice(fleet.workers[1:]), draw.choice([signal.SIGTERM, signal.SIGINT])
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


def clocks_jump(fleet: SoakFleet, draw: random.Random) -> str:
    processes, hours, for_s = (
        [*fleet.workers, *fleet.learners],
        draw.choice([-1.0, 1.0]),
        draw.uniform(2.0, 6.0),
    )
    for process in processes:
        fleet.set_clock(process, draw.choice([0.0, hours * 3600]))
    time.sleep(for_s)
    for process in processes:
        fleet.set_clock(process, 0.0)
    return f"{hours:+.0f} h for {for_s:.1f} s, of some"


def worker_without_memory(fleet: SoakFleet, draw: random.Random) -> str:
    pool, for_s = draw.choice(fleet.workers).pool(), draw.uniform(1.0, 4.0)
    for pid in pool[:1]:
        with contextlib.suppress(ProcessLookupError, OSError):
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096
            resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
            time.sleep(for_s)
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return f"{for_s:.1f} s" if pool else "none was there"


def reply_lost(fleet: SoakFleet, draw: random.Random) -> str:
    before, deadline = fleet.recorder.num_lost, time.monotonic() + 10.0
    fleet.recorder.loses_reply = True
    while fleet.recorder.num_lost == before and time.monotonic() < deadline:
        time.sleep(0.01)
    return f"{fleet.recorder.num_lost - before} of an append"


def learner_killed(fleet: SoakFleet, draw: random.Random) -> str:
    learner, after_s = draw.choice(fleet.learners[1:]), draw.uniform(0.0, 5.0)
    fleet.forget(learner)
    learner.kill()
    time.sleep(after_s)
    fleet.start_learner()
    return f"{learner.log.name}; another after {after_s:.1f} s"


def learner_asked_to_leave(fleet: SoakFleet, draw: random.Random) -> str:
    learner, signum = draw.choice(fleet.learners[1:]), draw.choice([signal.SIGTERM, signal.SIGINT])
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
    learner, for_s = draw.choice(fleet.learners[1:]), draw.uniform(1.0, 8.0)
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


def slow_fsync(fleet: SoakFleet, draw: random.Random) -> str:
    ms, for_s = draw.choice([20, 300, 1500]), draw.uniform(2.0, 6.0)
    with fleet.slow_disk(ms):
        time.sleep(for_s)
    return f"{ms} ms each for {for_s:.1f} s"


def server_killed_during_fsync(fleet: SoakFleet, draw: random.Random) -> str:
    ms, after_s = draw.choice([300, 1500]), draw.uniform(0.0, 2.0)
    with fleet.slow_disk(ms):
        time.sleep(draw.uniform(1.0, 2.0))
        fleet.server.kill()
    time.sleep(after_s)
    fleet.server.start()
    return f"{ms} ms each, back after {after_s:.1f} s"


def slow_link(fleet: SoakFleet, draw: random.Random) -> str:
    delay_s, loss, for_s = draw.uniform(0.005, 0.1), draw.uniform(0.0, 0.2), draw.uniform(3.0, 8.0)
    fleet.proxy.slow(delay_s, loss)
    time.sleep(for_s)
    fleet.proxy.slow(0.0, 0.0)
    return f"{1000 * delay_s:.0f} ms and {loss:.0%} lost for {for_s:.1f} s"


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
    for_s, file = draw.uniform(2.0, 6.0), fleet.server.file()
    with fleet.server.full_disk():
        time.sleep(for_s)
    while not fleet.server.is_writable():  # what it acknowledged meanwhile is in its memory only
        time.sleep(0.1)
    until = time.monotonic() + REWRITTEN_S
    while (fleet.server.file() == file or fleet.server.is_rewriting()) and time.monotonic() < until:
        time.sleep(0.1)  # until then its file may have a hole, see docs/decisions.md, 7
    return f"{for_s:.1f} s"


def entries_poisoned(fleet: SoakFleet, draw: random.Random) -> str:
    run, kind = draw.choice(fleet.runs), draw.choice(sorted(POISON))
    if kind == "another dtype of actions":
        kind = "checksum"  # actions are integers already
    for fields in newest_entry(fleet, run):
        forged = {**POISON[kind][0](fields), **UNKNOWN_PRODUCER, **draw.choice([{}, *COUNTERS])}
        fleet.followers[run].forged.add(
            cast("bytes", fleet.client.xadd(keys.experience(run), cast("Any", forged)))
        )
    return kind


def entry_repeated(fleet: SoakFleet, draw: random.Random) -> str:
    run = draw.choice(fleet.runs)
    for fields in newest_entry(fleet, run):
        fleet.followers[run].forged.add(
            cast("bytes", fleet.client.xadd(keys.experience(run), cast("Any", fields)))
        )
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


def calm(fleet: SoakFleet, draw: random.Random) -> str:
    time.sleep(30.0)
    return "nothing"


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
    *(worker_joins_for_a_while, worker_without_memory, clocks_jump, learner_killed, learner_asked_to_leave),
    *(learner_stopped, server_killed, server_frozen, slow_fsync, server_killed_during_fsync, reply_lost),
    *(connections_cut, connections_frozen, connections_refused, slow_link),
    *(server_out_of_memory, server_disk_full, entries_poisoned, entry_repeated, message_twice, run_paused),
)
