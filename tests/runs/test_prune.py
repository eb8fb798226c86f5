"""Ended runs are deleted by age and by bytes; active ones never."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from redis.client import Pipeline
from support.commands import call_json
from support.store import add_history, end, ended, heartbeat, make_run

from ddrl.runs import prune as pruning
from ddrl.store import connection, keys, runs, workers
from ddrl.store import leases as lease

DAY_S = 86_400.0


def names(rows: list[pruning.Pruned]) -> list[str]:
    return [row.run for row in rows]


def test_runs_are_pruned_by_age(client: Any) -> None:
    old, older, young = ended(client, 31), ended(client, 400, status="solved"), ended(client, 2)
    active, paused = make_run(client), make_run(client)
    runs.set_status(client, paused, "paused", "by hand")
    would = pruning.prune(client, 30 * DAY_S, None, dry_run=True)
    assert names(would) == [older, old] and len(runs.names(client)) == 5
    assert would[0].reason == "ended more than 30 days ago" and would[0].status == "solved"
    assert names(pruning.prune(client, 30 * DAY_S, None)) == [older, old]
    assert {*runs.names(client)} == {young, active, paused}
    assert pruning.prune(client, 30 * DAY_S, None) == []


def test_a_run_that_another_one_learns_from_stays(client: Any) -> None:
    source, reader = ended(client, 31), make_run(client)
    client.hset(keys.state(reader), "reads", source)
    assert pruning.prune(client, 0, 0, dry_run=True) == pruning.prune(client, 0, 0) == []
    with pytest.raises(connection.StoreError, match=f"{reader} learns from it; stop that first"):
        runs.delete(client, source)
    end(client, reader)
    assert names(pruning.prune(client, DAY_S, None)) == [source]


def test_the_oldest_runs_are_pruned_until_the_rest_fits(client: Any) -> None:
    """Those that are too old make room first."""
    third, first, second, old = (ended(client, days, num_bytes=1_000_000) for days in (1, 3, 2, 50))
    busy = make_run(client)
    client.set(keys.weights_blob(busy, 0), b"x" * 5_000_000)  # not counted
    assert names(pruning.prune(client, 30 * DAY_S, 4_000_000)) == [old]
    rows = pruning.prune(client, None, 2_500_000)
    assert names(rows) == [first] and 1_000_000 < rows[0].bytes < 1_200_000
    assert "more than 2.4 MB" in rows[0].reason
    assert names(pruning.prune(client, None, 0)) == [second, third]
    assert runs.names(client) == [busy]


def test_a_run_that_a_learner_holds_stays_and_then_leaves_no_key_behind(client: Any) -> None:
    run = make_run(client)
    token = add_history(client, run)
    for name in (*("initial", "ledger", "playing", "draining", "refusals", "logs"), "checkpoint:1:1:1"):
        client.set(keys.of_run(run, name), "x")
    client.set(keys.of_run(run + "x", "spec"), "another's")
    end(client, run, "solved", "return 200 confirmed")
    assert pruning.prune(client, 0, 0) == []
    with pytest.raises(connection.StoreError, match="still"):
        runs.delete(client, run)
    lease.release(client, run, token)
    assert names(pruning.prune(client, 0, 0)) == [run]
    assert not [*client.scan_iter(keys.run_pattern(run))] and runs.names(client) == []
    assert client.exists(keys.of_run(run + "x", "spec"))


def test_retention_prunes_again_after_a_while(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    retention = pruning.Retention(DAY_S, None)
    first, young = ended(client, 2), ended(client, 0.5)
    assert names(retention.apply(client)) == [first]
    second = ended(client, 2)
    assert retention.apply(client) == [], "it is not time yet"
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + pruning.EVERY_S)
    monkeypatch.setattr(pruning, "time", later)
    assert names(retention.apply(client)) == [second]
    assert runs.names(client) == [young]


def test_a_worker_cannot_make_a_run_look_larger_than_it_is(client: Any) -> None:
    """By a few long entries, from which the server would estimate the others."""
    old, forged = ended(client, 3), ended(client, 1)
    for value in [b"x" * 100_000] * 5 + [b""] * 20_000:
        client.xadd(keys.evaluations(forged), {"x": value})
    assert client.memory_usage(keys.evaluations(forged)) > 10_000_000
    assert pruning.prune(client, None, 4_000_000, dry_run=True) == []
    assert pruning.prune(client, None, 4_000_000) == [] and {*runs.names(client)} == {old, forged}
    client.hset(keys.state(forged), "needed_bytes", 3_500_000)
    client.hset(keys.counts(forged), "x", b"x" * 10_000_000)
    assert pruning.prune(client, None, 4_000_000, dry_run=True) == []


def test_what_a_worker_writes_to_a_run_deletes_no_other(client: Any) -> None:
    """Neither before its end nor after."""
    old, forged = ended(client, 3), ended(client, 1)
    for key in (keys.players(forged), keys.players(forged, "z"), keys.counts(forged)):
        client.hset(key, mapping=dict.fromkeys(range(40), "x" * 1_000_000))
    assert 0 < pruning.size(client, forged) < 9_000_000
    runs.complete(client, forged, 0, 5_000)
    assert runs.state(client, forged).bytes == 5_000
    client.xadd(keys.experience(forged), {"x": b"x" * 40_000_000})
    assert pruning.prune(client, None, 1_000_000) == [] and {*runs.names(client)} == {old, forged}


def test_the_members_of_a_long_key_are_not_counted_one_by_one(client: Any, monkeypatch) -> None:
    """The server would stand still for longer than a client waits, and nothing be deleted."""
    run = ended(client, 3)
    for key in (keys.counts(run), keys.counts("zz")):
        for begin in range(0, 110_000, 10_000):
            client.hset(key, mapping=dict.fromkeys(range(begin, begin + 10_000), "x" * 100))
    asked: list[int | None] = []
    usage = Pipeline.memory_usage
    monkeypatch.setattr(
        Pipeline,
        "memory_usage",
        lambda *args, samples: asked.append(samples) or usage(*args, samples=samples),
    )
    assert names(pruning.prune(client, DAY_S, None)) == [run]
    number, num_bytes = pruning.delete_strays(client)
    assert number == 1 and num_bytes > 10_000_000 and not client.exists(keys.counts("zz"))
    assert asked.count(5) == 2 and asked.count(0) > 2


def test_keys_that_belong_to_no_run_are_deleted(client: Any) -> None:
    run = make_run(client)
    add_history(client, run)
    workers.beat(client, heartbeat("a@h", 1, "ddrl.rollout.own"))
    queues = [keys.queue(name) for name in ("ddrl.rollout.own", runs.state(client, run).queue)]
    for key in queues:
        client.rpush(key, "a message")
    kept = {*client.scan_iter()}
    hashes = [keys.counts("zz"), keys.of_run(run, "counts").replace("}", "}x}")]
    lists = [keys.queue("zz"), keys.queue("{zz}"), queues[0] + "9", keys.lists("ddrl.rollout.own")[0]]
    notes = [
        f"{keys.BROKER_PREFIX}_kombu.binding{name}.x" for name in ("", "_permanent")
    ]  # Celery's, which ddrl's is without
    odd = [keys.worker("").encode() + b"\xff", keys.players(run, "z"), keys.evaluations(run, "z")]
    strays = [*hashes, *lists, *notes, *odd, keys.worker("zz"), keys.worker("yy")]
    for key in hashes:
        client.hset(key, "x", b"x" * 500_000)
    for key in lists:
        client.rpush(key, "x")
    client.rpush(lists[-1], *["x" * 1_000_000] * 20)  # of a queue that is served
    for key in notes:
        client.sadd(key, "x" * 500_000)
    client.mset(dict.fromkeys([keys.worker("zz"), *odd], "x"))
    client.set(keys.worker("yy"), "x", ex=10**9)
    number, num_bytes = pruning.delete_strays(client, dry_run=True)
    assert number == 13 and 22_000_000 < num_bytes < 32_000_000 and client.exists(*strays) == 13
    assert pruning.delete_strays(client) == (number, num_bytes)
    assert {*client.scan_iter()} == kept and pruning.delete_strays(client) == (0, 0)


def test_more_bad_items_than_workers_keep_are_deleted(client: Any) -> None:
    client.xadd(keys.BROKEN, {"item": b"x"})
    assert pruning.delete_strays(client) == (0, 0)
    for size in [1] * 700 + [1_000_000] * 20 + [1] * 50:  # of which the server would estimate too few bytes
        client.xadd(keys.BROKEN, {"item": b"x" * size})
    number, num_bytes = pruning.delete_strays(client)
    assert number == 1 and num_bytes > 20_000_000 and not client.exists(keys.BROKEN)


def test_bad_items_that_take_no_others_are_deleted(client: Any) -> None:
    """After the largest id there is none: a worker may have written it."""
    client.xadd(keys.BROKEN, {"item": b"x"}, id=b"18446744073709551615-18446744073709551615")
    (finding,) = [row for row in call_json("doctor") if row["name"] == "messages"]
    assert "takes no items" in finding["detail"] and finding["remedy"] == "run `ddrl prune`"
    assert pruning.delete_strays(client)[0] == 1 and not client.exists(keys.BROKEN)
