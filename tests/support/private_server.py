"""A real server for tests: started, stopped, killed, frozen, filled up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from ddrl.store import connection
from ddrl.store.connection import StoreError
from ddrl.store.server import server_binary

FOREIGN = "foreign:"  # prefix of keys that are not ddrl's


def until(condition: Callable[[], object], timeout_s: float = 120.0) -> float:
    """Return the seconds until `condition()` holds; fail after `timeout_s`, generous as the machine may be busy."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s:.0f} s"
        time.sleep(0.01)
    return time.monotonic() - began


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Between fork and exec: let a test run that is killed leave no process behind, where the kernel can do that."""
    if _prctl is not None:
        _prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def require_program() -> None:
    """Skip the test if no server program is installed; in CI, fail."""
    try:
        server_binary()
    except StoreError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def free_port() -> int:
    """Return a TCP port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refusal(url: str, *kinds: type[StoreError]) -> str:
    """Return the one line with which the server at `url` is refused, by one of these errors if any are given."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoreError) as caught:
        patch.setattr(connection, "RETRIES", 0)
        with connection.connect(url) as client:
            connection.check(client)
    text = str(caught.value)
    assert isinstance(caught.value, kinds or StoreError) and "\n" not in text and "secret" not in text
    return text


class PrivateServer:
    """A real server on a unix socket of its own, without persistence unless the options say so.

    Args:
        options: of its command line.
        password: that it requires.
        environment: variables added to its own.
    """

    def __init__(
        self, *options: str, password: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.environment = {**os.environ, **(environment or {})}
        self.folder = Path(tempfile.mkdtemp(prefix="ddrl-t", dir="/tmp"))  # short: socket paths are limited
        self.socket = self.folder / "s"
        self.url = (
            f"unix://:{quote(password, safe='')}@{self.socket}" if password else f"unix://{self.socket}"
        )
        self.options = [*options, "--requirepass", password] if password else options
        self.client: redis.Redis = connection.connect(self.url)
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start it, also again after it has ended, and wait until it answers."""
        fixed = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        command = [server_binary(), *fixed, "--save", "", "--appendonly", "no", *self.options]
        log_file = self.folder / "log"

        def prepare() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a limit of file size is then a full disk
            end_with_parent()

        with log_file.open("ab") as log:
            process = self.process = subprocess.Popen(
                command, stdout=log, preexec_fn=prepare, env=self.environment
            )

        def is_up() -> bool:
            assert process.poll() is None, log_file.read_text(errors="replace")[-1000:]
            return self.answers()

        until(is_up)

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        """End it as a crash does."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(20.0)

    def close(self) -> None:
        self.client.close()
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop it inside the block, as on a virtual machine that is paused."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def fill_memory(self, for_s: float) -> None:
        """Fill its memory with other keys for `for_s`, also what is freed meanwhile; then delete them."""
        self.client.config_set("maxmemory", self.client.info("memory")["used_memory"] + 2 * 1024**2)
        end, number = time.monotonic() + for_s, 0
        try:
            while time.monotonic() < end:
                try:
                    self.client.set(f"{FOREIGN}{number}", bytes(65536 if number < 30 else 1024))
                    number += 1
                except redis.OutOfMemoryError:
                    time.sleep(0.01)
        finally:
            self.client.config_set("maxmemory", 0)
            for first in range(0, number, 1000):
                self.client.delete(*(f"{FOREIGN}{n}" for n in range(first, min(first + 1000, number))))

    def file(self) -> Path:
        """Return its append-only file: `appendonly.aof.N.incr.aof` with the highest N."""
        files = (self.folder / "appendonlydir").glob("*.incr.aof")
        return max(files, key=lambda path: int(path.name.split(".")[2]))

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Let its append-only file not grow inside the block."""
        limit = self.file().stat().st_size + 65536
        soft, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield
        finally:
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (soft, hard))

    def is_rewriting(self) -> bool:
        """Return whether it rewrites its append-only file, or is about to."""
        info = self.client.info("persistence")
        return bool(info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])

    def is_writable(self) -> bool:
        """Return whether it takes a small write."""
        try:
            return bool(self.client.set(f"{FOREIGN}probe", 1))
        except redis.RedisError:
            return False
