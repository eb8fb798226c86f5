"""`ddrl doctor`: checks whether this machine can train, each with a remedy."""

from __future__ import annotations

import importlib.util
import ipaddress
import platform
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import typer

import ddrl
from ddrl.cli.format import counted, duration, size
from ddrl.cli.output import Client, Json, ServerError, aligned, emit, server
from ddrl.envs.requirements import PACKAGES, installed_version
from ddrl.store import capped_streams, connection, keys, machine, runs

OK, WARN, FAIL = "ok", "warn", "fail"
_MARKS = {OK: "ok  ", WARN: "warn", FAIL: "FAIL"}
_PACKAGES = (
    *("torch", "gymnasium", "celery", "kombu", "redis", "blosc2", "numpy"),
    *("pydantic", "safetensors", "typer"),
)
# extra -> module that it installs
_EXTRAS = PACKAGES | {"flower": "flower", "tensorboard": "tensorboard", "video": "imageio"}
_TRIAL_ENV = "LunarLanderContinuous-v3"


class Finding(NamedTuple):
    """One line of the report: what was checked, the result, and the remedy."""

    name: str
    level: str
    detail: str
    remedy: str = ""


def doctor(json_output: Json = False) -> None:
    """Check whether this machine can train: packages, server, devices, environments, with remedies."""
    # Takes a few seconds, because torch is imported.
    findings = [*_installed(), *_server(), _cores(), _torch(), _environment()]
    if json_output:
        emit([finding._asdict() for finding in findings])
    else:
        aligned([(_MARKS[f.level], f.name, "; ".join(filter(None, (f.detail, f.remedy)))) for f in findings])
    if failed := {finding.name for finding in findings if finding.level == FAIL}:
        raise typer.Exit(3 if "server" in failed else 1)


def _installed() -> Iterator[Finding]:
    system = f"{platform.python_version()} on {platform.platform()}, ddrl {ddrl.__version__}"
    yield Finding("python", OK, system)
    versions = {name: installed_version(name) for name in _PACKAGES}
    found = [f"{name} {version}" for name, version in versions.items() if version is not None]
    yield Finding("packages", OK, ", ".join(found))
    if missing := [name for name, version in versions.items() if version is None]:
        yield Finding("packages", FAIL, f"missing: {', '.join(missing)}", "pip install ddrl again")
    for extra, module in _EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding(f"extra {extra}", OK, "installed")
        else:
            remedy = f"pip install 'ddrl[{extra}]' if you need it"
            yield Finding(f"extra {extra}", WARN, "not installed", remedy)


def _server() -> Iterator[Finding]:
    try:
        with server() as client:
            info, url = client.info(), connection.url()
            source = "embedded" if connection.is_embedded() else f"from {connection.URL_VARIABLE}"
            version = f"version {info.get('redis_version')} ({info.get('server_name', 'redis')})"
            policy = info.get("maxmemory_policy", "policy unknown")
            yield Finding("server", OK, f"{connection.mask(url)} ({source}), {version}, {policy}")
            yield _memory(int(info.get("maxmemory", 0)), int(info.get("used_memory", 0)))
            yield _durability(client)
            yield security(client, url)
            yield from _broken(client)
    except ServerError as error:
        detail, _, remedy = str(error).rpartition("; ")
        yield Finding("server", FAIL, detail or remedy, remedy if detail else "")


def _memory(limit: int, used: int) -> Finding:
    if not limit:
        return Finding("memory", OK, f"{size(used)} used, no limit set on the server (maxmemory 0)")
    detail = f"{size(used)} used of {size(limit)}"
    if used > 0.9 * limit:
        return Finding("memory", WARN, detail, "delete old runs with `ddrl delete`, or raise maxmemory")
    return Finding("memory", OK, detail)


def _durability(client: Client) -> Finding:
    """Tell what a killed server loses."""
    if (policy := connection.appendfsync(client)) is None:
        return Finding("durability", OK, "unknown: this user may not read the server's settings")
    if not policy:
        detail = "no append-only file: all runs are lost when the server ends"
        return Finding("durability", WARN, detail, "set appendonly yes and appendfsync no")
    if policy == "everysec":
        detail = "appendfsync everysec: a killed server may lose 2 s of what it has acknowledged"
        return Finding("durability", WARN, detail, "set appendfsync to no or always, see docs/fleet.md")
    return Finding("durability", OK, f"appendfsync {policy}: a killed server loses nothing")


def _broken(client: Client) -> Iterator[Finding]:
    """Report items of the broker that workers could not read."""
    rows = capped_streams.read(client, keys.BROKEN, b"0-0", "queue", "reason", "item")[0]  # shortens it, too
    if capped_streams.is_exhausted(client, keys.BROKEN):
        yield Finding(
            "messages", WARN, f"{keys.BROKEN} takes no items: an id is too late", "run `ddrl prune`"
        )
    if rows:
        last = rows[-1] | {"age": duration(runs.server_ms(client) / 1e3 - rows[-1]["time_s"])}
        text = "the last one from queue {queue}, {age} ago ({reason}): {item!r:.100}".format(**last)
        detail = f"{counted(len(rows), 'item')} put aside that are none, {text}"
        remedy = f"find out who sends them; delete {keys.BROKEN} to forget them"
        yield Finding("messages", WARN, detail, remedy)


def security(client: Client, url: str) -> Finding:
    """Check whether others can use the server without a password, or read what is sent to it.

    Args:
        client: connected to the server.
        url: the client's; without a password in it, the server has required none.
    """
    parts = urlsplit(url)
    is_remote = parts.scheme != "unix" and not is_loopback(parts.hostname or "localhost")
    has_password = bool(parts.password or parse_qs(parts.query).get("password"))
    if not has_password and (is_remote or _listens_to_others(client)):
        detail = "no password required, and other machines can connect: they can publish weights"
        remedy = "set requirepass (and protected-mode yes), or bind 127.0.0.1"
        return Finding("security", WARN, detail, remedy)
    if is_remote and parts.scheme not in ("rediss", "sentinels"):
        detail = "password and experience travel unencrypted"
        return Finding("security", WARN, detail, "use rediss://, or a VPN, or a network that you trust")
    return Finding("security", OK, "nothing unsafe found")


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address means this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _listens_to_others(client: Client) -> bool:
    """Return whether the server's settings let other machines connect; False if they cannot be read."""
    try:
        settings: dict[str, str] = client.config_get("bind", "port", "tls-port", "protected-mode")
    except connection.OUTAGES:  # forbidden, or an old server that takes one name
        return False
    if settings.get("port", "0") == "0" and settings.get("tls-port", "0") == "0":
        return False
    if settings.get("protected-mode") == "yes":  # without a password it serves the loopback only
        return False
    addresses = [address.removeprefix("-") for address in settings.get("bind", "").split()] or ["*"]
    return not all(is_loopback(address) for address in addresses)


def _cores() -> Finding:
    if (usable := machine.cores()) < 2:
        return Finding("cores", WARN, "1", "playing and learning share one core: add another machine")
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
    detail = f"{_TRIAL_ENV} can be played (observations {shape}, {spaces.action_kind} actions)"
    return Finding("environment", OK, detail)
