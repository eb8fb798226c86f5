"""Requirements of a run on the machines that play it: extras, allowed modules, and the same versions as the submitter.

Queues are named after requirements, so that a message only reaches machines that can play its run. An environment of
the user's, "my_pkg.envs:make", requires the top-level package `my_pkg`, whichever of its modules a worker allows; so
does a network, an algorithm or a wrapper of the user's. Nothing here builds an environment.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ddrl
from ddrl.config import ModuleError, RunConfig, allowed_modules, load_callable, load_module

# By extra: the module, and the package, that it installs.
PACKAGES = {"box2d": "Box2D", "atari": "ale_py", "mujoco": "mujoco", "pettingzoo": "pettingzoo"}
_DISTRIBUTIONS = {"box2d": "box2d", "atari": "ale-py", "mujoco": "mujoco", "pettingzoo": "pettingzoo"}

_BOX2D = {"LunarLander", "LunarLanderContinuous", "BipedalWalker", "BipedalWalkerHardcore", "CarRacing"}
_MUJOCO = {
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
    *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
}
OF_GYMNASIUM = "gymnasium.wrappers:"  # its wrappers need no permission
OF_PETTINGZOO = "pettingzoo/"  # its games, such as pettingzoo/classic/connect_four-v3
_ATARI = re.compile(r"ALE/.+|.+(NoFrameskip|Deterministic)-v\d+")


class EnvError(ValueError):
    """An environment that cannot be made or used here; the message names it and the remedy in one line."""


class UnfitError(ValueError):
    """This machine does not meet a run's requirements; the message names them and the remedy in one line."""


def requirement(env_id: str) -> str | None:
    """Return what a machine needs for `env_id`: "box2d", "atari", "mujoco", "pettingzoo", a top-level package, or None.

    It goes by the name alone. An id of a third-party package that registers itself gives None: submit it as
    "module:EnvId" instead.
    """
    if ":" in env_id:
        return _package(env_id)
    if _ATARI.fullmatch(env_id):
        return "atari"
    if env_id.startswith(OF_PETTINGZOO):
        return "pettingzoo"
    name = re.sub(r"-v\d+$", "", env_id)
    if name in _BOX2D:
        return "box2d"
    return "mujoco" if name in _MUJOCO else None


def custom_code(config: RunConfig) -> list[str]:
    """Return each "module:callable" of the user's own algorithm, network, wrappers and opponent."""
    env = config.env
    wrappers = [wrapper.id for wrapper in env.wrappers if not wrapper.id.startswith(OF_GYMNASIUM)]
    return _of_networks(config) + wrappers + ([env.opponent] if ":" in env.opponent else [])


def _of_networks(config: RunConfig) -> list[str]:
    """Return each "module:callable" of the user's own algorithm and network."""
    name, network = config.algorithm["name"], config.algorithm.get("network")
    own = [f"{name}:Policy"] if "." in name else []
    return own + ([network] if isinstance(network, str) and ":" in network else [])


def capabilities() -> list[str]:
    """Return the requirements that this process can meet, sorted: installed extras and allowed packages."""
    extras = {extra for extra, module in PACKAGES.items() if importlib.util.find_spec(module) is not None}
    return sorted(extras | {_package(module) for module in allowed_modules()})


def queue_for(kind: str, config: RunConfig) -> str:
    """Return the queue of a run: its kind, and what it needs of a machine, such as "ddrl.rollout.box2d+my_nets".

    Of the user's code from several packages it names the first of `custom_code`; machines without the others refuse
    the run (`check_machine`).
    """
    return _queue(kind, requirement(config.env.id), next(map(_package, custom_code(config)), None))


def queues(kind: str) -> list[str]:
    """Return all queues of a kind that this process can serve."""
    packages = sorted({_package(module) for module in allowed_modules()})
    return [_queue(kind, need, package) for package in (None, *packages) for need in (None, *capabilities())]


def check_installed(env_id: str) -> None:
    """Refuse an id, not "module:callable", whose extra is not installed here.

    Raises:
        EnvError: the package is missing; the message says how to install it.
    """
    extra = requirement(env_id)
    if ":" not in env_id and extra is not None and importlib.util.find_spec(PACKAGES[extra]) is None:
        raise EnvError(
            f"{env_id}: needs {PACKAGES[extra]}; run pip install 'ddrl[{extra}]' on each machine that plays it"
        )


def load(name: str) -> Callable[..., Any] | str:
    """Import what "module:callable" or Gymnasium's "module:EnvId" names; return the callable, or the registered id.

    Raises:
        ModuleError: it cannot be loaded here.
    """
    if (env_id := name.partition(":")[2]).isidentifier():
        return load_callable(name)
    load_module(name)
    return env_id


