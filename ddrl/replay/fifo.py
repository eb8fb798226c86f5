"""Experience as on-policy algorithms use it: every fragment once, in order, no staler than the bound.

With batches of B transitions, versions counted by iterations and a lead of L versions (0 for `sync`, max_staleness
for `async`), collectors may append while

    appended < disposed + (1 + L) * B

where `disposed` counts what was learned from or dropped by the iterations that led to the published version. A
transition appended under version v is then at most number (v + 1 + L) * B and learned from by iteration v + L at the
latest, so it is L versions stale. Only overshoot (processes play at the same time), slow processes and a learner that
died give staler fragments; these are dropped, and what they took of the allowance is given back. The learner waits for
appended transitions only, never for a producer, so no producer's death can stall it.

When B transitions wait, an iteration takes fragments whole, from the oldest on, until it has B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.rate_limiter import check_staleness
from ddrl.replay.trajectories import check_trajectory, trajectories
from ddrl.types import Fragment, Trajectories


@dataclass(frozen=True)
class _Account:
    """What is held, as of one moment: swapped whole, for another thread reads it."""

    queued_steps: int = 0
    learned_steps: int = 0  # of the iteration that began last; disposed of once its version is published
    version: int = -1  # that it began with


class Fifo:
    """The queue of fragments between feed and learner.

    The training thread calls `admit` and `draw`; `allowance` may be called by another one.

    Args:
        batch_size: B, transitions of an iteration.
        gamma: discount of one agent step, in [0, 1].
        collect: `sync` or `async`.
        max_staleness: versions.
        stale: what happens to staler fragments.
        forced_lag: versions by which learning is held back, for studies.
        frame_stack: K, observations that the networks see at once.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        gamma: float,
        collect: Literal["sync", "async"],
        max_staleness: int,
        stale: Literal["drop", "correct"] = "drop",
        forced_lag: int = 0,
        frame_stack: int = 1,
    ) -> None:
        check_staleness(collect=collect, max_staleness=max_staleness, forced_lag=forced_lag)
        self._batch_size, self._gamma, self._frame_stack = batch_size, gamma, frame_stack
        self._max_staleness, self._drops = max_staleness, stale == "drop"
        self._lag = forced_lag
        self._lead = max(forced_lag, 0 if collect == "sync" else max_staleness)
        self._queue: deque[tuple[bytes, Fragment]] = deque()
        self._account = _Account()
        self.grain = 1  # steps by which the allowance grows before collectors are told
        self.players = 1
        """Producers lately heard of, among which what is left of the allowance is divided."""
        self.first_version = 0
        """What older versions played comes from another learner's weights, not from earlier ones of these."""
        self._heard: set[int] = set()  # producers since the last draw
        self.num_dropped = 0
        """Fragments dropped because they were too stale."""
        self._staleness: list[tuple[int, int]] = []
        """(versions, transitions) of what was learned from since the last figures."""

    def __len__(self) -> int:
        """Transitions that wait."""
        return self._account.queued_steps

    @property
    def oldest_entry_id(self) -> bytes | None:
        """Stream entry of the oldest fragment that waits; None when there is none."""
        return self._queue[0][0] if self._queue else None

    @property
    def num_waiting(self) -> int:
        """Fragments that wait."""
        return len(self._queue)

    def prepare(self, fragment: Fragment) -> Fragment:
        """What `admit` takes: there is nothing to prepare."""
        return fragment

    def admit(self, fragment: Fragment, entry_id: bytes, *, version: int) -> None:
        """Queue a fragment, or drop it if it is too stale already.

        Args:
            fragment: as decoded.
            entry_id: its id in the stream.
            version: latest published.

        Raises:
            ValueError: it cannot be learned from.
        """
        check_trajectory(fragment)
        self._heard.add(fragment.producer)
        if self._is_stale(fragment, version):
            self.num_dropped += 1
            return
        self._queue.append((entry_id, fragment))
        self._count(fragment.num_transitions)

    def draw(self, *, num_steps: int, num_updates: int, version: int) -> Trajectories | None:
        """The batch of the next iteration, NumPy arrays; None while too little waits.

        Args:
            num_steps, num_updates: not needed here.
            version: published, and made by the iteration before.
        """
        if len(self) < self._batch_size * (1 + self._lag):
            return None
        if any(self._is_stale(fragment, version) for _, fragment in self._queue):
            fresh = deque((entry, one) for entry, one in self._queue if not self._is_stale(one, version))
            self.num_dropped += len(self._queue) - len(fresh)
            self._count(sum(one.num_transitions for _, one in fresh) - len(self))
            self._queue = fresh
            if len(self) < self._batch_size * (1 + self._lag):
                return None
        taken: list[Fragment] = []
        num_taken = 0
        while num_taken < self._batch_size:
            fragment = self._queue.popleft()[1]
            taken.append(fragment)
            num_taken += fragment.num_transitions
            self._staleness.append((version - fragment.policy_version, fragment.num_transitions))
        self._account = _Account(len(self) - num_taken, num_taken, version)
        self.players, self._heard = max(1, len(self._heard)), set()
        return trajectories(taken, gamma=self._gamma, frame_stack=self._frame_stack)

    def allowance(self, *, num_steps: int, num_updates: int, version: int) -> int:
        """Collectors may append while fewer environment steps than this were appended in all.

        Args:
            num_steps: appended, up to the last fragment admitted.
            num_updates: not needed here.
            version: published, or about to be in the same call.
        """
        account = self._account
        open_steps = account.queued_steps + (account.learned_steps if version <= account.version else 0)
        return num_steps - open_steps + (1 + self._lead) * self._batch_size

    def prioritize(self, batch: Any, priority: Callable[[], NDArray[np.float32]]) -> None:
        """Each fragment is learned from once, whatever it was like."""

    def adopt(self, options: Any) -> None:
        """No live option of an algorithm changes anything here."""

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Nothing of a checkpoint: what waits is in the stream."""
        return {}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Nothing to continue from."""

    def close(self) -> None:
        """Nothing to end."""

    def figures(self, *, num_steps: int, num_updates: int) -> dict[str, float]:
        """What a row of figures says of it; staleness of what was learned from since the last call."""
        row = {"queued_steps": float(len(self)), "dropped": float(self.num_dropped)}
        learned, self._staleness = self._staleness, []
        if learned:
            row["staleness"] = sum(age * steps for age, steps in learned) / sum(steps for _, steps in learned)
            row["max_staleness"] = float(max(age for age, _ in learned))
        return row

    def _is_stale(self, fragment: Fragment, version: int) -> bool:
        oldest = max(self.first_version, version - self._max_staleness)
        return self._drops and fragment.policy_version < oldest

    def _count(self, num_transitions: int) -> None:
        account = self._account
        self._account = _Account(
            account.queued_steps + num_transitions, account.learned_steps, account.version
        )
