"""Which server is meant; every kind of server and certificate that is refused, each on a real one."""

from __future__ import annotations

import contextlib
import logging
import re
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest
import redis
from redis import Redis
from support.private_server import PrivateServer, free_port, refusal
from support.processes import Processes
from support.proxy import Authority, Proxy

from ddrl.store import connection
from ddrl.store.connection import NotThereError, StoreError

MakeServer, Patch = Callable[..., PrivateServer], pytest.MonkeyPatch
Start = Callable[[ssl.SSLContext], Proxy]


def test_a_server_that_is_not_there_is_named_without_its_password(home: Path):
    text = refusal(f"unix://:hunter2@{home}/nothing")
    assert f"unix://{home}/nothing" in text and "no server reachable" in text and "hunter2" not in text
    text = refusal(f"redis://me:hunter2@127.0.0.1:{free_port()}/3")
    assert "redis://me:***@127.0.0.1:" in text and "refused" in text and "hunter2" not in text


def test_a_password_that_is_missing_or_wrong_is_refused(make_server):
    private = make_server(password="right")
    connection.check(private.client)
    assert "requires a password" in refusal(f"unix://{private.socket}")
    text = refusal(f"unix://:wrong@{private.socket}")
    assert "password" in text and "wrong" not in text


def test_a_server_that_evicts_or_is_too_old_is_refused(make_server, monkeypatch: Patch):
    text = refusal(make_server("--maxmemory-policy", "allkeys-lru").url)
    assert "allkeys-lru" in text and "CONFIG SET maxmemory-policy noeviction" in text
    monkeypatch.setattr(connection, "OLDEST_VERSION", (99, 0))
    text = refusal(make_server().url)
    assert re.search(r"server version \d+\.\d+\.\d+ is too old; use Redis >= 6.2", text)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:pw@h:6379/0", "redis://:***@h:6379/0"),
        ("rediss://me:p@s/w:d@h/0", "rediss://me:***@h/0"),
        ("unix://:pw@/run/x.sock?db=2", "unix://:***@/run/x.sock?db=2"),
        ("redis+socket://:pw@/run/x.sock", "redis+socket://:***@/run/x.sock"),
        ("unix:///run/x.sock?password=pw&db=1", "unix:///run/x.sock?password=***&db=1"),
    ],
)
def test_passwords_are_masked(url: str, masked: str):
    assert connection.mask(url) == masked


def test_kombu_reaches_the_same_database_with_the_password(make_server):
    private = make_server(password="a:b@c")
    for database in (0, 3):
        url = f"{private.url}?db={database}"
        with kombu.Connection(connection.broker_url(url)) as broker, connection.connect(url) as ours:
            broker.default_channel.client.set("who", str(database))
            assert ours.get("who") == b"%d" % database
    assert connection.broker_url("redis://:pw@h:1/2") == "redis://:pw@h:1/2"
    assert connection.broker_url("rediss://h") == "rediss://h?ssl_cert_reqs=required"


def test_the_variable_names_the_server(home: Path, monkeypatch: Patch):
    assert connection.is_embedded() and connection.url().startswith("unix://:")
    assert connection.password() in connection.broker_url()
    assert connection.broker_url().startswith("redis+socket://:")
    monkeypatch.setenv("DDRL_REDIS_URL", "redis://far:6379/0")
    assert not connection.is_embedded()
    assert connection.url() == connection.broker_url() == "redis://far:6379/0"


def test_the_password_is_made_once_and_kept_from_others(home: Path):
    first = connection.password()
    assert len(first) == 48 and connection.password() == first
    path = home / "state" / "ddrl" / "password"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["password"]
    path.write_text("")
    with pytest.raises(StoreError, match="not a password"):
        connection.password()


def test_a_long_path_falls_back_to_a_short_one(home: Path, monkeypatch: Patch):
    folders = []
    for name in ("x" * 120, "x" * 120, "x" * 119 + "y"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / name))
        folders.append(connection.runtime_dir())
        assert len(str(connection.socket_path())) <= connection.MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(folders[-1].stat().st_mode) == 0o700
    for folder in set(folders):
        folder.rmdir()
    assert folders[0] == folders[1] != folders[2]


