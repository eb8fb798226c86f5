"""What all tests share: no test touches the user's own server, and each real server ends with its test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from ddrl.store import connection
from ddrl.supervisor import death_with_parent, read, server_binary, try_lock, unlock


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Return once `condition()` holds; fail after `timeout_s`, generous as others use the cores too."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class PrivateServer:
    """A real server of one test module, on a unix socket of its own, without persistence unless asked."""

    def __init__(self, *options: str, password: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ddrl-t", dir="/tmp"))  # short: socket paths are limited
        self.socket = self.folder / "s"
        credentials = f":{quote(password, safe='')}@" if password else ""
        self.url = f"unix://{credentials}{self.socket}"
        self.options = [*options, *(("--requirepass", password) if password else ())]
        self.client: redis.Redis = connection.connect(self.url)
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start it again with the same options, and wait until it answers."""
        fixed = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        defaults = ["--save", "", "--appendonly", "no"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [server_binary(), *fixed, *defaults, *self.options],
                stdout=log,
                preexec_fn=death_with_parent(),  # a test run that is killed leaves none behind either
            )
        wait_until(self.answers)

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def stop(self) -> None:
        """End it cleanly."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(20.0)

    def close(self) -> None:
        self.client.close()
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _require_program() -> None:
    try:
        server_binary()
    except connection.StoreError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def module_server() -> Iterator[PrivateServer]:
    _require_program()
    private = PrivateServer()
    yield private
    private.close()


@pytest.fixture
def server(module_server: PrivateServer) -> Iterator[PrivateServer]:
    """The module's private server, running and empty."""
    if module_server.process is None or module_server.process.poll() is not None:
        module_server.start()
    module_server.client.flushall()
    yield module_server


@pytest.fixture
def make_server() -> Iterator[Callable[..., PrivateServer]]:
    """Private servers with options of their own: `make_server("--maxmemory-policy", "allkeys-lru")`."""
    _require_program()
    made: list[PrivateServer] = []

    def make(*options: str, password: str = "") -> PrivateServer:
        made.append(PrivateServer(*options, password=password))
        return made[-1]

    yield make
    for private in made:
        private.close()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """On a busy machine a second thread costs small networks forty times what it saves."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _nobodys_home() -> Iterator[None]:
    """Even a test that asks for nothing finds no server, data or password of the person who runs it."""
    folder = tempfile.mkdtemp(prefix="ddrl-h", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        _move_home(patch, Path(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fresh XDG folders, hence an embedded server of this test's own, which ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="ddrl-h", dir="/tmp"))
    _move_home(monkeypatch, folder)
    yield folder
    _end_embedded(folder / "state" / "ddrl")
    shutil.rmtree(folder, ignore_errors=True)


def _move_home(patch: pytest.MonkeyPatch, folder: Path) -> None:
    for variable, name in (("XDG_STATE_HOME", "state"), ("XDG_RUNTIME_DIR", "run")):
        (folder / name).mkdir(mode=0o700)
        patch.setenv(variable, str(folder / name))
    patch.delenv(connection.URL_VARIABLE, raising=False)


def _end_embedded(state: Path) -> None:
    """Wait for supervisor and server to end; end what is left by the ids in their lock files."""
    for name in ("supervisor.lock", "redis.pid"):
        path, deadline = state / name, time.monotonic() + 10.0
        while path.exists():
            lock = try_lock(path)
            if lock is not None:
                unlock(lock)
                break
            if time.monotonic() > deadline:
                os.kill(int(read(path).split()[0]), signal.SIGKILL)
            time.sleep(0.05)
