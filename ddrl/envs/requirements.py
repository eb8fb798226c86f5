"""What a machine must have to play a run, and what this machine has; nothing here builds an environment.

Queues are named after these words, so both sides must choose the same one: an environment of the user's,
"my_pkg.envs:make", requires the top-level package `my_pkg`, whichever of its modules a worker allows; a network of the
user's likewise.
"""

from __future__ import annotations

import importlib.util
import re

from ddrl.config import allowed_modules

PACKAGES = {"box2d": "Box2D", "atari": "ale_py", "mujoco": "mujoco"}  # extra -> module that it installs

_BOX2D = {"LunarLander", "LunarLanderContinuous", "BipedalWalker", "BipedalWalkerHardcore", "CarRacing"}
_MUJOCO = {
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
    *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
}
_ATARI = re.compile(r"ALE/.+|.+(NoFrameskip|Deterministic)-v\d+")


class EnvError(ValueError):
    """An environment that cannot be made or used here; the message names it and the remedy in one line."""


def requirement(env_id: str) -> str | None:
    """What a worker must have for `env_id`: "box2d", "atari", "mujoco", a top-level package, or None.

    Goes by the name alone. An id of a third-party package that registers itself gives None: list it as
    "module:callable" instead.
    """
    if ":" in env_id:
        return _package(env_id)
    if _ATARI.fullmatch(env_id):
        return "atari"
    name = re.sub(r"-v\d+$", "", env_id)
    if name in _BOX2D:
        return "box2d"
    return "mujoco" if name in _MUJOCO else None


def check_installed(env_id: str) -> None:
    """Refuse an id, not "module:callable", whose extra is not installed here.

    Raises:
        EnvError: the package is missing; the message says how to install it.
    """
    extra = requirement(env_id)
    if ":" not in env_id and extra is not None and importlib.util.find_spec(PACKAGES[extra]) is None:
        raise EnvError(
            f"{env_id}: needs {PACKAGES[extra]}; run pip install 'ddrl[{extra}]' where it is to be played"
        )


def queue_for(kind: str, env_id: str, network: str | None = None) -> str:
    """The queue of a run: "ddrl.rollout" or "ddrl.evaluate", and what it needs of a worker.

    Args:
        kind: the first part.
        env_id: what is played; appends ".box2d", for example.
        network: of the algorithm; one of the user's own, "my_nets.wide:make", appends "+my_nets".
    """
    return _queue(kind, requirement(env_id), _package(network) if network and ":" in network else None)


def queues(kind: str) -> list[str]:
    """All queues of a kind that this process can serve."""
    networks = sorted({module.partition(".")[0] for module in allowed_modules()})
    return [_queue(kind, need, network) for network in (None, *networks) for need in (None, *capabilities())]


def capabilities() -> list[str]:
    """The requirements that this process can meet, sorted: installed extras and allowed packages."""
    extras = {extra for extra, module in PACKAGES.items() if importlib.util.find_spec(module) is not None}
    return sorted(extras | {module.partition(".")[0] for module in allowed_modules()})


def prepare(env_id: str | None = None) -> None:
    """Import what `env_id`, not "module:callable", is made of, or what all environments are; builds nothing."""
    registration = importlib.import_module("gymnasium.envs.registration")
    importlib.import_module("gymnasium.vector")
    if env_id is None:
        return
    extra = requirement(env_id)
    if extra is not None:
        importlib.import_module(PACKAGES[extra])
    registered = registration.registry.get(env_id)
    if registered is not None and isinstance(registered.entry_point, str):
        registration.load_env_creator(registered.entry_point)


def _package(name: str) -> str:
    """The top-level package of "module:callable"."""
    return name.partition(":")[0].partition(".")[0]


def _queue(kind: str, need: str | None, network: str | None) -> str:
    return kind + (f".{need}" if need else "") + (f"+{network}" if network else "")
