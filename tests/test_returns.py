"""n-step returns: hand numbers, identities, and a slow twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import make_fragment, slow_transitions

from ddrl.returns import n_step_return


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def flags(length: int, *at: int) -> np.ndarray:
    result = np.zeros((length, 1), np.bool_)
    result[list(at)] = True
    return result


def test_hand_numbers_without_endings() -> None:
    returns, discount, k = n_step_return(column(1, 2, 4, 8), flags(4), flags(4), gamma=0.5, n=3)
    assert returns[:, 0].tolist() == [1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8]
    assert discount[:, 0].tolist() == [0.125, 0.125, 0.25, 0.5]
    assert k[:, 0].tolist() == [3, 3, 2, 1]
    assert returns.dtype == discount.dtype == np.float32
    assert k.dtype == np.int64


def test_termination_cuts_the_sum_and_the_bootstrap() -> None:
    returns, discount, k = n_step_return(column(1, 2, 4, 8), flags(4, 1), flags(4), gamma=0.5, n=3)
    assert returns[:, 0].tolist() == [2, 2, 8, 8]
    assert discount[:, 0].tolist() == [0, 0, 0.25, 0.5]
    assert k[:, 0].tolist() == [2, 1, 2, 1]


def test_truncation_cuts_the_sum_and_bootstraps_with_the_shorter_power() -> None:
    returns, discount, k = n_step_return(column(1, 2, 4, 8), flags(4), flags(4, 1), gamma=0.5, n=3)
    assert returns[:, 0].tolist() == [2, 2, 8, 8]
    assert discount[:, 0].tolist() == [0.25, 0.5, 0.25, 0.5]
    assert k[:, 0].tolist() == [2, 1, 2, 1]


def test_termination_after_a_truncation_belongs_to_another_episode() -> None:
    _, discount, _ = n_step_return(column(1, 1, 1), flags(3, 1), flags(3, 0), gamma=0.5, n=3)
    assert discount[:, 0].tolist() == [0.5, 0, 0.5]


def test_lanes_do_not_mix() -> None:
    reward = np.array([[1, 10], [2, 20]], np.float32)
    terminated = np.array([[True, False], [False, False]])
    returns, discount, _ = n_step_return(reward, terminated, np.zeros_like(terminated), gamma=0.5, n=2)
    assert returns.tolist() == [[1, 20], [2, 20]]
    assert discount.tolist() == [[0, 0.25], [0.5, 0.5]]


def test_one_step_is_the_reward_itself() -> None:
    fragment = make_fragment(1, num_steps=20, num_envs=5)
    returns, discount, k = n_step_return(
        fragment.reward, fragment.terminated, fragment.truncated, gamma=0.9, n=1
    )
    assert np.array_equal(returns, fragment.reward)
    assert np.array_equal(discount, np.where(fragment.terminated, np.float32(0), np.float32(0.9)))
    assert np.all(k == 1)


@pytest.mark.parametrize("n", [12, 13, 1000])
def test_n_beyond_the_end_is_the_discounted_sum(n: int) -> None:
    reward = np.random.default_rng(2).normal(size=(12, 3)).astype(np.float32)
    no = np.zeros(reward.shape, np.bool_)
    returns, discount, _ = n_step_return(reward, no, no, gamma=0.9, n=n)
    expected = np.stack([(0.9 ** np.arange(12 - t)) @ reward[t:].astype(np.float64) for t in range(12)])
    np.testing.assert_allclose(returns, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(discount[:, 0], 0.9 ** np.arange(12, 0, -1), rtol=1e-6)


def test_sum_is_accumulated_in_double_precision() -> None:
    reward = column(2.0**24, 1, 1)
    returns, _, _ = n_step_return(reward, flags(3), flags(3), gamma=1.0, n=3)
    assert returns[0, 0] == np.float32(2.0**24 + 2)  # in float32 each 1 would be lost


def test_reward_beyond_an_ending_has_no_influence_even_when_infinite() -> None:
    returns, _, _ = n_step_return(column(1, np.inf, 2), flags(3, 0), flags(3, 1), gamma=0.5, n=3)
    assert returns[0, 0] == 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 12),
    num_envs=st.integers(1, 4),
    n=st.integers(1, 14),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    end_probability=st.sampled_from([0.0, 0.2, 0.9]),
)
def test_equals_the_slow_twin(
    seed: int, num_steps: int, num_envs: int, n: int, gamma: float, end_probability: float
) -> None:
    fragment = make_fragment(seed, num_steps=num_steps, num_envs=num_envs, end_probability=end_probability)
    returns, discount, k = n_step_return(
        fragment.reward, fragment.terminated, fragment.truncated, gamma=gamma, n=n
    )
    twin = slow_transitions(fragment, gamma=gamma, n=n)
    assert returns.ravel().tolist() == [item.n_step_return for item in twin]
    assert discount.ravel().tolist() == [item.bootstrap_discount for item in twin]
    assert k.ravel().tolist() == [item.num_steps for item in twin]


@pytest.mark.parametrize(("gamma", "n", "match"), [(1.1, 1, "gamma"), (-0.1, 1, "gamma"), (0.9, 0, "n:")])
def test_settings_out_of_range_are_refused(gamma: float, n: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        n_step_return(column(1), flags(1), flags(1), gamma=gamma, n=n)


def test_columns_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        n_step_return(column(1, 2), flags(1), flags(2), gamma=0.9, n=1)