def unknown(env_id: str) -> EnvError:
    """Return the refusal of an id that is not registered; it names near ones, in their newest versions."""
    if importlib.util.find_spec("ale_py") is not None:
        importlib.import_module("ale_py")  # registers the games
    # ale-py also registers games under older ids, which do not begin with "ALE/".
    newest = {
        _unversioned(known): known
        for known, spec in importlib.import_module("gymnasium").registry.items()
        if known.startswith("ALE/") == str(spec.entry_point).startswith("ale_py")
    }
    name = _unversioned(env_id)
    in_namespaces = [key for key in newest if key.endswith("/" + name.rpartition("/")[2])]
    near = [name] if name in newest else in_namespaces or difflib.get_close_matches(name, newest)
    hint = " or ".join(newest[key] for key in near)
    remedy = f"did you mean {hint}?" if near else 'name a Gymnasium id, "module:EnvId" or "module:callable"'
    return EnvError(f"{env_id}: no such environment; {remedy}")


def check_machine(config: RunConfig, versions: Mapping[str, str]) -> None:
    """Refuse a run that this machine cannot play, or would play with other versions than its submitter has.

    Args:
        config: of the run.
        versions: of the submitter, by package; {} if unknown.

    Raises:
        UnfitError: a package is missing or of another version, or a module is not allowed or cannot be imported.
    """
    host = socket.gethostname()
    _check_code(config, host, plays=True)
    if config.env.same_versions and (difference := version_mismatch(versions, host)) is not None:
        raise UnfitError(difference)


def check_learner(config: RunConfig) -> None:
    """Refuse a run that this machine cannot learn.

    Raises:
        UnfitError: a module of the user's is not allowed or cannot be imported; with hindsight also where the
            environment's package is missing, with weights.onnx where those of ONNX are.
    """
    host = socket.gethostname()
    _check_code(config, host, plays=bool(config.replay.hindsight))
    for package in ("onnxruntime", "onnxscript") if config.weights.onnx else ():
        if importlib.util.find_spec(package) is None:
            raise UnfitError(
                f"host {host}: weights.onnx: {package} is not installed; pip install 'ddrl[onnx]'"
            )


def _check_code(config: RunConfig, host: str, *, plays: bool) -> None:
    try:
        if plays:
            check_installed(config.env.id)
        for name in _callables(config) if plays else _of_networks(config):
            load(name)
    except (EnvError, ModuleError) as error:
        raise UnfitError(f"host {host}: {error}") from None


def run_versions(config: RunConfig) -> dict[str, str]:
    """Return the versions here of ddrl, gymnasium, the environment and the user's code, which decide how a run plays.

    Modules on the path that no package installed have no version.
    """
    packages = ["gymnasium"]
    if (extra := requirement(config.env.id)) in _DISTRIBUTIONS:
        packages.append(_DISTRIBUTIONS[extra])
    packages += [package for name in _callables(config) for package in _distributions_of(_package(name))]
    return _installed(packages)


def machine_versions() -> dict[str, str]:
    """Return the versions here of everything that ddrl's environments depend on."""
    return _installed(["gymnasium", "numpy", "torch", "celery", *_DISTRIBUTIONS.values()])


def version_mismatch(versions: Mapping[str, str], host: str) -> str | None:
    """Return one line on the first version here that differs from a run's, with the remedy; None if none does."""
    for package, wanted in versions.items():
        if (here := installed_version(package)) != wanted:
            return (
                f"host {host}: {package} is {here or 'not installed'}, the run was submitted with {wanted}; "
                f"run pip install '{package}=={wanted}' there and restart the worker, "
                "or submit with env.same_versions=false"
            )
    return None


@functools.cache
def installed_version(package: str) -> str | None:
    """Return the version of a package here, None if it is not installed."""
    if package == "ddrl":  # a checkout may be newer than its installation
        return ddrl.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def prepare(env_id: str | None = None) -> None:
    """Import what `env_id`, not "module:callable", needs, or what all environments need; builds nothing."""
    registration = importlib.import_module("gymnasium.envs.registration")
    importlib.import_module("gymnasium.vector")
    if env_id is None:
        return
    if (extra := requirement(env_id)) is not None:
        importlib.import_module(PACKAGES[extra])
    registered = registration.registry.get(env_id)
    if registered is not None and isinstance(registered.entry_point, str):
        registration.load_env_creator(registered.entry_point)


def _callables(config: RunConfig) -> list[str]:
    """Return each "module:callable" of the run."""
    return [name for name in (config.env.id, *custom_code(config)) if ":" in name]


def _package(name: str) -> str:
    """Return the top-level package of a module or a "module:callable"."""
    return name.partition(":")[0].partition(".")[0]


def _unversioned(env_id: str) -> str:
    """Return an id in lower case, without its version."""
    return re.sub(r"-v\d+$", "", env_id).lower()


def _queue(kind: str, need: str | None, package: str | None) -> str:
    return kind + (f".{need}" if need else "") + (f"+{package}" if package else "")


def _installed(packages: list[str]) -> dict[str, str]:
    """Return the versions of ddrl and of those packages that are installed."""
    found = {package: installed_version(package) for package in ("ddrl", *packages)}
    return {package: version for package, version in found.items() if version}


@functools.cache
def _distributions_of(package: str) -> tuple[str, ...]:
    """Return the installed packages that a top-level package came with; none for files on the path."""
    return tuple(sorted({*importlib.metadata.packages_distributions().get(package, [])} - {"ddrl"}))
