"""The learner's view of the newest transitions in the stream.

Knows nothing of learning, sampling or Redis. Used by one thread, but for what `plan` returns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddrl.replay import rows as stores
from ddrl.replay.ring import Ring
from ddrl.replay.rows import Rows
from ddrl.replay.windows import Windows, n_step_windows
from ddrl.types import Batch, Fragment

_POINTER_BYTES = (
    8 + 4 + 4 + 4
)  # of a transition: start row, rows ahead to the bootstrap, n_step_return, bootstrap_discount


@dataclass(frozen=True)
class Packed:
    """A fragment with all of its admission that needs nothing of what the view holds."""

    fragment: Fragment
    windows: Windows
    rows: stores.Packed


@dataclass(frozen=True)
class _Held:
    """One fragment in the view: what leaves when it is evicted."""

    entry_id: bytes
    num_transitions: int
    first_row: int
    num_rows: int


class TransitionView:
    """The last `capacity` n-step transitions, oldest first, each observation stored once a fragment.

    Transitions are numbered 0, 1, 2, ... as admitted: a fragment's in order of time, environments of one step side by
    side. Fragments enter and leave whole, so the view may hold less than `capacity` by up to one fragment. T, N and
    context may differ between fragments; shapes and dtypes of observation and action may not.
    """

    def __init__(self, rows: Rows, *, capacity: int, gamma: float, n_step: int, frame_stack: int = 1) -> None:
        """Allocate nothing yet; shapes and dtypes are those of the first fragment.

        Args:
            rows: an empty store for the observations, the view's own; `expected_rows(capacity)` is room enough for it.
            capacity: most transitions held, at least 1.
            gamma: discount of one agent step, in [0, 1].
            n_step: most rewards summed, at least 1.
            frame_stack: K observations that a network sees at once, as in `rows`.

        Raises:
            ValueError: a setting is out of range.
        """
        if capacity < 1:
            raise ValueError(f"capacity: {capacity} holds no transition; use at least 1")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma: {gamma} is no discount; use a number from 0 to 1")
        if n_step < 1:
            raise ValueError(f"n_step: {n_step} sums no reward; use at least 1")
        if frame_stack != rows.frame_stack:
            raise ValueError(
                f"frame_stack: {frame_stack}, but the rows stack {rows.frame_stack}; use the same"
            )
        self.capacity = capacity
        self._gamma = gamma
        self._n_step = n_step
        self._frame_stack = frame_stack
        self._rows = rows
        self._ring = Ring(capacity)
        self._held: deque[_Held] = deque()

    def __len__(self) -> int:
        """Transitions held."""
        return len(self._ring)

    @property
    def first(self) -> int:
        """Number of the oldest transition held."""
        return self._ring.first

    @property
    def num_steps(self) -> int:
        """Transitions held, in which the capacity is counted."""
        return len(self._ring)

    @property
    def oldest_entry_id(self) -> bytes | None:
        """Stream entry of the oldest fragment held; None when empty."""
        return self._held[0].entry_id if self._held else None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory as allocated; 0 before the first fragment. What was never written costs none yet."""
        return self._ring.num_bytes + self._rows.num_bytes

    def renumber(self, first: int) -> None:
        """Number the transitions held anew, `first` being the oldest: as they were before a restart."""
        self._ring.renumber(first)

    def pack(self, fragment: Fragment) -> Packed:
        """Cut a fragment into transitions and pack its rows, in any thread; errors as of `admit`."""
        if fragment.num_transitions > self.capacity:
            raise ValueError(
                f"fragment: {fragment.num_transitions} transitions exceed the capacity of {self.capacity}; "
                "raise replay.capacity or shorten the fragments"
            )
        windows = n_step_windows(fragment, gamma=self._gamma, n=self._n_step, frame_stack=self._frame_stack)
        return Packed(fragment, windows, self._rows.pack(windows.block))

    def admit(self, fragment: Fragment | Packed, entry_id: bytes) -> NDArray[np.float32] | None:
        """Append a fragment's transitions, evicting the oldest fragments whole to make room.

        A refused fragment changes nothing.

        Args:
            fragment: as it is, or as `pack` made of it; copied, may be reused afterwards.
            entry_id: its id in the stream.

        Returns:
            [M] float32 size of the TD error of each new transition by the values that the playing policy told; None
            where it told none.

        Raises:
            ValueError: the fragment is larger than the capacity, its shapes or dtypes differ from the
                first one's, or it cannot be cut into transitions (see `n_step_windows`).
        """
        packed = self.pack(fragment) if isinstance(fragment, Fragment) else fragment
        windows = packed.windows
        self._rows.check(packed.rows)
        self._ring.check("action", windows.action)
        while len(self) + len(windows) > self.capacity:
            held = self._held.popleft()
            self._ring.drop(held.num_transitions)
            self._rows.drop(held.num_rows)
        first_row = self._rows.append(packed.rows)
        self._ring.append(
            start=first_row + windows.start,
            ahead=(windows.bootstrap - windows.start).astype(np.int32),
            action=windows.action,
            n_step_return=windows.n_step_return,
            bootstrap_discount=windows.bootstrap_discount,
        )
        self._held.append(_Held(entry_id, len(windows), first_row, len(windows.block.rows)))
        return windows.td_error

    def plan(self, position: NDArray[np.int64]) -> Callable[[], Batch]:
        """Look the transitions at `position` up; what is returned reads their observations.

        It may be called in another thread, whatever is admitted meanwhile.

        Args:
            position: [B] int64 in 0..len-1, 0 the oldest; repetitions are fine.

        Returns:
            A function that gives a Batch of B transitions in that order, dtypes as stored, in arrays that nobody else
            writes to as long as they are referred to.

        Raises:
            IndexError: a position is negative or not below the length.
        """
        if not len(self):
            raise IndexError("position: the view is empty; admit a fragment first")
        position = np.ascontiguousarray(position, np.int64)
        # Seen as unsigned, a negative position is huge: one pass checks both bounds.
        if position.size and int(position.view(np.uint64).max()) >= len(self):
            raise IndexError(
                f"position: {position.min()}..{position.max()} outside 0..{len(self) - 1}, the view's positions"
            )
        slot = self._ring.slots(position + self.first)
        columns = self._ring.columns
        ends = np.empty((2, *position.shape), np.int64)
        columns["start"].take(slot, out=ends[0], mode="clip")
        np.add(ends[0], columns["ahead"].take(slot), out=ends[1])
        read = self._rows.plan(ends)
        action = columns["action"].take(slot, axis=0)
        n_step_return = columns["n_step_return"].take(slot)
        bootstrap_discount = columns["bootstrap_discount"].take(slot)

        def batch() -> Batch:
            observation, next_observation = read()
            return Batch(
                observation=observation,
                action=action,
                n_step_return=n_step_return,
                bootstrap_discount=bootstrap_discount,
                next_observation=next_observation,
            )

        return batch

    def gather(self, position: NDArray[np.int64]) -> Batch:
        """The transitions at `position`, at once; see `plan`."""
        return self.plan(position)()

    def check_valid(self) -> None:
        """Check every invariant; for tests, after each mutation. Takes time in O(len).

        Raises:
            AssertionError: naming the invariant that does not hold.
        """
        self._rows.check_valid()
        assert len(self) == sum(held.num_transitions for held in self._held), "as long as the fragments"
        assert len(self._rows) == sum(held.num_rows for held in self._held), "rows are those of the fragments"
        assert 0 <= len(self) <= self.capacity, "no more transitions than the capacity"
        assert self._ring.num_slots == self.capacity, "only rows need more room"
        assert self._held or not self.num_bytes, "only another fragment evicts"
        if not self._held:
            return
        numbers = self.first + np.arange(len(self))
        start, ahead, discount = (
            self._ring.columns[name][self._ring.slots(numbers)]
            for name in ("start", "ahead", "bootstrap_discount")
        )
        bootstrap = start + ahead
        assert np.all((discount >= 0) & (discount <= np.float32(self._gamma))), "discounts in [0, gamma]"
        end, row = 0, self._held[0].first_row
        for held in self._held:
            here = slice(end, end + held.num_transitions)
            assert held.first_row == row, "fragments lie one behind the other"
            assert len(np.unique(start[here])) == held.num_transitions, (
                "each transition starts at its own row"
            )
            assert np.all((row <= start[here]) & (start[here] < bootstrap[here])), "bootstraps later"
            assert np.all(bootstrap[here] < row + held.num_rows), "in the same fragment"
            end, row = here.stop, row + held.num_rows


def expected_rows(capacity: int, *, context: int = 0, steps: int = 8) -> int:
    """Room for the observations of `capacity` transitions from fragments of T = `steps` that bring C = `context` along.

    8 steps without context give as many as 32 steps with 3.
    """
    return capacity + -(-capacity * (context + 1) // steps)


def dense_bytes(
    *,
    capacity: int,
    observation_shape: Sequence[int],
    observation_dtype: str,
    frame_stack: int = 1,
    action_bytes: int = 8,
    num_rows: int | None = None,
) -> int:
    """Memory that a full view of `capacity` transitions takes with dense observations, as far as it can be foretold.

    Of a view of sequences give the `num_rows`; what else it holds is about a hundredth of its images.

    Args:
        capacity: transitions.
        observation_shape: `*O`, of one frame.
        observation_dtype: NumPy name.
        frame_stack: K.
        action_bytes: of one action.
        num_rows: observations; None for those that `expected_rows(capacity)` gives.
    """
    row = math.prod(observation_shape) * np.dtype(observation_dtype).itemsize + 4 * (frame_stack > 1)
    num_rows = expected_rows(capacity) if num_rows is None else num_rows
    return num_rows * row + capacity * (_POINTER_BYTES + action_bytes)
