"""The collector against an environment that writes its episode and step into the observation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from support.runs import toy_answers

from ddrl import codec, envs
from ddrl.algorithms.base import RecurrentState
from ddrl.config import EnvConfig, RolloutConfig
from ddrl.types import Fragment
from ddrl.worker import collector
from ddrl.worker.collector import Collector

Explored = tuple[np.ndarray, Mapping[str, np.ndarray]]


class Counting(gymnasium.Env[np.ndarray, np.ndarray]):
    """Observes [episode, steps played in it, number drawn at reset]; reward 10 * episode + step + action.

    Episode e lasts 2 + e % 3 steps; it ends by e % 4: truncated, terminated, truncated, both.
    """

    def __init__(self) -> None:
        self.observation_space = Box(-1e6, 1e6, (3,), np.float64)
        self.action_space = Box(np.float32(-1), np.float32(3), (1,), np.float32)
        self.episode, self.steps, self.drawn = -1, 0, 0.0

    def _observe(self) -> np.ndarray:
        return np.array([self.episode, self.steps, self.drawn])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.steps, self.drawn = self.episode + 1, 0, float(self.np_random.integers(10**5))
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = 10.0 * self.episode + self.steps + float(action[0])
        self.steps += 1
        ended = self.steps >= length_of(self.episode)
        how = self.episode % 4
        info = {"some": 1} if ended else {}
        return self._observe(), reward, ended and how in (1, 3), ended and how in (0, 2, 3), info


def length_of(episode: int) -> int:
    return 2 + episode % 3


class Echo:
    """Action = steps / 10, so that a row's action says which observation it was chosen for; no extras."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load(self, weights: Mapping[str, Any]) -> None:
        self.loaded.append(weights)

    def initial_state(self, num_envs: int) -> RecurrentState:
        return {}

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
    ) -> Explored:
        return observation[:, 1:2] / np.float32(10), {}


