"""A killed server has lost nothing that it acknowledged, also if its disk is slow.

Clients log each acknowledgement; afterwards the logs are compared with the raw stream and the raw weights.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.learners import in_threads
from support.private_server import PrivateServer, require_program, until
from support.processes import EXACT
from support.runs import start, target_config
from support.slow_disk import slow_disk
from support.store import take

from ddrl.store import keys, stream, weights

pytestmark = pytest.mark.faults
KILLS = 30 if EXACT else 3


@pytest.fixture(params=[0, 100, 1500], ids="sync takes {} ms".format)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PrivateServer]:
    """A server with the persistence of the embedded one."""
    require_program()
    environment = slow_disk(tmp_path, request.param) if request.param else {}
    server = PrivateServer("--appendonly", "yes", "--appendfsync", "no", environment=environment)
    yield server
    server.close()


class Clients:
    """Clients of a run that send nothing twice; they end when the server does.

    Attributes:
        appended: (producer, seq) of each fragment that was acknowledged.
        published: the weights of each version that was acknowledged.
    """

    def __init__(self, server: PrivateServer, run: str) -> None:
        self._server, self._run = server, run
        self._token = take(server.client, run)
        self.appended: set[tuple[int, int]] = set()
        self.published: dict[int, bytes] = {}

    def have_begun(self) -> bool:
        return bool(self.appended and self.published)

    def append(self) -> None:
        client = raw_client(self._server)
        who = {"producer": stream.new_producer(client, self._run), "incarnation": 1, "num_transitions": 1}
        with suppress(RedisError):
            for seq in count():
                stream.append(client, self._run, {b"h": os.urandom(3_000)}, seq=seq, **who)
                self.appended.add((who["producer"], seq))

    def publish(self) -> None:
        client = raw_client(self._server)
        with suppress(RedisError):
            for version in count():
                blob, options = os.urandom(20_000), {"allowance": 0, "updates": version}
                weights.publish(client, self._run, self._token, version=version, blob=blob, **options)
                self.published[version] = blob
                time.sleep(0.05)


def raw_client(server: PrivateServer) -> Redis:
    return Redis(unix_socket_path=str(server.socket), socket_timeout=30.0, retry=Retry(NoBackoff(), 0))


@pytest.mark.timeout(900)  # each kill of a slow disk takes 8 s
def test_a_killed_server_keeps_what_it_acknowledged(server: PrivateServer) -> None:
    for _ in range(KILLS):
        run = start(server.client, target_config(replay={"max_bytes": "1GB"}))
        clients = Clients(server, run)
        with in_threads(*[clients.append] * 3, clients.publish, stop=server.kill):
            until(clients.have_begun)
            time.sleep(random.uniform(0.2, 2.5))
        server.start()
        raw = raw_client(server)
        entries = raw.xrange(keys.experience(run))
        stored = {(int(fields[b"p"]), int(fields[b"q"])) for _, fields in entries}
        assert clients.appended and not clients.appended - stored and len(stored) == len(entries)
        newest = max(clients.published)
        assert weights.get(raw, run, newest) == clients.published[newest]
        raw.flushall()
