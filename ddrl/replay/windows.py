"""Cut a fragment into n-step transitions.

The only place where `terminated` and `truncated` become a discount, and where a truncated step is tied
to its true final observation instead of the first one of the next episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.returns import n_step_return
from ddrl.types import Fragment


@dataclass(frozen=True)
class Windows:
    """The M = T * N transitions of one fragment, in order of time, environments of one step side by side.

    Invariant: 0 <= start, bootstrap < R. Each observation stands in `rows` once, however many
    transitions use it.

    Attributes:
        rows: [R, *O] the (T + 1) * N observations after the context, row t * N + lane, then the final
            observations of the truncated steps; R = (T + 1) * N + their number.
        start: [M] int64 row of s_t.
        bootstrap: [M] int64 row of s_{t+k}; where bootstrap_discount is 0 by termination it is a valid
            row without meaning.
        action: [M, *A] the action taken at s_t, dtype of the fragment.
        n_step_return: [M] float32.
        bootstrap_discount: [M] float32.
    """

    rows: NDArray[Any]
    start: NDArray[np.int64]
    bootstrap: NDArray[np.int64]
    action: NDArray[Any]
    n_step_return: NDArray[np.float32]
    bootstrap_discount: NDArray[np.float32]

    def __len__(self) -> int:
        """M."""
        return len(self.start)


def n_step_windows(fragment: Fragment, *, gamma: float, n: int) -> Windows:
    """All transitions of `fragment` that are trained on.

    The C context steps give neither transitions nor rows: what precedes a state is of no use to a
    transition (sequences with burn-in are cut elsewhere).

    Args:
        fragment: T >= 1 steps; every truncated step must have its final observation.
        gamma: discount of one agent step, in [0, 1].
        n: most rewards summed, at least 1; fewer at an ending and at the fragment's end.

    Raises:
        ValueError: the fragment has no step to train on, its final observations do not match its
            truncated steps, or gamma or n is out of range.
    """
    num_steps, num_envs, context = fragment.num_steps, fragment.num_envs, fragment.context
    if num_steps < 1 or num_envs < 1:
        raise ValueError(
            f"fragment: T = {num_steps}, N = {num_envs}; at least one step of one lane is needed"
        )
    truncated = fragment.truncated[context:]
    returns, discount, k = n_step_return(
        fragment.reward[context:], fragment.terminated[context:], truncated, gamma=gamma, n=n
    )
    after = np.arange(num_envs, (num_steps + 1) * num_envs).reshape(num_steps, num_envs)  # row after step t
    rows = fragment.observation[context:].reshape(-1, *fragment.observation.shape[2:])
    if truncated.any() or len(fragment.final_index):
        in_use = fragment.final_index[:, 0] >= context
        step, lane = (fragment.final_index[in_use] - (context, 0)).T
        has_final = np.zeros_like(truncated)
        has_final[step, lane] = True
        if len(step) != np.count_nonzero(truncated) or not np.array_equal(has_final, truncated):
            raise ValueError(
                f"fragment: {len(step)} final observations for {np.count_nonzero(truncated)} truncated "
                "steps; each truncated step needs exactly its own"
            )
        after[step, lane] = len(rows) + np.arange(len(step))
        rows = np.concatenate([rows, fragment.final_observation[in_use]])
    last = np.arange(num_steps)[:, None] + k - 1  # [T, N] the last step of each sum
    return Windows(
        rows=rows,
        start=np.arange(num_steps * num_envs),
        bootstrap=np.take_along_axis(after, last, axis=0).reshape(-1),
        action=fragment.action[context:].reshape(-1, *fragment.action.shape[2:]),
        n_step_return=returns.reshape(-1),
        bootstrap_discount=discount.reshape(-1),
    )
