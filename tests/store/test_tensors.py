"""Weights survive safetensors exactly; whatever else comes is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.store import weights
from ddrl.store.weights import WeightsError


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
