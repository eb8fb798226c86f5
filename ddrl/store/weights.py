"""Weights: named arrays as safetensors bytes (no pickle), and the published versions, one key each.

The hash `weights` holds `latest`, `best`, `best_return` and, for each stored version, its bytes, time and updates. Of a
game of two players it also holds `league`, JSON: version -> [rating, games, score].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from redis import Redis
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from ddrl.store import keys
from ddrl.store.connection import call

if TYPE_CHECKING:
    from ddrl.config import Durability

# --- arrays and bytes ----------------------------------------------------------------------------------


class WeightsError(ValueError):
    """Bytes that are not weights, or arrays that cannot be stored; the message says why in one line."""


def encode_weights(arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return named arrays or CPU tensors as safetensors bytes, with `metadata` in their header.

    Raises:
        WeightsError: an array has a dtype that safetensors does not know.
    """
    tensors = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # keeps scalars scalar
    try:
        return safetensors_numpy.save(tensors, dict(metadata) if metadata else None)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise WeightsError(f"weights: cannot be written as safetensors ({_one_line(error)})") from None


def decode_weights(data: bytes) -> dict[str, np.ndarray]:
    """Return named arrays from safetensors bytes; read-only views where NumPy can.

    Raises:
        WeightsError: the bytes are not safetensors.
    """
    try:
        return dict(safetensors_numpy.load(bytes(data)))
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise WeightsError(f"weights: not safetensors ({_one_line(error)})") from None


def weights_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata in the header of safetensors bytes (8 bytes of length, then JSON); empty if there is none.

    Raises:
        WeightsError: the bytes are not safetensors, or the metadata is not text by text.
    """
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"weights: not safetensors ({_one_line(error)})") from None
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError("weights: the metadata is no mapping of text to text")
    return metadata


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# --- published versions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """A version among the opponents in a game of two players.

    Attributes:
        rating: in Elo points; 0: of the first version, when it was new.
        games: that later versions have played against it.
        score: 0..1, of these versions in their newest games against it; a draw counts half.
    """

    rating: float = 0.0
    games: int = 0
    score: float = 0.5


@dataclass(frozen=True)
class WeightsIndex:
    """The versions that are stored; -1 if there is none yet.

    By version: `sizes` in bytes; `published`, the time (server's clock, ms) and the learner's updates, None where an
    older version of ddrl stored it; `standings` in a game of two players.
    """

    latest: int
    best: int
    best_return: float
    sizes: dict[int, int]
    published: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    standings: dict[int, Standing] = field(default_factory=dict)


def publish(
    client: Redis,
    run: str,
    token: int,
    *,
    version: int,
    blob: bytes,
    allowance: int,
    updates: int,
    players: int = 1,
    onnx: bytes = b"",
    drop: tuple[int, ...] = (),
    durability: Durability = "process",
) -> None:
    """Store a version, make it the latest, set the allowance and drop old versions, all or nothing.

    `players` is the number of collectors that share the allowance, `onnx` the version as an ONNX file, `durability`
    that of the run.

    Raises:
        LeaseLostError: another learner took over.
    """
    blobs = [key(run, one) for one in (version, *drop) for key in (keys.weights_blob, keys.weights_onnx)]
    script_keys = [keys.state(run), keys.weights(run), keys.allowance(run), *blobs]
    args = (version, len(blob) + len(onnx), blob, allowance, updates, players, onnx, *drop)
    call(client, "publish", script_keys, [token, *args], durability=durability)


def mark_best(client: Redis, run: str, token: int, version: int, return_mean: float) -> None:
    """Store which version is the best evaluated one.

    Raises:
        LeaseLostError: another learner took over.
    """
    script_keys = [keys.state(run), keys.weights(run)]
    call(client, "set_fields", script_keys, [token, "best", version, "best_return", return_mean])


def rate(client: Redis, run: str, token: int, standings: Mapping[int, Standing]) -> None:
    """Store the standings of versions, instead of those before.

    Raises:
        LeaseLostError: another learner took over.
    """
    table = json.dumps({version: list(vars(standing).values()) for version, standing in standings.items()})
    call(client, "set_fields", [keys.state(run), keys.weights(run)], [token, "league", table])


def index(client: Redis, run: str) -> WeightsIndex:
    """Return the versions that are stored."""
    raw = cast("dict[bytes, bytes]", client.hgetall(keys.weights(run)))
    numbers = {name.decode(): int(value) for name, value in raw.items() if name[:1].isdigit()}
    sizes = {int(name): value for name, value in numbers.items() if name.isdigit()}
    return WeightsIndex(
        latest=int(raw.get(b"latest", -1)),
        best=int(raw.get(b"best", -1)),
        best_return=float(raw.get(b"best_return", "-inf")),
        sizes=sizes,
        published={one: (numbers.get(f"{one}:ms"), numbers.get(f"{one}:updates")) for one in sizes},
        standings={int(one): Standing(*row) for one, row in json.loads(raw.get(b"league", b"{}")).items()},
    )


def get(client: Redis, run: str, version: int) -> bytes | None:
    """Return the safetensors bytes of a version, or None if it was dropped."""
    return cast("bytes | None", client.get(keys.weights_blob(run, version)))


def published_ms(client: Redis, run: str, version: int) -> int | None:
    """Return when a version was published (server's clock), or None if that is unknown."""
    found = cast("bytes | None", client.hget(keys.weights(run), f"{version}:ms"))
    return None if found is None else int(found)


def superseded(
    stored: WeightsIndex, *, keep_last: int, keep_every: int, max_bytes: int, pinned: frozenset[int]
) -> tuple[int, ...]:
    """Return the versions to drop: not among the newest, not spaced within the cap, not best, not pinned.

    Args:
        keep_last: newest versions that stay.
        keep_every: versions divisible by this stay, the oldest of them going first beyond `max_bytes`.
        pinned: versions with an open evaluation.
    """
    drop, budget = [], max_bytes
    for version in sorted(stored.sizes, reverse=True)[keep_last:]:
        if version == stored.best or version in pinned:
            continue
        budget -= stored.sizes[version] if version % keep_every == 0 else 0
        if version % keep_every or budget < 0:
            drop.append(version)
    return tuple(drop)
