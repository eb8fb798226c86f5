"""Checkpoints in parts: complete or refused."""

from __future__ import annotations

import numpy as np
import pytest
from redis import Redis

from ddrl.store import checkpoints, keys, leases
from ddrl.store.connection import StoreError


def test_checkpoints_come_back_whole_and_replace_each_other(client: Redis, run: str, token: int) -> None:
    large = np.random.default_rng(0).bytes(checkpoints.PART_BYTES * 2 + 5)
    checkpoints.save(client, run, token, large, {"updates": 1})
    assert checkpoints.load(client, run) == (large, {"updates": 1})
    parts = [client.strlen(key) for key in client.scan_iter(match=keys.checkpoint_pattern(run))]
    assert sorted(parts) == [5, checkpoints.PART_BYTES, checkpoints.PART_BYTES]
    checkpoints.save(client, run, token, b"small", {"updates": 2})
    assert checkpoints.load(client, run) == (b"small", {"updates": 2})
    assert len(list(client.scan_iter(match=keys.checkpoint_pattern(run)))) == 1
    client.set(keys.checkpoint_part(run, token, 1, 0), b"smal1")
    with pytest.raises(StoreError, match="checkpoint 1 is damaged"):
        checkpoints.load(client, run)


def test_parts_of_an_unfinished_checkpoint_are_removed(client: Redis, run: str, token: int) -> None:
    checkpoints.save(client, run, token, b"whole", {"updates": 1})
    client.set(keys.checkpoint_part(run, token - 1, 7, 0), b"half")
    assert checkpoints.sweep(client, run, token) == 1 and checkpoints.sweep(client, run, token) == 0
    assert checkpoints.load(client, run) == (b"whole", {"updates": 1})


def test_a_stalled_sweep_leaves_later_checkpoints(client: Redis, run: str, token: int, monkeypatch) -> None:
    client.set(keys.checkpoint_part(run, token - 1, 7, 0), b"half")
    scan, successor = client.scan_iter, []

    def stalled(**options: object) -> object:
        monkeypatch.undo()
        successor.append(leases.acquire(client, run, host="there", folder="/tmp", force=True))
        checkpoints.save(client, run, successor[0], b"whole", {"updates": 1})
        return scan(**options)

    monkeypatch.setattr(client, "scan_iter", stalled)
    with pytest.raises(leases.LeaseLostError):
        checkpoints.sweep(client, run, token)
    assert checkpoints.load(client, run) == (b"whole", {"updates": 1})
    assert checkpoints.sweep(client, run, successor[0]) == 1
