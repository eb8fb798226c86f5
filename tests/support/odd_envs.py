"""Environments of users that do what Gymnasium allows, but few do."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


class Counts(gymnasium.Env[np.ndarray, Any]):
    """Shows [steps of the episode, 200] in one array that it uses again, and speaks of lives in its infos.

    Episodes are truncated after 5 steps; the reward is 1.

    Args:
        dtype: of the observations.
        continuous: actions are numbers.
    """

    def __init__(self, dtype: str = "int64", *, continuous: bool = False) -> None:
        self.observation_space = Box(0, 200, (2,), np.dtype(dtype).type)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)
        self._shown = np.array([0, 200], dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._shown[0] = 0
        return self._shown, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._shown[0] += 1
        info = {"life_lost": True, "final_obs": None, "lives": 2}
        return self._shown, 1.0, False, bool(self._shown[0] == 5), info


class Endless(Counts):
    """Counts without an end."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._shown, 1.0, False, False, {}


class Parts(gymnasium.Env[dict[str, Any], Any]):
    """Observations of several parts, of which one counts the steps; reward 1 for action 1."""

    def __init__(self) -> None:
        pair = Tuple([MultiDiscrete([2, 2]), Box(-1.0, 1.0, (2,), np.float64)])
        self.observation_space = Dict(
            where=Box(0, 9, (1,), np.int64), pair=pair, kind=Discrete(2), bits=MultiBinary(1)
        )
        self.action_space = Discrete(2)
        self._steps = 0

    def _shown(self) -> dict[str, Any]:
        pair = (np.array([0, 1]), np.array([0.25, 0.5]))
        return {"where": np.array([self._steps]), "pair": pair, "kind": 0, "bits": np.array([1], np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._shown(), float(action), False, False, {}


class Pictured(Parts):
    """The same with an image of as many grey levels, in a part of a part."""

    def __init__(self) -> None:
        super().__init__()
        seen = Tuple([Box(0, 255, (2, 3, 1), np.uint8), Discrete(2)])
        self.observation_space = Dict(**self.observation_space, a=seen)

    def _shown(self) -> dict[str, Any]:
        return {**super()._shown(), "a": (np.full((2, 3, 1), self._steps, np.uint8), 1)}


class Masked(gymnasium.Env[Any, Any]):
    """Each step allows some of 4 actions, another set each time; a forbidden one raises.

    The reward of an action is its number, so that the best allowed one is the last. The observation is [0] and says
    nothing of it. Episodes have 5 steps, of which the last one terminates or truncates.

    Args:
        way: how the mask is told: "info", "part" of the observation, or "method".
        pairs: two such choices at once.
        mask: what is told instead, such as a mask that is none.
        terminates: by itself.
    """

    def __init__(
        self, way: str = "info", *, pairs: bool = False, mask: Any = None, terminates: bool = True
    ) -> None:
        self._way, self._told, self._terminates = way, mask, terminates
        self._num = 2 if pairs else 1
        self.action_space = MultiDiscrete([4, 4]) if pairs else Discrete(4)
        place = Box(-1, 1, (1,), np.float32)
        masks = MultiBinary(4 * self._num)
        self.observation_space = Dict(place=place, action_mask=masks) if way == "part" else place
        if way == "method":
            self.action_masks = lambda: self._mask()

    def _mask(self) -> Any:
        return self.allowed.ravel() if self._told is None else self._told

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        place = np.zeros(1, np.float32)
        if self._way == "part":
            return {"place": place, "action_mask": self._mask()}, {}
        return place, {"action_mask": self._mask()} if self._way == "info" else {}

    def _draw(self) -> None:
        self.allowed = self.np_random.random((self._num, 4)) < 0.5
        self.allowed[np.arange(self._num), self.np_random.integers(4, size=self._num)] = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        self._draw()
        return self._shown()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        choices = np.atleast_1d(action)
        if not self.allowed[np.arange(self._num), choices].all():
            raise RuntimeError(f"{choices} is not allowed by {self.allowed}")
        self._steps += 1
        self._draw()
        shown, info = self._shown()
        ended = self._steps == 5
        return shown, float(choices.sum()), ended and self._terminates, ended and not self._terminates, info


class Told(Counts):
    """Counts, whose episodes have 3 to 6 steps and tell in the last info how long they were, twice where that is even.

    Their infos speak of other things, too, and of a number that is none.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        shown, info = super().reset(seed=seed, options=options)
        self._length = int(self.np_random.integers(3, 7))
        return shown, info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._shown[0] += 1
        steps, is_over = int(self._shown[0]), bool(self._shown[0] == self._length)
        info: dict[str, Any] = {"length": np.int64(steps), "text": "none", "huge": 10**400, "other": [{}]}
        if steps % 2 == 0:
            info["even"] = np.array([steps])
        return self._shown, 1.0, is_over, False, info


class SinglePrecision(gymnasium.RewardWrapper[Any, Any]):
    """Rewards as float32, as some environments give them."""

    def reward(self, reward: Any) -> np.float32:
        return np.float32(reward)
