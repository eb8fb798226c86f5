"""A learner ends at odd moments, and the next one goes on: before play, amid it, after the stream was lost."""

from __future__ import annotations

from typing import Any

import pytest
from support.learners import Run, endless_config, playing, until

from ddrl.store import keys

PRIORITIZED = {"prioritized": True, "batch_size": 8}
ON_POLICY = {"batch_size": 64, "recurrent": "gru", "recurrent_size": 8, "shared": True}
PICK: dict[str, Any] = {"env": {"id": "ddrl/Pick-v0"}}
CASES: dict[str, dict[str, Any]] = {
    "sac": {"algorithm": {"name": "sac", "n_step": 3, **PRIORITIZED}},
    "dqn": {"algorithm": {"name": "dqn", "n_step": 3, **PRIORITIZED}, **PICK},
    "r2d2": {
        "algorithm": {"name": "r2d2", "sequence_length": 4, "overlap": 2, "burn_in": 0, **PRIORITIZED},
        **PICK,
    },
    "ppo": {"algorithm": {"name": "ppo", "minibatch_size": 32, **ON_POLICY}, **PICK, "replay": {}},
    "impala": {"algorithm": {"name": "impala", **ON_POLICY}, **PICK, "replay": {}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_whenever_its_learner_ended(server, learn, case: str) -> None:
    run = Run(server, endless_config(**CASES[case], learner={"checkpoint_every_s": 1.0}))

    def lives(updates: int = 0) -> None:
        """A learner restores the run, makes updates, and ends."""
        token, before = run.token, run.state.updates
        learning = learn(run)
        until(lambda: run.token > token and run.state.version >= 0 and run.state.updates >= before + updates)
        learning.end()
        assert learning.error is None and run.state.status == "active", run.state.reason

    def lose() -> None:
        run.client.xtrim(keys.experience(run.id), maxlen=0)

    lives()
    lives()  # from a checkpoint of nothing
    run.play(3)  # fewer than a batch
    lives()
    lose()
    lives()
    with playing(run.url, run.id):
        lives(5)
        lives(5)
    lose()
    lives()
    with playing(run.url, run.id):
        lives(5)
