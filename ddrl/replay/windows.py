"""Cut fragments into n-step transitions, or lay them side by side as trajectories.

The only place where `terminated` and `truncated` become a discount, and where a truncated step is tied
to its true final observation instead of the first one of the next episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.returns import n_step_return
from ddrl.types import Fragment, Trajectories


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
    rows, after = _observation_rows(fragment)
    returns, discount, k = n_step_return(
        fragment.reward[context:],
        fragment.terminated[context:],
        fragment.truncated[context:],
        gamma=gamma,
        n=n,
    )
    last = np.arange(num_steps)[:, None] + k - 1  # [T, N] the last step of each sum
    return Windows(
        rows=rows,
        start=np.arange(num_steps * num_envs),
        bootstrap=np.take_along_axis(after, last, axis=0).reshape(-1),
        action=fragment.action[context:].reshape(-1, *fragment.action.shape[2:]),
        n_step_return=returns.reshape(-1),
        bootstrap_discount=discount.reshape(-1),
    )


def trajectories(fragments: Sequence[Fragment], *, gamma: float) -> Trajectories:
    """All transitions of `fragments`, side by side; those of one producer that follow each other are joined.

    The C context steps give neither transitions nor rows. The action is the column `raw_action` where there is one:
    what the policy drew, before it was scaled and clipped for the environment.

    Args:
        fragments: at least one, in the order of the stream, each one having passed `check_trajectory`.
        gamma: discount of one agent step, in [0, 1].

    Raises:
        ValueError: final observations do not match the truncated steps (see `check_trajectory` for the rest).
    """
    chains: dict[tuple[int, int, int], list[list[Fragment]]] = {}
    for fragment in fragments:
        known = chains.setdefault((fragment.producer, fragment.incarnation, fragment.num_envs), [])
        if known and known[-1][-1].seq + 1 == fragment.seq:
            known[-1].append(fragment)
        else:
            known.append([fragment])
    lanes = [chain for known in chains.values() for chain in known]
    num_steps = max(sum(fragment.num_steps for fragment in chain) for chain in lanes)
    shape = (num_steps, sum(chain[0].num_envs for chain in lanes))
    first = _drawn(fragments[0])
    row, next_row = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    valid, continues = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    reward, discount, log_prob = (np.zeros(shape, np.float32) for _ in range(3))
    action = np.zeros((*shape, *first.shape[2:]), first.dtype)
    observations: list[NDArray[Any]] = []
    num_rows = lane = 0
    for chain in lanes:
        step, here = 0, slice(lane, lane + chain[0].num_envs)
        for fragment in chain:
            context, last = fragment.context, fragment is chain[-1]
            rows, after = _observation_rows(fragment)
            at = slice(step, step + fragment.num_steps)
            row[at, here] = num_rows + np.arange(after.size).reshape(after.shape)
            next_row[at, here] = num_rows + after
            valid[at, here] = True
            action[at, here] = _drawn(fragment)[context:]
            reward[at, here] = fragment.reward[context:]
            discount[at, here] = np.where(fragment.terminated[context:], 0.0, gamma)
            continues[at, here] = ~(fragment.terminated | fragment.truncated)[context:]
            continues[at.stop - 1, here] &= not last
            log_prob[at, here] = fragment.extras["behavior_log_prob"][context:]
            observations.append(rows)
            num_rows += len(rows)
            step = at.stop
        lane = here.stop
    return Trajectories(
        observation=np.concatenate(observations),
        row=row,
        next_row=next_row,
        valid=valid,
        action=action,
        reward=reward,
        discount=discount,
        continues=continues,
        behavior_log_prob=log_prob,
    )


def check_trajectory(fragment: Fragment) -> None:
    """Refuse a fragment that cannot be learned from on-policy.

    Raises:
        ValueError: it has no step, no log probabilities of its actions, columns of another shape, or final
            observations that do not match its truncated steps.
    """
    log_prob = fragment.extras.get("behavior_log_prob")
    if log_prob is None or log_prob.shape != fragment.reward.shape or log_prob.dtype != np.float32:
        raise ValueError(
            "fragment: no column behavior_log_prob, float32 [T, N]; its worker plays another algorithm"
        )
    drawn, action = _drawn(fragment), fragment.action
    if (drawn.shape, drawn.dtype) != (action.shape, action.dtype):
        raise ValueError(
            "fragment: raw_action differs in shape or dtype from action; its worker plays another algorithm"
        )
    _observation_rows(fragment)


def _drawn(fragment: Fragment) -> NDArray[Any]:
    """[C+T, N, *A] the actions as the policy drew them."""
    return fragment.extras.get("raw_action", fragment.action)


def _observation_rows(fragment: Fragment) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Every observation once, and where the true one after each step stands.

    Returns:
        rows: [R, *O] the (T + 1) * N observations after the context, row t * N + lane, then the final observations.
        after: [T, N] row of the observation after step t: after a truncation the final one.

    Raises:
        ValueError: there is no step, or the final observations do not match the truncated steps.
    """
    num_steps, num_envs, context = fragment.num_steps, fragment.num_envs, fragment.context
    if num_steps < 1 or num_envs < 1:
        raise ValueError(
            f"fragment: T = {num_steps}, N = {num_envs}; at least one step of one lane is needed"
        )
    truncated = fragment.truncated[context:]
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
    return rows, after
