"""The queue of on-policy algorithms: each fragment once, in order; one that is too stale is dropped, or corrected.

B is the number of transitions per batch; each iteration publishes one version. L is the number of versions by which
play may run ahead: 0 for `sync`, max_staleness for `async`, and at least `forced_lag`. Collectors may append while

    appended < disposed + (1 + L) * B

where `disposed` counts the transitions learned from in publishing the current version or earlier ones, or dropped. As
each iteration learns from at least B, a transition appended under version v is learned from by iteration v + L at the
latest, so it is at most L versions stale. Three things make fragments staler: processes that overshoot the allowance
together, slow processes, and the death of a learner. With `drop` these are dropped, and the step budget grows by as
much. The learner waits for appended transitions only, never for a producer, so no producer's death can stall it.

When enough transitions wait, an iteration takes whole fragments, the oldest first, until it has B transitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.config import OnPolicyConfig
from ddrl.replay.sequences import check_states
from ddrl.replay.storage import Columns, observation_block
from ddrl.store.stream import order
from ddrl.types import EnvSpec, Fragment, Played, Trajectories

if TYPE_CHECKING:
    from ddrl.networks.ranks import Ranks

LEAST_SEQUENCE = 64
"""Steps of a recurrent policy's sequence, unless its episode, or what the batch holds of it, ends before."""


@dataclass(frozen=True)
class _Content:
    """The content at one moment; replaced as a whole, because another thread reads it.

    Attributes:
        queued_steps: transitions that wait.
        learned_steps: transitions of the newest iteration; they count as open until its version is published.
        version: version published when that iteration began.
    """

    queued_steps: int = 0
    learned_steps: int = 0
    version: int = -1


