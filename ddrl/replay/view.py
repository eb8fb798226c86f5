"""The learner's view of the newest transitions in the stream: rings of NumPy arrays.

Knows nothing of learning, sampling or Redis. Used by one thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.windows import Windows, n_step_windows
from ddrl.types import Batch, Fragment


@dataclass(frozen=True)
class _Held:
    """One fragment in the view: what leaves the rings when it is evicted."""

    entry_id: str | bytes
    num_transitions: int
    num_rows: int


@dataclass(frozen=True)
class _Rings:
    """R observation rows and `capacity` transitions that point into them, allocated once.

    Memory of which nothing has been written yet costs address space only.
    """

    rows: NDArray[Any]  # [R, *O]
    start: NDArray[np.int64]  # [capacity] slot in rows
    bootstrap: NDArray[np.int64]  # [capacity] slot in rows
    action: NDArray[Any]  # [capacity, *A]
    n_step_return: NDArray[np.float32]  # [capacity]
    bootstrap_discount: NDArray[np.float32]  # [capacity]


class DenseView:
    """The last `capacity` n-step transitions, oldest first, each observation stored once.

    Fragments enter and leave whole, so the view may hold less than `capacity` by up to one fragment.
    T, N and context may differ between fragments; shapes and dtypes of observation and action may not.

    Rows: a fragment of T steps needs (T + 1) / T rows a transition, and one more a truncation. The ring
    of rows starts with room for T >= 8 and grows by a quarter, copying once, when shorter fragments or
    many truncations need more: capacity is a setting of learning and must not depend on T.
    """

    def __init__(self, *, capacity: int, gamma: float, n_step: int) -> None:
        """Allocate nothing yet; shapes and dtypes are those of the first fragment.

        Args:
            capacity: most transitions held, at least 1.
            gamma: discount of one agent step, in [0, 1].
            n_step: most rewards summed, at least 1.

        Raises:
            ValueError: a setting is out of range.
        """
        if capacity < 1:
            raise ValueError(f"capacity: {capacity} holds no transition; use at least 1")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma: {gamma} is no discount; use a number from 0 to 1")
        if n_step < 1:
            raise ValueError(f"n_step: {n_step} sums no reward; use at least 1")
        self.capacity = capacity
        self.num_admitted_fragments = 0
        """Fragments admitted since the start, evicted ones included."""
        self.num_admitted_transitions = 0
        """Transitions admitted since the start, evicted ones included."""
        self._gamma = gamma
        self._n_step = n_step
        self._rings: _Rings | None = None
        self._held: deque[_Held] = deque()
        self._tail = 0  # slot of the oldest transition
        self._len = 0
        self._row_tail = 0  # slot of the oldest row
        self._num_rows = 0

    def __len__(self) -> int:
        """Transitions held."""
        return self._len

    @property
    def oldest_entry_id(self) -> str | bytes | None:
        """Stream entry of the oldest fragment held; None when empty."""
        return self._held[0].entry_id if self._held else None

    @property
    def newest_entry_id(self) -> str | bytes | None:
        """Stream entry of the newest fragment held; None when empty."""
        return self._held[-1].entry_id if self._held else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the rings as allocated; 0 before the first fragment."""
        return sum(ring.nbytes for ring in vars(self._rings).values()) if self._rings else 0

    def admit(self, fragment: Fragment, entry_id: str | bytes) -> None:
        """Append a fragment's transitions, evicting the oldest fragments whole to make room.

        A refused fragment changes nothing.

        Args:
            fragment: copied; may be reused afterwards.
            entry_id: its id in the stream.

        Raises:
            ValueError: the fragment is larger than the capacity, its shapes or dtypes differ from the
                first one's, or it cannot be cut into transitions (see `n_step_windows`).
        """
        if fragment.num_transitions > self.capacity:
            raise ValueError(
                f"fragment: {fragment.num_transitions} transitions exceed the capacity of {self.capacity}; "
                "raise replay.capacity or shorten the fragments"
            )
        windows = n_step_windows(fragment, gamma=self._gamma, n=self._n_step)
        rings = self._rings if self._rings is not None else _allocate(windows, self.capacity)
        _check_same("observation", rings.rows, windows.rows)
        _check_same("action", rings.action, windows.action)
        while self._len + len(windows) > self.capacity:
            self._evict()
        rings = self._rings = self._with_room(rings, len(windows.rows))

        num_slots = len(rings.rows)
        row_head = (self._row_tail + self._num_rows) % num_slots
        head = (self._tail + self._len) % self.capacity
        _write(rings.rows, row_head, windows.rows)
        _write(rings.start, head, (row_head + windows.start) % num_slots)
        _write(rings.bootstrap, head, (row_head + windows.bootstrap) % num_slots)
        _write(rings.action, head, windows.action)
        _write(rings.n_step_return, head, windows.n_step_return)
        _write(rings.bootstrap_discount, head, windows.bootstrap_discount)

        self._held.append(_Held(entry_id, len(windows), len(windows.rows)))
        self._len += len(windows)
        self._num_rows += len(windows.rows)
        self.num_admitted_fragments += 1
        self.num_admitted_transitions += len(windows)

    def gather(self, index: NDArray[np.int64]) -> Batch:
        """The transitions at positions `index`, in that order, in fresh contiguous arrays.

        Args:
            index: [B] int64 positions in 0..len-1, 0 the oldest; repetitions are fine.

        Returns:
            A Batch of B transitions, dtypes as stored.

        Raises:
            IndexError: a position is negative or not below the length.
        """
        rings = self._rings
        if rings is None:
            raise IndexError("index: the view is empty; admit a fragment first")
        index = np.ascontiguousarray(index, np.int64)
        # Seen as unsigned, a negative position is huge: one pass checks both bounds.
        if index.size and int(index.view(np.uint64).max()) >= self._len:
            raise IndexError(
                f"index: {index.min()}..{index.max()} outside 0..{self._len - 1}, the view's positions"
            )
        # Below 2 * capacity, so one subtraction wraps it, cheaper than a remainder.
        slot = index + self._tail
        slot[slot >= self.capacity] -= self.capacity
        return Batch(
            observation=rings.rows.take(rings.start.take(slot), axis=0),
            action=rings.action.take(slot, axis=0),
            n_step_return=rings.n_step_return.take(slot),
            bootstrap_discount=rings.bootstrap_discount.take(slot),
            next_observation=rings.rows.take(rings.bootstrap.take(slot), axis=0),
        )

    def check_valid(self) -> None:
        """Check every invariant of the rings; for tests, after each mutation. Takes time in O(len).

        Raises:
            AssertionError: naming the invariant that does not hold.
        """
        assert self._len == sum(held.num_transitions for held in self._held), (
            "length is that of the fragments"
        )
        assert self._num_rows == sum(held.num_rows for held in self._held), "rows are those of the fragments"
        assert 0 <= self._len <= self.capacity, "no more transitions than the capacity"
        assert self._len <= self.num_admitted_transitions, "what is held was admitted"
        assert len(self._held) <= self.num_admitted_fragments, "what is held was admitted"
        if self._rings is None:
            assert not self._held, "a fragment needs rings"
            assert self.num_admitted_fragments == 0, "the first fragment allocates the rings"
            return
        rings = self._rings
        assert self._held, "only another fragment evicts"
        assert self._num_rows <= len(rings.rows), "no more rows than slots"
        assert 0 <= self._tail < self.capacity, "the oldest transition is in a slot"
        assert 0 <= self._row_tail < len(rings.rows), "the oldest row is in a slot"
        transition, row = 0, 0
        for held in self._held:
            slot = (self._tail + transition + np.arange(held.num_transitions)) % self.capacity
            start = (rings.start[slot] - self._row_tail) % len(rings.rows) - row
            bootstrap = (rings.bootstrap[slot] - self._row_tail) % len(rings.rows) - row
            assert np.array_equal(start, np.arange(held.num_transitions)), (
                "each transition starts at its own row"
            )
            assert np.all((start < bootstrap) & (bootstrap < held.num_rows)), "bootstraps later, own fragment"
            discount = rings.bootstrap_discount[slot]
            assert np.all((discount >= 0) & (discount <= np.float32(self._gamma))), "discounts in [0, gamma]"
            transition, row = transition + held.num_transitions, row + held.num_rows

    def _evict(self) -> None:
        """Drop the oldest fragment."""
        assert self._rings is not None
        held = self._held.popleft()
        self._tail = (self._tail + held.num_transitions) % self.capacity
        self._len -= held.num_transitions
        self._row_tail = (self._row_tail + held.num_rows) % len(self._rings.rows)
        self._num_rows -= held.num_rows

    def _with_room(self, rings: _Rings, num_rows: int) -> _Rings:
        """Rings with slots for `num_rows` more rows; larger ones, oldest row first, when they lack them.

        At most 3 * capacity slots are ever needed (T = 1, all truncated); each growth adds a quarter.
        """
        needed, num_slots = self._num_rows + num_rows, len(rings.rows)
        if needed <= num_slots:
            return rings
        grown = np.empty((max(needed, num_slots + num_slots // 4), *rings.rows.shape[1:]), rings.rows.dtype)
        to_end = min(self._num_rows, num_slots - self._row_tail)
        grown[:to_end] = rings.rows[self._row_tail : self._row_tail + to_end]
        grown[to_end : self._num_rows] = rings.rows[: self._num_rows - to_end]
        live = (self._tail + np.arange(self._len)) % self.capacity
        for pointers in (rings.start, rings.bootstrap):
            pointers[live] = (pointers[live] - self._row_tail) % num_slots
        self._row_tail = 0
        return _Rings(
            grown, rings.start, rings.bootstrap, rings.action, rings.n_step_return, rings.bootstrap_discount
        )


def _allocate(windows: Windows, capacity: int) -> _Rings:
    """Empty rings with the shapes and dtypes of the first fragment."""
    return _Rings(
        rows=np.empty((capacity + -(-capacity // 8), *windows.rows.shape[1:]), windows.rows.dtype),
        start=np.empty(capacity, np.int64),
        bootstrap=np.empty(capacity, np.int64),
        action=np.empty((capacity, *windows.action.shape[1:]), windows.action.dtype),
        n_step_return=np.empty(capacity, np.float32),
        bootstrap_discount=np.empty(capacity, np.float32),
    )


def _check_same(name: str, ring: NDArray[Any], values: NDArray[Any]) -> None:
    """Raise ValueError where a fragment's column does not fit into the ring."""
    if ring.shape[1:] != values.shape[1:] or ring.dtype != values.dtype:
        raise ValueError(
            f"fragment: {name} is {values.dtype}{list(values.shape[1:])}, but the view holds "
            f"{ring.dtype}{list(ring.shape[1:])}; one run has one space"
        )


def _write(ring: NDArray[Any], head: int, values: NDArray[Any]) -> None:
    """Copy `values` into the ring from slot `head` on, around its end."""
    to_end = min(len(values), len(ring) - head)
    ring[head : head + to_end] = values[:to_end]
    ring[: len(values) - to_end] = values[to_end:]
