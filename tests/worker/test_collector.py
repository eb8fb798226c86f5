"""A collector's actions, seeds, fragment lengths and refusals. `test_collector_context.py` checks what it records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from support.collectors import Explored, RandomPolicy, make_collector

from ddrl import codec, envs
from ddrl.config import EnvConfig
from ddrl.types import Fragment
from ddrl.worker import collector
from ddrl.worker.collector import Collector


class Plays(RandomPolicy):
    """Acts by a function of the observations; by default it repeats them, the best action in `ddrl/Target-v0`."""

    def __init__(self, explore: Callable[[np.ndarray], Explored] = lambda seen: (seen.copy(), {})) -> None:
        super().__init__()
        self.function, self.loaded = explore, list[Any]()

    def load(self, weights: Mapping[str, Any]) -> None:
        self.loaded.append(weights)

    def explore(self, observation: np.ndarray, generator: np.random.Generator, state: Any) -> Explored:
        return self.function(observation)


def upright(seen: np.ndarray) -> Explored:
    """Action 1 in any environment."""
    return np.ones(len(seen), np.int64), {}


def make(*, env: Any = None, **options: Any) -> Collector:
    config = EnvConfig(**{"id": "ddrl/Target-v0", "num_envs": 2} | (env or {}))
    return make_collector(config, **{"policy": Plays()} | options)


def play(played: Collector, num_fragments: int = 12) -> list[Fragment]:
    return [played.collect(max_steps=64) for _ in range(num_fragments)]


def test_weights_are_those_that_were_loaded() -> None:
    policy, weights = Plays(), {"w": np.ones(1)}
    played = make(policy=policy, version=None)
    assert played.version == -1
    played.load(3, weights)
    assert (played.version, policy.loaded) == (3, [weights])
    assert played.collect().policy_version == 3


def test_version_0_is_random_until_learned() -> None:
    played = make(env={"num_envs": 8}, version=0)
    action = np.concatenate([fragment.action for fragment in play(played)])
    assert action.dtype == np.float32 and action.min() >= -2 and action.max() <= 2
    assert abs(action.mean()) < 0.5  # uniform on [-2, 2]: its deviation is 1.155; it drifts
    assert abs(action.std() - 4 / 12**0.5) < 0.1
    played.load(1, {})
    for plays in (played, make(random_until_learned=False, version=0)):
        fragment = plays.collect(max_steps=4)
        np.testing.assert_array_equal(fragment.action, fragment.observation[:-1])


@pytest.mark.parametrize(
    ("env_id", "sizes"), [("ddrl/Pairs-v0", (3, 4)), ("ddrl/Pick-v0", (4,)), ("CartPole-v1", (2,))]
)
def test_random_choices_are_uniform(env_id: str, sizes: tuple[int, ...]) -> None:
    played = make(env={"id": env_id, "num_envs": 16}, policy=Plays(upright), version=0)
    action = np.concatenate([fragment.action for fragment in play(played)])
    assert action.dtype == np.int64 and action.shape[1:] == ((16, 2) if len(sizes) > 1 else (16,))
    rows = action.reshape(-1, len(sizes))
    counts = np.zeros(sizes)
    np.add.at(counts, tuple(rows.T), 1)  # of each combination, so that dimensions are independent, too
    expected = len(rows) / np.prod(sizes)
    assert counts.sum() == len(rows) and np.abs(counts - expected).max() < 5 * expected**0.5


def test_noise_is_in_half_ranges_and_clipped() -> None:
    fragments = play(make(env={"num_envs": 8}, rollout={"action_noise": 0.1}))
    action = np.concatenate([fragment.action for fragment in fragments])
    offset = action - np.concatenate([fragment.observation[:-1] for fragment in fragments])
    offset = offset[np.abs(action) < 2]
    assert abs(offset.std() - 0.2) < 0.03  # half the range is 2
    assert abs(offset.mean()) < 0.03
    wild = make(env={"num_envs": 8}, rollout={"action_noise": 2.0}).collect()
    assert (wild.action.min(), wild.action.max(), wild.action.dtype) == (-2, 2, np.float32)


def test_extras_land_row_for_row() -> None:
    """Noise changes actions only; one buffer is written again at each step."""
    buffer = np.zeros((2, 1), np.float32)

    def marked(seen: np.ndarray) -> Explored:
        buffer[:] = seen + np.float32(0.25)
        return seen.copy(), {"behavior_log_prob": -seen[:, 0], "raw_action": buffer}

    played = make(policy=Plays(marked), rollout={"action_noise": 2.0})
    for fragment in (*(played.collect(max_steps=n) for n in (1, 5, 16)), played.collect(stop_at=0.0)):
        seen, extras = fragment.observation[:-1], codec.decode(codec.encode(fragment)).extras  # [T, N, 1]
        assert list(extras) == ["behavior_log_prob", "raw_action", "reset_index", "reset_seed"]
        np.testing.assert_array_equal(extras["behavior_log_prob"], -seen[..., 0], strict=True)
        np.testing.assert_array_equal(extras["raw_action"], seen + np.float32(0.25), strict=True)
        assert not np.allclose(fragment.action, seen)


A = np.zeros(2)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.zeros(3), None, r"a of shape \(3,\), expected \(2, ...\)"),
        (np.zeros(()), None, r"a of shape \(\), expected \(2, ...\)"),
        (np.zeros((2, 3)), np.zeros((2, 1)), r"a of shape \(2, 1\) .* at step 1 .*, \(2, 3\) and"),
        (A, np.zeros(1), r"a of shape \(1,\) .* at step 1 .*, \(2,\) and"),
        (A.astype("f4"), A, "a of shape .* dtype float64 at step 1 .* float32 at its first"),
        (A, None, r"extras \[\] at step 1 of a fragment, \['a'\] at its first"),
        (None, A, r"extras \['a'\] at step 1 of a fragment, \[\] at its first"),
    ],
)
def test_extras_of_a_wrong_shape_are_refused(first: Any, second: Any, message: str) -> None:
    extras = ({} if column is None else {"a": column} for column in (first, second))
    with pytest.raises(ValueError, match=f"^policy: {message}") as refused:
        make(policy=Plays(lambda seen: (seen.copy(), next(extras)))).collect()
    assert "\n" not in str(refused.value)


def test_actions_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"policy: actions of shape \(2,\), expected \(2, 1\)"):
        make(policy=Plays(upright)).collect()


def test_an_extra_cannot_replace_a_column() -> None:
    policy = Plays(lambda seen: (seen.copy(), {"reward": np.ones(2, np.float32)}))
    fragment = make(policy=policy).collect(max_steps=1)
    np.testing.assert_array_equal(fragment.reward, np.zeros((1, 2)))


def test_spaces_must_be_those_of_the_run() -> None:
    other = envs.describe(EnvConfig(id="CartPole-v1"))
    with pytest.raises(envs.EnvError, match=r"observation_shape is \(1,\) here, but \(4,\) is expected"):
        make(spec=other)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float64"])
def test_observations_of_users_environments(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """One array for all of them, of any dtype, and infos with names that mean something in other environments."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    env = {"id": "support.odd_envs:Counts", "kwargs": {"dtype": dtype}, "num_envs": 3}
    played = make(env=env, policy=Plays(upright))
    fragment = played.collect(max_steps=12)
    counts = np.arange(fragment.num_steps + 1) % 5
    steps, shown = counts, 200
    assert fragment.observation.dtype == fragment.final_observation.dtype == np.float32
    assert not fragment.terminated.any() and fragment.truncated[:, 0].tolist() == (counts[1:] == 0).tolist()
    assert (fragment.observation[..., 0] == steps[:, None]).all() and (
        fragment.observation[..., 1] == shown
    ).all()
    assert len(fragment.final_observation) == 3 * (fragment.num_steps // 5) > 0
    assert (fragment.final_observation == (5, shown)).all()


def test_seeds_reproduce_and_differ() -> None:
    def trace(sizes: list[int], **options: Any) -> np.ndarray:
        """[T, N, 2] observations and actions."""
        played = make(version=0, **options)
        fragments = [played.collect(max_steps=n) for n in sizes]
        return np.concatenate([np.concatenate([f.observation[:-1], f.action], axis=-1) for f in fragments])

    first = trace([8, 8])
    for again in (trace([8, 8]), trace([3, 1, 12])):  # however the fragments are cut
        np.testing.assert_array_equal(again, first)
    assert not (first[:, 0] == first[:, 1]).any()  # lanes differ
    for options in ({"producer": 6}, {"incarnation": 1}, {"seed": 2}):
        assert not (trace([8, 8], **options) == first).any()


def test_stop_at_ends_early_but_not_empty() -> None:
    played = make()
    assert played.collect(stop_at=time.monotonic() - 1).num_steps == 1
    assert played.collect(max_steps=0).num_steps == 1
    fragment = played.collect(max_steps=3, stop_at=time.monotonic() + 60)
    assert (fragment.num_steps, fragment.seq) == (3, 2)


def test_length_follows_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, step_s = 0.0, 0.0

    def slow(seen: np.ndarray) -> Explored:
        nonlocal now
        now += step_s
        return seen.copy(), {}

    monkeypatch.setattr(collector.time, "perf_counter", lambda: now)
    played = make(rollout={"fragment_s": 0.125, "max_fragment_steps": 200}, policy=Plays(slow))
    lengths = []
    for seconds in (2**-20, 2**-20, 2**-20, 2**-10, 1.0, 1.0, 1.0, 1.0, 1.0):
        step_s = seconds
        lengths.append(played.collect().num_steps)
    assert lengths == [16, 64, 200, 200, 128, 32, 8, 2, 1]
    assert make(rollout={"max_fragment_steps": 3}).collect().num_steps == 3
    played = make(
        rollout={"fragment_s": 0.125}, policy=Plays(slow), hindsight=4
    )  # goals are those of a fragment
    soon = time.monotonic()
    assert [played.collect(max_steps=most, stop_at=soon).num_steps for most in (1, 5, 200)] == [50] * 3
    assert played.collect(stop_at=soon - 31.0).num_steps == 1  # they take too long
    short = make(rollout={"max_fragment_steps": 20}, policy=Plays(slow), hindsight=4)
    assert short.collect(max_steps=1).num_steps == 20


def test_memory_estimate_counts_environments_weights_and_context() -> None:
    plain, long = make(), make(context=50)
    assert make(env={"num_envs": 4}).num_bytes > plain.num_bytes > 0
    before = plain.num_bytes
    plain.load(2, {"w": np.zeros((1000, 1000), np.float32), "b": np.zeros(1000)})
    assert plain.num_bytes == before + 4_000_000 + 8_000
    long.load(2, {})
    play(long)
    rows = 50 * 2 * (4 + 4 + 4 + 1 + 1)  # observation, action, reward, two ends; of two lanes
    assert rows <= long.num_bytes - before < 2 * rows
