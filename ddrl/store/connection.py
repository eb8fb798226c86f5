"""Which server is used, how it is reached, and whether it will do.

`DDRL_REDIS_URL` names a server. Without it every process of a user resolves the same embedded one: a unix
socket in `runtime_dir()`, data and password in `state_dir()`. The embedded server always requires its
password, so that opening TCP later (`ddrl up --listen`) changes nothing for those already connected.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.client import Pipeline
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    BusyLoadingError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from ddrl.store import tls

log = logging.getLogger(__name__)

T = TypeVar("T")

URL_VARIABLE = "DDRL_REDIS_URL"
OLDEST_VERSION = (6, 2)
SCHEMES = ("redis", "rediss", "unix")
MAX_SOCKET_PATH_BYTES = 103  # macOS; Linux takes 107
RETRIES = 4  # waiting 0.2, 0.4, 0.8 and 1 s: longer than a restart of the embedded server


class UnreachableError(redis.ConnectionError):
    """A library above redis-py says that the server does not answer."""


UNREACHABLE = (redis.ConnectionError, redis.TimeoutError)
"""What a client raises when the server does not answer, now or for the time being."""


OUTAGES = (redis.RedisError,)
"""What to catch to ask `outage` whether an error will pass; an error that will not must be raised again."""

DISK_FULL = "the server cannot write to its disk; make room there"
_REFUSALS = {  # in a reply of the server, also amid a script's -> what it means
    "OOM ": "the server's memory is full; free some, or raise its maxmemory",
    "MISCONF ": DISK_FULL,
    "READONLY ": "the server takes no writes: it is a replica, or is failing over; name the primary",
    "NOREPLICAS ": "the server takes no writes, for it lacks replicas; bring them back",
    "LOADING ": "the server still loads its data",
    "UNBLOCKED ": "the server changes its role",
    "MASTERDOWN ": "the server is a replica that has lost its primary",
    "BUSY ": "the server is busy with a script",
}


class StoreError(RuntimeError):
    """The server or its place cannot be used; the message names it, its value and the remedy, in one line."""


class NotThereError(StoreError):
    """The server cannot be reached, or is loading its data: another time it may."""


def state_dir() -> Path:
    """Where the embedded server's data, log and password stay: `$XDG_STATE_HOME/ddrl`, or the home's."""
    base = _xdg("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return _private_folder(base / "ddrl", "set XDG_STATE_HOME to a folder that is yours")


def runtime_dir() -> Path:
    """Where the socket and the users' lock are: `$XDG_RUNTIME_DIR/ddrl`, else a folder under the temp folder.

    Whoever can replace the socket receives the password, hence it must be the user's and closed to others.
    A socket path too long for the kernel moves to a short folder named by a hash of the long one.
    """
    base, uid = _xdg("XDG_RUNTIME_DIR"), os.getuid()
    folder = base / "ddrl" if base else Path(tempfile.gettempdir()) / f"ddrl-{uid}"
    if len(os.fsencode(folder / "redis.sock")) > MAX_SOCKET_PATH_BYTES:
        name = f"ddrl-{uid}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"
        folder = Path(tempfile.gettempdir()) / name
        if len(os.fsencode(folder / "redis.sock")) > MAX_SOCKET_PATH_BYTES:
            folder = Path("/tmp") / name
    return _private_folder(folder, "set XDG_RUNTIME_DIR to a folder that is yours")


def socket_path() -> Path:
    """The embedded server's unix socket."""
    return runtime_dir() / "redis.sock"


def password() -> str:
    """The embedded server's password, made at the first call and kept (mode 0600) in `state_dir()`."""
    path = state_dir() / "password"
    try:
        if not path.exists():
            draft = path.with_name(f"password.{os.getpid()}.{secrets.token_hex(4)}")
            draft.touch(mode=0o600, exist_ok=False)
            draft.write_text(secrets.token_hex(24))
            try:
                os.link(draft, path)  # unlike a rename this never replaces the one another process just made
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        text = path.read_text().strip()
    except OSError as error:
        raise StoreError(f"{path}: cannot be used ({error.strerror}); make it yours (mode 600)") from error
    if not re.fullmatch(r"[0-9a-f]{32,}", text):
        raise StoreError(f"{path}: not a password made by ddrl; end all ddrl processes and delete the file")
    return text


