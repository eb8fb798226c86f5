"""Sequences as the items of a replay, for recurrent learning: cut from fragments, and gathered as batches.

Worker and learner cut the same columns: the worker to know which recurrent states to send, the learner to train. So a
cut depends on nothing but the columns, and a fragment can be read by itself: its C context steps hold what its first
sequences need of the past.

The rules. An episode's part is what of it the fragment knows. Training slices start every `stride` steps, and the
first one of a part `overlap` steps before the fragment's new steps, or with the part where that is later; the last one
is the first to reach the part's end, and may be shorter than `length`. Then

- every new step is in at least one training slice, and no sequence lies in the context alone;
- no sequence crosses an episode's end;
- neighboring training slices share `overlap` steps, also across the border of two fragments;
- burn-in has all its U steps unless the episode has fewer.

A step is in at most ceil(length / stride) sequences of its own fragment, and in at most ceil(overlap / stride) of each
later one whose new steps begin within the `overlap` steps behind it: few, unless fragments are short.

Source: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning" (R2D2), section 2.3
(overlapping sequences within episodes), section 3 (stored state and burn-in).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.storage import Columns, Cut, Ring, Rows, observation_block
from ddrl.replay.transitions import check_rewards, expected_rows, reported_values
from ddrl.returns import n_step_return, rescale, unrescale
from ddrl.types import Fragment, Sequences, SequenceShape

_AT_ONCE = 4_096  # sequences; episodes of one step make as many of them as there are steps
_TYPICAL_STEPS = 32  # T, unless the stride is larger; fragments take about rollout.fragment_s


@dataclass(frozen=True)
class Cuts:
    """S sequences of one fragment, environment by environment, in order of time within one.

    Attributes:
        lane: [S] int64 environment.
        start: [S] int64 step, counted with the context, of the first training step.
        length: [S] int64 training steps, 1..L.
        burn_in: [S] int64 steps before them that warm the recurrent state up, 0..U.
        fresh: [S] bool, the first step in use is its episode's first: the recurrent state before it is zero.
    """

    lane: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    burn_in: NDArray[np.int64]
    fresh: NDArray[np.bool_]

    def __len__(self) -> int:
        """Return S."""
        return len(self.start)

    @property
    def first(self) -> NDArray[np.int64]:
        """[S] the first step in use, burn-in included."""
        return self.start - self.burn_in

    @property
    def last(self) -> NDArray[np.int64]:
        """[S] the last training step."""
        return self.start + self.length - 1


def cut(ended: NDArray[np.bool_], context: int, shape: SequenceShape, frame_stack: int = 1) -> Cuts:
    """Return the sequences of a fragment, by the rules above; the same arguments give the same cut everywhere.

    A producer sends all the history that is needed as soon as it has it. A fragment with less begins where its producer
    did, with the first steps of episodes. Once there is enough, the first step counts as unknown, even where it happens
    to be the producer's first: only its action and reward are used, as inputs of the second.

    Args:
        ended: [C+T, N] bool, the step terminated or was truncated.
        context: C, leading steps that an earlier fragment trained.
        shape: of the sequences.
        frame_stack: K observations that a network sees at once.
    """
    num_steps, num_envs = ended.shape
    begins = context < shape.context + frame_stack - 1
    # Parts, environment by environment: first step, end (exclusive), whether the first is known to be the episode's.
    border = np.ones((1, num_envs), np.bool_)  # the fragment's end, which closes the last part
    lane, step = np.nonzero(np.concatenate([ended, border]).T)
    end = np.minimum(step + 1, num_steps)
    is_first = np.append(True, lane[1:] != lane[:-1])  # part of its environment
    first, known = np.where(is_first, 0, np.roll(end, 1)), begins | ~is_first
    is_new = (end > context) & (end > first)  # part; the last one of an environment may be empty
    lane, first, end, known = lane[is_new], first[is_new], end[is_new], known[is_new]

    grid = np.maximum(first, context - shape.overlap)  # start of each part's first sequence
    more = -(-np.maximum(end - grid - shape.length, 0) // shape.stride)
    part = np.repeat(np.arange(len(grid)), more + 1)  # [S]
    nth = np.arange(len(part)) - np.repeat(np.cumsum(more + 1) - (more + 1), more + 1)
    start = grid[part] + nth * shape.stride
    burn_in = np.minimum(shape.burn_in, start - first[part])
    return Cuts(
        lane=lane[part],
        start=start,
        length=np.minimum(shape.length, end[part] - start),
        burn_in=burn_in,
        fresh=known[part] & (start - burn_in == first[part]),
    )


def recurrent_state_index(cuts: Cuts) -> NDArray[np.int32]:
    """Return [M, 2] (step, environment), all distinct, before which the recurrent state is needed, in sequence order.

    Sequences that begin with their episode need none: their state is zero.
    """
    stored = ~cuts.fresh
    return np.stack([cuts.first[stored], cuts.lane[stored]], axis=1).astype(np.int32)


def check_states(fragment: Fragment, needed: NDArray[np.int32], size: int) -> None:
    """Refuse a fragment whose recurrent states are not those before [M, 2] (step, environment), with H = `size`.

    Raises:
        ValueError: its columns memory_index and memory are not of exactly these steps and this size.
    """
    index, memory = fragment.extras.get("memory_index"), fragment.extras.get("memory")
    if index is None or memory is None:
        raise ValueError(
            "fragment: no columns memory_index and memory; its worker plays another algorithm than a recurrent one"
        )
    if memory.dtype != np.float16 or memory.ndim != 2 or memory.shape[1] != size:
        raise ValueError(
            f"fragment: memory is {memory.dtype}{list(memory.shape)}, expected float16 [S, {size}]; its worker plays "
            "with other settings"
        )
    if not np.array_equal(index, needed) or len(memory) != len(needed):
        raise ValueError(
            f"fragment: {len(memory)} recurrent states, but not of the {len(needed)} steps that its sequences begin "
            "with; its worker plays with other settings"
        )


def targets(
    reward: NDArray[Any], length: NDArray[np.int64], terminated: NDArray[np.bool_], *, gamma: float, n: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """Return n-step returns within sequences; towards a sequence's end they sum fewer rewards.

    Args:
        reward: [L, B] in training units; anything finite behind a sequence's length.
        length: [B] steps in use, 1..L.
        terminated: [B] bool, the last one of them terminated the episode.
        gamma, n: as for `returns.n_step_return`.

    Returns:
        n_step_return and bootstrap_discount [L, B] float32, 0 in padding; bootstrap [L, B] int64, the row in 0..length
        to bootstrap from; valid [L, B] bool, False in padding.
    """
    step = np.arange(len(reward))[:, None]
    is_last = step == length - 1
    return_, discount, k = n_step_return(
        reward, is_last & terminated, is_last & ~terminated, gamma=gamma, n=n
    )
    valid = step < length
    return return_ * valid, discount * valid, np.where(valid, step + k, length), valid


def td_errors(
    fragment: Fragment, cuts: Cuts, *, gamma: float, n: int, rescaled: bool, mix: float
) -> NDArray[np.float32] | None:
    """Return the TD error of each sequence by the acting policy: mix * max |td| + (1 - mix) * mean |td|.

    td = target - Q(s, a) over the training steps, with target R + d * V, or h(R + d * h^-1(V)) where values are
    rescaled; V is the largest value of the state bootstrapped from. Where the policy has not seen that state (after a
    truncation, or the fragment's last) the value of the state before stands in.
    Source: Kapturowski et al. 2019, section 2.3 (mix 0.9); Horgan et al. 2018, arXiv:1803.00933, section 3.

    Args:
        fragment: its extras `action_value` and `state_value` [C+T, N] float32 are needed.
        cuts: its S sequences.
        gamma, n: as for `returns.n_step_return`.
        rescaled: values are in units of h (see `returns.rescale`).
        mix: weight of the maximum, in [0, 1].

    Returns:
        [S] float32, or None where the policy reported no values.

    Raises:
        ValueError: as `reported_values`.
    """
    if (values := reported_values(fragment)) is None:
        return None
    (action_value, state_value), reward = values, fragment.reward

    def errors(cuts: Cuts) -> NDArray[np.float32]:
        offset = np.arange(cuts.length.max())[:, None]
        step, lane = cuts.start + np.minimum(offset, cuts.length - 1), cuts.lane  # [L, S], [S]
        return_, discount, bootstrap, valid = targets(
            reward[step, lane], cuts.length, fragment.terminated[cuts.last, lane], gamma=gamma, n=n
        )
        summed = cuts.start + bootstrap - 1  # [L, S] the last step of each sum
        is_seen = ~fragment.ended[summed, lane] & (summed + 1 < len(reward))
        value = state_value[summed + is_seen, lane].astype(np.float64)
        target = return_.astype(np.float64) + discount * (unrescale(value) if rescaled else value)
        td = np.abs((rescale(target) if rescaled else target) - action_value[step, lane]) * valid
        mixed: NDArray[np.float64] = mix * td.max(axis=0) + (1.0 - mix) * td.sum(axis=0) / cuts.length
        return mixed.astype(np.float32)

    columns = vars(cuts).values()
    parts = (Cuts(*(column[i : i + _AT_ONCE] for column in columns)) for i in range(0, len(cuts), _AT_ONCE))
    return np.concatenate([np.empty(0, np.float32), *map(errors, parts)])


class SequenceItems:
    """Sequences of a fragment as items, environment by environment; each fragment is held with its context.

    Where fragments are much shorter than their context, most of the memory is context.

    Args:
        shape: of the sequences.
        gamma: discount of one agent step, in [0, 1].
        n_step: most rewards summed, at least 1 and at most a sequence of them.
        state_size: H, numbers of a recurrent state.
        frame_stack: K observations that a network sees at once.
        priority_mix: weight of the largest TD error in a new sequence's priority, against their mean; in [0, 1].
        rescaled: the policy's values are in units of h (see `returns.rescale`).
    """

    def __init__(
        self,
        *,
        shape: SequenceShape,
        gamma: float,
        n_step: int,
        state_size: int,
        frame_stack: int = 1,
        priority_mix: float = 0.9,
        rescaled: bool = True,
    ) -> None:
        self._shape, self._state_size = shape, state_size
        self._n_step, self._targets = n_step, partial(targets, gamma=gamma, n=n_step)
        self._td_errors = partial(td_errors, gamma=gamma, n=n_step, rescaled=rescaled, mix=priority_mix)
        self.frame_stack = frame_stack

    def room(self, capacity: int) -> tuple[int, int, int]:
        """Return the expected numbers of rows, items and steps for `capacity` transitions."""
        rows = expected_sequence_rows(capacity, self._shape, self.frame_stack)
        return rows, max(1, capacity // self._shape.stride), rows

    def cut(self, fragment: Fragment) -> Cut:
        """Cut a fragment into its sequences; in any thread.

        Returns:
            Items with step (the first one in use), burn_in, length, fresh, terminated (the last step was), next_row
            (the observation behind the last step), recurrent_state; steps, context included, environment by
            environment, with row, action, reward.

        Raises:
            ValueError: the fragment has other recurrent states than its sequences need, its returns need not be finite,
                or its values are no float32 columns [C+T, N].
        """
        check_rewards(fragment, self._n_step)
        cuts = cut(fragment.ended, fragment.context, self._shape, self.frame_stack)
        block = observation_block(fragment, self.frame_stack)
        check_states(fragment, recurrent_state_index(cuts), self._state_size)
        state = np.zeros((len(cuts), self._state_size), np.float16)  # 0 at an episode's start
        state[~cuts.fresh] = fragment.extras["memory"]
        items = {
            "step": cuts.lane * len(fragment.reward) + cuts.first,
            "burn_in": cuts.burn_in,
            "length": cuts.length,
            "fresh": cuts.fresh,
            "terminated": fragment.terminated[cuts.last, cuts.lane],
            "next_row": block.next_row[cuts.last, cuts.lane],
            "recurrent_state": state,
        }
        steps = {
            "row": block.row[:-1].T.reshape(-1),
            "action": fragment.action.T.reshape(-1),
            "reward": fragment.reward.T.reshape(-1),
        }
        return Cut(block, items, steps, self._td_errors(fragment, cuts))

    def plan(self, items: Columns, steps: Ring, rows: Rows) -> Callable[[], Sequences]:
        """Look up what B items need; the result gathers them, in any thread."""
        first, burn_in, length = items["step"], items["burn_in"], items["length"]  # [B]
        terminated = items["terminated"]
        warm, num_rows = self._shape.burn_in, self._shape.burn_in + self._shape.length + 1
        steps_action, steps_reward = steps.columns["action"], steps.columns["reward"]

        place = np.arange(num_rows)[:, None]
        in_use = burn_in + length - terminated  # [B] the last row in use, counted from the first
        warming = np.minimum(place, np.maximum(burn_in - 1, 0))
        training = np.minimum(place - warm + burn_in, in_use)
        offset = np.where(place < warm, warming, training)  # [U+L+1, B]
        is_after = offset == burn_in + length  # the row behind the last step, which is no step itself
        step = steps.slots(first + offset - is_after)
        row = np.where(is_after, items["next_row"], steps.columns["row"].take(step))
        is_start = items["fresh"] & (offset == 0)
        before = steps.slots(first + offset - ~is_start)
        previous_action = np.where(is_start, -1, steps_action.take(before))
        previous_reward = np.where(is_start, np.float32(0), steps_reward.take(before))

        place = np.arange(self._shape.length)[:, None]
        step = steps.slots(first + burn_in + np.minimum(place, length - 1))  # [L, B]
        action = steps_action.take(step) * (place < length)
        reward = steps_reward.take(step)
        read = rows.plan(row)

        def gather() -> Sequences:
            return_, discount, bootstrap, valid = self._targets(reward, length, terminated)
            return Sequences(
                observation=read(),
                previous_action=previous_action,
                previous_reward=previous_reward,
                recurrent_state=items["recurrent_state"].astype(np.float32),
                burn_in=burn_in,
                action=action,
                n_step_return=return_,
                bootstrap_discount=discount,
                bootstrap=bootstrap,
                valid=valid,
            )

        return gather

    def check_valid(self, items: Columns, steps: Columns, *, rows: range, step: int) -> None:
        """Assert the invariants of one fragment's items; its observations are `rows`, its steps begin at `step`."""
        begin, own, next_row = items["step"] - step, steps["row"], items["next_row"]
        end = begin + items["burn_in"] + items["length"]
        assert np.all((begin >= 0) & (end <= len(own))), "sequences lie in their fragment"
        assert np.all((rows.start <= own) & (own < rows.stop)), "steps have rows of their fragment"
        assert len(np.unique(own)) == len(own), "each its own"
        assert np.all((rows.start <= next_row) & (next_row < rows.stop)), "so have sequences"
        assert np.all((items["burn_in"] >= 0) & (items["burn_in"] <= self._shape.burn_in)), "0..U of burn-in"
        assert np.all((items["length"] >= 1) & (items["length"] <= self._shape.length)), "1..L training steps"
        assert not items["recurrent_state"][items["fresh"]].any(), "episodes begin with a state of zero"


def expected_sequence_rows(capacity: int, shape: SequenceShape, frame_stack: int) -> int:
    """Return the observations of `capacity` transitions; every fragment repeats its context."""
    steps = -(-_TYPICAL_STEPS // shape.stride) * shape.stride
    return expected_rows(capacity, context=shape.context + frame_stack - 1, steps=steps)
