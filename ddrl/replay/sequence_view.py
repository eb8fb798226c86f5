"""The learner's view of the newest sequences in the stream, for recurrent learning.

Knows nothing of learning, sampling or Redis. Used by one thread; what `plan` returns may run in another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddrl.replay import rows as stores
from ddrl.replay.blocks import Block, block
from ddrl.replay.ring import Ring
from ddrl.replay.rows import Rows
from ddrl.replay.sequences import Cuts, cut_fragment, memory_states, priorities, targets
from ddrl.replay.view import expected_rows as rows_of_fragments
from ddrl.replay.windows import check_rewards
from ddrl.types import Fragment, Sequences, SequenceShape

_TYPICAL_STEPS = 32  # T, where the stride asks for no more; fragments take about rollout.fragment_s


@dataclass(frozen=True)
class Packed:
    """A fragment with all of its admission that needs nothing of what the view holds.

    Attributes:
        memory: [M, H] states before the M sequences.
        surprise: [M], see `SequenceView.admit`.
    """

    fragment: Fragment
    cuts: Cuts
    observed: Block
    rows: stores.Packed
    memory: NDArray[np.float16]
    surprise: NDArray[np.float32] | None


@dataclass(frozen=True)
class _Held:
    """One fragment in the view: what leaves the rings when it is evicted.

    Attributes:
        num_transitions: its own, without those of its context.
        num_rows: observations.
        lane_steps: C + T.
        num_envs: N.
    """

    entry_id: bytes
    num_transitions: int
    num_items: int
    num_rows: int
    lane_steps: int
    num_envs: int

    @property
    def num_steps(self) -> int:
        """Steps in the ring of steps, context included."""
        return self.lane_steps * self.num_envs


class SequenceView:
    """The sequences of the newest fragments, of at most `capacity` transitions together, the oldest first.

    Items are sequences, numbered 0, 1, 2, ... as they were admitted: a fragment's lane by lane. Fragments enter and
    leave whole and with their context, which several of them then hold: where they are much shorter than it, most of
    the memory is context. T, N and context may differ between fragments; shapes and dtypes may not.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        shape: SequenceShape,
        capacity: int,
        gamma: float,
        n_step: int,
        memory_size: int,
        priority_mix: float = 0.9,
        rescaled: bool = True,
    ) -> None:
        """Nothing is held yet; shapes and dtypes are those of the first fragment.

        Args:
            rows: empty; holds the observations, and knows how many make a stack; `expected_rows` is room enough.
            shape: of the sequences.
            capacity: most transitions held, not counting context; at least one sequence of them.
            gamma: discount of one agent step, in [0, 1].
            n_step: most rewards summed, at least 1 and at most a sequence of them.
            memory_size: H, numbers of a recurrent state.
            priority_mix: weight of the largest TD error in a new sequence's priority, against their mean; in [0, 1].
            rescaled: the policy's values are in units of h (see `returns.rescale`).

        Raises:
            ValueError: a setting is out of range.
        """
        if capacity < shape.length:
            raise ValueError(
                f"capacity: {capacity} transitions hold no sequence of {shape.length} steps; "
                f"use at least {shape.length}"
            )
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma: {gamma} is no discount; use a number from 0 to 1")
        if not 1 <= n_step <= shape.length:
            raise ValueError(
                f"n_step: {n_step} does not fit into sequences of {shape.length} steps; use 1 to {shape.length}"
            )
        if not 0.0 <= priority_mix <= 1.0:
            raise ValueError(f"priority_mix: {priority_mix} is no share; use a number from 0 to 1")
        if memory_size < 1:
            raise ValueError(f"memory_size: {memory_size} is no recurrent state; use at least 1")
        self.capacity, self.shape = capacity, shape
        self._context = shape.context + rows.frame_stack - 1
        self._memory_size = memory_size
        self._gamma, self._n_step = gamma, n_step
        self._mix, self._rescaled = priority_mix, rescaled
        self._rows = rows
        # Lane by lane, context included: row, action, reward.
        self._steps = Ring(expected_rows(capacity, shape, rows.frame_stack))
        self._items = Ring(max(1, capacity // shape.stride))
        self._held: deque[_Held] = deque()
        self._num_steps = 0

    def __len__(self) -> int:
        """Sequences held."""
        return len(self._items)

    @property
    def first(self) -> int:
        """Number of the oldest sequence held; those held are first .. first + len - 1."""
        return self._items.first

    @property
    def num_steps(self) -> int:
        """Transitions held, each counted once: what the capacity is compared with."""
        return self._num_steps

    @property
    def oldest_entry_id(self) -> bytes | None:
        """Stream entry of the oldest fragment held; None when empty."""
        return self._held[0].entry_id if self._held else None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory as allocated."""
        return self._rows.num_bytes + self._steps.num_bytes + self._items.num_bytes

    def renumber(self, first: int) -> None:
        """Number the sequences held anew, `first` being the oldest: as they were before a restart."""
        self._items.renumber(first)

    def pack(self, fragment: Fragment) -> Packed:
        """Cut a fragment into sequences and pack its rows, in any thread; errors as of `admit`."""
        if fragment.num_transitions > self.capacity:
            raise ValueError(
                f"fragment: {fragment.num_transitions} transitions exceed the capacity of {self.capacity}; "
                "raise replay.capacity or shorten the fragments"
            )
        if fragment.context > self._context:  # which the capacity does not count
            raise ValueError(
                f"fragment: {fragment.context} steps of context, but its sequences need {self._context}; its worker "
                "plays with other settings"
            )
        if fragment.action.ndim != 2 or fragment.action.dtype != np.int64:
            raise ValueError(
                f"fragment: action is {fragment.action.dtype}{list(fragment.action.shape[2:])}; sequences are of "
                "discrete actions, int64"
            )
        cuts = cut_fragment(fragment, self.shape, self._rows.frame_stack)
        check_rewards(fragment, self._n_step)
        observed = block(fragment, self._rows.frame_stack)
        memory = memory_states(fragment, cuts, self._memory_size)
        surprise = priorities(
            fragment, cuts, gamma=self._gamma, n=self._n_step, rescaled=self._rescaled, mix=self._mix
        )
        return Packed(fragment, cuts, observed, self._rows.pack(observed), memory, surprise)

    def admit(self, fragment: Fragment | Packed, entry_id: bytes) -> NDArray[np.float32] | None:
        """Append a fragment's sequences, evicting the oldest fragments whole to make room.

        A refused fragment changes nothing.

        Args:
            fragment: as it is, or as `pack` made of it; copied, may be reused afterwards. Its extras must have
                memory_index and memory, of exactly the rows that `sequences.memory_rows` gives; empty ones where it
                gives none.
            entry_id: its id in the stream.

        Returns:
            [M] how surprising each of the M new sequences was to the policy that played it (`sequences.priorities`);
            None where it gave no values.

        Raises:
            ValueError: the fragment is larger than the capacity, its shapes or dtypes differ from the first one's, it
                has no discrete actions or other context or recurrent states than its sequences need, its returns need
                not be finite, or it cannot be cut.
        """
        packed = self.pack(fragment) if isinstance(fragment, Fragment) else fragment
        fragment, cuts, observed = packed.fragment, packed.cuts, packed.observed
        self._rows.check(packed.rows)
        while self._num_steps + fragment.num_transitions > self.capacity:
            self._evict()

        row = self._rows.append(packed.rows)
        step = self._steps.append(
            row=row + observed.at[:-1].T.reshape(-1),
            action=fragment.action.T.reshape(-1),
            reward=fragment.reward.T.reshape(-1),
        )
        lane_steps = len(fragment.reward)
        self._items.append(
            step=step + cuts.lane * lane_steps + cuts.first,
            burn_in=cuts.burn_in,
            length=cuts.length,
            fresh=cuts.fresh,
            terminated=fragment.terminated[cuts.last, cuts.lane],
            after=row + observed.after[cuts.last, cuts.lane],
            memory=packed.memory,
        )
        self._held.append(
            _Held(
                entry_id,
                num_transitions=fragment.num_transitions,
                num_items=len(cuts),
                num_rows=len(observed.rows),
                lane_steps=lane_steps,
                num_envs=fragment.num_envs,
            )
        )
        self._num_steps += fragment.num_transitions
        return packed.surprise

    def gather(self, position: NDArray[np.int64]) -> Sequences:
        """As `plan`, at once."""
        return self.plan(position)()

    def plan(self, position: NDArray[np.int64]) -> Callable[[], Sequences]:
        """Choose sequences; all that may change meanwhile is read here, the rest when the result is called.

        Args:
            position: [B] int64 in 0..len-1, 0 the oldest; repetitions are fine.

        Returns:
            What gives the B sequences, in that order. After a termination the row that would bootstrap is not in use.

        Raises:
            IndexError: a position is negative or not below the length.
        """
        position = np.ascontiguousarray(position, np.int64)
        # Seen as unsigned, a negative position is huge: one pass checks both bounds.
        if position.size and int(position.view(np.uint64).max()) >= len(self):
            raise IndexError(
                f"position: {position.min()}..{position.max()} outside 0..{len(self) - 1}, the view's positions"
            )
        if not len(self):
            raise IndexError("position: the view is empty; admit a fragment first")
        slot = self._items.slots(position + self._items.first)
        item = {name: column.take(slot, axis=0) for name, column in self._items.columns.items()}
        first, burn_in, length = item["step"], item["burn_in"], item["length"]  # [B]
        warm, num_rows = self.shape.burn_in, self.shape.burn_in + self.shape.length + 1

        place = np.arange(num_rows)[:, None]
        in_use = burn_in + length - item["terminated"]  # [B] the last row in use, counted from the first
        offset = np.where(
            place < warm,
            np.minimum(place, np.maximum(burn_in - 1, 0)),
            np.minimum(place - warm + burn_in, in_use),
        )  # [U+L+1, B]
        is_after = offset == burn_in + length  # the row behind the last step, which is no step itself
        step = self._steps.slots(first + offset - is_after)
        row = np.where(is_after, item["after"], self._steps.columns["row"].take(step))
        is_start = item["fresh"] & (offset == 0)
        before = self._steps.slots(first + offset - ~is_start)
        previous_action = np.where(is_start, -1, self._steps.columns["action"].take(before))
        previous_reward = np.where(is_start, np.float32(0), self._steps.columns["reward"].take(before))

        place = np.arange(self.shape.length)[:, None]
        step = self._steps.slots(first + burn_in + np.minimum(place, length - 1))  # [L, B]
        action = self._steps.columns["action"].take(step) * (place < length)
        reward = self._steps.columns["reward"].take(step)
        observe = self._rows.plan(row)

        def read() -> Sequences:
            return_, discount, bootstrap, valid = targets(
                reward, length, item["terminated"], gamma=self._gamma, n=self._n_step
            )
            return Sequences(
                observation=observe(),
                previous_action=previous_action,
                previous_reward=previous_reward,
                recurrent_state=item["memory"].astype(np.float32),
                burn_in=burn_in,
                action=action,
                n_step_return=return_,
                bootstrap_discount=discount,
                bootstrap=bootstrap,
                valid=valid,
            )

        return read

    def check_valid(self) -> None:
        """Check every invariant of the rings; for tests, after each mutation. Takes time in O(len).

        Raises:
            AssertionError: naming the invariant that does not hold.
        """
        self._rows.check_valid()
        held = self._held
        assert self._num_steps == sum(one.num_transitions for one in held), "transitions are the fragments'"
        assert self._num_steps <= self.capacity, "no more transitions than the capacity"
        assert len(self._items) == sum(one.num_items for one in held), "sequences are the fragments'"
        assert len(self._steps) == sum(one.num_steps for one in held), "steps are the fragments'"
        assert len(self._rows) == sum(one.num_rows for one in held), "rows are the fragments'"
        if not held:
            return
        items = {
            name: column[self._items.slots(self._items.first + np.arange(len(self)))]
            for name, column in self._items.columns.items()
        }
        steps = self._steps.first + np.arange(len(self._steps))
        rows = self._steps.columns["row"][self._steps.slots(steps)]
        first_row = int(rows.min())
        step, item, row = self._steps.first, 0, first_row
        for one in held:
            mine = slice(item, item + one.num_items)
            begin = items["step"][mine] - step
            lane = begin // one.lane_steps
            end = begin + items["burn_in"][mine] + items["length"][mine]
            assert np.all((lane >= 0) & (lane < one.num_envs)), "sequences lie in their fragment"
            assert np.all(end <= (lane + 1) * one.lane_steps), "and each in its lane"
            own = rows[step - self._steps.first :][: one.num_steps]
            assert np.all((row <= own) & (own < row + one.num_rows)), "steps have rows of their fragment"
            assert np.array_equal(np.unique(own), np.sort(own)), "each its own"
            after = items["after"][mine]
            assert np.all((row <= after) & (after < row + one.num_rows)), "so have sequences"
            step, item, row = step + one.num_steps, item + one.num_items, row + one.num_rows
        assert np.all((items["burn_in"] >= 0) & (items["burn_in"] <= self.shape.burn_in)), "0..U of burn-in"
        assert np.all((items["length"] >= 1) & (items["length"] <= self.shape.length)), "1..L training steps"
        assert not items["memory"][items["fresh"]].any(), "episodes begin with nothing to remember"

    def _evict(self) -> None:
        """Drop the oldest fragment."""
        held = self._held.popleft()
        self._items.drop(held.num_items)
        self._steps.drop(held.num_steps)
        self._rows.drop(held.num_rows)
        self._num_steps -= held.num_transitions


def expected_rows(capacity: int, shape: SequenceShape, frame_stack: int) -> int:
    """Room for the observations of `capacity` transitions, of which every fragment repeats its context."""
    steps = -(-_TYPICAL_STEPS // shape.stride) * shape.stride
    return rows_of_fragments(capacity, context=shape.context + frame_stack - 1, steps=steps)
