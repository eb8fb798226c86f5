"""A primary with replicas and sentinels on the loopback; the primary is lost on request."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import redis
from support.private_server import end_with_parent, free_port, until

from ddrl.store import connection
from ddrl.store.server import server_binary

NUM_SERVERS, NUM_SENTINELS = 3, 3
USER, PASSWORD, SENTINEL_PASSWORD = "fleet", "secret-of-the-servers", "secret-of-the-sentinels"
LEAVE_S = 10.0
FAULTS = ("killed", "frozen", "cut off", "woken early")


def sentinel_command(
    folder: Path, port: int, primary: int, *, quorum: int = 2, down_after_ms: int = 1000
) -> list[str]:
    """Return the command line of a sentinel, whose settings are written into `folder`."""
    settings = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": folder,
        "requirepass": SENTINEL_PASSWORD,
        "sentinel monitor fleet": f"127.0.0.1 {primary} {quorum}",
        "sentinel auth-pass fleet": PASSWORD,
        "sentinel sentinel-pass": SENTINEL_PASSWORD,
        "sentinel down-after-milliseconds fleet": down_after_ms,
        "sentinel failover-timeout fleet": 5000,
    }
    config = folder / f"sentinel-{port}.conf"
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    return [server_binary(), str(config), "--sentinel"]


class Failover(contextlib.AbstractContextManager["Failover"]):
    """Three servers, one of them the primary, and three sentinels, two of which agree on another.

    Args:
        down_after_ms: without an answer, after which a sentinel takes a server for lost.
    """

    def __init__(self, *, down_after_ms: int = 1000) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ddrl-ha-", dir="/tmp"))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by port
        self.ports = [free_port() for _ in range(NUM_SERVERS)]
        self._sentinel_ports = [free_port() for _ in range(NUM_SENTINELS)]
        places = ",".join(f"127.0.0.1:{port}" for port in self._sentinel_ports)
        query = f"service=fleet&sentinel_password={SENTINEL_PASSWORD}"
        self.url = f"sentinel://{USER}:{PASSWORD}@{places}/0?{query}"
        try:
            for port in self.ports:
                self.start(port, self.ports[0])
            until(lambda: self.num_replicas() == NUM_SERVERS - 1)
            for port in self._sentinel_ports:
                self._run(
                    port, sentinel_command(self.folder, port, self.ports[0], down_after_ms=down_after_ms)
                )
            self.settle()
        except BaseException:
            self.__exit__()
            raise

    def client(self, port: int) -> redis.Redis:
        """Return a client of one server, whatever its role."""
        return connection.connect(f"redis://:{PASSWORD}@127.0.0.1:{port}/0", reply_timeout_s=1.0)

    def start(self, port: int, primary: int | None = None) -> None:
        """Start a server, also again after it was killed; it follows `primary`, or whom the sentinels name."""
        primary = self.primary() if primary is None else primary
        folder = self.folder / str(port)
        folder.mkdir(exist_ok=True)
        command = [
            *(server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""),
            *("--requirepass", PASSWORD, "--primaryauth", PASSWORD, "--repl-diskless-sync-delay", "0"),
            *("--user", USER, "on", f">{PASSWORD}", "~*", "&*", "+@all"),
            *("--appendonly", "yes", "--appendfsync", "no"),
            *("--min-replicas-to-write", "1", "--min-replicas-max-lag", "2"),
            *(() if port == primary else ("--replicaof", f"127.0.0.1 {primary}")),
        ]  # fmt: skip
        self._run(port, command)
        until(lambda: self.answers(port))

    def _run(self, port: int, command: list[str]) -> None:
        with (self.folder / f"{port}.log").open("ab") as log:
            self._processes[port] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent
            )

    # --- state ---------------------------------------------------------------------------------------

    def answers(self, port: int) -> bool:
        try:
            with self.client(port) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def primary(self) -> int:
        """Return the port of the server that the sentinels name; 0 if they name none."""
        with connection.connect(self.url) as client:
            try:
                return int(cast(Any, client).connection_pool.get_master_address()[1])
            except redis.ConnectionError:
                return 0

    def num_replicas(self, port: int | None = None) -> int:
        """Return how many replicas a server has that are up to date; of the primary by default."""
        try:
            with self.client(self.ports[0] if port is None else port) as client:
                info = client.info("replication")
                return sum(info[f"slave{n}"]["state"] == "online" for n in range(info["connected_slaves"]))
        except redis.RedisError:
            return 0

    def role(self, port: int) -> str:
        """Return what a server says it is: master or slave."""
        with self.client(port) as client:
            return str(client.info("replication")["role"])

    def settle(self) -> int:
        """Wait until the sentinels know each other, and all servers; return the primary's port."""

        def settled() -> bool:
            primary = self.primary()
            return primary != 0 and self.num_replicas(primary) == NUM_SERVERS - 1 and self._sentinels_know()

        until(settled)
        return self.primary()

    def _sentinels_know(self) -> bool:
        with connection.connect(self.url) as client:
            for sentinel in cast(Any, client).connection_pool.sentinel_manager.sentinels:
                try:
                    state = sentinel.sentinel_masters()["fleet"]
                except redis.RedisError:
                    return False
                known = (
                    state["num-slaves"] >= NUM_SERVERS - 1,
                    state["num-other-sentinels"] >= NUM_SENTINELS - 1,
                )
                if not all(known) or state["is_sdown"]:
                    return False
        return True

    # --- faults --------------------------------------------------------------------------------------

    def kill(self, port: int) -> None:
        """End a server as a crash does."""
        self._processes[port].kill()
        self._processes[port].wait(LEAVE_S)

    @contextlib.contextmanager
    def frozen(self, port: int) -> Iterator[None]:
        """Stop a server inside the block, as on a machine that is paused."""
        os.kill(self._processes[port].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._processes[port].pid, signal.SIGCONT)

    @contextlib.contextmanager
    def cut_off(self, port: int) -> Iterator[None]:
        """Part a server from its replicas and the sentinels inside the block; clients that are connected stay so.

        The server listens elsewhere and ends their connections, so that nobody new can come.
        """
        client = self.client(port)
        with client:
            client.config_set("bind", "127.0.0.2")
            mine = client.client_id()
            for other in client.client_list():
                is_theirs = other["name"].startswith("sentinel-") or "S" in other["flags"]
                if is_theirs and int(other["id"]) != mine:
                    client.client_kill_filter(_id=other["id"])
            try:
                yield
            finally:
                client.config_set("bind", "127.0.0.1")

    def fail_over(self, fault: str, *, for_s: float = 0.0) -> None:
        """Let the primary be lost by one of FAULTS until another has taken over, and `for_s` longer.

        One that is woken early is frozen only until another was promoted, before its other replica is moved there.
        """
        primary = self.primary()

        def wait_for_another() -> None:
            until(lambda: self.primary() not in (0, primary))
            time.sleep(for_s)

        if fault == "killed":
            self.kill(primary)
            wait_for_another()
            self.start(primary)
        elif fault == "woken early":
            others = [port for port in self.ports if port != primary]
            with self.frozen(primary):
                until(lambda: any(self.role(port) == "master" for port in others))
            wait_for_another()
        else:
            with self.frozen(primary) if fault == "frozen" else self.cut_off(primary):
                wait_for_another()

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(LEAVE_S)
        shutil.rmtree(self.folder, ignore_errors=True)
