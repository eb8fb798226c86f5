"""Environments and a policy, stepped together: N environments play, a `Recorder` turns the steps into fragments.

Knows neither Redis nor Celery. The loop in `collect` is the hot path of a rollout worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddrl import envs
from ddrl.algorithms.base import Policy, advance
from ddrl.config import EnvConfig, RolloutConfig
from ddrl.envs.frame_stack import FrameStack
from ddrl.types import EnvSpec, Fragment, SequenceShape
from ddrl.worker.recorder import Recorder

_FIRST_STEPS = 16  # T of the first fragment, before the speed is known
_MAX_CHANGE = 4  # T grows and shrinks by at most this factor at a time
_MAX_FRAGMENT_BYTES = 64 * 1024**2  # of uncompressed observations
_ENV_BYTES = 256 * 1024  # a rough guess at the memory of one environment

Actions = tuple[np.ndarray, Mapping[str, np.ndarray]]
"""[N, *A] actions, and extras [N, ...] by name."""


class Collector:
    """One producer: N environments whose episodes go on from fragment to fragment.

    Do not use it again after `collect` raised: its environments may have moved on without a fragment.

    Args:
        run: id of the run.
        producer: id from INCR; seeds environments and exploration together with `seed` and `incarnation`.
        incarnation: random token >= 0 of this process.
        env: what is played, in `env.num_envs` environments.
        rollout: length of fragments and noise on actions; its `random_until_learned` is not used.
        spec: the spaces as the learner knows them.
        policy: chooses actions, and may return extras with them.
        random_until_learned: version 0 plays uniformly random actions, without extras.
        seed: the run's seed.
        context: most steps that a fragment repeats of those before.
        sequences: of a recurrent policy; T is a multiple of their stride.
        on_step: called after each step of the environments, as a heartbeat.

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
        self._env, self._rollout, self._spec, self._policy = env, rollout, spec, policy
        self._random_until_learned, self._on_step = random_until_learned, on_step
        self._stride = sequences.stride if sequences else 1
        self._version, self._weights_bytes = -1, 0

        env_seeds, action_seeds = np.random.SeedSequence([seed, producer, incarnation]).spawn(2)
        self._generator = np.random.default_rng(action_seeds)
        self._vector = envs.make_vector(env)
        try:
            envs.check_spaces(self._vector, spec)
        except envs.EnvError:
            self._vector.close()
            raise
        self._num_envs = num_envs = self._vector.num_envs
        self._action_shape = (num_envs, *spec.action_shape)
        bounds = spec.action_shape if spec.action_kind == "continuous" else (0,)
        self._low = np.array(spec.action_low, np.float64).reshape(bounds)
        self._high = np.array(spec.action_high, np.float64).reshape(bounds)
        self._noise = ((self._high - self._low) * (0.5 * rollout.action_noise)).astype(np.float32)

        first, _ = self._vector.reset(seed=[int(s) for s in env_seeds.generate_state(num_envs)])
        observation = np.array(first, spec.observation_dtype)
        self._stack = FrameStack(num_envs, spec)
        self._input = self._stack.push(observation, np.ones(num_envs, np.bool_))  # [N, *I]
        self._state = policy.initial_state(num_envs)
        self._recorder = Recorder(
            run=run,
            producer=producer,
            incarnation=incarnation,
            env=env,
            spec=spec,
            observation=observation,
            context=context,
            sequences=sequences,
        )
        most = _MAX_FRAGMENT_BYTES // max(1, observation.nbytes)
        self._max_steps = max(1, min(rollout.max_fragment_steps, most))
        self._steps = min(_FIRST_STEPS, self._max_steps)  # T of the next fragment

    @property
    def version(self) -> int:
        """Version of the weights that play; -1 before the first `load`."""
        return self._version

    @property
    def num_bytes(self) -> int:
        """Rough memory held between fragments."""
        stack = 2 * self._input.nbytes  # the room of `FrameStack`
        state = sum(array.nbytes for array in self._state.values())
        return self._num_envs * _ENV_BYTES + stack + state + self._recorder.num_bytes + self._weights_bytes

    def load(self, version: int, weights: Mapping[str, Any]) -> None:
        """Play with these weights from the next fragment on."""
        self._policy.load(weights)
        self._weights_bytes = sum(array.nbytes for array in weights.values())
        self._version = version

    def close(self) -> None:
        """Close the environments."""
        self._vector.close()

    def collect(self, *, max_steps: int | None = None, stop_at: float | None = None) -> Fragment:
        """Play one fragment with the current version.

        Args:
            max_steps: upper bound of T, rounded up to the stride of sequences; at least one step is played.
            stop_at: `time.monotonic()` after which no further step begins, with sequences no further stride; at least
                one is played.

        Raises:
            RuntimeError: no weights are loaded.
            ValueError: the policy returned actions or extras of a wrong shape.
        """
        if self._version < 0:
            raise RuntimeError("collect: no weights loaded; call load first")
        is_random = self._version == 0 and self._random_until_learned
        choose = self._random_actions if is_random else self._policy_actions
        recorder, limit = self._recorder, self._limit(max_steps)
        recorder.begin(limit)
        started = time.perf_counter()
        for played in range(1, limit + 1):
            recorder.add_state(self._state)
            action, extras = choose()
            observation, reward, terminated, truncated, info = self._vector.step(action)
            if self._on_step is not None:
                self._on_step()
            observation, ended = recorder.add_step(
                action, extras, observation, reward, terminated, truncated, info
            )
            self._input = self._stack.push(observation, ended)
            if self._state:
                advance(self._state, action, envs.training_reward(self._env, reward), ended)
            if stop_at is not None and played % self._stride == 0 and time.monotonic() >= stop_at:
                break
        self._adapt((time.perf_counter() - started) / played)
        return recorder.end(self._version)

    def _random_actions(self) -> Actions:
        """Uniformly random actions, within the bounds where there are some."""
        if self._spec.action_kind != "continuous":
            sizes = np.array(self._spec.action_sizes, np.int64).reshape(self._spec.action_shape)
            return self._generator.integers(sizes, size=self._action_shape), {}
        share = self._generator.random(self._action_shape)
        return (self._low + (self._high - self._low) * share).astype(np.float32), {}

    def _policy_actions(self) -> Actions:
        """The policy's exploring actions, with clipped Gaussian noise where configured, and its extras."""
        action, extras = self._policy.explore(self._input, self._generator, self._state)
        if action.shape != self._action_shape:
            raise ValueError(f"policy: actions of shape {action.shape}, expected {self._action_shape}")
        if self._spec.action_kind != "continuous":
            return action.astype(np.int64, copy=False), extras
        if self._noise.any():
            noise = self._noise * self._generator.standard_normal(action.shape, np.float32)
            action = np.clip(action + noise, self._low.astype(np.float32), self._high.astype(np.float32))
        return action.astype(np.float32, copy=False), extras

    def _limit(self, max_steps: int | None) -> int:
        """Upper bound of the next T: a multiple of the stride, rounded up."""
        limit = self._steps if max_steps is None else max(1, min(self._steps, max_steps))
        return math.ceil(limit / self._stride) * self._stride

    def _adapt(self, step_s: float) -> None:
        """Choose the next T so that a fragment takes about `rollout.fragment_s` at `step_s` a step."""
        wanted = self._rollout.fragment_s / max(step_s, 1e-9)
        lowest, highest = math.ceil(self._steps / _MAX_CHANGE), self._steps * _MAX_CHANGE
        self._steps = int(min(max(wanted, lowest, 1), highest, self._max_steps))
