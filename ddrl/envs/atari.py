"""ALE games in ale-py's own vector environment, with the standard protocol (`config.AtariConfig`).

An episode begins with 0 to `noop_max` no-op frames. In games with a FIRE button, `fire_reset` presses it instead of the
first no-op, of which there is at least one then, and in place of the first action after a lost life, as some games
wait for it (Breakout serves no ball before). Each action is held for `frame_skip` frames; the grey maximum of the
last two is scaled to a square. Rewards are the game's own: `training_reward` clips them. The game goes on after a lost
life, which is only reported.
Source: Mnih et al. 2015; Machado et al. 2018, arXiv:1709.06009 (sticky actions).

Two defects of ale-py 0.12 are corrected here: the last frame of an episode that it truncates is stale, and its
`noop_max` excludes the bound. A third one is not: a seed takes effect as the ROM is loaded, which takes 110 ms, 90 of
them for tables of blended colors that nobody asked for. So a lane is seeded once, except by an evaluation.

Imports gymnasium and ale_py: import this inside functions only.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import ale_py
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from ddrl.config import AtariConfig
from ddrl.envs.requirements import EnvError, unknown

_NEVER = 2**30  # frames; ale-py's own limit, which does not show the true last frame
_SEED_MASK = 2**31 - 1  # ale-py takes seeds in [0, 2^31); a negative one is none
_SCREEN = (210, 160)  # height and width of rendered pictures: the console's


def rom_of(env_id: str) -> str:
    """Return the ROM of a game in ale-py's registry: "ALE/WizardOfWor-v5" -> "wizard_of_wor".

    Raises:
        EnvError: no such game; the message suggests near names.
    """
    gymnasium.register_envs(ale_py)
    if not env_id.startswith("ALE/") or (spec := gymnasium.registry.get(env_id)) is None:
        raise unknown(env_id)
    return str(spec.kwargs["game"])


class AtariVector:
    """N games side by side, stepped by one thread; autoreset in the same step.

    Lanes depend neither on each other nor on N. Arrays that it returns are not overwritten later.

    Args:
        env_id: such as "ALE/Asterix-v5".
        atari: the protocol.
        num_envs: N.
        in_color: observe the screen as people see it, [210, 160, 3], instead of the gray square.

    Raises:
        EnvError: no such game.
    """

    def __init__(self, env_id: str, atari: AtariConfig, num_envs: int, *, in_color: bool = False) -> None:
        height, width = _SCREEN if in_color else (atari.screen_size, atari.screen_size)
        self._games = AtariVectorEnv(
            rom_of(env_id),
            num_envs=num_envs,
            num_threads=1,  # a rollout process has one core
            autoreset_mode=AutoresetMode.SAME_STEP,
            max_num_frames_per_episode=_NEVER,
            repeat_action_probability=atari.sticky,
            full_action_space=atari.full_actions,
            img_height=height,
            img_width=width,
            grayscale=not in_color,
            stack_num=1,
            frameskip=atari.frame_skip,
            maxpool=True,
            noop_max=atari.noop_max + 1,  # its own draw excludes the bound
            use_fire_reset=atari.fire_reset,
            episodic_life=False,
            reward_clipping=False,
        )
        self.num_envs = num_envs
        self.single_observation_space = Box(0, 255, (height, width, 3)[: 2 + in_color], np.uint8)
        self.single_action_space = self._games.single_action_space
        self._num_actions = int(self.single_action_space.n)  # type: ignore[attr-defined]
        actions = [action.name for action in self._games.ale.get_action_set()]
        self._fire = actions.index("FIRE") if atari.fire_reset and "FIRE" in actions else None
        self._episodic_life = atari.episodic_life
        self._max_steps = -(-atari.max_frames // atari.frame_skip)
        self._steps = np.zeros(num_envs, np.int64)  # of the episode each lane is in
        self._lives = np.zeros(num_envs, np.int64)
        self._has_lost_life = np.zeros(num_envs, np.bool_)  # in the last step, inside a game
        # [N], from which the games that go on began; -1: with the random numbers that the one before left.
        self.reset_seeds = np.full(num_envs, -1, np.int64)

    def reset(self, *, seed: Sequence[int] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode in every lane.

        Args:
            seed: one for each lane, which determines everything after it; None: the random numbers go on.

        Returns:
            [N, H, W] uint8 first observations, and no info.
        """
        seeds = None if seed is None else np.array([one & _SEED_MASK for one in seed], np.int64)
        observation, info = self._games.reset(seed=seeds)
        self.reset_seeds[:] = -1 if seeds is None else seeds
        self._steps[:], self._lives, self._has_lost_life[:] = 0, info["lives"], False
        return observation[:, 0], {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Take one agent step in each lane.

        Args:
            actions: [N] int64.

        Returns:
            [N, H, W] uint8 observations, of a new episode where one ended; [N] float64 rewards; [N] bool terminated;
            [N] bool truncated; and info: with `episodic_life` `life_lost`, [N] bool, a life lost inside a game; and if
            an episode ended `final_obs`, [N, H, W], the true last observations.

        Raises:
            ValueError: not one known action for each lane.
        """
        # ale-py would wait forever for the lane that an unknown action stops.
        if actions.shape != (self.num_envs,) or actions.min() < 0 or actions.max() >= self._num_actions:
            raise ValueError(
                f"actions: {actions.tolist()}; expected {self.num_envs} numbers from 0 to {self._num_actions - 1}"
            )
        if self._fire is not None:
            actions = np.where(self._has_lost_life, self._fire, actions)
        observation, reward, terminated, _, info = self._games.step(actions)
        further = {}
        self._steps += 1
        truncated = (self._steps >= self._max_steps) & ~terminated
        ended = terminated | truncated
        if ended.any():
            further["final_obs"] = observation[:, 0].copy()
        if terminated.any():
            further["final_obs"][terminated] = info["final_obs"][terminated, 0]
        if truncated.any():
            observation, info = self._games.reset(options={"reset_mask": truncated})
        lives = info["lives"]
        # Some games go on for a moment with 0 lives: the last life ends with the game.
        self._has_lost_life = (lives < self._lives) & (lives > 0) & ~ended
        if self._episodic_life:
            further["life_lost"] = self._has_lost_life
        self._steps[ended], self.reset_seeds[ended], self._lives = 0, -1, lives
        return observation[:, 0], reward.astype(np.float64), terminated, truncated, further

    def close(self) -> None:
        """Close the games."""
        self._games.close()


class AtariEnv(gymnasium.Env[np.ndarray, np.int64]):
    """A lane of `AtariVector` as an environment of its own; an episode is a whole game despite `episodic_life`.

    Args:
        env_id: such as "ALE/Asterix-v5".
        atari: the protocol.
        render_mode: "rgb_array" plays the same game in color beside it, for `render`.

    Raises:
        EnvError: no such game, or another render mode.
    """

    def __init__(self, env_id: str, atari: AtariConfig, render_mode: str | None = None) -> None:
        if render_mode not in (None, "rgb_array"):
            raise EnvError(f"{env_id}: render_mode is {render_mode}; ALE games have only rgb_array")
        self._games = [AtariVector(env_id, atari, 1)]
        self.observation_space = self._games[0].single_observation_space
        self.action_space = self._games[0].single_action_space
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": max(1, 60 // atari.frame_skip)}
        self.render_mode = render_mode
        if render_mode is not None:
            self._games.append(AtariVector(env_id, atari, 1, in_color=True))
            self.reset(seed=secrets.randbits(31))  # the same random numbers in both from here on

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game, [H, W] uint8; a seed determines everything after it."""
        super().reset(seed=seed)
        self._frames = [game.reset(seed=None if seed is None else [seed])[0][0] for game in self._games]
        return self._frames[0], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one agent step.

        Raises:
            ValueError: the game has no such action.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"action: {action}; expected one of {self.action_space}")
        steps = [game.step(np.array([action], np.int64)) for game in self._games]
        self._frames = [info.get("final_obs", observation)[0] for observation, *_, info in steps]
        _, reward, terminated, truncated, _ = steps[0]
        return self._frames[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> np.ndarray | None:
        """Return the screen in the game's colors, [210, 160, 3] uint8; None without a render mode."""
        return None if self.render_mode is None else self._frames[1]

    def close(self) -> None:
        """Close the game."""
        for game in self._games:
            game.close()
