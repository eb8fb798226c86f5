"""Make environments from an EnvConfig: registered ids, ALE games, and the user's own "module:callable".

Rewards stay as the environment gives them, so that episode returns mean the same everywhere; `training_reward` gives
what is learned from. Observations stay single frames; `FrameStack` stacks them.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ddrl.config import AtariConfig, EnvConfig, ModuleError, WrapperConfig, first_line, load_callable
from ddrl.envs.players import PLAYERS
from ddrl.envs.requirements import (
    OF_GYMNASIUM,
    OF_PETTINGZOO,
    EnvError,
    check_installed,
    load,
    requirement,
    unknown,
)
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    import gymnasium

    from ddrl.envs.atari import AtariVector
    from ddrl.envs.two_player import TwoPlayerGame
    from ddrl.envs.wrappers import Lanes

_UNFIT_WRAPPERS = {  # of Gymnasium's -> why not
    "NormalizeObservation": "its statistics would differ in each process; use algorithm.normalize_observations",
    "NormalizeReward": "its statistics would differ in each process; use env.reward_scale",
    "Autoreset": "ddrl begins episodes itself; leave it out",
    "RecordVideo": "would write on each machine; use `ddrl evaluate --video`",
    "HumanRendering": "would show pictures on each machine; use `ddrl evaluate --video`",
}


def make_one(env: EnvConfig, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """Return one environment with all its settings applied; an episode of ALE is a whole game.

    `max_episode_steps` counts the environment's own steps, before wrappers and `action_repeat`, as its own limit does.
    Observations that are no Box after the wrappers become one vector, in which a choice of n is n numbers, one of
    them 1; with images among them a vector of bytes, see `ddrl.envs.wrappers.Packed`.

    Args:
        env: the settings.
        render_mode: passed to the environment if given.

    Raises:
        EnvError: unknown id, package not installed, module not allowed, or settings refused.
    """
    if _is_game(env):
        from ddrl.envs.atari import AtariEnv

        return AtariEnv(env.id, env.atari, render_mode)
    if render_mode is not None:
        env = env.model_copy(update={"kwargs": {**env.kwargs, "render_mode": render_mode}})
    from gymnasium.wrappers import RepeatAction

    from ddrl.envs.wrappers import MaskedObservation, mask_in_info

    if env.id.startswith(OF_PETTINGZOO):
        return _game(env, _from_pettingzoo(env))
    made = _from_callable(env) if ":" in env.id else _from_registry(env, env.id)
    if _is_of_pettingzoo(made):
        return _game(env, made)
    if env.opponent != EnvConfig.model_fields["opponent"].default:
        made.close()
        raise EnvError(f"{env.id}: env.opponent is {env.opponent}, but this is no game of two; remove it")
    for wrapper in env.wrappers:
        made = _wrapped(made, wrapper)
    made = _flattened(env.id, mask_in_info(made) if env.action_mask else made)
    if env.action_repeat > 1:
        made = RepeatAction(made, env.action_repeat)
    return MaskedObservation(made, env.id) if env.action_mask else made


def make_vector(env: EnvConfig) -> AtariVector | Lanes:
    """Return `env.num_envs` environments stepped in turn, with autoreset in the same step.

    The observation array it returns may be its own buffer, overwritten by the next step: copy what you keep. Where an
    episode ended the info has `final_obs`, and except for games `metrics` (see `episode_metrics`).

    Raises:
        EnvError: as `make_one`.
    """
    if _is_game(env):
        from ddrl.envs.atari import AtariVector

        return AtariVector(env.id, env.atari, env.num_envs)
    from ddrl.envs.wrappers import Lanes

    return Lanes([make_one(env) for _ in range(env.num_envs)], partial(episode_metrics, env))


def episode_metrics(env: EnvConfig, info: Mapping[str, Any]) -> list[float]:
    """Return the numbers that `env.metrics` names in the last info of an episode; NaN for what is missing or none."""
    found = [math.nan] * len(env.metrics)
    for place, name in enumerate(env.metrics):
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            found[place] = np.asarray(info[name], np.float64).item()
    return found


def training_reward(env: EnvConfig, reward: np.ndarray) -> np.ndarray:
    """Return the rewards to learn from, of any shape, float32: if so configured the sign, or limited; then scaled."""
    limit = env.reward_clip or math.inf
    taken = np.sign(reward) if env.reward_sign else np.clip(reward, -limit, limit)
    return np.asarray(taken * (env.reward_scale or 1.0), np.float32)


def describe(env: EnvConfig) -> EnvSpec:
    """Return the spaces of an environment and the size of its stacks of frames; makes one and closes it.

    Raises:
        EnvError: as `make_one`, or spaces that ddrl cannot play or stack.
    """
    made = make_one(env)
    try:
        spec = _spec(env.id, made.observation_space, made.action_space)
        if env.action_mask:
            made.reset(seed=0)  # which refuses an environment without a mask
        limit = getattr(made.spec, "max_episode_steps", None) or env.max_episode_steps
        if is_game := (game := two_player_game(made)) is not None:
            game.check()
    finally:
        made.close()
    if env.frame_stack > 1 and (len(spec.observation_shape) not in (1, 2) or spec.image_shapes):
        seen = spec.image_shapes or spec.observation_shape
        raise EnvError(
            f"{env.id}: env.frame_stack is {env.frame_stack}, but observations {list(seen)} are "
            "neither vectors nor grey images [H, W]; set it to 1, or wrap the environment to give one of these"
        )
    limit = env.atari.max_frames if _is_game(env) else limit
    return replace(
        spec,
        frame_stack=env.frame_stack,
        has_mask=env.action_mask,
        max_episode_steps=limit,
        is_two_player=is_game,
    )


def check_spaces(made: gymnasium.Env[Any, Any] | AtariVector | Lanes, known: EnvSpec) -> None:
    """Refuse an environment, or a vector of them, that is not the one a run or a policy knows.

    Raises:
        EnvError: its spaces are others.
    """
    of_one = "single_" if hasattr(made, "single_action_space") else ""
    observed, acted = (getattr(made, f"{of_one}{name}_space") for name in ("observation", "action"))
    found = _spec(known.env_id, observed, acted)
    observed_by = ("observation_shape", "observation_dtype", "image_shapes")
    for name in (*observed_by, "action_kind", "action_shape", "action_sizes"):
        if getattr(found, name) != getattr(known, name):
            raise EnvError(
                f"{known.env_id}: {name} is {getattr(found, name)} here, but {getattr(known, name)} is expected; "
                "install the same version of the environment everywhere"
            )


def _spec(env_id: str, observed: Any, acted: Any) -> EnvSpec:
    """Return the spaces of one environment, unstacked. Observations are float32 in ddrl, images of uint8 stay so."""
    from gymnasium.spaces import Box, Discrete, MultiDiscrete

    image_shapes = getattr(observed, "image_shapes", ())
    has_images = observed.dtype == np.uint8 and (len(observed.shape) > 1 or image_shapes)
    dtype: Literal["float32", "uint8"] = "uint8" if has_images else "float32"
    spec = partial(EnvSpec, env_id, observed.shape, dtype, image_shapes=image_shapes)
    if isinstance(acted, Discrete | MultiDiscrete):
        if np.any(acted.start):
            raise EnvError(
                f"{env_id}: actions start at {np.asarray(acted.start).tolist()}; "
                "wrap the environment so that they start at 0"
            )
        if isinstance(acted, Discrete):
            return spec("discrete", (), action_sizes=(int(acted.n),))
        if acted.nvec.ndim != 1 or not acted.nvec.size:
            raise EnvError(
                f"{env_id}: actions of shape {acted.nvec.shape} are no vector; wrap the environment to flatten them"
            )
        return spec("multi_discrete", acted.nvec.shape, action_sizes=tuple(acted.nvec.tolist()))
    if not isinstance(acted, Box) or np.dtype(acted.dtype).kind != "f":
        raise EnvError(
            f"{env_id}: action space {acted} is not supported; use Discrete, MultiDiscrete or a float Box"
        )
    with np.errstate(over="ignore"):
        low, high = acted.low.astype(np.float32), acted.high.astype(np.float32)
        if not np.isfinite(high - low).all():
            raise EnvError(
                f"{env_id}: action space {acted} has no bounds; wrap the environment to clip actions"
            )
    # Inward, so that the environment allows them.
    least = np.where(low < acted.low, np.nextafter(low, high), low)
    most = np.where(high > acted.high, np.nextafter(high, low), high)
    action_low, action_high = (tuple(bound.ravel().tolist()) for bound in (least, most))
    return spec("continuous", acted.shape, action_low=action_low, action_high=action_high)


def _wrapped(made: gymnasium.Env[Any, Any], wrapper: WrapperConfig) -> gymnasium.Env[Any, Any]:
    """Return the environment in a wrapper, or close it.

    Raises:
        EnvError: the wrapper is unknown, not allowed or none, or refuses its arguments.
    """
    import gymnasium

    name = wrapper.id.removeprefix(OF_GYMNASIUM)
    make: Callable[..., Any] | None
    try:
        if name == wrapper.id:
            make = load_callable(wrapper.id)
        elif name in _UNFIT_WRAPPERS:
            raise EnvError(f"{wrapper.id}: {_UNFIT_WRAPPERS[name]}")
        elif (make := getattr(gymnasium.wrappers, name, None)) is None:
            near = difflib.get_close_matches(name, gymnasium.wrappers.__all__, n=1)
            raise EnvError(
                f"{wrapper.id}: no such wrapper; {f'did you mean {near[0]}?' if near else 'see its documentation'}"
            )
        wrapped = make(made, **wrapper.kwargs)
        if not isinstance(wrapped, gymnasium.Env):
            raise EnvError(f"{wrapper.id}: returned {type(wrapped).__name__}; expected a gymnasium.Env")
    except Exception as error:
        made.close()
        if isinstance(error, EnvError | ModuleError):
            raise EnvError(str(error)) from None
        raise EnvError(f"{wrapper.id}: kwargs {wrapper.kwargs} refused ({first_line(error)})") from None
    return wrapped


def _flattened(env_id: str, made: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Return the environment with observations that are a Box.

    Raises:
        EnvError: a part of its observations is neither numbers nor an image.
    """
    from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
    from gymnasium.wrappers import FlattenObservation

    from ddrl.envs.wrappers import PackedObservation, is_image

    if isinstance(made.observation_space, Box):
        return made
    parts: list[tuple[tuple[Any, ...], Any]] = []
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), made.observation_space)]
    while waiting:
        keys, space = waiting.pop()
        if isinstance(space, Dict | Tuple):
            named = list(space.items() if isinstance(space, Dict) else enumerate(space))
            waiting += [((*keys, key), part) for key, part in reversed(named)]
        elif isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete):
            parts.append((keys, space))
        else:
            made.close()
            name, kind = ".".join(map(str, keys)), type(space).__name__
            raise EnvError(
                f"{env_id}: part {name!r} of the observations of {kind} cannot be a vector; wrap the environment to "
                "leave it out, as by gymnasium.wrappers.FilterObservation, or to give one array"
            )
    if any(is_image(space) for _, space in parts):
        return PackedObservation(made, parts)
    return FlattenObservation(made)


