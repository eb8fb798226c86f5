"""The learner on prioritized and recurrent replay, against a real server: it learns, resumes, refuses bad entries."""

from __future__ import annotations

import gc
import json
import math
import resource
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from redis import Redis
from support.learners import (
    assert_equal_arrays,
    catch_config,
    catch_up,
    contents,
    make_learner,
    recall_config,
    restored,
    take,
    training,
    until,
)
from support.runs import play_steps, start

from ddrl import codec
from ddrl.algorithms import base
from ddrl.learner.loop import Learner
from ddrl.runs.evaluation import evaluate
from ddrl.store import keys, runs, stream, weights
from ddrl.types import Fragment

MIB = 1024**2


@pytest.fixture
def client(server) -> Redis:
    return server.client


CONFIGS = {"dqn": catch_config, "r2d2": recall_config}


def play_until(client: Redis, run: str, token: int, learner: Learner, goal: Callable[[], bool]) -> None:
    """Play on, by whatever is published, while the learner learns."""
    players, shared = None, learner.shared
    for _ in range(200):
        if goal():
            return
        players = play_steps(client, run, token, 200, players=players)
        catch_up(client, run, learner)
        before = shared.updates
        until(lambda before=before: shared.updates > before or goal())
    raise AssertionError("never reached")


def test_dqn_learns_from_compressed_prioritized_replay(client: Redis, server) -> None:
    run = start(client, catch_config())
    token = take(client, run)
    play_steps(client, run, token, 200)
    learner = make_learner(client, run, token, server.url)
    config, spaces = runs.config(client, run), runs.spaces(client, run)
    policy = base.resolve(config, spaces).policy()

    def score() -> float:
        policy.load(learner.algorithm.weights())
        return evaluate(policy, config.env, spaces, range(40), num_envs=40, policy_version=0).return_mean

    assert score() < 0.5
    learner.restore()
    with training(learner):
        play_until(client, run, token, learner, lambda: learner.shared.updates > 300 and score() > 0.9)
    learner.finish()
    assert len(learner.replay) < learner.shared.env_steps, "old ones were evicted"
    assert "priority" in contents(learner) and learner.counters.dead == 0


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_a_restart_continues_with_the_same_items_and_priorities(name: str, client: Redis, server) -> None:
    run = start(client, CONFIGS[name]())
    token = take(client, run)
    play_steps(client, run, token, 800)
    first = make_learner(client, run, token, server.url)
    first.restore()
    with training(first):
        play_until(client, run, token, first, lambda: len(first.replay) < first.shared.env_steps)
    first.finish()
    assert first.shared.updates > 20 and first.counters.dead == 0

    second_token = take(client, run)
    second = make_learner(client, run, second_token, server.url)
    second.restore()
    assert second.counters.updates == first.shared.updates == second.algorithm.num_updates
    before = contents(first)
    assert_equal_arrays(before, contents(second))
    assert_equal_arrays(dict(first.algorithm.state()), dict(second.algorithm.state()))
    assert len(np.unique(before["priority"])) > 20  # they tell something
    as_played = make_learner(client, run, second_token, server.url).replay
    oldest, cursor = first.counters.oldest.encode(), first.counters.cursor.encode()
    for entry in stream.read(client, run, stream.before(oldest), count=10_000, until=cursor):
        as_played.admit(as_played.pack(codec.decode(entry.fields)), entry.entry_id, version=0)
    assert (as_played.state()["priority"] != before["priority"]).mean() > 0.1  # these were drawn since

    with training(second):  # and it goes on from there
        goal = first.shared.updates + 20
        play_until(client, run, second_token, second, lambda: second.shared.updates >= goal)
    second.finish()
    assert second.counters.dead == 0 and "priority" in contents(second)


def test_frames_are_compressed_beside_the_training_thread(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, catch_config())
    play_steps(client, run, take(client, run), 800)
    learner = make_learner(client, run, take(client, run), server.url)
    threads, pack = set(), type(learner.replay).pack

    def noted(replay: object, fragment: Fragment) -> object:
        threads.add(threading.current_thread().name)
        return pack(replay, fragment)

    monkeypatch.setattr(type(learner.replay), "pack", noted)
    learner = restored(client, run, server.url)
    with training(learner):
        catch_up(client, run, learner)
    learner.finish()
    assert threads == {"reader"} and contents(learner)


