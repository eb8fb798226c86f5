"""The observations of one fragment, each once, and how stacks of frames are read from them.

Frames are sent and stored one by one. A stack of K, oldest first, ends with some row and is read backwards: K - 1 times
`back` rows back, which stays where it is at the first row of an episode, so that this row repeats instead of one of the
episode before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ddrl.types import Fragment


@dataclass(frozen=True)
class Block:
    """R observation rows of S = C + T steps of N lanes, C being the context that was kept.

    The rows of all steps come first, then the final observations of truncated steps in the fragment's order. Images lie
    lane by lane, as they came over the wire, so that a stack is one piece of memory; everything else step by step.

    Attributes:
        rows: [R, *O] may share memory with the fragment; R = (S + 1) * N + the truncated steps.
        at: [S+1, N] int64 row of each observation.
        after: [S, N] int64 row of the true observation after each step: the final one after a truncation. Without
            meaning after a termination.
        back: [R] int32 how many rows before it lies the one that precedes it in its stack; 0 at an episode's first row
            and at the first row kept of a lane. None where nothing is stacked.
    """

    rows: NDArray[Any]
    at: NDArray[np.int64]
    after: NDArray[np.int64]
    back: NDArray[np.int32] | None

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.after)


def block(fragment: Fragment, frame_stack: int, *, context: int | None = None) -> Block:
    """The observation rows of `fragment`.

    Args:
        fragment: T >= 1 steps; every truncated step that is kept must have its final observation.
        frame_stack: K, at least 1; with 1 there is no `back`.
        context: most leading context steps kept, None for all that there are. The stack of a row is right from K - 1
            rows after the first one kept, or at once where the lane's first episode begins there.

    Raises:
        ValueError: there is no step, or the final observations do not match the truncated steps.
    """
    _check_size(fragment)
    if frame_stack < 1:
        raise ValueError(f"frame_stack: {frame_stack} stacks nothing; use at least 1")
    skipped = 0 if context is None else max(fragment.context - context, 0)
    observation = fragment.observation[skipped:]
    num_rows, num_envs = observation.shape[:2]  # rows per lane
    if is_image(observation.dtype, observation.shape[2:]):
        rows = observation.swapaxes(0, 1).reshape(-1, *observation.shape[2:])
        at = np.arange(num_envs * num_rows).reshape(num_envs, num_rows).T
    else:
        rows = observation.reshape(-1, *observation.shape[2:])
        at = np.arange(num_rows * num_envs).reshape(num_rows, num_envs)
    truncated = fragment.truncated[skipped:]
    after = at[1:].copy()
    step, lane, final = _finals(fragment, skipped)
    final_row = len(rows) + np.arange(len(step))
    after[step, lane] = final_row
    back = None
    if frame_stack > 1:
        back = np.zeros(len(rows) + len(step), np.int32)
        ended = truncated | fragment.terminated[skipped:]
        back[at[1:]] = np.where(ended, 0, at[1:] - at[:-1])
        back[final_row] = final_row - at[step, lane]
    if len(final):
        rows = np.concatenate([rows, final])
    return Block(rows=rows, at=at, after=after, back=back)


def stacked(frames: Block, rows: NDArray[np.int64], frame_stack: int) -> NDArray[Any]:
    """The stacks of K = `frame_stack` that end with `rows` [M]: [M, *I] as `EnvSpec.input_shape` has them, copied."""
    if frame_stack == 1:
        return frames.rows[rows]
    assert frames.back is not None, "the block was made for stacks"
    newest = [rows]
    for _ in range(frame_stack - 1):
        newest.append(newest[-1] - frames.back[newest[-1]])
    return as_input(frames.rows[np.stack(newest[::-1], axis=1)], 1, frame_stack)


def as_input(stacks: NDArray[Any], num_axes: int, frame_stack: int) -> NDArray[Any]:
    """[..., K, *O] behind `num_axes` axes, as [..., *I] of `EnvSpec.input_shape`: stacked vectors are joined."""
    if frame_stack > 1 and stacks.ndim == num_axes + 2:
        return stacks.reshape(*stacks.shape[:num_axes], frame_stack * stacks.shape[-1])
    return stacks


def is_image(dtype: DTypeLike, shape: Sequence[int]) -> bool:
    """Whether observations `*O` lie lane by lane, as the codec has them, and may be held compressed: uint8, 2 axes."""
    return np.dtype(dtype) == np.uint8 and len(shape) >= 2


def check_finals(fragment: Fragment) -> None:
    """Refuse what `block` would of the steps behind the context, without copying an observation.

    Raises:
        ValueError: there is no step, or the final observations do not match the truncated steps.
    """
    _check_size(fragment)
    _finals(fragment, fragment.context)


def _check_size(fragment: Fragment) -> None:
    if fragment.num_steps < 1 or fragment.num_envs < 1:
        raise ValueError(
            f"fragment: T = {fragment.num_steps}, N = {fragment.num_envs}; at least one step of one lane is needed"
        )


def _finals(fragment: Fragment, skipped: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Step and lane of each truncation behind the first `skipped` steps, and its final observation.

    Raises:
        ValueError: they do not match.
    """
    truncated = fragment.truncated[skipped:]
    num_truncated = np.count_nonzero(truncated)
    in_use = fragment.final_index[:, 0] >= skipped
    step, lane = (fragment.final_index[in_use].astype(np.int64) - (skipped, 0)).T
    num_envs = truncated.shape[1]
    matches = len(step) == num_truncated and bool(np.all((lane >= 0) & (lane < num_envs)))
    if not matches or not np.array_equal(np.sort(step * num_envs + lane), np.flatnonzero(truncated)):
        raise ValueError(
            f"fragment: {len(step)} final observations for {num_truncated} truncated steps; each truncated step needs "
            "exactly its own"
        )
    return step, lane, fragment.final_observation[in_use]
