"""Wrappers around one environment. Imports gymnasium: import this inside functions only."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv


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


class Lanes(SyncVectorEnv):
    """Environments stepped in turn, of whose infos nothing is taken but the final observations.

    These are copied before the reset, which may write into the same array.
    """

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        """Called with final observation and info of an episode that ended; and with the info of each step."""
        if env_info.keys() != {"final_obs", "final_info"}:
            return vector_infos
        return super()._add_info(vector_infos, {"final_obs": deepcopy(env_info["final_obs"])}, env_num)
