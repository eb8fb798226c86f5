"""Lay fragments side by side as trajectories, for learning on-policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.blocks import block, check_finals, stacked
from ddrl.types import Fragment, Trajectories


def trajectories(fragments: Sequence[Fragment], *, gamma: float, frame_stack: int = 1) -> Trajectories:
    """All transitions of `fragments`, side by side; those of one producer that follow each other are joined.

    The C context steps give neither transitions nor rows; stacks reach into them. The action is the column `raw_action`
    where there is one: what the policy drew, before it was scaled and clipped for the environment.

    Args:
        fragments: at least one, in the order of the stream, each one having passed `check_trajectory`.
        gamma: discount of one agent step, in [0, 1].
        frame_stack: K observations that a network sees at once.

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
            rows, start, after = _stacked(fragment, frame_stack)
            at = slice(step, step + fragment.num_steps)
            row[at, here] = num_rows + start
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
    check_finals(fragment)


def _drawn(fragment: Fragment) -> NDArray[Any]:
    """[C+T, N, *A] the actions as the policy drew them."""
    return fragment.extras.get("raw_action", fragment.action)


def _stacked(
    fragment: Fragment, frame_stack: int
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Rows [R, *I] of the steps after the context; [T, N] row before each step, and of the true one after it.

    Raises:
        ValueError: there is no step, or the final observations do not match the truncated steps.
    """
    frames = block(fragment, frame_stack, context=frame_stack - 1)
    context = frames.num_steps - fragment.num_steps
    if frame_stack == 1:
        return frames.rows, frames.at[:-1], frames.after
    used = np.zeros(len(frames.rows), np.bool_)
    used[frames.at[context:]] = True
    used[frames.after[context:]] = True
    number = np.cumsum(used) - 1
    stacks = stacked(frames, np.flatnonzero(used), frame_stack)
    return stacks, number[frames.at[context:-1]], number[frames.after[context:]]
