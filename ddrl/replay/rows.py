"""Where a view keeps its observations: rows numbered 0, 1, 2, ... as they came, dense or compressed.

Both stores read stacks of K frames from rows of single ones (see `ddrl.replay.blocks`). All that reads the store
happens in `plan`; what it returns may run in another thread, whatever is appended or dropped meanwhile.

Compressed as measured on 84x84 frames of Asterix, Zaxxon and WizardOfWor (random policy), bytes a frame and time to
decompress a chunk: chunks of 17, LZ4HC level 3: 192, 268, 212, 5 us; level 5: 189, 260, 196; level 9: 182, 247, 186 but
four times as long to compress; chunks of 23, level 5: 179, 251, 183, 6.5 us; of 34: 169, 243, 171, 9 us. zstd in chunks
of 17: 132, 196, 139, but 21 us.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import blosc2
import numpy as np
from numpy.typing import NDArray

from ddrl.replay.blocks import Block, as_input
from ddrl.replay.outputs import Outputs
from ddrl.replay.ring import Ring

_CHUNK_ROWS = 24
_LEVEL = 5
_BYTES_OVERHEAD = sys.getsizeof(b"") + 8  # of a chunk: the object, and its place in the dict
_CACHE_BYTES = 1024**2

blosc2.set_releasegil(True)  # or threads that decompress would hold up the one that learns


@dataclass(frozen=True)
class Packed:
    """A block's rows as one kind of store keeps them.

    Attributes:
        shape, dtype: of a row, `*O`.
        columns: [R, ...] each, of the store's ring; chunks are counted from 0 in them.
        chunks: compressed rows.
        longest: rows in the largest chunk.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columns: dict[str, NDArray[Any]]
    chunks: tuple[bytes, ...] = ()
    longest: int = 1


class Rows(Protocol):
    """What a view needs of either store; rows are numbered as they are appended, for good."""

    frame_stack: int

    def __len__(self) -> int:
        """Rows held."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory as allocated, that of batches used again included."""

    def pack(self, block: Block) -> Packed:
        """The costly part of `append`, for any thread: it needs nothing of what is held. May share memory."""

    def check(self, packed: Packed) -> None:
        """Raise ValueError where the observations differ in shape or dtype from those held."""

    def append(self, packed: Packed) -> int:
        """Append a block's rows, copying; returns the number of the first. ValueError as `check`, changing nothing."""

    def drop(self, num_rows: int) -> None:
        """Let the oldest rows go: whole blocks only."""

    def plan(self, rows: NDArray[np.int64]) -> Callable[[], NDArray[Any]]:
        """Read rows held [...], not checked; what is returned gives [..., *I], the stacks that end with them.

        The array is the caller's for as long as it, or a view of it, is referred to.
        """

    def check_valid(self) -> None:
        """Check every invariant, in O(len); AssertionError names the one that does not hold."""


