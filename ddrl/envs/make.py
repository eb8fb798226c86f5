"""From an EnvConfig to environments: registered ones by id, the user's own by "module:callable".

Rewards stay unscaled here (the collector scales), so that episode returns mean the same everywhere.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.config import EnvConfig
from ddrl.envs.requirements import PACKAGES, requirement
from ddrl.modules import ModuleError, first_line, load_callable
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    import gymnasium


class EnvError(ValueError):
    """An environment that cannot be made or used here; the message names it and the remedy in one line."""


def make_one(env: EnvConfig) -> gymnasium.Env[Any, Any]:
    """One environment with `max_episode_steps` and `action_repeat` applied.

    `max_episode_steps` counts the environment's own steps, before `action_repeat`, as its own limit does.

    Raises:
        EnvError: unknown id, package not installed, module not allowed, or keyword arguments refused.
    """
    made = _from_callable(env) if ":" in env.id else _from_registry(env)
    if env.action_repeat > 1:
        from ddrl.envs.wrappers import ActionRepeat

        made = ActionRepeat(made, env.action_repeat)
    return made


def make_vector(env: EnvConfig, *, num_envs: int | None = None) -> gymnasium.vector.SyncVectorEnv:
    """`num_envs` (default `env.num_envs`) environments stepped in turn, autoreset in the same step.

    The observation array it returns is its own buffer, overwritten by the next step: copy what you keep.

    Raises:
        EnvError: as `make_one`.
    """
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    makers = [partial(make_one, env)] * (env.num_envs if num_envs is None else num_envs)
    return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def describe(env: EnvConfig) -> EnvSpec:
    """The spaces of an environment; makes one and closes it.

    Raises:
        EnvError: as `make_one`, or spaces that ddrl cannot play.
    """
    made = make_one(env)
    try:
        return spec_of(made, env.id)
    finally:
        made.close()


def spec_of(made: gymnasium.Env[Any, Any], env_id: str) -> EnvSpec:
    """The spaces of a made environment. Float observations of any width are float32 in ddrl.

    Raises:
        EnvError: observations that are no Box, or actions that are neither Discrete nor one-dimensional
            MultiDiscrete, counted from 0, nor a bounded float Box.
    """
    from gymnasium.spaces import Box, Discrete, MultiDiscrete

    observed, acted = made.observation_space, made.action_space
    if not isinstance(observed, Box):
        raise EnvError(
            f"{env_id}: observation space {observed} is no Box; wrap the environment to give one array"
        )
    dtype = np.dtype(observed.dtype)
    name = "float32" if dtype.kind == "f" else dtype.name
    if isinstance(acted, Discrete | MultiDiscrete):
        if np.any(acted.start):
            raise EnvError(
                f"{env_id}: actions start at {np.asarray(acted.start).tolist()}; "
                "wrap the environment so that they start at 0"
            )
        if isinstance(acted, Discrete):
            return EnvSpec(env_id, observed.shape, name, "discrete", (), action_sizes=(int(acted.n),))
        if acted.nvec.ndim != 1 or not acted.nvec.size:
            raise EnvError(
                f"{env_id}: actions of shape {acted.nvec.shape} are no vector; wrap the environment to flatten them"
            )
        sizes = tuple(map(int, acted.nvec))
        return EnvSpec(env_id, observed.shape, name, "multi_discrete", (len(sizes),), action_sizes=sizes)
    if not isinstance(acted, Box) or np.dtype(acted.dtype).kind != "f":
        raise EnvError(
            f"{env_id}: action space {acted} is not supported; use Discrete, MultiDiscrete or a float Box"
        )
    if not (np.isfinite(acted.low).all() and np.isfinite(acted.high).all()):
        raise EnvError(f"{env_id}: action space {acted} has no bounds; wrap the environment to clip actions")
    low, high = (tuple(map(float, bound.reshape(-1))) for bound in (acted.low, acted.high))
    return EnvSpec(env_id, observed.shape, name, "continuous", acted.shape, action_low=low, action_high=high)


def check_spaces(made: gymnasium.Env[Any, Any], env_id: str, known: EnvSpec) -> None:
    """Refuse an environment that is not the one a run or a policy knows.

    Raises:
        EnvError: its spaces are others.
    """
    found = spec_of(made, env_id)
    for name in ("observation_shape", "observation_dtype", "action_kind", "action_shape", "action_sizes"):
        if getattr(found, name) != getattr(known, name):
            raise EnvError(
                f"{env_id}: {name} is {getattr(found, name)} here, but {getattr(known, name)} is expected; "
                "install the same version of the environment everywhere"
            )


def _from_registry(env: EnvConfig) -> gymnasium.Env[Any, Any]:
    import gymnasium

    from ddrl.envs.toy import register_toys

    register_toys()
    extra = requirement(env.id)
    if extra is not None:
        if importlib.util.find_spec(PACKAGES[extra]) is None:
            raise EnvError(
                f"{env.id}: needs {PACKAGES[extra]}; run pip install 'ddrl[{extra}]' where it is to be played"
            )
        if extra == "atari":
            gymnasium.register_envs(importlib.import_module("ale_py"))
    limit = {} if env.max_episode_steps is None else {"max_episode_steps": env.max_episode_steps}
    try:
        # The checker's wrapper costs a call per step and checks only the first one.
        return gymnasium.make(env.id, disable_env_checker=True, **limit, **env.kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise EnvError(f"{env.id}: {' '.join(str(error).split())}") from None
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(env.id, gymnasium.registry, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else 'name a Gymnasium id or "module:callable"'
        raise EnvError(f"{env.id}: no such environment ({first_line(error)}); {hint}") from None
    except TypeError as error:
        raise EnvError(f"{env.id}: env.kwargs {env.kwargs} refused ({first_line(error)})") from None


def _from_callable(env: EnvConfig) -> gymnasium.Env[Any, Any]:
    import gymnasium

    try:
        make = load_callable(env.id)
    except ModuleError as error:
        raise EnvError(str(error)) from None
    try:
        made = make(**env.kwargs)
    except TypeError as error:
        raise EnvError(f"{env.id}: env.kwargs {env.kwargs} refused ({first_line(error)})") from None
    if not isinstance(made, gymnasium.Env):
        raise EnvError(f"{env.id}: returned {type(made).__name__}; expected a gymnasium.Env")
    if env.max_episode_steps is None:
        return made
    return gymnasium.wrappers.TimeLimit(
        made, env.max_episode_steps
    )  # a longer limit of its own no longer matters
