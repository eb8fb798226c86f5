"""Fragment <-> the fields of one stream entry. No pickle.

The format (number 1), readable from any language that has JSON and blosc2:

* field `h`: JSON with format, run, producer, incarnation, seq, policy_version, host, T, N, C, checksum (zlib.crc32
  over the compressed columns in the order of `columns`) and columns: a list of {name, dtype, shape, bytes}.
* one field per column that is not empty, named like the column: one blosc2 chunk (`compress2`) of the
  little-endian values in C order; a bool is one byte, 0 or 1. A uint8 column [T, N, ...] of rank 4 or more
  (images) is stored lane-major, [N, T, ...], a lane a block, because consecutive frames of one lane resemble each
  other.
* other fields (the append adds counters with one-letter names) are ignored here.

Everything read is untrusted: types, shapes and sizes are checked, and bounded, before anything is allocated.
Compression as measured on LunarLander (151 x 16 x 8 float32): zstd-1 with bit shuffle 1.6x in 0.08 ms, and
0.07 ms back; LZ4 with shuffle 1.2x in 0.02 ms; blosclz 1.2x in 0.05 ms. Images: see docs/decisions.md.
Nothing here holds the interpreter's lock while it compresses or decompresses.
"""

from __future__ import annotations

import functools
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import blosc2
import numpy as np

from ddrl.config import first_line
from ddrl.types import Fragment

FORMAT = 1
MAX_BYTES = 256 * 1024**2  # uncompressed, one fragment
MAX_HEADER_BYTES = 64 * 1024
_MAX_COLUMNS = 64
_MAX_RANK = 8
_CHUNK_HEADER_BYTES = 32
# In a chunk's header (blosc2 README_CHUNK_FORMAT): [2] codec in the upper 3 bits: none or zstd; [16:22] filters: none,
# shuffle, bit shuffle; [30] blocks of one size; [31] kind: plain or all zeros. For a codec of a plugin blosc2 starts a
# shell and imports a package; lazy and uninitialized chunks would read memory outside the entry.
_PLAIN_CODECS = frozenset({0, 4})
_PLAIN_FILTERS = frozenset({0, 1, 2})
_PLAIN_KINDS = frozenset({0, 1 << 4})
_MAX_BLOCK_BYTES = 1024**2  # of images; about as far back as zstd looks at this level
_NAME = re.compile(r"[a-z][a-z0-9_]{1,63}")  # two letters or more: one-letter fields belong to the append
_SCALARS = ("run", "producer", "incarnation", "seq", "policy_version")
_NUMBERS = ("producer", "incarnation", "seq", "policy_version", "T", "N", "C", "checksum")

