"""The sum tree: draws slots in proportion to their values, a batch at a time.

The tree is wide and flat, because in NumPy every level costs a few calls whatever its width: 16 children a node, and
no node above the first level of at most 4096, which is searched as one array. A parent is always the sum of its
children as they are now, never changed by a difference, so rounding cannot pile up.
The idea: Schaul et al. 2016, arXiv:1511.05952, appendix B.2.1; there the tree is binary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHILDREN = 16
_MAX_TOP = 4096  # nodes of the first level; its running sum costs as much as one level more would


class SumTree:
    """Values of `capacity` slots, 0 at first, and their sums.

    Args:
        capacity: slots, at least 1. It holds a value of 8 bytes a slot, and a fifteenth of that in sums.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        size, depth = capacity, 0
        while size > _MAX_TOP:
            size, depth = -(-size // _CHILDREN), depth + 1
        # _levels[0] are the slots, padded to whole families; each level above holds the sums of the one below.
        self._levels = [np.zeros(size * _CHILDREN ** (depth - level)) for level in range(depth + 1)]

    @property
    def total(self) -> float:
        """Sum of all values."""
        return float(np.cumsum(self._levels[-1])[-1])

    def get(self, slots: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        """Return the values [B] of slots [B], or a view of those of a slice."""
        return self._levels[0][slots]

    def set(self, slots: NDArray[np.int64], values: Any) -> None:
        """Set the values of slots [B], one each or one for all; the last value of a repeated slot stays.

        Args:
            slots: 0..capacity-1, in any order.
            values: finite, at least 0; so must be their sum.
        """
        self._levels[0][slots] = values
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            slots = slots // _CHILDREN
            above[slots] = np.add.reduce(below.reshape(-1, _CHILDREN).take(slots, 0), axis=1)

    def set_range(self, start: int, stop: int, values: Any) -> None:
        """Set the values of slots start..stop-1."""
        if start == stop:
            return
        self._levels[0][start:stop] = values
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start // _CHILDREN, -(-stop // _CHILDREN)
            above[start:stop] = np.add.reduce(below.reshape(-1, _CHILDREN)[start:stop], axis=1)

    def sample(self, mass: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the slots in which the running sum of all values passes masses [B]; never one whose value is 0.

        Args:
            mass: [B] in [0, total); one above by rounding selects the last slot with a value.

        Raises:
            ValueError: all values are 0.
        """
        top = self._levels[-1]
        ends = np.cumsum(top)
        if not ends[-1] > 0:
            raise ValueError("sample: every value is 0; set one first")
        # The first child whose running sum passes a mass adds something to it, so its value is not 0. Sums are rounded:
        # the rest of a mass within a child may lie a little outside of 0..its sum, and is clipped.
        mass = np.minimum(mass, np.nextafter(ends[-1], 0))
        slots = ends.searchsorted(mass, side="right")
        mass = mass - (ends[slots] - top[slots])
        rows = np.arange(len(slots))
        for level in reversed(self._levels[:-1]):
            children = level.reshape(-1, _CHILDREN).take(slots, 0)  # [B, 16]
            sums = np.cumsum(children, axis=1)
            mass = np.maximum(np.minimum(mass, np.nextafter(sums[:, -1], 0)), 0)
            child = np.add.reduce(sums <= mass[:, None], axis=1)
            mass = mass - (sums[rows, child] - children[rows, child])
            slots = slots * _CHILDREN + child
        return slots

    def check_valid(self) -> None:
        """Assert every invariant: values finite and at least 0, none beyond the capacity, every parent a sum."""
        for level in self._levels:
            assert np.isfinite(level).all() and (level >= 0).all()
        assert not self._levels[0][self.capacity :].any()
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            assert np.array_equal(above, np.add.reduce(below.reshape(-1, _CHILDREN), axis=1))