def is_embedded() -> bool:
    """Whether the embedded server is meant, as `DDRL_REDIS_URL` names no other."""
    return not os.environ.get(URL_VARIABLE)


def url() -> str:
    """The server's URL, password included; show it to people through `mask` only."""
    return os.environ.get(URL_VARIABLE) or f"unix://:{password()}@{quote(str(socket_path()))}"


def broker_url(server_url: str | None = None) -> str:
    """The same server as Kombu spells it: `redis+socket://` for a unix socket; TLS options spelled out."""
    server_url = _checked(server_url or url())
    if not server_url.startswith("unix://"):
        return server_url
    parts = urlsplit(server_url)
    credentials = parts.netloc.rpartition("@")[0]
    database = parse_qs(parts.query).get("db", ["0"])[0]
    query = "" if database == "0" else f"?virtual_host={quote(database)}"
    return f"redis+socket://{credentials + '@' if credentials else ''}{parts.path}{query}"


def broker_ssl(server_url: str | None = None) -> dict[str, object]:
    """TLS options of `broker_url` for those who do not read them there, as Flower; empty without TLS."""
    return tls.options(_checked(server_url or url()))


def mask(server_url: str) -> str:
    """`server_url` with the password, wherever it stands, replaced by `***`."""
    hidden = re.sub(r"(://[^:/?]*:).*@", r"\1***@", server_url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", hidden)


def connect(server_url: str | None = None) -> redis.Redis:
    """A client with explicit timeouts; nothing is sent before its first command.

    Failed commands are sent again a few times, so a script that appends must be idempotent (ours are).

    Raises:
        StoreError: the URL has a scheme or an option that is unknown.
    """
    return _client(server_url, reply_timeout_s=10.0)


def connect_blocking(server_url: str | None = None, *, block_ms: int = 2000) -> redis.Redis:
    """A client for reads that block up to `block_ms`; its timeout lies 5 s beyond: quiet is no error."""
    return _client(server_url, reply_timeout_s=block_ms / 1000 + 5.0)


def check(client: redis.Redis) -> None:
    """Refuse a server that cannot be reached, is too old, or would evict keys.

    Raises:
        StoreError: one line with the server (password masked), what is wrong, and the remedy.
    """
    where = _where(client)
    remedy = "start the server" if is_embedded() else f"start the server or set {URL_VARIABLE}"
    try:
        _knock(client)
        client.ping()
        info: Any = client.info()
    except AuthenticationWrongNumberOfArgsError as error:
        raise StoreError(f"{where}: the server is too old; use Redis >= 6.2 or Valkey") from error
    except AuthenticationError as error:
        raise StoreError(_auth_message(where, client)) from error
    except BusyLoadingError as error:
        raise NotThereError(f"{where}: still loading its data; wait and try again") from error
    except NoPermissionError as error:
        raise StoreError(f"{where}: {error}; give the user the rights of its role (workers/acl)") from error
    except ResponseError as error:
        raise StoreError(f"{where}: PING or INFO refused ({error}); use Redis >= 6.2 or Valkey") from error
    except (RedisError, OSError) as error:
        if (trouble := tls.explain(error)) is not None:
            raise StoreError(f"{where}: {trouble[0]}; {trouble[1]}") from error
        if where.startswith("redis://") and _hung_up(error):
            remedy = f"if it wants TLS, write rediss:// into {URL_VARIABLE}"
        elif where.startswith("rediss://") and isinstance(error, redis.TimeoutError):
            remedy += ", or use the port that speaks TLS"
        elif where.startswith("rediss://") and _hung_up(error):
            remedy += ", or add ?ssl_certfile=...&ssl_keyfile=... if it asks for a client certificate"
        raise NotThereError(f"{where}: no server reachable ({_reason(error)}); {remedy}") from error
    version = str(info.get("redis_version", "unknown"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_VERSION:
        raise StoreError(f"{where}: server version {version} is too old; use Redis >= 6.2 or Valkey")
    policy = _eviction_policy(client, info)
    if policy not in (None, "noeviction"):
        raise StoreError(
            f"{where}: maxmemory-policy is {policy}, which drops experience in silence;"
            " run CONFIG SET maxmemory-policy noeviction and keep it in the server's configuration"
        )


def outage(error: BaseException) -> str | None:
    """Return why the server cannot serve for now, in one sentence; None if waiting does not help."""
    text = _sign(error) + " ".join(str(error).split())
    if isinstance(error, (ResponseError, BusyLoadingError)):
        return next((meaning for sign, meaning in _REFUSALS.items() if sign in text), None)
    if isinstance(error, (AuthenticationError, StoreError)):
        return None
    if isinstance(error, UNREACHABLE):
        return f"the server does not answer ({_reason(error)})"
    return None


def is_full(error: BaseException) -> bool:
    """Whether the server refuses what needs memory, for it has no more; what frees memory works then."""
    return outage(error) == _REFUSALS["OOM "]


def _sign(error: BaseException) -> str:
    """The first word of a refusal where redis-py has made a class of it."""
    signs = {
        OutOfMemoryError: "OOM ",
        ReadOnlyError: "READONLY ",
        BusyLoadingError: "LOADING ",
        MasterDownError: "MASTERDOWN ",
    }
    return next((sign for kind, sign in signs.items() if isinstance(error, kind)), "")


class Outage:
    """Logs the beginning and the end of each outage of the server, once.

    After a full disk the server is asked to rewrite its append-only file, where the user may: Redis 7 and Valkey open
    the file that follows a rewrite without O_APPEND, so that a write that failed half-way leaves a hole, and the next
    start refuses the file ("Bad file format").

    Args:
        client: connection to the server; without it no rewrite is asked for.
    """

    def __init__(self, client: redis.Redis | None = None) -> None:
        self._client = client
        self._since = 0.0
        self._logged = ""
        self._disk_was_full = False

    def note(self, error: Exception) -> None:
        """Log an outage; raise an error that is none."""
        text = outage(error)
        if text is None:
            raise error
        self._since = self._since or time.monotonic()
        if text != self._logged:
            log.warning("%s; waiting for it", text)
        self._logged = text
        self._disk_was_full |= text == DISK_FULL

    def over(self) -> None:
        """Log the end of an outage, if there was one; call it after each success."""
        if self._since:
            log.info("the server serves again after %.0f s", time.monotonic() - self._since)
            if self._disk_was_full and self._client is not None:
                with contextlib.suppress(*OUTAGES):
                    info: Any = self._client.info("persistence")
                    if info.get("aof_enabled"):
                        self._client.bgrewriteaof()
        self._since, self._logged, self._disk_was_full = 0.0, "", False


def retry(
    action: Callable[[], T],
    *,
    client: redis.Redis | None = None,
    stop: threading.Event | None = None,
    timeout_s: float | None = None,
) -> T:
    """Return `action()`, called again with back-off (0.1 s doubling to 1 s) while the server has an outage.

    Args:
        action: idempotent, as a reply may have been lost.
        client: see `Outage`.
        stop: once set, the outage is raised.
        timeout_s: after which the outage is raised; None: never.

    Raises:
        redis.exceptions.RedisError: not an outage, or one that did not end in time.
    """
    outages, pause_s, stop = Outage(client), 0.1, stop or threading.Event()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            result = action()
        except OUTAGES as error:
            outages.note(error)
            if stop.is_set() or (deadline is not None and time.monotonic() >= deadline):
                raise
        else:
            outages.over()
            return result
        left_s = pause_s if deadline is None else max(deadline - time.monotonic(), 0.0)
        stop.wait(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 1.0)


def call(
    client: redis.Redis | Pipeline, name: str, script_keys: Sequence[Any] = (), args: Sequence[Any] = ()
) -> Any:
    """Run scripts/<name>.lua by its hash; its text is sent only to a server that does not know it.

    In a pipeline the text is always sent, since the hash may turn out to be unknown among other replies.
    """
    text, digest = _script(name)
    parts = (len(script_keys), *script_keys, *args)
    if isinstance(client, Pipeline):
        return client.eval(text, *parts)
    try:
        return client.evalsha(digest, *parts)
    except NoScriptError:
        return client.eval(text, *parts)


@functools.cache
def _script(name: str) -> tuple[str, str]:
    """Text and hash of a script; one whose first line is `-- fenced` runs scripts/fence.lua first."""
    folder = Path(__file__).parent / "scripts"
    text = (folder / f"{name}.lua").read_text("utf-8")
    if text.startswith("-- fenced\n"):
        text = (folder / "fence.lua").read_text("utf-8") + text
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def maxmemory(client: redis.Redis) -> int:
    """The server's limit in bytes; 0 where there is none, or where it may not be asked."""
    try:
        info: Any = client.info("memory")
    except RedisError:
        return 0
    return int(info.get("maxmemory", 0))


def _client(server_url: str | None, reply_timeout_s: float) -> redis.Redis:
    server_url = _checked(server_url or url())
    keepalive = {} if server_url.startswith("unix://") else {"socket_keepalive": True}
    try:
        client = redis.Redis.from_url(
            server_url,
            socket_timeout=reply_timeout_s,
            socket_connect_timeout=3.0,
            health_check_interval=30,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.1), RETRIES),
            decode_responses=False,
            **keepalive,
        )
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # not connected: it only has to know each option
        return client
    except (ValueError, TypeError) as error:
        raise StoreError(f"{mask(server_url)}: {error}; correct {URL_VARIABLE}") from error


def _checked(server_url: str) -> str:
    """`server_url` as both redis-py and Kombu can be told, if they can; TLS options spelled out."""
    scheme = server_url.partition("://")[0]
    if scheme not in SCHEMES or "://" not in server_url:
        expected = ", ".join(f"{name}://" for name in SCHEMES)
        raise StoreError(f"{mask(server_url)}: unknown scheme of a server URL; use one of {expected}")
    try:
        return tls.spelled_out(server_url)
    except ValueError as error:
        raise StoreError(f"{mask(server_url)}: {error}") from None


def _knock(client: redis.Redis) -> None:
    """Connect once, to meet at once what no repetition mends: a wrong password, a certificate."""
    pool = client.connection_pool
    probe = pool.connection_class(**{**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)})
    try:
        probe.connect()
    except (RedisError, OSError) as error:
        if isinstance(error, AuthenticationError) or tls.explain(error) is not None:
            raise
    finally:
        probe.disconnect()


