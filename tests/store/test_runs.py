"""Runs: creation, names, status, and the memory that they need. Settings: tests/cli; deletion: tests/runs."""

from __future__ import annotations

import pytest
from redis import Redis
from support.store import SPACES, make_config, make_run, take

from ddrl.store import checkpoints, runs
from ddrl.store.connection import StoreError


def events(client: Redis, run: str) -> list[str]:
    return [row["event"] for row in runs.journal(client, run)]


def test_a_run_is_created_active_and_found_by_prefix(client: Redis, run: str) -> None:
    assert runs.resolve(client, run[:6]) == run == runs.resolve(client, "last")
    assert runs.state(client, run).status == "active"
    assert runs.config(client, run) == make_config() and runs.spaces(client, run) == SPACES
    with pytest.raises(runs.UnknownRunError, match=f"run nope: not on this server; the newest is {run}"):
        runs.resolve(client, "nope")


def test_only_some_changes_of_status_are_allowed(client: Redis, run: str) -> None:
    assert not runs.set_status(client, run, "active", "no change")
    assert runs.set_status(client, run, "paused", "")
    assert runs.set_status(client, run, "paused", "")  # a command that was sent again
    assert not runs.set_status(client, run, "paused", "again")
    assert runs.set_status(client, run, "active", "") and runs.set_status(client, run, "solved", "yes")
    assert not any(runs.set_status(client, run, status, "too late") for status in ("stopped", "active"))
    with pytest.raises(StoreError, match="is solved"):
        runs.reactivate(client, run)
    assert runs.state(client, run).ended_s > 0
    assert events(client, run) == ["created", "paused", "active", "solved"]


def test_a_stopped_run_goes_on_with_more_time(client: Redis, run: str, token: int) -> None:
    checkpoints.save(client, run, token, b"", {"elapsed_s": 40.0})
    runs.set_status(client, run, "time", "time limit of 40 s")
    with pytest.raises(StoreError, match="give it more, such as --time 10m"):
        runs.reactivate(client, run)
    runs.reactivate(client, run, more_time_s=60.0)
    assert runs.state(client, run).status == "active" and runs.state(client, run).ended_s == 0
    assert runs.config(client, run).stop.time == 100.0
    runs.set_status(client, run, "time", "limit of 500 updates")
    with pytest.raises(StoreError, match="reached its limit of 500 updates; start another one"):
        runs.reactivate(client, run, more_time_s=60.0)


def test_the_memory_that_other_active_runs_need_is_summed(client: Redis, run: str, token: int) -> None:
    other = make_run(client, replay={"max_bytes": 65_536})
    assert runs.reserve(client, run, token, 5) == 65_536  # it has not stated its need: its stream counts
    assert runs.reserve(client, other, take(client, other), 7) == 5
    assert runs.reserve(client, run, token, 6) == 7
    runs.set_status(client, other, "stopped", "by the test")
    assert runs.reserve(client, run, token, 6) == 0
