"""How far the server is open to others, as far as one of its clients can tell."""

from __future__ import annotations

import ipaddress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

_CREDENTIALS = ("username", "password", "credential_provider")


def warning(client: redis.Redis) -> tuple[str, str] | None:
    """What is unsafe about the server or the way to it, and the remedy; None where nothing is known to be.

    Args:
        client: connected to the server.
    """
    options = client.connection_pool.connection_kwargs
    remote = "path" not in options and not is_loopback(str(options.get("host", "localhost")))
    if (remote or _listens_beyond(client)) and _admits_anybody(client):
        return (
            "asks for no password and listens beyond its machine: whoever reaches it may publish weights",
            "set requirepass (and protected-mode yes), or bind 127.0.0.1",
        )
    if remote and not issubclass(client.connection_pool.connection_class, redis.SSLConnection):
        return (
            "password and experience travel unencrypted",
            "use rediss://, or a VPN, or a network that you trust",
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means this machine only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listens_beyond(client: redis.Redis) -> bool:
    """Whether the server itself says that others may connect; one that says nothing is given the benefit."""
    try:
        found: Any = client.config_get("bind", "port", "tls-port", "protected-mode")
    except redis.ResponseError:  # forbidden, or an old server that takes one name
        return False
    raw = ((as_text(name), as_text(value)) for name, value in found.items())
    settings = dict(raw)
    if settings.get("port", "0") == "0" and settings.get("tls-port", "0") == "0":
        return False
    if settings.get("protected-mode") == "yes":  # without a password it takes the loopback's clients only
        return False
    bound = [address.removeprefix("-") for address in settings.get("bind", "").split()] or ["*"]
    return not all(is_loopback(address) for address in bound)


def _admits_anybody(client: redis.Redis) -> bool:
    """Whether a client without credentials is served."""
    pool = client.connection_pool
    options = {name: value for name, value in pool.connection_kwargs.items() if name not in _CREDENTIALS}
    options.update(retry=Retry(NoBackoff(), 0), socket_timeout=2.0)
    stranger = pool.connection_class(**options)
    try:
        stranger.connect()
        stranger.send_command("PING")
        return as_text(stranger.read_response()) == "PONG"
    except (redis.RedisError, OSError):
        return False
    finally:
        stranger.disconnect()


def as_text(value: Any) -> str:
    """A reply, whichever way the client was told to decode it."""
    return value.decode() if isinstance(value, bytes) else str(value)
