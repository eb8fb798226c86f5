"""Weights: exact as safetensors bytes, refused in one line otherwise; published and dropped."""

from __future__ import annotations

import numpy as np
import pytest
from redis import Redis
from support.store import append

from ddrl.store import runs, weights
from ddrl.store.weights import WeightsError

HUGE_HEADER = (2**40).to_bytes(8, "little") + b"{}"


def test_weights_round_trip() -> None:
    matrix = np.random.default_rng(0).normal(size=(8, 16)).astype("f4").T
    arrays = {"weights.0": matrix, "biases.0": np.zeros(0, "f4"), "n": np.int64(3)}
    data = weights.encode_weights(arrays, {"run": "r", "version": "4"})
    decoded = weights.decode_weights(data)
    assert set(decoded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(decoded[name], array)
    assert weights.weights_metadata(data) == {"run": "r", "version": "4"}
    assert weights.weights_metadata(weights.encode_weights(arrays)) == {}


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xff" * 64, HUGE_HEADER])
def test_garbage_is_no_weights(data: bytes) -> None:
    for read in (weights.decode_weights, *([] if data == HUGE_HEADER else [weights.weights_metadata])):
        with pytest.raises(WeightsError, match="^weights: "):
            read(data)


def test_weights_of_objects_are_refused() -> None:
    with pytest.raises(WeightsError, match="^weights: cannot be written"):
        weights.encode_weights({"w": np.array([object()])})


def test_publishing_moves_the_pointer_and_drops_old_versions(client: Redis, run: str, token: int) -> None:
    for version in range(4):
        options = {"blob": b"w%d" % version, "drop": (0,) if version == 3 else ()}
        weights.publish(
            client, run, token, version=version, allowance=version, updates=6 + version, **options
        )
    index = weights.index(client, run)
    assert {version: updates for version, (_, updates) in index.published.items()} == {1: 7, 2: 8, 3: 9}
    assert all(
        abs(ms - runs.server_ms(client)) < 60_000 for ms, _ in index.published.values() if ms is not None
    )
    assert index.latest == 3 and sorted(index.sizes) == [1, 2, 3]
    assert weights.get(client, run, 0) is None and weights.get(client, run, 3) == b"w3"
    assert append(client, run, 0).version == 3
    state = runs.state(client, run)
    assert (state.updates, state.allowance) == (9, 3)


def test_superseded_keeps_newest_spaced_best_and_pinned_versions() -> None:
    stored = weights.WeightsIndex(latest=30, best=7, best_return=1.0, sizes={v: 10 for v in range(31)})
    kept = {"keep_last": 3, "keep_every": 10, "pinned": frozenset({13})}
    for max_bytes, spaced in ((1000, {20, 10, 0}), (20, {20, 10})):  # the oldest spaced one goes first
        drop = weights.superseded(stored, max_bytes=max_bytes, **kept)
        assert set(stored.sizes) - set(drop) == {30, 29, 28, 7, 13} | spaced
