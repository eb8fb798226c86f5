"""No password is shown and no server is open to others: on real processes, Flower included."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support import commands
from support.private_server import PrivateServer, free_port, refusal
from support.processes import Processes, command_of, descendants

from ddrl.cli.doctor import is_loopback, security
from ddrl.store import connection, runs
from ddrl.store import server as embedded

MakeServer = Callable[..., PrivateServer]
SECRET = "open/se:same@17"  # in a URL it is quoted
SPELLINGS = (SECRET, quote(SECRET, safe=""))
REFRESH = "/api/workers?refresh=1"
USER, FLOWER_SECRET = "admin", "flower-secret"


def get(
    port: int, path: str, login: str | None = f"{USER}:{FLOWER_SECRET}", *, method: str = "GET"
) -> tuple[int, str]:
    """Return a page of Flower: its status, 0 without an answer, and its text."""
    flower = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    header = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}
    with contextlib.closing(flower), contextlib.suppress(OSError):
        flower.request(method, path, headers=header)
        reply = flower.getresponse()
        return reply.status, reply.read().decode()
    return 0, ""


def start_flower(processes: Processes, url: str) -> int:
    """Start Flower as the README does; return its port."""
    port = free_port()
    arguments = ["-m", "celery", "-A", "ddrl", "flower", "--address=127.0.0.1", f"--port={port}"]
    processes.start("flower", url, *arguments, env={"FLOWER_BASIC_AUTH": f"{USER}:{FLOWER_SECRET}"})
    return port


def shown(text: str) -> list[str]:
    """Return the secrets that a text shows."""
    return [secret for secret in (*SPELLINGS, FLOWER_SECRET) if secret in text]


def test_no_password_is_shown(make_server: MakeServer, processes: Processes, monkeypatch) -> None:
    """The server is reached by its unix socket and by TCP, where libraries write its URL differently."""
    server = make_server(password=SECRET)
    server.client.config_set("port", port := free_port())
    urls = [server.url, f"redis://:{SPELLINGS[1]}@127.0.0.1:{port}/0"]
    run = processes.detach(urls[0], stop={"return": None, "time": 600})
    roles = zip(urls, ("rollout", "evaluate"), strict=True)
    workers = [processes.worker(url, "--role", role) for url, role in roles]
    processes.learner(urls[1], run)
    flowers = [start_flower(processes, url) for url in urls]
    processes.until(lambda: runs.state(server.client, run).appended_steps > 200)

    for flower in flowers:  # it requires a login, and shows workers, tasks and queues, but no password
        processes.until(lambda flower=flower: get(flower, "/")[0] == 200)
        for path in ("/", "/api/workers", "/broker", "/workers"):
            for login in (None, f"{USER}:wrong"):
                assert get(flower, path, login)[0] == 401, path
        found: dict[str, Any] = {}

        def both_answered(flower: int = flower, found: dict[str, Any] = found) -> bool:
            """A busy worker is late with a part of what it tells, or with all of it."""
            found.update(json.loads(get(flower, REFRESH)[1] or "{}"))
            whole = [about for about in found.values() if {"stats", "active_queues"} <= set(about)]
            return len(whole) == 2

        processes.until(both_answered)
        assert {about["stats"]["broker"]["transport"] for about in found.values()} == {"redis"}
        assert "ddrl.rollout" in str([about["active_queues"] for about in found.values()])
        paths = ["/", "/api/workers", "/tasks", *(f"/worker/{quote(name)}" for name in found), "/broker"]
        statuses, pages = zip(*(get(flower, path) for path in paths), strict=True)
        assert set(statuses) == {200} and shown("".join(pages)) == []
        assert "ddrl.rollout" in pages[-1]  # the queues' lengths were read, so the password is right
        for (
            name
        ) in found:  # a page of Flower may run a script that a worker sent, with the rights of who looks
            assert get(flower, f"/api/worker/shutdown/{quote(name)}", method="POST")[0] == 403

    for process in processes.started:  # process lists show none either, not even for Flower
        lines = [command_of(pid) for pid in (process.pid, *descendants(process.pid))]
        assert lines and shown("".join(lines)) == []

    for url in urls:  # nor does any log or message, also when the server goes away
        monkeypatch.setenv(connection.URL_VARIABLE, url)
        done = [commands.run(*words) for words in (["doctor"], ["status", run], ["fleet"])]
        assert [printed.code for printed in done] == [0, 0, 0] and shown(str(done)) == []
        assert "***" in str(done) and re.search(r"^ok +security ", done[0].out, re.MULTILINE)
    server.kill()
    for worker in workers:
        processes.until(lambda worker=worker: "broker lost" in worker.text())
    for url in urls:
        monkeypatch.setenv(connection.URL_VARIABLE, url)
        error = commands.refused("status", run, code=3)
        assert "no server reachable" in error and shown(error) == []
    assert processes.started[-1].running and shown(processes.logs(last_chars=1_000_000)) == []
    processes.kill()  # else they wait for the server


def test_tracebacks_show_no_password(processes: Processes, tmp_path: Path) -> None:
    """Neither lines of code nor messages of libraries hold the URL."""
    script = """
