"""Goals in observations: what HER needs of an environment, and the check that it has it.

Such an environment has Dict observations with `achieved_goal` and `desired_goal`, vectors of one shape, and a method
`compute_reward(achieved, desired, info)` that takes [M, G] arrays, as those of Gymnasium-Robotics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.config import EnvConfig, first_line
from ddrl.envs.make import make_one, training_reward
from ddrl.envs.requirements import EnvError

_CHECKED_STEPS = 20


@dataclass(frozen=True)
class Goals:
    """The goals in observations that are one vector, [O].

    Attributes:
        achieved, desired: where the goal that was reached, and the one that is wanted, lie in it; G numbers each.
        reward: of steps that achieved the goals [M, G] where others [M, G] were desired: [M] float32, in training
            units. ValueError: compute_reward fails, or gives no finite reward for each.
    """

    achieved: slice
    desired: slice
    reward: Callable[[NDArray[Any], NDArray[Any]], NDArray[np.float32]]


def find_goals(env: EnvConfig) -> Goals:
    """Return the goals of an environment, whose rewards in some random steps are those of `compute_reward`.

    Raises:
        EnvError: it cannot be made, has no goals or no `compute_reward`, or its rewards are others.
    """
    made = make_one(env)
    try:
        achieved, desired = _places(made)
        compute = made.get_wrapper_attr("compute_reward")
    except (AttributeError, KeyError, TypeError, ValueError):
        made.close()
        raise EnvError(
            f"{env.id}: replay.hindsight is set, but it lacks Dict observations with the vectors achieved_goal and "
            "desired_goal, or a method compute_reward(achieved, desired, info); add them, or remove the option"
        ) from None

    def reward(achieved_goal: NDArray[Any], desired_goal: NDArray[Any]) -> NDArray[np.float32]:
        try:
            given = np.asarray(compute(achieved_goal, desired_goal, {}), np.float64)
        except Exception as error:  # whatever a user's function does
            raise ValueError(
                f"compute_reward of {achieved_goal.shape} goals failed ({first_line(error)})"
            ) from None
        if given.shape != (len(achieved_goal),) or not np.isfinite(given).all():
            raise ValueError(f"compute_reward of {achieved_goal.shape} goals is not a finite reward for each")
        return training_reward(env, given)

    try:
        observation, _info = made.reset(seed=0)
        made.action_space.seed(0)
        for _ in range(_CHECKED_STEPS):
            action = _sample(made.action_space, observation, is_masked=env.action_mask)
            observation, given, terminated, truncated, _info = made.step(action)
            twice = np.stack([observation, observation])
            computed = reward(twice[:, achieved], twice[:, desired])
            expected = training_reward(env, np.array([given] * 2, np.float64))
            if not np.allclose(computed, expected, rtol=1e-3, atol=1e-5):
                raise ValueError(
                    f"a step gave the reward {given:g}, compute_reward another; HER needs rewards of goals alone"
                )
            if terminated or truncated:
                observation, _info = made.reset()
    except Exception as error:  # whatever a user's environment does
        made.close()
        raise EnvError(f"{env.id}: {first_line(error)}; mend it, or remove replay.hindsight") from None
    return Goals(achieved, desired, reward)


def _sample(space: Any, observation: NDArray[Any], *, is_masked: bool) -> Any:
    """Return a random action, of those that the mask at the observation's end allows."""
    if not is_masked:
        return space.sample()
    sizes = np.atleast_1d(getattr(space, "nvec", getattr(space, "n", 0)))
    parts = np.split(observation[-sizes.sum() :].astype(np.int8), np.cumsum(sizes)[:-1])
    return space.sample(tuple(parts) if hasattr(space, "nvec") else parts[0])


def _places(made: Any) -> tuple[slice, slice]:
    """Return where the achieved and the desired goal are in an environment's vectors; or raise one of many errors."""
    from gymnasium.spaces import flatdim
    from gymnasium.wrappers import FlattenObservation

    while not isinstance(made, FlattenObservation):
        made = made.env
    parts: Any = made.env.observation_space
    first, places = 0, {}
    for name, part in parts.items():
        places[name] = slice(first, first := first + flatdim(part))
    if parts["achieved_goal"].shape != parts["desired_goal"].shape:
        raise ValueError("goals of two shapes")
    return places["achieved_goal"], places["desired_goal"]
