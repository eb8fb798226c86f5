"""Environments that are recorded step by step as collectors play them, to hold fragments and replays against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from support.replays import admit, gather, make_replay

from ddrl import codec, envs
from ddrl.algorithms.base import RecurrentState
from ddrl.config import EnvConfig, RolloutConfig, RunConfig
from ddrl.replay.transitions import TransitionItems
from ddrl.types import EnvSpec, Fragment, SequenceShape
from ddrl.worker.collector import Collector

EPISODES = f"{__name__}:Episodes"
ROLLOUT = RolloutConfig(fragment_s=5)
Explored = tuple[np.ndarray, Mapping[str, np.ndarray]]


class Episodes(gymnasium.Env[np.ndarray, np.int64]):
    """Episodes of 1 to `longest` steps with random endings, lost lives and frames that all differ."""

    def __init__(self, *, shape: tuple[int, ...] = (4,), lives: bool = False, longest: int = 9) -> None:
        is_image = len(shape) > 1
        low, high, dtype = (0, 255, np.uint8) if is_image else (-1e6, 1e6, np.float32)
        self._lives, self._longest, self._number = lives, longest, 0
        self.observation_space = Box(low, high, tuple(shape), dtype)
        self.action_space = Discrete(5)

    def _frame(self) -> np.ndarray:
        self._number += 1
        frame = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        frame.flat[:2] = divmod(self._number, 256)
        frame.flat[2:60] = self.np_random.integers(0, 256, frame.flat[2:60].size)
        return frame

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, self._longest + 1))
        return self._frame(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        ended, how = self._left == 0, int(self.np_random.integers(4))
        lost = self._lives and not ended and self.np_random.random() < 0.1
        reward = float(self.np_random.integers(-3, 4))
        return self._frame(), reward, ended and how in (0, 2), ended and how != 0, {"life_lost": lost}


class Recording:
    """A vector of environments that keeps copies of all it gave, by step and environment.

    Attributes:
        frames: [N, *O] before each step, and the newest ones.
        ends: terminated and truncated as learning sees them, after a lost life too, and whether a life was lost.
        finals: (step, environment) -> the true observation after the end of a game.
        begins: first step of the episode of each step, as learning sees it; one more than there are steps.
    """

    def __init__(self, vector: Any) -> None:
        self._vector = vector
        self.frames: list[np.ndarray] = []
        self.rewards: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []
        self.ends: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.finals: dict[tuple[int, int], np.ndarray] = {}
        self.begins = [np.zeros(vector.num_envs, np.int64)]

    def reset(self, *, seed: Any) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = self._vector.reset(seed=seed)
        self.frames.append(observation.copy())
        return observation, info

    def step(self, actions: np.ndarray) -> Any:
        self.actions.append(actions.copy())
        given = observation, reward, terminated, truncated, info = self._vector.step(actions)
        lost = np.array(info.get("life_lost", np.zeros(self.num_envs, bool)), bool)
        for lane in np.flatnonzero(terminated | truncated):
            self.finals[len(self.ends), int(lane)] = np.array(info["final_obs"][lane])
        ended = terminated | truncated | lost
        self.ends.append((terminated | lost, truncated & ~terminated, lost))
        self.begins.append(np.where(ended, len(self.ends), self.begins[-1]))
        self.rewards.append(reward.copy())
        self.frames.append(observation.copy())
        return given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vector, name)

    def stack(self, step: int, lane: int, size: int) -> np.ndarray:
        """[K, *O] before a step, frame by frame."""
        begin = self.begins[step][lane]
        return np.stack([self.frames[max(step - back, begin)][lane] for back in range(size - 1, -1, -1)])

    def stack_after(self, step: int, lane: int, size: int) -> np.ndarray:
        """[K, *O] after a step, of the same episode."""
        after = self.finals.get((step, lane), self.frames[step + 1][lane])
        return np.stack([*self.stack(step, lane, size), after])[1:]


def record(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Record the vectors that are made from now on, and allow `Episodes`."""
    made: list[Recording] = []
    make_vector = envs.make_vector

    def make(env: EnvConfig) -> Recording:
        made.append(Recording(make_vector(env)))
        return made[-1]

    monkeypatch.setattr(envs, "make_vector", make)
    monkeypatch.setenv("DDRL_ALLOW_MODULES", __name__)
    return made