import sys
from ddrl.store import connection
connection.RETRIES = 0
client = connection.connect()
print(client, client.connection_pool, file=sys.stderr)
client.ping()
"""
    for url in (f"redis://:{SPELLINGS[1]}@127.0.0.1:1/0", f"unix://:{SPELLINGS[1]}@{tmp_path}/none"):
        done = processes.start("script", url, "-c", script)
        assert done.wait() == 1 and "Traceback" in done.text()
        assert shown(done.text()) == []


@pytest.fixture
def hold(home: Path) -> Iterator[embedded.Hold]:
    """The embedded server of this test."""
    hold = embedded.acquire()
    yield hold
    hold.release()


def test_the_embedded_server_is_closed_to_others(hold: embedded.Hold) -> None:
    socket_path, state = connection.socket_path(), connection.state_dir()
    assert "requires a password" in refusal(f"unix://{socket_path}")
    assert connection.password() not in command_of(embedded.server_pid())
    assert (socket_path.parent.stat().st_mode | state.stat().st_mode) & 0o077 == 0
    with connection.connect() as client:
        assert client.config_get("port") == {"port": "0"}
        assert security(client, connection.url()).level == "ok"
    if os.geteuid() == 0:
        code = "import os, socket\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        connecting = f"socket.socket(socket.AF_UNIX).connect({str(socket_path)!r})"
        for statement in (f"open({str(state / 'password')!r})", f"os.listdir({str(state)!r})", connecting):
            code += f"try: {statement}\nexcept PermissionError: print('refused')\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["refused"] * 3


def test_a_server_without_a_password_never_listens(hold: embedded.Hold) -> None:
    port = free_port()
    with connection.connect() as client:
        client.config_set("requirepass", "")
        with pytest.raises(connection.StoreError, match="has no password"):
            hold.listen("0.0.0.0", port)
        assert client.config_get("port") == {"port": "0"}
        client.config_set("requirepass", connection.password())
    hold.listen("0.0.0.0", port)
    refusal(f"redis://127.0.0.1:{port}/0")


def test_a_server_that_is_open_to_all_is_reported(make_server: MakeServer) -> None:
    port, server = free_port(), make_server("--bind", "0.0.0.0", "--protected-mode", "no")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; it gets an address that is not the loopback
        except OSError as error:
            pytest.skip(f"this machine has no address but its loopback ({error})")
        address = probe.getsockname()[0]
    remote, local = f"redis://{address}:{port}/0", f"redis://127.0.0.1:{port}/0"
    with_password = [url.replace("//", f"//:{SPELLINGS[1]}@") for url in (local, remote)]
    openly, unencrypted = "warn: no password required, .* requirepass", "warn: .* unencrypted; .*rediss://"
    for setting, value, findings in (
        ("port", 0, {server.url: "ok"}),
        ("port", port, dict.fromkeys((server.url, local, remote), openly)),
        ("protected-mode", "yes", {server.url: "ok"}),
        ("protected-mode", "no", {server.url: openly}),
        ("requirepass", SECRET, dict(zip(with_password, ("ok", unencrypted), strict=True))),
    ):
        server.client.config_set(setting, value)
        for url, expected in findings.items():
            with connection.connect(url) as client:
                found = security(client, url)
            assert re.match(expected, f"{found.level}: {found.detail}; {found.remedy}")


@pytest.mark.parametrize("host", ["localhost", "127.3.2.1", "::1", "0.0.0.0", "*", "db"])
def test_only_addresses_of_this_machine_are_its_loopback(host: str) -> None:
    assert is_loopback(host) == (host in ("localhost", "127.3.2.1", "::1"))
