"""Play N environments with a policy; a `Recorder` turns the steps into fragments.

Knows neither Redis nor Celery. The loop in `collect` is the hot path of a rollout worker.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ddrl import envs
from ddrl.algorithms.base import Resolved, advance, random_choices
from ddrl.config import RunConfig
from ddrl.envs.frame_stack import FrameStack
from ddrl.types import Fragment
from ddrl.worker.noise import drifting_uniform
from ddrl.worker.opponents import Opponents
from ddrl.worker.recorder import Recorder

_FIRST_STEPS = 16  # T of the first fragment, before the speed is known
_MAX_CHANGE = 4  # T grows and shrinks by at most this factor at a time
_HINDSIGHT_STEPS = 50  # T where goals are those that a fragment reached, unless that takes too long
_HINDSIGHT_S = 30.0
_MAX_FRAGMENT_BYTES = 64 * 1024**2  # of uncompressed observations
_ENV_BYTES = 256 * 1024  # a rough guess at the memory of one environment

Actions = tuple[np.ndarray, Mapping[str, np.ndarray]]
"""[N, *A] actions, and extras [N, ...] by name."""


class Collector:
    """One producer: N environments whose episodes go on from fragment to fragment.

    Do not use it again after `collect` raised: its environments may have moved on without a fragment.

    Args:
        run: id of the run.
        producer: id from the server's counter; with the run's seed and `incarnation` it seeds environments and
            exploration.
        incarnation: random token >= 0 of this process.
        config: of the run: the environment, the length of fragments, the noise on actions, the seed.
        resolved: the run's algorithm: its policy, the spaces as the learner knows them, and what a fragment repeats
            of the steps before. With sequences T is a multiple of their stride.
        random_until_learned: under version 0, play uniformly random actions, without extras. The run's config may
            leave this open (None).
        on_step: called after each step of the environments; it feeds the watchdog.

    Attributes:
        opponents: of a game of two players; None: it is no such game.

    Raises:
        EnvError: the environment cannot be made here, or its spaces are not those of `resolved`.
    """

    def __init__(
        self,
        *,
        run: str,
        producer: int,
        incarnation: int,
        config: RunConfig,
        resolved: Resolved,
        random_until_learned: bool,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._env, self._rollout, self._spec = config.env, config.rollout, resolved.spec
        self._random_until_learned, self._on_step = random_until_learned, on_step
        self._policy = resolved.policy(producer=producer)
        self.version = -1
        """Version of the weights that play; -1 before the first `load`."""
        self._weights_bytes = 0

        env_seeds, action_seeds = np.random.SeedSequence([config.seed, producer, incarnation]).spawn(2)
        self._generator = np.random.default_rng(action_seeds)
        self._vector = envs.make_vector(config.env)
        try:
            envs.check_spaces(self._vector, self._spec)
        except envs.EnvError:
            self._vector.close()
            raise
        self._num_envs = num_envs = self._vector.num_envs
        self._action_shape = (num_envs, *self._spec.action_shape)
        if self._spec.action_kind == "continuous":
            bounds = np.array([self._spec.action_low, self._spec.action_high], np.float64)
            self._low, self._high = bounds.reshape(2, *self._spec.action_shape)
            self._uniform = drifting_uniform(self._action_shape, self._generator)
            self._noise = ((self._high - self._low) * (0.5 * self._rollout.action_noise)).astype(np.float32)

        first, _ = self._vector.reset(seed=[int(s) for s in env_seeds.generate_state(num_envs)])
        observation = np.array(first, self._spec.observation_dtype)
        self._stack = FrameStack(num_envs, self._spec)
        self._input = self._stack.push(observation, np.ones(num_envs, np.bool_))  # [N, *I]
        self._state = self._policy.initial_state(num_envs)
        identity = {"run": run, "producer": producer, "incarnation": incarnation}
        identity |= {"host": socket.gethostname()}
        self.opponents: Opponents | None = None
        if self._spec.is_two_player:
            make = partial(resolved.policy, producer=producer)
            self.opponents = Opponents(config.self_play, make, self._generator)
            for env in getattr(self._vector, "envs", ()):
                if (game := envs.two_player_game(env)) is not None:
                    options = config.self_play.model_dump(include={"opponent_share", "opening_moves"})
                    game.play_against(self._next_opponent, **options)
        self._recorder = Recorder(identity, config.env, resolved, observation, self._vector.reset_seeds)
        self._stride = resolved.sequences.stride if resolved.sequences else 1
        most = _MAX_FRAGMENT_BYTES // max(1, observation.nbytes)
        self._longest = max(1, min(self._rollout.max_fragment_steps, most))
        self._shortest = min(_HINDSIGHT_STEPS, self._longest) if config.replay.hindsight else 1
        self._num_steps = max(self._shortest, min(_FIRST_STEPS, self._longest))  # T of the next fragment

    @property
    def num_bytes(self) -> int:
        """Rough memory held between fragments."""
        stack = 2 * self._input.nbytes  # the buffer of `FrameStack` holds two stacks
        state = sum(array.nbytes for array in self._state.values())
        return self._num_envs * _ENV_BYTES + stack + state + self._recorder.num_bytes + self._weights_bytes

    def load(self, version: int, weights: Mapping[str, Any]) -> None:
        """Play with these weights from the next fragment on."""
        self._policy.load(weights)
        self._weights_bytes = sum(array.nbytes for array in weights.values())
        self.version = version

    def _next_opponent(self) -> tuple[int, Callable[[np.ndarray], Any]]:
        """Return the version and the opponent of a new game, which explores as the policy does."""
        assert self.opponents is not None
        version, policy = self.opponents.draw(self.version, self._policy)
        return version, lambda seen: policy.explore(seen[None], self._generator)[0][0]

    def close(self) -> None:
        """Close the environments."""
        self._vector.close()

    def collect(self, *, max_steps: int | None = None, stop_at: float | None = None) -> Fragment:
        """Play one fragment with the current version; call `load` before.

        Args:
            max_steps: about the most steps to play: rounded up to a whole stride, at least 1, or 50 with hindsight.
            stop_at: deadline by `time.monotonic()`: stop after the current step, or current stride with sequences; 30 s
                later before those 50 steps.

        Raises:
            ValueError: the policy returned actions or extras of a wrong shape.
        """
        is_random = self.version == 0 and self._random_until_learned
        choose = self._random_actions if is_random else self._policy_actions
        most = self._num_steps if max_steps is None else min(self._num_steps, max_steps)
        most = max(most, self._shortest)
        most = math.ceil(most / self._stride) * self._stride
        recorder = self._recorder
        recorder.begin(most)
        started = time.perf_counter()
        for played in range(1, most + 1):
            recorder.add_state(self._state)
            action, extras = choose()
            outcome = self._vector.step(action)
            self._on_step()
            observation, ended = recorder.add_step(action, extras, outcome)
            self._input = self._stack.push(observation, ended)
            if self._state:
                advance(self._state, action, envs.training_reward(self._env, outcome[1]), ended)
            late_s = _HINDSIGHT_S if played < self._shortest else 0.0
            if stop_at is not None and played % self._stride == 0 and time.monotonic() >= stop_at + late_s:
                break
        self._adapt((time.perf_counter() - started) / played)
        return recorder.end(self.version)

    def _random_actions(self) -> Actions:
        """Return random actions: uniform over the allowed choices, or within the bounds, where they drift."""
        if self._spec.action_kind != "continuous":
            return random_choices(self._spec, self._input, self._generator), {}
        share = next(self._uniform)
        return (self._low + (self._high - self._low) * share).astype(np.float32), {}

    def _policy_actions(self) -> Actions:
        """Return exploring actions, plus Gaussian noise if configured, clipped to the bounds; and the extras."""
        action, extras = self._policy.explore(self._input, self._generator, self._state)
        if action.shape != self._action_shape:
            raise ValueError(f"policy: actions of shape {action.shape}, expected {self._action_shape}")
        if self._spec.action_kind != "continuous":
            return action.astype(np.int64, copy=False), extras
        if self._noise.any():
            noise = self._noise * self._generator.standard_normal(action.shape, np.float32)
            action = np.clip(action + noise, self._low.astype(np.float32), self._high.astype(np.float32))
        return action.astype(np.float32, copy=False), extras

    def _adapt(self, step_s: float) -> None:
        """Choose the next T so that a fragment takes about `rollout.fragment_s` at `step_s` a step."""
        wanted = self._rollout.fragment_s / max(step_s, 1e-9)
        lowest, highest = math.ceil(self._num_steps / _MAX_CHANGE), self._num_steps * _MAX_CHANGE
        self._num_steps = int(min(max(wanted, lowest, self._shortest), highest, self._longest))
