"""The connection to the server: its URL, clients, checks, outages, retry, and scripts.

`DDRL_REDIS_URL` names a server, or the sentinels that know which of several servers is the primary now:
`sentinel://user:password@host:port,host:port/db?service=mymaster`, or `sentinels://` with TLS. Without it every process
of a user finds the same embedded one: a unix socket in `runtime_dir()`, data and password in `state_dir()`. The
embedded server always requires its password, so that opening TCP later (`ddrl up --listen`) changes nothing for
processes that are connected.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
import re
import secrets
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qs, quote, urlsplit

import redis
from redis import Redis as Redis  # its type, for those who only pass a client on
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.client import Pipeline
from redis.exceptions import MasterDownError, NoPermissionError, NoScriptError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool, SentinelManagedConnection

from ddrl.store import keys

if TYPE_CHECKING:
    from ddrl.config import Durability

log = logging.getLogger(__name__)

T = TypeVar("T")

URL_VARIABLE = "DDRL_REDIS_URL"
CA_VARIABLE = "DDRL_REDIS_CA"
OLDEST_VERSION = (6, 2)
SCHEMES = ("redis", "rediss", "unix", "sentinel", "sentinels")
TLS_FILES = {  # option of the URL -> what it names
    "ssl_ca_certs": "certificates of CAs to trust besides the system's (PEM)",
    "ssl_certfile": "the client's certificate (PEM)",
    "ssl_keyfile": "the client's private key (PEM)",
}
SENTINEL_OPTIONS = ("service", "sentinel_username", "sentinel_password")
"""Options of the URL: the name of the primary, and who a client is for the sentinels; the rest is for the servers."""
SENTINEL_PORT = 26379
MAX_SOCKET_PATH_BYTES = 103  # macOS; Linux takes 107
RETRIES = 4  # waiting 0.2, 0.4, 0.8 and 1 s: longer than a restart of the embedded server


class StoreError(RuntimeError):
    """The server cannot be used; the message names it, the value and the remedy in one line."""


class NotThereError(StoreError):
    """The server is not reachable, or cannot serve for now: waiting helps."""


class LeaseLostError(StoreError):
    """Another learner took the run over; this one must not write any more."""


class RunGoneError(StoreError):
    """The server does not know the run any more: it came back empty or older, or the run was deleted."""


class UnreachableError(redis.ConnectionError):
    """A library above redis-py reports that the server does not answer."""


class NotConfirmedError(redis.ConnectionError):
    """The server has taken a write, but the run's `durability` is not reached: sending it again helps."""


UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse)
"""Errors of a client whose server does not answer, or not in its protocol: the connection is closed then."""


# --- the embedded server's folders --------------------------------------------------------------------