def _eviction_policy(client: redis.Redis, info: dict[str, Any]) -> str | None:
    """INFO names it on the servers we know; where it does not and CONFIG is forbidden, nobody can tell."""
    if "maxmemory_policy" in info:
        return str(info["maxmemory_policy"])
    try:
        reply: Any = client.config_get("maxmemory-policy")
    except ResponseError:
        return None
    values = [value.decode() if isinstance(value, bytes) else str(value) for value in reply.values()]
    return values[0] if values else None


def _where(client: redis.Redis) -> str:
    """The client's server as people write it, never with its password."""
    options = client.connection_pool.connection_kwargs
    if "path" in options:
        return f"unix://{options['path']}"
    secure = issubclass(client.connection_pool.connection_class, redis.SSLConnection)
    user = f"{options.get('username') or ''}:***@" if options.get("password") else ""
    address = f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"{'rediss' if secure else 'redis'}://{user}{address}/{options.get('db') or 0}"


def _auth_message(where: str, client: redis.Redis) -> str:
    if client.connection_pool.connection_kwargs.get("password") is None:
        return f"{where}: it requires a password; write it into {URL_VARIABLE} as scheme://:password@..."
    if is_embedded():
        path = state_dir() / "password"
        return f"{where}: its password is not the one in {path}; end all ddrl processes first"
    return f"{where}: the server refuses the user or password; correct {URL_VARIABLE}"


def _reason(error: Exception) -> str:
    """What the system said, in one line, without redis-py's own decoration."""
    cause = error.__cause__ or error
    return (cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)).splitlines()[0]


def _hung_up(error: Exception) -> bool:
    """Whether the other side took the connection, and closed it without a reply."""
    cause = error.__cause__ or error.__context__
    return isinstance(cause or error, (ConnectionResetError, BrokenPipeError, *tls.HUNG_UP)) or (
        cause is None and isinstance(error, redis.ConnectionError) and "closed" in str(error).lower()
    )


def _xdg(variable: str) -> Path | None:
    """An XDG base folder; relative values are to be ignored, says the specification."""
    value = os.environ.get(variable, "")
    return Path(value) if os.path.isabs(value) else None


def _private_folder(folder: Path, remedy: str) -> Path:
    """`folder`, made with mode 0700 if absent; refused if it is another's, a link, or open to others."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise StoreError(f"{folder}: cannot be made ({error.strerror}); {remedy}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise StoreError(f"{folder}: is not a folder of user {os.getuid()}; {remedy}")
    if status.st_mode & 0o077:
        raise StoreError(f"{folder}: mode {status.st_mode & 0o777:o} lets others in; run chmod 700 {folder}")
    return folder
