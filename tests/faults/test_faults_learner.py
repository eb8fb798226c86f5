"""Learners are killed, stopped, find no room, or read what no collector wrote: nothing is consumed twice.

Forged entries are real entries of the live run with one thing changed (poison.py), added without the append.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.fault_fleet import Fleet
from support.poison import COUNTERS, POISON, UNKNOWN_PRODUCER, Fields
from support.processes import EXACT, Process, bound

from ddrl.store import keys, stream

pytestmark = pytest.mark.faults
MIB = 1024**2
PAUSE_S = 4.0 if EXACT else 2.0  # while there is no room


@pytest.mark.timeout(900)
@pytest.mark.long
def test_learners_killed_at_random_points(fleet: Fleet) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    kills = 20 if EXACT else 2
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
        fleet.learner.send_signal(signal.SIGSTOP)
        fleet.processes.until(lambda: (now := fleet.state()).appended_steps >= now.allowance > 0, bound(4.0))
        time.sleep(1.5)
        fleet.learner.send_signal(signal.SIGCONT)
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
        assert "File too large" in fleet.says(fleet.learner, "the checkpoint cannot be written")
        resource.prlimit(fleet.learner.pid, resource.RLIMIT_FSIZE, (soft, hard))
    changed_ns = (copy / "checkpoint.json").stat().st_mtime_ns
    fleet.processes.until(lambda: (copy / "checkpoint.json").stat().st_mtime_ns > changed_ns, bound(10.0))


def test_the_server_at_its_limit_of_memory(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        fleet.server.fill_memory(for_s=PAUSE_S)
        assert "the server's memory is full" in fleet.says(fleet.learner, "memory")
    assert fleet.worker.running and fleet.learner.running
    tasks = fleet.worker.text().count("received")
    fleet.processes.until(lambda: fleet.worker.text().count("received") > tasks)  # neither gone nor stuck


def test_the_servers_disk_is_full(fleet: Fleet) -> None:
    server = fleet.server
    server.client.bgrewriteaof()  # the file that follows is the one that a server may spoil
    fleet.processes.until(lambda: not server.is_rewriting())
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


# --- entries that no collector wrote ---------------------------------------------------------------------


def some_entry(fleet: Fleet) -> Fields:
    """The newest one that a collector wrote."""
    newest = fleet.client.xrevrange(keys.experience(fleet.run), count=100)
    return next(dict(fields) for _, fields in newest if fields[b"p"] != UNKNOWN_PRODUCER[b"p"])


def resident_bytes(process: Process) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


def cursor(fleet: Fleet) -> tuple[int, int]:
    """The last entry that the ledger covers."""
    return stream.order(fleet.audit().cursor.encode())


def forge(fleet: Fleet, fields: Mapping[bytes, bytes]) -> bytes:
    """Add an entry to the stream; its id."""
    entry_id: bytes = fleet.client.xadd(keys.experience(fleet.run), dict(fields))
    fleet.follower.forged.add(entry_id)
    return entry_id


def poison(fleet: Fleet, fields: Mapping[bytes, bytes]) -> str:
    """Add an entry to the stream; the reason for which it is refused."""
    dead = keys.dead(fleet.run)
    before = fleet.client.xlen(dead)
    forge(fleet, fields)
    fleet.processes.until(lambda: fleet.client.xlen(dead) > before, bound(5.0))
    return fleet.client.xrange(dead)[before][1][b"reason"].decode()


def test_forged_entries_are_refused_with_their_reasons(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        held = resident_bytes(fleet.learner)
        for name, (forge, words) in POISON.items():
            reason = poison(fleet, {**forge(some_entry(fleet)), **UNKNOWN_PRODUCER})
            assert words in reason and len(reason.splitlines()) == 1, (name, reason)
        assert resident_bytes(fleet.learner) < held + 64 * MIB
    assert fleet.learner.running


def test_forged_counters_change_neither_steps_nor_budget(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        steps = fleet.state().appended_steps
        for counters in COUNTERS:
            poison(fleet, {**some_entry(fleet), b"h": b"{}", **UNKNOWN_PRODUCER, **counters})
        fleet.goes_on(bound(5.0))
        state = fleet.state()
        assert state.appended_steps < steps + 10**7
        assert state.allowance < steps + 10**7, state
        assert 0 <= state.live_bytes < 10**9, state
    assert not fleet.state().ended


def test_an_entry_repeated_is_not_learned_from_twice(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        before = fleet.audit()
        repeated = [forge(fleet, some_entry(fleet)) for _ in range(3)]
        fleet.processes.until(lambda: cursor(fleet) > stream.order(repeated[-1]), bound(5.0))
        fleet.goes_on(bound(5.0))  # what was refused until then is reported
        fleet.follower.look()
        reasons = [fleet.follower.dead.get(one, "none: it was learned from") for one in repeated]
        assert all("is repeated" in reason for reason in reasons), reasons
    now = fleet.audit()
    assert now.total("consumed") <= now.total("appended") and now.unknown >= before.unknown + 3, now
