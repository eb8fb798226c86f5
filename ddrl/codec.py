"""Fragment <-> the fields of one stream entry. No pickle.

The format (number 1), readable from any language that has JSON and blosc2:

* field `h`: JSON with format, run, producer, incarnation, seq, policy_version, T, N, C, checksum (zlib.crc32
  over the compressed columns in the order of `columns`) and columns: a list of {name, dtype, shape, bytes}.
* a field per column that is not empty, named as the column: one blosc2 chunk (`compress2`) of the
  little-endian values in C order; a bool is one byte, 0 or 1. A uint8 column [T, N, ...] of rank 4 or more
  (images) is stored lane-major, [N, T, ...], a lane a block, because consecutive frames of one lane resemble each
  other.
* other fields (the append adds counters with one-letter names) are not the codec's business.

Everything read is untrusted: types, shapes and sizes are checked, and bounded, before anything is allocated.
Compression as measured on LunarLander (151 x 16 x 8 float32): zstd-1 with bit shuffle 1.6x in 0.08 ms, and
0.07 ms back; LZ4 with shuffle 1.2x in 0.02 ms; blosclz 1.2x in 0.05 ms. Images: see docs/decisions.md.
Nothing here holds the interpreter's lock while it compresses or decompresses.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import blosc2
import numpy as np

from ddrl.types import Fragment

FORMAT = 1
MAX_BYTES = 256 * 1024**2  # uncompressed, one fragment
_MAX_HEADER_BYTES = 64 * 1024
_MAX_COLUMNS = 64
_MAX_RANK = 8
_CHUNK_HEADER_BYTES = 32
# In a chunk's header (blosc2 README_CHUNK_FORMAT): [16:22] filters: none, shuffle, bit shuffle, no plugins;
# [31] kind: plain or all zeros. Lazy and uninitialized chunks would read what the entry does not hold.
_PLAIN_FILTERS = frozenset({0, 1, 2})
_PLAIN_KINDS = frozenset({0, 1 << 4})
_MAX_BLOCK_BYTES = 1024**2  # of images; about as far back as zstd looks at this level
_NAME = re.compile(r"[a-z][a-z0-9_]{1,63}")  # two letters or more: one-letter fields belong to the append
_NUMBERS = ("run", "producer", "incarnation", "seq", "policy_version", "T", "N", "C", "checksum")

_FLOATS = ("float16", "float32", "float64")
_DTYPES = (*_FLOATS, "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_DTYPE_OF: dict[str, tuple[str, ...]] = {
    "observation": _DTYPES,
    "action": ("float32", "int64"),
    "reward": ("float32",),
    "terminated": ("bool",),
    "truncated": ("bool",),
    "final_index": ("int32",),
    "final_observation": _DTYPES,
    "episode_return": ("float32",),
    "episode_length": ("int32",),
}
_MEMORY_DTYPE = {"memory_index": "int32", "memory": "float16"}  # extras that are no columns [C+T, N, ...]

blosc2.set_releasegil(True)


class CodecError(ValueError):
    """Bytes that are no valid fragment; the message names the column or value in one line."""


class _Column(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def is_image(self) -> bool:
        """Stored lane-major: uint8 [T, N, at least two more axes]."""
        return self.dtype == "uint8" and len(self.shape) >= 4 and self.name != "final_observation"

    @property
    def block_bytes(self) -> int:
        """What is compressed by itself: of images a lane, or an even part of it; 0 leaves it to the library."""
        if not self.is_image:
            return 0
        frame = math.prod(self.shape[2:])
        parts = math.ceil(self.shape[0] * frame / _MAX_BLOCK_BYTES)
        return math.ceil(self.shape[0] / parts) * frame


def encode(fragment: Fragment) -> dict[bytes, bytes]:
    """The fields of the stream entry that holds `fragment`.

    Raises:
        CodecError: a column has a dtype or shape that a fragment cannot have, or all are above MAX_BYTES.
    """
    arrays = {name: getattr(fragment, name) for name in _DTYPE_OF} | dict(fragment.extras)
    if len(arrays) != len(_DTYPE_OF) + len(fragment.extras):
        raise CodecError("extras: a name repeats that of a column; rename it")
    columns = [_Column(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    steps, context = len(fragment.reward) - fragment.context, fragment.context
    _check_layout(columns, steps, fragment.num_envs, context, MAX_BYTES)
    fields: dict[bytes, bytes] = {}
    checksum = 0
    for column in columns:
        if column.num_bytes:
            chunk = _compress(column, arrays[column.name])
            checksum = zlib.crc32(chunk, checksum)
            fields[column.name.encode()] = chunk
    header = {
        "format": FORMAT,
        "run": fragment.run,
        "producer": int(fragment.producer),
        "incarnation": int(fragment.incarnation),
        "seq": int(fragment.seq),
        "policy_version": int(fragment.policy_version),
        "T": steps,
        "N": fragment.num_envs,
        "C": context,
        "columns": [
            {"name": c.name, "dtype": c.dtype, "shape": list(c.shape), "bytes": c.num_bytes} for c in columns
        ],
        "checksum": checksum,
    }
    return {b"h": json.dumps(header, separators=(",", ":")).encode(), **fields}


def decode(fields: Mapping[bytes, bytes], *, max_bytes: int = MAX_BYTES) -> Fragment:
    """The fragment in one stream entry; fields that are no columns are ignored.

    Image columns come back as [T, N, ...] views of lane-major memory.

    Args:
        fields: field name -> bytes, as the server gives them.
        max_bytes: cap on the uncompressed bytes of all columns together.

    Raises:
        CodecError: the entry is not what `encode` writes, or breaks an invariant of `Fragment`.
    """
    header = _parse_header(fields.get(b"h", b""))
    columns = [_parse_column(entry) for entry in header["columns"]]
    _check_layout(columns, header["T"], header["N"], header["C"], max_bytes)
    checksum = 0
    for column in columns:
        checksum = zlib.crc32(_check_chunk(column, fields), checksum)
    if checksum != header["checksum"]:
        raise CodecError(f"checksum: {checksum} over the columns, the header says {header['checksum']}")
    arrays = {column.name: _decompress(column, fields) for column in columns}
    _check_values(arrays)
    required = {name: arrays.pop(name) for name in _DTYPE_OF}
    return Fragment(
        run=header["run"],
        producer=header["producer"],
        incarnation=header["incarnation"],
        seq=header["seq"],
        policy_version=header["policy_version"],
        context=header["C"],
        **required,
        extras=arrays,
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _compress(column: _Column, array: np.ndarray) -> bytes:
    if column.is_image:
        array = array.swapaxes(0, 1)
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    shuffle = blosc2.Filter.BITSHUFFLE if array.itemsize > 1 else blosc2.Filter.NOFILTER
    chunk: bytes = blosc2.compress2(
        array.reshape(-1).view(np.uint8),
        typesize=array.itemsize,
        codec=blosc2.Codec.ZSTD,
        clevel=2 if column.is_image else 1,
        filters=[shuffle],
        blocksize=column.block_bytes,
        nthreads=1,
    )
    return chunk


def _parse_header(data: bytes) -> dict[str, Any]:
    """The header as a dict whose scalars have their types and ranges checked; columns is a list."""
    if not data:
        raise CodecError("h: the entry has no header")
    if len(data) > _MAX_HEADER_BYTES:
        raise CodecError(f"h: header of {len(data)} bytes, at most {_MAX_HEADER_BYTES}")
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"h: header is no JSON ({_one_line(error)})") from None
    if not isinstance(header, dict):
        raise CodecError("h: header is no JSON object")
    if header.get("format") != FORMAT or type(header["format"]) is not int:
        raise CodecError(f"format: {_show(header.get('format'))}, this version reads {FORMAT}")
    for name in _NUMBERS:
        value = header.get(name)
        if name == "run":
            if not isinstance(value, str) or not 1 <= len(value) <= 200:
                raise CodecError(f"run: {_show(value)} is no run id")
        elif type(value) is not int or not 0 <= value < 2**63:
            raise CodecError(f"{name}: {_show(value)} is no integer in [0, 2^63)")
    if header["T"] < 1 or header["N"] < 1:
        raise CodecError(f"T, N: {header['T']} steps of {header['N']} environments hold nothing")
    columns = header.get("columns")
    if not isinstance(columns, list) or len(columns) > _MAX_COLUMNS:
        raise CodecError(f"columns: no list of at most {_MAX_COLUMNS}")
    return header


def _show(value: object) -> str:
    """A value of a stranger, short enough for one line."""
    return repr(value)[:60]


def _parse_column(entry: object) -> _Column:
    if not isinstance(entry, dict) or set(entry) != {"name", "dtype", "shape", "bytes"}:
        raise CodecError(f"columns: {_show(entry)} is not {{name, dtype, shape, bytes}}")
    name, dtype, shape, claimed = entry["name"], entry["dtype"], entry["shape"], entry["bytes"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CodecError(f"columns: {_show(name)} is no column name")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CodecError(f"{name}: dtype {_show(dtype)} is not one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK:
        raise CodecError(f"{name}: shape {_show(shape)} is no list of at most {_MAX_RANK} lengths")
    if any(type(n) is not int or not 0 <= n < 2**31 for n in shape):
        raise CodecError(f"{name}: shape {_show(shape)} has a length that is no integer in [0, 2^31)")
    column = _Column(name, dtype, tuple(shape))
    if type(claimed) is not int or claimed != column.num_bytes:
        raise CodecError(
            f"{name}: claims {_show(claimed)} bytes, {dtype} {list(shape)} has {column.num_bytes}"
        )
    return column


def _check_layout(columns: list[_Column], steps: int, num_envs: int, context: int, max_bytes: int) -> None:
    """All columns there, once, of an allowed dtype, their shapes consistent, and together below the cap."""
    by_name = {column.name: column for column in columns}
    if len(by_name) != len(columns):
        raise CodecError("columns: a name occurs twice")
    for name, dtypes in _DTYPE_OF.items():
        if name not in by_name:
            raise CodecError(f"{name}: the column is missing")
        if by_name[name].dtype not in dtypes:
            raise CodecError(f"{name}: dtype {by_name[name].dtype}, expected {' or '.join(dtypes)}")
    total = sum(column.num_bytes for column in columns)
    if total > max_bytes:
        raise CodecError(f"columns: {total} bytes uncompressed, at most {max_bytes} are accepted")
    rows = context + steps
    observation = by_name["observation"]
    if len(by_name["final_index"].shape) != 2 or len(by_name["episode_return"].shape) != 1:
        raise CodecError("final_index, episode_return: expected shapes [K, 2] and [E]")
    num_finals, num_episodes = by_name["final_index"].shape[0], by_name["episode_return"].shape[0]
    if num_episodes > rows * num_envs:
        raise CodecError(f"episode_return: {num_episodes} episodes cannot end in {rows} x {num_envs} steps")
    exact = {
        "observation": (rows + 1, num_envs, *observation.shape[2:]),
        "reward": (rows, num_envs),
        "terminated": (rows, num_envs),
        "truncated": (rows, num_envs),
        "final_index": (num_finals, 2),
        "final_observation": (num_finals, *observation.shape[2:]),
        "episode_length": (num_episodes,),
    } | _memory_layout(by_name, rows * num_envs)
    for column in columns:
        if column.dtype not in _DTYPES:
            raise CodecError(f"{column.name}: dtype {column.dtype} is not one of {', '.join(_DTYPES)}")
        if len(column.shape) > _MAX_RANK or not _NAME.fullmatch(column.name):
            raise CodecError(f"{column.name}: rank {len(column.shape)} above {_MAX_RANK}, or no column name")
        expected = exact.get(column.name, (rows, num_envs, *column.shape[2:]))
        if column.shape != expected and column.name != "episode_return":
            raise CodecError(f"{column.name}: shape {list(column.shape)}, expected {list(expected)}")
    if by_name["final_observation"].dtype != observation.dtype:
        raise CodecError(f"final_observation: dtype differs from that of observation, {observation.dtype}")


def _memory_layout(by_name: Mapping[str, _Column], num_transitions: int) -> dict[str, tuple[int, ...]]:
    """The shapes of `memory_index` [S, 2] and `memory` [S, H] as they must be; {} where there are none."""
    found = [by_name[name] for name in _MEMORY_DTYPE if name in by_name]
    if not found:
        return {}
    if len(found) == 1:
        raise CodecError(f"{found[0].name}: memory_index and memory come together or not at all")
    for column in found:
        if column.dtype != _MEMORY_DTYPE[column.name] or len(column.shape) != 2:
            raise CodecError(
                f"{column.name}: {column.dtype} {list(column.shape)}, expected "
                f"{_MEMORY_DTYPE[column.name]} of rank 2"
            )
    index, memory = found
    if index.shape[0] > num_transitions:
        raise CodecError(f"memory_index: {index.shape[0]} states of {num_transitions} steps")
    return {"memory_index": (index.shape[0], 2), "memory": (index.shape[0], memory.shape[1])}


def _check_chunk(column: _Column, fields: Mapping[bytes, bytes]) -> bytes:
    """The compressed bytes of a column, known to unpack to what its header says and to be plain data."""
    chunk = fields.get(column.name.encode(), b"")
    if not column.num_bytes:
        if chunk:
            raise CodecError(f"{column.name}: {len(chunk)} bytes for an empty column")
        return b""
    if len(chunk) < _CHUNK_HEADER_BYTES:
        raise CodecError(f"{column.name}: {len(chunk)} bytes are no blosc2 chunk")
    if not (_PLAIN_FILTERS.issuperset(chunk[16:22]) and chunk[31] in _PLAIN_KINDS):
        raise CodecError(f"{column.name}: chunk asks for a filter or kind of chunk that is not accepted")
    try:
        num_bytes, num_compressed, _ = blosc2.get_cbuffer_sizes(chunk)
    except (RuntimeError, ValueError) as error:
        raise CodecError(f"{column.name}: no blosc2 chunk ({_one_line(error)})") from None
    if num_bytes != column.num_bytes or num_compressed != len(chunk):
        raise CodecError(
            f"{column.name}: chunk of {num_bytes} bytes in {num_compressed}, "
            f"the header says {column.num_bytes} and {len(chunk)} came"
        )
    return chunk


def _decompress(column: _Column, fields: Mapping[bytes, bytes]) -> np.ndarray:
    shape = column.shape
    if column.is_image:
        shape = (shape[1], shape[0], *shape[2:])
    dtype = np.dtype(column.dtype).newbyteorder("<")
    array = np.empty(shape, dtype)
    raw = array.reshape(-1).view(np.uint8)
    if column.num_bytes:
        try:
            blosc2.decompress2(fields[column.name.encode()], dst=raw, nthreads=1)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise CodecError(f"{column.name}: cannot be decompressed ({_one_line(error)})") from None
    if column.dtype == "bool" and (raw > 1).any():
        raise CodecError(f"{column.name}: a byte that is neither 0 nor 1")
    return array.swapaxes(0, 1) if column.is_image else array


def _check_values(arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CodecError(f"{name}: holds NaN or infinity")
    terminated, truncated = arrays["terminated"], arrays["truncated"]
    if (terminated & truncated).any():
        raise CodecError("truncated: a step is both terminated and truncated")
    if not np.array_equal(arrays["final_index"], np.argwhere(truncated)):
        raise CodecError("final_index: not the (step, environment) of each truncated step in order of time")
    if "memory_index" in arrays:
        index = arrays["memory_index"]
        if (index < 0).any() or (index >= np.array(terminated.shape)).any():
            raise CodecError(
                f"memory_index: a (step, environment) outside {terminated.shape[0]} x {terminated.shape[1]}"
            )
    if (arrays["episode_length"] < 1).any():
        raise CodecError("episode_length: an episode of less than one step")