class Fifo:
    """The queue of fragments between reader and learner.

    The training thread calls `admit` and `draw`; another thread may call `step_budget` and `figures`.

    Args:
        options: of the algorithm: gamma, batch_size (B), and recurrent_state_size (H).
        on_policy: the run's.
        spec: of the environment.
        ranks: that learn together; the leader queues what it knows of the others' fragments, too.
    """

    def __init__(
        self, options: Any, on_policy: OnPolicyConfig, spec: EnvSpec, *, ranks: Ranks | None = None
    ) -> None:
        self._ranks, self._spec = ranks, spec
        self._num_ranks = 1 if ranks is None else ranks.size
        self.chosen: Mapping[str, Any] = {}
        """The newest draw, as `draw_chosen` of the other ranks needs it, JSON."""
        self.others: list[float] = []
        self.total = 0.0
        """Not needed here, as `others`: see `Replay`."""
        self._batch_size: int = options.batch_size
        self._gamma, self._state_size = options.gamma, options.recurrent_state_size
        is_follower = ranks is not None and ranks.rank > 0  # which is told
        self._max_staleness, lag = on_policy.max_staleness, on_policy.forced_lag
        self._drops = on_policy.stale == "drop" and not is_follower
        self._needed: int = self._batch_size * (1 + lag)  # transitions that must wait before an iteration
        self._lead = max(lag, 0 if on_policy.collect == "sync" else on_policy.max_staleness)
        self._queue: deque[tuple[bytes, Fragment | Played]] = deque()
        self._content = _Content()
        self.budget_increment = 1
        """Smallest growth of the step budget that is worth publishing."""
        self.num_collectors = 1
        """Collectors with a fragment between the last two draws; the remaining step budget is divided among them."""
        self.first_version = 0
        """Versions below this come from a former learner's weights; with `drop`, their fragments are stale."""
        self._seen: set[int] = set()  # producers since the last draw
        self.num_dropped = 0
        """Fragments dropped because they were too stale."""
        self._staleness: deque[tuple[int, int]] = deque()
        """(versions, transitions) of the fragments learned from since the last figures."""

    def __len__(self) -> int:
        """Return the number of transitions that wait."""
        return self._content.queued_steps

    evicted = b"0-0"
    """Nothing makes room for others."""

    @property
    def oldest_entry_id(self) -> bytes | None:
        """Stream entry of the oldest fragment that waits; None when there is none."""
        return self._queue[0][0] if self._queue else None

    @property
    def num_waiting(self) -> int:
        """Number of fragments that wait."""
        return len(self._queue)

    def has_room(self) -> bool:
        """Return whether too little waits for an iteration; else what follows stays in the stream."""
        return len(self) < self._needed

    def pack(self, fragment: Fragment) -> Fragment:
        """Check a fragment, in any thread, and return it with the columns that are learned from.

        Raises:
            ValueError: it cannot be learned from (see `check_trajectory`).
        """
        check_trajectory(fragment, state_size=self._state_size)
        used = {"behavior_log_prob", "raw_action", *(["memory"] if self._state_size else [])}
        names = fragment.extras.keys() & used
        return replace(fragment, extras={name: fragment.extras[name] for name in names})

    def admit(self, fragment: Fragment | Played, entry_id: bytes, *, version: int) -> bool:
        """Queue a fragment that `pack` has checked; with `drop`, drop it and return False if it is too stale.

        Args:
            fragment: as decoded, or what the leader knows of another rank's.
            entry_id: its id in the stream.
            version: the latest published version.
        """
        self._seen.add(fragment.producer)
        if self._is_stale(fragment, version):
            self.num_dropped += 1
            return False
        self._queue.append((entry_id, fragment))
        self._add_steps(fragment.num_transitions)
        return True

    def drop_waiting(self) -> None:
        """Drop all that waits, as too stale: there is no room in the stream for what it waits for."""
        self.num_dropped += len(self._queue)
        self._queue.clear()
        self._add_steps(-len(self))

    def draw(self, *, num_steps: int, num_updates: int, version: int) -> Trajectories | None:
        """Return the batch of the next iteration, NumPy arrays; None while too little waits.

        Args:
            num_steps, num_updates: not needed here.
            version: the latest published version; the previous iteration made it.
        """
        if len(self) < self._needed:
            return None
        fresh = deque((entry, one) for entry, one in self._queue if not self._is_stale(one, version))
        self.num_dropped += len(self._queue) - len(fresh)
        self._add_steps(sum(one.num_transitions for _, one in fresh) - len(self))
        self._queue = fresh
        if len(self) < self._needed:
            return None
        own: list[Fragment] = []
        sizes, taken = [0] * self._num_ranks, []
        while (num_taken := sum(sizes)) < self._batch_size:
            entry_id, fragment = self._queue.popleft()
            if isinstance(fragment, Fragment):
                own.append(fragment)
                sizes[0] += fragment.num_transitions
            else:
                taken.append(entry_id.decode())
                sizes[fragment.rank] += fragment.num_transitions
            self._staleness.append((version - fragment.policy_version, fragment.num_transitions))
        self.chosen = {"sizes": sizes, "taken": taken, "last": entry_id.decode()}
        self._content = _Content(len(self) - num_taken, num_taken, version)
        return self._trajectories(own)

    def pause(self) -> None:
        """Do nothing: nothing is known of updates here."""

    def draw_chosen(self, chosen: Mapping[str, Any]) -> Trajectories:
        """Return this rank's part of what the leader has drawn, as its `chosen` says; older fragments are dropped."""
        self.chosen, taken = chosen, {entry_id.encode() for entry_id in chosen["taken"]}
        own = [one for entry_id, one in self._queue if entry_id in taken and isinstance(one, Fragment)]
        last = order(chosen["last"].encode())
        self._queue = deque(queued for queued in self._queue if order(queued[0]) > last)
        self._add_steps(sum(one.num_transitions for _, one in self._queue) - len(self))
        return self._trajectories(own)

    def _trajectories(self, fragments: Sequence[Fragment]) -> Trajectories:
        self.num_collectors, self._seen = max(1, len(self._seen)), set()
        if fragments:
            return trajectories(fragments, gamma=self._gamma, frame_stack=self._spec.frame_stack)
        return blank_trajectories(self._spec, state_size=self._state_size)

    def begin(self, batch: Any) -> Any:
        """Begin to learn from what was drawn, when all ranks do; return it."""
        if self._ranks is not None:
            self._ranks.split(self.chosen["sizes"])
        return batch

    def step_budget(self, *, num_steps: int, num_updates: int, version: int) -> int:
        """Return the environment steps below which collectors may append.

        Args:
            num_steps: steps appended up to the newest fragment admitted.
            num_updates: not needed here.
            version: latest published version, or the one being published.
        """
        content = self._content
        open_steps = content.queued_steps + (content.learned_steps if version <= content.version else 0)
        return num_steps - open_steps + (1 + self._lead) * self._batch_size

    def update_priorities(self, batch: Any, td_error: Callable[[], NDArray[np.float32]]) -> None:
        """Do nothing: each fragment is learned from once."""

    def apply_options(self, options: Any) -> None:
        """Do nothing: no live option of an algorithm changes anything here."""

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return nothing: fragments that wait are in the stream."""
        return {}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def figures(self, *, num_steps: int, num_updates: int) -> dict[str, float]:
        """Return figures for a row of metrics; staleness is of the fragments learned from since the last call.

        The training thread may append meanwhile.
        """
        row = {"queued_steps": float(len(self)), "dropped": float(self.num_dropped)}
        learned = [self._staleness.popleft() for _ in range(len(self._staleness))]
        if learned:
            row["staleness"] = sum(age * steps for age, steps in learned) / sum(steps for _, steps in learned)
            row["max_staleness"] = float(max(age for age, _ in learned))
        return row

    def _is_stale(self, fragment: Fragment | Played, version: int) -> bool:
        oldest = max(self.first_version, version - self._max_staleness)
        # One more than the published version may be on its way here; a worker may write any.
        return self._drops and not oldest <= fragment.policy_version <= version + 1

    def _add_steps(self, num_transitions: int) -> None:
        self._content = replace(self._content, queued_steps=len(self) + num_transitions)


def trajectories(fragments: Sequence[Fragment], *, gamma: float, frame_stack: int = 1) -> Trajectories:
    """Return all transitions of `fragments` as lanes; consecutive fragments of one producer form a chain.

    Context steps yield no transitions; they only complete frame stacks. Fragments with recurrent states give sequences
    too: parts of episodes that begin with a chain's fragment, and again with one that comes LEAST_SEQUENCE steps later.
    The action is the column `raw_action` where there is one: the action as the policy drew it, before it was scaled and
    clipped for the environment.

    Args:
        fragments: at least one, in the order of the stream, each one having passed `check_trajectory`.
        gamma: discount of one agent step, in [0, 1].
        frame_stack: K observations that a network sees at once.
    """
    chains: dict[tuple[int, int, int], list[list[Fragment]]] = {}
    for fragment in fragments:
        known = chains.setdefault((fragment.producer, fragment.incarnation, fragment.num_envs), [])
        if known and known[-1][-1].seq + 1 == fragment.seq:
            known[-1].append(fragment)
        else:
            known.append([fragment])
    ordered = [chain for known in chains.values() for chain in known]
    lengths = [sum(fragment.num_steps for fragment in chain) for chain in ordered]
    places, num_lanes = _places(lengths, [chain[0].num_envs for chain in ordered])
    columns: Columns = {}  # [T, B, ...]
    observations: list[NDArray[Any]] = []
    sequences: list[Columns] = []
    num_rows = 0
    for chain, (step, lane) in zip(ordered, places, strict=True):
        if "memory" in chain[0].extras:
            sequences.append(_sequences(chain, step * num_lanes + lane, num_lanes))
        for fragment in chain:
            inputs, row, next_row = _stacked(fragment, frame_stack)
            new = slice(fragment.context, None)
            at = step + np.arange(fragment.num_steps)[:, None]  # [T, N]
            part: Columns = {
                "row": num_rows + row,
                "next_row": num_rows + next_row,
                "valid": np.ones(row.shape, np.bool_),
                "action": _drawn(fragment)[new],
                "reward": fragment.reward[new],
                "discount": np.where(fragment.terminated[new], np.float32(0), np.float32(gamma)),
                "continues": ~fragment.ended[new],
                "behavior_log_prob": fragment.extras["behavior_log_prob"][new],
            }
            part["continues"][-1] &= fragment is not chain[-1]  # the end of a chain is a cut: it bootstraps
            for name, values in part.items():
                if name not in columns:
                    columns[name] = np.zeros((max(lengths), num_lanes, *values.shape[2:]), values.dtype)
                columns[name][at, lane] = values
            observations.append(inputs)
            num_rows += len(inputs)
            step = step + fragment.num_steps
    joined = {name: np.concatenate([part[name] for part in sequences]) for name in (sequences or [{}])[0]}
    return Trajectories(observation=np.concatenate(observations), **columns, **joined)


def blank_trajectories(spec: EnvSpec, *, state_size: int = 0) -> Trajectories:
    """Return one transition that stands for none: of a rank to which an iteration brings nothing, for it takes part."""
    seen = np.ones((1, *spec.input_shape), spec.observation_dtype)  # ones: as a mask it allows all
    row, zero, no = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.bool_)
    kind: Any = np.float32 if spec.action_kind == "continuous" else np.int64
    action = np.zeros((1, 1, *spec.action_shape), kind)
    columns: Columns = {"row": row, "next_row": row, "valid": ~no, "action": action, "reward": zero}
    columns |= {"discount": zero, "continues": no, "behavior_log_prob": zero}
    if state_size:
        columns |= {"place": row[0], "length": 1 + row[0]}
        columns["recurrent_state"] = np.zeros((1, state_size), np.float32)
    return Trajectories(observation=seen, **columns)


def _sequences(chain: Sequence[Fragment], start: NDArray[np.int64], num_lanes: int) -> Columns:
    """Return a chain's sequences as `Trajectories` holds them.

    Args:
        chain: consecutive fragments of one producer.
        start: [N] t * B + b of each environment's first transition.
        num_lanes: B.
    """
    is_first = np.concatenate([fragment.ended[fragment.context :] for fragment in chain])  # [T, N]
    is_first = np.concatenate([np.ones_like(is_first[:1]), is_first[:-1]])
    states: dict[int, NDArray[np.float16]] = {}  # by the step before which they were sent
    step = begun = 0
    for fragment in chain:
        if not step or step - begun >= LEAST_SEQUENCE:
            is_first[step], states[step], begun = True, fragment.extras["memory"], step
        step += fragment.num_steps
    starts = np.flatnonzero(is_first.T)  # lane after lane
    lane, first = np.divmod(starts, step)
    state = np.zeros((len(starts), chain[0].extras["memory"].shape[1]), np.float32)
    for at, memory in states.items():
        state[first == at] = memory
    place = (start + np.arange(step)[:, None] * num_lanes).T.reshape(-1)  # lane after lane
    return {"place": place, "length": np.diff(starts, append=len(place)), "recurrent_state": state}


def first_steps(fragment: Fragment) -> NDArray[np.int32]:
    """Return [N, 2] (step, environment) of a fragment's first transitions, before which recurrent states are sent."""
    lane = np.arange(fragment.num_envs)
    return np.stack([np.full_like(lane, fragment.context), lane], axis=1).astype(np.int32)


