"""Environments + policy -> Fragments. Knows neither Redis nor Celery.

The loop over steps is the hot path of a rollout worker: per step it asks the policy, steps the
environments and copies five arrays into columns that exist already. Episode returns and scaled rewards are
worked out once a fragment. Where fragments carry context, the last steps of one lead the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ddrl import envs
from ddrl.algorithms.base import RecurrentState, advance
from ddrl.config import EnvConfig, RolloutConfig
from ddrl.envs.frame_stack import FrameStack
from ddrl.replay.sequences import cut_fragment, memory_rows
from ddrl.types import EnvSpec, Fragment, SequenceShape
from ddrl.worker.history import History

_FIRST_STEPS = 16  # T of the first fragment, before the speed is known
_MAX_CHANGE = 4  # T grows and shrinks by at most this factor at a time
_MAX_FRAGMENT_BYTES = 64 * 1024**2  # of uncompressed observations, whatever the speed


class Policy(Protocol):
    """What the collector needs of an algorithm's policy."""

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take over published weights."""

    def initial_state(self, num_envs: int) -> RecurrentState:
        """What it carries from step to step; {} for most."""

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """[N, *I] -> [N, *A], float32 in the environment's unit or int64, and further columns [N, ...]."""


class Collector:
    """One producer: N environments whose episodes go on from fragment to fragment.

    Not to be used again after `collect` raised: its lanes may have moved on without a fragment.

    Args:
        run: id of the run.
        producer: id from INCR; seeds environments and exploration together with `seed` and `incarnation`.
        incarnation: random token >= 0 of this process.
        env: what is played; `env.num_envs` lanes.
        rollout: length of fragments and noise on actions; its `random_until_learned` is not used.
        spec: the spaces as the learner knows them.
        policy: chooses actions, and may give further columns of the fragment with them.
        random_until_learned: version 0 plays uniformly random actions, without further columns.
        seed: the run's seed.
        context: steps before a fragment that it brings along, once so many were played.
        sequences: of a recurrent policy, whose state is sent where one begins; T is a multiple of their stride.
        on_step: called after each step of the environments, as a sign of life.

    Raises:
        EnvError: the environment cannot be made here, or its spaces are not those of `spec`.
    """

    def __init__(
        self,
        *,
        run: str,
        producer: int,
        incarnation: int,
        env: EnvConfig,
        rollout: RolloutConfig,
        spec: EnvSpec,
        policy: Policy,
        random_until_learned: bool,
        seed: int,
        context: int = 0,
        sequences: SequenceShape | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self._run, self._producer, self._incarnation = run, producer, incarnation
        self._rollout, self._spec, self._policy = rollout, spec, policy
        self._random_until_learned = random_until_learned
        self._env, self._context, self._sequences, self._on_step = env, context, sequences, on_step
        self._version = -1
        self._seq = 0

        env_seeds, play_seeds = np.random.SeedSequence([seed, producer, incarnation]).spawn(2)
        self._generator = np.random.default_rng(play_seeds)
        self._vector = envs.make_vector(env)
        self._num_envs = num_envs = self._vector.num_envs
        try:
            envs.check_vector(self._vector, env.id, spec)
        except envs.EnvError:
            self._vector.close()
            raise
        low = np.array(spec.action_low, np.float64).reshape(spec.action_shape if spec.action_low else 0)
        high = np.array(spec.action_high, np.float64).reshape(low.shape)
        self._low, self._high, self._span = low, high, high - low
        self._noise = (self._span * (0.5 * rollout.action_noise)).astype(np.float32)
        self._low32, self._high32 = low.astype(np.float32), high.astype(np.float32)
        self._action_dtype = np.float32 if spec.action_kind == "continuous" else np.int64
        sizes = np.array(spec.action_sizes, np.int64)
        self._sizes = sizes.reshape(spec.action_shape if spec.action_sizes else 0)

        first, _ = self._vector.reset(seed=[int(s) for s in env_seeds.generate_state(num_envs)])
        self._observation = np.array(first, spec.observation_dtype)  # [N, *O], starts the next fragment
        self._stack = FrameStack(num_envs, spec)
        self._input = self._stack.push(self._observation, np.ones(num_envs, np.bool_))  # [N, *I]
        self._state = policy.initial_state(num_envs)
        self._history = History(context)
        self._weights_bytes = 0  # of the policy
        self._return = np.zeros(num_envs)  # of the episode each lane is in, unscaled
        self._length = np.zeros(num_envs, np.int64)
        row_bytes = max(1, self._observation.nbytes)
        self._max_steps = max(1, min(rollout.max_fragment_steps, _MAX_FRAGMENT_BYTES // row_bytes))
        self._steps = min(_FIRST_STEPS, self._max_steps)

    @property
    def version(self) -> int:
        """Version of the weights that play; -1 before the first `load`."""
        return self._version

    @property
    def seq(self) -> int:
        """Sequence number of the next fragment."""
        return self._seq

    @property
    def abandoned(self) -> int:
        """Episodes that would be lost if this collector were closed now: lanes amid one."""
        return int(np.count_nonzero(self._length))

    @property
    def num_bytes(self) -> int:
        """Rough memory held between fragments, for a cache: 256 KiB a lane, and arrays as they are."""
        arrays = sum(array.nbytes for array in (self._observation, *self._state.values()))
        stack = 2 * self._input.nbytes  # the room of `FrameStack`
        return self._num_envs * 256 * 1024 + arrays + stack + self._history.num_bytes + self._weights_bytes

    def load(self, version: int, weights: Mapping[str, Any]) -> None:
        """Play by these weights from the next fragment on."""
        self._policy.load(weights)
        self._weights_bytes = sum(array.nbytes for array in weights.values())
        self._version = version

    def close(self) -> None:
        """Close the environments."""
        self._vector.close()

    def collect(self, *, max_steps: int | None = None, stop_at: float | None = None) -> Fragment:
        """Play one fragment under the current version.

        Args:
            max_steps: upper bound of T for this fragment; at least one step is played.
            stop_at: `time.monotonic()` after which no further step begins, or no further stride of sequences; at least
                one step is played.

        Raises:
            RuntimeError: nothing was loaded yet.
            ValueError: the policy gave actions or further columns of a wrong shape.
        """
        if self._version < 0:
            raise RuntimeError("collect: no weights loaded; call load first")
        limit = self._limit(self._max_steps if max_steps is None else max_steps)
        spec, num_envs, step, history = self._spec, self._num_envs, self._vector.step, self._history
        context = len(history)
        rows = np.empty((context + limit + 1, num_envs, *spec.observation_shape), spec.observation_dtype)
        observation = rows[context:]
        action = np.empty((limit, num_envs, *spec.action_shape), self._action_dtype)
        reward = np.empty((limit, num_envs))  # float64 and unscaled, as the environments gave it
        terminated = np.empty((limit, num_envs), np.bool_)  # as learning sees it: a lost life is an end
        truncated = np.empty((limit, num_envs), np.bool_)
        over = np.empty((limit, num_envs), np.bool_)  # as returns see it
        finals = dict(history.finals)
        extras: dict[str, np.ndarray] = {}
        state = self._state
        states = np.empty((limit, *state["hidden"].shape), np.float16) if state else None
        choose = self._random if self._version == 0 and self._random_until_learned else self._explore
        shape = (num_envs, *spec.action_shape)
        stride, on_step = (self._sequences.stride if self._sequences else 1), self._on_step

        begin = time.perf_counter()
        observation[0] = self._observation
        played = 0
        while True:
            if states is not None:
                states[played] = state["hidden"]
            chosen, further = choose(self._input)
            if chosen.shape != shape:
                raise ValueError(f"policy: actions of shape {chosen.shape}, expected {shape}")
            action[played] = chosen
            if further or extras:
                if played == 0:
                    extras = self._columns(further, limit)
                _write(extras, further, played)
            following, reward[played], terminated[played], truncated[played], info = step(chosen)
            if on_step is not None:
                on_step()
            observation[played + 1] = following
            np.logical_or(terminated[played], truncated[played], out=over[played])
            ended = over[played]
            if "life_lost" in info:
                terminated[played] |= info["life_lost"]
                ended = ended | terminated[played]
            truncated[played] &= ~terminated[played]
            if "final_obs" in info:
                for lane in np.flatnonzero(truncated[played]):
                    finals[context + played, int(lane)] = np.array(
                        info["final_obs"][lane], spec.observation_dtype
                    )
            self._input = self._stack.push(observation[played + 1], ended)
            if state:
                advance(state, chosen, envs.training_reward(self._env, reward[played]), ended)
            played += 1
            if played == limit or (
                stop_at is not None and played % stride == 0 and time.monotonic() >= stop_at
            ):
                break
        self._adapt((time.perf_counter() - begin) / played)

        self._observation = observation[played].copy()
        returns, lengths = self._finish_episodes(reward[:played], over[:played])
        rows = rows[: context + played + 1]
        columns = {
            "action": history.lead("action", action[:played]),
            "reward": history.lead("reward", envs.training_reward(self._env, reward[:played])),
            "terminated": history.lead("terminated", terminated[:played]),
            "truncated": history.lead("truncated", truncated[:played]),
        }
        further_columns = {name: history.lead(name, column[:played]) for name, column in extras.items()}
        if states is not None:
            states = history.lead("state", states[:played])
        if context:
            rows[:context] = history.lead("observation", rows[:0])
        fragment = Fragment(
            run=self._run,
            producer=self._producer,
            incarnation=self._incarnation,
            seq=self._seq,
            policy_version=self._version,
            context=context,
            observation=rows,
            **columns,
            final_index=np.array(list(finals), np.int32).reshape(-1, 2),
            final_observation=np.array(list(finals.values()), spec.observation_dtype).reshape(
                -1, *spec.observation_shape
            ),
            episode_return=returns,
            episode_length=lengths,
            extras=further_columns,
        )
        self._seq += 1
        kept = (
            columns | further_columns | {"observation": rows} | ({} if states is None else {"state": states})
        )
        if states is not None and self._sequences is not None:
            fragment = self._with_memory(fragment, states)
        history.keep(kept, finals)
        return fragment

    def _with_memory(self, fragment: Fragment, states: np.ndarray) -> Fragment:
        """The fragment with the recurrent states [C+T, N, H] at the places where its sequences begin."""
        assert self._sequences is not None, "only called for a recurrent policy"
        cuts = cut_fragment(fragment, self._sequences, self._spec.frame_stack)
        index = memory_rows(cuts)
        recurrent = {"memory_index": index, "memory": states[index[:, 0], index[:, 1]]}
        return replace(fragment, extras=dict(fragment.extras) | recurrent)

    def _limit(self, max_steps: int) -> int:
        """T of the next fragment: a multiple of the sequences' stride, rounded up where fewer are allowed."""
        limit = max(1, min(self._steps, max_steps))
        stride = self._sequences.stride if self._sequences else 1
        return -(-limit // stride) * stride

    def _random(self, observation: np.ndarray) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """Uniform actions within the bounds, [N, *A]; no further columns."""
        shape = (self._num_envs, *self._spec.action_shape)
        if self._spec.action_kind != "continuous":
            return self._generator.integers(self._sizes, size=shape), {}
        return (self._low + self._span * self._generator.random(shape)).astype(np.float32), {}

    def _explore(self, observation: np.ndarray) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """The policy's exploring actions, with clipped Gaussian noise where configured, [N, *A]; its columns."""
        action, further = self._policy.explore(observation, self._generator, self._state)
        if self._noise.any():
            noise = self._generator.standard_normal(action.shape, np.float32)
            action = np.minimum(np.maximum(action + self._noise * noise, self._low32), self._high32)
        return action.astype(self._action_dtype, copy=False), further

    def _columns(self, first: Mapping[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
        """Empty columns [T, N, ...] for what the policy gave at the first step, [N, ...] each."""
        for name, row in first.items():
            if row.shape[:1] != (self._num_envs,):
                raise ValueError(f"policy: {name} of shape {row.shape}, expected ({self._num_envs}, ...)")
        return {name: np.empty((steps, *row.shape), row.dtype) for name, row in first.items()}

    def _finish_episodes(self, reward: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns [E] float32 and lengths [E] int32 of the episodes that ended, in order of time.

        Moves each lane's running return and length to the end of the fragment.
        """
        returns, lengths = [], []
        begin = np.zeros(self._num_envs, np.int64)  # first step, here, of the episode each lane is in
        for step, lane in np.argwhere(ended):
            returns.append(self._return[lane] + reward[begin[lane] : step + 1, lane].sum())
            lengths.append(self._length[lane] + step + 1 - begin[lane])
            self._return[lane], self._length[lane], begin[lane] = 0.0, 0, step + 1
        for lane, start in enumerate(begin):
            self._return[lane] += reward[start:, lane].sum()
        self._length += len(reward) - begin
        return np.array(returns, np.float32), np.array(lengths, np.int32)

    def _adapt(self, step_s: float) -> None:
        """Choose the next T so that a fragment takes about `rollout.fragment_s` at `step_s` a step."""
        wanted = self._rollout.fragment_s / max(step_s, 1e-9)
        lowest, highest = math.ceil(self._steps / _MAX_CHANGE), self._steps * _MAX_CHANGE
        self._steps = int(min(max(wanted, lowest, 1), highest, self._max_steps))


def _write(columns: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray], step: int) -> None:
    """Copy the rows [N, ...] of one step into their columns [T, N, ...].

    Raises:
        ValueError: a row is missing, unknown, or not of the shape and dtype of the first step's.
    """
    if rows.keys() != columns.keys():
        raise ValueError(
            f"policy: further columns {sorted(rows)} at step {step} of a fragment, {sorted(columns)} at its first"
        )
    for name, row in rows.items():
        column = columns[name]
        if row.shape != column.shape[1:] or row.dtype != column.dtype:
            raise ValueError(
                f"policy: {name} of shape {row.shape} and dtype {row.dtype} at step {step} of a fragment, "
                f"{column.shape[1:]} and {column.dtype} at its first"
            )
        column[step] = row
