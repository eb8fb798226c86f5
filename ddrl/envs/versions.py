"""Whether a machine fits a run: the packages that both must have in the same version, and the modules it allows.

The submitter's versions are stored with the run; every worker compares its own before it plays. So experience of two
versions of an environment is never mixed in silence.
"""

from __future__ import annotations

import functools
import importlib.metadata
import socket
from collections.abc import Mapping

import ddrl
from ddrl import envs
from ddrl.config import ModuleError, RunConfig, load_callable

_EXTRAS = {"box2d": "box2d", "atari": "ale-py", "mujoco": "mujoco"}  # requirement -> distribution


class UnfitError(ValueError):
    """This machine does not play the run; the message names it and the remedy in one line."""


def of(env_id: str, *names: str) -> dict[str, str]:
    """The versions here, by package, that decide how a run is played: ddrl's, gymnasium's, the environment's.

    Args:
        env_id: what is played, an id or "module:callable".
        names: further "module:callable" that the run uses. Modules that no package brought have no version.
    """
    found = {"ddrl": ddrl.__version__}
    extra = None if ":" in env_id else envs.requirement(env_id)
    packages = ["gymnasium", *([_EXTRAS[extra]] if extra else [])]
    packages += [package for name in (env_id, *names) if ":" in name for package in _distributions(name)]
    for package in packages:
        version = installed(package)
        if version is not None:
            found[package] = version
    return found


def of_run(config: RunConfig) -> dict[str, str]:
    """The versions here that decide how a run of this config is played."""
    network = custom_network(config)
    return of(config.env.id, *((network,) if network else ()))


def of_machine() -> dict[str, str]:
    """The versions here of all that ddrl's environments depend on, to be shown."""
    packages = ("gymnasium", "numpy", "torch", "celery", *_EXTRAS.values())
    known = {package: installed(package) for package in packages}
    return {"ddrl": ddrl.__version__, **{name: version for name, version in known.items() if version}}


def mismatch(versions: Mapping[str, str], host: str) -> str | None:
    """One line on what differs here from a run's versions, with the remedy; None where nothing does."""
    for package, wanted in versions.items():
        here = ddrl.__version__ if package == "ddrl" else installed(package)
        if here != wanted:
            return (
                f"host {host}: {package} is {here or 'not installed'}, the run was submitted with {wanted}; "
                f"run pip install '{package}=={wanted}' there and restart the worker, "
                "or submit with env.same_versions=false"
            )
    return None


def check(config: RunConfig, versions: Mapping[str, str]) -> None:
    """Refuse a run that this machine cannot play, or would play by other versions.

    Args:
        config: of the run.
        versions: by package, of whoever submitted it; {} where unknown.

    Raises:
        UnfitError: a package is missing or of another version, or a module is not allowed or not to be had.
    """
    host = socket.gethostname()
    network = custom_network(config)
    try:
        envs.check_installed(config.env.id)
        for name in (config.env.id, network):
            if name is not None and ":" in name:
                load_callable(name)
    except (envs.EnvError, ModuleError) as error:
        raise UnfitError(f"host {host}: {error}") from None
    if config.env.same_versions and (found := mismatch(versions, host)) is not None:
        raise UnfitError(found)


def custom_network(config: RunConfig) -> str | None:
    """The "module:callable" of a network of the user's own, if the run has one."""
    network = config.algorithm.get("network")
    return network if isinstance(network, str) and ":" in network else None


@functools.cache
def installed(package: str) -> str | None:
    """The version of a package here, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _distributions(name: str) -> tuple[str, ...]:
    """The packages that brought the module of "module:callable"; none for files on the path."""
    top = name.partition(":")[0].partition(".")[0]
    found = importlib.metadata.packages_distributions().get(top, [])
    return tuple(sorted(set(found) - {"ddrl"}))
