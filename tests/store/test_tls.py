"""`rediss://` on real certificates: every certificate that is refused. test_acl.py plays a run through TLS."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest
from support.private_server import PrivateServer, free_port, refusal
from support.processes import Processes
from support.proxy import Authority, Proxy

from ddrl.store import connection
from ddrl.store.connection import NotThereError, StoreError

Start = Callable[[ssl.SSLContext], Proxy]


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setattr(connection, "RETRIES", 0)
    return Authority(tmp_path / "ca.pem")


@pytest.fixture
def start(make_server: Callable[..., PrivateServer]) -> Iterator[Start]:
    """Puts TLS before a server."""
    with contextlib.ExitStack() as stack:
        server = make_server(password="secret")

        def proxy(context: ssl.SSLContext) -> Proxy:
            started = Proxy(server.url, context)
            stack.callback(started.close)
            return started

        yield proxy


def test_a_worker_that_cannot_trust_the_server_ends_with_one_line(
    authority: Authority, start: Start, processes: Processes
) -> None:
    """Celery alone would try for ever."""
    other = Authority(processes.folder / "other.pem")
    worker = processes.worker(start(authority.server()).url, env={connection.CA_VARIABLE: str(other.path)})
    assert worker.wait() == 1
    errors = [line for line in worker.text().splitlines() if "ddrl: error" in line]
    assert len(errors) == 1 and "not trusted" in errors[0] and "Traceback" not in worker.text()


def test_kombu_verifies_as_redis_py_does(authority: Authority, start: Start) -> None:
    proxy = start(authority.server())
    with kombu.Connection(connection.broker_url(f"{proxy.url}?ssl_ca_certs={authority.path}")) as broker:
        assert broker.default_channel.client.ping()
    distrusting = kombu.Connection(connection.broker_url(proxy.url), transport_options={"max_retries": 0})
    with distrusting as broker, pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        broker.default_channel.client.ping()


def test_certificates_that_do_not_verify_are_refused(
    authority: Authority, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = start(authority.server())
    text = refusal(f"{good.url}?ssl_ca_certs={Authority(tmp_path / 'other.pem').path}")
    assert "rediss://:***@localhost" in text and "not trusted" in text and "DDRL_REDIS_CA" in text
    monkeypatch.setenv(connection.CA_VARIABLE, str(authority.path))
    with connection.connect(good.url) as client:
        connection.check(client)
    assert "has expired" in refusal(start(authority.server(expired=True)).url)
    assert "for another name" in refusal(start(authority.server("elsewhere.example")).url)
    assert "for another name" in refusal(good.url.replace("localhost", "127.0.0.1"))


def test_tls_to_a_plain_port_and_plain_to_a_tls_port_name_the_remedy(
    authority: Authority, start: Start, make_server: Callable[..., PrivateServer]
) -> None:
    wrong = refusal(f"redis://{start(authority.server()).address}", NotThereError)
    assert "no server reachable" in wrong and wrong.endswith("write rediss:// into DDRL_REDIS_URL")
    server = make_server("--bind", "127.0.0.1", password="secret")
    server.client.config_set("port", port := free_port())  # which waits for the end of a line
    text = refusal(f"rediss://:secret@localhost:{port}/0?socket_timeout=0.5", NotThereError)
    assert text.endswith(", or use the port that speaks TLS")


def test_a_client_shows_its_certificate(authority: Authority, start: Start, tmp_path: Path) -> None:
    proxy = start(authority.server(asks_client=True))
    trusted = f"{proxy.url}?ssl_ca_certs={authority.path}"
    # The server's alert may be lost with the connection; then the message is a guess.
    assert "for a client certificate" in refusal(trusted)
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
def test_options_that_weaken_or_confuse_are_refused(url: str, words: str) -> None:
    assert words in refusal(url, StoreError)


def test_the_variable_names_the_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connection.CA_VARIABLE, str(tmp_path / "none.pem"))
    assert f"{connection.CA_VARIABLE}={tmp_path}/none.pem: no file" in refusal("rediss://:secret@h")
    path = str(Authority(tmp_path / "a b.pem").path)
    monkeypatch.setenv(connection.CA_VARIABLE, path)
    assert "redis:// has none" in refusal("redis://:secret@h")
    assert connection.connect("rediss://h").connection_pool.connection_kwargs["ssl_ca_certs"] == path
    assert connection.broker_ssl("rediss://h")["ssl_ca_certs"] == path
    assert connection.broker_url("rediss://h").count("?") == 1
    assert connection.connect("unix:///s").connection_pool.connection_kwargs["path"] == "/s"
