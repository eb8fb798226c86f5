"""Cut fragments into sequences for recurrent learning: where they begin, what they need, how surprising they are.

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

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.returns import n_step_return, rescale, unrescale
from ddrl.types import Fragment, SequenceShape


@dataclass(frozen=True)
class Cuts:
    """S sequences of one fragment, lane by lane, in order of time within a lane.

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
        """S."""
        return len(self.start)

    @property
    def first(self) -> NDArray[np.int64]:
        """[S] the first step in use, burn-in included."""
        return self.start - self.burn_in

    @property
    def last(self) -> NDArray[np.int64]:
        """[S] the last training step."""
        return self.start + self.length - 1


def at_beginning(context: int, *, shape: SequenceShape, frame_stack: int) -> bool:
    """Whether a fragment with `context` steps of history begins where its producer did, with episodes' first steps.

    A producer sends all the history that is needed as soon as it has it; less means that there is no more. Once there
    is enough, the first step counts as unknown, even where it happens to be the producer's first.
    """
    return context < shape.context + frame_stack - 1


def cut(ended: NDArray[np.bool_], *, context: int, shape: SequenceShape, begins: bool) -> Cuts:
    """The sequences of a fragment, by the rules above; the same arguments give the same cut everywhere.

    Args:
        ended: [C+T, N] bool, the step terminated or was truncated.
        context: C, leading steps that an earlier fragment trained.
        shape: of the sequences.
        begins: the first step of each lane is an episode's first (see `at_beginning`). Otherwise the context must be
            enough for all sequences, and of that step only action and reward are used, as inputs of the second.

    Raises:
        ValueError: no new step, an impossible shape, or too little context for a fragment that does not begin.
    """
    if shape.burn_in < 0 or not 0 <= shape.overlap < shape.length:
        raise ValueError(
            f"sequences: burn-in {shape.burn_in}, length {shape.length}, overlap {shape.overlap}; burn-in and overlap "
            "must be at least 0, and overlap below length"
        )
    if ended.ndim != 2 or not ended.shape[1] or not 0 <= context < len(ended):
        raise ValueError(f"ended: shape {ended.shape} with {context} steps of context has no new step")
    if not begins and context < shape.context:
        raise ValueError(
            f"context: {context} steps amid an episode, but sequences need {shape.context}; send more history"
        )
    lane, first, end, known = _parts(ended, begins)
    is_new = (end > context) & (end > first)  # part
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


def cut_fragment(fragment: Fragment, shape: SequenceShape, frame_stack: int) -> Cuts:
    """The sequences of `fragment`, whose observations are stacked by `frame_stack`.

    Raises:
        ValueError: as `cut`.
    """
    begins = at_beginning(fragment.context, shape=shape, frame_stack=frame_stack)
    return cut(fragment.terminated | fragment.truncated, context=fragment.context, shape=shape, begins=begins)


def _parts(
    ended: NDArray[np.bool_], begins: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Each episode's part, lane by lane in order of time: lane, first step, end (exclusive), and more.

    That is whether the first step is known to be the episode's. The last part of a lane may be empty.
    """
    num_steps, num_envs = ended.shape
    border = np.ones((1, num_envs), np.bool_)  # the fragment's end, which closes the last part
    lane, step = np.nonzero(np.concatenate([ended, border]).T)
    end = np.minimum(step + 1, num_steps)
    is_first = np.append(True, lane[1:] != lane[:-1])  # part of its lane
    return lane, np.where(is_first, 0, np.roll(end, 1)), end, begins | ~is_first


def memory_rows(cuts: Cuts) -> NDArray[np.int32]:
    """[M, 2] (step, lane), all distinct, before which the recurrent state is needed, in the order of the sequences.

    Those of sequences that begin with their episode are not among them: theirs is zero.
    """
    stored = ~cuts.fresh
    return np.stack([cuts.first[stored], cuts.lane[stored]], axis=1).astype(np.int32)


def memory_states(fragment: Fragment, cuts: Cuts, size: int) -> NDArray[np.float16]:
    """[S, H] the recurrent state before the first step in use of each sequence, H = `size`; 0 at an episode's start.

    Raises:
        ValueError: the fragment has others than those.
    """
    index, memory = fragment.extras.get("memory_index"), fragment.extras.get("memory")
    needed = memory_rows(cuts)
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
    state = np.zeros((len(cuts), size), np.float16)
    state[~cuts.fresh] = memory
    return state


def targets(
    reward: NDArray[Any],
    length: NDArray[np.int64],
    terminated: NDArray[np.bool_],
    *,
    gamma: float,
    n: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """n-step returns within sequences; towards a sequence's end they sum fewer rewards.

    Args:
        reward: [L, B] as scaled for training; anything finite behind a sequence's length.
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


def priorities(
    fragment: Fragment, cuts: Cuts, *, gamma: float, n: int, rescaled: bool, mix: float
) -> NDArray[np.float32] | None:
    """How surprising each sequence was to the policy that played it: mix * max |td| + (1 - mix) * mean |td|.

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
        [S] float32, or None where the policy gave no values.

    Raises:
        ValueError: a column of values has another shape than the rewards.
    """
    reward, extras = fragment.reward, fragment.extras
    if "action_value" not in extras or "state_value" not in extras:
        return None
    for name in ("action_value", "state_value"):
        if extras[name].shape != reward.shape:
            raise ValueError(
                f"fragment: {name} has shape {list(extras[name].shape)}, expected {list(reward.shape)}"
            )
    offset = np.arange(cuts.length.max())[:, None]
    step, lane = cuts.start + np.minimum(offset, cuts.length - 1), cuts.lane  # [L, S], [S]
    return_, discount, bootstrap, valid = targets(
        reward[step, lane], cuts.length, fragment.terminated[cuts.last, lane], gamma=gamma, n=n
    )
    summed = cuts.start + bootstrap - 1  # [L, S] the last step of each sum
    is_seen = ~(fragment.terminated | fragment.truncated)[summed, lane] & (summed + 1 < len(reward))
    value = extras["state_value"][summed + is_seen, lane].astype(np.float64)
    target = return_.astype(np.float64) + discount * (unrescale(value) if rescaled else value)
    td = np.abs((rescale(target) if rescaled else target) - extras["action_value"][step, lane]) * valid
    mixed: NDArray[np.float64] = mix * td.max(axis=0) + (1.0 - mix) * td.sum(axis=0) / cuts.length
    return mixed.astype(np.float32)
