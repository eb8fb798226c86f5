"""Quarantine and rollback: what a learner leaves out, takes back, and goes back to."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.learners import Learning, Run, endless_config, go_back, pick_config, playing, training, until

from ddrl import codec
from ddrl.learner.loop import Learner
from ddrl.runs.fragments import covered
from ddrl.store import keys, quarantine, recording, runs, weights
from ddrl.store.connection import StoreError
from ddrl.store.quarantine import Rule

PRIORITIZED = {"name": "sac", "batch_size": 256, "prioritized": True}


@pytest.fixture
def run(server, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that two hosts have played."""
    made = Run(server, endless_config(algorithm=PRIORITIZED, learner={"checkpoint_every_s": 1}))
    for host in ("good", "bad"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        made.play(600, anew=True)
    return made


def seen_by(run: Run, host: str) -> np.ndarray:
    """Return the observations before the steps that a host has played."""
    found = [codec.decode(entry.fields) for entry in run.entries]
    return np.concatenate(
        [one.observation[:-1].reshape(-1, *one.observation.shape[2:]) for one in found if one.host == host]
    )


def drawn(learner: Learner, num: int) -> np.ndarray:
    """Return the observations of so many draws."""
    batches = []
    while sum(map(len, batches)) < num:
        batch = learner.replay.draw(num_steps=10**9, num_updates=0, version=0)
        batches.append(np.array(learner.replay.begin(batch).observation))
    return np.concatenate(batches)


def among(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return which rows are among others, by their bytes."""
    kind = np.dtype((np.void, rows.shape[1] * rows.itemsize))
    return np.isin(*(np.ascontiguousarray(each).view(kind).ravel() for each in (rows, others)))


def set_rules(run: Run, *rules: Rule) -> None:
    _, revision = quarantine.read(run.client, run.id)
    quarantine.change(run.client, run.id, revision, rules, {"event": "quarantine", "reason": "for a test"})


def test_what_is_in_quarantine_is_never_drawn_and_comes_back(run: Run) -> None:
    """A million draws; the ledger stays balanced, and counts what is left out as taken."""
    good, bad = seen_by(run, "good"), seen_by(run, "bad")
    assert not among(bad, good).any()
    learner = run.learner()
    with training(learner):
        run.catch_up(learner)
        until(lambda: run.meta.get("held") == 1200)
    learner.finish()
    assert among(drawn(run.learner(), 20_000), bad).any()  # without a rule

    set_rules(run, Rule(host="bad"))
    learner = run.learner()
    assert len(learner.replay) == 600
    rows = drawn(learner, 1_000_000)
    assert among(rows, good).all() and not among(rows, bad).any()
    with training(learner):
        run.play(200)  # on the same host: it counts, and is left out
        run.catch_up(learner)
        assert learner.shared.env_steps >= 1400 and len(learner.replay) == 600
        until(lambda: run.meta.get("env_steps", 0) >= 1400)
    learner.finish()
    audit = run.audit()
    assert audit.total("consumed") == audit.total("appended") and not audit.total("refused")
    found = covered(run.client, run.id, quarantine.read(run.client, run.id)[0])
    assert (found.total, found.under_any) == (len(run.entries), found.fragments[0]) and found.steps[0] >= 800

    set_rules(run)
    learner = run.learner()
    assert len(learner.replay) >= 1400
    assert among(drawn(learner, 20_000), bad).any()


def test_a_learner_that_begins_anew_with_the_rules_goes_on_recording(
    server, learn: Callable[..., Learning], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Also while the garbage of its first attempt is still there."""
    replay = {"capacity": 300, "samples_per_insert": 1, "slack_steps": 40_000, "retain": "all"}
    run = Run(server, endless_config(replay=replay, learner={"checkpoint_every_s": 1}))
    gc.disable()
    try:
        learning = learn(run)
        for goal in (20, 40):

            def has_trimmed(goal: int = goal) -> bool:
                run.play(100)
                return run.state.appended_fragments - len(run.entries) > goal

            until(has_trimmed, timeout_s=60)
            set_rules(run, Rule(producer=99))
            until(lambda goal=goal: log.text.count(f"learns {run.id} on") == 1 + goal // 20)
        learning.end()
    finally:
        gc.enable()
    [folder] = tmp_path.glob("runs/*/recording")
    assert len(list(recording.entries(folder))) == run.state.appended_fragments


def test_what_is_left_out_stays_until_it_would_have_made_room(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = {"capacity": 1000, "warmup_steps": 100}
    run = Run(server, endless_config(replay=replay, learner={"checkpoint_every_s": 1}))
    monkeypatch.setattr(socket, "gethostname", lambda: "bad")
    run.play(200)
    first = run.entries[0].entry_id
    set_rules(run, Rule(host="bad"))
    learner = run.learner()
    monkeypatch.setattr(socket, "gethostname", lambda: "good")
    with training(learner):
        run.play(600, anew=True)
        run.catch_up(learner)
        until(lambda: run.meta.get("env_steps", 0) >= 800)
        assert run.entries[0].entry_id == first and run.meta["oldest"] == first.decode()
        run.play(1000)
        run.catch_up(learner)
        until(lambda: run.entries[0].entry_id != first)
        until(lambda: not {"bad"} & {codec.decode(entry.fields).host for entry in run.entries})


def test_a_learner_at_work_begins_anew_with_other_rules(run: Run, learn: Any, log: Any) -> None:
    learning = learn(run)
    with playing(run.url, run.id):
        until(lambda: run.state.updates > 20)
        set_rules(run, Rule(host="bad"))
        until(lambda: "another quarantine" in log.text and run.state.leased)
        before = run.state.updates
        until(lambda: run.state.updates > before + 20)
    learning.end()
    assert learning.error is None
    run.audit()


def test_rules_that_were_changed_meanwhile_are_left_alone(run: Run) -> None:
    set_rules(run, Rule(host="one"))
    with pytest.raises(StoreError, match="its quarantine was changed meanwhile"):
        quarantine.change(run.client, run.id, 0, (Rule(host="two"),), {"event": "quarantine"})
    assert quarantine.read(run.client, run.id) == ((Rule(host="one"),), 1)
    with pytest.raises(StoreError, match="has 100 rules of quarantine, which is the most"):
        set_rules(run, *[Rule(producer=one) for one in range(101)])


MAYBE = st.none() | st.integers(0, 3)


@given(
    rule=st.builds(Rule, host=st.none() | st.sampled_from("ab"), producer=MAYBE, first_version=st.integers(0, 3),
                   last_version=MAYBE, since_ms=st.integers(0, 3), until_ms=MAYBE),
    host=st.sampled_from("ab"), producer=st.integers(0, 3), version=st.integers(0, 3), at_ms=st.integers(0, 3),
)  # fmt: skip
def test_a_rule_covers_that_for_which_all_holds(
    rule: Rule, host: str, producer: int, version: int, at_ms: int
) -> None:
    wrong = [
        rule.host is not None and host != rule.host,
        rule.producer is not None and producer != rule.producer,
        not rule.first_version <= version <= (9 if rule.last_version is None else rule.last_version),
        not rule.since_ms <= at_ms <= (9 if rule.until_ms is None else rule.until_ms),
    ]
    assert rule.covers(b"%d-7" % at_ms, host, producer, version) is not any(wrong)


# --- rollback --------------------------------------------------------------------------------------------


def published(run: Run, version: int) -> dict[str, np.ndarray]:
    return weights.decode_weights(weights.get(run.client, run.id, version) or b"")


@pytest.mark.parametrize("name", ["sac", "dqn", "ppo"])
def test_a_learner_goes_back_to_a_version_once(server, name: str) -> None:
    """With the newest checkpoint's optimizer; until that is saved again the next learner does the same."""
    configs = {"sac": endless_config, "dqn": endless_config, "ppo": pick_config}
    of = {"env": {"id": "ddrl/Pick-v0"}, "algorithm": {"name": "dqn"}} if name == "dqn" else {}
    run = Run(server, configs[name](**of, weights={"keep_last": 50}))
    with playing(run.url, run.id):
        learner = run.learner()
        with training(learner):
            until(lambda: run.index.latest >= 4 and run.state.updates > 20)
        learner.finish()
    wanted, latest = go_back(run, 2), run.index.latest
    wanted.pop("epsilon", None)  # goes by updates
    assert any(not np.array_equal(wanted[one], published(run, latest)[one]) for one in wanted)
    for more in (1, 2):  # the first learner saves nothing
        learner = run.learner()
        assert run.index.latest == latest + more and learner.shared.updates > 20
        again = published(run, latest + more)
        assert all(
            np.array_equal(again[one], wanted[one]) for one in wanted if one in learner.algorithm.weights()
        )
        learner.close()
    learner = run.learner()
    with training(learner):
        until(lambda: not run.client.exists(keys.rollback(run.id)))
    learner.finish()
    saved = {name: value.numpy().copy() for name, value in learner.algorithm.weights().items()}
    learner = run.learner()
    assert all(
        np.array_equal(value.numpy(), saved[one]) for one, value in learner.algorithm.weights().items()
    )
    learner.close()
    [change] = [row for row in runs.journal(run.client, run.id)[0] if row["event"] == "rollback"]
    assert (change["option"], change["to"]) == ("version", "2")


def test_a_version_that_is_named_while_a_learner_goes_back_is_not_lost(server) -> None:
    run = Run(server, endless_config(weights={"keep_last": 50}))
    with playing(run.url, run.id):
        learner = run.learner()
        with training(learner):
            until(lambda: run.index.latest >= 3 and run.state.updates > 20)
        learner.finish()
    go_back(run, 1)
    learner = run.learner()
    wanted = go_back(run, 2)
    learner.finish()
    latest = run.index.latest
    run.learner().close()
    assert run.index.latest == latest + 1
    assert all(np.array_equal(published(run, latest + 1)[one], wanted[one]) for one in wanted)