_DTYPES: tuple[str, ...] = (
    *("float16", "float32", "float64", "bool", "uint8", "int8"),
    *("uint16", "int16", "uint32", "int32", "uint64", "int64"),
)
_REQUIRED = {  # column -> its dtypes
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
_RECURRENT = {"memory_index": ("int32",), "memory": ("float16",)}  # extras that are no columns [C+T, N, ...]
_METRICS = {"episode_metrics": ("float32",)}  # likewise
_RESETS = {"reset_index": ("int32",), "reset_seed": ("int64",)}  # likewise

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
        """Bytes compressed together: of images a lane, or an even part of it; 0 leaves it to the library."""
        if not self.is_image:
            return 0
        frame = math.prod(self.shape[2:])
        parts = math.ceil(self.shape[0] * frame / _MAX_BLOCK_BYTES)
        return math.ceil(self.shape[0] / parts) * frame


def encode(fragment: Fragment) -> dict[bytes, bytes]:
    """Return the fields of the stream entry that holds `fragment`.

    Raises:
        CodecError: a column has a dtype or shape that a fragment cannot have, or all are above MAX_BYTES.
    """
    arrays = {name: getattr(fragment, name) for name in _REQUIRED} | dict(fragment.extras)
    if len(arrays) != len(_REQUIRED) + len(fragment.extras):
        raise CodecError("extras: a name repeats that of a column; rename it")
    columns = [_column(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    _check_layout(columns, fragment.num_steps, fragment.num_envs, fragment.context, MAX_BYTES)
    chunks = {
        column.name.encode(): _compress(column, arrays[column.name]) for column in columns if column.num_bytes
    }
    header = {
        "format": FORMAT,
        **{name: getattr(fragment, name) for name in (*_SCALARS, "host")},
        "T": fragment.num_steps,
        "N": fragment.num_envs,
        "C": fragment.context,
        "columns": [column._asdict() | {"bytes": column.num_bytes} for column in columns],
        "checksum": _checksum(chunks.values()),
    }
    return {b"h": json.dumps(header, separators=(",", ":")).encode(), **chunks}


def decode(
    fields: Mapping[bytes, bytes], *, max_bytes: int = MAX_BYTES, step_bytes: int = MAX_BYTES
) -> Fragment:
    """Return the fragment in one stream entry; fields that are no columns are ignored.

    Image columns come back as [T, N, ...] views of lane-major memory.

    Args:
        fields: field name -> bytes, as read from the server.
        max_bytes: cap on the uncompressed bytes of all columns together.
        step_bytes: the same for each step of an environment, and its first observation.

    Raises:
        CodecError: the entry is not what `encode` writes, or breaks an invariant of `Fragment`.
    """
    header = parse_header(fields.get(b"h", b""))
    columns = [_parse_column(entry) for entry in header["columns"]]
    most = min(max_bytes, (header["C"] + header["T"] + 1) * header["N"] * step_bytes)
    _check_layout(columns, header["T"], header["N"], header["C"], most)
    checksum = _checksum(_check_chunk(column, fields) for column in columns)
    if checksum != header["checksum"]:
        raise CodecError(f"checksum: {checksum} over the columns, the header says {header['checksum']}")
    arrays = {column.name: _decompress(column, fields) for column in columns}
    _check_values(arrays)
    values: dict[str, Any] = {name: header[name] for name in _SCALARS}
    values |= {name: arrays.pop(name) for name in _REQUIRED}
    return Fragment(**values, context=header["C"], extras=arrays, host=header["host"])


def decode_columns(fields: Mapping[bytes, bytes], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return those of some columns that an entry has, without a look at the others and the checksum over all.

    Raises:
        CodecError: the header or one of them is not what `encode` writes.
    """
    header = parse_header(fields.get(b"h", b""))
    columns = [_parse_column(entry) for entry in header["columns"]]
    _check_layout(columns, header["T"], header["N"], header["C"], MAX_BYTES)
    wanted = {column.name: column for column in columns if column.name in names}
    for column in wanted.values():
        _check_chunk(column, fields)
    return {name: _decompress(column, fields) for name, column in wanted.items()}


def _checksum(chunks: Iterable[bytes]) -> int:
    return functools.reduce(lambda checksum, chunk: zlib.crc32(chunk, checksum), chunks, 0)


def _compress(column: _Column, array: np.ndarray) -> bytes:
    if column.is_image:
        array = array.swapaxes(0, 1)
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    chunk: bytes = blosc2.compress2(
        array.reshape(-1).view(np.uint8),
        typesize=array.itemsize,
        codec=blosc2.Codec.ZSTD,
        clevel=2 if column.is_image else 1,
        filters=[blosc2.Filter.BITSHUFFLE if array.itemsize > 1 else blosc2.Filter.NOFILTER],
        blocksize=column.block_bytes,
        nthreads=1,
    )
    return chunk


def parse_header(data: bytes) -> dict[str, Any]:
    """Return the header, types and ranges of its scalars checked; columns is a list."""
    if not data:
        raise CodecError("h: the entry has no header")
    if len(data) > MAX_HEADER_BYTES:
        raise CodecError(f"h: header of {len(data)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"h: header is no JSON ({first_line(error)})") from None
    if not isinstance(header, dict):
        raise CodecError("h: header is no JSON object")
    if header.get("format") != FORMAT or type(header["format"]) is not int:
        raise CodecError(f"format: {_show(header.get('format'))}, this version reads {FORMAT}")
    run, columns = header.get("run"), header.get("columns")
    if not isinstance(run, str) or not 1 <= len(run) <= 200:
        raise CodecError(f"run: {_show(run)} is no run id")
    header["host"] = host = header.get("host", "")  # earlier versions name none
    if not isinstance(host, str) or len(host) > 200:
        raise CodecError(f"host: {_show(host)} is no name of a machine")
    for name in _NUMBERS:
        value = header.get(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise CodecError(f"{name}: {_show(value)} is no integer in [0, 2^63)")
    if header["T"] < 1 or header["N"] < 1:
        raise CodecError(f"T, N: {header['T']} steps of {header['N']} environments hold nothing")
    if not isinstance(columns, list) or len(columns) > _MAX_COLUMNS:
        raise CodecError(f"columns: no list of at most {_MAX_COLUMNS}")
    return header


def _parse_column(entry: object) -> _Column:
    if not isinstance(entry, dict) or set(entry) != {"name", "dtype", "shape", "bytes"}:
        raise CodecError(f"columns: {_show(entry)} is not {{name, dtype, shape, bytes}}")
    name, dtype, shape, claimed = (entry[key] for key in ("name", "dtype", "shape", "bytes"))
    if not isinstance(shape, list) or any(type(n) is not int or not 0 <= n < 2**31 for n in shape):
        raise CodecError(f"{_show(name)}: shape {_show(shape)} is no list of integers in [0, 2^31)")
    column = _column(name, dtype, tuple(shape))
    if type(claimed) is not int or claimed != column.num_bytes:
        raise CodecError(f"{name}: claims {_show(claimed)} bytes, {dtype} {shape} has {column.num_bytes}")
    return column


def _column(name: object, dtype: object, shape: tuple[int, ...]) -> _Column:
    """Return a column of a name, dtype and rank that a fragment may have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CodecError(f"columns: {_show(name)} is no column name")
    allowed = (_REQUIRED | _RECURRENT | _METRICS | _RESETS).get(name, _DTYPES)
    if not isinstance(dtype, str) or dtype not in allowed:
        raise CodecError(f"{name}: dtype {_show(dtype)}, expected {' or '.join(allowed)}")
    if len(shape) > _MAX_RANK:
        raise CodecError(f"{name}: shape {_show(list(shape))} has more than {_MAX_RANK} axes")
    return _Column(name, dtype, shape)


def _check_layout(columns: list[_Column], steps: int, num_envs: int, context: int, max_bytes: int) -> None:
    """Refuse columns that are missing, occur twice, are together above the cap or of inconsistent shapes."""
    shapes = {column.name: column.shape for column in columns}
    if len(shapes) != len(columns):
        raise CodecError("columns: a name occurs twice")
    if missing := [name for name in _REQUIRED if name not in shapes]:
        raise CodecError(f"{missing[0]}: the column is missing")
    for pair in (_RECURRENT, _RESETS):
        if len(pair.keys() & shapes.keys()) == 1:
            raise CodecError(f"{', '.join(pair)}: come together or not at all")
    if (total := sum(column.num_bytes for column in columns)) > max_bytes:
        raise CodecError(f"columns: {total} bytes uncompressed, at most {max_bytes} are accepted")
    rows = context + steps

    def axis(name: str, number: int) -> int:
        return shapes[name][number] if len(shapes.get(name, ())) > number else 0

    for name in ("final_index", "episode_return", "memory_index", "reset_index"):
        if axis(name, 0) > (rows + (name == "reset_index")) * num_envs:
            raise CodecError(f"{name}: {axis(name, 0)} rows, more than {rows} x {num_envs} steps can have")
    item = shapes["observation"][2:]
    expected = {
        "observation": (rows + 1, num_envs, *item),
        **dict.fromkeys(("reward", "terminated", "truncated"), (rows, num_envs)),
        "final_index": (axis("final_index", 0), 2),
        "final_observation": (axis("final_index", 0), *item),
        **dict.fromkeys(("episode_return", "episode_length"), (axis("episode_return", 0),)),
        "raw_action": shapes["action"],
        "episode_metrics": (axis("episode_return", 0), axis("episode_metrics", 1)),
        "memory_index": (axis("memory_index", 0), 2),
        "memory": (axis("memory_index", 0), axis("memory", 1)),
        "reset_index": (axis("reset_index", 0), 2),
        "reset_seed": (axis("reset_index", 0),),
    }
    for name, shape in shapes.items():
        wanted = expected.get(name, (rows, num_envs, *shape[2:]))
        if shape != wanted:
            raise CodecError(f"{name}: shape {list(shape)}, expected {list(wanted)}")
    dtypes = {column.name: column.dtype for column in columns}
    if dtypes["final_observation"] != (dtype := dtypes["observation"]):
        raise CodecError(f"final_observation: dtype differs from that of observation, {dtype}")


def _check_chunk(column: _Column, fields: Mapping[bytes, bytes]) -> bytes:
    """Return the compressed bytes of a column, which hold plain data of the size that its header says."""
    name, chunk = column.name, fields.get(column.name.encode(), b"")
    if not column.num_bytes:
        if chunk:
            raise CodecError(f"{name}: {len(chunk)} bytes for an empty column")
        return b""
    if len(chunk) < _CHUNK_HEADER_BYTES:
        raise CodecError(f"{name}: {len(chunk)} bytes are no blosc2 chunk")
    codec_and_kind = chunk[2] >> 5 in _PLAIN_CODECS and not chunk[30] and chunk[31] in _PLAIN_KINDS
    if not (codec_and_kind and _PLAIN_FILTERS.issuperset(chunk[16:22])):
        raise CodecError(f"{name}: chunk asks for a codec, filter or kind of chunk that is not accepted")
    try:
        num_bytes, num_compressed, _ = blosc2.get_cbuffer_sizes(chunk)
    except (RuntimeError, ValueError) as error:
        raise CodecError(f"{name}: no blosc2 chunk ({first_line(error)})") from None
    if num_bytes != column.num_bytes or num_compressed != len(chunk):
        raise CodecError(
            f"{name}: chunk of {num_bytes} bytes in {num_compressed}, "
            f"the header says {column.num_bytes} and {len(chunk)} came"
        )
    return chunk


def _decompress(column: _Column, fields: Mapping[bytes, bytes]) -> np.ndarray:
    shape = column.shape
    if column.is_image:
        shape = (shape[1], shape[0], *shape[2:])
    array = np.empty(shape, np.dtype(column.dtype).newbyteorder("<"))
    raw = array.reshape(-1).view(np.uint8)
    if column.num_bytes:
        try:
            blosc2.decompress2(fields[column.name.encode()], dst=raw, nthreads=1)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise CodecError(f"{column.name}: cannot be decompressed ({first_line(error)})") from None
    if column.dtype == "bool" and (raw > 1).any():
        raise CodecError(f"{column.name}: a byte that is neither 0 nor 1")
    return array.swapaxes(0, 1) if column.is_image else array


def _check_values(arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and name not in _METRICS and not np.isfinite(array).all():
            raise CodecError(f"{name}: holds NaN or infinity")
    terminated, truncated = arrays["terminated"], arrays["truncated"]
    if (terminated & truncated).any():
        raise CodecError("truncated: a step is both terminated and truncated")
    if not np.array_equal(arrays["final_index"], np.argwhere(truncated)):
        raise CodecError("final_index: not the (step, environment) of each truncated step in order of time")
    rows, num_envs = terminated.shape
    for name, most in (("memory_index", (rows, num_envs)), ("reset_index", (rows + 1, num_envs))):
        index = arrays.get(name, np.zeros((0, 2), np.int32))
        if (index < 0).any() or (index >= np.array(most)).any():
            raise CodecError(f"{name}: a (step, environment) outside {rows} x {num_envs}")
    if (arrays["episode_length"] < 1).any():
        raise CodecError("episode_length: an episode of less than one step")


def _show(value: object) -> str:
    """An untrusted value, short enough for one line."""
    return repr(value)[:60]
