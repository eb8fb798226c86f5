"""The server of the one-command default: one per user, there while somebody uses it.

A user takes a shared lock, then makes sure that the server answers, starting a supervisor if there is none
(`ddrl.store.supervisor` tells of the locks). A supervisor killed takes its server along (Linux) or leaves it to the
next one, which ends it first; each user looks every 2 s and starts a new supervisor. What the server
acknowledged is in its append-only file.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.retry import Retry

from ddrl.store.connection import (
    URL_VARIABLE,
    StoreError,
    is_embedded,
    password,
    runtime_dir,
    socket_path,
    state_dir,
    url,
)
from ddrl.store.supervisor import GAVE_UP, log_path, open_log, read, server_binary, try_lock, unlock, write

START_TIMEOUT_S = 15.0  # for a server to answer; loading its data does not count
WATCH_EVERY_S = 2.0  # is there a supervisor?

_listening: list[int] = []  # lock file of `listen`, held until the process ends


class Hold:
    """This process's share in the embedded server, which runs at least until `release`."""

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._released = threading.Event()
        threading.Thread(target=self._watch, name="ddrl-embedded", daemon=True).start()

    def release(self) -> None:
        """Give the share back; the last one stops the server. A second call does nothing."""
        if not self._released.is_set():
            self._released.set()
            unlock(self._lock)

    def _watch(self) -> None:
        """Start a new supervisor where the old one was killed, unless it says that the server cannot run."""
        supervisor: subprocess.Popen[bytes] | None = None
        while not self._released.wait(WATCH_EVERY_S):
            if supervisor is not None and supervisor.poll() == GAVE_UP:
                return
            if not _supervised():
                supervisor = _start_supervisor()


@contextlib.contextmanager
def use() -> Iterator[str]:
    """The URL of the server: the one `DDRL_REDIS_URL` names, else the embedded one, started if absent.

    Raises:
        StoreError: the embedded server cannot be started.
    """
    if not is_embedded():
        yield url()
        return
    hold = acquire()
    try:
        yield url()
    finally:
        hold.release()


def acquire() -> Hold:
    """A share in the embedded server, which is started if absent; waits until it answers.

    Raises:
        StoreError: no server program, no answer within 15 s, or `DDRL_REDIS_URL` names another server.
    """
    if not is_embedded():
        raise StoreError(f"{URL_VARIABLE} is set, so the embedded server is not used; unset it")
    server_binary()  # refuse here, where somebody reads it
    deadline = time.monotonic() + START_TIMEOUT_S
    path = runtime_dir() / "users.lock"
    while (lock := try_lock(path, fcntl.LOCK_SH)) is None:  # a supervisor is stopping the server
        if time.monotonic() > deadline:
            raise StoreError(f"{socket_path()}: the server has been stopping for 15 s; see {log_path()}")
        time.sleep(0.05)
    try:
        _ensure_answer(deadline)
    except BaseException:
        unlock(lock)
        raise
    return Hold(lock)


def hold_if_running() -> Hold | None:
    """A share in the embedded server if it runs, else None; never starts one."""
    if not is_embedded() or (lock := try_lock(runtime_dir() / "users.lock", fcntl.LOCK_SH)) is None:
        return None
    if _answers() is not False:
        return Hold(lock)
    unlock(lock)
    return None


def running() -> bool:
    """Whether the embedded server answers."""
    return is_embedded() and bool(_answers())