def _is_game(env: EnvConfig) -> bool:
    """Return True for an ALE game.

    Raises:
        EnvError: settings of games for another environment, or the reverse; an old id; or ale-py is missing.
    """
    if requirement(env.id) != "atari":
        if env.atari != AtariConfig():
            raise EnvError(f"{env.id}: env.atari is set, but this is no ALE game; remove it")
        return False
    _refuse_older(env.id)
    for name, other in [
        ("action_repeat", "env.atari.frame_skip"),
        ("max_episode_steps", "env.atari.max_frames"),
        ("kwargs", "what env.atari offers"),
        ("wrappers", "what env.atari offers"),
        ("metrics", "none, as games give no such infos"),
        ("action_mask", "it to false"),
    ]:
        if (value := getattr(env, name)) != EnvConfig.model_fields[name].default:
            raise EnvError(
                f"{env.id}: env.{name} is {value}, which ALE games do not take; set {other} instead"
            )
    check_installed(env.id)
    return True


def _refuse_older(env_id: str) -> None:
    """Refuse ids from before ALE/, which mean another frame skip and other sticky actions than `env.atari`."""
    if older := re.fullmatch(r"(\w+?)(?:-ram)?(?:NoFrameskip|Deterministic)?-v\d+", env_id):
        raise EnvError(
            f"{env_id}: is an older id of ALE/{older[1]}-v5; use that one, with env.atari for how it is played"
        )


