"""Large arrays that batches are written into, again and again."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

POOLED_BYTES = 32 * 1024**2  # of an array worth keeping
MAX_IDLE = 1  # kept beside those in use, and the one asked for


class Outputs:
    """Large arrays to write batches into, used again once nobody refers to them.

    The C library gives memory above 32 MiB back at once, and each batch would have the system clear it anew:
    64 x 60 stacks of 4 take 25 ms in fresh memory and 16 ms in used one.
    """

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of those in use, and of the few kept for the next batches."""
        with self._lock:
            return sum(array.nbytes for array in self._arrays)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array with any content, the caller's as long as it or a view of it is referred to."""
        if int(np.prod(shape)) * dtype.itemsize < POOLED_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            # Two references: the list's, and that of the call itself.
            idle = [i for i in range(len(self._arrays)) if sys.getrefcount(self._arrays[i]) == 2]
            fitting = [i for i in idle if (self._arrays[i].shape, self._arrays[i].dtype) == (shape, dtype)]
            array = self._arrays[fitting[0]] if fitting else np.empty(shape, dtype)
            kept = fitting[1 : 1 + MAX_IDLE]
            self._arrays = [
                array,
                *(self._arrays[i] for i in range(len(self._arrays)) if i in kept or i not in idle),
            ]
            return array
