"""An update that leaves values that are not finite: nothing of it leaves the learner, which goes back once."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import numpy as np
import pytest
from support.learners import Run, endless_config, pick_config, playing, until
from support.processes import SLOW_S

from ddrl import codec
from ddrl.learner.loop import NotFiniteError, too_large
from ddrl.learner.publisher import decode_tensors
from ddrl.store import checkpoints, keys, runs, weights
from ddrl.types import Fragment

DQN = {"name": "dqn", "hidden_sizes": [16], "batch_size": 32}
NEVER = {"stop": {"return": None}, "evaluation": {"every_s": 3600, "near": 0}}
CASES = {  # values that are finite in float32, but whose square, or what SAC makes of it, is not
    "observation": (lambda: endless_config(env={"id": "ddrl/Pick-v0"}, algorithm=DQN), 3e38),
    "reward": (lambda: pick_config(**NEVER), 3e38),
    "observation of SAC": (endless_config, 1e16),
}


def assert_all_finite(run: Run) -> None:
    """Every version that is kept, and the newest checkpoint, are finite."""
    newest = checkpoints.load(run.client, run.id)
    assert newest is not None
    kept = [weights.get(run.client, run.id, version) for version in run.index.sizes]
    for blob in (newest[0], *filter(None, kept)):  # a version may have been dropped meanwhile
        for name, tensor in decode_tensors(blob).items():
            assert not tensor.is_floating_point() or tensor.isfinite().all(), name


@pytest.mark.parametrize("case", CASES)
def test_a_huge_value_takes_the_run_back_once_then_fails_it_and_is_named_and_never_read_again(
    server, learn, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    column, (config, huge) = case.partition(" ")[0], CASES[case]
    run, encode, is_due = Run(server, config()), codec.encode, threading.Event()

    def poison(fragment: Fragment) -> dict[bytes, bytes]:
        if is_due.is_set():
            is_due.clear()
            forged = {"forged": np.zeros(fragment.reward.shape, bool)}  # a column that no algorithm adds
            values = np.full_like(getattr(fragment, column), huge)
            fragment = replace(fragment, extras=fragment.extras | forged, **{column: values})
        return encode(fragment)

    def goes_on() -> None:
        before = run.state
        until(lambda: run.state.version > before.version + 5 and run.meta["updates"] > before.updates, SLOW_S)
        assert_all_finite(run)

    monkeypatch.setattr(codec, "encode", poison)
    learning = learn(run)
    with playing(run.url, run.id):
        until(lambda: run.meta, SLOW_S)
        is_due.set()
        until(lambda: "went back" in run.journal, SLOW_S)
        goes_on()
        is_due.set()
        learning.thread.join(SLOW_S)
        assert isinstance(learning.error, NotFiniteError)
        state = run.state
        assert state.status == "failed" and run.journal.count("went back") == 1
        assert "not finite" in state.reason and "again" in state.reason
        found = re.search(
            rf"the largest value of the stream is {re.escape(f'{huge:.3g}')}, in {column} of entry (\d+-\d+)",
            state.reason,
        )
        assert found
        assert_all_finite(run)
        runs.reactivate(run.client, run.id)
        learn(run)
        goes_on()
    rows = [fields for _, fields in run.client.xrange(keys.dead(run.id))]
    assert {row[b"reason"].decode() for row in rows} == {f"{column}: {huge:.3g} is too large to learn from"}
    assert rows[-1][b"entry"].decode() == found[1] and run.audit().total("trimmed") == 0


def test_a_run_goes_on_after_a_resume_where_forged_fragments_are_the_most(
    server, learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their values are not far above the others' then, and less than what has no square."""
    run, encode, forges = Run(server, endless_config()), codec.encode, threading.Event()

    def forge(fragment: Fragment) -> dict[bytes, bytes]:
        observation = np.full_like(fragment.observation, 1e16)
        return encode(replace(fragment, observation=observation) if forges.is_set() else fragment)

    monkeypatch.setattr(codec, "encode", forge)
    forges.set()
    learning = learn(run)
    with playing(run.url, run.id):
        learning.thread.join(SLOW_S)
    assert isinstance(learning.error, NotFiniteError) and run.journal.count("went back") == 1
    forges.clear()
    runs.reactivate(run.client, run.id)
    learn(run)
    with playing(run.url, run.id):
        before = run.state.updates
        until(lambda: run.state.updates > before + 100 and run.state.status == "active", SLOW_S)


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [([1.0, 2.0, 3e38], 1e6), ([5e3, 5e3, 1e16], 5e7), ([3e38, 3e38, 1.0], 1e18), ([1e15] * 3, 1e18)],
)
def test_what_is_too_large_is_far_above_the_others_and_never_more_than_has_a_square(sizes, limit) -> None:
    """Also where forged fragments are the most."""
    assert too_large(sizes) == limit
