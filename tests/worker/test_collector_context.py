"""The records of a collector against environments that are recorded step by step.

Fragments of varied length, context included, are pieces of one history; the policy sees the stacks and the recurrent
state that follow from it; and replay rebuilds from the fragments exactly what the policy saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from support.collectors import Explored, RandomPolicy, make_collector
from support.replays import admit, gather, gather_all, make_replay

from ddrl import codec, envs
from ddrl.algorithms.base import RecurrentState, initial_state
from ddrl.config import EnvConfig
from ddrl.replay.sequences import SequenceItems
from ddrl.replay.transitions import TransitionItems
from ddrl.types import Fragment, SequenceShape
from ddrl.worker.collector import Collector

EPISODES = f"{__name__}:Episodes"
LENGTHS = (1, 5, 2, 1, 1, 7, 1, 3, 16, 4, 2, 2, 6, 1, 2, 9, 3)  # T of the fragments
SHORT_FIRST = (1, 3, *LENGTHS)  # the third has all the context that sequences need, but not that of stacks
SHAPE = SequenceShape(burn_in=3, length=4, overlap=2)
IMAGES = {"shape": [2, 3]}
LIVES = {"lives": True}


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
        self.life_lost = bool(self._lives and not ended and self.np_random.random() < 0.1)
        reward = float(self.np_random.integers(-3, 4))
        return self._frame(), reward, ended and how in (0, 2), ended and how != 0, {}


class Recording:
    """A vector of `Episodes` that reports lost lives, and keeps copies of all it gave, by step and environment.

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
        lost = info["life_lost"] = np.array([env.unwrapped.life_lost for env in self._vector.envs])
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


class Remembering(RandomPolicy):
    """Its state: steps of the episode so far, and a digest of all actions and rewards in it, exact in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[RecurrentState] = []

    def initial_state(self, num_envs: int) -> RecurrentState:
        return initial_state(num_envs, 2)

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
    ) -> Explored:
        self.carried.append({name: column.copy() for name, column in state.items()})
        hidden, news = state["hidden"], 4 * state["previous_action"] + 2 * state["previous_reward"]
        hidden[:] = np.stack([hidden[:, 0] + 1, (5 * hidden[:, 1] + news) % 128 + 1], axis=1)
        return super().explore(observation, generator, state)


def play(
    policy: RandomPolicy,
    kwargs: dict[str, Any],
    *,
    lengths: tuple[int, ...] = LENGTHS,
    env: Any = None,
    **options: Any,
) -> tuple[list[Fragment], Recording]:
    """Fragments as they come over the wire, the third and later ones of version 1, and what was recorded meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        recordings = record(patch)
        config = EnvConfig(**{"id": EPISODES, "kwargs": kwargs, "num_envs": 3} | (env or {}))
        collector = make_collector(config, policy=policy, **options)
        fragments = collect(collector, lengths[:2])
        collector.load(1, {})
        fragments += collect(collector, lengths[2:])
    return fragments, recordings[-1]


def play_sequences(kwargs: dict[str, Any], **env: Any) -> tuple[Remembering, list[Fragment], Recording]:
    """A recurrent policy plays episodes of up to 25 steps with lost lives."""
    policy = Remembering()
    options = {"context": SHAPE.context + env.get("frame_stack", 1) - 1, "sequences": SHAPE}
    kwargs = kwargs | LIVES | {"longest": 25}
    return policy, *play(policy, kwargs, lengths=SHORT_FIRST, env=env, **options)


@pytest.mark.parametrize(("context", "kwargs"), [(0, LIVES), (1, IMAGES), (3, LIVES), (7, IMAGES | LIVES)])
def test_a_fragment_is_a_piece_of_history_with_its_context(context: int, kwargs: dict[str, Any]) -> None:
    """Rewards are signs while returns stay as they are; a lost life ends an episode for learning, but no return."""
    env = {"reward_sign": True, "reward_scale": 0.5}
    fragments, given = play(RandomPolicy(), kwargs, context=context, env=env)
    assert [fragment.num_steps for fragment in fragments] == list(LENGTHS)
    names = {(one.run, one.producer, one.incarnation, one.policy_version) for one in fragments}
    assert names == {("r", 5, 7, 1)}
    assert_recorded(fragments, given, context=context, reward=lambda rewards: 0.5 * np.sign(rewards))
    for begin, fragment in zip(begins_of(fragments), fragments, strict=True):
        rows = 1 + np.arange(begin - fragment.context, begin + fragment.num_steps)
        np.testing.assert_array_equal(fragment.extras["serial"], np.repeat(rows[:, None], 3, axis=1))
    assert not context or any(one.truncated[: one.context].any() for one in fragments)
    assert sum(int(lost.sum()) for _, _, lost in given.ends) > 5 or "lives" not in kwargs