def _from_registry(env: EnvConfig, env_id: str) -> gymnasium.Env[Any, Any]:
    import gymnasium

    from ddrl.envs.toy import register_toys

    register_toys()
    check_installed(env.id)
    known = gymnasium.registry.get(env_id)
    is_game = env_id.startswith("ALE/") or str(known and known.entry_point).startswith("ale_py")
    if known is None and not is_game:
        raise unknown(env_id)
    if is_game:
        _refuse_older(env_id)
        raise EnvError(f"{env.id}: is a game; name it {env_id}")
    limit = {} if env.max_episode_steps is None else {"max_episode_steps": env.max_episode_steps}
    try:
        # The checker's wrapper costs a call per step and checks only the first one. Older ids are deprecated in color.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return gymnasium.make(env_id, disable_env_checker=True, **limit, **env.kwargs)
    except (gymnasium.error.Error, ImportError) as error:
        raise EnvError(f"{env.id}: {' '.join(str(error).split())}") from None
    except (TypeError, ValueError) as error:
        raise EnvError(f"{env.id}: env.kwargs {env.kwargs} refused ({first_line(error)})") from None


def _from_callable(env: EnvConfig) -> Any:
    import gymnasium

    try:
        make = load(env.id)
    except ModuleError as error:
        raise EnvError(str(error)) from None
    if isinstance(make, str):
        return _from_registry(env, make)
    try:
        made = make(**env.kwargs)
    except TypeError as error:
        raise EnvError(f"{env.id}: env.kwargs {env.kwargs} refused ({first_line(error)})") from None
    if _is_of_pettingzoo(made):
        return made
    if not isinstance(made, gymnasium.Env):
        raise EnvError(
            f"{env.id}: returned {type(made).__name__}; expected a gymnasium.Env, or PettingZoo's AECEnv or ParallelEnv"
        )
    if env.max_episode_steps is None:
        return made
    return gymnasium.wrappers.TimeLimit(made, env.max_episode_steps)


