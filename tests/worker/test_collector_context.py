"""The records of a collector against environments that write down everything they do.

Fragments of varied length, context included, are pieces of one history; the policy sees the stacks and the recurrent
state that follow from it; and replay rebuilds from the fragments exactly what the policy saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from support.replays import admit, gather_all, make_replay

from ddrl import codec, envs
from ddrl.algorithms.base import RecurrentState, initial_state
from ddrl.config import EnvConfig, RolloutConfig
from ddrl.replay.sequences import SequenceItems, cut_fragment, recurrent_state_index
from ddrl.replay.transitions import TransitionItems
from ddrl.types import EnvSpec, Fragment, SequenceShape
from ddrl.worker.collector import Collector

LENGTHS = (1, 5, 2, 1, 1, 7, 1, 3, 16, 4, 2, 2, 6, 1, 2, 9, 3)  # T of the fragments
SHORT_FIRST = (1, 3, *LENGTHS)  # the third has all the context that sequences need, but not that of stacks
SHAPE = SequenceShape(burn_in=3, length=4, overlap=2)


class Written(gymnasium.Env[np.ndarray, np.int64]):
    """Episodes of 1 to `longest` steps with frames that all differ; it writes down what it gave, by step.

    Attributes:
        frames: before each step, and the newest one.
        afters: the true observation after each step.
        begins: step with which the episode of each step began, as learning sees it: after a lost life too.
    """

    made: ClassVar[list[Written]] = []

    def __init__(self, *, images: bool = False, lives: bool = False, longest: int = 9) -> None:
        self._images, self._lives, self._longest = images, lives, longest
        self.observation_space = Box(0, 255, (2, 3), np.uint8) if images else Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = Discrete(5)
        self.frames: list[np.ndarray] = []
        self.afters: list[np.ndarray] = []
        self.actions: list[int] = []
        self.rewards: list[float] = []
        self.lost: list[bool] = []
        self.over: list[tuple[bool, bool]] = []  # terminated, truncated
        self.begins = [0]
        self._number = self._left = 0
        Written.made.append(self)

    def _frame(self) -> np.ndarray:
        self._number += 1
        if self._images:
            frame = self.np_random.integers(0, 256, (2, 3)).astype(np.uint8)
            frame[0, :2] = divmod(self._number, 256)
            return frame
        return np.array([self._number, self.np_random.integers(1000)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, self._longest + 1))
        self.frames.append(self._frame())
        return self.frames[-1], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        how = int(self.np_random.integers(4))
        ended = self._left == 0
        terminated, truncated = ended and how in (0, 2), ended and how != 0
        lost = self._lives and not ended and self.np_random.random() < 0.1
        self.actions.append(int(action))
        self.rewards.append(float(self.np_random.integers(-3, 4)))
        self.over.append((terminated, truncated))
        self.lost.append(lost)
        self.afters.append(self._frame())
        self.begins.append(len(self.actions) if ended or lost else self.begins[-1])
        if not ended:
            self.frames.append(self.afters[-1])
        return self.afters[-1], self.rewards[-1], terminated, truncated, {"life_lost": lost}

    def is_terminated(self, step: int) -> bool:
        return self.over[step][0] or self.lost[step]

    def is_truncated(self, step: int) -> bool:
        return self.over[step][1] and not self.over[step][0]

    def stack(self, step: int, frame_stack: int) -> np.ndarray:
        """[K, *O] before a step, frame by frame."""
        return np.stack(
            [self.frames[max(step - back, self.begins[step])] for back in range(frame_stack - 1, -1, -1)]
        )

    def stack_after(self, step: int, frame_stack: int) -> np.ndarray:
        """[K, *O] after a step, of the same episode."""
        older = [self.frames[max(step - back, self.begins[step])] for back in range(frame_stack - 2, -1, -1)]
        return np.stack([*older, self.afters[step]])


class Spy:
    """Plays at random; keeps copies of its inputs, and returns the number of the step as an extra."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []
        self.generator = np.random.default_rng(3)

    def load(self, weights: Mapping[str, Any]) -> None:
        pass

    def initial_state(self, num_envs: int) -> RecurrentState:
        return {}

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        self.seen.append(observation.copy())
        serial = np.full(len(observation), len(self.seen), np.float32)
        return self.generator.integers(5, size=len(observation)), {"serial": serial}


