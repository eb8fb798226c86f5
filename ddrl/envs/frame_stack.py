"""Stacks of the newest observations, the inputs of a policy that plays.

Observations are sent and stored one by one (K is `EnvSpec.frame_stack`); learners rebuild the same stacks.
"""

from __future__ import annotations

import numpy as np

from ddrl.types import EnvSpec


class FrameStack:
    """The K newest observations of N environments, oldest first; an episode's first one fills the places before it.

    K = 1 returns observations as they are. Otherwise the stacks are views of a buffer that the next call changes.

    Args:
        num_envs: N.
        spec: spaces of the environment.
    """

    def __init__(self, num_envs: int, spec: EnvSpec) -> None:
        self._num_frames = spec.frame_stack
        self._input_shape = spec.input_shape
        self._end = self._num_frames  # the newest frames are those before it
        if self._num_frames > 1:
            # Twice the room: frames move back only every K + 1 steps.
            shape = (num_envs, 2 * self._num_frames, *spec.observation_shape)
            self._frames = np.zeros(shape, spec.observation_dtype)

    def push(self, observation: np.ndarray, started: np.ndarray) -> np.ndarray:
        """Add an observation of every environment.

        Args:
            observation: [N, *O].
            started: [N] bool, where it is the first of an episode.

        Returns:
            [N, *I] stacks.
        """
        if self._num_frames == 1:
            return observation
        num = self._num_frames
        if self._end == self._frames.shape[1]:
            self._frames[:, : num - 1] = self._frames[:, self._end - num + 1 :]
            self._end = num - 1
        self._frames[:, self._end] = observation
        self._end += 1
        if started.any():
            self._frames[started, self._end - num : self._end] = observation[started][:, None]
        return self._frames[:, self._end - num : self._end].reshape(-1, *self._input_shape)
