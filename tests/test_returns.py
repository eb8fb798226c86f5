"""n-step returns: hand numbers, identities, and a slow twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import slow_return

from ddrl.returns import n_step_return


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def flags(length: int, *at: int) -> np.ndarray:
    return np.isin(np.arange(length), at)[:, None]


@pytest.mark.parametrize(
    ("terminated", "truncated", "returns", "discounts", "num_rewards"),
    [
        ([], [], [1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8], [0.125, 0.125, 0.25, 0.5], [3, 3, 2, 1]),
        ([1], [], [2, 2, 8, 8], [0, 0, 0.25, 0.5], [2, 1, 2, 1]),
        ([], [1], [2, 2, 8, 8], [0.25, 0.5, 0.25, 0.5], [2, 1, 2, 1]),
        ([1], [0], [1, 2, 8, 8], [0.5, 0, 0.25, 0.5], [1, 1, 2, 1]),  # of another episode
    ],
)
def test_hand_numbers(
    terminated: list[int], truncated: list[int], returns: list[float], discounts: list[float], num_rewards: list[int]
) -> None:  # fmt: skip
    found = n_step_return(column(1, 2, 4, 8), flags(4, *terminated), flags(4, *truncated), gamma=0.5, n=3)
    assert [values[:, 0].tolist() for values in found] == [returns, discounts, num_rewards]
    assert [values.dtype for values in found] == [np.float32, np.float32, np.int64]


def test_sum_is_accumulated_in_double_precision() -> None:
    returns, _, _ = n_step_return(column(2.0**24, 1, 1), flags(3), flags(3), gamma=1.0, n=3)
    assert returns[0, 0] == np.float32(2.0**24 + 2)  # in float32 each 1 would be lost


def test_reward_beyond_an_ending_has_no_influence_even_when_infinite() -> None:
    returns, _, _ = n_step_return(column(1, np.inf, 2), flags(3, 0), flags(3, 1), gamma=0.5, n=3)
    assert returns[0, 0] == 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), num_steps=st.integers(1, 12), num_envs=st.integers(1, 4), n=st.integers(1, 14),
    gamma=st.sampled_from([0.0, 0.5, 1.0]), end_rate=st.sampled_from([0.0, 0.2, 0.9]),
)  # fmt: skip
def test_equals_the_slow_twin(
    seed: int, num_steps: int, num_envs: int, n: int, gamma: float, end_rate: float
) -> None:
    random, shape = np.random.default_rng(seed), (num_steps, num_envs)
    reward = random.integers(-8, 9, shape).astype(np.float32)
    ended, terminates = random.random(shape) < end_rate, random.random(shape) < 0.5
    columns = (reward, ended & terminates, ended & ~terminates)
    found = np.stack(n_step_return(*columns, gamma=gamma, n=n), axis=-1)
    for t, lane in np.ndindex(shape):
        twin = slow_return(*(values[t:, lane] for values in columns), gamma=gamma, n=n)
        assert found[t, lane].tolist() == list(twin)


@pytest.mark.parametrize(("gamma", "n", "match"), [(1.1, 1, "gamma"), (-0.1, 1, "gamma"), (0.9, 0, "n:")])
def test_settings_out_of_range_are_refused(gamma: float, n: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        n_step_return(column(1), flags(1), flags(1), gamma=gamma, n=n)


def test_columns_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        n_step_return(column(1, 2), flags(1), flags(2), gamma=0.9, n=1)
