"""Blocks by hand: where each observation lies, what follows a step, and what precedes a row in its stack."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.reference_returns import make_fragment

from ddrl.replay.blocks import block, check_finals, is_image, stacked
from ddrl.types import Fragment


def hand_fragment(*, context: int = 0, image: bool = False) -> Fragment:
    """Three steps of two lanes; lane 0 is truncated by step 1, lane 1 terminates with step 0.

    An observation is 10 * step + lane, the final one 99; images of it are 1 x 1.
    """
    made = make_fragment(0, num_steps=3 - context, num_envs=2, context=context, end_probability=0.0)
    made.truncated[1, 0] = made.terminated[0, 1] = True
    dtype, shape = (np.uint8, (1, 1)) if image else (np.float32, (1,))
    observation = (10 * np.arange(4)[:, None] + np.arange(2)).astype(dtype)
    return dataclasses.replace(
        made,
        observation=observation.reshape(4, 2, *shape),
        final_index=np.array([[1, 0]], np.int32),
        final_observation=np.full((1, *shape), 99, dtype),
    )


def test_vectors_lie_step_by_step() -> None:
    made = block(hand_fragment(), 3)
    assert made.rows[:, 0].tolist() == [0, 1, 10, 11, 20, 21, 30, 31, 99]
    assert made.at.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made.after.tolist() == [[2, 3], [8, 5], [6, 7]]
    assert made.back is not None and made.back.dtype == np.int32
    assert made.back.tolist() == [0, 0, 2, 0, 0, 2, 2, 2, 6]
    assert stacked(made, np.array([6, 7, 8]), 3).tolist() == [[20, 20, 30], [11, 21, 31], [0, 10, 99]]


def test_images_lie_lane_by_lane() -> None:
    made = block(hand_fragment(image=True), 3)
    assert made.rows[:, 0, 0].tolist() == [0, 10, 20, 30, 1, 11, 21, 31, 99]
    assert made.at.T.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made.after.T.tolist() == [[1, 8, 3], [5, 6, 7]]
    assert made.back is not None
    assert made.back.tolist() == [0, 1, 0, 1, 0, 0, 1, 1, 7]
    stacks = stacked(made, np.array([3, 7, 8]), 3)
    assert stacks.shape == (3, 3, 1, 1)
    assert stacks[..., 0, 0].tolist() == [[20, 20, 30], [11, 21, 31], [0, 10, 99]]


@pytest.mark.parametrize(
    ("context", "first_row", "finals"), [(None, 0, 1), (5, 0, 1), (2, 0, 1), (1, 1, 1), (0, 2, 0)]
)
def test_only_so_much_context_is_kept(context: int | None, first_row: int, finals: int) -> None:
    fragment = hand_fragment(context=2)
    made = block(fragment, 2, context=context)
    assert made.num_steps == 3 - first_row
    assert made.at.shape == (4 - first_row, 2)
    assert made.rows[made.at].tolist() == fragment.observation[first_row:].tolist()
    assert len(made.rows) == made.at.size + finals
    if finals:
        assert made.rows[made.after[1 - first_row, 0]].tolist() == [99]


def test_a_stack_reaches_no_farther_than_what_is_kept() -> None:
    made = block(hand_fragment(context=2), 4, context=1)
    assert stacked(made, made.at[0], 4).tolist() == [[10] * 4, [11] * 4]
    assert stacked(made, made.at[2], 4).tolist() == [[20, 20, 20, 30], [11, 11, 21, 31]]


def test_nothing_is_stacked_of_one() -> None:
    made = block(hand_fragment(), 1)
    assert made.back is None
    assert stacked(made, np.array([8, 0]), 1).tolist() == [[99], [0]]


def test_images_from_the_wire_are_not_copied() -> None:
    lanes = np.zeros((2, 4, 6, 6), np.uint8)  # lane-major memory, as the codec gives it
    fragment = make_fragment(0, num_steps=3, num_envs=2, end_probability=0.0)
    fragment = dataclasses.replace(
        fragment,
        observation=lanes.swapaxes(0, 1),
        final_observation=np.zeros((0, 6, 6), np.uint8),
    )
    assert is_image(fragment.observation.dtype, (6, 6))
    assert np.shares_memory(block(fragment, 4).rows, lanes)


@pytest.mark.parametrize(
    ("index", "num_finals"), [([], 0), ([[1, 0], [1, 0]], 2), ([[1, 1]], 1), ([[1, 2]], 1), ([[0, 2]], 1)]
)
def test_final_observations_that_do_not_match_are_refused(index: list[list[int]], num_finals: int) -> None:
    fragment = dataclasses.replace(
        hand_fragment(),
        final_index=np.array(index, np.int32).reshape(-1, 2),
        final_observation=np.zeros((num_finals, 1), np.float32),
    )
    for refuses in (check_finals, lambda one: block(one, 1)):
        with pytest.raises(ValueError, match=f"{num_finals} final observations for 1 truncated steps"):
            refuses(fragment)


def test_finals_of_context_steps_are_not_checked() -> None:
    """They belong to an earlier fragment, and no step that is learned from leads there."""
    fragment = dataclasses.replace(
        hand_fragment(),
        context=2,
        final_index=np.zeros((0, 2), np.int32),
        final_observation=np.zeros((0, 1), np.float32),
    )
    check_finals(fragment)
    with pytest.raises(ValueError, match="T = 0"):
        check_finals(dataclasses.replace(fragment, context=len(fragment.reward)))


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("uint8", (84, 84), True),
        (np.dtype(np.uint8), (84, 84, 3), True),
        ("uint8", (128,), False),
        ("int8", (84, 84), False),
        (np.float32, (84, 84), False),
    ],
)
def test_images_are_bytes_of_two_axes(dtype: Any, shape: tuple[int, ...], expected: bool) -> None:
    assert is_image(dtype, shape) is expected


def test_a_stack_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="frame_stack: 0"):
        block(hand_fragment(), 0)