def listen(host: str, port: int) -> tuple[str, str]:
    """Open the running embedded server on TCP, until it stops.

    A restarted server listens again as long as the calling process lives. The server always requires its
    password, which both returned texts contain.

    Returns:
        The URL for other machines, and the line to paste there to start a worker.

    Raises:
        StoreError: no embedded server runs, another process listens already, or the address is refused.
    """
    if not running():
        raise StoreError(f"{host}:{port}: no embedded server runs that could listen; start it first")
    client = _probe()
    lock = try_lock(runtime_dir() / "listen")
    if lock is None:
        taken = (runtime_dir() / "listen").read_text()
        raise StoreError(f"{host}:{port}: the server listens on {taken} already; end that `ddrl up` first")
    try:
        required: Any = client.config_get("requirepass")
        if not any(required.values()):
            raise StoreError(f"{host}:{port}: the server has no password, so it must not listen; restart it")
        client.config_set("bind", host)
        client.config_set("port", port)
    except (RedisError, OSError) as error:
        unlock(lock)
        raise StoreError(f"{host}:{port}: cannot listen ({error}); choose another address or port") from error
    except BaseException:
        unlock(lock)
        raise
    finally:
        client.close()
    write(lock, f"{host} {port}")
    _listening.append(lock)
    name = _reachable_name(host)
    remote = f"redis://:{password()}@{f'[{name}]' if ':' in name else name}:{port}/0"
    return remote, f"DDRL_REDIS_URL={shlex.quote(remote)} celery -A ddrl worker"


def _ensure_answer(deadline: float) -> None:
    """Wait until the server answers, starting a supervisor whenever there is none."""
    supervisor: subprocess.Popen[bytes] | None = None
    while not ((answers := _answers()) and _supervised()):
        if answers is None:
            deadline = time.monotonic() + START_TIMEOUT_S
        if supervisor is not None and supervisor.poll() == GAVE_UP:
            raise StoreError(f"{log_path()}: the embedded server does not start: {_last_log_line()}")
        if (supervisor is None or supervisor.poll() is not None) and not _supervised():
            supervisor = _start_supervisor()
        if time.monotonic() > deadline:
            raise StoreError(_why_no_answer())
        time.sleep(0.05)


def _why_no_answer() -> str:
    holder = read(state_dir() / "supervisor.lock")  # pid, host, socket
    if _supervised() and holder.split(" ", 2)[1:] != [socket.gethostname(), str(socket_path())]:
        return (
            f"{state_dir()}: in use by a server with another socket (pid, host, socket: {holder});"
            " set the same XDG_RUNTIME_DIR there and here, or another XDG_STATE_HOME"
        )
    return f"{socket_path()}: no answer after {START_TIMEOUT_S:.0f} s; see {log_path()}"


def _probe() -> redis.Redis:
    return redis.Redis.from_url(
        url(),
        socket_timeout=2.0,
        socket_connect_timeout=1.0,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
    )


def _answers() -> bool | None:
    """Whether the server answers; None while it loads its data."""
    try:
        with _probe() as client:
            return bool(client.ping())
    except AuthenticationError as error:
        path = state_dir() / "password"
        raise StoreError(f"{path}: not the running server's; end all ddrl processes first") from error
    except BusyLoadingError:
        return None
    except (RedisError, OSError):
        return False


def _supervised() -> bool:
    """Whether a supervisor of this data folder lives."""
    lock = try_lock(state_dir() / "supervisor.lock", fcntl.LOCK_SH)
    if lock is not None:
        unlock(lock)
    return lock is None


def _start_supervisor() -> subprocess.Popen[bytes]:
    """Start one that outlives this process; of several started at once, one stays and the others end."""
    log = open_log()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ddrl.store.supervisor"],
            cwd=Path(__file__).resolve().parent.parent,  # where `-m` looks first: finds this very ddrl
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    threading.Thread(target=process.wait, name="ddrl-reaper", daemon=True).start()
    return process


def _last_log_line() -> str:
    lines = log_path().read_text(errors="replace").splitlines() if log_path().exists() else []
    return next((line for line in reversed(lines) if line.strip() and "supervisor" not in line), "no log")


def _reachable_name(host: str) -> str:
    """What other machines call this one: `host`, unless that means all of its addresses."""
    try:
        every = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        every = host == "*"
    return socket.getfqdn() if every else host