class DenseRows:
    """Rows as they are, in one ring.

    Args:
        frame_stack: K.
        expected_rows: room at first; it grows by a quarter when there are more.
    """

    def __init__(self, *, frame_stack: int = 1, expected_rows: int = 1024) -> None:
        self.frame_stack = frame_stack
        self._ring = Ring(expected_rows)
        self._outputs = Outputs()

    def __len__(self) -> int:
        """Rows held."""
        return len(self._ring)

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring, and of batches used again, as allocated."""
        return self._ring.num_bytes + self._outputs.num_bytes

    def pack(self, block: Block) -> Packed:
        """As `Rows.pack`."""
        columns = {"observation": block.rows, **_back(block, self.frame_stack)}
        return Packed(block.rows.shape[1:], block.rows.dtype, columns)

    def check(self, packed: Packed) -> None:
        """As `Rows.check`."""
        self._ring.check("observation", packed.columns["observation"])

    def append(self, packed: Packed) -> int:
        """As `Rows.append`."""
        self.check(packed)
        return self._ring.append(**packed.columns)

    def drop(self, num_rows: int) -> None:
        """As `Rows.drop`."""
        self._ring.drop(num_rows)

    def plan(self, rows: NDArray[np.int64]) -> Callable[[], NDArray[Any]]:
        """As `Rows.plan`; all is copied at once, for the ring may be overwritten later."""
        slots = _stacked_slots(self._ring, rows, self.frame_stack)
        observation = self._ring.columns["observation"]
        output = self._outputs.take((*slots.shape, *observation.shape[1:]), observation.dtype)
        for part in _parts(output, rows.ndim):
            # All slots are in the ring; the mode in which NumPy checks that goes through a second array.
            observation.take(slots[part], axis=0, out=output[part], mode="clip")
        stacks = as_input(output, rows.ndim, self.frame_stack)
        return lambda: stacks

    def check_valid(self) -> None:
        """As `Rows.check_valid`."""
        _check_back(self._ring, self.frame_stack)


class CompressedRows:
    """Rows in compressed chunks of about 24 consecutive ones of a lane: a thirtieth of the memory for Atari's images.

    The final observation of a truncated step is a chunk of its own. Reading decompresses a chunk once a plan.

    Args:
        frame_stack: K.
        expected_rows: room of the index at first; it grows by a quarter when there are more.
    """

    def __init__(self, *, frame_stack: int = 1, expected_rows: int = 1024) -> None:
        self.frame_stack = frame_stack
        self._ring = Ring(expected_rows)  # where each row is: its chunk, and its offset there, in rows
        self._outputs = Outputs()
        self._scratch = threading.local()
        self._chunks: dict[int, bytes] = {}
        self._first_chunk = self._next_chunk = 0
        self._chunk_bytes = 0
        self._shape: tuple[int, ...] = ()
        self._dtype: np.dtype[Any] | None = None
        self._longest = 1  # rows in the largest chunk there was

    def __len__(self) -> int:
        """Rows held."""
        return len(self._ring)

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunks, of the index and of batches used again, as allocated."""
        chunks = self._chunk_bytes + _BYTES_OVERHEAD * len(self._chunks)
        return chunks + self._ring.num_bytes + self._outputs.num_bytes

    def pack(self, block: Block) -> Packed:
        """As `Rows.pack`; 12 to 25 us a frame of Atari's, most of it without the interpreter's lock."""
        num_rows, num_envs = block.at.shape
        chunk, offset = np.empty(len(block.rows), np.int32), np.empty(len(block.rows), np.uint8)
        pieces = np.array_split(np.arange(num_rows), max(1, round(num_rows / _CHUNK_ROWS)))
        runs = [block.at[piece, lane] for lane in range(num_envs) for piece in pieces]
        runs += [np.array([row]) for row in range(block.at.size, len(block.rows))]
        for number, rows in enumerate(runs):
            chunk[rows], offset[rows] = number, np.arange(len(rows))
        return Packed(
            block.rows.shape[1:],
            block.rows.dtype,
            {"chunk": chunk, "offset": offset, **_back(block, self.frame_stack)},
            chunks=tuple(_compress(block.rows[rows]) for rows in runs),
            longest=max(map(len, runs)),
        )

    def check(self, packed: Packed) -> None:
        """As `Rows.check`."""
        shape, dtype = packed.shape, packed.dtype
        if self._dtype is not None and (shape, dtype) != (self._shape, self._dtype):
            raise ValueError(
                f"fragment: observation is {dtype}{list(shape)}, but the view holds "
                f"{self._dtype}{list(self._shape)}; one run has one space"
            )

    def append(self, packed: Packed) -> int:
        """As `Rows.append`."""
        self.check(packed)
        self._shape, self._dtype = packed.shape, packed.dtype
        self._longest = max(self._longest, packed.longest)
        first = self._next_chunk
        self._next_chunk += len(packed.chunks)
        self._chunks.update(zip(range(first, self._next_chunk), packed.chunks, strict=True))
        self._chunk_bytes += sum(map(len, packed.chunks))
        columns = {**packed.columns, "chunk": packed.columns["chunk"] + np.int32(first)}
        return self._ring.append(**columns)

    def drop(self, num_rows: int) -> None:
        """As `Rows.drop`."""
        self._ring.drop(num_rows)
        # A block's first row lies in its first chunk.
        oldest = self._ring.slots(np.array([self._ring.first]))[0]
        first = int(self._ring.columns["chunk"][oldest]) if len(self._ring) else self._next_chunk
        for number in range(self._first_chunk, first):
            self._chunk_bytes -= len(self._chunks.pop(number))
        self._first_chunk = first

    def plan(self, rows: NDArray[np.int64]) -> Callable[[], NDArray[Any]]:
        """As `Rows.plan`; the chunks in use are held by what is returned."""
        assert self._dtype is not None, "there are rows"
        slots = _stacked_slots(self._ring, rows, self.frame_stack)
        chunk = self._ring.columns["chunk"].take(slots.reshape(-1))
        offset = self._ring.columns["offset"].take(slots.reshape(-1))
        # Runs of consecutive rows of one chunk are copied as one; the runs of a chunk one after the other.
        starts = np.empty(len(chunk), np.bool_)
        starts[:1] = True
        starts[1:] = (chunk[1:] != chunk[:-1]) | (offset[1:] != offset[:-1] + 1)
        target = np.flatnonzero(starts)
        length = np.diff(target, append=len(chunk))
        order = np.argsort(chunk[target], kind="stable")
        target, length = target[order], length[order]
        source, run_chunk = offset[target], chunk[target]
        numbers, first_run = np.unique(run_chunk, return_index=True)
        chunks = [self._chunks[number] for number in numbers.tolist()]
        bounds = [*first_run.tolist(), len(target)]
        runs = list(
            zip(
                *(array.tolist() for array in (target, target + length, source, source + length)), strict=True
            )
        )
        shape, dtype, longest = self._shape, self._dtype, self._longest

        def read() -> NDArray[Any]:
            output = self._outputs.take((*slots.shape, *shape), dtype)
            flat = output.reshape(-1, *shape)
            scratch = self._scratch_rows(longest, shape, dtype)
            for number, data in enumerate(chunks):
                blosc2.decompress2(data, dst=scratch, nthreads=1)
                for to, to_end, start, stop in runs[bounds[number] : bounds[number + 1]]:
                    flat[to:to_end] = scratch[start:stop]
            return as_input(output, rows.ndim, self.frame_stack)

        return read

    def check_valid(self) -> None:
        """As `Rows.check_valid`."""
        _check_back(self._ring, self.frame_stack)
        assert list(self._chunks) == list(range(self._first_chunk, self._next_chunk)), "chunks in order"
        assert self._chunk_bytes == sum(map(len, self._chunks.values())), "bytes are those of the chunks"
        if not len(self._ring):
            assert not self._chunks, "no chunk without a row"
            return
        slots = self._ring.slots(self._ring.first + np.arange(len(self._ring)))
        chunk, offset = self._ring.columns["chunk"][slots], self._ring.columns["offset"][slots]
        assert np.array_equal(np.unique(chunk), list(self._chunks)), "rows are in the chunks held"
        row_bytes = int(np.prod(self._shape)) * np.dtype(self._dtype).itemsize
        for number, data in self._chunks.items():
            inside = np.sort(offset[chunk == number])
            assert np.array_equal(inside, np.arange(len(inside))), "a chunk's rows are all in the index"
            size = blosc2.get_cbuffer_sizes(data)[0]
            assert size == len(inside) * row_bytes, "a chunk holds the rows that point into it"

    def _scratch_rows(self, num_rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """This thread's array for one decompressed chunk."""
        array: NDArray[Any] | None = getattr(self._scratch, "array", None)
        if array is None or len(array) < num_rows:
            array = self._scratch.array = np.empty((num_rows, *shape), dtype)
        return array


def _parts(output: NDArray[Any], num_axes: int) -> Iterator[tuple[int | slice, ...]]:
    """Pieces of [...] rows in the order in which to read them.

    Of [2, B] images, s_t and s_{t+n}, a few of B at a time: what both share, frames and pages, is then still in the
    cache. It makes the difference between 0.8 and 0.6 ms for 256 pairs of stacks of 4.
    """
    if (
        num_axes != 2
        or not 4 <= (step := _CACHE_BYTES * output.shape[1] // max(1, output.nbytes)) < output.shape[1]
    ):
        yield (slice(None),)
        return
    for start in range(0, output.shape[1], step):
        for lead in range(len(output)):
            yield lead, slice(start, start + step)


def _back(block: Block, frame_stack: int) -> dict[str, NDArray[np.int32]]:
    """The column that stacks are resolved with, where there are any."""
    if frame_stack == 1:
        return {}
    assert block.back is not None, "the block was made for stacks"
    return {"back": block.back}


def _stacked_slots(ring: Ring, rows: NDArray[np.int64], frame_stack: int) -> NDArray[np.int64]:
    """[...] rows -> [..., K] slots of the stacks that end there, oldest first; [...] without stacks."""
    slot = ring.slots(rows)
    if frame_stack == 1:
        return slot
    slots = np.empty((*rows.shape, frame_stack), np.int64)
    slots[..., -1] = slot
    back = ring.columns["back"]
    for newer in range(frame_stack - 1, 0, -1):
        slot = ring.wrapped(slot - back.take(slot))
        slots[..., newer - 1] = slot
    return slots


def _compress(rows: NDArray[Any]) -> bytes:
    shuffle = blosc2.Filter.NOFILTER if rows.itemsize == 1 else blosc2.Filter.SHUFFLE
    data: bytes = blosc2.compress2(
        rows.reshape(-1).view(np.uint8),
        typesize=rows.itemsize,
        codec=blosc2.Codec.LZ4HC,
        clevel=_LEVEL,
        filters=[shuffle],
        blocksize=rows.nbytes,  # one block: frames resemble each other
        nthreads=1,
    )
    return data


def _check_back(ring: Ring, frame_stack: int) -> None:
    assert 0 <= len(ring) <= ring.num_slots, "no more rows than slots"
    if frame_stack > 1 and len(ring):
        numbers = ring.first + np.arange(len(ring))
        before = numbers - ring.columns["back"][ring.slots(numbers)]
        assert np.all((ring.first <= before) & (before <= numbers)), "a stack's rows are held"
