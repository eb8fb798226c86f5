"""The publisher: outages are waited out, a replaced learner writes nothing, changed settings apply."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from redis import Redis
from support.learners import assert_equal_arrays, catch_up, make_learner, restored, take, training, until
from support.runs import play_steps, start, target_config

from ddrl.config import RunConfig, validate
from ddrl.learner import publisher
from ddrl.store import checkpoints, keys, leases, ledger, metrics, runs, stream, weights


@pytest.fixture
def client(server) -> Iterator[Redis]:
    """The server's, which serves again afterwards."""
    yield server.client
    server.client.execute_command("REPLICAOF", "NO", "ONE")
    server.client.config_set("maxmemory", 0)


def config(**sections: Any) -> RunConfig:
    replay = {"capacity": 400, "warmup_steps": 100, "slack_steps": 10_000, "samples_per_insert": 4}
    return target_config(**{"stop": {"return": None}, "replay": replay, **sections})


def changed(client: Redis, run: str, **sections: Mapping[str, Any]) -> RunConfig:
    """A run's config with other settings."""
    tree = runs.config(client, run).model_dump(by_alias=True, mode="json")
    return validate({**tree, **{name: {**tree[name], **options} for name, options in sections.items()}})


# --- outages -------------------------------------------------------------------------------------------


def fill_memory(client: Redis) -> Callable[[], object]:
    """Leave the server no memory: what others hold is more than its limit."""
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - 20_000)  # type: ignore[index]
    return lambda: client.config_set("maxmemory", 0)


def refuse_writes(client: Redis) -> Callable[[], object]:
    """As in a failover: the server becomes a replica."""
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    return lambda: client.execute_command("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize(
    ("begin_outage", "message"), [(fill_memory, "memory is full"), (refuse_writes, "takes no writes")]
)
def test_an_outage_is_waited_out_and_nothing_is_lost(
    begin_outage: Callable[[Redis], Callable[[], object]], message: str, client: Redis, server
) -> None:
    run = start(client, config())
    token = take(client, run)
    players = play_steps(client, run, token, 300)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner) as outages:
        until(lambda: learner.shared.updates > 10)
        end_outage = begin_outage(client)
        until(lambda: any(message in text for text in outages))
        catch_up(client, run, learner)
        time.sleep(1.0)
        end_outage()
        until(lambda: any(row["server_wait_s"] >= 1.0 for row in metrics.read(client, run)[0]))
        waited = [row["server_wait_s"] for row in metrics.read(client, run)[0]]
        play_steps(client, run, token, 300, players=players)
        catch_up(client, run, learner)
    assert sum(value > 0 for value in waited) == 1 and all(message in text for text in outages)
    learner.finish()
    audit = ledger.audit(client, run)
    assert audit.is_balanced
    assert audit.total("consumed") == audit.total("appended") == learner.counters.admitted


def test_a_frozen_server_is_waited_for(make_server) -> None:
    frozen = make_server()
    client = frozen.client
    run = start(client, config())
    play_steps(client, run, take(client, run), 300)
    learner = restored(client, run, frozen.url)
    with training(learner):
        until(lambda: learner.shared.updates > 5)
        frozen.process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)  # longer than the lease
        frozen.process.send_signal(signal.SIGCONT)
        until(lambda: any(row["server_wait_s"] > 2.0 for row in metrics.read(client, run)[0]))
    learner.finish()
    assert ledger.audit(client, run).is_balanced


# --- a full server ---------------------------------------------------------------------------------------


def large_replay(client: Redis) -> str:
    """A run whose stream holds 3 MB that only the replay needs: fragments with 50 kB of padding."""
    replay = {"capacity": 20_000, "slack_steps": 20_000, "warmup_steps": 100}
    run = start(client, config(replay=replay, learner={"checkpoint_every_s": 1}))
    play_steps(client, run, take(client, run), 300)
    fields = stream.read(client, run, b"0-0", count=1)[0].fields
    kept = {name: value for name, value in fields.items() if len(name) > 1 or name == b"h"}
    producer = stream.new_producer(client)
    for seq in range(60):
        padded = {**kept, b"padding": random.randbytes(50_000)}
        stream.append(client, run, padded, producer=producer, incarnation=1, seq=seq, num_transitions=1)
    return run