def _places(lengths: Sequence[int], num_envs: Sequence[int]) -> tuple[list[NDArray[np.int64]], int]:
    """Return where chains begin, [2, N] of each: its environments' steps and lanes; and the number of lanes, B.

    An environment goes below the one before it where there is room: T * B is at most twice the transitions, and T more.
    """
    longest, places = max(lengths), []
    step, lane = longest, -1  # the next free one
    for length, num in zip(lengths, num_envs, strict=True):
        of_chain = []
        for _ in range(num):
            step, lane = (step, lane) if step + length <= longest else (0, lane + 1)
            of_chain.append((step, lane))
            step += length
        places.append(np.array(of_chain, np.int64).T)
    return places, lane + 1


def check_trajectory(fragment: Fragment, *, state_size: int = 0) -> None:
    """Refuse a fragment that cannot be learned from on-policy, with recurrent states of H = `state_size`, or none.

    Raises:
        ValueError: it has no log probabilities of its actions, or columns of another shape.
    """
    log_prob = fragment.extras.get("behavior_log_prob")
    if log_prob is None or log_prob.shape != fragment.reward.shape or log_prob.dtype != np.float32:
        raise ValueError(
            "fragment: no column behavior_log_prob, float32 [T, N]; its worker plays another algorithm"
        )
    drawn, action = _drawn(fragment), fragment.action
    if (drawn.shape, drawn.dtype) != (action.shape, action.dtype):
        raise ValueError(
            "fragment: raw_action differs in shape or dtype from action; its worker plays another algorithm"
        )
    if state_size:
        check_states(fragment, first_steps(fragment), state_size)


def _drawn(fragment: Fragment) -> NDArray[Any]:
    """Return the actions as the policy drew them, [C+T, N, *A]."""
    return fragment.extras.get("raw_action", fragment.action)


def _stacked(
    fragment: Fragment, frame_stack: int
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Return network inputs [R, *I], and for each step the row [T, N] of its observation and of its true next one."""
    block = observation_block(fragment, frame_stack, context=frame_stack - 1)
    if frame_stack == 1:
        return block.observation, block.row[:-1], block.next_row
    row, next_row = block.row[-1 - fragment.num_steps :], block.next_row[-fragment.num_steps :]
    # Keep only the rows that are used, and number them anew.
    used = np.zeros(len(block.observation), np.bool_)
    used[row] = used[next_row] = True
    number = np.cumsum(used) - 1
    return block.stacks(np.flatnonzero(used), frame_stack), number[row[:-1]], number[next_row]
