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
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis
from support.replays import gather_all
from support.runs import play_steps, start
from test_learner import make_learner, take, training, until

from ddrl import codec
from ddrl.algorithms import base
from ddrl.config import RunConfig, validate
from ddrl.learner.loop import Learner
from ddrl.replay import storage
from ddrl.replay.storage import CompressedRows
from ddrl.runs.evaluation import evaluate
from ddrl.store import keys, runs, stream, weights
from ddrl.types import Fragment

MIB = 1024**2


@pytest.fixture
def client(server) -> Redis:
    return server.client


def tree(env: dict[str, Any], algorithm: dict[str, Any], replay: dict[str, Any]) -> RunConfig:
    return validate(
        {
            "name": "value",
            "env": {"num_envs": 4, **env},
            "algorithm": algorithm,
            "rollout": {"segment_s": 0.5, "fragment_s": 0.05, "max_fragment_steps": 16},
            "replay": {"warmup_steps": 200, "slack_steps": 400, "samples_per_insert": 8, **replay},
            "learner": {
                "publish_every_s": 0.05,
                "checkpoint_every_s": 1,
                "metrics_every_s": 0.2,
                "device": "cpu",
            },
        }
    )


def catch_config() -> RunConfig:
    """DQN from stacked, compressed, prioritized images, gathered by threads; few enough to be evicted."""
    return tree(
        {"id": "ddrl/Catch-v0", "kwargs": {"size": 5, "pixels": 10}, "frame_stack": 2},
        {
            "name": "dqn",
            "network": "conv",
            "hidden_sizes": [32],
            "learning_rate": 2e-3,
            "gamma": 0.9,
            "n_step": 2,
            "batch_size": 32,
            "prioritized": True,
            "importance_anneal_updates": 500,
            "target_period": 20,
            "epsilon_anneal_updates": 200,
        },
        {"capacity": 1500, "observations": "compressed", "threads": 2},
    )


def recall_config() -> RunConfig:
    """R2D2 on vectors: overlapping sequences with burn-in."""
    return tree(
        {"id": "ddrl/Recall-v0", "kwargs": {"delay": 6}, "frame_stack": 2},
        {
            "name": "r2d2",
            "hidden_sizes": [16],
            "recurrent_size": 8,
            "sequence_length": 4,
            "overlap": 2,
            "burn_in": 2,
            "n_step": 2,
            "batch_size": 16,
            "target_period": 50,
        },
        {"capacity": 1500},
    )


CONFIGS = {"dqn": catch_config, "r2d2": recall_config}


def play_until(client: Redis, run: str, token: int, learner: Learner, goal: Callable[[], bool]) -> None:
    """Play on, by whatever is published, while the learner learns."""
    players = None
    for _ in range(200):
        if goal():
            return
        players = play_steps(client, run, token, 200, players=players)
        steps = runs.state(client, run).appended_steps
        until(lambda steps=steps: learner.num_steps == steps)
        before = learner.num_updates
        until(lambda before=before: learner.num_updates > before or goal())
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
        seeds = range(40)
        return evaluate(policy, config.env, spaces, seeds, num_envs=40, policy_version=0).return_mean

    assert score() < 0.5
    learner.restore()
    with training(learner):
        play_until(client, run, token, learner, lambda: learner.num_updates > 300 and score() > 0.9)
    learner.finish()
    replay = learner.experience
    assert isinstance(replay.rows, CompressedRows)
    assert replay.first_item > 0  # old ones were evicted
    replay.check_valid()
    assert learner.counters.dead == 0


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_a_restart_continues_with_the_same_items_and_their_priorities(
    name: str, client: Redis, server
) -> None:
    run = start(client, CONFIGS[name]())
    token = take(client, run)
    play_steps(client, run, token, 800)
    first = make_learner(client, run, token, server.url)
    first.restore()
    with training(first):
        play_until(client, run, token, first, lambda: first.experience.first_item > 0)
    first.finish()
    assert first.num_updates > 20 and first.counters.dead == 0

    second_token = take(client, run)
    second = make_learner(client, run, second_token, server.url)
    second.restore()
    assert second.counters.updates == first.num_updates == second.algorithm.num_updates
    one, two = first.experience, second.experience
    two.check_valid()
    assert one.num_items == two.num_items and two.first_item == one.first_item
    wanted, found = gather_all(one), gather_all(two)
    for column, array in vars(wanted).items():
        np.testing.assert_array_equal(array, getattr(found, column), err_msg=column)
    before, after = one.state(), two.state()
    assert len(np.unique(before["priority"])) > 20  # they tell something
    for column, array in before.items():
        np.testing.assert_array_equal(array, after[column], err_msg=column)
    as_played = make_learner(client, run, second_token, server.url).experience
    oldest, cursor = first.counters.oldest.encode(), first.counters.cursor.encode()
    for entry in stream.read(client, run, stream.before(oldest), count=10_000, until=cursor):
        packed = as_played.pack(codec.decode(entry.fields))
        as_played.admit(packed, entry.entry_id, version=0)
    assert (as_played.state()["priority"] != before["priority"]).mean() > 0.1  # these were drawn since
    for column, tensor in first.algorithm.state().items():
        assert torch.equal(tensor, second.algorithm.state()[column]), column

    with training(second):  # and it goes on from there
        goal = first.num_updates + 20
        play_until(client, run, second_token, second, lambda: second.num_updates >= goal)
    second.finish()
    assert second.counters.dead == 0
    two.check_valid()


def test_frames_are_compressed_beside_the_training_thread(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, catch_config())
    token = take(client, run)
    play_steps(client, run, token, 800)
    threads, real = set(), storage._compress

    def noted(rows: np.ndarray) -> bytes:
        threads.add(threading.current_thread().name)
        return real(rows)

    monkeypatch.setattr(storage, "_compress", noted)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
    learner.finish()
    assert threads == {"reader"}
    learner.experience.check_valid()


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
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    gc.collect()
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with training(learner):
            until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
            until(lambda: learner.num_updates >= 5)
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
    learner.experience.check_valid()

    again = make_learner(client, run, take(client, run), server.url)
    again.restore()  # the refused ones do not stand in the way, and are not counted twice
    assert len(again.experience) == len(learner.experience)
    assert again.counters.dead == 3 * len(bad)
    again.finish()
