"""Sampling: uniform, and prioritized, where each item has a probability and each draw an importance weight.

Item i is drawn with probability P(i) = p_i / sum p, p = (|td| + 1e-6)^priority_exponent, and weighs (N P(i))^-beta, so
that with beta = 1 the weighted mean over draws is the plain mean over items. Weights are divided by the largest of
the batch, or of all items held: they only ever scale updates down.
Source: Schaul et al. 2016, arXiv:1511.05952, sections 3.3 and 3.4.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.sum_tree import SumTree

_LARGEST = float(np.finfo(np.float32).max) / 2  # error; larger ones, and NaN, count as this
_EPSILON = 1e-6  # an item whose error is 0 can still be drawn
_LEAST_CAPACITY = 1024


class _Philox(threading.local):
    """One Philox4x64 per thread: setting its state costs a third of building one."""

    def __init__(self) -> None:
        self.generator = np.random.Philox(key=0)
        self.state: Any = dict(self.generator.state)

    def raw(self, size: int, *, seed: int, draw: int) -> NDArray[np.uint64]:
        """Return the first [size] words of the stream with key (seed, draw)."""
        self.state["state"] = {"counter": (0, 0, 0, 0), "key": (seed, draw)}
        self.generator.state = self.state
        return self.generator.random_raw(size)


_philox = _Philox()


def uniform(num: int, size: int, *, seed: int, draw: int) -> NDArray[np.int64]:
    """Return positions drawn uniformly and with replacement; a pure function of its arguments.

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
    """
    word = _philox.raw(size, seed=seed, draw=draw)
    # 53 bits are exact in float64, and (1 - 2^-53) * num rounds to less than num.
    return ((word >> np.uint64(11)) * (2.0**-53 * num)).astype(np.int64)


def stratified(total: float, size: int, *, seed: int, draw: int) -> NDArray[np.float64]:
    """Return masses drawn uniformly, one from each of `size` equal parts of [0, total); a pure function.

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
    """
    word = _philox.raw(size, seed=seed, draw=draw)
    return (np.arange(size) + (word >> np.uint64(11)) * 2.0**-53) * (total / max(size, 1))


class Priorities:
    """Priorities of the items held, numbered 0, 1, 2, ... as they were admitted.

    They are float32 numbers summed in float64: what a checkpoint holds is exactly what is drawn from.

    Args:
        options: of an algorithm with those of `ddrl.algorithms.options.Prioritized`, of which beta takes importance_*.
            Weights by the largest of the whole replay take 0.3 ms a draw of a million items.
        capacity: most items held.

    Attributes:
        options: may be replaced by changed live ones.
    """

    def __init__(self, options: Any, capacity: int = _LEAST_CAPACITY) -> None:
        self.options = options
        self._tree = SumTree(max(capacity, _LEAST_CAPACITY))  # of item number n: slot n modulo the capacity
        self.first = self._next = 0
        """`first` is the number of the oldest item held."""
        self._largest = 1.0  # |td| of the items that were learned from
        self.least = 1.0
        """The p of which the newest draw's weights are 1."""

    def __len__(self) -> int:
        """Return the number of items held."""
        return self._next - self.first

    def beta(self, num_updates: int) -> float:
        """Return the exponent of the importance weights at an update."""
        begin, final = self.options.importance_exponent, self.options.final_importance_exponent
        share = min(num_updates / self.options.importance_anneal_updates, 1.0)
        return float(begin + share * (final - begin))

    def append(self, num_items: int, td_error: Any = None) -> None:
        """Append new items, numbered after those before.

        Args:
            num_items: M, how many.
            td_error: [M] sizes of their TD errors by the acting policy, at least 0. None: the largest of all updates,
                or 1 as long as none was larger, so that each is likely drawn soon.

        Raises:
            ValueError: an error is negative; nothing was appended.
        """
        assert len(self) + num_items <= self._tree.capacity, "no more items than the capacity"
        if td_error is None:
            td_error = np.full(num_items, self._largest)
        self._write(self._next, self._priorities(td_error))
        self._next += num_items

    @property
    def total(self) -> float:
        """Sum of p over all items held."""
        return self._tree.total

    def drop(self, first_new: int) -> None:
        """Drop the items below a number."""
        self._write(self.first, np.zeros(first_new - self.first))
        self.first = first_new

    def draw(
        self, size: int, *, seed: int, draw: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Draw items with replacement, stratified: a function of items, numbers, priorities and arguments alone.

        Args:
            size: B.
            seed: of the run.
            draw: number of the update; beta goes by it too.

        Returns:
            [B] positions, 0 the oldest item held; [B] numbers; [B] float32 weights in (0, 1].

        Raises:
            ValueError: nothing is held.
        """
        slot = self._tree.sample(stratified(self._tree.total, size, seed=seed, draw=draw))
        position = (slot - self.first) % self._tree.capacity
        p = self._tree.get(slot)
        # (N p_i / total)^-beta over its maximum, that of the smallest p: N and the total cancel.
        is_of_all = self.options.importance_maximum == "replay"
        pieces = self._pieces(self.first, len(self)) if is_of_all else ()
        self.least = float(min(part.min(initial=np.inf) for part in (p, *map(self._tree.get, pieces))))
        weight = (self.least / p) ** self.beta(draw)
        tiny = np.finfo(np.float32).tiny  # a weight is never 0
        return position, position + self.first, np.maximum(weight, tiny).astype(np.float32)

    def update(self, number: NDArray[np.int64], td_error: Any) -> None:
        """Give items new errors; those evicted meanwhile are left out.

        Args:
            number: [B] of the items, as drawn; where one comes twice, the last error stays.
            td_error: [B], at least 0.

        Raises:
            ValueError: an error is negative; nothing has changed.
        """
        p, is_held = self._priorities(td_error), number >= self.first
        self._largest = max(self._largest, float(np.fmin(td_error, _LARGEST).max(initial=0.0)))
        self._tree.set(number[is_held] % self._tree.capacity, p[is_held])

    def state(self) -> dict[str, NDArray[Any]]:
        """Return `priority` [len] float32, the oldest item's first, the `largest` error, and the `next` number."""
        return {
            "priority": self._tree.get(self._slots()).astype(np.float32),
            "largest": np.array(self._largest),
            "next": np.array(self._next),
        }

    def renumber(self, first: int) -> None:
        """Renumber the items held from `first` on. Draws depend on it, for slots go by numbers."""
        p = self._tree.get(self._slots())
        self._write(self.first, np.zeros(len(p)))
        self.first, self._next = first, first + len(p)
        self._write(first, p)

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore `state`: its last priority is that of the newest item held now, and so on backwards.

        Numbers may be others than they were then. Older items that it does not reach keep what they have.

        Raises:
            ValueError: these are no priorities; nothing was taken.
        """
        try:
            largest, p = float(state["largest"]), np.asarray(state["priority"], np.float64)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"priorities: cannot be read ({error!r}); start from another checkpoint"
            ) from None
        good = p.ndim == 1 and bool((np.isfinite(p) & (p > 0)).all())
        if not good or not 1 <= largest < np.inf:
            raise ValueError("priorities: not finite numbers above 0; start from another checkpoint")
        self._largest = max(self._largest, largest)
        num = min(len(self), len(p))
        self._write(self._next - num, p[len(p) - num :])

    def check_valid(self) -> None:
        """Assert every invariant: those of the tree, and that exactly the items held have a priority."""
        self._tree.check_valid()
        assert 0 <= self.first <= self._next and len(self) <= self._tree.capacity
        every = self._tree.get(np.arange(self._tree.capacity))
        assert np.count_nonzero(every) == len(self)
        assert (self._tree.get(self._slots()) > 0).all()
        assert np.array_equal(every, every.astype(np.float32))

    def _slots(self) -> NDArray[np.int64]:
        return np.arange(self.first, self._next) % self._tree.capacity

    def _priorities(self, td_error: Any) -> NDArray[np.float64]:
        """Return p of TD errors, rounded to float32."""
        errors = np.fmin(np.asarray(td_error, np.float64), _LARGEST)
        if not (is_usable := errors >= 0).all():
            wrong = errors[~is_usable][0]
            raise ValueError(f"td_error: {wrong:g} is no size of an error; give numbers of at least 0")
        p: NDArray[np.float64] = (errors + _EPSILON) ** self.options.priority_exponent
        return p.astype(np.float32).astype(np.float64)

    def _write(self, number: int, p: NDArray[np.float64]) -> None:
        """Set the priorities of items from `number` on."""
        head, tail = self._pieces(number, len(p))
        self._tree.set_range(head.start, head.stop, p[: head.stop - head.start])
        self._tree.set_range(tail.start, tail.stop, p[head.stop - head.start :])

    def _pieces(self, number: int, num: int) -> tuple[slice, slice]:
        """Return the slots of `num` items from `number` on, in two pieces: they may pass the end of the slots."""
        start = number % self._tree.capacity
        there = min(num, self._tree.capacity - start)
        return slice(start, start + there), slice(0, num - there)
