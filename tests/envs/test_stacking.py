"""Stacks of frames against the plainest way to build them, over episodes that end at any time."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.envs.frame_stack import FrameStack
from ddrl.types import EnvSpec


def slow_stack(episode: list[np.ndarray], num_frames: int) -> np.ndarray:
    """The newest frames of one episode so far, oldest first, its first one standing in for those before it."""
    return np.stack(([episode[0]] * num_frames + episode)[-num_frames:])


@pytest.mark.parametrize("shape", [(5, 4), (3,), (), (4, 4, 3)])
@pytest.mark.parametrize("num_frames", [1, 2, 4, 5])
def test_against_the_slow_twin(shape: tuple[int, ...], num_frames: int) -> None:
    generator = np.random.default_rng(num_frames)
    spec = EnvSpec("toy", shape, "uint8", "discrete", (), action_sizes=(2,), frame_stack=num_frames)
    stack, episodes = FrameStack(3, spec), [[], [], []]
    started = np.ones(3, np.bool_)
    for _ in range(60):
        observation = generator.integers(256, size=(3, *shape), dtype=np.uint8)
        for lane in range(3):
            episodes[lane] = [observation[lane]] if started[lane] else [*episodes[lane], observation[lane]]
        stacked = stack.push(observation, started)
        assert stacked.dtype == np.uint8 and (stacked is observation) == (num_frames == 1)
        expected = np.stack([slow_stack(episode, num_frames) for episode in episodes])
        np.testing.assert_array_equal(stacked, expected.reshape(3, *spec.input_shape))
        started = generator.random(3) < 0.2