def test_without_a_runtime_folder_the_temp_folder_serves(home: Path, monkeypatch: Patch):
    monkeypatch.setattr("tempfile.tempdir", str(home))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert connection.runtime_dir().parent == home


def test_folders_that_are_open_to_others_or_anothers_are_refused(home: Path, monkeypatch: Patch):
    folder = connection.runtime_dir()
    folder.chmod(0o755)
    with pytest.raises(StoreError, match="mode 755 lets others in; run chmod 700"):
        connection.runtime_dir()
    folder.rmdir()
    folder.symlink_to(home)
    with pytest.raises(StoreError, match="is not a folder of user"):
        connection.runtime_dir()
    folder.unlink()
    folder.mkdir(mode=0o700)
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="is not a folder of user 54321"):
        patch.setattr("os.getuid", lambda: 54321)
        connection.runtime_dir()


# --- outages and retry ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "memory is full"),
        (redis.ResponseError("Error running script: @user_script:1: OOM command not allowed"), "memory is full"),
        (redis.ResponseError("MISCONF Errors writing to the AOF file: No space left"), "write to its disk"),
        (redis.ReadOnlyError("You can't write against a read only replica."), "failing over"),
        (redis.BusyLoadingError("Valkey is loading the dataset in memory"), "still loads"),
        (redis.ConnectionError("Connection refused"), r"does not answer \(Connection refused\)"),
        (redis.TimeoutError("Timeout reading from socket"), "does not answer"),
        (redis.ResponseError("WRONGTYPE"), None),
        (redis.InvalidResponse("Protocol error"), r"does not answer \(Protocol error\)"),
        (redis.AuthenticationError("no"), None),
        (ValueError("x"), None),
    ],
)  # fmt: skip
def test_an_outage_is_described_and_other_errors_are_none(error: Exception, sentence: str | None) -> None:
    assert re.search(sentence or "^None$", str(connection.outage(error)))


def failing(*errors: Exception) -> Callable[[], str]:
    """An action that raises these errors in turn, and then returns "done"."""
    left = list(errors)

    def action() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return action


def test_retry_ends_with_the_outage_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refused = redis.ConnectionError("Connection refused")
    assert connection.retry(failing(refused, refused)) == "done"
    begin, end = (record.message for record in caplog.records)
    assert begin == "the server does not answer (Connection refused); waiting for it"
    assert end.startswith("the server serves again after ")
    assert connection.retry(failing(refused), is_logged=False) == "done" and len(caplog.records) == 2


def test_retry_raises_what_does_not_pass_and_ends_with_stop_or_timeout() -> None:
    for is_logged in (True, False):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            connection.retry(failing(redis.ResponseError("WRONGTYPE")), is_logged=is_logged)
    stop, gone = threading.Event(), redis.ConnectionError("gone")
    stop.set()
    with pytest.raises(redis.ConnectionError):
        connection.retry(failing(gone, gone), stop=stop)
    with pytest.raises(redis.ConnectionError):
        connection.retry(failing(*[gone] * 99), timeout_s=0.05)


def test_a_server_whose_disk_was_full_rewrites_its_file(make_server) -> None:
    client = make_server("--appendonly", "yes").client
    before = client.info("commandstats").get("cmdstat_bgrewriteaof")
    full = redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")
    connection.retry(failing(full), client=client)
    assert before is None and "cmdstat_bgrewriteaof" in client.info("commandstats")


# --- scripts ---------------------------------------------------------------------------------------------


def test_a_script_is_called_by_hash_and_sent_once(client: Redis) -> None:
    client.script_flush()
    client.config_resetstat()
    for _ in range(3):
        connection.call(client, "release", ["key"], ["token"])
    with client.pipeline(transaction=False) as pipe:
        connection.call(pipe, "release", ["key"], ["token"])
        assert connection.execute(pipe) == [0]
    stats = client.info("commandstats")
    num_scripts = len([*(Path(connection.__file__).parent / "scripts").glob("*.lua")])
    assert (stats["cmdstat_evalsha"]["calls"], stats["cmdstat_script|load"]["calls"]) == (5, num_scripts)