def state_dir() -> Path:
    """Return the folder of the embedded server's data, log and password: `$XDG_STATE_HOME/ddrl`, or the home's."""
    base = _xdg("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return _private_folder(base / "ddrl", "set XDG_STATE_HOME to a folder that is yours")


def runtime_dir() -> Path:
    """Return the folder of the socket and the users' lock: `$XDG_RUNTIME_DIR/ddrl`, else one under the temp folder.

    A program that can replace the socket receives the password, so the folder must be closed to other users. If the
    socket's path is too long for the kernel, the folder is a short one named by a hash of the long one.
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
    """Return the embedded server's password, made at the first call and kept (mode 0600) in `state_dir()`."""
    path = state_dir() / "password"
    try:
        if not path.exists():
            draft = path.with_name(f"password.{os.getpid()}.{secrets.token_hex(4)}")
            draft.touch(mode=0o600, exist_ok=False)
            draft.write_text(secrets.token_hex(24))
            with contextlib.suppress(FileExistsError):  # another process has just made one, which stays
                os.link(draft, path)
            draft.unlink()
        text = path.read_text().strip()
    except OSError as error:
        raise StoreError(f"{path}: cannot be used ({error.strerror}); make it yours (mode 600)") from error
    if not re.fullmatch(r"[0-9a-f]{32,}", text):
        raise StoreError(f"{path}: not a password made by ddrl; end all ddrl processes and delete the file")
    return text


def _xdg(variable: str) -> Path | None:
    """Return an XDG base folder; the specification says to ignore relative values."""
    value = os.environ.get(variable, "")
    return Path(value) if os.path.isabs(value) else None


def _private_folder(folder: Path, remedy: str) -> Path:
    """Return `folder`, made with mode 0700 if absent; refuse one that is another's, a link, or open to others."""
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


# --- URLs ---------------------------------------------------------------------------------------------


def is_embedded() -> bool:
    """Return whether the embedded server is used, since `DDRL_REDIS_URL` names no other."""
    return not os.environ.get(URL_VARIABLE)


def url() -> str:
    """Return the server's URL with its password; show it to people through `mask` only."""
    return os.environ.get(URL_VARIABLE) or f"unix://:{password()}@{quote(str(socket_path()))}"


def broker_url(server_url: str | None = None) -> str:
    """Return the URL of the same server for Kombu: `redis+socket://` for a unix socket; TLS options spelled out."""
    server_url = _checked(server_url or url())
    parts = urlsplit(server_url)
    who = "".join(parts.netloc.rpartition("@")[:2])  # with their "@", if there are any
    if _has_sentinels(server_url):
        return ";".join(f"sentinel://{who}{host}:{port}{parts.path}" for host, port in _sentinels(server_url))
    if not server_url.startswith("unix://"):
        return server_url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    query = "" if database == "0" else f"?virtual_host={quote(database)}"
    return f"redis+socket://{who}{parts.path}{query}"


def broker_options(server_url: str | None = None) -> dict[str, object]:
    """Return what Kombu must know beside `broker_url`: of sentinels, the primary's name and how to reach them."""
    server_url = _checked(server_url or url())
    if not _has_sentinels(server_url):
        return {}
    return {"master_name": _service(server_url), "sentinel_kwargs": _sentinel_options(server_url)}


def broker_ssl(server_url: str | None = None) -> dict[str, object]:
    """Return the TLS options of `broker_url` for programs that do not read them there, such as Flower."""
    server_url = _checked(server_url or url())
    if not server_url.startswith(("rediss://", "sentinels://")):
        return {}
    query = parse_qs(urlsplit(server_url).query)
    files: dict[str, object] = {name: query[name][0] for name in TLS_FILES if name in query}
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True, **files}


def mask(server_url: str) -> str:
    """Return `server_url` with the password, wherever it stands, replaced by `***`."""
    hidden = re.sub(r"(://[^:/?]*:).*@", r"\1***@", server_url)
    return re.sub(r"([?&]\w*password=)[^&]*", r"\1***", hidden)


def _checked(server_url: str) -> str:
    """Return a URL that redis-py and Kombu read alike, with the TLS options spelled out.

    Raises:
        StoreError: the scheme or a TLS option cannot be used; never with a secret.
    """
    if urlsplit(server_url).scheme not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise StoreError(f"{mask(server_url)}: unknown scheme of a server URL; use one of {schemes}")
    try:
        return _with_tls_options(server_url)
    except ValueError as error:
        raise StoreError(f"{mask(server_url)}: {error}") from None


def _with_tls_options(server_url: str) -> str:
    """Return a `rediss://` URL with all that verification needs in its query; other URLs as they are.

    The server's certificate and name are always verified. Kombu verifies nothing for a bare `rediss://`, and redis-py
    takes options that switch verification off, so the options are written into the URL, and such ones refused.
    """
    parts = urlsplit(server_url)
    options = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    given = {name: value for name, value in options.items() if name.startswith("ssl_")}
    ca = os.environ.get(CA_VARIABLE)
    if parts.scheme not in ("rediss", "sentinels"):
        secure = f"{parts.scheme}s://" if parts.scheme == "sentinel" else "rediss://"
        if given:
            raise ValueError(f"{min(given)} is for TLS; write {secure} or leave it out")
        if ca and parts.scheme != "unix":
            raise ValueError(
                f"{CA_VARIABLE} asks for TLS, {parts.scheme}:// has none; write {secure} or unset it"
            )
        return server_url
    if given.pop("ssl_cert_reqs", "required") != "required" or "ssl_check_hostname" in given:
        raise ValueError(
            f"certificates are always verified; leave ssl_cert_reqs and ssl_check_hostname out"
            f" and name the CA in {CA_VARIABLE}"
        )
    added = {} if "ssl_cert_reqs" in options else {"ssl_cert_reqs": "required"}
    if ca and "ssl_ca_certs" not in options:
        given["ssl_ca_certs"] = added["ssl_ca_certs"] = ca
    for name, value in given.items():
        if name not in TLS_FILES:
            raise ValueError(f"{name}: unknown option; use {', '.join(TLS_FILES)}")
        if not os.access(value, os.R_OK) or not Path(value).is_file():
            where = CA_VARIABLE if name in added else name
            raise ValueError(f"{where}={value}: no file that can be read; name {TLS_FILES[name]}")
    if ("ssl_certfile" in given) != ("ssl_keyfile" in given):
        raise ValueError("ssl_certfile and ssl_keyfile go together; give both")
    query = "&".join(f"{name}={quote(value)}" for name, value in added.items())
    return server_url + ("&" if parts.query else "?") * bool(query) + query