class Remembering(Spy):
    """Its state: steps of the episode so far, and a digest of all actions and rewards in it, exact in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[RecurrentState] = []

    def initial_state(self, num_envs: int) -> RecurrentState:
        return initial_state(num_envs, 2)

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        self.carried.append({name: column.copy() for name, column in state.items()})
        hidden, news = state["hidden"], 4 * state["previous_action"] + 2 * state["previous_reward"]
        hidden[:] = np.stack([hidden[:, 0] + 1, (5 * hidden[:, 1] + news) % 128 + 1], axis=1)
        return super().explore(observation, generator, state)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", __name__)
    yield


def play(
    policy: Spy, *, lengths: tuple[int, ...] = LENGTHS, version: int = 1, **options: Any
) -> tuple[list[Fragment], list[Written], EnvSpec]:
    """Fragments as they come over the wire, what each lane has written down, and the spaces."""
    kwargs = {name: options.pop(name) for name in ("images", "lives", "longest") if name in options}
    config = EnvConfig(
        **{"id": f"{__name__}:Written", "kwargs": kwargs, "num_envs": 3} | options.pop("env", {})
    )
    spec = envs.describe(config)
    Written.made.clear()
    collector = Collector(
        **{
            "run": "r",
            "producer": 5,
            "incarnation": 7,
            "env": config,
            "rollout": RolloutConfig(fragment_s=5),
            "spec": spec,
            "policy": policy,
            "random_until_learned": True,
            "seed": 1,
            **options,
        }
    )
    fragments = []
    for number, length in enumerate(lengths):
        collector.load(version + number if version == 0 else version, {})
        fragments.append(codec.decode(codec.encode(collector.collect(max_steps=length))))
    return fragments, list(Written.made), spec


def begins_of(fragments: list[Fragment]) -> list[int]:
    """Steps played before each fragment's own ones."""
    return [0, *np.cumsum([fragment.num_steps for fragment in fragments[:-1]]).tolist()]


@pytest.mark.parametrize(("context", "images"), [(0, False), (1, True), (3, False), (7, True)])
def test_a_fragment_is_a_piece_of_history_with_its_context(context: int, images: bool) -> None:
    fragments, lanes, _ = play(Spy(), context=context, images=images)
    assert [fragment.num_steps for fragment in fragments] == list(LENGTHS)
    assert [fragment.seq for fragment in fragments] == list(range(len(LENGTHS)))
    assert {(one.run, one.producer, one.incarnation, one.policy_version) for one in fragments} == {
        ("r", 5, 7, 1)
    }
    num_finals = 0
    for begin, fragment in zip(begins_of(fragments), fragments, strict=True):
        assert fragment.context == min(begin, context)
        first, end = begin - fragment.context, begin + fragment.num_steps
        finals = {}
        for lane, env in enumerate(lanes):
            np.testing.assert_array_equal(fragment.observation[:, lane], env.frames[first : end + 1])
            np.testing.assert_array_equal(fragment.action[:, lane], env.actions[first:end])
            np.testing.assert_array_equal(fragment.reward[:, lane], env.rewards[first:end])
            steps = range(first, end)
            assert fragment.terminated[:, lane].tolist() == [env.is_terminated(step) for step in steps]
            assert fragment.truncated[:, lane].tolist() == [env.is_truncated(step) for step in steps]
            finals |= {(step - first, lane): env.afters[step] for step in steps if env.is_truncated(step)}
            np.testing.assert_array_equal(fragment.extras["serial"][:, lane], 1 + np.arange(first, end))
        assert list(map(tuple, fragment.final_index.tolist())) == sorted(finals)
        for place, final in zip(fragment.final_index.tolist(), fragment.final_observation, strict=True):
            np.testing.assert_array_equal(final, finals[tuple(place)])
            num_finals += place[0] < fragment.context
    assert num_finals > 1 or not context  # there were truncated steps in contexts


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("version", [0, 1])
def test_the_policy_sees_the_newest_frames_of_its_episode(images: bool, version: int) -> None:
    """Also after a fragment of random play, which does not call the policy but stacks frames."""
    policy = Spy()
    fragments, lanes, spec = play(
        policy, images=images, lives=True, version=version, env={"frame_stack": 4}, context=3
    )
    unseen = fragments[0].num_steps if version == 0 else 0
    assert len(policy.seen) == sum(LENGTHS) - unseen
    assert all(any(env.lost) for env in lanes) and any(one.truncated.any() for one in fragments)
    for step, seen in enumerate(policy.seen, start=unseen):
        assert seen.shape == (3, *spec.input_shape)
        for lane, env in enumerate(lanes):
            np.testing.assert_array_equal(seen[lane], env.stack(step, 4).reshape(spec.input_shape))
    if version == 0:
        assert fragments[0].extras == {}
        context = fragments[1].context
        assert context and not fragments[1].extras["serial"][:context].any()
        assert fragments[1].extras["serial"][context:].all()


