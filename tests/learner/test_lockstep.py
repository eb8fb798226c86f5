"""`learner.lockstep`: on one feed a learner that is killed again and again ends bit-equal to one that never was."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from redis import Redis
from support.learners import (
    assert_equal_arrays,
    catch_config,
    contents,
    crashing,
    recall_config,
    restored,
    take,
    until,
)
from support.processes import Processes
from support.runs import play_steps, start, target_config

from ddrl.config import RunConfig, validate
from ddrl.learner.loop import Learner
from ddrl.store import checkpoints, ledger, metrics, runs, stream, weights

NUM_STEPS = 2200  # of the feed: more than the value learners' views hold
KILLS = {"sac": 6, "dqn": 6, "r2d2": 6}  # and two of a real process


@pytest.fixture
def client(server) -> Redis:
    return server.client


def sac_config() -> RunConfig:
    return target_config(stop={"return": None}, replay={"capacity": 1500, "samples_per_insert": 8})


CONFIGS: dict[str, Callable[[], RunConfig]] = {"sac": sac_config, "dqn": catch_config, "r2d2": recall_config}


def in_lockstep(config: RunConfig, **replay: Any) -> RunConfig:
    tree = config.model_dump(by_alias=True, mode="json")
    tree["learner"] |= {"lockstep": True, "checkpoint_every_s": 1.0}
    tree["replay"] |= {"slack_steps": 4000, **replay}
    return validate(tree)


class Fed(NamedTuple):
    """A fragment as it was appended."""

    fields: dict[bytes, bytes]
    producer: int
    incarnation: int
    seq: int
    num_transitions: int


def recorded(client: Redis, config: RunConfig, num_steps: int = NUM_STEPS) -> list[Fed]:
    """What two real players append to a run that nobody learns."""
    run = start(client, config)
    token = take(client, run)
    for part in range(2):
        play_steps(client, run, token, num_steps // 2 if part == 0 else num_steps - num_steps // 2)
    feed, steps = [], 0
    for entry in stream.read(client, run, b"0-0", count=10_000):
        fields = {name: value for name, value in entry.fields.items() if len(name) > 1 or name == b"h"}
        numbers = (entry.producer, entry.count(b"i"), entry.count(b"q"))
        feed.append(Fed(fields, *numbers, entry.count(b"n") - steps))
        steps = entry.count(b"n")
    return feed


def append(client: Redis, run: str, feed: list[Fed]) -> None:
    """The same fragments in the same order, as the run's own."""
    for fed in feed:
        header = json.loads(fed.fields[b"h"]) | {"run": run}
        fields = {**fed.fields, b"h": json.dumps(header).encode()}
        reply = stream.append(
            client, run, fields, producer=fed.producer, incarnation=fed.incarnation, seq=fed.seq,
            num_transitions=fed.num_transitions,
        )  # fmt: skip
        assert reply.answer is not stream.Answer.FULL


def learn(client: Redis, url: str, run: str, crashes: list[int]) -> Learner:
    """Learn all of the feed, crashing at these updates; the last learner, which has finished."""
    goal = runs.state(client, run).appended_fragments
    for crash_at in [*crashes, None]:
        learner = restored(client, run, url)
        with crashing(learner, crash_at) as crashed:
            until(lambda one=learner: crashed.is_set() or one.shared.ledger.consumed == goal)
        assert crashed.is_set() == (crash_at is not None), "the feed ended before the crash"
    learner.finish()
    return learner


def saved(client: Redis, run: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    found = checkpoints.load(client, run)
    assert found is not None
    return weights.decode_weights(found[0]), found[1]


def assert_equal_ends(client: Redis, one: str, two: str) -> None:
    """The same tensors bit by bit, the same counts."""
    (tensors_one, meta_one), (tensors_two, meta_two) = saved(client, one), saved(client, two)
    assert_equal_arrays(tensors_one, tensors_two)
    for name in ("updates", "env_steps", "admitted", "dead", "fragments", "ledger"):
        assert meta_one[name] == meta_two[name], name


@pytest.mark.parametrize("name", list(CONFIGS))
def test_killed_at_random_updates_it_ends_as_if_it_never_was(name: str, client: Redis, server) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    config = in_lockstep(CONFIGS[name]())
    feed = recorded(client, config)
    undisturbed, killed = start(client, config), start(client, config)
    for run in (undisturbed, killed):
        append(client, run, feed)
    whole = learn(client, server.url, undisturbed, [])
    assert whole.shared.updates > 200 and whole.counters.dead == 0
    if name != "sac":
        assert len(whole.replay) < whole.shared.env_steps, "some were evicted"
    kills = sorted(draw.randrange(whole.shared.updates) for _ in range(KILLS[name]))
    last = learn(client, server.url, killed, kills)
    assert_equal_ends(client, undisturbed, killed)
    assert_equal_arrays(contents(whole), contents(last))
    audit = ledger.audit(client, killed)
    assert audit.is_balanced and audit.total("consumed") == len(feed)


def test_a_real_process_killed_by_signal(client: Redis, server, processes: Processes) -> None:
    """Recurrent, prioritized replay, whose state is the largest."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    config = in_lockstep(recall_config(), samples_per_insert=32)
    feed = recorded(client, config, 1700)
    undisturbed, killed = start(client, config), start(client, config)
    for run in (undisturbed, killed):
        append(client, run, feed)
    updates = learn(client, server.url, undisturbed, []).num_updates
    for part in range(2):
        learner = processes.learner(server.url, killed)
        goal = updates * (part + draw.random()) / 2
        processes.until(lambda goal=goal: metrics.last(client, killed).get("updates", 0) >= goal)
        learner.kill()
    learner = processes.learner(server.url, killed)
    processes.until(lambda: "starts at update" in learner.text())  # figures may be those of the one before
    processes.until(lambda: (checkpoints.meta(client, killed) or {"updates": 0})["updates"] >= updates)
    learner.send(signal.SIGTERM)
    assert learner.wait() == 0, learner.text()
    assert_equal_ends(client, undisturbed, killed)
