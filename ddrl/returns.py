"""Targets of learning from rewards and endings: pure functions on time-major [T, N] arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def n_step_return(
    reward: NDArray[Any],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    *,
    gamma: float,
    n: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Sum of the next n discounted rewards, and the discount of the state that it bootstraps from.

    For each start t the sum uses k <= n steps: it stops with the step that terminates or truncates the
    episode, and at the fragment's end. Only termination removes the bootstrap: a time limit, or the end
    of a fragment, is not an outcome, so both bootstrap with the shorter power gamma^k.
    Source: Sutton and Barto 2018, section 7.1; Horgan et al. 2018, arXiv:1803.00933, section 4.1, whose
    cut at the end of a buffer is the same.

    Args:
        reward: [T, N] r_t, the reward of the step from s_t, in training units.
        terminated: [T, N] bool, step t ended the episode by its own rules; wins where both are set.
        truncated: [T, N] bool, step t was the last one before the episode was cut.
        gamma: discount of one step, in [0, 1].
        n: most steps summed, at least 1; n >= T sums to the fragment's end.

    Returns:
        n_step_return: [T, N] float32 sum of gamma^i * r_{t+i} for i < k, accumulated in float64.
        bootstrap_discount: [T, N] float32 gamma^k, or 0 where the episode terminated within the k steps.
        k: [T, N] int64 in 1..n, the steps that were used.

    Raises:
        ValueError: gamma or n out of range, or columns of different shapes.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma: {gamma!r} is no discount; use a number from 0 to 1")
    if n < 1:
        raise ValueError(f"n: {n!r} sums no reward; use at least 1")
    if reward.ndim != 2 or reward.shape != terminated.shape or reward.shape != truncated.shape:
        raise ValueError(
            f"reward, terminated, truncated: shapes {reward.shape}, {terminated.shape}, {truncated.shape}; "
            "expected the same [T, N] for all"
        )
    num_steps = len(reward)
    ended = terminated | truncated  # [T, N]
    total = np.zeros(reward.shape, np.float64)
    k = np.zeros(reward.shape, np.int64)
    lost = np.zeros(reward.shape, np.bool_)  # terminated within the k steps
    alive = np.ones(reward.shape, np.bool_)  # the sum from t has not met an ending yet
    for i in range(min(n, num_steps)):
        last = num_steps - i  # starts whose i-th step lies in the fragment
        going = alive[:last]
        # np.add(where=) rather than a product with the mask: a masked infinite reward must not give NaN.
        np.add(total[:last], gamma**i * reward[i:].astype(np.float64), out=total[:last], where=going)
        k[:last] += going
        lost[:last] |= going & terminated[i:]
        going &= ~ended[i:]
    bootstrap_discount = np.where(lost, 0.0, np.power(float(gamma), k))
    return total.astype(np.float32), bootstrap_discount.astype(np.float32), k
