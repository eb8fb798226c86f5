"""Masks of allowed actions: told in several ways, seen at the end of each observation, refused with a remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddrl import envs
from ddrl.config import EnvConfig
from ddrl.envs import EnvError

MASKED = "support.odd_envs:Masked"


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")


def masked(**kwargs: Any) -> EnvConfig:
    return EnvConfig(id=MASKED, kwargs=kwargs, num_envs=2, action_mask=True)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("way", ["info", "part", "method"])
def test_the_mask_is_the_end_of_each_observation(way: str, pairs: bool) -> None:
    """Also after a reset, and of the true last observation where an episode is truncated."""
    config = masked(way=way, pairs=pairs, terminates=False)
    spec = envs.describe(config)
    num = 8 if pairs else 4
    assert (spec.has_mask, spec.num_masked, spec.observation_shape) == (True, num, (1 + num,))
    vector = envs.make_vector(config)
    envs.check_spaces(vector, spec)
    observation, _ = vector.reset(seed=[1, 2])
    for step in range(1, 7):
        lanes = [lane.unwrapped.allowed.ravel().tolist() for lane in vector.envs]  # type: ignore[attr-defined]
        assert observation[:, 1:].astype(bool).tolist() == lanes
        action = (
            spec.only_allowed(np.zeros((2, num), np.float32), observation).reshape(2, -1, 4).argmax(axis=2)
        )
        observation, *_, info = vector.step(action if pairs else action[:, 0])
        if step == 5:
            assert all(last[1:].any() for last in info["final_obs"])


def test_after_a_termination_all_is_allowed() -> None:
    made = envs.make_one(masked())
    observation, _ = made.reset(seed=0)
    for _ in range(5):
        observation, _, terminated, *_ = made.step(int(observation[1:].argmax()))
    assert terminated
    assert observation[1:].tolist() == [1, 1, 1, 1]


def test_frames_are_stacked_with_the_newest_mask_last() -> None:
    spec = envs.describe(masked().model_copy(update={"frame_stack": 3}))
    assert spec.input_shape == (15,)
    seen = np.arange(15, dtype=np.float32)[None] % 2
    assert spec.only_allowed(np.zeros((1, 4), np.float32), seen).tolist() == [[0, -1e9, 0, -1e9]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kwargs": {"mask": [1, 1, 1]}}, r"action_mask \[1, 1, 1\]: give 0 or 1 for each of 4 choices$"),
        ({"kwargs": {"mask": [0, 2, 1, 0]}}, "give 0 or 1 for each of 4 choices"),
        (
            {"kwargs": {"mask": [0, 0, 0, 0]}},
            r"action_mask \[0, 0, 0, 0\]: it allows nothing; end the episode",
        ),
        (
            {"kwargs": {"pairs": True, "mask": (np.ones(4), np.zeros(4))}},
            "1.0, 0.0, 0.0, 0.0, 0.0.*: it allows nothing",
        ),
        ({"kwargs": {"way": "none"}}, r"action_mask is set, but there is no info\[\"action_mask\"\]"),
        ({"id": "CartPole-v1"}, "CartPole-v1: env.action_mask is set, but there is no info"),
        ({"id": "Pendulum-v1"}, r"for Discrete or MultiDiscrete actions and vectors, not Box\(-2.0"),
        ({"id": "ddrl/Spot-v0"}, r"not Discrete\(4\) and observations \(8, 8, 1\); remove it"),
        (
            {"id": "ALE/Pong-v5"},
            "env.action_mask is True, which ALE games do not take; set it to false instead",
        ),
    ],
)
def test_what_is_no_mask_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        envs.describe(EnvConfig(**({"id": MASKED, "action_mask": True} | settings)))