def leave_memory(client: Redis, num_bytes: int) -> None:
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + num_bytes)  # type: ignore[index]


def test_a_full_server_gets_memory_back_from_the_stream(client: Redis, server) -> None:
    """Others fill it: nobody but the learner can free anything, and nothing may be written before."""
    run = large_replay(client)
    learner = restored(client, run, server.url)
    with training(learner) as outages:
        catch_up(client, run, learner)
        until(lambda: (checkpoints.meta(client, run) or {}).get("cursor") == learner.counters.cursor)
        entries, held = client.xlen(keys.experience(run)), len(learner.replay)
        leave_memory(client, -600_000)
        until(lambda: any("memory is full" in text for text in outages))
        rows = len(metrics.read(client, run)[0])
        until(lambda: len(metrics.read(client, run)[0]) > rows + 1)  # it writes again
        assert client.xlen(keys.experience(run)) < entries == learner.counters.admitted
        assert len(learner.replay) == held, "the replay still holds them"
    client.config_set("maxmemory", 0)
    learner.finish()
    assert ledger.audit(client, run).is_balanced


def test_a_learner_that_begins_on_a_full_server_frees_what_it_can(client: Redis, server) -> None:
    run = large_replay(client)
    first = restored(client, run, server.url)
    with training(first):
        catch_up(client, run, first)
    first.finish()
    token = take(client, run)
    leave_memory(client, -600_000)
    second = make_learner(client, run, token, server.url)
    second.restore()
    assert second.shared.version == first.shared.version + 1
    assert second.counters.admitted == first.counters.admitted > client.xlen(keys.experience(run))
    client.config_set("maxmemory", 0)
    second.finish()


# --- a replaced learner ----------------------------------------------------------------------------------


