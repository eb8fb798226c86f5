"""Windows against a slow twin, on fragments whose frames name their step and lane."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import make_fragment, slow_transitions

from ddrl.replay.windows import n_step_windows


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 10),
    num_envs=st.integers(1, 4),
    context=st.integers(0, 3),
    n=st.integers(1, 12),
    gamma=st.sampled_from([0.5, 1.0]),
    end_probability=st.sampled_from([0.0, 0.2, 0.9]),
)
def test_every_transition_equals_the_slow_twin(
    seed: int, num_steps: int, num_envs: int, context: int, n: int, gamma: float, end_probability: float
) -> None:
    fragment = make_fragment(
        seed, num_steps=num_steps, num_envs=num_envs, context=context, end_probability=end_probability
    )
    windows = n_step_windows(fragment, gamma=gamma, n=n)
    twin = slow_transitions(fragment, gamma=gamma, n=n)
    assert len(windows) == fragment.num_transitions == len(twin)
    for i, item in enumerate(twin):
        assert windows.block.rows[windows.start[i]].tolist() == item.observation.tolist()
        assert windows.action[i].tolist() == item.action.tolist()
        assert windows.n_step_return[i] == item.n_step_return
        assert windows.bootstrap_discount[i] == item.bootstrap_discount
        if item.next_observation is not None:
            assert windows.block.rows[windows.bootstrap[i]].tolist() == item.next_observation.tolist()
    assert np.all((windows.bootstrap >= 0) & (windows.bootstrap < len(windows.block.rows)))
    num_final = np.count_nonzero(fragment.truncated[context:])
    assert len(windows.block.rows) == (num_steps + 1) * num_envs + num_final
    assert len(np.unique(windows.block.rows, axis=0)) == len(windows.block.rows), "each frame once"


def test_hand_example_of_a_truncation() -> None:
    fragment = make_fragment(0, num_steps=3, num_envs=2, end_probability=0.0)
    fragment.truncated[1, 0] = True
    fragment = dataclasses.replace(
        fragment,
        final_index=np.array([[1, 0]], np.int32),
        final_observation=np.array([[0, 1, 0, 1]], np.float32),
    )
    windows = n_step_windows(fragment, gamma=0.5, n=2)
    assert windows.start.tolist() == [0, 1, 2, 3, 4, 5]
    assert windows.bootstrap.tolist() == [8, 5, 8, 7, 6, 7]  # row 8 is the final observation of lane 0
    assert windows.bootstrap_discount.tolist() == [0.25, 0.25, 0.5, 0.25, 0.5, 0.5]


def test_final_observations_may_come_in_any_order() -> None:
    fragment = make_fragment(3, num_steps=8, num_envs=3, context=2, end_probability=0.6)
    order = np.random.default_rng(0).permutation(len(fragment.final_index))
    shuffled = dataclasses.replace(
        fragment,
        final_index=fragment.final_index[order],
        final_observation=fragment.final_observation[order],
    )
    a, b = n_step_windows(fragment, gamma=0.9, n=3), n_step_windows(shuffled, gamma=0.9, n=3)
    assert len(order) > 3
    assert np.array_equal(a.block.rows[a.bootstrap], b.block.rows[b.bootstrap])


def test_final_observation_of_a_context_step_is_left_out() -> None:
    fragment = make_fragment(0, num_steps=2, num_envs=1, context=2, end_probability=0.0)
    fragment.truncated[0, 0] = True
    fragment = dataclasses.replace(
        fragment,
        final_index=np.array([[0, 0]], np.int32),
        final_observation=np.array([[0, 0, 0, 1]], np.float32),
    )
    windows = n_step_windows(fragment, gamma=0.9, n=1)
    assert windows.block.rows[:, 1].tolist() == [2, 3, 4]


def test_dtypes_are_kept() -> None:
    fragment = make_fragment(4, num_steps=5, num_envs=2, dtype=np.uint8, end_probability=0.5)
    fragment = dataclasses.replace(fragment, action=np.zeros((5, 2), np.int64))
    windows = n_step_windows(fragment, gamma=0.9, n=3)
    assert windows.block.rows.dtype == np.uint8
    assert windows.action.dtype == np.int64
    assert windows.action.shape == (10,)


@pytest.mark.parametrize("keep", ["none", "twice", "elsewhere"])
def test_final_observations_that_do_not_match_are_refused(keep: str) -> None:
    fragment = make_fragment(0, num_steps=3, num_envs=2, end_probability=0.0)
    fragment.truncated[1, 0] = True
    index = {"none": [], "twice": [[1, 0], [1, 0]], "elsewhere": [[1, 1]]}[keep]
    fragment = dataclasses.replace(
        fragment,
        final_index=np.array(index, np.int32).reshape(-1, 2),
        final_observation=np.zeros((len(index), 4), np.float32),
    )
    with pytest.raises(ValueError, match="final observations"):
        n_step_windows(fragment, gamma=0.9, n=1)


@pytest.mark.parametrize("reward", [3e38, -3e38])
def test_rewards_without_finite_sums_are_refused(reward: float) -> None:
    """Three of 1e38 are finite, two of 3e38 are not; a sum of one is what it is."""
    fragment = make_fragment(0, num_steps=3, num_envs=2, end_probability=0.0)
    large = dataclasses.replace(fragment, reward=np.full((3, 2), reward / 3, np.float32))
    assert np.isfinite(n_step_windows(large, gamma=1.0, n=100).n_step_return).all()
    larger = dataclasses.replace(fragment, reward=np.full((3, 2), reward, np.float32))
    assert np.isfinite(n_step_windows(larger, gamma=1.0, n=1).n_step_return).all()
    with pytest.raises(ValueError, match=r"rewards of up to 3e\+38 have no finite sum of n_step 2; lower"):
        n_step_windows(larger, gamma=1.0, n=2)


def test_a_fragment_of_context_alone_is_refused() -> None:
    fragment = dataclasses.replace(make_fragment(0, num_steps=2, num_envs=1), context=2)
    with pytest.raises(ValueError, match="T = 0"):
        n_step_windows(fragment, gamma=0.9, n=1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 8),
    context=st.integers(0, 3),
    n=st.integers(1, 5),
    end_probability=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_td_errors_by_the_values_of_the_player(
    seed: int, num_steps: int, context: int, n: int, end_probability: float
) -> None:
    fragment = make_fragment(
        seed, num_steps=num_steps, num_envs=2, context=context, end_probability=end_probability
    )
    rng = np.random.default_rng(seed)
    values = {
        name: rng.integers(-8, 9, fragment.reward.shape).astype(np.float32)
        for name in ("action_value", "state_value")
    }
    fragment = dataclasses.replace(fragment, extras=values)
    errors = n_step_windows(fragment, gamma=0.5, n=n).td_error
    assert errors is not None and errors.dtype == np.float32
    for i, item in enumerate(slow_transitions(fragment, gamma=0.5, n=n)):
        step, lane = context + i // 2, i % 2
        last = step + item.num_steps - 1
        told = last if fragment.truncated[last, lane] or last + 1 == len(fragment.reward) else last + 1
        target = item.n_step_return + item.bootstrap_discount * values["state_value"][told, lane]
        assert errors[i] == abs(target - values["action_value"][step, lane])


@pytest.mark.parametrize(
    "extras",
    [
        {"action_value": np.zeros((3, 2), np.float32)},
        {"state_value": np.zeros((3, 2), np.float32)},
        {"action_value": np.zeros((3, 2), np.float32), "state_value": np.zeros((3, 2), np.float64)},
        {"action_value": np.zeros((3, 2, 1), np.float32), "state_value": np.zeros((3, 2), np.float32)},
    ],
)
def test_values_of_another_form_are_refused(extras: dict[str, np.ndarray]) -> None:
    fragment = dataclasses.replace(make_fragment(0, num_steps=3, num_envs=2), extras=extras)
    with pytest.raises(ValueError, match="action_value and state_value"):
        n_step_windows(fragment, gamma=0.9, n=1)