def test_a_lost_life_ends_an_episode_for_learning_but_not_its_return() -> None:
    fragments, lanes, _ = play(Spy(), lives=True, context=2)
    terminated = np.concatenate([one.terminated[one.context :] for one in fragments])
    returns, lengths, num_lost = [], [], 0
    totals, steps = np.zeros(3), np.zeros(3, int)
    for step in range(sum(LENGTHS)):
        for lane, env in enumerate(lanes):
            totals[lane] += env.rewards[step]
            steps[lane] += 1
            assert terminated[step, lane] == (env.over[step][0] or env.lost[step])
            num_lost += env.lost[step]
            if any(env.over[step]):
                returns.append(totals[lane])
                lengths.append(steps[lane])
                totals[lane] = steps[lane] = 0
    assert num_lost > 5
    np.testing.assert_array_equal(np.concatenate([one.episode_return for one in fragments]), returns)
    np.testing.assert_array_equal(np.concatenate([one.episode_length for one in fragments]), lengths)


def test_rewards_are_signs_while_returns_stay_as_they_are() -> None:
    fragments, lanes, _ = play(Spy(), env={"reward_sign": True, "reward_scale": 0.5}, context=2)
    given = np.array([env.rewards for env in lanes]).T
    trained = np.concatenate([one.reward[one.context :] for one in fragments])
    np.testing.assert_array_equal(trained, 0.5 * np.sign(given))
    assert set(np.unique(trained)) == {-0.5, 0, 0.5}
    returns = np.concatenate([one.episode_return for one in fragments])
    assert np.abs(returns).max() > 3 and np.all(returns == np.round(returns))


