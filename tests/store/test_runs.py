"""Runs: creation, names, status, settings, deletion."""

from __future__ import annotations

import pytest
from redis import Redis
from support.store import SPACES, append, make_config, make_run, take

from ddrl.config import live_options
from ddrl.store import checkpoints, keys, runs
from ddrl.store import leases as lease
from ddrl.store.connection import StoreError


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return make_run(client)


def test_a_run_is_created_active_and_found_by_prefix(client: Redis, run: str) -> None:
    assert runs.resolve(client, run[:6]) == run == runs.resolve(client, "last")
    assert runs.state(client, run).status == "active"
    assert runs.config(client, run) == make_config()
    assert runs.spaces(client, run) == SPACES
    with pytest.raises(runs.UnknownRunError, match=f"run nope: not on this server; the newest is {run}"):
        runs.resolve(client, "nope")


def test_only_some_changes_of_status_are_allowed(client: Redis, run: str) -> None:
    assert not runs.set_status(client, run, "active", "no change")
    assert runs.set_status(client, run, "paused", "")
    assert runs.set_status(client, run, "paused", "")  # a command that was sent again
    assert not runs.set_status(client, run, "paused", "again")
    assert runs.set_status(client, run, "active", "") and runs.set_status(client, run, "solved", "yes")
    assert not runs.set_status(client, run, "stopped", "too late") and not runs.set_status(
        client, run, "active", ""
    )
    with pytest.raises(StoreError, match="is solved"):
        runs.reactivate(client, run)
    assert runs.state(client, run).ended_s > 0
    assert [row["event"] for row in runs.journal(client, run)] == ["created", "paused", "active", "solved"]


def test_a_stopped_run_goes_on_with_more_time(client: Redis, run: str) -> None:
    checkpoints.save(client, run, take(client, run), b"", {"elapsed_s": 40.0})
    runs.set_status(client, run, "time", "time limit of 40 s")
    with pytest.raises(StoreError, match="give it more, such as --time 10m"):
        runs.reactivate(client, run)
    runs.reactivate(client, run, more_time_s=60.0)
    assert runs.state(client, run).status == "active" and runs.state(client, run).ended_s == 0
    assert runs.config(client, run).stop.time == 100.0


def test_a_run_that_reached_a_count_cannot_go_on(client: Redis, run: str) -> None:
    runs.set_status(client, run, "time", "limit of 500 updates")
    with pytest.raises(StoreError, match="reached its limit of 500 updates; start another one"):
        runs.reactivate(client, run, more_time_s=60.0)


def test_a_replaced_learner_cannot_end_the_run_but_the_operator_can(client: Redis, run: str) -> None:
    old = take(client, run)
    client.delete(keys.lease(run))
    new = take(client, run)
    with pytest.raises(lease.LeaseLostError):
        runs.set_status(client, run, "time", "too late", token=old)
    assert runs.state(client, run).status == "active"
    assert runs.set_status(client, run, "time", "in time", token=new)
    assert runs.set_status(client, run, "active", "operator") and runs.set_status(
        client, run, "stopped", "operator"
    )


def test_delete_removes_every_key_of_an_ended_run_only(client: Redis, run: str) -> None:
    other = runs.create(client, make_config(), SPACES)
    append(client, run, 0)
    with pytest.raises(StoreError, match="is active; stop it first"):
        runs.delete(client, run)
    runs.set_status(client, run, "stopped", "")
    assert runs.delete(client, run) >= 5
    assert runs.names(client) == [other]
    assert not list(client.scan_iter(match=keys.run_pattern(run)))
    assert runs.state(client, other).status == "active"


def test_settings_change_whole_or_not_at_all(client: Redis, run: str) -> None:
    new = make_config().model_copy(update={"weight": 2.5, "priority": "high"})
    changes = {"weight": (1.0, 2.5), "priority": ("normal", "high")}
    assert runs.change(client, run, new, changes, version=0) == 1 == runs.config_version(client, run)
    assert runs.config(client, run) == new
    state = runs.state(client, run)
    assert (state.weight, state.priority) == (2.5, "high")
    rows = [row for row in runs.journal(client, run) if row["event"] == "set"]
    assert [(row["option"], row["from"], row["to"]) for row in rows] == [
        ("weight", "1.0", "2.5"),
        ("priority", '"normal"', '"high"'),
    ]
    with pytest.raises(StoreError, match="changed meanwhile"):
        runs.change(client, run, make_config(), {}, version=0)
    assert runs.config(client, run) == new
    assert "weight" in live_options(type(new)) and "seed" not in live_options(type(new))
