"""Entries that no collector wrote are refused with their reasons, one by one, and harm nobody.

They are real entries of the live run with one thing forged (poison.py), added by a client without the append.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.fault_fleet import Fleet, fleet_of
from support.poison import COUNTERS, POISON, UNKNOWN_PRODUCER, Fields
from support.processes import Process, bound

from ddrl.store import keys, stream

pytestmark = pytest.mark.faults
MIB = 1024**2


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(module_fleet: Fleet) -> Iterator[Fleet]:
    yield module_fleet
    module_fleet.tidy()


def some_entry(fleet: Fleet) -> Fields:
    """The newest one that a collector wrote."""
    newest = fleet.client.xrevrange(keys.experience(fleet.run), count=100)
    return next(dict(fields) for _, fields in newest if fields[b"p"] != UNKNOWN_PRODUCER[b"p"])


def reasons(fleet: Fleet) -> list[str]:
    return [fields[b"reason"].decode() for _, fields in fleet.client.xrange(keys.dead(fleet.run))]


def resident_bytes(process: Process) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


def poison(fleet: Fleet, fields: Mapping[bytes, bytes]) -> str:
    """Add an entry to the stream; the reason for which it is refused."""
    before = len(reasons(fleet))
    fleet.client.xadd(keys.experience(fleet.run), dict(fields))
    fleet.processes.until(lambda: len(reasons(fleet)) > before, bound(5.0))
    return reasons(fleet)[before]


def test_forged_entries_are_refused_with_their_reasons(fleet: Fleet) -> None:
    with fleet.survives(5.0):
        held = resident_bytes(fleet.learner)
        for name, (forge, words) in POISON.items():
            reason = poison(fleet, {**forge(some_entry(fleet)), **UNKNOWN_PRODUCER})
            assert words in reason, (name, reason)
            assert len(reason.splitlines()) == 1, (name, reason)
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
        for fields in [some_entry(fleet) for _ in range(3)]:
            reason = poison(fleet, fields)
            assert "repeat" in reason, reason
    now = fleet.audit()
    assert now.total("consumed") <= now.total("appended") and now.unknown >= before.unknown + 3, now
    assert stream.order(now.cursor.encode()) > stream.order(before.cursor.encode())
