"""Cut fragments into n-step transitions.

Here and in `ddrl.replay.trajectories` and `ddrl.replay.sequences` `terminated` and `truncated` become a discount, and
nowhere else; a truncated step is tied to its true final observation instead of the first one of the next episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.blocks import Block, block
from ddrl.returns import n_step_return
from ddrl.types import Fragment

_MAX_RETURN = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Windows:
    """The M = T * N transitions of one fragment, in order of time, environments of one step side by side.

    Invariant: 0 <= start, bootstrap < R. Each observation stands in the block once, however many transitions use it.

    Attributes:
        block: the observations of the trained steps, and of the context that their stacks reach into.
        start: [M] int64 row of s_t.
        bootstrap: [M] int64 row of s_{t+k}; where bootstrap_discount is 0 by termination it is a valid
            row without meaning.
        action: [M, *A] the action taken at s_t, dtype of the fragment.
        n_step_return: [M] float32.
        bootstrap_discount: [M] float32.
        td_error: [M] float32 size of the TD error of the policy that played; None where it told no values.
    """

    block: Block
    start: NDArray[np.int64]
    bootstrap: NDArray[np.int64]
    action: NDArray[Any]
    n_step_return: NDArray[np.float32]
    bootstrap_discount: NDArray[np.float32]
    td_error: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        """M."""
        return len(self.start)


def n_step_windows(fragment: Fragment, *, gamma: float, n: int, frame_stack: int = 1) -> Windows:
    """All transitions of `fragment` that are trained on.

    The C context steps give no transitions, and rows only as far as the first stacks reach back: what precedes a state
    is of no other use to a transition (sequences with burn-in are cut elsewhere).

    Args:
        fragment: T >= 1 steps; every truncated step must have its final observation.
        gamma: discount of one agent step, in [0, 1].
        n: most rewards summed, at least 1; fewer at an ending and at the fragment's end.
        frame_stack: K observations that a network sees at once.

    Raises:
        ValueError: the fragment has no step to train on, its final observations do not match its truncated steps, its
            values are no columns [C+T, N], its returns need not be finite, or gamma, n or frame_stack is out of range.
    """
    check_rewards(fragment, n)
    num_steps, context = fragment.num_steps, fragment.context
    rows = block(fragment, frame_stack, context=frame_stack - 1)
    after = rows.after[rows.num_steps - num_steps :]  # [T, N]
    returns, discount, k = n_step_return(
        fragment.reward[context:],
        fragment.terminated[context:],
        fragment.truncated[context:],
        gamma=gamma,
        n=n,
    )
    last = np.arange(num_steps)[:, None] + k - 1  # [T, N] the last step of each sum
    td_error = _td_error(fragment, returns, discount, last)
    return Windows(
        block=rows,
        start=rows.at[rows.num_steps - num_steps : -1].reshape(-1),
        bootstrap=np.take_along_axis(after, last, axis=0).reshape(-1),
        action=fragment.action[context:].reshape(-1, *fragment.action.shape[2:]),
        n_step_return=returns.reshape(-1),
        bootstrap_discount=discount.reshape(-1),
        td_error=None if td_error is None else td_error.reshape(-1),
    )


def check_rewards(fragment: Fragment, n: int) -> None:
    """Refuse finite rewards of which `n` may sum to what float32 does not hold.

    Raises:
        ValueError: n times the largest is more.
    """
    largest = float(np.abs(fragment.reward).max(initial=0.0))
    if not largest * min(n, len(fragment.reward)) <= _MAX_RETURN:
        raise ValueError(
            f"fragment: rewards of up to {largest:.3g} have no finite sum of n_step {n}; lower env.reward_scale"
        )


def _td_error(
    fragment: Fragment,
    returns: NDArray[np.float32],
    discount: NDArray[np.float32],
    last: NDArray[np.int64],
) -> NDArray[np.float32] | None:
    """[T, N] |R + discount * max_a Q(s_{t+k}, a) - Q(s_t, a_t)| by the values that the playing policy told.

    Source: Horgan et al. 2018, arXiv:1803.00933, section 3. It told none of final observations and of a fragment's last
    row; the value of the step before stands in.

    Raises:
        ValueError: only one of the columns is there, or of another shape or dtype.
    """
    values = [fragment.extras.get(name) for name in ("action_value", "state_value")]
    if all(value is None for value in values):
        return None
    for value in values:
        if value is None or value.shape != fragment.reward.shape or value.dtype != np.float32:
            raise ValueError(
                "fragment: action_value and state_value are not both float32 [T, N]; its worker plays another algorithm"
            )
    action_value, state_value = (value[fragment.context :] for value in values if value is not None)
    truncated = fragment.truncated[fragment.context :]
    told = last + 1 - (np.take_along_axis(truncated, last, axis=0) | (last == len(last) - 1))
    bootstrap = np.take_along_axis(state_value, told, axis=0)
    error: NDArray[np.float32] = np.abs(returns + discount * bootstrap - action_value)
    return error