class Marked(Echo):
    """Extras that say which observation they were given with; one buffer is written again at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros((2, 2), np.float32)

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
    ) -> Explored:
        action, _ = super().explore(observation, generator, state)
        self.buffer[:] = observation[:, :2] + np.float32(0.25)
        code = (100 * observation[:, 0] + observation[:, 1]).astype(np.int64)
        return action, {"behavior_log_prob": -observation[:, 1], "raw_action": self.buffer, "code": code}


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", __name__)
    yield


def make(
    *,
    env: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    policy: Any = None,
    version: int | None = 1,
    **kwargs: Any,
) -> Collector:
    config = EnvConfig(**{"id": f"{__name__}:Counting", "num_envs": 2, **(env or {})})
    made = Collector(
        **{
            "run": "r",
            "producer": 5,
            "incarnation": 2**62,
            "env": config,
            "rollout": RolloutConfig(**(rollout or {})),
            "spec": envs.describe(config),
            "policy": policy or Echo(),
            "random_until_learned": True,
            "seed": 1,
            **kwargs,
        }
    )
    if version is not None:
        made.load(version, {})
    return made


def joined(fragments: list[Fragment], name: str) -> np.ndarray:
    return np.concatenate([getattr(fragment, name) for fragment in fragments])


def test_columns_align_across_endings_and_fragments() -> None:
    played = make()
    fragments = [played.collect(max_steps=n) for n in (1, 5, 2, 7, 16)]
    assert [f.num_steps for f in fragments] == [1, 5, 2, 7, 16]
    assert [f.seq for f in fragments] == [0, 1, 2, 3, 4]
    assert {(f.run, f.producer, f.incarnation, f.policy_version, f.context) for f in fragments} == {
        ("r", 5, 2**62, 1, 0)
    }
    for before, after in zip(fragments, fragments[1:], strict=False):
        np.testing.assert_array_equal(before.observation[-1], after.observation[0])

    total = sum(f.num_steps for f in fragments)
    observation = np.concatenate([f.observation[:-1] for f in fragments])
    assert observation.dtype == np.float32
    rows = [(e, s) for e in range(50) for s in range(length_of(e))][:total]  # what each lane must have seen
    for lane in range(2):
        np.testing.assert_array_equal(observation[:, lane, :2], rows)
        np.testing.assert_allclose(
            joined(fragments, "action")[:, lane, 0], [s / 10 for _, s in rows], rtol=1e-6
        )
        np.testing.assert_allclose(
            joined(fragments, "reward")[:, lane], [10 * e + s + s / 10 for e, s in rows], rtol=1e-6
        )
        ends = [s == length_of(e) - 1 for e, s in rows]
        np.testing.assert_array_equal(
            joined(fragments, "terminated")[:, lane],
            [end and e % 4 in (1, 3) for end, (e, _) in zip(ends, rows, strict=True)],
        )
        np.testing.assert_array_equal(
            joined(fragments, "truncated")[:, lane],
            [end and e % 4 in (0, 2) for end, (e, _) in zip(ends, rows, strict=True)],
        )
    for fragment in fragments:
        np.testing.assert_array_equal(fragment.final_index, np.argwhere(fragment.truncated))
        for (step, lane), final in zip(fragment.final_index, fragment.final_observation, strict=True):
            last = fragment.observation[step, lane]
            np.testing.assert_array_equal(final, [last[0], last[1] + 1, last[2]])  # same episode, a step on
        decoded = codec.decode(codec.encode(fragment))  # what the wire insists on
        np.testing.assert_array_equal(decoded.observation, fragment.observation)


def test_returns_and_lengths_are_unscaled_and_span_fragments() -> None:
    played = make(env={"reward_scale": 0.5})
    fragments = [played.collect(max_steps=n) for n in (1, 3, 16, 4)]
    total = sum(f.num_steps for f in fragments)
    lengths, returns, ended = [], [], 0
    for episode in range(50):
        ended += length_of(episode)
        if ended > total:
            break
        steps = range(length_of(episode))
        lengths += [length_of(episode)] * 2  # two lanes in step with each other
        returns += [sum(10 * episode + s + s / 10 for s in steps)] * 2
    np.testing.assert_array_equal(joined(fragments, "episode_length"), lengths)
    np.testing.assert_allclose(joined(fragments, "episode_return"), returns, rtol=1e-6)
    assert joined(fragments, "episode_length").dtype == np.int32
    assert joined(fragments, "episode_return").dtype == np.float32
    first = fragments[0]
    np.testing.assert_array_equal(first.reward, np.zeros((1, 2)))
    np.testing.assert_allclose(fragments[1].reward[0], [0.5 * 1.1] * 2, rtol=1e-6)
    assert first.reward.dtype == np.float32


def test_action_repeat() -> None:
    fragment = make(env={"action_repeat": 2}).collect(max_steps=5)
    # episodes of 2, 3, 4 own steps are 1, 2, 2 agent steps; the repeated action is that of the first
    np.testing.assert_allclose(fragment.reward[:, 0], [1.0, 21.0, 12.2, 41.0, 45.4], rtol=1e-6)
    np.testing.assert_array_equal(fragment.episode_length, [1, 1, 2, 2, 2, 2])


def test_nothing_is_played_without_weights() -> None:
    policy = Echo()
    played = make(policy=policy, version=None)
    assert played.version == -1
    with pytest.raises(RuntimeError, match="no weights loaded"):
        played.collect()
    weights = {"w": np.ones(1)}
    played.load(3, weights)
    assert (played.version, policy.loaded) == (3, [weights])
    assert played.collect().policy_version == 3


def test_version_0_is_random_until_learned() -> None:
    played = make(env={"num_envs": 8}, rollout={"fragment_s": 5}, version=0)
    action = np.concatenate([played.collect(max_steps=64).action for _ in range(12)])
    assert action.dtype == np.float32
    assert action.min() >= -1
    assert action.max() <= 3
    assert abs(action.mean() - 1.0) < 0.15  # uniform on [-1, 3]: its deviation is 1.155
    assert abs(action.std() - 4 / 12**0.5) < 0.1
    played.load(1, {})
    fragment = played.collect(max_steps=4)
    np.testing.assert_allclose(fragment.action[..., 0], fragment.observation[:-1, :, 1] / 10, rtol=1e-6)
    at_once = make(random_until_learned=False, version=0).collect(max_steps=4)
    np.testing.assert_allclose(at_once.action[..., 0], at_once.observation[:-1, :, 1] / 10, rtol=1e-6)


def test_noise_is_in_half_ranges_and_clipped() -> None:
    played = make(env={"num_envs": 8}, rollout={"action_noise": 0.1, "fragment_s": 5})
    fragments = [played.collect(max_steps=64) for _ in range(12)]
    offset = np.concatenate([f.action[..., 0] - f.observation[:-1, :, 1] / 10 for f in fragments])
    assert abs(offset.std() - 0.2) < 0.03  # half the range is 2
    assert abs(offset.mean()) < 0.03
    wild = make(env={"num_envs": 8}, rollout={"action_noise": 2.0}).collect()
    assert wild.action.min() == -1
    assert wild.action.max() == 3
    assert wild.action.dtype == np.float32


def test_discrete_actions() -> None:
    class Right(Echo):
        def explore(
            self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
        ) -> Explored:
            return np.ones(len(observation), np.int64), {}

    played = make(env={"id": "CartPole-v1", "num_envs": 3}, policy=Right(), version=0)
    action = played.collect(max_steps=16).action
    assert action.dtype == np.int64
    assert action.shape == (16, 3)
    assert set(action.ravel().tolist()) == {0, 1}
    played.load(1, {})
    assert (played.collect(max_steps=4).action == 1).all()


@pytest.mark.parametrize(
    ("env_id", "sizes"), [("ddrl/Pairs-v0", (3, 4)), ("ddrl/Pick-v0", (4,)), ("CartPole-v1", (2,))]
)
def test_random_choices_are_uniform(env_id: str, sizes: tuple[int, ...]) -> None:
    played = make(env={"id": env_id, "num_envs": 16}, rollout={"fragment_s": 5}, version=0)
    action = np.concatenate([played.collect(max_steps=64).action for _ in range(12)])
    assert action.dtype == np.int64
    assert action.shape[1:] == ((16, 2) if len(sizes) > 1 else (16,))
    rows = action.reshape(-1, len(sizes))
    counts = np.zeros(sizes)
    np.add.at(counts, tuple(rows.T), 1)  # of each combination, so that dimensions are independent, too
    assert (counts.sum(), counts.size) == (len(rows), np.prod(sizes))
    expected = len(rows) / counts.size
    assert np.abs(counts - expected).max() < 5 * expected**0.5


class Answers(Echo):
    """Solves the toys; the extras repeat what was chosen."""

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
    ) -> Explored:
        action = toy_answers(observation)
        return action, {"behavior_log_prob": np.zeros(len(action), np.float32), "chosen": action}


@pytest.mark.parametrize("env_id", ["ddrl/Pick-v0", "ddrl/Pairs-v0", "ddrl/Spot-v0"])
def test_a_round_with_each_toy(env_id: str) -> None:
    played = make(env={"id": env_id, "num_envs": 3}, policy=Answers(), random_until_learned=False, version=0)
    for steps in (7, 16):
        fragment = played.collect(max_steps=steps)
        assert (fragment.reward == 1).all()
        np.testing.assert_array_equal(fragment.extras["chosen"], fragment.action)
        decoded = codec.decode(codec.encode(fragment))
        for name in ("observation", "action", "final_observation"):
            np.testing.assert_array_equal(getattr(decoded, name), getattr(fragment, name))
        assert {name: column.shape for name, column in decoded.extras.items()} == {
            "behavior_log_prob": (steps, 3),
            "chosen": fragment.action.shape,
        }
    assert fragment.episode_return.tolist() == [10.0] * 6  # at steps 10 and 20 of 23
    assert fragment.final_index.tolist() == [[step, lane] for step in (2, 12) for lane in range(3)]
    assert not fragment.terminated.any()


def test_extras_land_row_for_row() -> None:
    played = make(policy=Marked())
    for steps in (1, 5, 16):
        fragment = played.collect(max_steps=steps)
        seen = fragment.observation[:-1]  # [T, N, 3]
        assert list(fragment.extras) == ["behavior_log_prob", "raw_action", "code"]
        np.testing.assert_array_equal(fragment.extras["behavior_log_prob"], -seen[..., 1])
        np.testing.assert_array_equal(fragment.extras["raw_action"], seen[..., :2] + np.float32(0.25))
        np.testing.assert_array_equal(fragment.extras["code"], 100 * seen[..., 0] + seen[..., 1])
        assert [column.dtype for column in fragment.extras.values()] == [np.float32, np.float32, np.int64]
        decoded = codec.decode(codec.encode(fragment))
        for name, column in fragment.extras.items():
            np.testing.assert_array_equal(decoded.extras[name], column)
    early = played.collect(stop_at=time.monotonic() - 1)
    assert {name: column.shape for name, column in early.extras.items()} == {
        "behavior_log_prob": (1, 2),
        "raw_action": (1, 2, 2),
        "code": (1, 2),
    }


def test_random_actions_and_noise_leave_extras_alone() -> None:
    played = make(policy=Marked(), rollout={"action_noise": 2.0}, version=0)
    assert played.collect(max_steps=4).extras == {}
    played.load(1, {})
    fragment = played.collect(max_steps=4)
    np.testing.assert_array_equal(
        fragment.extras["raw_action"], fragment.observation[:-1, :, :2] + np.float32(0.25)
    )
    assert not np.allclose(fragment.action[..., 0], fragment.observation[:-1, :, 1] / 10)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": np.zeros(3)}, {}, r"a of shape \(3,\), expected \(2, ...\)"),
        ({"a": np.zeros(())}, {}, r"a of shape \(\), expected \(2, ...\)"),
        (
            {"a": np.zeros((2, 3))},
            {"a": np.zeros((2, 1))},
            r"a of shape \(2, 1\) .* at step 1 .*, \(2, 3\) and",
        ),
        ({"a": np.zeros(2)}, {"a": np.zeros(1)}, r"a of shape \(1,\) .* at step 1 .*, \(2,\) and"),
        (
            {"a": np.zeros(2, "f4")},
            {"a": np.zeros(2)},
            "a of shape .* dtype float64 at step 1 .* float32 at its first",
        ),
        ({"a": np.zeros(2)}, {}, r"extras \[\] at step 1 of a fragment, \['a'\] at its first"),
        ({}, {"a": np.zeros(2)}, r"extras \['a'\] at step 1 of a fragment, \[\] at its first"),
        ({"a": np.zeros(2)}, {"b": np.zeros(2)}, r"extras \['b'\] at step 1"),
    ],
)
def test_extras_of_a_wrong_shape_are_refused(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], message: str
) -> None:
    class Changing(Echo):
        given = iter([first, second])

        def explore(
            self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
        ) -> Explored:
            return super().explore(observation, generator, state)[0], next(self.given)

    with pytest.raises(ValueError, match=f"^policy: {message}") as refused:
        make(policy=Changing()).collect()
    assert "\n" not in str(refused.value)


def test_policy_of_a_wrong_shape_is_refused() -> None:
    class Flat(Echo):
        def explore(
            self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
        ) -> Explored:
            return observation[:, 1], {}

    with pytest.raises(ValueError, match=r"policy: actions of shape \(2,\), expected \(2, 1\)"):
        make(policy=Flat()).collect()


def test_spaces_must_be_those_of_the_run() -> None:
    other = envs.describe(EnvConfig(id="CartPole-v1"))
    with pytest.raises(envs.EnvError, match=r"observation_shape is \(3,\) here, but \(4,\) is expected"):
        make(spec=other)


def test_seeds_reproduce_and_differ() -> None:
    def trace(sizes: list[int], **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        played = make(version=0, **kwargs)
        fragments = [played.collect(max_steps=n) for n in sizes]
        return joined(fragments, "action"), np.concatenate([f.observation[:-1] for f in fragments])

    action, observation = trace([8, 8])
    for again in (trace([8, 8]), trace([3, 1, 12])):  # however the fragments are cut
        np.testing.assert_array_equal(again[0], action)
        np.testing.assert_array_equal(again[1], observation)
    assert observation[0, 0, 2] != observation[0, 1, 2]  # lanes differ
    for kwargs in ({"producer": 6}, {"incarnation": 1}, {"seed": 2}):
        other_action, other_observation = trace([8, 8], **kwargs)
        assert not (other_action == action).any()
        assert not (other_observation[..., 2] == observation[..., 2]).all()


def test_stop_at_ends_early_but_not_empty() -> None:
    played = make()
    assert played.collect(stop_at=time.monotonic() - 1).num_steps == 1
    assert played.collect(max_steps=0).num_steps == 1
    fragment = played.collect(max_steps=3, stop_at=time.monotonic() + 60)
    assert (fragment.num_steps, fragment.seq) == (3, 2)
    np.testing.assert_array_equal(fragment.observation[0, 0, :2], [1, 0])  # after two steps


def test_length_follows_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Echo):
        """Takes `step_s` of a clock of its own for each step."""

        clock, step_s = 0.0, 0.0

        def explore(self, observation: np.ndarray, generator: np.random.Generator, state: Any) -> Explored:
            self.clock += self.step_s
            return super().explore(observation, generator, state)

    policy = Slow()
    monkeypatch.setattr(collector.time, "perf_counter", lambda: policy.clock)
    played = make(rollout={"fragment_s": 0.125, "max_fragment_steps": 200}, policy=policy)
    lengths = []
    for policy.step_s in (2**-20, 2**-20, 2**-20, 2**-10, 1.0, 1.0, 1.0, 1.0, 1.0):
        lengths.append(played.collect().num_steps)
    assert lengths == [16, 64, 200, 200, 128, 32, 8, 2, 1]


def test_short_maximum_holds_from_the_start() -> None:
    assert make(rollout={"max_fragment_steps": 3}).collect().num_steps == 3


def test_memory_estimate_grows_with_lanes() -> None:
    assert make(env={"num_envs": 4}).num_bytes > make(env={"num_envs": 2}).num_bytes > 0


def test_memory_estimate_counts_weights_and_history() -> None:
    plain, long = make(), make(context=50)
    before = plain.num_bytes
    plain.load(2, {"w": np.zeros((1000, 1000), np.float32), "b": np.zeros(1000)})
    assert plain.num_bytes == before + 4_000_000 + 8_000
    plain.load(3, {})
    assert plain.num_bytes == before
    for played in (plain, long):
        for _ in range(20):
            fragment = played.collect(max_steps=10)
    rows = 50 * 2 * (3 * 4 + 4 + 4 + 1 + 1)  # observation, action, reward, two ends; of two lanes
    finals = np.count_nonzero(fragment.final_index[:, 0] >= 10) * 3 * 4  # of the last 50 of 60 steps
    assert finals > 0
    assert long.num_bytes - plain.num_bytes == rows + finals
