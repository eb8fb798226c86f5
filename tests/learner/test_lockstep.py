"""`learner.lockstep`: on one feed a learner that is killed again and again ends bit-equal to one that never was."""

from __future__ import annotations

import json
import random
import signal
from typing import Any

import pytest
from support.algorithms import assert_same
from support.learners import OFF_POLICY, Run, contents, crashing, fields_of, recall_config, until
from support.processes import EXACT, Processes

from ddrl.config import RunConfig, validate
from ddrl.learner.loop import Learner
from ddrl.store import checkpoints, stream, weights

NUM_STEPS = 2200  # of the feed: more than the replays hold
NUM_KILLS = 6 if EXACT else 3
Feed = list[tuple[dict[bytes, bytes], dict[str, int]]]
"""Fragments as they were appended: fields; producer, incarnation, seq, num_transitions."""


@pytest.fixture
def draw() -> random.Random:
    """Another one each time; its seed is printed."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


def in_lockstep(server, config: RunConfig, num_steps: int, **replay: Any) -> tuple[Run, Run]:
    """Return two runs that hold the same feed: so many steps of two real players."""
    tree = config.model_dump(by_alias=True, mode="json")
    tree["learner"] |= {"lockstep": True, "checkpoint_every_s": 1.0}
    tree["replay"] |= {"slack_steps": 4000, **replay}
    config = validate(tree)
    feed = recorded(Run(server, config), num_steps)
    return fed(Run(server, config), feed), fed(Run(server, config), feed)


def recorded(run: Run, num_steps: int) -> Feed:
    """Return what two real players append to a run that nobody learns."""
    for _ in range(2):
        run.play(num_steps // 2, anew=True)
    feed, steps = [], 0
    for entry in run.entries:
        who = {"producer": entry.producer, "incarnation": entry.count(b"i"), "seq": entry.count(b"q")}
        feed.append((fields_of(entry), who | {"num_transitions": entry.count(b"n") - steps}))
        steps = entry.count(b"n")
    return feed


def fed(run: Run, feed: Feed) -> Run:
    """Append these fragments to a new run in this order, as its own."""
    for fields, who in feed:
        header = json.loads(fields[b"h"]) | {"run": run.id}
        reply = stream.append(run.client, run.id, {**fields, b"h": json.dumps(header).encode()}, **who)
        assert reply.answer is not stream.Answer.FULL
    return run


def learn(run: Run, crashes: list[int]) -> Learner:
    """Learn all of the feed, crashing at these updates; return the last learner, which has finished."""
    goal = run.state.appended_fragments
    for crash_at in [*crashes, None]:
        learner = run.learner()
        with crashing(learner, crash_at) as crashed:
            until(lambda one=learner: crashed.is_set() or one.shared.ledger.consumed == goal)
        assert crashed.is_set() == (crash_at is not None), "the feed ended before the crash"
    learner.finish()
    return learner


def assert_equal_ends(one: Run, two: Run) -> None:
    """Assert that the newest checkpoints hold the same tensors, but for ids of entries, and the same counts."""
    states = [weights.decode_weights(checkpoints.load(run.client, run.id)[0]) for run in (one, two)]
    for state in states:
        state.pop("replay.entry", None)
    assert_same(*states)
    for name in ("updates", "env_steps", "admitted", "dead", "fragments", "ledger"):
        assert one.meta[name] == two.meta[name], name


@pytest.mark.parametrize("name", OFF_POLICY)
def test_learners_killed_at_random_end_as_one_never_killed(name: str, server, draw: random.Random) -> None:
    undisturbed, killed = in_lockstep(server, OFF_POLICY[name](), NUM_STEPS)
    whole = learn(undisturbed, [])
    updates, steps = whole.shared.updates, whole.shared.env_steps
    assert updates > 200 and whole.counters.dead == 0
    assert len(whole.replay) < steps, "some were evicted"
    last = learn(killed, sorted(draw.randrange(updates) for _ in range(NUM_KILLS)))
    assert_equal_ends(undisturbed, killed)
    assert_same(contents(whole), contents(last))
    for number in range(updates, updates + 3):  # they would draw the same next
        draws = (one.replay.draw(num_steps=10**9, num_updates=number, version=0) for one in (whole, last))
        assert_same(*map(vars, draws))
    assert killed.audit().total("consumed") == killed.state.appended_fragments


@pytest.mark.long
def test_a_killed_process_ends_as_one_never_killed(server, processes: Processes, draw: random.Random) -> None:
    """Recurrent, prioritized replay, whose state is the largest."""
    undisturbed, killed = in_lockstep(server, recall_config(), 1000, samples_per_insert=32)
    updates = learn(undisturbed, []).shared.updates
    num_kills = 2 if EXACT else 1
    for part in range(num_kills):
        learner = processes.learner(killed.url, killed.id)
        goal = updates * (part + draw.random()) / num_kills
        processes.until(lambda goal=goal: any(row["updates"] >= goal for row in killed.rows))
        learner.kill()
    learner = processes.learner(killed.url, killed.id)
    processes.until(lambda: "starts at update" in learner.text())  # figures may be those of the one before
    processes.until(lambda: killed.meta.get("updates", 0) >= updates)
    learner.send_signal(signal.SIGTERM)
    assert learner.wait() == 0, learner.text()
    assert_equal_ends(undisturbed, killed)
