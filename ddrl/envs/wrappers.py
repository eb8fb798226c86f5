"""Wrappers around one environment. Imports gymnasium: import this inside functions only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, flatdim, flatten

from ddrl.envs.requirements import EnvError

MOST_SEED = 2**31
SEED_STEPS = 250
MASK = "action_mask"  # in an info, or of a Dict observation


class _MaskInInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Moves the mask from Dict observations to the info."""

    def __init__(self, env: gymnasium.Env[Any, Any], parts: dict[str, Space[Any]]) -> None:
        super().__init__(env)
        self.observation_space = Dict({name: part for name, part in parts.items() if name != MASK})

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        return self._moved(*self.env.reset(**options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        observation, info = self._moved(observation, info)
        return observation, reward, terminated, truncated, info

    def _moved(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        rest = {name: part for name, part in observation.items() if name != MASK}
        return rest, {**info, MASK: observation[MASK]}


def mask_in_info(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Return the environment with its mask in the info where it is a part of Dict observations."""
    space = env.observation_space
    return _MaskInInfo(env, space.spaces) if isinstance(space, Dict) and MASK in space.spaces else env


class MaskedObservation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Append the mask of allowed actions to vector observations: 0 or 1 for each choice, dimension after dimension.

    It comes from the info or a method `action_masks()`. After a termination no action follows, so all are allowed.

    Raises:
        EnvError: the spaces have no mask; and at a step: there is none, or one that is none or allows nothing.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env)
        self._env_id = env_id
        seen, acted = env.observation_space, env.action_space
        if (
            not isinstance(acted, Discrete | MultiDiscrete)
            or not isinstance(seen, Box)
            or isinstance(seen, Packed)
            or len(seen.shape) != 1
        ):
            env.close()
            raise EnvError(
                f"{env_id}: env.action_mask is for Discrete or MultiDiscrete actions and vectors, not {acted} and "
                f"observations {seen.shape}; remove it"
            )
        self._sizes = [int(acted.n)] if isinstance(acted, Discrete) else acted.nvec.ravel().tolist()
        self._num = num = sum(self._sizes)
        low, high = np.append(seen.low, np.zeros(num)), np.append(seen.high, np.ones(num))
        self.observation_space = Box(low.astype(np.float32), high.astype(np.float32))

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(**options)
        return self._appended(observation, self._mask(info)), info

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        mask = np.ones(self._num) if terminated else self._mask(info)
        return self._appended(observation, mask), reward, terminated, truncated, info

    def _appended(self, observation: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.append(np.asarray(observation, np.float32), mask.astype(np.float32))

    def _mask(self, info: dict[str, Any]) -> np.ndarray:
        given = info.get(MASK)
        if given is None and self.env.has_wrapper_attr("action_masks"):
            given = self.env.get_wrapper_attr("action_masks")()
        if given is None:
            raise EnvError(
                f'{self._env_id}: env.action_mask is set, but there is no info["action_mask"], no such part of Dict '
                "observations and no method action_masks(); add one, or remove the option"
            )
        mask = np.concatenate(given if isinstance(given, tuple) else (given,), axis=None)
        if mask.shape != (self._num,) or not np.isin(mask, (0, 1)).all():
            reason = f"give 0 or 1 for each of {self._num} choices"
        elif not all(part.any() for part in np.split(mask, np.cumsum(self._sizes)[:-1])):
            reason = "it allows nothing; end the episode before"
        else:
            return mask
        raise EnvError(f"{self._env_id}: action_mask {str(mask.tolist()):.80}: {reason}")


class Packed(Box):
    """Vectors of bytes: those of images, one after another, then those of float32 numbers.

    Args:
        image_shapes: of each image.
        num_numbers: how many follow.
    """

    def __init__(self, image_shapes: Sequence[tuple[int, ...]], num_numbers: int) -> None:
        self.image_shapes = tuple(image_shapes)
        num_bytes = sum(map(math.prod, self.image_shapes)) + 4 * num_numbers
        super().__init__(0, 255, (num_bytes,), np.uint8)


class PackedObservation(gymnasium.ObservationWrapper[np.ndarray, Any, Any]):
    """Join Dict or Tuple observations with images, however nested, to one vector of bytes, see `Packed`.

    Args:
        env: the environment.
        parts: each part's keys, from the outermost, and space, in order.

    Raises:
        ValueError: at a step: a number is not finite.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], parts: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
        super().__init__(env)
        self._images = [(keys, space) for keys, space in parts if is_image(space)]
        self._numbers = [(keys, space) for keys, space in parts if not is_image(space)]
        num_numbers = sum(flatdim(space) for _, space in self._numbers)
        self.observation_space = Packed([space.shape for _, space in self._images], num_numbers)

    def observation(self, observation: Any) -> np.ndarray:
        """Return the bytes of an observation."""
        images = [np.ravel(reduce(getitem, keys, observation)) for keys, _ in self._images]
        numbers = [
            np.asarray(flatten(space, reduce(getitem, keys, observation)), "<f4")
            for keys, space in self._numbers
        ]
        row = np.concatenate([np.zeros(0, "<f4"), *numbers])
        if not np.isfinite(row).all():
            raise ValueError("observation: a number beside its images is not finite")
        return np.concatenate([*images, row.view(np.uint8)])


def is_image(space: Space[Any]) -> bool:
    """Return whether observations of a space are images: uint8 of at least two axes."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) > 1


class Lanes:
    """Environments stepped in turn; one that ends begins its next episode in the same step.

    It does so from a new seed if SEED_STEPS have passed since its last one: a seed takes as long as a few steps, and
    later episodes can be reached through those before them. The observations that it returns are its own buffer,
    overwritten by the next step.

    Args:
        envs: with observations that are a Box.
        read: returns an episode's metrics from its last info.

    Attributes:
        envs: as given; `num_envs` is N.
        reset_seeds: [N] int64, from which the episodes that go on began; -1: the random numbers went on.
    """

    def __init__(
        self, envs: Sequence[gymnasium.Env[Any, Any]], read: Callable[[dict[str, Any]], list[float]]
    ) -> None:
        self.envs, self._read, self.num_envs = envs, read, len(envs)
        self.single_observation_space = space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        self._observation = np.zeros((len(envs), *(space.shape or ())), space.dtype)
        self._next_seeds = np.random.default_rng()
        self.reset_seeds = np.zeros(len(envs), np.int64)
        self._steps = np.zeros(len(envs), np.int64)  # since the last seed

    def reset(self, *, seed: Sequence[int]) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode in each, [N, *O]; these seeds determine those of the later ones."""
        self._next_seeds = np.random.default_rng(list(seed))
        for lane, one in enumerate(seed):
            self._begin(lane, one)
        return self._observation, {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Take one step in each.

        Args:
            actions: [N, *A].

        Returns:
            [N, *O] observations, of a new episode where one ended; [N] float64 rewards; [N] bool terminated; [N] bool
            truncated; and if an episode ended `final_obs` and `metrics`, [N] objects: the true last observation and the
            metrics of each that did.
        """
        self._steps += 1
        reward, info = np.zeros(self.num_envs), dict[str, np.ndarray]()
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        for lane, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            observation, reward[lane], is_over, is_cut, last = env.step(action)
            if is_over or is_cut:
                if not info:
                    info = {name: np.empty(self.num_envs, object) for name in ("final_obs", "metrics")}
                terminated[lane], truncated[lane] = is_over, is_cut
                info["final_obs"][lane] = np.array(observation)  # the reset may write into the same array
                info["metrics"][lane] = self._read(last)
                is_due = self._steps[lane] >= SEED_STEPS
                self._begin(lane, int(self._next_seeds.integers(MOST_SEED)) if is_due else None)
            else:
                self._observation[lane] = observation
        return self._observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close all, even if one raises."""
        with contextlib.ExitStack() as stack:
            for env in self.envs:
                stack.callback(env.close)

    def _begin(self, lane: int, seed: int | None) -> None:
        self._observation[lane] = self.envs[lane].reset(seed=seed)[0]
        self.reset_seeds[lane] = -1 if seed is None else seed
        if seed is not None:
            self._steps[lane] = 0
