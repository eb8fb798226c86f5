"""A server that fails over: found through its sentinels, also with TLS; writes that a replica or a disk confirms."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest
import redis
from redis import Redis
from support.failover import PASSWORD, SENTINEL_PASSWORD, USER, Failover, sentinel_command
from support.private_server import PrivateServer, end_with_parent, free_port, refusal, require_program, until
from support.proxy import Authority
from support.runs import start, stream_steps, target_config

from ddrl.config import ConfigError, Durability
from ddrl.runs import submit
from ddrl.store import connection, runs, stream
from ddrl.store.connection import NotConfirmedError


@pytest.fixture(scope="module")
def servers() -> Iterator[Failover]:
    require_program()
    with Failover() as servers:
        yield servers


def appended(client: Redis, run: str, seq: int) -> stream.Answer:
    """Append, again while the servers change on a busy machine."""
    return connection.retry(lambda: append(client, run, seq, "replica"))


def append(client: Redis, run: str, seq: int, durability: Durability) -> stream.Answer:
    return stream.append(
        client,
        run,
        {b"x": b"y"},
        producer=1,
        incarnation=1,
        seq=seq,
        num_transitions=1,
        durability=durability,
    ).answer


def test_sentinels_name_the_primary_to_us_and_to_kombu(servers: Failover) -> None:
    with connection.connect(servers.url) as ours:
        connection.check(ours)
        ours.set("who", "primary")
        assert ours.info("replication")["role"] == "master"
    options = connection.broker_options(servers.url)
    with kombu.Connection(connection.broker_url(servers.url), transport_options=options) as broker:
        assert broker.default_channel.client.get("who") == b"primary"
    assert connection.broker_options("redis://h") == {}
    masked = connection.mask(servers.url)
    assert masked.startswith(f"sentinel://{USER}:***@127.0.0.1:") and "secret" not in masked


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (SENTINEL_PASSWORD, "secret", "no sentinel names a primary that is up"),
        ("service=fleet", "service=secret", "correct their addresses, password or service in DDRL_REDIS_URL"),
        (f"{USER}:{PASSWORD}", f"{USER}:secret", "the server refuses the user or password"),
        ("sentinel://", "sentinels://", "no sentinel names a primary that is up"),
        ("?", "?ssl_ca_certs=/etc/passwd&", "write sentinels:// or leave it out"),
    ],
)
def test_what_cannot_be_reached_through_sentinels_is_refused(
    servers: Failover, old: str, new: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, url := servers.url.replace(old, new))
    text = refusal(url)
    assert words in text and text.startswith("sentinel") and f"{USER}:***@127.0.0.1:" in text


def test_a_write_is_acknowledged_when_a_replica_has_it(servers: Failover) -> None:
    replicas = [port for port in servers.ports if port != servers.settle()]
    with connection.connect(servers.url) as client:
        run = start(client, target_config(durability="replica"))
        assert appended(client, run, 0) is stream.Answer.WAIT
        with contextlib.ExitStack() as frozen:
            for port in replicas:
                frozen.enter_context(servers.frozen(port))
            with pytest.raises(NotConfirmedError, match="^0 of . replicas hold what was written$") as caught:
                append(client, run, 1, "replica")
            assert connection.outage(caught.value) == str(caught.value)
        servers.settle()
        assert appended(client, run, 1) is stream.Answer.WAIT
        assert stream_steps(client, run) == 2 and runs.state(client, run).duplicates == 1


def test_a_write_is_not_acknowledged_while_a_replica_is_made_the_primary(servers: Failover) -> None:
    """Also by a process that has never written, and of a sentinel that has not seen that replica follow this primary.

    As where two sentinels fail over from the same primary, one after the other.
    """
    former = servers.settle()
    with connection.connect(servers.url) as client:
        run = start(client, target_config(durability="replica"))
        appended(client, run, 0)
    servers.kill(former)
    until(lambda: servers.primary() not in (0, former))
    present = servers.primary()
    (replica,) = {*servers.ports} - {former, present}
    with connection.connect(servers.url) as client, servers.client(replica) as promoted:
        promoted.replicaof("no", "one")  # as sentinels do, before they name it and move the other replica
        servers.start(former, present)
        until(lambda: servers.num_replicas(present))
        # Or a second sentinel has failed over meanwhile, as on a busy machine.
        words = f"127.0.0.1:{replica} may take over from the primary|is now a slave"
        with pytest.raises(redis.ConnectionError, match=words):
            append(client, run, 1, "replica")
        servers.settle()
        assert appended(client, run, 1) is stream.Answer.WAIT


FOLLOWS = {"role": "slave", "master_link_status": "up"}
PRIMARY = {"master_replid": "b" * 40, "master_replid2": "a" * 40}


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (FOLLOWS | {"master_replid": "d" * 40}, True),  # another one
        (FOLLOWS | {"master_replid": "b" * 40}, False),  # this one, which lists it by another name
        ({"role": "slave", "master_link_status": "down", "master_replid": "d" * 40}, False),
        ({"role": "master", "master_replid2": "b" * 40}, True),  # promoted when it followed this one
        ({"role": "master", "master_replid2": "a" * 40}, True),  # or the one before
        ({"role": "master", "master_replid2": "c" * 40}, False),  # it was a primary itself, and comes back
        ({"role": "master", "master_replid2": "0" * 40}, False),
    ],
)
def test_servers_beside_the_primary_that_may_take_over(server: dict[str, str], expected: bool) -> None:
    assert connection.may_take_over(server, PRIMARY) is expected
    never_promoted = PRIMARY | {"master_replid2": "0" * 40}
    assert connection.may_take_over(server, never_promoted) is (expected and "a" * 40 not in server.values())


def test_a_replica_that_comes_does_not_confirm_for_one_that_left(
    servers: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was asked who follows, the only replica is promoted; the other one comes while the write waits."""
    primary = servers.settle()
    left, late = (port for port in servers.ports if port != primary)
    asked, followers = [], connection._followers

    def leaves(client: Redis) -> set[tuple[str, int]]:
        asked.append(followers(client))
        if len(asked) == 1:
            with servers.client(left) as promoted:
                promoted.replicaof("no", "one")
            comes.replicaof("127.0.0.1", primary)
        return asked[-1]

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connection.connect(servers.url))
        there, comes = (stack.enter_context(servers.client(port)) for port in (primary, late))
        run = start(client, target_config(durability="replica"))
        there.config_set("min-replicas-to-write", 0)
        comes.replicaof("127.0.0.1", free_port())
        until(lambda: servers.num_replicas(primary) == 1)
        monkeypatch.setattr(connection, "_followers", leaves)
        with pytest.raises(NotConfirmedError, match="the primary's replicas have changed meanwhile"):
            append(client, run, 0, "replica")
        assert asked[0] == {("127.0.0.1", left)}
        monkeypatch.undo()
        there.config_set("min-replicas-to-write", 1)
        servers.settle()
        assert appended(client, run, 0) is stream.Answer.WAIT


