"""Fixtures of all tests. No test touches the user's own server; each real server and process ends with its test."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from support.private_server import PrivateServer, require_program
from support.processes import Processes

from ddrl.store import connection
from ddrl.store import server as embedded


def pytest_collection_finish() -> None:
    """Leave what all tests have in common out of collections; each would take a second, in which no thread goes on."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def module_server() -> Iterator[PrivateServer]:
    require_program()
    private = PrivateServer()
    yield private
    private.close()


@pytest.fixture
def server(module_server: PrivateServer) -> Iterator[PrivateServer]:
    """The private server of the module, running and empty."""
    if module_server.process is None or module_server.process.poll() is not None:
        module_server.start()
    module_server.client.flushall()
    yield module_server


@pytest.fixture
def client(server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> Redis:
    """A connection to the private server, which commands and tasks find, too."""
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    return server.client


@pytest.fixture
def make_server() -> Iterator[Callable[..., PrivateServer]]:
    """Starts private servers with options: `make_server("--maxmemory-policy", "allkeys-lru")`."""
    require_program()
    made: list[PrivateServer] = []

    def make(*options: str, password: str = "") -> PrivateServer:
        made.append(PrivateServer(*options, password=password))
        return made[-1]

    yield make
    for private in made:
        private.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts workers, learners and commands in the test's folder."""
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread: on a busy machine a second one makes small networks much slower."""
    import torch

    torch.set_num_threads(1)


@contextlib.contextmanager
def empty_home() -> Iterator[Path]:
    """Empty XDG folders, which hide the embedded server, data and password of the user who runs the tests."""
    folder = Path(tempfile.mkdtemp(prefix="ddrl-h", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in (("XDG_STATE_HOME", "state"), ("XDG_RUNTIME_DIR", "run")):
            (folder / name).mkdir(mode=0o700)
            patch.setenv(variable, str(folder / name))
        patch.delenv(connection.URL_VARIABLE, raising=False)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _session_home() -> Iterator[None]:
    with empty_home():
        yield


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty home, hence an embedded server of the test's own, which ends with it."""
    with empty_home() as folder:
        yield folder
        _end_embedded()


def _end_embedded() -> None:
    """Stop a server whose users were killed, and wait for one that others still use."""
    deadline = time.monotonic() + 10.0
    while (pid := embedded.server_pid()) and (hold := embedded.hold_if_running()) is not None:
        hold.release()
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


WAITING = (
    "faults",
    "test_docs.py",
    "test_deployment.py",
    "test_end_to_end.py",
    "test_sweep.py",
)  # long, mostly idle


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with tests that wait, in each process's share of the tests: else the last of them are waited for alone."""
    num = getattr(config, "workerinput", {}).get("workercount", 1)
    first = [item for item in items if {item.path.name, item.path.parent.name} & {*WAITING}]
    others = [item for item in items if item not in set(first)]
    size = -(-len(others) // num)
    shares = ([*first[k::num], *others[k * size : (k + 1) * size]] for k in range(num))
    items[:] = [item for share in shares for item in share]
