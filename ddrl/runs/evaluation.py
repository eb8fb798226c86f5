"""Play episodes of fixed seeds with deterministic actions, for a score that can be reproduced exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddrl import envs
from ddrl.algorithms.base import advance, random_choices
from ddrl.config import EnvConfig
from ddrl.envs.frame_stack import FrameStack
from ddrl.policy import LoadedPolicy
from ddrl.types import EnvSpec, EvaluationResult

MAX_STEPS = 27_000  # of an episode, in an environment that names no limit
_ACTION_STREAM = 1  # seeds an episode's random actions, with the episode's seed
_DEFAULT_HZ = 30.0  # of environments that name no frame rate

OnFrame = Callable[[np.ndarray, float], None]


@dataclass
class _Lane:
    """One environment and the episode it is in."""

    env: Any
    index: int = -1  # of the episode's seed
    generator: np.random.Generator = field(default_factory=np.random.default_rng)  # of its random actions


def score(
    loaded: LoadedPolicy,
    seeds: Sequence[int],
    *,
    num_envs: int | None = None,
    epsilon: float | None = None,
    noop_max: int | None = None,
    opponent: str | None = None,
    on_episode: Callable[[int, float, int], None] = lambda seed, episode_return, length: None,
    on_step: Callable[[], None] = lambda: None,
    on_frame: OnFrame | None = None,
) -> EvaluationResult:
    """Play one episode per seed, each from `reset(seed=seed)`, with deterministic actions but for epsilon's share.

    Whole games are played, also where training ends an episode with a lost life. The result does not depend on
    `num_envs`: the policy is called once a step for all episodes in progress, its action for a row does not depend on
    other rows, and each episode draws its random actions from a generator of its own.

    An episode of `evaluation.max_steps` is truncated.

    Args:
        loaded: the policy and what it was trained for. Rewards are scaled only for a recurrent policy's input.
        seeds: one per episode, at least one.
        num_envs: episodes side by side, at least 1; None: as the run's config says. ALE games are played one by one,
            as each environment, like each seeded reset, costs the loading of a ROM.
        epsilon: 0..1, probability that an action is replaced by a uniformly random one; None: the algorithm's.
        noop_max: idle frames at the start of ALE games, at most; None: the run's.
        opponent: the other side of a game of two, as `env.opponent`; None: the run's.
        on_episode: called with (seed, return, length in agent steps) when an episode ends.
        on_step: called before each step; an exception ends the evaluation.
        on_frame: called with each picture of the first seed's episode, uint8 [H, W] or [H, W, 3], and the number of
            pictures a second.

    Raises:
        ValueError: `epsilon` is not a probability.
        EnvError: the environment cannot be made or filmed here, its spaces differ, a return is not finite, or
            `noop_max` is not for it.
    """
    policy, spaces, env = loaded.policy, loaded.spaces, with_options(loaded.env, noop_max, opponent)
    num_envs = loaded.config.evaluation.num_envs if num_envs is None else num_envs
    epsilon = policy.evaluation_epsilon if epsilon is None else epsilon
    if not 0 <= epsilon <= 1:
        raise ValueError(f"score: epsilon is {epsilon}; use 0 to 1")
    max_steps = loaded.config.evaluation.max_steps or spaces.max_episode_steps or MAX_STEPS
    returns, lengths = [0.0] * len(seeds), [0] * len(seeds)
    metrics: list[list[float]] = [[]] * len(seeds)
    waiting = iter(range(len(seeds)))
    film = None if on_frame is None else Film(env, spaces, on_frame)
    lanes: list[_Lane] = []
    try:
        for number in range(1 if is_atari(env) else min(num_envs, len(seeds))):
            lanes.append(_Lane(film.make() if film and number == 0 else envs.make_one(env)))
        envs.check_spaces(lanes[0].env, spaces)
        observation = np.empty((len(lanes), *spaces.observation_shape), spaces.observation_dtype)
        started = np.zeros(len(lanes), np.bool_)
        stack, state = FrameStack(len(lanes), spaces), policy.initial_state(len(lanes))

        def begin(lane: _Lane, row: int) -> bool:
            if (index := next(waiting, None)) is None:
                return False
            lane.index = index
            if epsilon:
                lane.generator = np.random.default_rng([int(seeds[index]), _ACTION_STREAM])
            observation[row] = lane.env.reset(seed=int(seeds[index]))[0]
            started[row] = True
            return True

        playing = [row for row, lane in enumerate(lanes) if begin(lane, row)]
        if film:
            film.take(lanes[0].env, observation[0])
        while playing:
            on_step()
            seen = stack.push(observation, started)[playing]
            started[:] = False
            rows = {name: column[playing] for name, column in state.items()}
            actions = policy.act(seen, rows).copy()
            for place, row in enumerate(playing if epsilon else ()):
                if (generator := lanes[row].generator).random() < epsilon:
                    actions[place] = _random_action(seen[place : place + 1], spaces, generator)
            rewards, ended, still = np.zeros(len(playing)), np.zeros(len(playing), np.bool_), []
            for place, (row, action) in enumerate(zip(playing, actions, strict=True)):
                lane = lanes[row]
                observation[row], reward, terminated, truncated, info = lane.env.step(action)
                returns[lane.index] += float(reward)
                lengths[lane.index] += 1
                if film and lane.index == 0:
                    film.take(lane.env, observation[row])
                rewards[place] = reward
                ended[place] = terminated or truncated or lengths[lane.index] >= max_steps
                if ended[place]:
                    if not math.isfinite(returns[lane.index]):
                        raise envs.EnvError(
                            f"{env.id}: the return from seed {seeds[lane.index]} is {returns[lane.index]}; check the "
                            "environment's rewards and the policy's weights"
                        )
                    metrics[lane.index] = envs.episode_metrics(env, info)
                    on_episode(int(seeds[lane.index]), returns[lane.index], lengths[lane.index])
                    if not begin(lane, row):
                        continue
                still.append(row)
            if state:
                advance(rows, actions, envs.training_reward(env, rewards), ended)
                for name, column in state.items():
                    column[playing] = rows[name]
            playing = still
    finally:
        for lane in lanes:
            lane.env.close()
    by_name = zip(env.metrics, zip(*metrics, strict=True), strict=True)
    found = {name: [value for value in values if math.isfinite(value)] for name, values in by_name}
    return EvaluationResult(tuple(returns), tuple(lengths), found)


def with_options(env: EnvConfig, noop_max: int | None, opponent: str | None) -> EnvConfig:
    """Return the environment with at most `noop_max` idle frames at its start and another opponent; None: as it is.

    Raises:
        EnvError: idle frames are not for it. That an opponent is not for it shows when it is made.
    """
    if opponent is not None:
        env = env.model_copy(update={"opponent": opponent})
    if noop_max is None:
        return env
    if not is_atari(env):
        raise envs.EnvError(f"{env.id}: no-op starts ({noop_max} given) are for ALE games; leave them out")
    return env.model_copy(update={"atari": env.atari.model_copy(update={"noop_max": noop_max})})


def is_atari(env: EnvConfig) -> bool:
    """Return whether it is an ALE game."""
    return envs.requirement(env.id) == "atari"


def _random_action(seen: np.ndarray, spaces: EnvSpec, generator: np.random.Generator) -> Any:
    """Return a uniformly random action at the input [1, *I] of one environment."""
    if spaces.action_kind == "continuous":
        low, high = np.array(spaces.action_low, np.float32), np.array(spaces.action_high, np.float32)
        return generator.uniform(low, high).reshape(spaces.action_shape)
    return random_choices(spaces, seen, generator)[0]


class Film:
    """Takes pictures of an episode: what the environment renders, or its observations if they are images."""

    def __init__(self, env: EnvConfig, spaces: EnvSpec, on_frame: OnFrame) -> None:
        self._env, self._on_frame = env, on_frame
        dtype, shape = spaces.observation_dtype, spaces.observation_shape
        self._is_image = dtype == "uint8" and len(shape) > 1 and shape[2:] in ((), (1,), (3,))
        self._renders, self._hz = False, _DEFAULT_HZ

    def make(self) -> Any:
        """Make the environment, one that renders if it can.

        Raises:
            EnvError: it neither renders nor observes images.
        """
        made = envs.make_one(self._env)
        self._renders = "rgb_array" in made.metadata.get("render_modes", ())
        if self._renders and made.render_mode != "rgb_array":
            made.close()
            made = envs.make_one(self._env, "rgb_array")
        if self._renders:
            self._hz = float(made.metadata.get("render_fps") or _DEFAULT_HZ) / self._env.action_repeat
        elif not self._is_image:
            made.close()
            raise self._error("it has no render_mode rgb_array")
        return made

    def take(self, made: Any, observation: np.ndarray) -> None:
        """Pass on a picture of the current state."""
        picture = observation
        if self._renders:
            try:
                picture = np.asarray(made.render())
            except Exception as error:  # of a user's environment or a drawing library
                raise self._error(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
        if picture.ndim == 3 and picture.shape[2] == 1:
            picture = picture[:, :, 0]
        if picture.dtype != np.uint8 or picture.ndim not in (2, 3):
            raise self._error(f"it renders {picture.dtype} {list(picture.shape)}")
        self._on_frame(picture.copy(), self._hz)

    def _error(self, reason: str) -> envs.EnvError:
        return envs.EnvError(f"{self._env.id}: cannot be filmed ({reason}); leave the video out")
