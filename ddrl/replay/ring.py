"""Columns side by side, rows of which enter at one end and leave at the other: NumPy arrays used as rings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Ring:
    """Rows numbered 0, 1, 2, ... as they are appended, the oldest of which leave first. Used by one thread.

    Memory of which nothing has been written yet costs address space only. When a row finds no slot the arrays grow by a
    quarter, copying once.

    Args:
        room: slots at first, at least 1.
    """

    def __init__(self, room: int) -> None:
        if room < 1:
            raise ValueError(f"room: {room} holds no row; use at least 1")
        self.columns: dict[str, NDArray[Any]] = {}
        """[slots, ...] by name; rows of `slots` only hold what was appended. None before the first append."""
        self.num_slots = room
        self.first = 0
        """Number of the oldest row held."""
        self._len = 0
        self._tail = 0  # slot of the oldest row

    def __len__(self) -> int:
        """Rows held."""
        return self._len

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns as allocated; 0 before the first append."""
        return sum(column.nbytes for column in self.columns.values())

    def check(self, name: str, values: NDArray[Any]) -> None:
        """Raise ValueError where rows `values` [M, ...] do not fit into the column."""
        column = self.columns.get(name)
        if column is not None and (column.shape[1:] != values.shape[1:] or column.dtype != values.dtype):
            raise ValueError(
                f"fragment: {name} is {values.dtype}{list(values.shape[1:])}, but the view holds "
                f"{column.dtype}{list(column.shape[1:])}; one run has one space"
            )

    def append(self, **values: NDArray[Any]) -> int:
        """Append M rows, [M, ...] of each column; the same columns each time. They are copied.

        Returns:
            The number of the first of them.
        """
        if not self.columns:
            self.columns = {
                name: np.empty((self.num_slots, *array.shape[1:]), array.dtype)
                for name, array in values.items()
            }
        if values.keys() != self.columns.keys() or len({len(array) for array in values.values()}) != 1:
            raise ValueError("columns: not those of the ring, or of different lengths")
        num_rows = len(next(iter(values.values())))
        self._make_room(num_rows)
        head = (self._tail + self._len) % self.num_slots
        to_end = min(num_rows, self.num_slots - head)
        for name, array in values.items():
            column = self.columns[name]
            column[head : head + to_end] = array[:to_end]
            column[: num_rows - to_end] = array[to_end:]
        self._len += num_rows
        return self.first + self._len - num_rows

    def drop(self, num_rows: int) -> None:
        """Let the oldest rows go."""
        assert 0 <= num_rows <= self._len, "only what is held can be dropped"
        self.first += num_rows
        self._len -= num_rows
        self._tail = (self._tail + num_rows) % self.num_slots

    def renumber(self, first: int) -> None:
        """Number the rows held anew, `first` being the oldest."""
        self.first = first

    def slots(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where rows held lie, same shape; not checked."""
        return self.wrapped(numbers + (self._tail - self.first))

    def wrapped(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots from -num_slots to 2 * num_slots, put around the ring's ends, same shape."""
        # Seen as unsigned, a negative number is huge, so that the smallest of three is the one within the ring: cheaper
        # than a remainder or a mask.
        unsigned = slots.view(np.uint64)
        size = np.uint64(self.num_slots)
        inside: NDArray[np.uint64] = np.minimum(np.minimum(unsigned, unsigned - size), unsigned + size)
        return inside.view(np.int64)

    def _make_room(self, num_rows: int) -> None:
        needed = self._len + num_rows
        if needed <= self.num_slots:
            return
        num_slots = max(needed, self.num_slots + self.num_slots // 4)
        to_end = min(self._len, self.num_slots - self._tail)
        for name, column in self.columns.items():
            grown = np.empty((num_slots, *column.shape[1:]), column.dtype)
            grown[:to_end] = column[self._tail : self._tail + to_end]
            grown[to_end : self._len] = column[: self._len - to_end]
            self.columns[name] = grown
        self.num_slots, self._tail = num_slots, 0
