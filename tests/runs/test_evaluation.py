"""Evaluation: each episode from its own seed, results independent of how many play side by side."""

from __future__ import annotations

import numpy as np
import pytest
from support.runs import toy_answers

from ddrl.algorithms.base import NO_STATE, RecurrentState, initial_state
from ddrl.config import EnvConfig
from ddrl.envs import EnvError, describe, make_one
from ddrl.runs.evaluation import evaluate, with_noops

CARTPOLE = EnvConfig(id="CartPole-v1", max_episode_steps=60, reward_scale=0.01)
SPACES = describe(CARTPOLE)
TARGET = EnvConfig(id="ddrl/Target-v0")


class Forgetful:
    """A policy without recurrent state."""

    def initial_state(self, num_envs: int) -> RecurrentState:
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        raise NotImplementedError


class Lean(Forgetful):
    """Push where the pole leans; a row's action depends on that row only."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
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
    class Hit(Forgetful):
        def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
            return observation + np.float32(0.5)

    result = evaluate(Hit(), TARGET, describe(TARGET), [1, 2, 3], num_envs=2, policy_version=0)
    np.testing.assert_allclose(result.returns, [-2.5] * 3, rtol=1e-5)
    assert result.lengths == (10, 10, 10)


@pytest.mark.parametrize("env_id", ["ddrl/Pick-v0", "ddrl/Pairs-v0", "ddrl/Spot-v0"])
def test_the_answer_of_each_toy_gives_its_best_return(env_id: str) -> None:
    class Solved(Forgetful):
        def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
            return toy_answers(observation)

    toy = EnvConfig(id=env_id)
    result = evaluate(Solved(), toy, describe(toy), range(20), num_envs=3, policy_version=0)
    assert set(result.returns) == {10.0}
    assert set(result.lengths) == {10}


STACKED = CARTPOLE.model_copy(update={"frame_stack": 3})


class LeanLate(Forgetful):
    """Push where the pole leaned two steps ago: the oldest of three frames."""

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        assert observation.shape[1:] == (12,)
        return (observation[:, 2] > 0).astype(np.int64)


@pytest.mark.parametrize("num_envs", [1, 4, 20])
def test_frames_are_stacked_within_each_episode(num_envs: int) -> None:
    def slow(seed: int) -> int:
        env = make_one(CARTPOLE)
        seen = [env.reset(seed=seed)[0]]
        ended = False
        while not ended:
            oldest = seen[max(len(seen) - 3, 0)]
            observation, _, terminated, truncated, _ = env.step(int(oldest[2] > 0))
            seen.append(observation)
            ended = terminated or truncated
        env.close()
        return len(seen) - 1

    result = evaluate(LeanLate(), STACKED, describe(STACKED), SEEDS, num_envs=num_envs, policy_version=0)
    assert list(result.lengths) == [slow(seed) for seed in SEEDS]
    assert result.lengths != evaluate(Lean(), CARTPOLE, SPACES, SEEDS, num_envs=5, policy_version=0).lengths


def in_turn(seed: int) -> int:
    """Length of the episode in which each side is pushed twice in turn."""
    env = make_one(CARTPOLE)
    env.reset(seed=seed)
    length, ended = 0, False
    while not ended:
        _, _, terminated, truncated, _ = env.step(length // 2 % 2)
        length, ended = length + 1, terminated or truncated
    env.close()
    return length


class Counting:
    """Recurrent: its state counts the steps of an episode; it plays by that, and checks what it is told."""

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
def test_memory_is_kept_per_episode_whatever_plays_beside_it(scale: float) -> None:
    env = CARTPOLE.model_copy(update={"reward_scale": scale})
    results = [
        evaluate(Counting(scale), env, SPACES, SEEDS, num_envs=num_envs, policy_version=0)
        for num_envs in (1, 3, 20)
    ]
    assert results[0] == results[1] == results[2]
    assert list(results[0].lengths) == [in_turn(seed) for seed in SEEDS] and len(set(results[0].lengths)) > 3


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ddrl/Pairs-v0", "ddrl/Target-v0"])
def test_random_actions_do_not_depend_on_num_envs(env_id: str) -> None:
    class Still(Forgetful):
        def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
            kind = np.float32 if spaces.action_kind == "continuous" else np.int64
            return np.zeros((len(observation), *spaces.action_shape), kind)

    env = EnvConfig(id=env_id)
    spaces = describe(env)

    def play(num_envs: int, epsilon: float) -> tuple[float, ...]:
        return evaluate(
            Still(), env, spaces, SEEDS, num_envs=num_envs, policy_version=0, epsilon=epsilon
        ).returns

    plain = evaluate(Still(), env, spaces, SEEDS, num_envs=7, policy_version=0).returns
    assert play(1, 0.3) == play(6, 0.3) == play(20, 0.3)
    assert play(6, 0.0) == plain != play(6, 0.3) != play(6, 1.0)


def test_share_of_random_actions_and_that_they_are_uniform() -> None:
    """Pick rewards the bright entry: the solved policy loses a random action in four of every epsilon."""

    class Solved(Forgetful):
        def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
            return toy_answers(observation)

    toy = EnvConfig(id="ddrl/Pick-v0")
    spaces = describe(toy)
    for epsilon in (0.2, 1.0):
        result = evaluate(Solved(), toy, spaces, range(300), num_envs=50, policy_version=0, epsilon=epsilon)
        share = 1 - epsilon * 3 / 4
        assert abs(sum(result.returns) / 3000 - share) < 5 * (share * (1 - share) / 3000) ** 0.5


def test_pictures_of_the_first_episode_only() -> None:
    pictures: list[tuple[np.ndarray, float]] = []

    result = evaluate(
        Lean(), CARTPOLE, SPACES, SEEDS[:3], num_envs=1, policy_version=0,
        on_frame=lambda picture, hz: pictures.append((picture, hz)),
    )  # fmt: skip
    assert len(pictures) == result.lengths[0] + 1
    assert {hz for _, hz in pictures} == {50.0}
    assert all(picture.shape == (400, 600, 3) and picture.dtype == np.uint8 for picture, _ in pictures)
    assert any((pictures[0][0] != picture).any() for picture, _ in pictures[1:])
    plain = evaluate(Lean(), CARTPOLE, SPACES, SEEDS[:3], num_envs=2, policy_version=0)
    assert plain == result


def test_images_that_are_played_stand_in_for_rendering_and_else_filming_is_refused() -> None:
    class Solved(Forgetful):
        def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
            return toy_answers(observation)

    spot = EnvConfig(id="ddrl/Spot-v0")
    pictures: list[np.ndarray] = []
    evaluate(
        Solved(), spot, describe(spot), [1, 2], num_envs=2, policy_version=0,
        on_frame=lambda picture, _: pictures.append(picture),
    )  # fmt: skip
    assert len(pictures) == 11 and all(picture.shape == (8, 8) for picture in pictures)
    assert all(picture.max() == 255 for picture in pictures)
    with pytest.raises(EnvError, match="ddrl/Target-v0: cannot be filmed.*leave the video out"):
        evaluate(
            Solved(), TARGET, describe(TARGET), [1], num_envs=1, policy_version=0, on_frame=lambda *_: None
        )


def test_what_on_step_raises_ends_the_evaluation() -> None:
    class Enough(Exception):
        pass

    steps: list[int] = []

    def on_step() -> None:
        steps.append(1)
        if len(steps) == 5:
            raise Enough

    with pytest.raises(Enough):
        evaluate(Lean(), CARTPOLE, SPACES, SEEDS, num_envs=2, policy_version=0, on_step=on_step)


@pytest.mark.parametrize("epsilon", [-0.1, 1.1, float("nan")])
def test_no_probability_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon is .*; use 0 to 1"):
        evaluate(Lean(), CARTPOLE, SPACES, [1], num_envs=1, policy_version=0, epsilon=epsilon)


def test_no_op_starts_are_for_games() -> None:
    assert with_noops(CARTPOLE, None) is CARTPOLE
    with pytest.raises(EnvError, match=r"CartPole-v1: no-op starts \(30 given\) are for ALE games"):
        with_noops(CARTPOLE, 30)
    assert with_noops(EnvConfig(id="ALE/Pong-v5"), 7).atari.noop_max == 7


def test_a_game_is_played_whole_with_no_ops_and_filmed() -> None:
    pytest.importorskip("ale_py")
    tree = {"id": "ALE/Asterix-v5", "frame_stack": 4, "reward_sign": True, "atari": {"max_frames": 240}}
    env = EnvConfig.model_validate(tree)

    class Still(Forgetful):
        seen: list[np.ndarray] = []

        def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
            assert observation.shape[1:] == (4, 84, 84)
            self.seen.append(observation[0].copy())
            return np.full(len(observation), 3, np.int64)

    pictures: list[tuple[np.ndarray, float]] = []
    spaces = describe(env)

    def play(noops: int, num_envs: int) -> list[np.ndarray]:
        Still.seen.clear()
        result = evaluate(
            Still(), with_noops(env, noops), spaces, [5, 6], num_envs=num_envs, policy_version=0,
            on_frame=lambda picture, hz: pictures.append((picture, hz)),
        )  # fmt: skip
        assert result.lengths == (60, 60)
        return Still.seen[:60]

    none, some, again = play(0, 2), play(30, 2), play(30, 1)
    assert all(np.array_equal(one, two) for one, two in zip(some, again, strict=True))
    assert any((one != two).any() for one, two in zip(none, some, strict=True))
    assert len(pictures) == 3 * 61 and pictures[0][1] == 15.0 and pictures[0][0].shape == (336, 336, 3)