def test_a_replaced_learner_writes_nothing(client: Redis, server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stalled with everything to write: weights, checkpoint, refusals, losses, ledger, metrics, trims."""
    run = start(client, config(learner={"publish_every_s": 0.05, "metrics_every_s": 0.1}))
    token = take(client, run)
    players = play_steps(client, run, token, 200)
    entries = stream.read(client, run, b"0-0", count=1000)
    client.xadd(keys.experience(run), {b"h": b"{}"})
    client.xdel(keys.experience(run), entries[1].entry_id)
    play_steps(client, run, token, 600, players=players)
    written: list[bytes] = []
    learner = make_learner(client, run, token, server.url, on_checkpoint=lambda blob, _: written.append(blob))
    learner.restore()
    shared = learner.shared
    with training(learner, serves=False):
        catch_up(client, run, learner)
        shared.wants_checkpoint.set()
        until(lambda: shared.weights is not None and shared.checkpoint is not None)
    assert shared.refused and shared.lost
    take(client, run)
    client.delete(keys.lease(run))  # the new one's has lapsed too: still the old one must write nothing
    before = {key: client.dump(key) for key in client.scan_iter(match=keys.run_pattern(run))}
    learner.apply(changed(client, run, replay={"max_bytes": 65536}))
    monkeypatch.setattr(publisher, "RENEW_S", 3600.0)
    writes = [
        learner.publisher.round,
        learner.finish,
        lambda: checkpoints.save(client, run, token, b"late", {"updates": 1}),
        lambda: ledger.put(client, run, token, shared.ledger.rows, shared.ledger.cursor),
        lambda: stream.refuse(client, run, token, *shared.refused[0]),
        lambda: weights.publish(client, run, token, version=9, blob=b"late", allowance=0, updates=1),
        lambda: metrics.add(client, run, token, {"late": 1.0}),
        lambda: stream.trim(client, run, token, learner.counters.cursor.encode()),
        lambda: stream.allow(client, run, token, 10**9, updates=1),
    ]
    for write in writes:
        with pytest.raises(leases.LeaseLostError):
            write()
    assert {key: client.dump(key) for key in client.scan_iter(match=keys.run_pattern(run))} == before
    assert not written


def test_a_checkpoint_during_which_the_learner_is_replaced_leaves_no_part(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PART_BYTES", 4096)
    run = start(client, config())
    token = take(client, run)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    learner.finish()
    good = checkpoints.load(client, run)
    assert good is not None and len(good[0]) > 5 * 4096
    parts = set(client.scan_iter(match=keys.checkpoint_pattern(run)))
    fenced, calls = checkpoints.fenced, []

    def replaced(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            take(client, run)
        return fenced(*arguments)

    monkeypatch.setattr(checkpoints, "fenced", replaced)
    with pytest.raises(leases.LeaseLostError):
        checkpoints.save(client, run, token, *good)
    assert set(client.scan_iter(match=keys.checkpoint_pattern(run))) == parts
    assert checkpoints.load(client, run) == good


# --- what is written ---------------------------------------------------------------------------------------


def test_many_collectors_are_woken_less_often(client: Redis, server) -> None:
    run = start(client, config(learner={"metrics_every_s": 3600, "checkpoint_every_s": 3600}))
    learner = restored(client, run, server.url)
    learner.replay.num_collectors = 2 * publisher.WAKES_PER_S  # one raise in two seconds
    allowances = []
    for refilled in (10**6, 2 * 10**6, 3 * 10**6):
        learner.shared.refilled = refilled
        learner.publisher.round()
        allowances.append(runs.state(client, run).allowance)
    assert 10**6 <= allowances[0] == allowances[1] == allowances[2]
    time.sleep(2.0)
    learner.publisher.round()
    assert runs.state(client, run).allowance >= 3 * 10**6
    learner.leave()


def test_a_checkpoint_is_whole_whenever_it_is_taken(client: Redis, server) -> None:
    run = start(client, config())
    play_steps(client, run, take(client, run), 300)
    learner = restored(client, run, server.url)
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
    learner.finish()


def test_each_stored_checkpoint_is_passed_on(client: Redis, server) -> None:
    run = start(client, config())
    passed: list[tuple[bytes, Mapping[str, Any]]] = []
    learner = restored(client, run, server.url, on_checkpoint=lambda *checkpoint: passed.append(checkpoint))
    learner.finish()
    ((blob, meta),) = passed
    assert (blob, json.loads(json.dumps(meta))) == checkpoints.load(client, run)
    assert_equal_arrays(weights.decode_weights(blob), dict(learner.algorithm.state()))


def test_changed_settings_apply_while_it_learns(client: Redis, server) -> None:
    slow = {"publish_every_s": 3600, "checkpoint_every_s": 3600, "metrics_every_s": 3600}
    run = start(client, config(learner=slow, weights={"keep_last": 50}))
    token = take(client, run)
    players = play_steps(client, run, token, 300)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    new = changed(
        client,
        run,
        learner={"publish_every_s": 0.01, "checkpoint_every_s": 1, "metrics_every_s": 0.1},
        weights={"keep_last": 2, "keep_every": 1000},
        algorithm={"learning_rate": 0.0001, "temperature": 0.125},
    )
    with training(learner):
        until(lambda: learner.shared.updates > 10)
        assert learner.shared.version == 0 and checkpoints.meta(client, run) is None
        learner.apply(new)
        while learner.shared.version < 6:
            play_steps(client, run, token, 100, players=players)
        until(lambda: checkpoints.meta(client, run) is not None)
        until(lambda: len(metrics.read(client, run)[0]) > 3)
    learner.finish()
    assert len(weights.index(client, run).sizes) <= 4  # the newest two, the one before pruning, version 0
    assert metrics.last(client, run)["temperature"] == 0.125