@pytest.mark.parametrize(
    ("options", "durability", "words"),
    [
        (("--appendonly", "yes", "--appendfsync", "always"), "disk", ""),
        (("--appendonly", "yes", "--appendfsync", "everysec"), "disk", ""),
        (("--appendonly", "yes", "--appendfsync", "no"), "disk", "set appendonly yes and appendfsync always"),
        ((), "disk", "set appendonly yes and appendfsync always"),
        ((), "replica", "the server has no replica; attach one, or use durability process"),
    ],
)
def test_a_run_is_refused_where_its_durability_cannot_be_had(
    make_server: Callable[..., PrivateServer], options: tuple[str, ...], durability: Durability, words: str
) -> None:
    client, config = make_server(*options).client, target_config(durability=durability)
    if words:
        with pytest.raises(ConfigError, match=words) as caught:
            submit.create(client, config, submit.prepare(config))
        assert str(caught.value).startswith(f"durability: {durability}, but the server")
        assert not runs.names(client)
    else:
        run = start(client, config)
        assert append(client, run, 0, durability) is stream.Answer.WAIT


def test_what_the_disk_does_not_confirm_is_not_acknowledged(
    make_server: Callable[..., PrivateServer],
) -> None:
    client = make_server("--appendonly", "yes", "--appendfsync", "always").client
    run = start(client, target_config(durability="disk"))
    client.config_set("appendfsync", "no")
    with pytest.raises(NotConfirmedError, match="0 of 1 disks hold what was written"):
        append(client, run, 0, "disk")


# --- TLS ---------------------------------------------------------------------------------------------


class EitherWay:
    """A port before another that takes TLS and plain connections: sentinels, which here have no TLS, use it too."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.num_secure = 0

    def lead_to(self, port: int) -> None:
        """Carry connections from now on."""
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    def _accept(self, port: int) -> None:
        with contextlib.suppress(OSError):  # when it is closed
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._connect, args=(client, port), daemon=True).start()

    def _connect(self, client: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):  # of TLS too; or the server is not there yet
            if client.recv(1, socket.MSG_PEEK) == b"\x16":  # the first byte of TLS
                client = self._context.wrap_socket(client, server_side=True)
                self.num_secure += 1
            server = socket.create_connection(("127.0.0.1", port))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()
            return
        client.close()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(65536):
                target.sendall(data)

    def close(self) -> None:
        self._listener.close()


def connects(url: str) -> bool:
    with contextlib.suppress(redis.ConnectionError), connection.connect(url) as client:
        return bool(client.ping())
    return False


def test_sentinels_and_servers_are_reached_by_tls(
    make_server: Callable[..., PrivateServer], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca.pem")
    with contextlib.ExitStack() as stack:
        doors = [
            stack.enter_context(contextlib.closing(EitherWay(authority.server("127.0.0.1"))))
            for _ in range(2)
        ]
        server, sentinel = doors
        primary = make_server("--bind", "127.0.0.1", password=PASSWORD)
        primary.client.config_set("port", port := free_port())
        server.lead_to(port)
        behind = free_port()
        watch = subprocess.Popen(
            sentinel_command(tmp_path, behind, server.port, quorum=1),
            stdout=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        stack.callback(watch.wait)
        stack.callback(watch.kill)
        sentinel.lead_to(behind)
        query = f"service=fleet&sentinel_password={SENTINEL_PASSWORD}&ssl_ca_certs={authority.path}"
        url = f"sentinels://:{PASSWORD}@127.0.0.1:{sentinel.port}/0?{query}"
        until(lambda: connects(url))
        with connection.connect(url) as client:
            connection.check(client)
            client.set("who", "me")
        options = connection.broker_options(url)
        broker = kombu.Connection(
            connection.broker_url(url), transport_options=options, ssl=connection.broker_ssl(url)
        )
        with broker:
            assert broker.default_channel.client.get("who") == b"me"
        assert server.num_secure >= 2 and sentinel.num_secure >= 2
        other = Authority(tmp_path / "other.pem")
        assert "no sentinel" in refusal(url.replace(str(authority.path), str(other.path)))
