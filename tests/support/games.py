"""Games of two players for tests, by PettingZoo's API, and how far a policy is from their equilibrium."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import AECEnv, ParallelEnv

PASS, BET = 0, 1
HISTORIES = ("", "p", "b", "pb")  # after which a side is to move
PAYOFFS = {"pp": 1, "bb": 2, "pbb": 2, "bp": 1, "pbp": 1}  # that one side wins, of the ends

Policy = Callable[[np.ndarray], np.ndarray]
"""[B, 7] observations -> [B, 2] probabilities."""


class KuhnPoker(AECEnv):
    """Kuhn's poker of three cards (H. Kuhn, Simplified Two-Person Poker, 1950): worth -1/18 to the first player."""

    metadata = {"name": "kuhn", "is_parallelizable": False}

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["first", "second"]
        self.render_mode = None

    def observation_space(self, agent: str) -> Box:
        return Box(0.0, 1.0, (7,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None or not hasattr(self, "_generator"):
            self._generator = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.rewards = self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict(self.rewards)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self._cards = self._generator.permutation(3)[:2].tolist()
        self._history, self.agent_selection = "", "first"

    def observe(self, agent: str) -> np.ndarray:
        return seen(self._cards[self.possible_agents.index(agent)], self._history)

    def step(self, action: int) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[self.agent_selection] = 0.0
        self._history += "pb"[action]
        self._clear_rewards()
        if self._history in PAYOFFS:
            won = payoff(self._history, *self._cards)
            self.rewards = {"first": won, "second": -won}
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = self.possible_agents[len(self._history) % 2]


def pass_always(shown: np.ndarray, generator: np.random.Generator) -> int:
    """Return a move of a player that never bets."""
    return PASS


def seen(card: int, history: str) -> np.ndarray:
    """Return what a side sees, [7]: its card of three, and which of HISTORIES was played."""
    row = np.zeros(7, np.float32)
    row[card] = 1.0
    if history in HISTORIES:
        row[3 + HISTORIES.index(history)] = 1.0
    return row


def payoff(history: str, first: int, second: int) -> float:
    """Return what the first player wins."""
    if history in ("bp", "pbp"):
        return 1.0 if history == "bp" else -1.0
    return float(np.sign(first - second)) * PAYOFFS[history]


def exploitability(policy: Policy) -> float:
    """Return the mean that best responses on both sides win against a policy; 0 at equilibrium."""
    keys = [(card, history) for card in range(3) for history in HISTORIES]
    rows = policy(np.stack([seen(*key) for key in keys]))
    chances = dict(zip(keys, rows.tolist(), strict=True))
    best = []
    for side in (0, 1):
        mine = [key for key in keys if len(key[1]) % 2 == side]
        values = [
            _value(dict(zip(mine, choices, strict=True)), side, chances)
            for choices in itertools.product((PASS, BET), repeat=len(mine))
        ]
        best.append(max(values))
    return sum(best) / 2


def _value(
    choices: dict[tuple[int, str], int], side: int, chances: dict[tuple[int, str], list[float]]
) -> float:
    """Return what a side wins with these choices against the chances of the other."""

    def play(history: str, cards: tuple[int, ...]) -> float:
        if history in PAYOFFS:
            return payoff(history, *cards)
        turn = len(history) % 2
        key = (cards[turn], history)
        if turn == side:
            return play(history + "pb"[choices[key]], cards)
        return sum(chance * play(history + "pb"[action], cards) for action, chance in enumerate(chances[key]))

    deals = list(itertools.permutations(range(3), 2))
    return (1 if side == 0 else -1) * sum(play("", cards) for cards in deals) / len(deals)


class Pennies(ParallelEnv):
    """Four rounds of matching pennies, at once: each side sees its own and the other's last choice."""

    metadata = {"name": "pennies"}

    def __init__(self) -> None:
        self.possible_agents = ["even", "odd"]
        self.render_mode = None

    def observation_space(self, agent: str) -> Box:
        return Box(0.0, 1.0, (2,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents, self._round = list(self.possible_agents), 0
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        self._round += 1
        even, odd = actions["even"], actions["odd"]
        won = 1.0 if even == odd else -1.0
        shown = {"even": np.array([even, odd], np.float32), "odd": np.array([odd, even], np.float32)}
        ended, rewards = dict.fromkeys(self.agents, self._round == 4), {"even": won, "odd": -won}
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if self._round == 4:
            self.agents = []
        return shown, rewards, ended, dict.fromkeys(ended, False), infos
