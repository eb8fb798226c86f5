"""Games of two players: whose moves are a step, whose rewards are returned, and what is no such game."""

from __future__ import annotations

from typing import Any

import numpy as np
import pettingzoo
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from support.games import BET, PASS, KuhnPoker, Pennies, payoff, seen

from ddrl import envs
from ddrl.config import EnvConfig
from ddrl.envs.players import lookahead
from ddrl.envs.two_player import TwoPlayerGame
from ddrl.envs.wrappers import Lanes

FOUR = {"id": "pettingzoo/classic/connect_four-v3", "action_mask": True}


def episode(
    game: TwoPlayerGame, choose: Any, seed: int | None = None
) -> tuple[list[np.ndarray], list[float], dict[str, Any]]:
    """Play a game; what was seen, the rewards, and the last info."""
    observation, _ = game.reset(seed=seed)
    rows, rewards, over, info = [observation], [], False, {}
    while not over:
        observation, reward, terminated, truncated, info = game.step(choose(observation))
        rows, rewards, over = [*rows, observation], [*rewards, reward], terminated or truncated
    return rows, rewards, info


@pytest.mark.parametrize("mine", [PASS, BET])
@pytest.mark.parametrize("theirs", [PASS, BET])
def test_the_rewards_are_those_of_the_side_whoever_moves_last(mine: int, theirs: int) -> None:
    kuhn = KuhnPoker()
    game = TwoPlayerGame("kuhn", kuhn, lambda shown, generator: theirs)
    sides = set()
    for seed in range(20):
        _, rewards, info = episode(game, lambda row: mine, seed)
        sides.add(game._player)
        won = payoff(kuhn._history, *kuhn._cards)
        assert sum(rewards) == (won if game._player == "first" else -won)
        assert info == {"opponent": -1}
    assert sides == {"first", "second"}


def test_the_opponents_moves_before_the_first_one_are_part_of_the_reset() -> None:
    kuhn = KuhnPoker()
    game = TwoPlayerGame("kuhn", kuhn, lambda shown, generator: BET)
    while game.reset()[1] or game._player == "first":
        pass
    np.testing.assert_array_equal(game.seen(kuhn.observe("second")), seen(kuhn._cards[1], "b"))


def test_each_side_sees_its_own_card() -> None:
    cards = []
    game = TwoPlayerGame(
        "kuhn", kuhn := KuhnPoker(), lambda shown, generator: cards.append(int(shown[:3].argmax())) or BET
    )
    for seed in range(10):
        rows, _, _ = episode(game, lambda row: BET, seed)
        mine = ["first", "second"].index(game._player)
        assert int(rows[0][:3].argmax()) == kuhn._cards[mine]
        assert cards[-1] == kuhn._cards[1 - mine]


def test_sides_that_move_at_once_do_not_see_the_move_of_the_other() -> None:
    game = TwoPlayerGame("pennies", Pennies(), lambda shown, generator: int(shown[0]))
    for seed in range(10):
        # It repeats what the player did before, so it never knows that both change.
        _, rewards, _ = episode(game, lambda row: 1 - int(row[0]), seed)
        assert set(rewards) <= {-1.0, 1.0} and len(rewards) == 4
    opponents: list[float] = []
    TwoPlayerGame("pennies", Pennies(), lambda shown, generator: opponents.append(shown[0]) or 0).reset(
        seed=0
    )
    assert opponents in ([], [0.0])


def test_the_same_seed_gives_the_same_game_against_random_moves() -> None:
    game = envs.make_one(EnvConfig(**FOUR))
    lowest = lambda row: int(np.flatnonzero(row[-7:])[0])  # noqa: E731
    games = [episode(game, lowest, seed) for seed in (3, 4, 3)]
    np.testing.assert_array_equal(np.stack(games[0][0]), np.stack(games[2][0]))
    assert len(games[0][0]) != len(games[1][0]) or (np.stack(games[0][0]) != np.stack(games[1][0])).any()