@pytest.mark.parametrize("kwargs", [LIVES, IMAGES | LIVES])
@pytest.mark.parametrize("version", [0, 1])
def test_policy_and_replay_see_the_newest_frames_of_the_episode(kwargs: dict[str, Any], version: int) -> None:
    """Also after a fragment of random play, which does not call the policy but stacks frames."""
    policy = RandomPolicy()
    fragments, given = play(policy, kwargs, env={"frame_stack": 4}, context=3, version=version)
    unseen = 0 if version else sum(LENGTHS[:2])
    assert len(policy.seen) == sum(LENGTHS) - unseen
    for step, seen in enumerate(policy.seen, start=unseen):
        for lane in range(3):
            expected = given.stack(step, lane, 4).reshape(seen.shape[1:])
            np.testing.assert_array_equal(seen[lane], expected)
    assert_rebuilt(fragments, given, 4)
    if not version:
        assert all(one.extras.keys() == {"reset_index", "reset_seed"} for one in fragments[:2])
        context, serial = fragments[2].context, fragments[2].extras["serial"]
        assert context and not serial[:context].any() and serial[context:].all()


@pytest.mark.parametrize("shape", [SHAPE, SequenceShape(burn_in=0, length=3, overlap=0)])
def test_fragments_of_sequences_are_multiples_of_their_stride(shape: SequenceShape) -> None:
    fragments, _ = play(Remembering(), {}, context=shape.context, sequences=shape)
    assert [one.num_steps for one in fragments] == [-(-n // shape.stride) * shape.stride for n in LENGTHS]


def test_the_recurrent_state_begins_with_each_episode_and_holds_the_last_action_and_training_reward() -> None:
    policy, _, given = play_sequences({}, reward_sign=True, reward_scale=0.5)
    for step, carried in enumerate(policy.carried):
        begins = given.begins[step]
        np.testing.assert_array_equal(carried["hidden"][:, 0], step - begins)
        action, reward = (given.actions[step - 1], given.rewards[step - 1]) if step else (0, np.zeros(3))
        np.testing.assert_array_equal(carried["previous_action"], np.where(step == begins, -1, action))
        expected = np.where(step == begins, 0.0, 0.5 * np.sign(reward))
        np.testing.assert_array_equal(carried["previous_reward"], expected)
    assert max(carried["hidden"][:, 0].max() for carried in policy.carried) >= 10


@pytest.mark.parametrize(("frame_stack", "kwargs"), [(1, {}), (3, IMAGES), (3, {})])
def test_a_replay_of_sequences_rebuilds_inputs_and_recurrent_states(
    frame_stack: int, kwargs: dict[str, Any]
) -> None:
    policy, fragments, given = play_sequences(kwargs, frame_stack=frame_stack, reward_scale=2.0)
    items = SequenceItems(shape=SHAPE, gamma=0.5, n_step=2, state_size=2, frame_stack=frame_stack)
    replay = make_replay(items, capacity=1000, compressed=bool(kwargs))
    for fragment in fragments:
        admit(replay, fragment)
    replay.check_valid()
    batch = gather_all(replay)
    place = {seen[lane].tobytes(): (step, lane) for step, seen in enumerate(policy.seen) for lane in range(3)}
    trained = set()
    for item in range(replay.num_items):
        start, lane = place[batch.observation[SHAPE.burn_in, item].tobytes()]
        burn_in, length = int(batch.burn_in[item]), int(batch.valid[:, item].sum())
        first, last = start - burn_in, start + length - 1
        assert first >= given.begins[start][lane] == given.begins[last][lane]
        np.testing.assert_array_equal(batch.recurrent_state[item], policy.carried[first]["hidden"][lane])
        in_use = [*range(burn_in), *range(SHAPE.burn_in, SHAPE.burn_in + length)]
        for row, step in zip(in_use, range(first, last + 1), strict=True):
            np.testing.assert_array_equal(batch.observation[row, item], policy.seen[step][lane])
            carried = policy.carried[step]
            assert batch.previous_action[row, item] == carried["previous_action"][lane]
            assert batch.previous_reward[row, item] == carried["previous_reward"][lane]
        actions = [given.actions[step][lane] for step in range(start, last + 1)]
        assert batch.action[:length, item].tolist() == actions
        if not given.ends[last][0][lane]:
            after = batch.observation[SHAPE.burn_in + length, item]
            expected = given.stack_after(last, lane, frame_stack).reshape(after.shape)
            np.testing.assert_array_equal(after, expected)
        trained |= {(step, lane) for step in range(start, last + 1)}
    assert trained == {(step, lane) for step in range(len(policy.seen)) for lane in range(3)}


def test_context_does_not_change_with_a_fragment_that_was_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = record(monkeypatch)
    collector = make_collector(EnvConfig(id=EPISODES, num_envs=2), policy=RandomPolicy(), context=4)
    first = collector.collect(max_steps=5)
    for column in (first.observation, first.action, first.reward, *first.extras.values()):
        column[:] = 1
    second = collector.collect(max_steps=3)
    np.testing.assert_array_equal(second.observation, np.stack(recordings[0].frames[1:]))
    np.testing.assert_array_equal(second.action, np.stack(recordings[0].actions[1:]))
    assert second.extras["serial"][:, 0].tolist() == list(range(2, 9))