def _has_sentinels(server_url: str) -> bool:
    return server_url.startswith(("sentinel://", "sentinels://"))


def _sentinels(server_url: str) -> list[tuple[str, int]]:
    """Return host and port of each sentinel."""
    found = [urlsplit(f"//{host}") for host in urlsplit(server_url).netloc.rpartition("@")[2].split(",")]
    return [(part.hostname or "localhost", part.port or SENTINEL_PORT) for part in found]


def _service(server_url: str) -> str:
    """Return the name under which the sentinels know the primary."""
    return parse_qs(urlsplit(server_url).query).get("service", ["mymaster"])[0]


def _sentinel_options(server_url: str) -> dict[str, Any]:
    """Return redis-py's options of a connection to a sentinel: one that does not answer is left for the next one."""
    query = parse_qs(urlsplit(server_url).query)
    names = {name.removeprefix("sentinel_"): query[name][0] for name in SENTINEL_OPTIONS[1:] if name in query}
    tls = broker_ssl(server_url)
    options = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0, "retry": Retry(NoBackoff(), 0)}
    return {**options, **names, **({"ssl": True, **tls} if tls else {})}


# --- clients ------------------------------------------------------------------------------------------


ASK_EVERY_S = 5.0  # how often a connection asks the sentinels whether its server still is the primary
REPLY_TIMEOUT_S = 3.0  # also for sending: a server that takes longer is lost, or the connection is


