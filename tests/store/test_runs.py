"""Runs: creation, names, status, settings, deletion, and their need of memory."""

from __future__ import annotations

import pytest
from redis import Redis
from support.store import SPACES, append, make_config, make_run, take

from ddrl.config import live_options
from ddrl.store import checkpoints, keys, runs
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


def test_delete_removes_every_key_of_an_ended_run_only(client: Redis, run: str) -> None:
    other = make_run(client)
    append(client, run, 0)
    with pytest.raises(StoreError, match="is active; stop it first"):
        runs.delete(client, run)
    runs.set_status(client, run, "stopped", "")
    assert runs.delete(client, run) >= 5
    assert runs.names(client) == [other] and runs.state(client, other).status == "active"
    assert not list(client.scan_iter(match=keys.run_pattern(run)))


def test_settings_change_whole_or_not_at_all(client: Redis, run: str) -> None:
    new = make_config().model_copy(update={"weight": 2.5, "priority": "high"})
    changes = {"weight": (1.0, 2.5), "priority": ("normal", "high")}
    assert runs.change(client, run, new, changes, version=0) == 1 == runs.config_version(client, run)
    state = runs.state(client, run)
    assert (state.weight, state.priority) == (2.5, "high")
    rows = [row for row in runs.journal(client, run) if row["event"] == "set"]
    found = [(row["option"], row["from"], row["to"]) for row in rows]
    assert found == [("weight", "1.0", "2.5"), ("priority", '"normal"', '"high"')]
    with pytest.raises(StoreError, match="changed meanwhile"):
        runs.change(client, run, make_config(), {}, version=0)
    assert runs.config(client, run) == new
    assert "weight" in live_options(type(new)) and "seed" not in live_options(type(new))


def test_the_memory_that_other_active_runs_need_is_summed(client: Redis, run: str, token: int) -> None:
    other = make_run(client, max_bytes=65_536)
    assert runs.reserve(client, run, token, 5) == 65_536  # it has not stated its need: its stream counts
    assert runs.reserve(client, other, take(client, other), 7) == 5
    assert runs.reserve(client, run, token, 6) == 7
    runs.set_status(client, other, "stopped", "by the test")
    assert runs.reserve(client, run, token, 6) == 0
