"""What a machine must have to play an environment, and what this machine has; nothing here builds one.

Queues are named after these words, so both sides must choose the same one: an environment of the user's,
"my_pkg.envs:make", requires the top-level package `my_pkg`, whichever of its modules a worker allows.
"""

from __future__ import annotations

import importlib.util
import re

from ddrl.modules import allowed_modules

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
        return env_id.partition(":")[0].partition(".")[0]
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
    if extra is not None and importlib.util.find_spec(PACKAGES[extra]) is None:
        raise EnvError(
            f"{env_id}: needs {PACKAGES[extra]}; run pip install 'ddrl[{extra}]' where it is to be played"
        )


def queue_for(kind: str, env_id: str) -> str:
    """The queue, "ddrl.rollout" or "ddrl.evaluate" followed by what an environment needs of a worker."""
    need = requirement(env_id)
    return f"{kind}.{need}" if need else kind


def capabilities() -> list[str]:
    """The requirements that this process can meet, sorted: installed extras and allowed packages."""
    extras = {extra for extra, module in PACKAGES.items() if importlib.util.find_spec(module) is not None}
    return sorted(extras | {module.partition(".")[0] for module in allowed_modules()})
