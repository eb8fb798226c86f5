"""Named arrays <-> safetensors bytes: weights and checkpoints. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy


class TensorsError(ValueError):
    """Bytes that are no weights, or arrays that cannot be; the message says why in one line."""


def encode_weights(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Named arrays as safetensors bytes, with `metadata` in their header.

    Raises:
        TensorsError: an array has a dtype that safetensors does not know.
    """
    tensors = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # keeps scalars scalar
    try:
        return safetensors_numpy.save(tensors, dict(metadata) if metadata else None)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise TensorsError(f"weights: cannot be written as safetensors ({_one_line(error)})") from None


def decode_weights(data: bytes) -> dict[str, np.ndarray]:
    """Named arrays from safetensors bytes; read-only views where NumPy can.

    Raises:
        TensorsError: the bytes are not safetensors.
    """
    try:
        return dict(safetensors_numpy.load(bytes(data)))
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise TensorsError(f"weights: not safetensors ({_one_line(error)})") from None


def weights_metadata(data: bytes) -> dict[str, str]:
    """The metadata in the header of safetensors bytes (8 bytes of length, then JSON); empty where none is.

    Raises:
        TensorsError: the bytes are not safetensors, or the metadata is not text by text.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise TensorsError(f"weights: not safetensors ({_one_line(error)})") from None
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorsError("weights: the metadata is no mapping of text to text")
    return metadata


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
