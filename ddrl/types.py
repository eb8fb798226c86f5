"""What travels: plain frozen data, with the shape, the unit and the invariant of every field.

Axes: T steps, N environments played side by side, B batch, K sparse rows, R observation rows. `*O` is the shape of one
observation, `*I` that of a network's input (a stack of observations, or one), `*A` that of one action. Nothing here
imports torch or redis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class EnvSpec:
    """The spaces of an environment, as much of them as a network or an algorithm must know.

    Attributes:
        env_id: Gymnasium id or "module:callable".
        observation_shape: `*O`, of one frame where frames are stacked.
        observation_dtype: NumPy name, such as "float32" or "uint8".
        action_kind: "continuous" (a bounded Box), "discrete", or "multi_discrete".
        action_shape: `*A`; () for discrete actions, (D,) for multi-discrete ones.
        action_sizes: choices of each of D dimensions, flattened; one number for discrete actions, none for
            continuous ones.
        action_low, action_high: [*A] flattened bounds of a continuous action, in the environment's unit.
        frame_stack: K, the newest observations that a network sees at once; stored and sent one by one.
    """

    env_id: str
    observation_shape: tuple[int, ...]
    observation_dtype: str
    action_kind: Literal["continuous", "discrete", "multi_discrete"]
    action_shape: tuple[int, ...]
    action_sizes: tuple[int, ...] = ()
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    frame_stack: int = 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        """`*I`, what a network sees: `*O`; with K stacked, oldest first, [K, H, W] of [H, W] and [K * O] of [O]."""
        if self.frame_stack == 1:
            return self.observation_shape
        if len(self.observation_shape) == 1:
            return (self.frame_stack * self.observation_shape[0],)
        return (self.frame_stack, *self.observation_shape)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> EnvSpec:
        """From what `json.loads` makes of its fields: lists become tuples again."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()
        }
        return cls(**fields)


@dataclass(frozen=True)
class Fragment:
    """T steps of N environments under one policy version: the unit that goes over the wire.

    Invariants: every column's first axis is time and its second the environment; `observation` has one
    row more than the others, the last one only bootstraps. Autoreset is SAME_STEP: the row after an
    ending is the first observation of the next episode; the true last observation of a *truncated*
    episode is kept in `final_observation`.

    Attributes:
        run: id of the run.
        producer: id of the collector, from INCR on the server.
        incarnation: random token of the process that played; a producer never changes it.
        seq: 0, 1, 2, ... without a gap for one (producer, incarnation).
        policy_version: version of the weights that chose all actions.
        context: C leading steps, played before and sent with an earlier fragment too: for stacks of frames, burn-in
            and overlapping sequences, so that a fragment can be read by itself.
        observation: [C+T+1, N, *O].
        action: [C+T, N, *A], float32 in the environment's unit, or int64.
        reward: [C+T, N] float32, as scaled for training.
        terminated: [C+T, N] bool, the episode ended by its own rules.
        truncated: [C+T, N] bool, the episode was cut (a time limit); never together with terminated.
        final_index: [K, 2] int32, (step, environment) of each truncated step, in order of time.
        final_observation: [K, *O], the true observation after each of those steps.
        episode_return: [E] float32, undiscounted and unscaled returns of the episodes that ended here.
        episode_length: [E] int32, their lengths in agent steps.
        extras: further columns [C+T, N, ...] that an algorithm asked for, such as behavior_log_prob; and, of recurrent
            policies, memory_index [S, 2] int32, (step, environment), and memory [S, H] float16, the recurrent state
            before that step, wherever a sequence begins amid an episode.
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

    @property
    def num_steps(self) -> int:
        """T: the steps that no earlier fragment holds."""
        return len(self.reward) - self.context

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self.reward.shape[1])

    @property
    def num_transitions(self) -> int:
        """T * N: what the fragment adds to `env_steps`."""
        return self.num_steps * self.num_envs


@dataclass(frozen=True)
class Batch:
    """B independent n-step transitions; NumPy arrays as sampled, tensors once on the device.

    Attributes:
        observation: [B, *I] s_t, as the network sees it.
        action: [B, *A] the action taken at s_t.
        n_step_return: [B] sum of gamma^i * r_{t+i} for i < k, k <= n the steps that could be used.
        bootstrap_discount: [B] gamma^k, or 0 where the episode *terminated* within the k steps.
        next_observation: [B, *I] s_{t+k}; after a truncation the true final observation.
        number: [B] int64 of each transition, counted from 0 as they were admitted; prioritized replay only.
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
    """How episodes are cut into sequences for recurrent learning.

    Attributes:
        burn_in: U, steps before the training slice that only warm the recurrent state up.
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
        """Steps of history with which every sequence that ends in a fragment lies in it whole, one for its inputs."""
        return self.burn_in + self.overlap + 1


@dataclass(frozen=True)
class Sequences:
    """B sequences of up to L training steps, none across an episode's end; time-major.

    Rows of what is seen: U of burn-in, aligned to the left, then L + 1 of the training slice, whose last used row is
    the one that bootstraps. Unused rows repeat a used one.

    Attributes:
        observation: [U+L+1, B, *I].
        previous_action: [U+L+1, B] int64, taken before each row; -1 at an episode's start.
        previous_reward: [U+L+1, B] float32, as scaled for training; 0 at an episode's start.
        recurrent_state: [B, H] float32, the recurrent state before the first row in use, burn-in included.
        burn_in: [B] int64, burn-in rows in use, 0..U.
        action: [L, B] int64.
        n_step_return: [L, B] float32 sum of gamma^i * r_{t+i} for i < k; k is shorter at the sequence's end.
        bootstrap_discount: [L, B] float32 gamma^k, or 0 where the episode *terminated* within the k steps.
        bootstrap: [L, B] int64, t + k: the row in 0..L, counted from the training slice's first, to bootstrap from.
        valid: [L, B] bool, a step that was played.
        number: [B] int64 of each sequence, counted from 0 as they were admitted; prioritized replay only.
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
    """Fragments side by side, for learning on-policy; NumPy arrays as cut, tensors once on the device.

    A lane of B is one environment of one producer over as many of its fragments as follow each other without a
    gap. Shorter lanes are padded at their end; padding has `valid`, `discount` and `continues` False or 0.

    Attributes:
        observation: [R, *I] every observation once, bootstraps and final observations included.
        row: [T, B] int64 row of s_t in `observation`; 0 in padding.
        next_row: [T, B] int64 row of the true s_{t+1}: after a truncation the final observation. Without meaning
            where the step terminated and in padding.
        valid: [T, B] bool, a step that was played; M of them.
        action: [T, B, *A] as stored, float32 or int64.
        reward: [T, B] float32, in training units.
        discount: [T, B] float32, gamma, or 0 where the step terminated its episode.
        continues: [T, B] bool, step t + 1 of the lane is the next one of the same episode.
        behavior_log_prob: [T, B] float32 log density of the action under the policy that played, in nats.
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


@dataclass(frozen=True)
class EvaluationResult:
    """What playing a fixed list of seeds gave.

    Attributes:
        policy_version: version of the weights that played.
        seeds: one per episode.
        returns: undiscounted episode returns, in the order of the seeds, in reward units of the environment.
        lengths: episode lengths in agent steps.
    """

    policy_version: int
    seeds: tuple[int, ...]
    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def return_mean(self) -> float:
        """Mean episode return."""
        return float(np.mean(self.returns))

    @property
    def return_std(self) -> float:
        """Standard deviation over the episodes (population)."""
        return float(np.std(self.returns))
