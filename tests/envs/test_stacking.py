"""Stacks of frames against the plainest way to build them, over episodes that end at any time."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.envs.frame_stack import FrameStack
from ddrl.types import EnvSpec


def spec_of(shape: tuple[int, ...], num_frames: int, dtype: str = "uint8") -> EnvSpec:
    return EnvSpec("toy", shape, dtype, "discrete", (), action_sizes=(2,), frame_stack=num_frames)


def slow_stack(episode: list[np.ndarray], num_frames: int) -> np.ndarray:
    """The newest frames of one episode so far, oldest first, its first one standing in for those before it."""
    padded = [episode[0]] * num_frames + episode
    return np.stack(padded[-num_frames:])


@pytest.mark.parametrize("shape", [(5, 4), (3,), (), (4, 4, 3)])
@pytest.mark.parametrize("num_frames", [1, 2, 4, 5])
def test_against_the_slow_twin(shape: tuple[int, ...], num_frames: int) -> None:
    generator = np.random.default_rng(num_frames)
    spec = spec_of(shape, num_frames)
    stack, episodes = FrameStack(3, spec), [[], [], []]
    started = np.ones(3, np.bool_)
    for _ in range(60):
        observation = generator.integers(256, size=(3, *shape), dtype=np.uint8)
        for lane in range(3):
            episodes[lane] = [observation[lane]] if started[lane] else [*episodes[lane], observation[lane]]
        stacked = stack.push(observation, started)
        assert stacked.shape == (3, *spec.input_shape) and stacked.dtype == np.uint8
        for lane in range(3):
            expected = slow_stack(episodes[lane], num_frames).reshape(spec.input_shape)
            assert np.array_equal(stacked[lane], expected)
        started = generator.random(3) < 0.2


def test_one_frame_passes_through_without_a_copy() -> None:
    stack = FrameStack(2, spec_of((3,), 1))
    observation = np.zeros((2, 3), np.uint8)
    assert stack.push(observation, np.ones(2, np.bool_)) is observation
    assert FrameStack(2, spec_of((3, 3), 4)).push(np.zeros((2, 3, 3)), np.ones(2, np.bool_)).base is not None
