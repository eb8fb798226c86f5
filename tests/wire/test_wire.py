"""The format of a fragment as `docs/wire.md` describes it, against vectors: bytes, and their meaning as JSON."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import pytest

from ddrl import codec
from ddrl.types import Fragment

FOLDER = Path(__file__).parent
SCALARS = ("run", "producer", "incarnation", "seq", "policy_version", "host")
COLUMNS = ("observation", "action", "reward", "terminated", "truncated", "final_index", "final_observation",
           "episode_return", "episode_length", "reset_index", "reset_seed")  # fmt: skip


def stored(values: np.ndarray) -> bytes:
    """A chunk that is not compressed, as the page says."""
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    return bytes([5, 1, 7, 1]) + struct.pack("<III", len(data), len(data), len(data) + 32) + bytes(16) + data


def compressed(values: np.ndarray) -> bytes:
    """A chunk that a library has compressed."""
    options = {"codec": blosc2.Codec.ZSTD, "filters": [blosc2.Filter.SHUFFLE], "nthreads": 1}
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return bytes(
        blosc2.compress2(data.reshape(-1).view(np.uint8), typesize=values.itemsize, clevel=9, **options)
    )


def written(meaning: dict[str, Any], chunk: Any) -> dict[str, bytes]:
    """The fields of an entry, written by the page alone."""
    columns = {
        name: np.array(one["values"], one["dtype"]).reshape(one["shape"])
        for name, one in meaning["columns"].items()
    }
    is_image = {
        name: x.dtype == np.uint8 and x.ndim >= 4 and name != "final_observation"
        for name, x in columns.items()
    }
    chunks = {name: chunk(x.swapaxes(0, 1) if is_image[name] else x) for name, x in columns.items() if x.size}
    listed = [
        {"name": name, "dtype": x.dtype.name, "shape": list(x.shape), "bytes": x.nbytes}
        for name, x in columns.items()
    ]
    header = {
        "format": 1,
        **meaning["header"],
        "columns": listed,
        "checksum": zlib.crc32(b"".join(chunks.values())),
    }
    return {"h": json.dumps(header).encode(), **chunks}


def meaning(fragment: Fragment) -> dict[str, Any]:
    """A fragment as JSON."""
    sizes = {"T": fragment.num_steps, "N": fragment.num_envs, "C": fragment.context}
    arrays = {
        name: getattr(fragment, name, None) if name in COLUMNS[:9] else fragment.extras[name]
        for name in COLUMNS
    }
    columns = {
        name: {"dtype": x.dtype.name, "shape": list(x.shape), "values": x.ravel().tolist()}
        for name, x in arrays.items()
    }
    return {"header": {name: getattr(fragment, name) for name in SCALARS} | sizes, "columns": columns}


def made(kind: str) -> Fragment:
    """Two lanes over three steps, the second step of which truncates one episode and ends the other."""
    draw = np.random.default_rng(7)
    shape, dtype = ((4, 2, 5, 3), np.uint8) if kind == "images" else ((4, 2, 3), np.float32)
    seen = draw.integers(0, 255, shape).astype(dtype)
    cut, over = np.zeros((2, 3, 2), np.bool_)
    cut[1, 0], over[1, 1] = True, True
    return Fragment(
        run="wire-1128-000000-s1-0000", producer=7, incarnation=2**48 - 1, seq=0, policy_version=12, context=0,
        observation=seen, action=draw.integers(0, 4, (3, 2)), reward=draw.normal(size=(3, 2)).astype(np.float32),
        terminated=over, truncated=cut, final_index=np.array([[1, 0]], np.int32), final_observation=seen[3, :1] // 2,
        episode_return=np.array([2.5, -1.0], np.float32), episode_length=np.array([2, 2], np.int32),
        extras={"reset_index": np.array([[0, 0], [0, 1], [2, 0], [2, 1]], np.int32), "reset_seed": np.full(4, -1)},
        host="elsewhere",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["stored", "zstd", "images"])
def test_vectors_are_read_to_their_meaning_and_written_from_it(kind: str) -> None:
    vector = json.loads((FOLDER / f"{kind}.json").read_text())
    fields = {name: base64.b64decode(data) for name, data in vector["fields"].items()}
    fragment = codec.decode({name.encode(): data for name, data in fields.items()})
    assert (
        meaning(fragment) == {"header": vector["header"], "columns": vector["columns"]} == meaning(made(kind))
    )
    again = written(vector, compressed if kind == "zstd" else stored)
    assert again.keys() == fields.keys() and json.loads(again.pop("h")) == json.loads(fields.pop("h"))
    assert kind == "zstd" or again == fields  # compressors differ
    assert codec.encode(fragment).keys() == {name.encode() for name in (*again, "h")}


def test_an_unknown_format_is_refused() -> None:
    fields = written(meaning(made("stored")), stored)
    fields["h"] = fields["h"].replace(b'"format": 1', b'"format": 2')
    with pytest.raises(codec.CodecError, match="format: 2, this version reads 1"):
        codec.decode({name.encode(): data for name, data in fields.items()})


def write_vectors() -> None:
    """Write the vectors anew: `python tests/wire/test_wire.py`."""
    for kind in ("stored", "zstd", "images"):
        told = meaning(made(kind))
        fields = written(told, compressed if kind == "zstd" else stored)
        text = {name: base64.b64encode(data).decode() for name, data in fields.items()}
        (FOLDER / f"{kind}.json").write_text(json.dumps({**told, "fields": text}, indent=1) + "\n")


if __name__ == "__main__":
    write_vectors()
