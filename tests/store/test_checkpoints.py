"""Checkpoints in parts: complete or refused."""

from __future__ import annotations

import numpy as np
import pytest
from redis import Redis
from support.store import make_run, take

from ddrl.store import checkpoints, keys
from ddrl.store.connection import StoreError


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return make_run(client)


def test_checkpoints_come_back_whole_in_parts_and_replace_each_other(client: Redis, run: str) -> None:
    token = take(client, run)
    large = np.random.default_rng(0).bytes(checkpoints.PART_BYTES * 2 + 5)
    checkpoints.save(client, run, token, large, {"updates": 1})
    assert checkpoints.load(client, run) == (large, {"updates": 1})
    parts = [client.strlen(key) for key in client.scan_iter(match=keys.of_run(run, "checkpoint:*"))]
    assert sorted(parts) == [5, checkpoints.PART_BYTES, checkpoints.PART_BYTES]
    checkpoints.save(client, run, token, b"small", {"updates": 2})
    assert checkpoints.load(client, run) == (b"small", {"updates": 2})
    assert len(list(client.scan_iter(match=keys.of_run(run, "checkpoint:*")))) == 1
    client.set(keys.checkpoint_part(run, token, 1, 0), b"smal1")
    with pytest.raises(StoreError, match="checkpoint 1 is damaged"):
        checkpoints.load(client, run)


def test_parts_of_an_unfinished_checkpoint_are_removed(client: Redis, run: str) -> None:
    token = take(client, run)
    checkpoints.save(client, run, token, b"whole", {"updates": 1})
    client.set(keys.checkpoint_part(run, token - 1, 7, 0), b"half")
    assert checkpoints.sweep(client, run, token) == 1 and checkpoints.sweep(client, run, token) == 0
    assert checkpoints.load(client, run) == (b"whole", {"updates": 1})
