"""What `ddrl doctor` looks at: each finding is ok, a warning, or a failure with its remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import ddrl

OK, WARN, FAIL = "ok", "warn", "fail"

_PACKAGES = (
    "torch",
    "gymnasium",
    "celery",
    "kombu",
    "redis",
    "blosc2",
    "numpy",
    "pydantic",
    "safetensors",
    "typer",
)
_EXTRAS = {  # extra -> module that shows whether it is installed
    "box2d": "Box2D",
    "atari": "ale_py",
    "mujoco": "mujoco",
    "flower": "flower",
    "tensorboard": "tensorboard",
    "video": "imageio",
}
_TRIAL_ENV = "LunarLanderContinuous-v3"


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it stands, and what to do."""

    name: str
    level: str
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything; takes a few seconds, because torch is imported."""
    return [_python(), *_packages(), *_extras(), *_server(), _cores(), _torch(), _environment()]


def _python() -> Finding:
    return Finding(
        "python", OK, f"{platform.python_version()} on {platform.platform()}, ddrl {ddrl.__version__}"
    )


def _packages() -> Iterator[Finding]:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding("packages", OK, ", ".join(found))
    if missing:
        yield Finding("packages", FAIL, f"missing: {', '.join(missing)}", "pip install ddrl again")


def _extras() -> Iterator[Finding]:
    for extra, module in _EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding(f"extra {extra}", OK, "installed")
        else:
            yield Finding(
                f"extra {extra}", WARN, "not installed", f"pip install 'ddrl[{extra}]' if you need it"
            )


def _server() -> Iterator[Finding]:
    from ddrl.cli.output import ServerError, server
    from ddrl.store import connection, exposure

    try:
        with server() as client:
            info, where = client.info(), connection.mask(connection.url())
            kind = "embedded" if connection.is_embedded() else f"from {connection.URL_VARIABLE}"
            version = f"version {info.get('redis_version')} ({info.get('server_name', 'redis')})"
            yield Finding(
                "server", OK, f"{where} ({kind}), {version}, {info.get('maxmemory_policy', 'policy unknown')}"
            )
            yield _memory(int(info.get("maxmemory", 0)), int(info.get("used_memory", 0)))
            unsafe = exposure.warning(client)
            yield (
                Finding("security", OK, "nothing unsafe found")
                if unsafe is None
                else Finding("security", WARN, *unsafe)
            )
    except ServerError as error:
        detail, _, remedy = str(error).rpartition("; ")
        yield Finding("server", FAIL, detail or remedy, remedy if detail else "")


def _memory(limit: int, used: int) -> Finding:
    from ddrl.cli.output import size

    if not limit:
        return Finding("memory", OK, f"{size(used)} used, no limit set on the server (maxmemory 0)")
    if used > 0.9 * limit:
        remedy = "delete old runs with `ddrl delete`, or raise maxmemory"
        return Finding("memory", WARN, f"{size(used)} used of {size(limit)}", remedy)
    return Finding("memory", OK, f"{size(used)} used of {size(limit)}")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if usable < 2:
        return Finding(
            "cores", WARN, f"{usable}", "playing and learning share one core: join another machine"
        )
    return Finding("cores", OK, f"{usable} for playing and learning")


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", FAIL, f"cannot be imported ({error})", "pip install torch")
    if torch.cuda.is_available():
        return Finding("torch", OK, f"CUDA on {torch.cuda.get_device_name(0)}; learner.device: auto uses it")
    return Finding("torch", OK, "no CUDA device, the learner uses the CPU")


def _environment() -> Finding:
    from ddrl import envs
    from ddrl.config import EnvConfig

    try:
        spaces = envs.describe(EnvConfig.model_validate({"id": _TRIAL_ENV}))
    except envs.EnvError as error:
        return Finding("environment", WARN, str(error))
    shape = "x".join(map(str, spaces.observation_shape))
    return Finding(
        "environment", OK, f"{_TRIAL_ENV} can be played (observations {shape}, {spaces.action_kind} actions)"
    )