def test_masks_are_at_the_end_of_observations_and_allow_a_move() -> None:
    vector = envs.make_vector(EnvConfig(**FOUR, num_envs=4, metrics=("opponent",)))
    assert isinstance(vector, Lanes)
    rows, _ = vector.reset(seed=[1, 2, 3, 4])
    generator, ends = np.random.default_rng(0), []
    for _ in range(200):
        assert rows.shape == (4, 91) and rows[:, -7:].any(axis=1).all()
        rows, _, terminated, _, info = vector.step(
            np.array([generator.choice(np.flatnonzero(row[-7:])) for row in rows])
        )
        ends += [info["metrics"][lane] for lane in np.flatnonzero(terminated)]
    assert len(ends) > 10 and all(end == [-1.0] for end in ends)


def test_opponents_are_drawn_at_each_reset() -> None:
    game = TwoPlayerGame("kuhn", KuhnPoker())
    drawn = iter(range(100))
    game.play_against(lambda: (next(drawn), lambda row: BET if row.shape == (7,) else None))
    assert [episode(game, lambda row: PASS, seed)[2]["opponent"] for seed in range(5)] == [0, 1, 2, 3, 4]


def test_a_share_of_the_games_is_played_by_the_named_opponent() -> None:
    played: set[str] = set()  # by whom, in a game
    game = TwoPlayerGame("kuhn", KuhnPoker(), lambda shown, generator: played.add("named") or PASS)
    game.play_against(lambda: (7, lambda row: played.add("version") or PASS), opponent_share=0.25)
    found = []
    for seed in range(400):
        played.clear()
        found.append((episode(game, lambda row: BET, seed)[2]["opponent"], *played))
    assert {*found} == {(-1, "named"), (7, "version")} and 60 < found.count((-1, "named")) < 140


@pytest.mark.parametrize(
    ("rows", "moves"),
    [  # x to move; from the top, rows without stones left out
        (["o......", "oxx....", "oxxx..."], {4}),
        (["o......", "ox.....", "oxx...."], {0}),
        (["..x....", ".xo....", "xoo.o.."], {3}),
        (["x......", "ox.....", "oox....", "xoo...."], {3}),
        (["..xo...", ".xox...", "xoxo..."], {3}),
        (["..ox...", ".oxo...", "oxox..."], {3}),
        (["....xxx", "....oxo"], {0, 1, 2, 3, 4, 5, 6}),
        (["x......"] * 3 + ["o......"] * 3, {1, 2, 3, 4, 5, 6}),
    ],
)
def test_a_player_that_looks_ahead_wins_or_blocks(rows: list[str], moves: set[int]) -> None:
    board = np.array([*map(list, [*["." * 7] * (6 - len(rows)), *rows])])
    shown = {
        "observation": np.stack([board == "x", board == "o"], axis=2).astype(np.int8),
        "action_mask": (board[0] == ".").astype(np.int8),
    }
    generator = np.random.default_rng(0)
    assert {lookahead(shown, generator) for _ in range(100)} == moves


def test_random_moves_of_several_dimensions() -> None:
    class Wide(KuhnPoker):
        def action_space(self, agent: str) -> Any:
            return MultiDiscrete([2, 3])

        def step(self, action: Any) -> None:
            super().step(None if action is None else int(action[0]))

    episode(TwoPlayerGame("wide", Wide()), lambda row: np.array([BET, 2]), 0)
    TwoPlayerGame("wide", Wide()).check()


def test_an_opening_longer_than_the_game_is_played_again() -> None:
    game = TwoPlayerGame("kuhn", KuhnPoker())
    game.play_against(lambda: (0, lambda row: BET), opening_moves=1000)
    for seed in range(30):
        episode(game, lambda row: BET, seed)


