"""The publisher: it waits out outages, stores whole checkpoints, and applies changed settings."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from redis import Redis, RedisError
from support.algorithms import assert_same
from support.learners import Run, fields_of, finished, training, until
from support.private_server import PrivateServer
from support.runs import target_config

from ddrl.config import RunConfig
from ddrl.learner import publisher
from ddrl.store import checkpoints, keys, leases, ledger, stream, weights
from ddrl.store.connection import NotConfirmedError

SELDOM = {"publish_every_s": 3600, "checkpoint_every_s": 3600, "metrics_every_s": 3600}


def recover(client: Redis) -> None:
    """End each outage of these tests."""
    client.execute_command("REPLICAOF", "NO", "ONE")
    client.config_set("maxmemory", 0)


@pytest.fixture
def server(server: PrivateServer) -> Iterator[PrivateServer]:
    """A server that serves again afterwards."""
    yield server
    recover(server.client)


def config(**sections: Any) -> RunConfig:
    replay = {"capacity": 400, "warmup_steps": 100, "slack_steps": 10_000, "samples_per_insert": 4}
    return target_config(**{"stop": {"return": None}, "replay": replay, **sections})


# --- outages ---------------------------------------------------------------------------------------------


def fill_memory(client: Redis, excess_bytes: int = 20_000) -> None:
    """Let the server hold so many bytes more than it may."""
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - excess_bytes)


def fail_over(client: Redis) -> None:
    """Make the server a replica."""
    client.execute_command("REPLICAOF", "127.0.0.1", "1")


@pytest.mark.parametrize(
    ("begin", "message"),
    # A read that is blocked when the role changes is ended with another message than the writes.
    [(fill_memory, "memory is full"), (fail_over, "takes no writes|changes its role")],
)
def test_an_outage_is_waited_out_without_loss(server, begin: Callable[[Redis], None], message: str) -> None:
    run = Run(server, config())
    run.play(300)
    learner = run.learner()
    with training(learner) as outages:
        until(lambda: learner.shared.updates > 10)
        begin(run.client)
        until(lambda: any(re.search(message, text) for text in outages))
        run.catch_up(learner)
        time.sleep(1.0)
        recover(run.client)
        until(lambda: any(row["server_wait_s"] >= 1.0 for row in run.rows))
        waited = [row["server_wait_s"] for row in run.rows]
        run.play(300)
        run.catch_up(learner)
    assert sum(value > 0 for value in waited) == 1 and all(re.search(message, text) for text in outages)
    learner.finish()
    audit = run.audit()
    assert audit.total("consumed") == audit.total("appended") == learner.counters.admitted


def test_a_frozen_server_is_waited_for(server) -> None:
    run = Run(server, config())
    run.play(300)
    with finished(run) as learner:
        until(lambda: learner.shared.updates > 5)
        with server.frozen():
            time.sleep(2.0)
        until(lambda: any(row["server_wait_s"] > 1.0 for row in run.rows))
    run.audit()


def test_after_an_outage_no_producer_is_folded_before_heartbeats_are_back(server, monkeypatch) -> None:
    monkeypatch.setattr(ledger, "ACTOR_QUIET_S", 0.0)
    monkeypatch.setattr(publisher, "RENEW_S", 0.0)
    run = Run(server, config())
    run.play(100)
    with finished(run) as learner:
        run.catch_up(learner)
    producers = [*run.audit().accounts]

    def fail(*held: object) -> None:
        raise RedisError("away")

    for fails in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "FOLD_EVERY_S", 0.0)  # the first time is due
            learner = run.learner()
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(leases, "renew", fail)
                with pytest.raises(RedisError):
                    learner.publisher.round()
        learner.publisher.round()
        learner.close()
        assert [*run.audit().accounts] == (producers if fails else [ledger.ENDED])


def test_a_full_server_gets_memory_back_from_the_stream(server) -> None:
    """Others fill it: only the learner can free memory, also when it begins; the replay keeps what is trimmed."""
    replay = {"capacity": 20_000, "slack_steps": 20_000, "warmup_steps": 100}
    run = Run(server, config(replay=replay, learner={"checkpoint_every_s": 1}))
    run.play(300)
    fields, producer = fields_of(run.entries[0]), stream.new_producer(run.client, run.id)
    for seq in range(60):  # 3 MB that only the replay needs
        run.append(
            {**fields, b"padding": random.randbytes(50_000)}, producer=producer, seq=seq, num_transitions=1
        )
    learner = run.learner()
    with training(learner) as outages:
        run.catch_up(learner)
        until(lambda: run.meta.get("cursor") == learner.counters.cursor)
        entries, held = len(run.entries), len(learner.replay)
        fill_memory(run.client, 600_000)
        until(lambda: any("memory is full" in text for text in outages))
        rows = len(run.rows)
        until(lambda: len(run.rows) > rows + 1)  # it writes again
        trimmed = len(run.entries)
        assert trimmed < entries == learner.counters.admitted and len(learner.replay) == held
    learner.finish()
    token = run.take()
    fill_memory(run.client, 600_000)
    second = run.learner(token=token)
    assert second.shared.version == learner.shared.version + 1
    assert second.counters.admitted == entries and len(run.entries) < trimmed
    recover(run.client)
    second.finish()
    run.audit()


# --- what is written -------------------------------------------------------------------------------------


def test_many_collectors_are_woken_less_often(server) -> None:
    run = Run(server, config(learner=SELDOM))
    learner = run.learner()
    learner.replay.num_collectors = publisher.WAKES_PER_S  # one raise a second
    allowances = []
    for refilled in (10**6, 2 * 10**6, 3 * 10**6):
        learner.shared.refilled = refilled
        learner.publisher.round()
        allowances.append(run.state.allowance)
    assert 10**6 <= allowances[0] == allowances[1] == allowances[2]
    time.sleep(1.0)
    learner.publisher.round()
    assert run.state.allowance >= 3 * 10**6
    learner.close()


def test_all_steps_count_that_many_processes_play_before_they_know_of_one_another(server) -> None:
    run = Run(server, config(env={"num_envs": 16}))
    run.client.hset(keys.state(run.id), "processes", 200)  # as a dispatcher does
    run.begin_together(200)
    learner = run.learner()
    with training(learner, serves=False):  # so that no more is allowed meanwhile
        run.catch_up(learner)
    learner.publisher.round()
    learner.finish()
    assert learner.shared.env_steps == run.state.appended_steps == 51_200


def test_rates_outlast_the_seconds_between_two_iterations(server) -> None:
    run = Run(server, config(learner={**SELDOM, "metrics_every_s": 0.1}))
    learner = run.learner()
    learner.shared.updates += 1_000
    while len(run.rows) < 5:
        learner.publisher.round()
    assert all(row["updates_per_s"] > 0 for row in run.rows[1:])
    learner.close()


def test_a_checkpoint_is_whole_whenever_it_is_taken_and_passed_on_once_stored(server) -> None:
    run = Run(server, config())
    run.play(300)
    passed: list[tuple[bytes, Mapping[str, Any]]] = []
    learner = run.learner(on_checkpoint=lambda *checkpoint: passed.append(checkpoint))
    shared, taken = learner.shared, []
    with training(learner, serves=False):
        while len(taken) < 20 or shared.updates <= 20:
            shared.wants_checkpoint.set()
            until(lambda: shared.checkpoint is not None)
            taken.append(shared.checkpoint)
            shared.checkpoint = None
    for counters, state in taken:
        assert int(state["num_updates"]) == counters.updates
        assert sum(row[0] for row in counters.ledger.values()) == counters.admitted
        json.dumps(vars(counters))
    assert [one.updates for one, _ in taken] == sorted(one.updates for one, _ in taken)
    assert not passed
    learner.finish()
    ((blob, meta),) = passed
    assert (blob, json.loads(json.dumps(meta))) == checkpoints.load(run.client, run.id)
    assert_same(weights.decode_weights(blob), learner.checkpoint()[1])


def test_changed_settings_apply_while_it_learns(server) -> None:
    run = Run(server, config(learner=SELDOM, weights={"keep_last": 50}))
    run.play(300)
    new = config(
        learner={"publish_every_s": 0.01, "checkpoint_every_s": 1, "metrics_every_s": 0.1},
        weights={"keep_last": 2, "keep_every": 10},
        algorithm={"learning_rate": 0.0001, "temperature": 0.125},
    )
    with finished(run) as learner:
        until(lambda: learner.shared.updates > 10)
        assert learner.shared.version <= 1 and not run.meta
        learner.apply(new)
        while learner.shared.version < 25:
            run.play(100)
        until(lambda: run.meta)
        until(lambda: len(run.rows) > 3)
    index = run.index
    newest = set(sorted(index.sizes)[-3:])  # two, and the one published since the last pruning
    spaced = {version for version in range(index.latest) if version % 10 == 0}
    assert index.latest in newest and set(index.sizes) <= newest | spaced and {0, 10, 20} <= set(index.sizes)
    assert run.rows[-1]["temperature"] == 0.125


def test_a_version_of_a_durable_run_is_published_once_the_disk_has_it(make_server) -> None:
    server = make_server("--appendonly", "yes", "--appendfsync", "always")
    run = Run(server, config(learner=SELDOM, durability="disk"))
    learner = run.learner()
    server.client.config_set("appendfsync", "no")  # nothing is confirmed from now on
    learner.shared.weights = 1, dict(learner.algorithm.weights())
    with pytest.raises(NotConfirmedError):
        learner.publisher.round()
    learner.close()
