"""Games of two players, by PettingZoo's API, as environments of one: an opponent's moves are part of a step.

The player's side is drawn at each reset. Rewards are the player's own. Imports gymnasium: import this inside functions
only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, flatdim, flatten

from ddrl.config import OPPONENT
from ddrl.envs.requirements import EnvError
from ddrl.envs.wrappers import MASK, is_image

Opponent = Callable[[Any, np.random.Generator], Any]
"""Returns an action for what the game shows the other side, as PettingZoo's `observe` returns it."""

Draw = Callable[[], tuple[int, Callable[[np.ndarray], Any]]]
"""Returns a version of the weights and its policy, [*O] -> action."""

MOST_MOVES = 100_000  # of the game that `check` plays


class TwoPlayerGame(gymnasium.Env[np.ndarray, Any]):
    """One side of a game; the other is played by an opponent.

    Observations are vectors, followed by the mask of allowed actions where the game has one, or images. The last info
    of an episode has `opponent`, the version of the weights that played the other side; -1: another player.

    Args:
        env_id: of the game, for messages.
        game: an AECEnv or ParallelEnv of PettingZoo.
        opponent: plays the other side; None: moves at random.

    Raises:
        EnvError: it is not a game of two players with equal spaces, or has masks of other than discrete actions.
    """

    def __init__(self, env_id: str, game: Any, opponent: Opponent | None = None) -> None:
        from pettingzoo import ParallelEnv
        from pettingzoo.utils.conversions import parallel_to_aec

        self._env_id, self._game = env_id, parallel_to_aec(game) if isinstance(game, ParallelEnv) else game
        self.metadata, self.render_mode = dict(game.metadata), getattr(game, "render_mode", None)
        agents = list(game.possible_agents)
        seen, acted = (
            [space(agent) for agent in agents] for space in (game.observation_space, game.action_space)
        )
        if len(agents) != 2 or seen[0] != seen[1] or acted[0] != acted[1]:
            game.close()
            raise EnvError(
                f"{env_id}: has the agents {', '.join(map(str, agents[:5]))}; ddrl plays games of two agents with "
                "equal observation and action spaces"
            )
        self.action_space, self._space = acted[0], seen[0]
        self.has_mask = isinstance(self._space, Dict) and MASK in self._space.spaces
        if self.has_mask:
            parts = {name: part for name, part in self._space.items() if name != MASK}
            self._space = next(iter(parts.values())) if len(parts) == 1 else Dict(parts)
            self._only = next(iter(parts)) if len(parts) == 1 else None
        self.num_masked = int(acted[0].n) if self.has_mask and isinstance(acted[0], Discrete) else 0
        if self.has_mask and not self.num_masked:
            game.close()
            raise EnvError(
                f"{env_id}: has an action_mask of {acted[0]}; in games of two it is for Discrete actions"
            )
        size = (flatdim(self._space) + self.num_masked,)
        keeps = is_image(self._space) and not self.has_mask
        self.observation_space = self._space if keeps else Box(-np.inf, np.inf, size, np.float32)
        self._named = opponent or self._random_move
        self._next: Callable[[], tuple[int, Opponent]] = lambda: (-1, self._named)
        self._opening_moves = 0

    def play_against(self, draw: Draw, *, opponent_share: float = 0.0, opening_moves: int = 0) -> None:
        """Have opponents drawn from the next reset on, and games begin with random moves.

        Args:
            draw: called for each game.
            opponent_share: of the games, in which the constructor's opponent still plays the other side.
            opening_moves: of both sides together, at most; each number is as likely.
        """

        def drawn() -> tuple[int, Opponent]:
            if self.np_random.random() < opponent_share:
                return -1, self._named
            version, policy = draw()
            return version, lambda shown, _: policy(self.seen(shown))

        self._next, self._opening_moves = drawn, opening_moves

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game, with the opponent's moves before the player's first one."""
        super().reset(seed=seed)
        while True:
            self._game.reset(seed=seed, options=options)
            seed = None  # random numbers go on where an opening ends the game
            if not self._play_opening():
                continue
            self._player = self._game.possible_agents[self.np_random.integers(2)]
            self._version, self._opponent = self._next()
            observation, _, terminated, truncated, info = self._await_turn()
            if not (terminated or truncated):
                return observation, info
            if not self._opening_moves:
                raise EnvError(
                    f"{self._env_id}: ended before the first move of {self._player}; let both sides move"
                )

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Make a move, and the opponent's until it is the player's turn again or the game is over."""
        self._game.step(action)
        return self._await_turn()

    def render(self) -> Any:
        """Return the game's picture."""
        return self._game.render()

    def close(self) -> None:
        """Close the game."""
        self._game.close()

    def seen(self, shown: Any) -> np.ndarray:
        """Return an observation [*O], as policies see it, of what the game shows a side."""
        if not self.has_mask:
            return np.asarray(shown) if is_image(self._space) else self._flat(shown)
        rest = shown[self._only] if self._only else {name: shown[name] for name in self._space}
        return np.append(self._flat(rest), np.asarray(shown[MASK], np.float32))

    def check(self) -> None:
        """Play a game at random.

        Raises:
            EnvError: what one side wins the other does not lose.
        """
        game, total, generator = self._game, 0.0, np.random.default_rng(0)
        game.reset(seed=0)
        for _ in game.agent_iter(MOST_MOVES):
            shown, reward, terminated, truncated, _ = game.last()
            total += reward
            game.step(None if terminated or truncated else self._random_move(shown, generator))
        if abs(total) > 1e-6 and not game.agents:
            raise EnvError(
                f"{self._env_id}: the rewards of both sides add up to {total:g}, not to 0; self-play is for games in "
                "which one side loses what the other wins"
            )

    def _play_opening(self) -> bool:
        """Make a random number of random moves; return False if they end the game."""
        for _ in range(self.np_random.integers(self._opening_moves + 1)):
            shown, _, terminated, truncated, _ = self._game.last()
            if terminated or truncated:
                return False
            self._game.step(self._random_move(shown, self.np_random))
        return True

    def _await_turn(self) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Let the opponent move until it is the player's turn, or the game is over."""
        game = self._game
        while game.agent_selection != self._player:
            shown, _, terminated, truncated, _ = game.last()
            game.step(None if terminated or truncated else self._move(shown))
        shown, reward, terminated, truncated, _ = game.last()
        observation, over = self.seen(shown), terminated or truncated
        if self.has_mask and not observation[-self.num_masked :].any():
            if not over:
                raise EnvError(f"{self._env_id}: {MASK} allows nothing; end the game before")
            observation[-self.num_masked :] = 1.0  # no action follows
        info = {OPPONENT: self._version} if over else {}
        return observation, float(reward), bool(terminated), bool(truncated), info

    def _move(self, shown: Any) -> Any:
        """Return the opponent's move.

        Raises:
            EnvError: the game does not allow it.
        """
        action = self._opponent(shown, self.np_random)
        if not self.action_space.contains(action) or (self.has_mask and not np.ravel(shown[MASK])[action]):
            raise EnvError(
                f"{self._env_id}: the opponent chose {action}, which the game does not allow; return one of its "
                f"{MASK if self.has_mask else self.action_space}"
            )
        return action

    def _random_move(self, shown: Any, generator: np.random.Generator) -> Any:
        if self.has_mask:
            return generator.choice(np.flatnonzero(shown[MASK]))
        if isinstance(self.action_space, Box):
            low, high = self.action_space.low, self.action_space.high
            return generator.uniform(low, high).astype(self.action_space.dtype)
        sizes = self.action_space.n if isinstance(self.action_space, Discrete) else self.action_space.nvec  # type: ignore[attr-defined]
        return generator.integers(sizes)

    def _flat(self, shown: Any) -> np.ndarray:
        return np.asarray(flatten(self._space, shown), np.float32)
