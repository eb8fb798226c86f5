"""Play a fixed list of seeds with deterministic actions: a score that can be repeated exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ddrl import envs
from ddrl.algorithms.base import RecurrentState, advance
from ddrl.config import EnvConfig
from ddrl.envs.frame_stack import FrameStack
from ddrl.types import EnvSpec, EvaluationResult

_EXPLORING = 1  # with an episode's seed: the stream of its random actions
_USUAL_HZ = 30.0  # of environments that do not say

OnFrame = Callable[[np.ndarray, float], None]


class Policy(Protocol):
    """What an evaluation needs of a policy: a row's action must not depend on the other rows."""

    def initial_state(self, num_envs: int) -> RecurrentState:
        """What is carried from step to step; {} for most policies."""

    def act(self, observation: np.ndarray, state: RecurrentState) -> np.ndarray:
        """The deterministic action: [B, *I] -> [B, *A]; B shrinks as episodes end."""


class _Lane:
    """One environment and the episode it is in."""

    def __init__(self, made: Any) -> None:
        self.env = made
        self.index = -1  # of the episode's seed
        self.episode_return = 0.0
        self.length = 0
        self.generator = np.random.default_rng(0)  # of the episode's random actions


def evaluate(
    policy: Policy,
    env: EnvConfig,
    spaces: EnvSpec,
    seeds: Sequence[int],
    *,
    num_envs: int,
    policy_version: int,
    epsilon: float = 0.0,
    on_episode: Callable[[int, float, int], None] | None = None,
    on_step: Callable[[], None] | None = None,
    on_frame: OnFrame | None = None,
) -> EvaluationResult:
    """Play one episode per seed, each from `reset(seed=seed)`, by deterministic actions but for epsilon's share.

    Whole games are played, whatever training does about lost lives. The result does not depend on `num_envs`: up to
    that many episodes go side by side, one call of the policy per step for all that still play, and random actions
    are drawn for each episode by itself.

    Args:
        policy: has its weights loaded.
        env: what is played; its `num_envs` is not used, and rewards are scaled for the policy's memory only.
        spaces: of the environment, as the policy knows them.
        seeds: one per episode, at least one.
        num_envs: episodes side by side, at least 1; more amortise the policy.
        policy_version: goes into the result.
        epsilon: 0..1, probability that an action is a uniformly random one instead.
        on_episode: called after each episode, in order of ending, with (seed, return, length in agent steps).
        on_step: called before each step of all that play; what it raises ends the evaluation.
        on_frame: called with each picture of the first seed's episode, uint8 [H, W] or [H, W, 3], and how many of
            them make a second.

    Raises:
        ValueError: no seeds, `num_envs` below 1, or `epsilon` is no probability.
        EnvError: the environment cannot be made or filmed here, or its spaces are others.
    """
    if not seeds:
        raise ValueError("evaluate: no seeds; give one per episode")
    if num_envs < 1:
        raise ValueError(f"evaluate: num_envs is {num_envs}; use 1 or more")
    if not 0 <= epsilon <= 1:
        raise ValueError(f"evaluate: epsilon is {epsilon}; use 0 to 1")
    returns, lengths = [0.0] * len(seeds), [0] * len(seeds)
    waiting = iter(range(len(seeds)))
    film = None if on_frame is None else _Film(env, spaces, on_frame)
    lanes: list[_Lane] = []
    try:
        for number in range(min(num_envs, len(seeds))):
            lanes.append(_Lane(film.make() if film and number == 0 else envs.make_one(env)))
        envs.check_spaces(lanes[0].env, spaces)
        observation = np.empty((len(lanes), *spaces.observation_shape), spaces.observation_dtype)
        started = np.zeros(len(lanes), np.bool_)
        stack, state = FrameStack(len(lanes), spaces), policy.initial_state(len(lanes))

        def begin(lane: _Lane, row: int) -> bool:
            index = next(waiting, None)
            if index is None:
                return False
            lane.index, lane.episode_return, lane.length = index, 0.0, 0
            if epsilon:
                lane.generator = np.random.default_rng([int(seeds[index]), _EXPLORING])
            observation[row] = lane.env.reset(seed=int(seeds[index]))[0]
            started[row] = True
            return True

        playing = [row for row, lane in enumerate(lanes) if begin(lane, row)]
        if film:
            film.take(lanes[0].env, observation[0])
        while playing:
            if on_step is not None:
                on_step()
            seen = stack.push(observation, started)[playing]
            started[:] = False
            rows = {name: column[playing] for name, column in state.items()}
            actions = policy.act(seen, rows)
            if epsilon:
                actions = _mixed(actions, [lanes[row].generator for row in playing], epsilon, spaces)
            rewards, ended, still = np.zeros(len(playing)), np.zeros(len(playing), np.bool_), []
            for place, (row, action) in enumerate(zip(playing, actions, strict=True)):
                lane = lanes[row]
                observation[row], reward, terminated, truncated, _ = lane.env.step(action)
                lane.episode_return += float(reward)
                lane.length += 1
                if film and lane.index == 0:
                    film.take(lane.env, observation[row])
                rewards[place], ended[place] = reward, terminated or truncated
                if ended[place]:
                    returns[lane.index], lengths[lane.index] = lane.episode_return, lane.length
                    if on_episode is not None:
                        on_episode(int(seeds[lane.index]), lane.episode_return, lane.length)
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
    return EvaluationResult(policy_version, tuple(int(s) for s in seeds), tuple(returns), tuple(lengths))


