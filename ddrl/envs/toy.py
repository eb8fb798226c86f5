"""Tiny environments whose answers are known, so that learning can be tested in seconds.

Imports gymnasium: import this inside functions only.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

ENDLESS, TARGET = "ddrl/Endless-v0", "ddrl/Target-v0"
PICK, PAIRS, SPOT = "ddrl/Pick-v0", "ddrl/Pairs-v0", "ddrl/Spot-v0"
_NAMES = {ENDLESS: "Endless", TARGET: "Target", PICK: "Pick", PAIRS: "Pairs", SPOT: "Spot"}
_STEPS = 10  # of an episode where the answer changes each step


def register_toys() -> None:
    """Make the toys known to `gymnasium.make`; calling it again does nothing."""
    for env_id, name in _NAMES.items():
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
        return self._draw(), reward, False, self._step >= _STEPS, {}

    def _draw(self) -> np.ndarray:
        self._target = self.np_random.uniform(-1.5, 1.5, 1).astype(np.float32)
        return self._target.copy()


class Pick(gymnasium.Env[np.ndarray, np.int64]):
    """Name what is shown: reward 1 for the number of the bright entry, a new one each step, 10 steps.

    Observation: one-hot of 4. Action: one of 4. The best return is 10; uniformly random actions give 2.5 on
    average. The end is a truncation, so the value of the best policy is 1 / (1 - gamma) everywhere.
    """

    def __init__(self) -> None:
        self.observation_space = Box(0.0, 1.0, (4,), np.float32)
        self.action_space = Discrete(4)
        self._answer = 0
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with an answer drawn uniformly."""
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward 1 if the action is the answer that was shown, else 0."""
        self._step += 1
        reward = float(action == self._answer)
        return self._draw(), reward, False, self._step >= _STEPS, {}

    def _draw(self) -> np.ndarray:
        self._answer = int(self.np_random.integers(4))
        observation = np.zeros(4, np.float32)
        observation[self._answer] = 1.0
        return observation


class Pairs(gymnasium.Env[np.ndarray, np.ndarray]):
    """Name two things at once: reward 0.5 for each that is right, new ones each step, 10 steps.

    Observation: a one-hot of 3 and one of 4, in one vector. Action: [one of 3, one of 4]. The best return is
    10; uniformly random actions give 10 * 0.5 * (1/3 + 1/4) = 2.92 on average. The end is a truncation.
    """

    def __init__(self) -> None:
        self.observation_space = Box(0.0, 1.0, (7,), np.float32)
        self.action_space = MultiDiscrete([3, 4])
        self._answers = np.zeros(2, np.int64)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with answers drawn uniformly, each by itself."""
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward 0.5 for each number of the action that is the answer that was shown."""
        self._step += 1
        reward = 0.5 * float((np.asarray(action) == self._answers).sum())
        return self._draw(), reward, False, self._step >= _STEPS, {}

    def _draw(self) -> np.ndarray:
        self._answers = self.np_random.integers((3, 4))
        observation = np.zeros(7, np.float32)
        observation[self._answers + (0, 3)] = 1.0
        return observation


class Spot(gymnasium.Env[np.ndarray, np.int64]):
    """Say in which quarter of an image the light is: reward 1 if right, a new image each step, 10 steps.

    Observation: uint8 [8, 8, 1], 0 but for one pixel of 255, anywhere. Action: its quadrant, 2 * lower half +
    right half. The best return is 10; uniformly random actions give 2.5 on average. The end is a truncation.
    """

    def __init__(self) -> None:
        self.observation_space = Box(0, 255, (8, 8, 1), np.uint8)
        self.action_space = Discrete(4)
        self._answer = 0
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with a pixel drawn uniformly."""
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward 1 if the action is the quadrant that was shown, else 0."""
        self._step += 1
        reward = float(action == self._answer)
        return self._draw(), reward, False, self._step >= _STEPS, {}

    def _draw(self) -> np.ndarray:
        row, column = self.np_random.integers(8, size=2)
        self._answer = 2 * int(row >= 4) + int(column >= 4)
        image = np.zeros((8, 8, 1), np.uint8)
        image[row, column] = 255
        return image