def two_player_game(made: Any) -> TwoPlayerGame | None:
    """Return the environment if it is a game of two players."""
    if "pettingzoo" not in sys.modules:  # then nothing can be of it
        return None
    from ddrl.envs.two_player import TwoPlayerGame

    return made if isinstance(made, TwoPlayerGame) else None


def _is_of_pettingzoo(made: Any) -> bool:
    if "pettingzoo" not in sys.modules:
        return False
    from pettingzoo import AECEnv, ParallelEnv

    return isinstance(made, AECEnv | ParallelEnv)


def _from_pettingzoo(env: EnvConfig) -> Any:
    """Return a game of PettingZoo's registry, such as "pettingzoo/classic/connect_four-v3".

    Raises:
        EnvError: it is not installed, unknown, or refuses its arguments.
    """
    check_installed(env.id)
    import pettingzoo

    known = {OF_PETTINGZOO + name for name in pettingzoo.aec_registry}
    if env.id not in known:
        near = difflib.get_close_matches(env.id, known, n=1, cutoff=0.3)
        raise EnvError(f"{env.id}: PettingZoo has no such game; did you mean {', '.join(near)}?")
    try:
        # Its wrappers check what `TwoPlayerGame` does in any case, at twice the time of a move.
        return pettingzoo.make("aec", env.id.removeprefix(OF_PETTINGZOO), **env.kwargs).unwrapped
    except TypeError as error:
        raise EnvError(f"{env.id}: env.kwargs {env.kwargs} refused ({first_line(error)})") from None
    except Exception as error:
        raise EnvError(f"{env.id}: cannot be made ({first_line(error)})") from None


def _opponent(env: EnvConfig) -> Callable[..., Any] | None:
    """Return the player that `env.opponent` names; None: random moves.

    Raises:
        EnvError: it cannot be loaded.
    """
    if env.opponent == "random":
        return None
    if env.opponent in PLAYERS:
        return PLAYERS[env.opponent][0]
    try:
        return load_callable(env.opponent)
    except ModuleError as error:
        raise EnvError(f"env.opponent: {error}") from None


def _game(env: EnvConfig, made: Any) -> gymnasium.Env[Any, Any]:
    """Return a game of two players as an environment, in which `env.opponent` plays the other side.

    Raises:
        EnvError: it is no such game, or an option is not for games.
    """
    from ddrl.envs.two_player import TwoPlayerGame

    for name in ("wrappers", "action_repeat", "max_episode_steps", "frame_stack"):
        if (value := getattr(env, name)) != (default := EnvConfig.model_fields[name].default):
            made.close()
            raise EnvError(
                f"{env.id}: env.{name} is {value}, which games of two do not take; leave it at {default}, or change "
                "the game itself"
            )
    game = TwoPlayerGame(env.id, made, _opponent(env))
    if game.has_mask != env.action_mask:
        game.close()
        has, wanted = ("an", "true") if game.has_mask else ("no", "false")
        raise EnvError(f"{env.id}: its observations have {has} action_mask; set env.action_mask to {wanted}")
    if env.opponent in PLAYERS and game.observation_space.shape != PLAYERS[env.opponent][1]:
        game.close()
        raise EnvError(f"{env.id}: env.opponent {env.opponent} is for connect four; use random or your own")
    return game
