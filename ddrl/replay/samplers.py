"""Which positions of the view make a batch."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Philox(threading.local):
    """One Philox4x64 a thread: setting its state costs a third of building one."""

    def __init__(self) -> None:
        self.generator = np.random.Philox(key=0)
        self.state: Any = dict(self.generator.state)

    def raw(self, size: int, *, seed: int, draw: int) -> NDArray[np.uint64]:
        """[size] words of the stream with key (seed, draw), from its beginning."""
        self.state["state"] = {"counter": (0, 0, 0, 0), "key": (seed, draw)}
        self.generator.state = self.state
        return self.generator.random_raw(size)


_philox = _Philox()


def uniform(num: int, size: int, *, seed: int, draw: int) -> NDArray[np.int64]:
    """Positions drawn uniformly and with replacement; a pure function of its arguments.

    Philox is counter-based: draw number d needs no draw before it, so a resumed learner repeats exactly
    what an undisturbed one draws, in any order, thread or process. The words of Philox4x64-10 are fixed
    by the paper and the map to positions is written out here, so no version of NumPy changes a draw. A
    shorter draw is the beginning of a longer one. The bias of a position is below num * 2^-53.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

    Args:
        num: positions to choose from, 1..2^53.
        size: B, how many are drawn, at least 0.
        seed: of the run, 0..2^64 - 1.
        draw: number of the draw, such as the update's, 0..2^64 - 1.

    Returns:
        [size] int64 in 0..num-1.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 1 <= num <= 2**53:
        raise ValueError(f"num: {num} positions to draw from; needs 1..2^53, so wait for data")
    word = _words(size, seed=seed, draw=draw)
    # 53 bits are exact in float64, and (1 - 2^-53) * num rounds to less than num.
    return ((word >> np.uint64(11)) * (2.0**-53 * num)).astype(np.int64)


def stratified(total: float, size: int, *, seed: int, draw: int) -> NDArray[np.float64]:
    """Masses drawn uniformly, one from each of `size` equal parts of [0, total); a pure function of its arguments.

    Part i gives (i + u_i) / size * total, with u_i in [0, 1) from the same counter-based stream as `uniform`.
    Each mass by itself is no better than a uniform one, together they vary less: a batch cannot miss a whole part.
    Source: Schaul et al. 2016, arXiv:1511.05952, section 3.3.

    Args:
        total: of all priorities, finite and above 0.
        size: B, how many are drawn, at least 0.
        seed: of the run, 0..2^64 - 1.
        draw: number of the draw, such as the update's, 0..2^64 - 1.

    Returns:
        [size] float64, ascending; rounding may give the last one `total` itself.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 < total < math.inf:
        raise ValueError(f"total: {total} cannot be divided; needs a finite number above 0, so wait for data")
    word = _words(size, seed=seed, draw=draw)
    return (np.arange(size) + (word >> np.uint64(11)) * 2.0**-53) * (total / max(size, 1))


def _words(size: int, *, seed: int, draw: int) -> NDArray[np.uint64]:
    if size < 0:
        raise ValueError(f"size: {size} is no batch size; use at least 0")
    if not (0 <= seed < 2**64 and 0 <= draw < 2**64):
        raise ValueError(f"seed, draw: {seed}, {draw}; both must be in 0..2^64-1")
    return _philox.raw(size, seed=seed, draw=draw)
