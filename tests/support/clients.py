"""Clients that append fragments and publish versions, and write down each acknowledgement."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, cast

from support.runs import start, target_config

from ddrl.config import Durability
from ddrl.store import connection, keys, leases, stream, weights

NUM_CLIENTS = 4
PAUSE_S = 0.005  # between two appends of a client
LIMIT_S = 120.0


@dataclass
class Acknowledged:
    """What clients were told: (producer, sequence number) of each fragment, hash of each version's bytes."""

    fragments: set[tuple[int, int]] = field(default_factory=set)
    versions: dict[int, str] = field(default_factory=dict)


class Clients:
    """Threads that append to a run, and one that publishes its weights; each repeats a call until it is confirmed."""

    def __init__(self, url: str, durability: Durability) -> None:
        self._url, self._durability = url, durability
        self._stop = threading.Event()
        self.acknowledged = Acknowledged()
        with connection.connect(url) as client:
            self.run = start(client, target_config(name="clients", durability=durability))
            token = leases.acquire(client, self.run, host="-", folder="-", ttl_ms=10**8)
        assert token is not None
        jobs: list[Any] = [lambda: self._publish(token), *[self._append] * NUM_CLIENTS]
        self._threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        for thread in self._threads:
            thread.start()

    def _append(self) -> None:
        with connection.connect(self._url) as client:
            producer, seq = (
                connection.retry(lambda: stream.new_producer(client, self.run), is_logged=False),
                0,
            )
            while not self._stop.is_set():

                def append(seq: int = seq) -> stream.Appended:
                    return stream.append(
                        client, self.run, {b"tag": b"%d %d" % (producer, seq)}, producer=producer, incarnation=1,
                        seq=seq, num_transitions=1, durability=self._durability,
                    )  # fmt: skip

                with contextlib.suppress(*connection.OUTAGES):  # only at the end
                    answer = connection.retry(append, stop=self._stop, is_logged=False).answer
                    assert answer in (stream.Answer.GO, stream.Answer.WAIT), answer
                    self.acknowledged.fragments.add((producer, seq))
                    seq += 1
                time.sleep(PAUSE_S)

    def _publish(self, token: int) -> None:
        version = 0
        with connection.connect(self._url) as client:
            while not self._stop.wait(0.2):
                blob = random.randbytes(20_000)

                def publish(version: int = version, blob: bytes = blob) -> None:
                    weights.publish(
                        client, self.run, token, version=version, blob=blob, allowance=0, updates=version,
                        durability=self._durability,
                    )  # fmt: skip

                with contextlib.suppress(*connection.OUTAGES):
                    connection.retry(publish, stop=self._stop, is_logged=False)
                    self.acknowledged.versions[version] = hashlib.sha256(blob).hexdigest()
                version += 1

    def stop(self) -> None:
        """End the threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def lost(self) -> tuple[int, int]:
        """Return how many acknowledged fragments and versions the primary does not hold."""
        told = Acknowledged(set(self.acknowledged.fragments), dict(self.acknowledged.versions))
        with connection.connect(self._url, reply_timeout_s=60.0) as client:
            entries = cast("list[Any]", connection.retry(lambda: client.xrange(keys.experience(self.run))))
            blobs = {
                version: client.get(keys.weights_blob(self.run, version)) or b"" for version in told.versions
            }
        held = [tuple(map(int, fields[b"tag"].split())) for _, fields in entries]
        assert len(held) == len(set(held)), "a fragment is there twice"
        changed = [
            v for v, told_hash in told.versions.items() if hashlib.sha256(blobs[v]).hexdigest() != told_hash
        ]
        return len(told.fragments - set(held)), len(changed)
