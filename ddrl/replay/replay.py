"""The replay of off-policy algorithms: the newest items of the stream, drawn at random and many times.

Items are transitions or sequences. Fragments enter and leave whole; each of their observations is stored once.

Batches are drawn by their number, which is that of the update that learns from them. Where gathering is slow, threads
gather the next ones while the learner learns; their items were chosen a few updates before they are used.

In lockstep nothing is chosen before everything that it may be chosen from is complete, and no priority comes late:
between two rounds of updates there is no state but the items, their priorities and the number of the next update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.prioritized import Priorities, uniform
from ddrl.replay.rate_limiter import RateLimiter
from ddrl.replay.sequences import SequenceItems
from ddrl.replay.storage import Columns, CompressedRows, Cut, DenseRows, PackedRows, Ring, Rows
from ddrl.replay.transitions import TransitionItems
from ddrl.store.stream import order
from ddrl.types import Batch, Fragment, Played, Sequences

if TYPE_CHECKING:
    import torch

    from ddrl.networks.ranks import Ranks

MOST_CONTEXT = 4  # times the expected observations that are held at most
COUNT_DRAWS = 500  # between two counts of the collectors
MOST_FIGURES = 10_000  # fragments whose figures are kept; of a follower nobody reads them
_MAX_TD_ERROR = 1e37  # larger ones count as not reported


@dataclass(frozen=True)
class Packed:
    """A fragment with all of its admission done that needs nothing of what is held."""

    fragment: Fragment
    cut: Cut
    rows: PackedRows

    @property
    def num_bytes(self) -> int:
        """Bytes, those of the fragment included; episodes of one step make many items."""
        columns = (*self.cut.items.values(), *self.cut.steps.values())
        chunks = sum(map(len, self.rows.chunks))
        return self.fragment.num_bytes + sum(column.nbytes for column in columns) + chunks


@dataclass(frozen=True)
class _Planned:
    """A batch that was chosen.

    Attributes:
        number: of the batch.
        sizes: of all ranks' parts.
        gather: returns this rank's part.
        weights: columns of it that come with the choice.
        least: see `Priorities`.
    """

    number: int
    sizes: Sequence[int]
    gather: Callable[[], Any]
    weights: Columns
    least: float


@dataclass(frozen=True)
class _Entry:
    """A fragment held: what leaves when it is evicted."""

    entry_id: bytes
    num_transitions: int
    num_items: int
    num_steps: int
    num_rows: int


class Replay:
    """The items of the newest fragments, of at most `capacity` transitions together, and as many items as they have.

    Fewer are held where fragments are so short that their context takes most of the memory: see MOST_CONTEXT.

    Items are numbered 0, 1, 2, ... as they are admitted. T, N and context may differ between fragments; shapes and
    dtypes of observation and action may not. Used by one thread, but for `pack`, `step_budget`, and what `plan`
    returns.

    Args:
        items: how fragments are cut into items, and items gathered as batches.
        rate_limiter: paces learner and collectors.
        capacity: most transitions held, not counting context.
        batch_size: B, items of a draw.
        seed: of the draws.
        compressed: hold the observations compressed.
        device: hold them there, as tensors; None: in the host's memory.
        most_bytes: of compressed observations.
        priorities: of the items; None: all are drawn alike.
        threads: that gather ahead of the learner; 0: it gathers itself.
        lockstep: draws depend on the order of fragments and updates alone, not on when they come.
        budget_increment: steps by which the step budget grows before it is published.
        ranks: that learn together; each holds the items of its own fragments, and draws its part of each batch.

    Attributes:
        others: of the other ranks, the sums of their priorities, or numbers of their items.
    """

    def __init__(
        self,
        items: TransitionItems | SequenceItems,
        rate_limiter: RateLimiter,
        *,
        capacity: int,
        batch_size: int,
        seed: int,
        compressed: bool = False,
        device: torch.device | None = None,
        most_bytes: float = math.inf,
        priorities: Priorities | None = None,
        threads: int = 0,
        lockstep: bool = False,
        budget_increment: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        self._rank, self._num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._ranks = ranks
        self.others = [0.0] * (self._num_ranks - 1)
        self.chosen: Mapping[str, Any] = {}
        """The newest draw, as `draw_chosen` of the other ranks needs it, JSON."""
        self._kind = items
        self._rate_limiter = rate_limiter
        self.capacity = capacity
        self._batch_size, self._seed = batch_size, (seed + (self._rank << 48)) % 2**64
        self.priorities = priorities
        self._lockstep = lockstep
        self.budget_increment = budget_increment
        num_rows, num_items, num_steps = items.room(capacity)
        self._most_items = max(capacity, num_items)
        self._most_rows = (1 if device else MOST_CONTEXT) * num_rows  # on a device the ring never grows
        self._most_bytes = most_bytes if compressed else math.inf
        shape = {"frame_stack": items.frame_stack, "expected_rows": num_rows}
        self.rows: Rows
        if device is not None:
            from ddrl.replay.device_rows import DeviceRows  # here: others need no torch

            self.rows = DeviceRows(device, **shape)
        else:
            self.rows = CompressedRows(**shape) if compressed else DenseRows(**shape)
        self._items, self._steps = Ring(num_items), Ring(num_steps)
        self._entries: deque[_Entry] = deque()
        self.evicted = b"0-0"
        """The newest entry that has made room for others."""
        self._num_transitions = 0
        self._pool = ThreadPoolExecutor(threads, "gather") if threads else None
        self._depth = threads + 1 if threads else 0
        self._ahead: deque[_Planned] = deque()
        self._late: deque[tuple[NDArray[np.int64], Callable[[], NDArray[np.float32]]]] = deque()
        """Numbers of items, and their new TD errors."""
        self.num_collectors = 1
        """Collectors that sent a fragment lately; what is left of the step budget is divided among them."""
        self._seen: set[int] = set()  # producers since the last count of them
        self._seen_before: set[int] = set()  # and between the last two counts
        self._num_draws = 0
        self._admitted: deque[tuple[int, int, int]] = deque(maxlen=MOST_FIGURES)
        """(versions of staleness, items, rewards in their sums) of the fragments admitted since the last figures."""
        self.num_dropped = self.num_waiting = 0  # fragments; none, whatever version played them
        self.first_version = 0

    def __len__(self) -> int:
        """Return the number of transitions held, which the capacity limits."""
        return self._num_transitions

    @property
    def num_items(self) -> int:
        """Number of items held."""
        return len(self._items)

    @property
    def first_item(self) -> int:
        """Number of the oldest item held."""
        return self._items.first

    @property
    def oldest_entry_id(self) -> bytes | None:
        """Stream entry of the oldest fragment held; None when empty."""
        return self._entries[0].entry_id if self._entries else None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory as allocated; 0 before the first fragment. What was never written to costs none yet."""
        return self.rows.num_bytes + self._items.num_bytes + self._steps.num_bytes

    # --- admission --------------------------------------------------------------------------------------------------

    def pack(self, fragment: Fragment) -> Packed:
        """Do the costly part of admission, in any thread: it needs nothing of what is held.

        Raises:
            ValueError: the fragment is larger than the capacity, or cannot be cut into items.
        """
        size = fragment.num_transitions
        cut = self._kind.cut(fragment) if size <= self.capacity else None
        if cut is None or len(cut) > self._most_items:
            raise ValueError(
                f"fragment: {max(size, len(cut or ()))} transitions exceed the capacity of {self.capacity}; "
                "raise replay.capacity or shorten the fragments"
            )
        return Packed(fragment, cut, self.rows.pack(cut.block))

    def has_room(self) -> bool:
        """Return True: the oldest items make room."""
        return True

    def admit(self, packed: Packed | Played, entry_id: bytes, *, version: int) -> bool:
        """Append a fragment's items, evicting the oldest fragments whole to make room; return True.

        Args:
            packed: the fragment, which is copied, or what is known of one that another rank holds.
            entry_id: its id in the stream.
            version: latest published.
        """
        if isinstance(packed, Played):
            self._seen.add(packed.producer)
            return True
        fragment, cut = packed.fragment, packed.cut
        if not len(cut):  # where there is an item to draw, there stays one
            return True
        num_rows = len(cut.block.observation)
        while self._entries and (
            self._num_transitions + fragment.num_transitions > self.capacity
            or self.num_items + len(cut) > self._most_items  # a sum may be whole one fragment later
            or len(self.rows.ring) + num_rows > self._most_rows
            or self.rows.num_bytes > self._most_bytes
        ):
            self._evict()
        first = {"row": self.rows.append(packed.rows)}
        first["next_row"] = first["row"]
        if cut.steps:
            first["step"] = self._steps.append(**_counted_from(first, cut.steps))
        self._items.append(**_counted_from(first, cut.items))
        entry = _Entry(
            entry_id,
            num_transitions=fragment.num_transitions,
            num_items=len(cut),
            num_steps=len(cut.steps.get("row", ())),
            num_rows=num_rows,
        )
        self._entries.append(entry)
        self._num_transitions += entry.num_transitions
        if self.priorities is not None:
            # Reported values may be finite and their difference not.
            is_usable = cut.td_error is not None and bool((cut.td_error < _MAX_TD_ERROR).all())
            self.priorities.append(entry.num_items, cut.td_error if is_usable else None)
            self.priorities.drop(self.first_item)
        self._admitted.append((version - fragment.policy_version, len(cut), cut.num_rewards))
        self._seen.add(fragment.producer)
        return True

    def drop_waiting(self) -> None:
        """Do nothing: no fragment waits for others."""

    def _evict(self) -> None:
        """Drop the oldest fragment."""
        entry = self._entries.popleft()
        self.evicted = entry.entry_id
        self._items.drop(entry.num_items)
        self._steps.drop(entry.num_steps)
        self.rows.drop(entry.num_rows)
        self._num_transitions -= entry.num_transitions

    # --- draws ------------------------------------------------------------------------------------------------------

    def draw(self, *, num_steps: int, num_updates: int, version: int) -> Batch | Sequences | None:
        """Return the next batch of NumPy arrays, or None while the learner must wait.

        Nobody else writes to its arrays as long as they are referred to; large ones are used again afterwards.

        Args:
            num_steps: environment steps appended.
            num_updates: updates finished.
            version: latest published; not needed here.
        """
        if not self._rate_limiter.can_sample(num_steps, num_updates) or not self._can_draw():
            self.pause()
            return None
        self._begin_at(num_updates)
        sizes: list[list[int]] = []  # of each batch
        while len(self._ahead) <= self._depth:
            number = num_updates + len(self._ahead)
            if self._lockstep and not self._rate_limiter.can_sample(num_steps, number):
                break
            sizes.append(self._sizes(number))
            self._choose(number, sizes[-1])
        self.chosen = {"number": num_updates, "sizes": sizes}
        return self._next()

    def draw_chosen(self, chosen: Mapping[str, Any]) -> Batch | Sequences:
        """Return this rank's part of the batch that the leader has drawn, as its `chosen` says."""
        self._begin_at(chosen["number"])
        for sizes in chosen["sizes"]:
            self._choose(chosen["number"] + len(self._ahead), sizes)
        return self._next()

    def pause(self) -> None:
        """In lockstep, apply the errors of all updates: nothing is drawn until more has come."""
        if self._lockstep:
            self._apply_priorities(keep=0)

    def _begin_at(self, number: int) -> None:
        """Forget the batches chosen ahead unless the first one has this number."""
        if self._ahead and self._ahead[0].number != number:
            self._ahead.clear()

    def _sizes(self, number: int) -> list[int]:
        """Return how many items of a batch each rank draws: on average, as its priorities are of all priorities."""
        if self._num_ranks == 1:
            return [self._batch_size]
        ends = np.cumsum([self.total, *self.others])
        start = np.random.default_rng((self._seed, number)).random()
        counts = np.floor(start + ends * (self._batch_size / ends[-1])).astype(int)
        counts[-1] = self._batch_size  # whatever the rounding
        return [int(count) for count in np.diff(counts, prepend=0)]

    def _choose(self, number: int, sizes: Sequence[int]) -> None:
        """Choose the items of a batch, and begin to gather them where threads do."""
        self._apply_priorities(keep=1)
        weights: Columns = {}
        least, num = 1.0, max(1, sizes[self._rank])  # one that counts for nothing, where there should be none
        if self.priorities is None:
            position = uniform(self.num_items, num, seed=self._seed, draw=number)
        else:
            position, item, weight = self.priorities.draw(num, seed=self._seed, draw=number)
            weights = {"number": item, "weight": weight}
            counts = sizes[self._rank] or self.priorities.options.importance_maximum == "replay"
            least = self.priorities.least if counts else np.inf
        gather: Callable[[], Any] = self.plan(position)
        if self._pool is not None:
            gather = self._pool.submit(gather).result
        self._ahead.append(_Planned(number, sizes, gather, weights, least))

    def _next(self) -> Batch | Sequences:
        """Return the batch that was chosen first."""
        self._count_collectors()
        self._drawn = self._ahead.popleft()
        return cast("Batch | Sequences", replace(self._drawn.gather(), **self._drawn.weights))

    def begin(self, batch: Any) -> Any:
        """Begin to learn from what was drawn, when all ranks do; return it with weights that have one scale."""
        if self._ranks is None:
            return batch
        drawn = self._drawn
        self._ranks.split(drawn.sizes)
        if self.priorities is None:
            return batch
        least = self._ranks.least(drawn.least)
        scale = np.float32((least / drawn.least) ** self.priorities.beta(drawn.number))
        return replace(batch, weight=batch.weight * scale)

    def _can_draw(self) -> bool:
        """Return whether every rank holds an item."""
        return self.num_items > 0 and all(self.others)

    @property
    def total(self) -> float:
        """Sum of the priorities, or number of items, of which this rank's part of a batch is drawn."""
        return float(self.num_items) if self.priorities is None else self.priorities.total

    def plan(self, position: NDArray[np.int64]) -> Callable[[], Batch | Sequences]:
        """Look up the items at `position`; the result gathers them, in any thread and whatever is admitted meanwhile.

        Args:
            position: [B] int64 in 0..num_items-1, 0 the oldest; not checked; repetitions are fine.

        Returns:
            A function that returns the B items in that order, in arrays that nobody else writes to as long as they are
            referred to.
        """
        slot = self._items.slots(position + self._items.first)
        items = {name: column.take(slot, axis=0) for name, column in self._items.columns.items()}
        return self._kind.plan(items, self._steps, self.rows)

    def _count_collectors(self) -> None:
        """Count the collectors now and then; one that falls silent is forgotten after two counts."""
        self._num_draws += 1
        if self._num_draws % COUNT_DRAWS == 0:
            self.num_collectors = max(1, len(self._seen | self._seen_before))
            self._seen, self._seen_before = set(), self._seen

    # --- priorities and checkpoints ---------------------------------------------------------------------------------

    def update_priorities(self, batch: Any, td_error: Callable[[], NDArray[np.float32]]) -> None:
        """Give the items of a batch new TD errors [B]; those evicted meanwhile are left out.

        `td_error` is called only when the next batch has been drawn, so that drawing never waits for a GPU.
        """
        self._late.append((batch.number, td_error))

    def _apply_priorities(self, *, keep: int) -> None:
        """Apply the new TD errors but for the newest `keep` batches."""
        while self.priorities is not None and len(self._late) > keep:
            number, td_error = self._late.popleft()
            self.priorities.update(number, td_error())

    def apply_options(self, options: Any) -> None:
        """Apply changed options of the algorithm from the next draw on."""
        if self.priorities is not None:
            self.priorities.options = options
            self._ahead.clear()  # batches gathered ahead have weights of before

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return what a checkpoint needs beside the stream: the priorities of the items held.

        Beside those of `Priorities.state` there are `entry` [E, 2], the ids of the fragments held, uint64 viewed as
        int64, and `items` [E] int64, how many items each has.
        """
        self._apply_priorities(keep=0)
        if self.priorities is None:
            return {}
        ids = np.array([order(entry.entry_id) for entry in self._entries], np.uint64).reshape(-1, 2)
        items = np.array([entry.num_items for entry in self._entries], np.int64)
        return {**self.priorities.state(), "entry": ids.view(np.int64), "items": items}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore the priorities of the items held, which are those of the stream up to the checkpoint's cursor."""
        if self.priorities is None or not state:
            return
        if "entry" in state:  # not in checkpoints of earlier versions
            state = {**state, "priority": self._held_priorities(state)}
        if "next" in state and self._ranks is None:  # nor is this
            first = max(int(state["next"]) - self.num_items, 0)
            self._items.first = first
            self.priorities.renumber(first)
        self.priorities.load_state(state)

    def _held_priorities(self, state: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return the priorities of the items held, from those of a state, which other ranks may have written.

        Items that it lacks have the largest one.
        """
        *values, _ = np.split(state["priority"], np.cumsum(state["items"]))  # after the last one nothing
        parts = dict(zip(map(tuple, state["entry"].view(np.uint64).tolist()), values, strict=True))
        largest = state["priority"].max(initial=1.0)
        held = []
        for entry in self._entries:
            part = parts.get(order(entry.entry_id), ())
            new = np.full(entry.num_items, largest, np.float32)
            held.append(part if len(part) == entry.num_items else new)
        return np.concatenate([*held, np.empty(0, np.float32)])

    def close(self) -> None:
        """Stop the threads; later draws do without."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool, self._depth = None, 0

    # --- pace and figures -------------------------------------------------------------------------------------------

    def step_budget(self, *, num_steps: int, num_updates: int, version: int) -> int:
        """Return the environment steps below which collectors may append; more until there is an item to learn from."""
        budget = self._rate_limiter.step_budget(num_updates)
        return budget if self._can_draw() else max(budget, num_steps + self.budget_increment)

    def figures(self, *, num_steps: int, num_updates: int) -> dict[str, float]:
        """Return figures for a row of metrics; staleness is of the fragments admitted since the last call.

        The training thread may append meanwhile.
        """
        row = {
            "samples_per_insert": self._rate_limiter.samples_per_insert(num_steps, num_updates),
            "replay_size": float(len(self)),
            "replay_bytes": float(self.num_bytes),
        }
        admitted = [self._admitted.popleft() for _ in range(len(self._admitted))]
        if admitted:
            staleness, num_items, num_rewards = map(sum, zip(*admitted, strict=True))
            if num_rewards:
                row["n_step_mean"] = num_rewards / num_items
            row["staleness"] = staleness / len(admitted)
        return row

    def check_valid(self) -> None:
        """Assert every invariant; for tests, after each mutation. Takes time in O(len)."""
        self.rows.check_valid()
        ring, entries = self.rows.ring, self._entries
        assert len(self) == sum(entry.num_transitions for entry in entries) <= self.capacity, "transitions"
        assert self.num_items == sum(entry.num_items for entry in entries), "items are the fragments'"
        assert len(self._steps) == sum(entry.num_steps for entry in entries), "steps are the fragments'"
        assert len(ring) == sum(entry.num_rows for entry in entries), "rows are the fragments'"
        assert entries or not self.num_bytes, "only another fragment evicts"
        row, item, step = ring.first, self._items.first, self._steps.first
        for entry in entries:
            items, steps = self._items.rows(item, entry.num_items), self._steps.rows(step, entry.num_steps)
            self._kind.check_valid(items, steps, rows=range(row, row + entry.num_rows), step=step)
            row, item, step = row + entry.num_rows, item + entry.num_items, step + entry.num_steps
        if self.priorities is not None:
            self.priorities.check_valid()
            assert (self.priorities.first, len(self.priorities)) == (self.first_item, self.num_items)


def _counted_from(first: dict[str, int], columns: Columns) -> Columns:
    """Return columns in which numbers that count from the fragment's first row or step count from the ring's."""
    return {name: column + first[name] if name in first else column for name, column in columns.items()}
