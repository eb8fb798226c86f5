"""An environment of noise, for measurements."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Noise(gymnasium.Env[np.ndarray, Any]):
    """Observations, rewards and ends at random.

    Args:
        shape: of observations; images of bytes if it has two dimensions.
        num_actions: discrete ones; 0: six numbers in -1..1.
    """

    def __init__(self, shape: list[int], num_actions: int = 0) -> None:
        self._is_image = len(shape) == 2
        low, high, dtype = (0, 255, np.uint8) if self._is_image else (-np.inf, np.inf, np.float32)
        self.observation_space = gymnasium.spaces.Box(low, high, tuple(shape), dtype)
        self.action_space = (
            gymnasium.spaces.Discrete(num_actions) if num_actions else gymnasium.spaces.Box(-1, 1, (6,))
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Ignore the action."""
        random = self.np_random
        return self._observe(), float(random.normal()), bool(random.random() < 0.005), False, {}

    def _observe(self) -> np.ndarray:
        shape = self.observation_space.shape
        if self._is_image:
            return self.np_random.integers(0, 256, shape, np.uint8)
        return self.np_random.normal(size=shape).astype(np.float32)