def test_games_begin_with_random_moves_of_both_sides() -> None:
    game = envs.make_one(EnvConfig(**FOUR))
    assert isinstance(game, TwoPlayerGame)
    game.play_against(lambda: (0, lambda row: int(np.flatnonzero(row[-7:])[0])), opening_moves=40)
    stones = [int(game.reset(seed=seed)[0][:84].sum()) for seed in range(300)]
    assert min(stones) == 0 and max(stones) > 20  # games that end within the opening are left out
    game.play_against(lambda: (0, lambda row: int(np.flatnonzero(row[-7:])[0])), opening_moves=3)
    stones = [int(game.reset(seed=seed)[0][:84].sum()) for seed in range(300)]
    assert {*stones} == {0, 1, 2, 3, 4}  # and the opponent's next one


class Odd(KuhnPoker):
    """Kuhn's poker in which something is not as it should be."""

    def __init__(
        self, agents: tuple[str, ...] = ("first", "second"), tip: float = 0.0, spaces: Any = None
    ) -> None:
        super().__init__()
        self.possible_agents, self._tip, self._spaces = [*agents], tip, spaces

    def observation_space(self, agent: str) -> Any:
        return (self._spaces or {}).get(agent, super().observation_space(agent))

    def step(self, action: int) -> None:
        super().step(action)
        if any(self.rewards.values()):
            self._cumulative_rewards["first"] += self._tip


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (lambda: Odd(("first", "second", "third")), "kuhn: has the agents first, second, third; ddrl plays"),
        (lambda: Odd(spaces={"first": Box(0, 1, (8,))}), "kuhn: has the agents first, second; ddrl plays games"),
        (
            lambda: Odd(spaces=dict.fromkeys(("first", "second"), Dict(action_mask=Box(0, 1, (2,)), x=Discrete(2)))),
            None,
        ),
    ],
)  # fmt: skip
def test_what_is_no_game_of_two_with_equal_spaces(made: Any, line: str | None) -> None:
    if line is None:
        assert TwoPlayerGame("kuhn", made()).observation_space.shape == (4,)
        return
    with pytest.raises(envs.EnvError) as error:
        TwoPlayerGame("kuhn", made())
    assert str(error.value).startswith(line)


def test_a_game_in_which_nobody_loses_what_is_won() -> None:
    with pytest.raises(envs.EnvError, match=r"kuhn: the rewards of both sides add up to 0.5, not to 0;"):
        TwoPlayerGame("kuhn", Odd(tip=0.5)).check()
    TwoPlayerGame("kuhn", KuhnPoker()).check()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"id": "pettingzoo/classic/connect-four-v3"}, "did you mean pettingzoo/classic/connect_four-v3?"),
        ({"id": "pettingzoo/classic/leduc_holdem-v4"}, "cannot be made (Failed to import entry point"),
        ({"action_mask": False}, "its observations have an action_mask; set env.action_mask to true"),
        ({"id": "pettingzoo/classic/rps-v2"}, "its observations have no action_mask; set env.action_mask to false"),
        ({"frame_stack": 2}, "env.frame_stack is 2, which games of two do not take"),
        ({"max_episode_steps": 9}, "env.max_episode_steps is 9, which games of two do not take; leave it at None"),
        ({"kwargs": {"boards": 2}}, "env.kwargs {'boards': 2} refused"),
        ({"opponent": "nobody:play"}, "env.opponent: nobody:play: module nobody may not be imported here"),
        ({"id": "pettingzoo/classic/tictactoe-v3", "opponent": "lookahead"}, "lookahead is for connect four; use"),
        ({"id": "CartPole-v1", "action_mask": False, "opponent": "nobody:play"}, "this is no game of two; remove it"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(options: dict[str, Any], line: str) -> None:
    with pytest.raises(envs.EnvError) as error:
        envs.describe(EnvConfig(**FOUR | options))
    assert line in str(error.value) and "\n" not in str(error.value)


def test_an_opponent_that_makes_an_illegal_move() -> None:
    game = TwoPlayerGame(
        "four", pettingzoo.make("aec", "classic/connect_four-v3"), lambda shown, generator: 3
    )
    with pytest.raises(envs.EnvError, match="four: the opponent chose 3, which the game does not allow"):
        for _ in range(20):
            episode(game, lambda row: 3 if row[-4] else int(np.flatnonzero(row[-7:])[0]))
