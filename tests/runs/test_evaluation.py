"""Evaluation: each episode from its own seed, results independent of how many play side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.runs import Acts, toy_answers

from ddrl.algorithms.base import NO_STATE, RecurrentState, initial_state
from ddrl.config import EnvConfig, RunConfig
from ddrl.envs import EnvError, describe, make_one
from ddrl.policy import LoadedPolicy
from ddrl.runs import evaluation
from ddrl.runs.evaluation import score, with_options
from ddrl.types import EvaluationResult

CARTPOLE = EnvConfig(id="CartPole-v1", max_episode_steps=60, reward_scale=0.01)
TARGET, SPOT = EnvConfig(id="ddrl/Target-v0"), EnvConfig(id="ddrl/Spot-v0")
SEEDS = [1_000_000 + 7 * i for i in (*range(19), 3)]  # one of them twice


def lean(observation: np.ndarray) -> np.ndarray:
    """Push where the pole leans; of stacked frames, the oldest counts."""
    return (observation[:, 2] > 0).astype(np.int64)


def play(policy: Any, env: EnvConfig, seeds: Sequence[int] = SEEDS, **options: Any) -> EvaluationResult:
    spaces = options.pop("spaces", None) or describe(env)
    given = {"max_steps": options.pop("max_steps", None)}
    config = RunConfig(env=env, algorithm={"name": "none"}, evaluation=given)
    acts = policy if hasattr(policy, "act") else Acts(policy)
    loaded = LoadedPolicy(acts, config, spaces, "run", 0)
    return score(loaded, seeds, **{"num_envs": 5, "epsilon": 0.0} | options)


def alone(seed: int, choose: Callable[[list[np.ndarray]], int]) -> tuple[float, int]:
    """Return and length of the episode of a seed, played step by step; actions depend on all observations so far."""
    env = make_one(CARTPOLE)
    seen, total, ended = [env.reset(seed=seed)[0]], 0.0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(choose(seen))
        seen.append(observation)
        total, ended = total + float(reward), terminated or truncated
    env.close()
    return total, len(seen) - 1


@pytest.mark.parametrize("frame_stack", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 3, 20, 50])
def test_the_result_does_not_depend_on_num_envs(num_envs: int, frame_stack: int) -> None:
    policy, episodes = Acts(lean), []
    env = CARTPOLE.model_copy(update={"frame_stack": frame_stack})
    result = play(policy, env, num_envs=num_envs, on_episode=lambda *row: episodes.append(row))
    oldest = [alone(seed, lambda seen: int(seen[-frame_stack:][0][2] > 0)) for seed in SEEDS]
    assert list(zip(result.returns, result.lengths, strict=True)) == oldest
    assert len(set(result.lengths)) > 5  # the seeds do matter
    assert max(policy.sizes) == min(num_envs, 20)
    assert sum(policy.sizes) == sum(result.lengths)  # no action is computed for an ended episode
    assert sorted(episodes) == sorted(zip(SEEDS, result.returns, result.lengths, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epsilon": -0.1}, ValueError, "epsilon is -0.1; use 0 to 1"),
        ({"epsilon": 1.1}, ValueError, "epsilon is 1.1; use 0 to 1"),
        ({"epsilon": float("nan")}, ValueError, "epsilon is nan; use 0 to 1"),
        ({"spaces": describe(TARGET)}, EnvError, r"observation_shape is \(4,\) here, but \(1,\) is expected"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        play(lean, CARTPOLE, **options)


class Counts:
    """A recurrent policy that counts the steps of an episode and pushes each side twice in turn; checks its inputs."""

    def __init__(self, reward: float) -> None:
        self.reward = reward

    def initial_state(self, num_envs: int) -> RecurrentState:
        return initial_state(num_envs, 2)

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        count = state["hidden"][:, 0].copy()
        begins = count == 0
        assert (state["previous_action"] == np.where(begins, -1, (count - 1) // 2 % 2)).all()
        np.testing.assert_allclose(state["previous_reward"], np.where(begins, 0.0, self.reward), rtol=1e-6)
        state["hidden"][:, 0] += 1
        state["hidden"][:, 1] = observation[:, 0]
        return (count // 2 % 2).astype(np.int64)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_recurrent_state_is_kept_per_episode_whatever_plays_beside_it(scale: float) -> None:
    env = CARTPOLE.model_copy(update={"reward_scale": scale})
    results = [play(Counts(scale), env, num_envs=num_envs) for num_envs in (1, 3, 20)]
    assert results[0] == results[1] == results[2]
    in_turn = [alone(seed, lambda seen: (len(seen) - 1) // 2 % 2)[1] for seed in SEEDS]
    assert list(results[0].lengths) == in_turn and len(set(in_turn)) > 3


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ddrl/Pairs-v0", "ddrl/Target-v0"])
def test_random_actions_do_not_depend_on_num_envs(env_id: str) -> None:
    env = EnvConfig(id=env_id)
    spaces = describe(env)
    kind = np.float32 if spaces.action_kind == "continuous" else np.int64

    def returns(num_envs: int, epsilon: float) -> tuple[float, ...]:
        still = Acts(lambda observation: np.zeros((len(observation), *spaces.action_shape), kind))
        return play(still, env, num_envs=num_envs, epsilon=epsilon).returns

    assert returns(1, 0.3) == returns(6, 0.3) == returns(20, 0.3)
    assert returns(6, 0.0) == returns(7, 0.0) != returns(6, 0.3) != returns(6, 1.0)


@pytest.mark.parametrize(
    ("env_id", "max_steps", "length"),
    [
        ("support.odd_envs:Endless", 7, 7),
        ("support.odd_envs:Endless", None, 50),
        ("CartPole-v1", 9, 9),
        ("CartPole-v1", None, 500),
    ],
)
def test_an_episode_is_truncated_at_max_steps_or_the_environments_own_limit(
    env_id: str, max_steps: int | None, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    monkeypatch.setattr(evaluation, "MAX_STEPS", 50)

    def balance(seen: np.ndarray) -> np.ndarray:
        return (
            (seen[:, 2] + 0.5 * seen[:, 3] > 0).astype(np.int64)
            if seen.shape[1] == 4
            else np.zeros(len(seen), int)
        )

    result = play(balance, EnvConfig(id=env_id), SEEDS[:3], num_envs=2, max_steps=max_steps)
    assert result.lengths == (length,) * 3 and result.returns == (float(length),) * 3


@pytest.mark.parametrize("epsilon", [0.2, 1.0])
def test_random_actions_are_uniform_and_as_frequent_as_epsilon_says(epsilon: float) -> None:
    """In Pick one action of four is rewarded."""
    result = play(toy_answers, EnvConfig(id="ddrl/Pick-v0"), range(300), num_envs=50, epsilon=epsilon)
    share = 1 - epsilon * 3 / 4
    assert abs(sum(result.returns) / 3000 - share) < 5 * (share * (1 - share) / 3000) ** 0.5


def test_pictures_are_of_the_first_episode_only() -> None:
    pictures: list[tuple[np.ndarray, float]] = []
    result = play(lean, CARTPOLE, SEEDS[:3], num_envs=1, on_frame=lambda *frame: pictures.append(frame))
    assert len(pictures) == result.lengths[0] + 1
    assert {hz for _, hz in pictures} == {50.0}
    assert all(picture.shape == (400, 600, 3) and picture.dtype == np.uint8 for picture, _ in pictures)
    assert any((pictures[0][0] != picture).any() for picture, _ in pictures[1:])
    assert play(lean, CARTPOLE, SEEDS[:3], num_envs=2) == result


def test_observed_images_are_filmed_and_what_has_no_picture_is_refused() -> None:
    pictures: list[np.ndarray] = []
    play(toy_answers, SPOT, [1, 2], num_envs=2, on_frame=lambda picture, _: pictures.append(picture))
    assert len(pictures) == 11 and all(picture.shape == (8, 8) for picture in pictures)
    assert all(picture.max() == 255 for picture in pictures)
    with pytest.raises(EnvError, match="ddrl/Target-v0: cannot be filmed.*leave the video out"):
        play(toy_answers, TARGET, [1], on_frame=lambda *_: None)


def test_no_op_starts_are_for_games() -> None:
    assert with_options(CARTPOLE, None, None) is CARTPOLE
    with pytest.raises(EnvError, match=r"CartPole-v1: no-op starts \(30 given\) are for ALE games"):
        with_options(CARTPOLE, 30, None)
    assert with_options(EnvConfig(id="ALE/Pong-v5"), 7, None).atari.noop_max == 7


def test_a_game_is_played_whole_with_no_ops_and_filmed() -> None:
    pytest.importorskip("ale_py")
    tree = {"id": "ALE/Asterix-v5", "frame_stack": 4, "reward_sign": True, "atari": {"max_frames": 240}}
    env = EnvConfig.model_validate(tree)
    pictures: list[tuple[np.ndarray, float]] = []

    def observations(noops: int, num_envs: int) -> list[np.ndarray]:
        seen: list[np.ndarray] = []

        def still(observation: np.ndarray) -> np.ndarray:
            assert observation.shape == (1, 4, 84, 84), "games are played one by one"
            seen.append(observation[0].copy())
            return np.full(len(observation), 3, np.int64)

        options = {"num_envs": num_envs, "on_frame": lambda *frame: pictures.append(frame)}
        result = play(still, with_options(env, noops, None), [5, 6], **options)
        assert result.lengths == (60, 60)
        return seen[:60]

    none, some, again = observations(0, 2), observations(30, 2), observations(30, 1)
    assert all(np.array_equal(one, two) for one, two in zip(some, again, strict=True))
    assert any((one != two).any() for one, two in zip(none, some, strict=True))
    assert len(pictures) == 3 * 61 and pictures[0][1] == 15.0 and pictures[0][0].shape == (210, 160, 3)