class RandomPolicy:
    """Plays at random; keeps copies of its inputs, and returns the number of the step as an extra."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []
        self.generator = np.random.default_rng(3)

    def load(self, weights: Mapping[str, Any]) -> None:
        pass

    def initial_state(self, num_envs: int) -> RecurrentState:
        return {}

    def explore(self, observation: np.ndarray, generator: Any, state: RecurrentState) -> Explored:
        self.seen.append(observation.copy())
        serial = np.full(len(observation), len(self.seen), np.float32)
        return self.generator.integers(5, size=len(observation)), {"serial": serial}


def make_collector(
    env: EnvConfig,
    *,
    policy: Any,
    version: int | None = 1,
    spec: EnvSpec | None = None,
    context: int = 0,
    sequences: SequenceShape | None = None,
    rollout: RolloutConfig = ROLLOUT,
    seed: int = 1,
    **identity: Any,
) -> Collector:
    """A collector of run "r", producer 5, incarnation 7, with weights of `version` unless that is None."""
    spec = spec or envs.describe(env)
    chosen: Any = SimpleNamespace(
        spec=spec, context=context, sequences=sequences, policy=lambda producer: policy
    )
    config = RunConfig(env=env, rollout=rollout, seed=seed, algorithm={"name": "none"})
    identity = {"run": "r", "producer": 5, "incarnation": 7, "random_until_learned": True} | identity
    made = Collector(config=config, resolved=chosen, **identity)
    if version is not None:
        made.load(version, {})
    return made


def collect(collector: Collector, lengths: Any) -> list[Fragment]:
    """Fragments of these lengths, as they come over the wire."""
    return [codec.decode(codec.encode(collector.collect(max_steps=int(length)))) for length in lengths]


def begins_of(fragments: list[Fragment]) -> list[int]:
    """Steps played before each fragment's own ones."""
    return [0, *np.cumsum([fragment.num_steps for fragment in fragments[:-1]]).tolist()]


def assert_recorded(
    fragments: list[Fragment], given: Recording, *, context: int, reward: Callable[[Any], Any] = lambda x: x
) -> None:
    """Fragments are pieces of the recording, context included, exactly; nothing is missing."""
    equal = np.testing.assert_array_equal
    for seq, (begin, fragment) in enumerate(zip(begins_of(fragments), fragments, strict=True)):
        assert (fragment.seq, fragment.context) == (seq, min(begin, context))
        first, end = begin - fragment.context, begin + fragment.num_steps
        equal(fragment.observation, np.stack(given.frames[first : end + 1]))
        equal(fragment.action, np.stack(given.actions[first:end]))
        equal(fragment.reward, reward(np.stack(given.rewards[first:end])))
        terminated, truncated, _ = (np.stack(column) for column in zip(*given.ends[first:end], strict=True))
        equal(fragment.terminated, terminated)
        equal(fragment.truncated, truncated)
        equal(fragment.final_index, np.argwhere(truncated))
        for (row, lane), final in zip(fragment.final_index, fragment.final_observation, strict=True):
            equal(final, given.finals[first + int(row), int(lane)])
    assert sum(fragment.num_steps for fragment in fragments) == len(given.ends)
    totals, last, episodes = np.cumsum(given.rewards, axis=0), np.full(given.num_envs, -1), []
    for step, lane in given.finals:  # in order of time; a lost life ends no game
        before = totals[last[lane], lane] if last[lane] >= 0 else 0.0
        episodes.append((totals[step, lane] - before, step - last[lane]))
        last[lane] = step
    returns, lengths = zip(*episodes, strict=True)
    equal(np.concatenate([fragment.episode_return for fragment in fragments]), returns)
    equal(np.concatenate([fragment.episode_length for fragment in fragments]), lengths)


def assert_rebuilt(fragments: list[Fragment], given: Recording, frame_stack: int) -> None:
    """A compressed replay returns for one-step transitions exactly what was played, stacks of frames included."""
    items = TransitionItems(gamma=0.5, n_step=1, frame_stack=frame_stack)
    replay = make_replay(items, capacity=10**5, compressed=True)
    for fragment in fragments:
        admit(replay, fragment)
    replay.check_valid()
    num_envs = given.num_envs
    assert replay.num_items == num_envs * len(given.ends)
    rewards = np.concatenate([fragment.reward[fragment.context :] for fragment in fragments])
    for step, (terminated, _, _) in enumerate(given.ends):
        batch = gather(replay, np.arange(step * num_envs, (step + 1) * num_envs))
        np.testing.assert_array_equal(batch.action, given.actions[step])
        np.testing.assert_array_equal(batch.n_step_return, rewards[step])
        np.testing.assert_array_equal(batch.bootstrap_discount, np.where(terminated, 0.0, 0.5))
        for lane, (seen, after) in enumerate(zip(batch.observation, batch.next_observation, strict=True)):
            expected = [(seen, given.stack(step, lane, frame_stack))]
            if not terminated[lane]:
                expected.append((after, given.stack_after(step, lane, frame_stack)))
            for found, frames in expected:
                assert np.array_equal(found, frames.reshape(found.shape)), (step, lane)