def with_noops(env: EnvConfig, noop_max: int | None) -> EnvConfig:
    """The same ALE game with another number of idle frames at its start; None leaves it as it is.

    Raises:
        EnvError: it is no ALE game.
    """
    if noop_max is None:
        return env
    if not is_atari(env):
        raise envs.EnvError(f"{env.id}: no-op starts ({noop_max} given) are for ALE games; leave them out")
    return env.model_copy(update={"atari": env.atari.model_copy(update={"noop_max": noop_max})})


def is_atari(env: EnvConfig) -> bool:
    """Whether it is an ALE game."""
    return envs.requirement(env.id) == "atari"


def _mixed(
    actions: np.ndarray, generators: Sequence[np.random.Generator], epsilon: float, spaces: EnvSpec
) -> np.ndarray:
    """Actions [B, *A], each replaced by a uniformly random one with probability epsilon, by a generator of its own."""
    mixed = actions.copy()
    for place, generator in enumerate(generators):
        if generator.random() < epsilon:
            mixed[place] = _random_action(generator, spaces)
    return mixed


def _random_action(generator: np.random.Generator, spaces: EnvSpec) -> np.ndarray:
    """[*A] uniformly within the bounds, or of the choices."""
    if spaces.action_kind == "continuous":
        low, high = np.array(spaces.action_low, np.float32), np.array(spaces.action_high, np.float32)
        return generator.uniform(low, high).astype(np.float32).reshape(spaces.action_shape)
    return generator.integers(spaces.action_sizes).reshape(spaces.action_shape)


class _Film:
    """Pictures of an episode: what the environment renders, or its observations where these are images."""

    def __init__(self, env: EnvConfig, spaces: EnvSpec, on_frame: OnFrame) -> None:
        self._env, self._on_frame = env, on_frame
        shape = spaces.observation_shape
        self._is_image = spaces.observation_dtype == "uint8" and (
            len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
        )
        self._renders = False
        self._hz = _USUAL_HZ

    def make(self) -> Any:
        """The environment, one that renders where it can; EnvError where there would be nothing to see."""
        made = envs.make_one(self._env)
        self._renders = "rgb_array" in made.metadata.get("render_modes", ())
        if self._renders and made.render_mode != "rgb_array":
            made.close()
            kwargs = {**self._env.kwargs, "render_mode": "rgb_array"}
            made = envs.make_one(self._env.model_copy(update={"kwargs": kwargs}))
        if self._renders:
            self._hz = float(made.metadata.get("render_fps") or _USUAL_HZ) / self._env.action_repeat
        elif not self._is_image:
            made.close()
            raise envs.EnvError(
                f"{self._env.id}: cannot be filmed, it has no render_mode rgb_array; leave the video out"
            )
        return made

    def take(self, made: Any, observation: np.ndarray) -> None:
        """Hand the picture of now over."""
        picture = observation
        if self._renders:
            try:
                picture = np.asarray(made.render())
            except Exception as error:  # whatever a user's or a drawing library raises
                reason = " ".join(str(error).split())
                raise envs.EnvError(
                    f"{self._env.id}: cannot be filmed ({type(error).__name__}: {reason}); leave the video out"
                ) from None
        if picture.ndim == 3 and picture.shape[2] == 1:
            picture = picture[:, :, 0]
        if picture.dtype != np.uint8 or picture.ndim not in (2, 3):
            raise envs.EnvError(
                f"{self._env.id}: cannot be filmed, it renders {picture.dtype} {list(picture.shape)}; "
                "leave the video out"
            )
        self._on_frame(picture.copy(), self._hz)
