"""Evaluation: each episode from its own seed, results independent of how many play side by side."""

from __future__ import annotations

import numpy as np
import pytest
from runs_for_tests import toy_answers

from ddrl.config import EnvConfig
from ddrl.envs import EnvError, describe, make_one
from ddrl.evaluation import evaluate

CARTPOLE = EnvConfig(id="CartPole-v1", max_episode_steps=60, reward_scale=0.01)
SPACES = describe(CARTPOLE)
TARGET = EnvConfig(id="ddrl/Target-v0")


class Lean:
    """Push where the pole leans; a row's action depends on that row only."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def act(self, observation: np.ndarray) -> np.ndarray:
        self.sizes.append(len(observation))
        return (observation[:, 2] > 0).astype(np.int64)


def alone(seed: int) -> tuple[float, int]:
    """The episode of a seed, played in the plainest way."""
    env = make_one(CARTPOLE)
    observation, _ = env.reset(seed=seed)
    total, length, ended = 0.0, 0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(int(observation[2] > 0))
        total, length, ended = total + float(reward), length + 1, terminated or truncated
    env.close()
    return total, length


SEEDS = [1_000_000 + 7 * i for i in range(20)]


@pytest.mark.parametrize("num_envs", [1, 3, 20, 50])
def test_result_does_not_depend_on_num_envs(num_envs: int) -> None:
    policy = Lean()
    result = evaluate(policy, CARTPOLE, SPACES, SEEDS, num_envs=num_envs, policy_version=4)
    assert result.policy_version == 4
    assert result.seeds == tuple(SEEDS)
    assert list(zip(result.returns, result.lengths, strict=True)) == [alone(seed) for seed in SEEDS]
    assert len(set(result.lengths)) > 5  # the seeds do matter
    assert max(policy.sizes) == min(num_envs, 20)
    assert sum(policy.sizes) == sum(result.lengths)  # nothing is asked for lanes that are done


def test_same_seed_twice_and_order_of_seeds() -> None:
    result = evaluate(Lean(), CARTPOLE, SPACES, [SEEDS[3], SEEDS[1], SEEDS[3]], num_envs=2, policy_version=0)
    assert result.lengths == (alone(SEEDS[3])[1], alone(SEEDS[1])[1], alone(SEEDS[3])[1])


def test_each_episode_is_reported() -> None:
    seen: list[tuple[int, float, int]] = []
    result = evaluate(
        Lean(),
        CARTPOLE,
        SPACES,
        SEEDS[:5],
        num_envs=2,
        policy_version=0,
        on_episode=lambda *row: seen.append(row),
    )
    assert sorted(seen) == sorted(zip(result.seeds, result.returns, result.lengths, strict=True))


@pytest.mark.parametrize(
    ("seeds", "num_envs", "message"), [([], 1, "no seeds"), ([1], 0, "num_envs is 0; use 1 or more")]
)
def test_refusals(seeds: list[int], num_envs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(Lean(), CARTPOLE, SPACES, seeds, num_envs=num_envs, policy_version=0)


def test_an_environment_that_the_policy_does_not_know_is_refused() -> None:
    with pytest.raises(EnvError, match=r"observation_shape is \(1,\) here, but \(4,\) is expected"):
        evaluate(Lean(), TARGET, SPACES, [1], num_envs=1, policy_version=0)


def test_continuous_actions_and_known_answer() -> None:
    class Hit:
        def act(self, observation: np.ndarray) -> np.ndarray:
            return observation + np.float32(0.5)

    result = evaluate(Hit(), TARGET, describe(TARGET), [1, 2, 3], num_envs=2, policy_version=0)
    np.testing.assert_allclose(result.returns, [-2.5] * 3, rtol=1e-5)
    assert result.lengths == (10, 10, 10)


@pytest.mark.parametrize("env_id", ["ddrl/Pick-v0", "ddrl/Pairs-v0", "ddrl/Spot-v0"])
def test_the_answer_of_each_toy_gives_its_best_return(env_id: str) -> None:
    class Solved:
        def act(self, observation: np.ndarray) -> np.ndarray:
            return toy_answers(observation)

    toy = EnvConfig(id=env_id)
    result = evaluate(Solved(), toy, describe(toy), range(20), num_envs=3, policy_version=0)
    assert set(result.returns) == {10.0}
    assert set(result.lengths) == {10}