@pytest.mark.parametrize("shape", [SHAPE, SequenceShape(burn_in=0, length=3, overlap=0)])
def test_fragments_of_sequences_are_multiples_of_their_stride(shape: SequenceShape) -> None:
    fragments, _, _ = play(Remembering(), context=shape.context, sequences=shape)
    assert [one.num_steps for one in fragments] == [-(-n // shape.stride) * shape.stride for n in LENGTHS]


def test_the_recurrent_state_begins_with_each_episode_and_holds_the_last_action_and_training_reward() -> None:
    policy = Remembering()
    _, lanes, _ = play(
        policy,
        lives=True,
        longest=25,
        env={"reward_sign": True, "reward_scale": 0.5},
        context=SHAPE.context,
        sequences=SHAPE,
    )
    for step, carried in enumerate(policy.carried):
        for lane, env in enumerate(lanes):
            begin = env.begins[step]
            assert carried["hidden"][lane, 0] == step - begin
            previous = (
                (-1, 0.0) if step == begin else (env.actions[step - 1], 0.5 * np.sign(env.rewards[step - 1]))
            )
            assert (carried["previous_action"][lane], carried["previous_reward"][lane]) == previous
    assert max(carried["hidden"][:, 0].max() for carried in policy.carried) >= 10


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_recurrent_states_are_sent_where_sequences_begin_inside_an_episode(frame_stack: int) -> None:
    policy = Remembering()
    context = SHAPE.context + frame_stack - 1
    fragments, lanes, _ = play(
        policy,
        lengths=SHORT_FIRST,
        lives=True,
        longest=25,
        env={"frame_stack": frame_stack},
        context=context,
        sequences=SHAPE,
    )
    num_states = num_in_context = 0
    for begin, fragment in zip(begins_of(fragments), fragments, strict=True):
        cuts = cut_fragment(fragment, SHAPE, frame_stack)
        index, states = fragment.extras["memory_index"], fragment.extras["memory"]
        np.testing.assert_array_equal(index, recurrent_state_index(cuts))
        assert (states.dtype, states.shape) == (np.float16, (len(index), 2))
        for (row, lane), state in zip(index, states, strict=True):
            step = begin - fragment.context + row
            np.testing.assert_array_equal(state, policy.carried[step]["hidden"][lane])
            assert state[0] == step - lanes[lane].begins[step]
            num_in_context += row < fragment.context
        num_states += len(index)
    assert num_states > num_in_context > 10


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_a_replay_of_transitions_rebuilds_the_inputs_of_the_policy(images: bool, compressed: bool) -> None:
    policy = Spy()
    fragments, lanes, spec = play(policy, images=images, lives=True, env={"frame_stack": 4}, context=3)
    items = TransitionItems(gamma=0.5, n_step=1, frame_stack=4)
    replay = make_replay(items, capacity=1000, compressed=compressed)
    for fragment in fragments:
        admit(replay, fragment)
    replay.check_valid()
    batch = gather_all(replay)
    assert replay.num_items == 3 * sum(LENGTHS)
    for item in range(replay.num_items):
        step, lane = divmod(item, 3)
        env = lanes[lane]
        np.testing.assert_array_equal(batch.observation[item], policy.seen[step][lane])
        assert batch.action[item] == env.actions[step]
        assert batch.n_step_return[item] == env.rewards[step]
        assert batch.bootstrap_discount[item] == (0.0 if env.is_terminated(step) else 0.5)
        if not env.is_terminated(step):
            after = env.stack_after(step, 4).reshape(spec.input_shape)
            np.testing.assert_array_equal(batch.next_observation[item], after)


@pytest.mark.parametrize(("frame_stack", "images"), [(1, False), (3, True), (3, False)])
def test_a_replay_of_sequences_rebuilds_inputs_and_recurrent_states(frame_stack: int, images: bool) -> None:
    policy = Remembering()
    fragments, lanes, spec = play(
        policy,
        lengths=SHORT_FIRST,
        images=images,
        lives=True,
        longest=25,
        env={"frame_stack": frame_stack, "reward_scale": 2.0},
        context=SHAPE.context + frame_stack - 1,
        sequences=SHAPE,
    )
    items = SequenceItems(shape=SHAPE, gamma=0.5, n_step=2, state_size=2, frame_stack=frame_stack)
    replay = make_replay(items, capacity=1000, compressed=images)
    for fragment in fragments:
        admit(replay, fragment)
    replay.check_valid()
    batch = gather_all(replay)
    place = {seen[lane].tobytes(): (step, lane) for step, seen in enumerate(policy.seen) for lane in range(3)}
    trained = set()
    for item in range(replay.num_items):
        start, lane = place[batch.observation[SHAPE.burn_in, item].tobytes()]
        env, burn_in = lanes[lane], int(batch.burn_in[item])
        length, first = int(batch.valid[:, item].sum()), start - burn_in
        assert first >= env.begins[start] == env.begins[start + length - 1]
        np.testing.assert_array_equal(batch.recurrent_state[item], policy.carried[first]["hidden"][lane])
        steps = [*range(first, start), *range(start, start + length)]
        in_use = [*range(burn_in), *range(SHAPE.burn_in, SHAPE.burn_in + length)]
        for row, step in zip(in_use, steps, strict=True):
            np.testing.assert_array_equal(batch.observation[row, item], policy.seen[step][lane])
            carried = policy.carried[step]
            assert batch.previous_action[row, item] == carried["previous_action"][lane]
            assert batch.previous_reward[row, item] == carried["previous_reward"][lane]
        assert batch.action[:length, item].tolist() == env.actions[start : start + length]
        last = start + length - 1
        if not env.is_terminated(last):
            after = env.stack_after(last, frame_stack).reshape(spec.input_shape)
            np.testing.assert_array_equal(batch.observation[SHAPE.burn_in + length, item], after)
        trained |= {(step, lane) for step in range(start, start + length)}
    assert trained == {(step, lane) for step in range(len(policy.seen)) for lane in range(3)}


def test_context_does_not_change_with_a_fragment_that_was_returned() -> None:
    config = EnvConfig(id=f"{__name__}:Written", num_envs=2)
    expected, _, spec = play(Spy(), lengths=(5, 3), context=4, env={"num_envs": 2})
    collector = Collector(
        **{
            "run": "r",
            "producer": 5,
            "incarnation": 7,
            "env": config,
            "rollout": RolloutConfig(fragment_s=5),
        },
        **{"spec": spec, "policy": Spy(), "random_until_learned": True, "seed": 1, "context": 4},
    )
    collector.load(1, {})
    first = collector.collect(max_steps=5)
    for column in (first.observation, first.action, first.reward, *first.extras.values()):
        column[:] = 1
    second = collector.collect(max_steps=3)
    np.testing.assert_array_equal(second.observation, expected[1].observation)
    np.testing.assert_array_equal(second.action, expected[1].action)
    np.testing.assert_array_equal(second.extras["serial"], expected[1].extras["serial"])
