"""Experience as off-policy algorithms use it: kept in a view, drawn at random and many times, paced both ways.

Batches are drawn by their number, which is that of the update that learns from them. Where gathering is slow, threads
gather the next ones while the learner learns; what those hold was chosen a few updates before it is used.

In lockstep nothing is chosen before what it may be chosen from is complete, and no priority comes late: between the
rounds of updates that fragments pay for there are but the items, their priorities and the number of the next update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.prioritized import Priorities
from ddrl.replay.rate_limiter import Pacing
from ddrl.replay.samplers import uniform
from ddrl.replay.sequence_view import Packed as PackedSequences
from ddrl.replay.sequence_view import SequenceView
from ddrl.replay.view import Packed as PackedTransitions
from ddrl.replay.view import TransitionView
from ddrl.types import Batch, Fragment, Sequences

Drawn = Batch | Sequences
_COUNT_DRAWS = 500  # between two counts of the producers
_LARGEST_SURPRISE = 1e37  # whatever is larger counts as not told
Packed = PackedTransitions | PackedSequences
Surprise = tuple[NDArray[np.int64], Callable[[], NDArray[np.float32]]]  # numbers, priorities


class Sampled:
    """A view with its sampler and its pace.

    Args:
        view: holds the items, transitions or sequences.
        pacing: who may go on.
        batch_size: B, items of a draw.
        seed: of the draws.
        grain: steps by which the allowance grows before collectors are told.
        priorities: of the items; None: all are drawn alike.
        threads: that gather ahead of the learner; 0: it gathers itself.
        lockstep: what is drawn depends on the order of fragments and updates alone, not on when they come.
    """

    def __init__(
        self,
        view: TransitionView | SequenceView,
        pacing: Pacing,
        *,
        batch_size: int,
        seed: int,
        grain: int,
        priorities: Priorities | None = None,
        threads: int = 0,
        lockstep: bool = False,
    ) -> None:
        self.view, self._pacing, self._priorities = view, pacing, priorities
        self._batch_size, self._seed = batch_size, seed
        self.grain = grain
        self.players = 1
        """Producers lately heard of, among which what is left of the allowance is divided."""
        self._heard: set[int] = set()  # producers since the last count of them
        self._heard_before: set[int] = set()  # and between the last two counts
        self._num_draws = 0
        self.num_dropped = self.num_waiting = 0
        self.first_version = 0  # what any policy played will do
        self._staleness: list[int] = []  # of the fragments admitted since the last figures
        self._pool = ThreadPoolExecutor(threads, "gather") if threads else None
        self._ahead: deque[tuple[int, Callable[[], Drawn]]] = deque()  # (number, batch), the next one first
        self._depth = threads + 1 if threads else 0
        self._lockstep = lockstep
        self._surprises: deque[Surprise] = deque()

    def __len__(self) -> int:
        """Transitions held."""
        return self.view.num_steps

    @property
    def oldest_entry_id(self) -> bytes | None:
        """Stream entry of the oldest fragment held; None when empty."""
        return self.view.oldest_entry_id

    def prepare(self, fragment: Fragment) -> Packed:
        """The costly part of admission, for any thread: it needs nothing of what is held.

        Raises:
            ValueError: the fragment cannot be used.
        """
        return self.view.pack(fragment)

    def admit(self, fragment: Fragment | Packed, entry_id: bytes, *, version: int) -> None:
        """Take a fragment over.

        Args:
            fragment: as decoded, or as `prepare` made of it.
            entry_id: its id in the stream.
            version: latest published.

        Raises:
            ValueError: it cannot be used.
        """
        packed: Any = self.prepare(fragment) if isinstance(fragment, Fragment) else fragment
        end = self.view.first + len(self.view)
        surprise = self.view.admit(packed, entry_id)
        if self._priorities is not None:
            num_new = self.view.first + len(self.view) - end
            # Values of a stranger may be finite and their difference not; the view has the items already.
            is_usable = surprise is not None and bool((surprise < _LARGEST_SURPRISE).all())
            self._priorities.append(num_new, surprise if is_usable else None)
            self._priorities.drop(self.view.first)
        self._staleness.append(version - packed.fragment.policy_version)
        self._heard.add(packed.fragment.producer)

    def draw(self, *, num_steps: int, num_updates: int, version: int) -> Drawn | None:
        """The next batch of NumPy arrays, or None while the learner must wait.

        Nobody else writes to its arrays as long as they are referred to; large ones are used again afterwards.

        Args:
            num_steps: environment steps appended.
            num_updates: updates finished.
            version: latest published.
        """
        if not self._pacing.can_sample(num_steps, num_updates) or not len(self.view):
            if self._lockstep:
                self._prioritize(keep=0)
            return None
        if self._ahead and self._ahead[0][0] != num_updates:
            self._ahead.clear()
        self._count_players()
        while len(self._ahead) <= self._depth:
            number = num_updates + len(self._ahead)
            if self._lockstep and not self._pacing.can_sample(num_steps, number):
                break
            self._ahead.append((number, self._begin(number)))
        return self._ahead.popleft()[1]()

    def _count_players(self) -> None:
        """Count the producers now and then; who falls silent is forgotten after two counts."""
        self._num_draws += 1
        if self._num_draws % _COUNT_DRAWS == 0:
            self.players = max(1, len(self._heard | self._heard_before))
            self._heard, self._heard_before = set(), self._heard

    def _begin(self, number: int) -> Callable[[], Drawn]:
        """Choose a batch and start to gather it; call the result for the batch."""
        position, further = self._choose(number)
        gather: Callable[[], Any] = self.view.plan(position)
        if self._pool is not None:
            gather = self._pool.submit(gather).result
        return lambda: replace(gather(), **further)

    def _choose(self, number: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Positions [B] in the view, and what else a batch says of them."""
        self._prioritize(keep=1)
        if self._priorities is None:
            return uniform(len(self.view), self._batch_size, seed=self._seed, draw=number), {}
        position, item, weight = self._priorities.draw(self._batch_size, seed=self._seed, draw=number)
        return position, {"number": item, "weight": weight}

    def prioritize(self, batch: Any, priority: Callable[[], NDArray[np.float32]]) -> None:
        """Note how surprising the items of a batch were, [B]; those evicted meanwhile are left out.

        Looked at only when the batch after it has been drawn, so that drawing never waits for a GPU.
        """
        self._surprises.append((batch.number, priority))

    def _prioritize(self, *, keep: int) -> None:
        """Pass on what is noted but for the newest `keep`."""
        while self._priorities is not None and len(self._surprises) > keep:
            number, priority = self._surprises.popleft()
            self._priorities.update(number, priority())

    def adopt(self, options: Any) -> None:
        """Go on with other live options of the algorithm, as of `experience`, from the next draw on."""
        if self._priorities is not None:
            betas = (options.importance_exponent, options.final_importance_exponent)
            self._priorities.anneal(*betas, options.importance_anneal_updates)
            self._ahead.clear()  # what was gathered ahead has weights of before

    def state(self) -> Mapping[str, NDArray[Any]]:
        """What a checkpoint needs beside the stream: the priorities of the items held."""
        self._prioritize(keep=0)
        return {} if self._priorities is None else self._priorities.state()

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Give the items held, rebuilt from the stream up to the checkpoint's cursor, their priorities back."""
        if self._priorities is None or not state:
            return
        if "next" in state:  # not in checkpoints of earlier versions
            first = max(int(state["next"]) - len(self.view), 0)
            self.view.renumber(first)
            self._priorities.renumber(first)
        self._priorities.load_state(state)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def allowance(self, *, num_steps: int, num_updates: int, version: int) -> int:
        """Collectors may append while fewer environment steps than this were appended in all."""
        return self._pacing.allowance(num_updates)

    def figures(self, *, num_steps: int, num_updates: int) -> dict[str, float]:
        """What a row of figures says of it; staleness of the fragments since the last call."""
        staleness, self._staleness = self._staleness, []
        row = {
            "samples_per_insert": self._pacing.samples_per_insert(num_steps, num_updates),
            "replay_size": float(len(self)),
            "replay_bytes": float(self.view.num_bytes),
        }
        return row | ({"staleness": sum(staleness) / len(staleness)} if staleness else {})