def connect(server_url: str | None = None, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> redis.Redis:
    """Return a client with explicit timeouts; it connects at its first command.

    It sends failed commands again a few times, so each script must be idempotent; a client of sentinels does not.

    Raises:
        StoreError: the URL has a scheme or an option that is unknown.
    """
    server_url = _checked(server_url or url())
    options: dict[str, Any] = {
        "socket_timeout": reply_timeout_s,
        "socket_connect_timeout": 3.0,
        "retry": Retry(ExponentialBackoff(cap=1.0, base=0.1), RETRIES),
    }
    if not server_url.startswith("unix://"):
        options["socket_keepalive"] = True
        options["connection_class"] = SecureConnection if server_url.startswith("rediss:") else Connection
    try:
        if _has_sentinels(server_url):
            client = _primary(server_url, options)
        else:
            client = redis.Redis.from_url(server_url, **options)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # not connected: it only has to know each option
        return client
    except (ValueError, TypeError) as error:
        raise StoreError(f"{mask(server_url)}: {error}; correct {URL_VARIABLE}") from error


class _Wary:
    """A connection that ends before its next command once any other of this process had no reply in time.

    Connections that are lost without notice, as behind a firewall that forgets them, are lost together; each would
    take its own timeout to notice it, one after another.
    """

    _lost_at = -math.inf  # of the class: of the newest of them
    _connected_at = 0.0

    def connect_check_health(self, *args: Any, **options: Any) -> None:
        """Connect to the server, unless that is done."""
        if self._sock is None:  # type: ignore[attr-defined]
            self._connected_at = time.monotonic()
        super().connect_check_health(*args, **options)  # type: ignore[misc]

    def check_health(self) -> None:
        """Called before each command."""
        if self._connected_at < _Wary._lost_at:
            self.disconnect()  # type: ignore[attr-defined]
            raise redis.ConnectionError("another connection to the server had no reply in time")
        super().check_health()  # type: ignore[misc]

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one reply."""
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except redis.TimeoutError:
            _Wary._lost_at = time.monotonic()
            raise


class ReplyTooLongError(redis.RedisError):
    """A reply is longer than its reader holds; the connection is closed, and the command is not sent again."""


def bounded(connection_class: type, num_bytes: int, error: type[Exception] = ReplyTooLongError) -> type:
    """Return a class of connections that close at a reply of more bytes, and raise `error`.

    What workers write may be as long as the server holds, and only its reader learns how long it is.
    """

    class Socket:
        """Counts the bytes of a reply."""

        def __init__(self, whole: Any) -> None:
            self._whole, self.num_read = whole, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._whole, name)

        def recv_into(self, *args: Any) -> int:
            num: int = self._whole.recv_into(*args)
            self.num_read += num
            if self.num_read > num_bytes:
                raise error(f"a reply has more than {num_bytes} bytes")
            return num

    class Bounded(connection_class):  # type: ignore[misc]
        def _connect(self) -> Any:
            return Socket(super()._connect())

        def read_response(self, *args: Any, **options: Any) -> Any:
            if isinstance(self._sock, Socket):
                self._sock.num_read = 0
            return super().read_response(*args, **options)

    return Bounded


def bound_replies(client: redis.Redis, num_bytes: int) -> None:
    """Let a client raise ReplyTooLongError at a reply of more bytes, from its next connection on."""
    pool = client.connection_pool
    pool.connection_class = bounded(pool.connection_class, num_bytes)
    pool.disconnect()
    pool.reset()


class Connection(_Wary, redis.Connection):
    """A connection over TCP."""


class SecureConnection(_Wary, redis.SSLConnection):
    """A connection with TLS."""


class _Primary(_Wary, SentinelManagedConnection):
    """A connection that leaves a server when another has taken over, also if that one goes on answering.

    A server that is cut off from its replicas and the sentinels still answers reads, and refuses writes (NOREPLICAS).
    """

    _ask_at = 0.0

    def check_health(self) -> None:
        """Called before each command."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + ASK_EVERY_S
            with contextlib.suppress(MasterNotFoundError):
                if self.connection_pool.get_master_address() != (self.host, self.port):
                    self.disconnect()  # type: ignore[no-untyped-call]
                    self.connect()  # type: ignore[no-untyped-call]
        super().check_health()

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one reply."""
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as error:
            if str(error).startswith("NOREPLICAS"):
                self.disconnect()  # type: ignore[no-untyped-call]
            raise


class _SecurePrimary(_Primary, redis.SSLConnection):
    """The same with TLS."""


def _primary(server_url: str, options: dict[str, Any]) -> redis.Redis:
    """Return a client of the server that is the primary now: each new connection asks the sentinels for it.

    It does not send failed commands again, as redis-py would do so to the server that failed (redis/redis-py#3874).
    """
    parts = urlsplit(server_url)
    scheme = "rediss" if parts.scheme == "sentinels" else "redis"
    one_server = parts._replace(scheme=scheme, netloc=parts.netloc.partition(",")[0]).geturl()
    options = options | {"retry": Retry(NoBackoff(), 0)}
    template = redis.ConnectionPool.from_url(one_server, **options)
    ignored = (*SENTINEL_OPTIONS, "host", "port", "connection_class")
    of_servers = {name: value for name, value in template.connection_kwargs.items() if name not in ignored}
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        _sentinels(server_url),
        sentinel_kwargs=_sentinel_options(server_url),
        connection_class=_SecurePrimary if scheme == "rediss" else _Primary,
        **of_servers,
    )
    client: redis.Redis = sentinels.master_for(_service(server_url))  # type: ignore[no-untyped-call]
    return client


def connect_blocking(server_url: str | None = None, *, block_ms: int = 1000) -> redis.Redis:
    """Return a client for reads that block up to `block_ms`; its timeout is as much longer."""
    return connect(server_url, reply_timeout_s=block_ms / 1000 + REPLY_TIMEOUT_S)


def maxmemory(client: redis.Redis) -> int:
    """Return the bytes that all runs must fit in; 0 if there is no limit, or if the user may not ask.

    The embedded server's own limit refuses no run: its learners trim the oldest experience when it is full.
    """
    if client.connection_pool.connection_kwargs.get("path") == str(socket_path()):
        return 0
    try:
        return int(cast(Any, client).info("memory").get("maxmemory", 0))
    except redis.RedisError:
        return 0


def server_id(client: redis.Redis) -> str:
    """Return an id that the server draws when it starts."""
    return str(cast(Any, client).info("server")["run_id"])


def appendfsync(client: redis.Redis) -> str | None:
    """Return the policy of the server's append-only file; "" if it keeps none, None if the user may not ask."""
    try:
        settings: Any = client.config_get("append*")
        return str(settings["appendfsync"]) if settings["appendonly"] == "yes" else ""
    except (redis.RedisError, KeyError):
        return None


def why_not_durable(client: redis.Redis, durability: Durability) -> str:
    """Return why the server cannot confirm writes in this way, and the remedy; "" if it can."""
    if durability == "replica":
        info: Any = client.info("replication")
        return "" if info["connected_slaves"] else "the server has no replica; attach one"
    if durability == "disk":
        if appendfsync(client) in ("", "no"):
            return "the server does not say when it has synced its file; set appendonly yes and appendfsync always"
        try:
            client.execute_command("WAITAOF", 0, 0, 1)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            return f"the server refuses WAITAOF ({error}); use Valkey, or Redis >= 7.2"
    return ""


# --- the check of a server ----------------------------------------------------------------------------


def check(client: redis.Redis) -> None:
    """Refuse a server that is not reachable, is too old, or would evict keys.

    Raises:
        StoreError: one line with the server (password masked), what is wrong, and the remedy.
    """
    where = _where(client)
    remedy = "start the server" if is_embedded() else f"start the server or set {URL_VARIABLE}"
    try:
        _knock(client)
        info: Any = client.info()  # PING is refused while the disk is full
    except redis.AuthenticationWrongNumberOfArgsError as error:
        raise StoreError(f"{where}: the server is too old; use Redis >= 6.2 or Valkey") from error
    except redis.AuthenticationError as error:
        raise StoreError(_auth_message(where, client)) from error
    except NoPermissionError as error:
        raise StoreError(f"{where}: {error}; give the user the rights of its role (workers/acl)") from error
    except (redis.BusyLoadingError, redis.ResponseError) as error:
        if (reason := outage(error)) is not None:
            raise NotThereError(f"{where}: {reason}; try again afterwards") from error
        raise StoreError(f"{where}: INFO refused ({error}); use Redis >= 6.2 or Valkey") from error
    except (redis.RedisError, OSError) as error:
        if (trouble := _tls_problem(error)) is not None:
            raise StoreError(f"{where}: {trouble[0]}; {trouble[1]}") from error
        if where.startswith("redis://") and _hung_up(error):
            remedy = f"if it wants TLS, write rediss:// into {URL_VARIABLE}"
        elif isinstance(error, MasterNotFoundError):
            remedy = f"start the sentinels, or correct their addresses, password or service in {URL_VARIABLE}"
        elif where.startswith("rediss://") and isinstance(error, redis.TimeoutError):
            remedy += ", or use the port that speaks TLS"
        elif where.startswith("rediss://") and _hung_up(error):
            remedy += ", or add ?ssl_certfile=...&ssl_keyfile=... if it asks for a client certificate"
        raise NotThereError(f"{where}: no server reachable ({_reason(error)}); {remedy}") from error
    version = str(info.get("redis_version", "unknown"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_VERSION:
        raise StoreError(f"{where}: server version {version} is too old; use Redis >= 6.2 or Valkey")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreError(
            f"{where}: maxmemory-policy is {policy}, which drops experience in silence;"
            " run CONFIG SET maxmemory-policy noeviction and keep it in the server's configuration"
        )


def _knock(client: redis.Redis) -> None:
    """Connect once without retries, and raise what no retry can mend: a wrong password, a certificate."""
    pool = client.connection_pool
    probe = pool.connection_class(**{**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)})
    try:
        probe.connect()
    except (redis.RedisError, OSError) as error:
        if isinstance(error, redis.AuthenticationError) or _tls_problem(error) is not None:
            raise
    finally:
        probe.disconnect()


def _where(client: redis.Redis) -> str:
    """Return the client's server as people write it, never with its password."""
    pool = client.connection_pool
    options = pool.connection_kwargs
    if "path" in options:
        return f"unix://{options['path']}"
    user = f"{options.get('username') or ''}:***@" if options.get("password") else ""
    scheme, nodes = "redis", [options]
    if isinstance(pool, SentinelConnectionPool):
        sentinels = pool.sentinel_manager.sentinels
        scheme, nodes = "sentinel", [one.connection_pool.connection_kwargs for one in sentinels]
    addresses = sorted(f"{node.get('host', 'localhost')}:{node.get('port', 6379)}" for node in nodes)
    secure = "s" if issubclass(pool.connection_class, redis.SSLConnection) else ""
    return f"{scheme}{secure}://{user}{','.join(addresses)}/{options.get('db') or 0}"


def _auth_message(where: str, client: redis.Redis) -> str:
    if client.connection_pool.connection_kwargs.get("password") is None:
        return f"{where}: it requires a password; write it into {URL_VARIABLE} as scheme://:password@..."
    if is_embedded():
        path = state_dir() / "password"
        return f"{where}: its password is not the one in {path}; end all ddrl processes first"
    return f"{where}: the server refuses the user or password; correct {URL_VARIABLE}"


def _reason(error: Exception) -> str:
    """Return the system's message in one line, without redis-py's own decoration."""
    if isinstance(error, MasterNotFoundError):
        return "no sentinel names a primary that is up"
    cause = error.__cause__ or error
    return (cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)).splitlines()[0]


def _hung_up(error: Exception) -> bool:
    """Return whether the other side accepted the connection and closed it without a reply."""
    cause = error.__cause__ or error.__context__
    return isinstance(cause or error, (ConnectionResetError, BrokenPipeError, *_HUNG_UP)) or (
        cause is None and isinstance(error, redis.ConnectionError) and "closed" in str(error).lower()
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; a pool of Celery wraps them."""
    while error is not None:
        error = getattr(error, "exc", error)
        yield error
        error = error.__cause__ or error.__context__


_HUNG_UP = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # the other side went away; TLS itself is fine
_OTHER_NAME = ("its certificate is for another name", "use a name that it holds, or issue it for this one")
_CERTIFICATE_PROBLEMS = {  # OpenSSL's X509_V_ERR_* -> what is wrong, remedy
    9: ("its certificate is not valid yet", "set this machine's clock"),
    10: ("its certificate has expired", "renew it on the server"),
    62: _OTHER_NAME,  # of a host
    64: _OTHER_NAME,  # of an IP address
}


def _tls_problem(error: BaseException) -> tuple[str, str] | None:
    """Return what is wrong with TLS and the remedy; None if neither the error nor a cause of it is about TLS."""
    found = next((one for one in causes(error) if isinstance(one, ssl.SSLError)), None)
    if found is None or isinstance(found, _HUNG_UP):
        return None
    if isinstance(found, ssl.SSLCertVerificationError):
        remedy = f"name the CA's file in {CA_VARIABLE} or by ?ssl_ca_certs="
        distrust = (f"its certificate is not trusted ({found.verify_message})", remedy)
        return _CERTIFICATE_PROBLEMS.get(found.verify_code, distrust)
    reason = found.reason or ""
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"):
        return "does not speak TLS", "use the port that does, or redis:// on a network you trust"
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return "asks for a client certificate", "add ?ssl_certfile=...&ssl_keyfile=... to the URL"
    if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason:
        return "refuses the client certificate", "use one that its CA has signed"
    return f"TLS failed ({reason.lower().replace('_', ' ') or found})", "see the server's log"


# --- outages and retry --------------------------------------------------------------------------------

OUTAGES = (redis.RedisError,)
"""Errors to catch before asking `outage`; one that is not an outage must be raised again."""

_MEMORY_FULL = "the server's memory is full; free some, or raise its maxmemory"
_DISK_FULL = "the server cannot write to its disk; make room there"
_READ_ONLY = "the server takes no writes: it is a replica, or is failing over; name the primary"
_NO_SCRIPTS = "the server does not know ddrl's scripts; a learner of this version loads them"
# First word of an error reply, also of a script; redis-py's class for it, if any; its meaning.
_REFUSALS: tuple[tuple[str, type[Exception] | tuple[()], str], ...] = (
    ("OOM", redis.OutOfMemoryError, _MEMORY_FULL),
    ("MISCONF", (), _DISK_FULL),
    ("READONLY", redis.ReadOnlyError, _READ_ONLY),
    ("NOREPLICAS", (), "the server takes no writes, for it lacks replicas; bring them back"),
    ("LOADING", redis.BusyLoadingError, "the server still loads its data"),
    ("UNBLOCKED", (), "the server changes its role"),
    ("MASTERDOWN", MasterDownError, "the server is a replica that has lost its primary"),
    ("BUSY", (), "the server is busy with a script; SCRIPT KILL ends it"),
    ("NOSCRIPT", NoScriptError, _NO_SCRIPTS),
)


def outage(error: BaseException) -> str | None:
    """Return why the server cannot serve for now, in one sentence; None if waiting does not help."""
    for word, kind, meaning in _REFUSALS:
        if isinstance(error, kind) or (isinstance(error, redis.ResponseError) and f"{word} " in str(error)):
            return meaning
    if isinstance(error, NotConfirmedError):
        return str(error)
    if isinstance(error, UNREACHABLE) and not isinstance(error, redis.AuthenticationError):
        return f"the server does not answer ({_reason(error)})"
    return None


def is_full(error: BaseException) -> bool:
    """Return whether the server refuses a command for lack of memory; commands that free memory still work."""
    return outage(error) == _MEMORY_FULL


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
        self._since, self._logged, self._disk_was_full = 0.0, "", False

    def note(self, error: Exception) -> None:
        """Log an outage; raise an error that is none."""
        if (text := outage(error)) is None:
            raise error
        self._since = self._since or time.monotonic()
        if text != self._logged:
            log.warning("%s; waiting for it", text)
        self._logged = text
        self._disk_was_full |= text == _DISK_FULL

    def over(self) -> None:
        """Log the end of an outage, if there was one; call it after each success."""
        if self._since:
            log.info("the server serves again after %.0f s", time.monotonic() - self._since)
            if self._disk_was_full and self._client is not None:
                with contextlib.suppress(*OUTAGES):
                    if cast(Any, self._client).info("persistence").get("aof_enabled"):
                        self._client.bgrewriteaof()
        self._since, self._logged, self._disk_was_full = 0.0, "", False


def retry(
    action: Callable[[], T],
    *,
    client: redis.Redis | None = None,
    stop: threading.Event | None = None,
    timeout_s: float = math.inf,
    is_logged: bool = True,
) -> T:
    """Return `action()`, called again with back-off (0.1 s doubling to 1 s) while the server has an outage.

    Args:
        action: idempotent, as a reply may have been lost.
        client: see `Outage`.
        stop: once set, the outage is raised.
        timeout_s: after which the outage is raised.
        is_logged: log the outage; False where another thread of the process does.

    Raises:
        redis.exceptions.RedisError: not an outage, or one that did not end in time.
    """
    outages, pause_s, stop = Outage(client), 0.1, stop or threading.Event()
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            result = action()
        except OUTAGES as error:
            if is_logged:
                outages.note(error)
            if outage(error) is None or stop.is_set() or time.monotonic() >= deadline:
                raise
        else:
            outages.over()
            return result
        stop.wait(min(pause_s, max(deadline - time.monotonic(), 0.0)))
        pause_s = min(2 * pause_s, 1.0)


# --- scripts ------------------------------------------------------------------------------------------

_SCRIPTS = Path(__file__).parent / "scripts"


def call(
    client: redis.Redis | Pipeline,
    name: str,
    script_keys: Sequence[Any] = (),
    args: Sequence[Any] = (),
    *,
    durability: Durability = "process",
) -> Any:
    """Run scripts/<name>.lua by its hash, as a worker may run no other script; a pipeline is for `execute`.

    scripts/common.lua runs before it. A script whose first line is `-- fenced` gets a learner's fencing token as its
    first argument. A mapping among the arguments stands for its names and values in turn. With `durability` beyond
    "process" the call returns when everything that the server has written until then is on its disk, or on a replica.

    Raises:
        NotConfirmedError: it is not, within CONFIRM_MS; the script must be idempotent, as it is called again.
        LeaseLostError: the token is not the newest.
        RunGoneError: the run is not there, or is as it was before the token was given.
        redis.exceptions.NoScriptError: the server lacks the script and the user may not load it, an outage.
    """
    _, digest = _script(name)
    parts = [len(script_keys), *script_keys]
    for arg in args:
        parts += chain(*arg.items()) if isinstance(arg, Mapping) else [arg]
    if isinstance(client, Pipeline):
        return client.evalsha(digest, *parts)
    try:
        return _loading(client, lambda: _confirmed(client, durability, "EVALSHA", digest, *parts))
    except redis.ResponseError as error:
        kind = str(error).partition(" ")[0]
        if kind not in ("FENCED", "GONE"):
            raise
        run = keys.run_of(script_keys[0])
    if kind == "GONE":
        raise RunGoneError(f"run {run}: the server came back without it, or older")
    raise LeaseLostError(f"run {run}: another learner took it over; this one has stopped writing")


def execute(pipe: Pipeline) -> list[Any]:
    """Execute a pipeline with scripts. It is executed again where the server did not know them, so it only reads.

    Raises:
        redis.exceptions.NoScriptError: as for `call`.
    """
    commands = [*pipe.command_stack]

    def read() -> list[Any]:
        pipe.command_stack = [*commands]
        found: list[Any] = pipe.execute()
        return found

    return _loading(pipe, read)


def digest(name: str) -> str:
    """Return the SHA-1 by which clients in other languages call a script; a learner has loaded it."""
    return _script(name)[1]


def _loading(client: redis.Redis | Pipeline, run: Callable[[], T]) -> T:
    """Return the reply of scripts that the server knows, or else are loaded with all others if the user may."""
    try:
        return run()
    except NoScriptError as error:
        with client.pipeline(transaction=False) as pipe:
            for path in _SCRIPTS.glob("*.lua"):
                pipe.script_load(_script(path.stem)[0])
            try:
                pipe.execute()
            except NoPermissionError:
                raise error from None
        return run()


CONFIRM_MS = 2_000
ASK_S = 0.5  # for the answer of a server beside the primary


def _confirmed(client: redis.Redis, durability: Durability, *command: Any) -> Any:
    """Run a command and wait, on the same connection, until `durability` is reached."""
    if durability == "process":
        return client.execute_command(*command)  # type: ignore[no-untyped-call]
    followers = _followers(client) if durability == "replica" else set()
    needed = max(1, len(followers))
    wait, holders = (("WAITAOF", 1, 0), "disks") if durability == "disk" else (("WAIT", needed), "replicas")
    with client.pipeline(transaction=False) as pipe:
        pipe.execute_command(*command)  # type: ignore[no-untyped-call]
        pipe.execute_command(*wait, CONFIRM_MS)  # type: ignore[no-untyped-call]
        if followers:
            pipe.info("replication")
        reply, confirmed, *infos = answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    count = confirmed[0] if isinstance(confirmed, list) else confirmed
    if count < needed:
        client.connection_pool.disconnect(inuse_connections=False)  # see `_Primary`
        raise NotConfirmedError(f"{count} of {needed} {holders} hold what was written")
    # A replica that came may have confirmed for one that left.
    if any(_online(info) != followers for info in infos):
        raise NotConfirmedError("the primary's replicas have changed meanwhile")
    return reply


def _online(info: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Return host and port of the replicas in INFO of a primary's replication."""
    rows = [row for row in info.values() if isinstance(row, dict)]
    return {(row["ip"], row["port"]) for row in rows if row["state"] == "online"}


def _followers(client: redis.Redis) -> set[tuple[str, int]]:
    """Return host and port of each replica of a server with sentinels; all must confirm a write. Else none.

    Sentinels may promote any of them, and name it only afterwards: until then the old primary may still serve, with
    the others. So each server that a sentinel takes to be up and the primary does not list is asked; where it does not
    answer, what the sentinel knows counts. Not seen is one that was promoted from a primary which has lost its
    replication id since, as by a restart from its append-only file.

    Raises:
        NotConfirmedError: another server may take over.
    """
    if not isinstance(pool := client.connection_pool, SentinelConnectionPool):
        return set()
    pool.get_master_address()  # type: ignore[no-untyped-call]
    info: Any = client.info("replication")
    online = _online(info)
    manager = pool.sentinel_manager
    options = manager.connection_kwargs | {"socket_timeout": ASK_S, "socket_connect_timeout": ASK_S}
    # Not of our classes: a server that does not answer says nothing of the connections to the primary.
    is_secure = issubclass(options.pop("connection_class"), redis.SSLConnection)
    kind = redis.SSLConnection if is_secure else redis.Connection
    for row in manager.sentinels[0].sentinel_slaves(pool.service_name):  # after INFO, which may take long
        if row["is_sdown"] or (row["ip"], row["port"]) in online:
            continue
        try:
            there = redis.ConnectionPool(kind, host=row["ip"], port=row["port"], **options)
            with redis.Redis.from_pool(there) as server:
                is_rival = may_take_over(server.info("replication"), info)
        except redis.RedisError:
            is_rival = row["role-reported"] == "master" or row["master-link-status"] == "ok"
        if is_rival:
            raise NotConfirmedError(f"{row['ip']}:{row['port']} may take over from the primary")
    return online


def may_take_over(server: Mapping[str, Any], primary: Mapping[str, Any]) -> bool:
    """Return whether a server has been promoted when it followed this primary or the one before, or follows another.

    Two sentinels may have promoted a replica each of the one before.

    Args:
        server, primary: INFO of their replication.
    """
    if server["role"] != "master":
        is_led = server["master_link_status"] == "up"
        return is_led and bool(server["master_replid"] != primary["master_replid"])
    return server["master_replid2"] in {primary["master_replid"], primary["master_replid2"]} - {"0" * 40}


@functools.cache
def _script(name: str) -> tuple[str, str]:
    """Text and hash of a script; one whose first line is `-- fenced` runs scripts/fence.lua first."""
    text = (_SCRIPTS / f"{name}.lua").read_text("utf-8")
    before = ["common", "fence"] if text.startswith("-- fenced\n") else ["common"]
    text = "".join((_SCRIPTS / f"{one}.lua").read_text("utf-8") for one in before) + text
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
