"""Runs: creation, names, status, memory, and the one learner that writes. Settings: tests/cli; deletion: tests/runs."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest
import redis
from redis import Redis
from support.store import SPACES, events, make_config, make_run, take

from ddrl.runs import prune
from ddrl.store import (
    checkpoints,
    connection,
    keys,
    leases,
    ledger,
    metrics,
    quarantine,
    runs,
    stream,
    weights,
)
from ddrl.store.connection import StoreError


def test_a_run_is_created_active_and_found_by_prefix(client: Redis, run: str) -> None:
    assert runs.resolve(client, run[:6]) == run == runs.resolve(client, "last")
    assert runs.state(client, run).status == "active"
    assert runs.config(client, run) == make_config() and runs.spaces(client, run) == SPACES
    with pytest.raises(runs.UnknownRunError, match=f"run nope: not on this server; the newest is {run}"):
        runs.resolve(client, "nope")
    with pytest.raises(runs.UnknownRunError, match="run '': not on this server"):
        runs.resolve(client, "")
    with pytest.raises(runs.UnknownRunError, match=r"run 'a\\nb': not on this server"):
        runs.resolve(client, "a\nb")
    names = sorted([run, make_run(client)], key=runs.names(client).index, reverse=True)
    with pytest.raises(
        StoreError, match=f"run {run[:4]}: 2 begin so \\({', '.join(names)}\\); give more of the id"
    ):
        runs.resolve(client, run[:4])
    assert runs.resolve(client, run) == run and runs.resolve(client, "last") == names[0]


def test_states_of_several_runs_leave_out_those_that_are_gone(client: Redis, run: str) -> None:
    other = make_run(client, seed=2)
    assert runs.states(client, [other, "gone", run]) == [runs.state(client, other), runs.state(client, run)]
    assert runs.states(client, []) == []


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


def test_the_training_time_leaves_out_pauses_and_the_time_after_an_end(client: Redis, run: str) -> None:
    """Times are moved into the past instead of waiting."""

    def trained() -> float:
        found = runs.state(client, run).train_s(runs.server_ms(client) / 1e3)
        assert found is not None
        return found / 60

    def pass_by(minutes: int) -> None:
        times = ("created_ms", "first_step_ms", "ended_ms", "idle_since_ms")
        for key, name in itertools.product((keys.state(run), keys.counts(run)), times):
            if client.hexists(key, name):
                client.hincrby(key, name, -60_000 * minutes)

    def then(status: str) -> None:
        assert runs.set_status(client, run, status, "by the test")

    then("paused")
    pass_by(1000)
    then("active")
    assert runs.state(client, run).train_s(runs.server_ms(client) / 1e3) is None
    client.hset(keys.counts(run), "first_step_ms", runs.server_ms(client))
    pass_by(10)
    then("paused")
    pass_by(100)
    assert trained() == pytest.approx(10, abs=5)
    then("active")
    pass_by(20)
    assert trained() == pytest.approx(30, abs=5)
    then("paused")
    pass_by(200)
    then("stopped")
    pass_by(400)
    assert trained() == pytest.approx(30, abs=5)
    runs.reactivate(client, run)
    pass_by(40)
    assert trained() == pytest.approx(70, abs=5)
    then("solved")
    pass_by(800)
    assert trained() == pytest.approx(70, abs=5)


def test_an_active_run_waits_for_a_learner_exactly_while_none_holds_it(client: Redis, run: str) -> None:
    assert runs.state(client, run).reason == "waiting for a learner"
    token = take(client, run)
    runs.set_status(client, run, "paused", "by the test")
    assert runs.state(client, run).reason == "by the test"
    runs.reactivate(client, run)
    assert runs.state(client, run).reason == ""
    leases.release(client, run, token)
    assert runs.state(client, run).reason == "waiting for a learner"


def test_the_memory_that_other_active_runs_need_is_summed(client: Redis, run: str, token: int) -> None:
    other = make_run(client, replay={"max_bytes": 65_536})
    assert runs.reserve(client, run, token, 5) == 65_536  # it has not stated its need: its stream counts
    assert runs.reserve(client, other, take(client, other), 7) == 5
    assert runs.reserve(client, run, token, 6) == 7
    runs.set_status(client, other, "stopped", "by the test")
    assert runs.reserve(client, run, token, 6) == 0


# --- leases --------------------------------------------------------------------------------------------


def test_a_token_that_an_older_server_has_forgotten_is_refused(client: Redis, run: str) -> None:
    before = client.hgetall(keys.state(run))
    token = take(client, run)
    client.delete(keys.state(run), keys.lease(run))
    client.hset(keys.state(run), mapping=before)
    with pytest.raises(connection.RunGoneError, match="or older"):
        leases.renew(client, run, token)
    with pytest.raises(connection.RunGoneError, match="or older"):
        runs.set_status(client, run, "failed", "", token=token)
    again = take(client, run)
    assert again != token and again >> 16 == token >> 16
    with pytest.raises((connection.RunGoneError, connection.LeaseLostError)):
        leases.renew(client, run, token)
    assert runs.status(client, run) == "active"


def test_only_one_learner_holds_a_run_and_a_replaced_one_writes_nothing(client: Redis, run: str) -> None:
    old = take(client, run)
    assert leases.acquire(client, run, host="there", folder="/") is None
    client.delete(keys.lease(run))  # expired
    leases.renew(client, run, old)  # still free: it goes on
    client.delete(keys.lease(run))
    new = take(client, run)
    assert new > old
    attempts = [
        lambda: leases.renew(client, run, old),
        lambda: stream.allow(client, run, old, 10, updates=0),
        lambda: stream.trim(client, run, old, b"0-1"),
        lambda: stream.refuse(client, run, old, [stream.Refusal(b"1-0", b"", "why")]),
        lambda: weights.publish(client, run, old, version=0, blob=b"x", allowance=1, updates=0),
        lambda: weights.mark_best(client, run, old, 0, 1.0),
        lambda: checkpoints.save(client, run, old, b"x", {}),
        lambda: ledger.put(client, run, old, {}, b"1-0"),
        lambda: metrics.add(client, run, old, {"late": 1.0}),
        lambda: runs.note_evaluation(client, run, old, {}),
        lambda: runs.set_status(client, run, "time", "too late", token=old),
    ]
    for attempt in attempts:
        with pytest.raises(connection.LeaseLostError, match=f"run {run}: another learner took it over"):
            attempt()
    assert weights.index(client, run).latest == -1 and checkpoints.load(client, run) is None
    leases.release(client, run, old)  # must not free the other's
    assert client.exists(keys.lease(run)) and runs.status(client, run) == "active"
    assert runs.set_status(client, run, "time", "in time", token=new)
    assert runs.set_status(client, run, "active", "by the operator")  # who needs no lease
    leases.release(client, run, new)
    assert not client.exists(keys.lease(run))
    with pytest.raises(connection.LeaseLostError):
        leases.renew(client, run, old)  # also while nobody holds the run


@pytest.mark.parametrize("fails_at", ["store_part", "create_run"])
def test_a_run_that_is_not_created_leaves_no_checkpoint(
    client: Redis, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    def call(client: Redis, script: str, *arguments: object, **options: object) -> object:
        if script == fails_at and (script != "store_part" or client.keys("*checkpoint*")):
            raise StoreError("the server is full")
        return connection.call(client, script, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "PART_BYTES", 10)
    for module in (runs, checkpoints):
        monkeypatch.setattr(module, "call", call)
    with pytest.raises(StoreError, match="full"):
        runs.create(client, make_config(), SPACES, state=("other, update 3", b"x" * 35))
    assert client.keys("ddrl:*") == []
    monkeypatch.undo()
    run = runs.create(client, make_config(), SPACES, state=("other, update 3", b"x" * 35))
    assert checkpoints.load(client, run)[0] == b"x" * 35  # type: ignore[index]
    assert runs.state(client, run).warm == "other, update 3"


def test_parts_deleted_as_of_no_run_before_it_is_created_are_stored_again(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_parts, pruning = checkpoints.store_parts, iter([True])

    def pruned(client: Redis, *arguments: Any) -> checkpoints.Pointer:
        pointer = store_parts(client, *arguments)
        if next(pruning, False):  # only the first time
            assert prune.delete_strays(client)[0] == 1
        return pointer

    monkeypatch.setattr(checkpoints, "store_parts", pruned)
    run = runs.create(client, make_config(), SPACES, state=("other, update 3", b"tensors"))
    assert checkpoints.load(client, run) == (b"tensors", asdict(checkpoints.Counters()))
    assert events(client, run) == ["created"]


def test_a_run_whose_creation_gets_no_reply_keeps_its_checkpoint(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(client: Redis, script: str, *arguments: Any) -> None:
        connection.call(client, script, *arguments)
        raise redis.ConnectionError("no reply")

    monkeypatch.setattr(runs, "call", call)
    with pytest.raises(redis.ConnectionError):
        runs.create(client, make_config(), SPACES, state=("other, update 3", b"tensors"), run="created")
    assert checkpoints.load(client, "created") == (b"tensors", asdict(checkpoints.Counters()))


def test_of_two_rollbacks_at_once_the_second_fails(client: Redis, run: str) -> None:
    entry = {"event": "revised"}
    quarantine.change(client, run, 0, (), entry, b"five")
    with pytest.raises(StoreError, match="was changed meanwhile"):
        quarantine.change(client, run, 0, (), entry, b"seven")
    assert runs.rollback(client, run) == (b"five", 1) and events(client, run) == ["created", "revised"]
    quarantine.change(client, run, 1, (), entry, b"seven")
    assert runs.rollback(client, run) == (b"seven", 2)
