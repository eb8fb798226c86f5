"""Weights: exact as safetensors bytes, refused in one line otherwise; published and dropped."""

from __future__ import annotations

import numpy as np
import pytest
from redis import Redis
from support.store import append, make_run, take

from ddrl.store import runs, weights
from ddrl.store.weights import WeightsError


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return make_run(client)


def test_weights_round_trip() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "weights.0": rng.normal(size=(8, 16)).astype("f4").T,
        "biases.0": np.zeros(0, "f4"),
        "n": np.int64(3),
    }
    data = weights.encode_weights(arrays, {"run": "r", "version": "4"})
    decoded = weights.decode_weights(data)
    assert set(decoded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(decoded[name], array)
    assert weights.weights_metadata(data) == {"run": "r", "version": "4"}
    assert weights.weights_metadata(weights.encode_weights(arrays)) == {}


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"])
def test_garbage_is_no_weights(data: bytes) -> None:
    with pytest.raises(WeightsError, match="^weights: "):
        weights.decode_weights(data)
    if data != (2**40).to_bytes(8, "little") + b"{}":
        with pytest.raises(WeightsError, match="^weights: "):
            weights.weights_metadata(data)


def test_weights_of_objects_are_refused() -> None:
    with pytest.raises(WeightsError, match="^weights: cannot be written"):
        weights.encode_weights({"w": np.array([object()])})


def test_publishing_moves_the_pointer_raises_the_allowance_and_drops_old_versions(
    client: Redis, run: str
) -> None:
    token = take(client, run)
    for version in range(4):
        drop = (0,) if version == 3 else ()
        weights.publish(
            client,
            run,
            token,
            version=version,
            blob=b"w%d" % version,
            allowance=version,
            updates=9,
            drop=drop,
        )
    index = weights.index(client, run)
    assert index.latest == 3 and sorted(index.sizes) == [1, 2, 3]
    assert weights.get(client, run, 0) is None and weights.get(client, run, 3) == b"w3"
    assert append(client, run, 0).version == 3
    assert runs.state(client, run).updates == 9


def test_superseded_keeps_newest_spaced_best_and_pinned_versions() -> None:
    stored = weights.WeightsIndex(latest=30, best=7, best_return=1.0, sizes={v: 10 for v in range(31)})
    drop = weights.superseded(stored, keep_last=3, keep_every=10, max_bytes=1000, pinned=frozenset({13}))
    kept = set(stored.sizes) - set(drop)
    assert kept == {30, 29, 28, 20, 10, 0, 7, 13}
    tight = weights.superseded(stored, keep_last=3, keep_every=10, max_bytes=20, pinned=frozenset({13}))
    assert set(stored.sizes) - set(tight) == {30, 29, 28, 20, 10, 7, 13}  # the oldest of the spaced ones goes
