"""Tiny environments whose answers are known, so that learning can be tested in seconds.

Imports gymnasium: import this inside functions only.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

ENDLESS, TARGET = "ddrl/Endless-v0", "ddrl/Target-v0"
_TARGET_STEPS = 10


def register_toys() -> None:
    """Make the toys known to `gymnasium.make`; calling it again does nothing."""
    for env_id, name in ((ENDLESS, "Endless"), (TARGET, "Target")):
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=f"{__name__}:{name}")


class Endless(gymnasium.Env[np.ndarray, np.ndarray]):
    """Reward 1 each step whatever is done, and no end but the time limit: the value is 1 / (1 - gamma).

    The observation is always [1]; the action, one number in [-1, 1], changes nothing. An agent that takes the
    time limit for an outcome learns a smaller value.

    Args:
        max_steps: the episode is truncated after this many steps.
    """

    def __init__(self, max_steps: int = 100) -> None:
        self.observation_space = Box(0.0, 1.0, (1,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        self._max_steps = max_steps
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._step = 0
        return np.ones(1, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward 1; truncated at `max_steps`."""
        self._step += 1
        return np.ones(1, np.float32), 1.0, False, self._step >= self._max_steps, {}


class Target(gymnasium.Env[np.ndarray, np.ndarray]):
    """Hit the number that is shown: reward -(action - target)^2, a new target each step, 10 steps.

    Observation: the target, one number in [-1.5, 1.5]. Action: one number in [-2, 2]. The best return is 0;
    uniformly random actions give -20.8 on average (10 * (4/3 + 3/4)). The end is a truncation: what follows a
    step does not depend on it, so the best value is 0 everywhere.
    """

    def __init__(self) -> None:
        self.observation_space = Box(-1.5, 1.5, (1,), np.float32)
        self.action_space = Box(-2.0, 2.0, (1,), np.float32)
        self._target = np.zeros(1, np.float32)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with a target drawn uniformly."""
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward minus the squared distance between the action and the target that was shown."""
        self._step += 1
        reward = -float((action[0] - self._target[0]) ** 2)
        return self._draw(), reward, False, self._step >= _TARGET_STEPS, {}

    def _draw(self) -> np.ndarray:
        self._target = self.np_random.uniform(-1.5, 1.5, 1).astype(np.float32)
        return self._target.copy()