def claiming(fields: dict[bytes, bytes], *, whole: bool) -> dict[bytes, bytes]:
    """The same entry, whose header says that the observations have 2^40 bytes; with `whole` their shape does, too."""
    header = json.loads(fields[b"h"])
    (column,) = (column for column in header["columns"] if column["name"] == "observation")
    column["bytes"] = 2**40
    if whole:
        num_rows, num_envs = column["shape"][:2]
        column["shape"] = [num_rows, num_envs, 2**20, 2**20]
        column["bytes"] = math.prod(column["shape"]) * np.dtype(column["dtype"]).itemsize
    return {**fields, b"h": json.dumps(header).encode()}


def swollen(fields: dict[bytes, bytes], name: bytes) -> dict[bytes, bytes]:
    """The same entry, whose compressed column says by itself that it unpacks to almost 2^31 bytes."""
    chunk = bytearray(fields[name])
    chunk[4:8] = (2**31 - 1024).to_bytes(4, "little")
    changed, header = {**fields, name: bytes(chunk)}, json.loads(fields[b"h"])
    header["checksum"] = 0
    for column in header["columns"]:
        header["checksum"] = zlib.crc32(changed.get(column["name"].encode(), b""), header["checksum"])
    return {**changed, b"h": json.dumps(header).encode()}


def poison(name: str, fragment: Fragment) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Bad entries made from a good one: words of the reason, and the fields."""
    good = codec.encode(fragment)
    larger = replace(
        fragment,
        observation=np.repeat(fragment.observation, 2, axis=-1),
        final_observation=np.repeat(fragment.final_observation, 2, axis=-1),
    )
    if name == "dqn":
        foreign = {"state_value": fragment.extras["state_value"]}
        words = b"action_value and state_value are not both float32"
    else:
        foreign = {key: fragment.extras[key] for key in ("action_value", "state_value")}
        words = b"no columns memory_index and memory; its worker plays another algorithm than a recurrent one"
    return [
        (b"observation: claims 1099511627776 bytes", claiming(good, whole=False)),
        (b"bytes uncompressed, at most", claiming(good, whole=True)),
        (b"observation: chunk of 2147482624 bytes", swollen(good, b"observation")),
        (b"spaces: observation and action are", codec.encode(larger)),
        (words, codec.encode(replace(fragment, extras=foreign))),
    ]


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_bad_entries_land_in_dead_with_the_reason_and_memory_stays_flat(
    name: str, client: Redis, server
) -> None:
    run = start(client, CONFIGS[name]())
    token = take(client, run)
    weights_of = make_learner(client, run, token, server.url).algorithm.weights()
    blob = weights.encode_weights({key: value.numpy() for key, value in weights_of.items()})
    for version in (0, 1):  # the second is played by the policy, with its columns
        weights.publish(client, run, token, version=version, blob=blob, allowance=0, updates=0)
    players = play_steps(client, run, token, 300)
    good = codec.decode(stream.read(client, run, b"0-0", count=100)[-1].fields)
    bad = poison(name, good)
    for _ in range(3):
        for producer, (_, fields) in enumerate(bad, start=10**6):
            number = runs.state(client, run).appended_fragments
            stream.append(
                client, run, fields, producer=producer, incarnation=1, seq=number, num_transitions=8
            )
        players = play_steps(client, run, token, 100, players=players)
    num_good = runs.state(client, run).appended_fragments - 3 * len(bad)
    learner = restored(client, run, server.url)
    gc.collect()
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with training(learner):
            catch_up(client, run, learner)
            until(lambda: learner.shared.updates >= 5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    learner.finish()
    assert peak < 32 * MIB
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 128 * MIB
    dead = client.xrange(keys.dead(run))
    assert learner.counters.dead == len(dead) == 3 * len(bad)
    assert learner.counters.admitted == num_good
    for (words, _), (_, fields) in zip(3 * bad, dead, strict=True):
        assert words in fields[b"reason"] and b"\n" not in fields[b"reason"]
    again = restored(client, run, server.url)  # the refused ones are neither admitted nor counted twice
    assert_equal_arrays(contents(learner), contents(again))
    assert again.counters.dead == 3 * len(bad)
    again.finish()
