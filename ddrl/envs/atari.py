"""ALE games in ale-py's own vector environment, with the standard protocol (`config.AtariConfig`).

An episode begins with 0 to `noop_max` no-op frames. In games with a FIRE button, `fire_reset` presses it instead of the
first no-op, of which there is at least one then. Each action is held for `frame_skip` frames; the grey maximum of the
last two is scaled to a square. Rewards are the game's own: `training_reward` clips them. The game goes on after a lost
life, which is only reported.
Source: Mnih et al. 2015; Machado et al. 2018, arXiv:1709.06009 (sticky actions).

Two defects of ale-py 0.12 are corrected here: the last frame of an episode that it truncates is stale, and its
`noop_max` excludes the bound.

Imports gymnasium and ale_py: import this inside functions only.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import ale_py
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from ddrl.config import AtariConfig
from ddrl.envs.requirements import EnvError

_NEVER = 2**30  # frames; ale-py's own limit, which does not show the true last frame
_SEED_MASK = 2**31 - 1  # ale-py takes seeds in [0, 2^31); a negative one is none
_ENLARGED = 4  # rendered pixels along a side for one that the agent sees


def rom_of(env_id: str) -> str:
    """Return the ROM of a game in ale-py's registry: "ALE/WizardOfWor-v5" -> "wizard_of_wor".

    Raises:
        EnvError: no such game; the message suggests near names.
    """
    gymnasium.register_envs(ale_py)
    games = {name: spec for name, spec in gymnasium.registry.items() if name.startswith("ALE/")}
    if env_id in games:
        return str(games[env_id].kwargs["game"])
    near = difflib.get_close_matches(env_id, games, n=3, cutoff=0.75)
    hint = f"did you mean {' or '.join(near)}?" if near else "games are named as in ALE/Asterix-v5"
    raise EnvError(f"{env_id}: no such game; {hint}")


class AtariVector:
    """N games side by side, stepped by one thread; autoreset in the same step.

    Lanes depend neither on each other nor on N. Arrays that it returns are not overwritten later.

    Args:
        env_id: such as "ALE/Asterix-v5".
        atari: the protocol.
        num_envs: N.

    Raises:
        EnvError: no such game.
    """

    def __init__(self, env_id: str, atari: AtariConfig, num_envs: int) -> None:
        self._games = AtariVectorEnv(
            rom_of(env_id),
            num_envs=num_envs,
            num_threads=1,  # a rollout process has one core
            autoreset_mode=AutoresetMode.SAME_STEP,
            max_num_frames_per_episode=_NEVER,
            repeat_action_probability=atari.sticky,
            full_action_space=atari.full_actions,
            img_height=atari.screen_size,
            img_width=atari.screen_size,
            stack_num=1,
            frameskip=atari.frame_skip,
            maxpool=True,
            noop_max=atari.noop_max + 1,  # its own draw excludes the bound
            use_fire_reset=atari.fire_reset,
            episodic_life=False,
            reward_clipping=False,
        )
        self.num_envs = num_envs
        self.single_observation_space = Box(0, 255, (atari.screen_size, atari.screen_size), np.uint8)
        self.single_action_space = self._games.single_action_space
        self._num_actions = int(self.single_action_space.n)  # type: ignore[attr-defined]
        self._episodic_life = atari.episodic_life
        self._max_steps = -(-atari.max_frames // atari.frame_skip)
        self._steps = np.zeros(num_envs, np.int64)  # of the episode each lane is in
        self._lives = np.zeros(num_envs, np.int64)

    def reset(self, *, seed: Sequence[int] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode in every lane.

        Args:
            seed: one for each lane, which determines everything after it; None: the random numbers go on.

        Returns:
            [N, H, W] uint8 first observations, and no info.
        """
        seeds = None if seed is None else np.array([one & _SEED_MASK for one in seed], np.int64)
        observation, info = self._games.reset(seed=seeds)
        self._steps[:], self._lives = 0, info["lives"]
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
        observation, reward, terminated, _, info = self._games.step(actions)
        further = {}
        self._steps += 1
        truncated = (self._steps >= self._max_steps) & ~terminated
        ended = terminated | truncated
        if terminated.any():
            final = np.where(terminated[:, None, None, None], info["final_obs"], observation)
            further["final_obs"] = final[:, 0]
        elif truncated.any():
            further["final_obs"] = observation[:, 0]
        if truncated.any():
            observation, info = self._games.reset(options={"reset_mask": truncated})
        lives = info["lives"]
        if self._episodic_life:
            # Some games go on for a moment with 0 lives: the last life ends with the game.
            further["life_lost"] = (lives < self._lives) & (lives > 0) & ~ended
        self._steps[ended], self._lives = 0, lives
        return observation[:, 0], reward.astype(np.float64), terminated, truncated, further

    def close(self) -> None:
        """Close the games."""
        self._games.close()


class AtariEnv(gymnasium.Env[np.ndarray, np.int64]):
    """A lane of `AtariVector` as an environment of its own; an episode is a whole game despite `episodic_life`.

    Args:
        env_id: such as "ALE/Asterix-v5".
        atari: the protocol.

    Raises:
        EnvError: no such game.
    """

    def __init__(self, env_id: str, atari: AtariConfig) -> None:
        self._vector = AtariVector(env_id, atari, 1)
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": max(1, 60 // atari.frame_skip)}
        self.render_mode = "rgb_array"
        self._frame = np.zeros(self.observation_space.shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game, [H, W] uint8; a seed determines everything after it."""
        super().reset(seed=seed)
        observation, _ = self._vector.reset(seed=None if seed is None else [seed])
        self._frame = observation[0]
        return self._frame, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one agent step.

        Raises:
            ValueError: the game has no such action.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"action: {action}; expected one of {self.action_space}")
        observation, reward, terminated, truncated, info = self._vector.step(np.array([action], np.int64))
        self._frame = info.get("final_obs", observation)[0]
        return self._frame, float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> np.ndarray:
        """Return the newest observation, enlarged, [4H, 4W, 3] uint8."""
        enlarged = self._frame.repeat(_ENLARGED, axis=0).repeat(_ENLARGED, axis=1)
        return np.repeat(enlarged[:, :, None], 3, axis=2)

    def close(self) -> None:
        """Close the game."""
        self._vector.close()
