"""`rediss://` on real certificates: the whole product through it, and every certificate that is refused."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest
from support.private_server import PrivateServer
from support.processes import Processes
from support.proxy import Authority, Proxy

from ddrl.store import connection, runs
from ddrl.store.connection import NotThereError, StoreError


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setattr(connection, "RETRIES", 0)
    return Authority(tmp_path / "ca.pem")


@pytest.fixture
def start(make_server: Callable[..., PrivateServer]) -> Iterator[Callable[..., Proxy]]:
    """Puts TLS before a server."""
    with contextlib.ExitStack() as stack:

        def proxy(context: object, server: PrivateServer | None = None) -> Proxy:
            started = Proxy((server or make_server(password="secret")).url, context)  # type: ignore[arg-type]
            stack.callback(started.close)
            return started

        yield proxy


def refusal(url: str, *kinds: type[StoreError]) -> str:
    """The one line with which a server is refused, of one of these kinds; StoreError if none are given."""
    with pytest.raises(StoreError) as caught, connection.connect(url) as client:
        connection.check(client)
    text = str(caught.value)
    assert type(caught.value) in (kinds or (StoreError,)) and "\n" not in text and "secret" not in text
    return text


def test_a_run_is_submitted_learned_and_played_through_tls(
    authority: Authority,
    start: Callable[..., Proxy],
    make_server: Callable[..., PrivateServer],
    processes: Processes,
) -> None:
    server = make_server(password="secret")
    proxy = start(authority.server(), server)
    env = {connection.CA_VARIABLE: str(authority.path)}
    run = json.loads(
        processes.ddrl(
            proxy.url,
            "submit",
            str(processes.config(stop={"env_steps": 3000})),
            "--detach",
            "--json",
            env=env,
        ).stdout
    )["run"]
    began = proxy.num_connections
    learner = processes.learner(proxy.url, run, env=env)
    worker = processes.worker(proxy.url, role="all", env=env)
    processes.until(lambda: runs.state(server.client, run).ended)
    assert learner.wait() == 0
    assert runs.state(server.client, run).status in ("time", "solved")
    assert proxy.num_connections - began >= 6
    logged = learner.text() + worker.text()
    assert "insecure" not in logged and "secret" not in logged
    assert "rediss://" in worker.text()

    # A worker that cannot trust the server ends with one line; Celery alone would try for ever.
    other = Authority(processes.folder / "other.pem")
    distrusting = processes.worker(proxy.url, env={connection.CA_VARIABLE: str(other.path)})
    assert distrusting.wait() == 1
    errors = [line for line in distrusting.text().splitlines() if "ddrl: error" in line]
    assert len(errors) == 1 and "not trusted" in errors[0] and "Traceback" not in distrusting.text()


def test_kombu_verifies_as_redis_py_does(authority: Authority, start: Callable[..., Proxy]) -> None:
    proxy = start(authority.server())
    trusting = connection.broker_url(f"{proxy.url}?ssl_ca_certs={authority.path}")
    with kombu.Connection(trusting) as broker:
        assert broker.default_channel.client.ping()
    distrusting = connection.broker_url(proxy.url)
    with kombu.Connection(distrusting) as broker, pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        broker.default_channel.client.ping()


def test_certificates_that_are_refused(
    authority: Authority, start: Callable[..., Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = start(authority.server())
    other = Authority(tmp_path / "other.pem")
    text = refusal(f"{good.url}?ssl_ca_certs={other.path}")
    assert "rediss://:***@localhost" in text and "not trusted" in text and "DDRL_REDIS_CA" in text
    monkeypatch.setenv(connection.CA_VARIABLE, str(authority.path))
    with connection.connect(good.url) as client:
        connection.check(client)
    assert "has expired" in refusal(start(authority.server(expired=True)).url)
    assert "for another name" in refusal(start(authority.server("elsewhere.example")).url)
    assert "for another name" in refusal(good.url.replace("localhost", "127.0.0.1"))


def test_tls_to_a_plain_port_and_plain_to_a_tls_port(
    authority: Authority, start: Callable[..., Proxy], make_server: Callable[..., PrivateServer]
) -> None:
    wrong = refusal(f"redis://{start(authority.server()).address}", NotThereError)
    assert "no server reachable" in wrong and wrong.endswith("write rediss:// into DDRL_REDIS_URL")
    server = make_server("--bind", "127.0.0.1", password="secret")
    server.client.config_set("port", port := free_port())
    # It waits for the end of a line.
    text = refusal(f"rediss://:secret@localhost:{port}/0?socket_timeout=0.5", NotThereError)
    assert text.endswith(", or use the port that speaks TLS")


def test_a_client_shows_its_certificate(
    authority: Authority, start: Callable[..., Proxy], tmp_path: Path
) -> None:
    proxy = start(authority.server(asks_client=True))
    trusted = f"{proxy.url}?ssl_ca_certs={authority.path}"
    # The server's alert may be lost with the connection; then the message is a guess.
    assert "for a client certificate" in refusal(trusted, StoreError, NotThereError)
    certificate, key = authority.client(tmp_path)
    shown = f"{trusted}&ssl_certfile={certificate}&ssl_keyfile={key}"
    with connection.connect(shown) as client:
        connection.check(client)
    with kombu.Connection(connection.broker_url(shown)) as broker:
        assert broker.default_channel.client.ping()
    assert connection.broker_ssl(shown)["ssl_keyfile"] == str(key)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("rediss://:secret@h?ssl_cert_reqs=none", "always verified"),
        ("rediss://:secret@h?ssl_cert_reqs=optional", "always verified"),
        ("rediss://:secret@h?ssl_check_hostname=false", "always verified"),
        ("rediss://:secret@h?ssl_ca_certs=/no/such.pem", "ssl_ca_certs=/no/such.pem: no file"),
        ("rediss://:secret@h?ssl_ca=/etc/passwd", "ssl_ca: unknown option; use ssl_ca_certs"),
        ("rediss://:secret@h?ssl_certfile=/etc/passwd", "go together"),
        ("redis://:secret@h?ssl_ca_certs=/etc/passwd", "write rediss://"),
        ("redis://:secret@h?wings=2", "wings"),
    ],
)
def test_options_that_are_refused(url: str, words: str) -> None:
    assert words in refusal(url)


def test_the_variable_for_the_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connection.CA_VARIABLE, str(tmp_path / "none.pem"))
    assert f"{connection.CA_VARIABLE}={tmp_path}/none.pem: no file" in refusal("rediss://:secret@h")
    Authority(tmp_path / "a b.pem")
    monkeypatch.setenv(connection.CA_VARIABLE, str(tmp_path / "a b.pem"))
    assert "redis:// has none" in refusal("redis://:secret@h")
    options = connection.connect("rediss://h").connection_pool.connection_kwargs
    assert options["ssl_ca_certs"] == str(tmp_path / "a b.pem")
    assert connection.broker_ssl("rediss://h")["ssl_ca_certs"] == str(tmp_path / "a b.pem")
    assert connection.broker_url("rediss://h").count("?") == 1
    assert connection.connect("unix:///s").connection_pool.connection_kwargs["path"] == "/s"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