def test_connections_that_are_lost_together_are_noticed_together(server: PrivateServer) -> None:
    with contextlib.closing(Proxy(server.url)) as proxy:
        first, second = (connection.connect(proxy.url, reply_timeout_s=limit_s) for limit_s in (0.5, 1e6))
        assert first.ping() and second.ping()
        assert proxy.cut() == 2
        assert first.ping()  # a reply was missing for 0.5 s, and it was sent again
        assert second.ping()  # would wait for its reply for eleven days


def test_every_script_says_what_it_takes_and_answers() -> None:
    folder = Path(connection.__file__).parent / "scripts"
    for path in folder.glob("*.lua"):
        opening = re.match(r"(--[^\n]*\n)+", path.read_text("utf-8"))
        assert opening is not None and "KEYS" in opening[0] and "ARGV" in opening[0], path.name


# --- TLS; test_acl.py plays a run through it -----------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.pem")


@pytest.fixture
def start(make_server: MakeServer) -> Iterator[Start]:
    """Puts TLS before a server."""
    server = make_server(password="secret")
    with contextlib.ExitStack() as stack:
        yield lambda context: stack.enter_context(contextlib.closing(Proxy(server.url, context)))


def test_a_worker_ends_without_trust(authority: Authority, start: Start, processes: Processes) -> None:
    """With one line; Celery alone would try for ever."""
    other = Authority(processes.folder / "other.pem")
    worker = processes.worker(start(authority.server()).url, env={connection.CA_VARIABLE: str(other.path)})
    assert worker.wait() == 1
    errors = [line for line in worker.text().splitlines() if "ddrl: error" in line]
    assert len(errors) == 1 and "not trusted" in errors[0] and "Traceback" not in worker.text()


def test_certificates_that_do_not_verify_are_refused(authority: Authority, start: Start, monkeypatch) -> None:
    good, other = start(authority.server()), Authority(authority.path.with_name("other.pem"))
    distrusting = kombu.Connection(connection.broker_url(good.url), transport_options={"max_retries": 0})
    with distrusting as broker, pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        broker.default_channel.client.ping()
    text = refusal(f"{good.url}?ssl_ca_certs={other.path}")
    assert "rediss://:***@localhost" in text and "not trusted" in text and "DDRL_REDIS_CA" in text
    monkeypatch.setenv(connection.CA_VARIABLE, str(authority.path))
    with connection.connect(good.url) as client:
        connection.check(client)
    assert "has expired" in refusal(start(authority.server(expired=True)).url)
    assert "for another name" in refusal(start(authority.server("elsewhere.example")).url)
    assert "for another name" in refusal(good.url.replace("localhost", "127.0.0.1"))


def test_tls_and_plain_mixed_up_name_the_remedy(authority: Authority, start: Start, make_server) -> None:
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
        *((url, "unknown scheme") for url in ("http://:secret@h", "amqp://me:secret@h", "/tmp/redis.sock")),
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
def test_schemes_and_options_that_weaken_or_confuse_are_refused(url: str, words: str) -> None:
    assert words in refusal(url, StoreError)
    if words != "wings":  # which may be an option of Kombu
        with pytest.raises(StoreError, match=re.escape(words)):
            connection.broker_url(url)


def test_the_variable_names_the_ca(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv(connection.CA_VARIABLE, str(tmp_path / "none.pem"))
    assert f"{connection.CA_VARIABLE}={tmp_path}/none.pem: no file" in refusal("rediss://:secret@h")
    path = str(Authority(tmp_path / "a b.pem").path)
    monkeypatch.setenv(connection.CA_VARIABLE, path)
    assert "redis:// has none" in refusal("redis://:secret@h")
    assert connection.connect("rediss://h").connection_pool.connection_kwargs["ssl_ca_certs"] == path
    assert connection.broker_ssl("rediss://h")["ssl_ca_certs"] == path
    assert connection.broker_url("rediss://h").count("?") == 1
    assert connection.connect("unix:///s").connection_pool.connection_kwargs["path"] == "/s"
