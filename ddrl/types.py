"""The data that ddrl passes around: frozen dataclasses with the shape, unit and invariants of each field.

Axes: T steps, C context steps before them, N environments played side by side, K truncated steps (of an `EnvSpec`: the
frames of a stack), E ended episodes, S stored recurrent states, H numbers in a recurrent state (of an image: its
height), B batch, U burn-in and L training steps of a sequence, R observation rows, D dimensions of an action. `*O` is
the shape of one observation, `*I` that of a network's input (a stack of observations, or one), `*A` that of one action.
Rewards "in training units" are those that `env.reward_scale`, `reward_sign` and `reward_clip` give.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class EnvSpec:
    """The spaces of an environment, as networks and algorithms need them.

    Attributes:
        env_id: Gymnasium id or "module:callable".
        observation_shape: `*O`, the shape of one observation; with frame stacking, of one frame.
        observation_dtype: uint8 of images, float32 of all else.
        action_kind: "continuous" (a bounded Box), "discrete", or "multi_discrete".
        action_shape: `*A`; () for discrete actions, (D,) for multi-discrete ones.
        action_sizes: number of choices in each of D dimensions; one number for discrete actions, none for
            continuous ones.
        action_low, action_high: [*A] flattened bounds of a continuous action, in the environment's unit.
        frame_stack: K, the number of newest observations that a network sees at once; they are stored one by one.
        has_mask: the last numbers of each observation say which choices are allowed, 1, or not, 0.
        max_episode_steps: of an episode, as the environment says; None: it does not.
        image_shapes: of the images in an observation that is a vector of bytes: theirs, then those of float32 numbers.
        is_two_player: it is one side of a game, see `SelfPlayConfig`.
    """

    env_id: str
    observation_shape: tuple[int, ...]
    observation_dtype: Literal["float32", "uint8"]
    action_kind: Literal["continuous", "discrete", "multi_discrete"]
    action_shape: tuple[int, ...]
    action_sizes: tuple[int, ...] = ()
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    frame_stack: int = 1
    has_mask: bool = False
    max_episode_steps: int | None = field(default=None, compare=False)
    image_shapes: tuple[tuple[int, ...], ...] = ()
    is_two_player: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """`*I`: `*O`, or K of them, oldest first: [K, H, W] for images [H, W], [K * O] for vectors [O]."""
        if self.frame_stack == 1:
            return self.observation_shape
        if len(self.observation_shape) == 1:
            return (self.frame_stack * self.observation_shape[0],)
        return (self.frame_stack, *self.observation_shape)

    @property
    def is_vector(self) -> bool:
        """A network sees numbers only, no images."""
        return len(self.input_shape) == 1 and not self.image_shapes

    def numbers(self, seen: np.ndarray) -> np.ndarray:
        """Return the numbers of observations [..., *O]: [..., F], of images beside numbers these, else themselves."""
        if not self.image_shapes:
            return seen
        return seen[..., sum(map(math.prod, self.image_shapes)) :].copy().view("<f4")

    @property
    def num_masked(self) -> int:
        """A, numbers in the mask at the end of what a network sees: a choice of each dimension; 0 without a mask."""
        return sum(self.action_sizes) if self.has_mask else 0

    def only_allowed(self, scores: Any, seen: Any) -> Any:
        """Return the scores of choices, so low where the mask forbids one that its probability is 0.

        Args:
            scores: [..., A] array or tensor, dimension after dimension.
            seen: [..., *I] likewise, what a network sees.
        """
        if not self.has_mask:
            return scores
        # Finite: 0 times it, or times the log of that probability, is 0.
        return scores - 1e9 * (1.0 - seen[..., -self.num_masked :])

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> EnvSpec:
        """Return the spec with these decoded JSON fields, where tuples are lists.

        Raises:
            ValueError: they describe no spaces.
        """
        from pydantic import TypeAdapter  # here: listings of runs start without it

        with contextlib.suppress(ValueError):
            spec = TypeAdapter(cls).validate_python(tree)
            sizes = (*spec.observation_shape, *spec.action_shape, *spec.action_sizes, spec.frame_stack)
            num_bounds = math.prod(spec.action_shape) if spec.action_kind == "continuous" else 0
            if min(sizes) > 0 and len(spec.action_low) == len(spec.action_high) == num_bounds:
                return spec
        raise ValueError(f"{tree}: describes no spaces")


@dataclass(frozen=True)
class Fragment:
    """T steps of N environments under one policy version: the unit sent to the server.

    Invariants: columns of steps are [time, environment, ...]; `observation` has one row more than the others, which is
    only used to bootstrap. Environments reset in the step that ends an episode (Gymnasium's SAME_STEP): the next row is
    the first observation of the next episode; the true last observation of a *truncated* episode is kept in
    `final_observation`. Steps are counted from the first context row.

    Attributes:
        run: id of the run.
        producer: id of the collector, from INCR on the server.
        incarnation: random token drawn with the producer id: a server that came back older may give an id again.
        seq: 0, 1, 2, ... without a gap for one (producer, incarnation).
        policy_version: version of the weights in use for the T new steps; version 0 may play at random.
        context: C, the number of leading steps repeated from earlier fragments, for stacks of frames, n-step sums,
            burn-in and overlapping sequences.
        observation: [C+T+1, N, *O].
        action: [C+T, N, *A], float32 in the environment's unit, or int64.
        reward: [C+T, N] float32, in training units.
        terminated: [C+T, N] bool, the episode ended by its own rules, or with `episodic_life` a life was lost.
        truncated: [C+T, N] bool, the episode was cut short (a time limit); never together with terminated.
        final_index: [K, 2] int32, (step, environment) of each truncated step, in order of time.
        final_observation: [K, *O], the true observation after each of those steps.
        episode_return: [E] float32, undiscounted and unscaled returns of the episodes that ended in the T new
            steps.
        episode_length: [E] int32, their lengths in agent steps.
        extras: columns [C+T, N, ...] of one algorithm, such as behavior_log_prob. Recurrent policies add memory_index
            [S, 2] int32 and memory [S, H] float16: (step, environment) of each step at which a sequence begins inside
            an episode, on-policy of the first new steps, and the recurrent state before it. With `env.metrics` there
            is episode_metrics [E, M] float32, NaN where an info had no such number. Of the episodes that begin in the
            new rows of `observation` there are reset_index [R, 2] int32, (row, environment), and reset_seed [R] int64;
            -1: the environment's random numbers go on.
        host: name of the machine; "" if unknown.
    """

    run: str
    producer: int
    incarnation: int
    seq: int
    policy_version: int
    context: int
    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_index: np.ndarray
    final_observation: np.ndarray
    episode_return: np.ndarray
    episode_length: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    host: str = ""

    @property
    def ended(self) -> np.ndarray:
        """[C+T, N] bool, an episode ended with the step."""
        return cast("np.ndarray", self.terminated | self.truncated)

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        columns = (*vars(self).values(), *self.extras.values())
        return sum(getattr(column, "nbytes", 0) for column in columns)

    @property
    def num_steps(self) -> int:
        """T, without the context."""
        return len(self.reward) - self.context

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self.reward.shape[1])

    @property
    def num_transitions(self) -> int:
        """T * N: the agent steps that the fragment adds to `env_steps`."""
        return self.num_steps * self.num_envs


@dataclass(frozen=True)
class Played:
    """Figures of a fragment that a learner counts; of another rank's fragment it knows no more.

    Attributes:
        rank: which holds the fragment.
        producer, policy_version, num_transitions: of the fragment.
        episode_return, episode_metrics: [E] and [E][M], of its newest episodes.
    """

    rank: int
    producer: int
    policy_version: int
    num_transitions: int
    episode_return: Sequence[float] = ()
    episode_metrics: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Batch:
    """B independent n-step transitions; NumPy arrays as sampled, tensors once on the device.

    Attributes:
        observation: [B, *I] s_t, as the network sees it.
        action: [B, *A] the action taken at s_t.
        n_step_return: [B] sum of gamma^i * r_{t+i} for i < k, where k <= n.
        bootstrap_discount: [B] gamma^k, or 0 where the episode *terminated* within the k steps.
        next_observation: [B, *I] s_{t+k}; after a truncation the true final observation.
        number: [B] int64, each transition's number in order of admission, from 0; prioritized replay only.
        weight: [B] float32 importance weight in (0, 1]; prioritized replay only.
    """

    observation: Any
    action: Any
    n_step_return: Any
    bootstrap_discount: Any
    next_observation: Any
    number: Any = None
    weight: Any = None


@dataclass(frozen=True)
class SequenceShape:
    """The cutting of episodes into sequences for recurrent learning.

    Attributes:
        burn_in: U, steps before the training slice, which only warm up the recurrent state.
        length: L, steps of the training slice.
        overlap: steps that two neighboring training slices share.
    """

    burn_in: int
    length: int
    overlap: int

    @property
    def stride(self) -> int:
        """Steps from one training slice to the next."""
        return self.length - self.overlap

    @property
    def context(self) -> int:
        """Context steps that make all sequences whole: burn-in, overlap, one for the first row's previous action."""
        return self.burn_in + self.overlap + 1


@dataclass(frozen=True)
class Sequences:
    """B sequences of up to L training steps, each within one episode; time-major.

    Rows of inputs: U of burn-in, filled from the left, then L + 1 of the training slice, of which the last used one
    only bootstraps. Padding repeats a used row.

    Attributes:
        observation: [U+L+1, B, *I].
        previous_action: [U+L+1, B] int64, taken before each row; -1 at an episode's start.
        previous_reward: [U+L+1, B] float32, in training units; 0 at an episode's start.
        recurrent_state: [B, H] float32, the recurrent state before the first row in use, burn-in included.
        burn_in: [B] int64, burn-in rows in use, 0..U.
        action: [L, B] int64.
        n_step_return: [L, B] float32 sum of gamma^i * r_{t+i} for i < k; k is shorter at the sequence's end.
        bootstrap_discount: [L, B] float32 gamma^k, or 0 where the episode *terminated* within the k steps.
        bootstrap: [L, B] int64, t + k: the row to bootstrap from, in 0..L, counted from the training slice's first.
        valid: [L, B] bool, False in padding.
        number: [B] int64, each sequence's number in order of admission, from 0; prioritized replay only.
        weight: [B] float32 importance weight in (0, 1]; prioritized replay only.
    """

    observation: Any
    previous_action: Any
    previous_reward: Any
    recurrent_state: Any
    burn_in: Any
    action: Any
    n_step_return: Any
    bootstrap_discount: Any
    bootstrap: Any
    valid: Any
    number: Any = None
    weight: Any = None


@dataclass(frozen=True)
class Trajectories:
    """Fragments side by side, for on-policy learning; NumPy arrays as cut, tensors once on the device.

    A lane holds one environment of one producer over consecutive fragments, or several such, one after another. Shorter
    lanes are padded at their end; padding has `valid`, `discount` and `continues` False or 0.

    Attributes:
        observation: [R, *I] all observations, bootstraps and final ones included; the border of two joined fragments
            appears twice.
        row: [T, B] int64, row of s_t in `observation`; 0 in padding.
        next_row: [T, B] int64, row of the true s_{t+1}: after a truncation the final observation. Undefined where the
            step terminated and in padding.
        valid: [T, B] bool, False in padding.
        action: [T, B, *A] as the policy drew it, float32 or int64.
        reward: [T, B] float32, in training units.
        discount: [T, B] float32, gamma, or 0 where the step terminated its episode.
        continues: [T, B] bool, step t + 1 of the lane is the next one of the same episode.
        behavior_log_prob: [T, B] float32 log probability or density of the action under the policy that played, in
            nats.
        place: [M] int64, t * B + b of each transition, sequence after sequence; of recurrent policies only, as what
            follows. A sequence is a part of an episode.
        length: [S] int64, transitions of each sequence.
        recurrent_state: [S, H] float32, before each sequence.
    """

    observation: Any
    row: Any
    next_row: Any
    valid: Any
    action: Any
    reward: Any
    discount: Any
    continues: Any
    behavior_log_prob: Any
    place: Any = None
    length: Any = None
    recurrent_state: Any = None


@dataclass(frozen=True)
class EvaluationResult:
    """Results of an evaluation: one episode per seed.

    Attributes:
        returns: undiscounted episode returns, in the order of the seeds, in reward units of the environment.
        lengths: episode lengths in agent steps.
        metrics: by name of `env.metrics`, the numbers of those episodes whose info had it.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def return_mean(self) -> float:
        """Mean episode return."""
        return statistics.fmean(self.returns)
