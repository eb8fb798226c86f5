"""Wrappers around one environment. Imports gymnasium: import this inside functions only."""

from __future__ import annotations

from typing import Any

import gymnasium


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Play each action `repeat` times, or until the episode ends; rewards add up."""

    def __init__(self, env: gymnasium.Env[Any, Any], repeat: int) -> None:
        super().__init__(env)
        self._repeat = repeat

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one agent step: the sum of the rewards, and the rest as after the last repetition."""
        total = 0.0
        for _ in range(self._repeat):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, bool(terminated), bool(truncated), info
