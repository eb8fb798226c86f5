"""Hindsight against each fragment walked by hand, the goals of environments, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from support.reference_items import Player
from support.replays import admit, gather_all, make_replay

from ddrl import config, envs
from ddrl.algorithms import base
from ddrl.config import EnvConfig
from ddrl.envs.goals import Goals, find_goals
from ddrl.envs.requirements import EnvError
from ddrl.envs.toy import Flip
from ddrl.replay.experience import make_experience
from ddrl.replay.hindsight import Hindsight
from ddrl.replay.replay import Replay
from ddrl.replay.transitions import TransitionItems
from ddrl.runs import submit
from ddrl.types import Fragment

GAMMA, NUM = 0.5, 3


def distance(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return -np.abs(achieved - desired).sum(axis=1).astype(np.float32)


GOALS = Goals(slice(0, 1), slice(2, 3), distance)


def of_one(fragment: Fragment) -> Any:
    items = TransitionItems(gamma=GAMMA, n_step=1, hindsight=Hindsight(GOALS, NUM))
    replay = make_replay(items, capacity=fragment.num_transitions)
    admit(replay, fragment)
    replay.check_valid()
    return gather_all(replay)


def walked(fragment: Fragment) -> list[tuple[np.ndarray, np.ndarray, int, set[float]]]:
    """(observation, next observation, action, goals reached from it on) of each step that did not terminate."""
    finals = {
        tuple(index): row for index, row in zip(fragment.final_index, fragment.final_observation, strict=True)
    }
    steps = []
    num_steps, num_envs = fragment.reward.shape

    def after(step: int, lane: int) -> np.ndarray:
        return finals.get((step, lane), fragment.observation[step + 1, lane])

    for step in range(num_steps):
        for lane in range(num_envs):
            reached: set[float] = set()
            for later in range(step, num_steps):
                if fragment.terminated[later, lane]:
                    break
                reached.add(float(after(later, lane)[0]))
                if fragment.truncated[later, lane]:
                    break
            if reached:
                seen = fragment.observation[step, lane], after(step, lane)
                steps.append((*seen, int(fragment.action[step, lane]), reached))
    return steps


def test_context_of_another_algorithm_changes_nothing() -> None:
    player = Player(num_envs=2)
    player.fragment(10)
    fragment = player.fragment(8, context=2)
    assert fragment.context == 2
    new = {
        name: getattr(fragment, name)[2:]
        for name in ("observation", "action", "reward", "terminated", "truncated")
    }
    is_new = fragment.final_index[:, 0] >= 2
    finals = {"final_index": fragment.final_index[is_new] - (2, 0)}
    finals["final_observation"] = fragment.final_observation[is_new]
    expected, found = of_one(replace(fragment, context=0, **new, **finals)), of_one(fragment)
    for name in ("observation", "action", "n_step_return", "bootstrap_discount", "next_observation"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("end_probability", [0.0, 0.3, 1.0])
def test_each_step_has_so_many_goals_that_its_episode_reaches_later(end_probability: float) -> None:
    player = Player(num_envs=2, end_probability=end_probability)
    drawn: list[float] = []
    for length in (1, 2, 7, 20):
        fragment = player.fragment(length)
        batch, steps = of_one(fragment), walked(fragment)
        own = fragment.num_transitions
        assert len(batch.action) == own + NUM * len(steps)
        np.testing.assert_array_equal(batch.n_step_return[:own], fragment.reward.ravel())
        np.testing.assert_array_equal(batch.observation[:own], fragment.observation[:-1].reshape(own, -1))
        for number in range(own, len(batch.action)):
            observation, following, action, reached = steps[(number - own) % len(steps)]
            goal = batch.observation[number, 2]
            assert goal == batch.next_observation[number, 2] and float(goal) in reached
            kept = [0, 1, 3]
            np.testing.assert_array_equal(batch.observation[number, kept], observation[kept])
            np.testing.assert_array_equal(batch.next_observation[number, kept], following[kept])
            assert batch.action[number] == action and batch.bootstrap_discount[number] == GAMMA
            assert batch.n_step_return[number] == -abs(following[0] - goal)
            if length == 20 and end_probability == 0.0 and number % len(steps) == own % len(steps):
                drawn.append(float(goal))
    if drawn:
        assert len(set(drawn)) > 1, "goals of one step differ"


def test_goals_are_drawn_uniformly_and_alike_for_one_fragment() -> None:
    """Of the first of 4 steps, over 2,000 fragments: each of its 4 goals a quarter of the time, by 4 sigma."""
    player, counts = Player(num_envs=1, end_probability=0.0), np.zeros(4)
    for _ in range(2_000):
        fragment = player.fragment(4)
        goal = of_one(fragment).observation[4, 2]
        counts[fragment.observation[1:, 0, 0].tolist().index(goal)] += 1
    assert np.all(abs(counts - 500) < 4 * np.sqrt(500 * 0.75)), counts
    np.testing.assert_array_equal(of_one(fragment).observation, of_one(fragment).observation)


def test_a_replay_holds_as_many_transitions_whatever_their_goals() -> None:
    run = config.validate(
        {
            "env": {"id": "ddrl/Flip-v0", "num_envs": 4},
            "rollout": {"max_fragment_steps": 100},
            "algorithm": {"name": "dqn", "prioritized": True},
            "replay": {"hindsight": 4, "capacity": 400, "warmup_steps": 10},
        }
    )
    spec = submit.prepare(run)
    held = make_experience(run, base.resolve(run, spec).config, spec)
    assert isinstance(held, Replay)
    player = Player(num_envs=4, observation=spec.observation_shape, end_probability=0.05)
    for _ in range(30):
        admit(held, player.fragment(10))
        held.check_valid()
    assert len(held) == 400 and held.num_items > 1_800


class Gone(Flip):
    """Bits, of which each environment lacks or breaks something.

    Args:
        kind: what.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(size=4)
        self.kind = kind
        if kind == "no goal":
            self.observation_space = Dict({name: self.observation_space[name] for name in ("observation",)})
        if kind == "a choice":
            self.observation_space = Dict({**self.observation_space, "desired_goal": Discrete(4)})
        if kind == "a shape":
            self.observation_space = Dict({**self.observation_space, "desired_goal": Box(0, 1, (3,))})

    def _seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = super()._seen()
        if self.kind == "a choice":
            seen["desired_goal"] = 1
        if self.kind == "a shape":
            seen["desired_goal"] = seen["desired_goal"][:3]
        return {name: seen[name] for name in self.observation_space}

    def __getattribute__(self, name: str) -> Any:
        if name == "compute_reward" and self.kind == "no function":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        if achieved.ndim == 1:  # of a step
            if self.kind == "raises":
                raise RuntimeError("this step is forbidden")
            return 0.0
        if self.kind == "fails":
            raise KeyError("goal")
        return {"one by one": 0.0, "not finite": np.full(2, np.nan), "others": np.ones(2)}[self.kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no goal", "lacks Dict observations with the vectors achieved_goal and desired_goal, or a method"),
        ("a choice", "lacks Dict observations"),
        ("a shape", "lacks Dict observations"),
        (
            "one by one",
            r"compute_reward of \(2, 4\) goals is not a finite reward for each; mend it, or remove",
        ),
        ("fails", r"compute_reward of \(2, 4\) goals failed \('goal'\)"),
        ("not finite", "not a finite reward for each"),
        ("others", "a step gave the reward 0, compute_reward another"),
        ("no function", "or a method compute_reward"),
        ("raises", "Gone: this step is forbidden; mend it, or remove replay.hindsight"),
    ],
)
def test_environments_without_goals_are_refused(
    kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", __name__)
    with pytest.raises(EnvError, match=message):
        find_goals(EnvConfig(id=f"{__name__}:Gone", kwargs={"kind": kind}))
    with pytest.raises(EnvError, match="CartPole-v1: replay.hindsight is set, but it lacks"):
        find_goals(EnvConfig(id="CartPole-v1"))


class Forbidden(Flip):
    """Only the first bit may be flipped; else it raises."""

    def action_masks(self) -> np.ndarray:
        return np.arange(self._size + 1) == 0

    def step(self, action: np.int64) -> Any:
        assert action == 0, "a forbidden action"
        return super().step(action)


def test_goals_are_found_beside_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", __name__)
    env = EnvConfig(id=f"{__name__}:Forbidden", action_mask=True)
    assert find_goals(env).desired == slice(10, 20)


def test_goals_are_found_behind_a_scale_of_rewards() -> None:
    env = EnvConfig(id="ddrl/Flip-v0", reward_scale=0.5, kwargs={"size": 3})
    goals = find_goals(env)
    seen, _ = envs.make_one(env).reset(seed=1)
    assert (goals.achieved, goals.desired) == (slice(0, 3), slice(3, 6)) and seen.shape == (9,)
    bits = np.array([[0, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(goals.reward(bits, np.ones((2, 3))), np.array([-0.5, 0.0], np.float32))


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "dqn", "n_step": 3}},
        {"algorithm": {"name": "r2d2"}},
        {"algorithm": {"name": "dqn"}, "env": {"id": "ddrl/Flip-v0", "frame_stack": 2}},
        {"algorithm": {"name": "ppo"}},
    ],
)
def test_what_hindsight_cannot_do_is_refused(sections: dict[str, Any]) -> None:
    run = config.validate({"env": {"id": "ddrl/Flip-v0"}, "replay": {"hindsight": 4}} | sections)
    with pytest.raises(
        config.ConfigError, match=r"replay.hindsight: 4 (is for transitions|has no effect on alg)"
    ):
        submit.prepare(run)
