"""Ratings of versions from the games that they play."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddrl.learner.league import K, League, expected
from ddrl.store.weights import Standing
from ddrl.types import Played


def games(version: int, *played: tuple[int, float]) -> Played:
    """Return a fragment of a version, of games against versions with these returns."""
    returns = [won for _, won in played]
    metrics = [[0.5, float(opponent)] for opponent, _ in played]
    return Played(0, 1, version, 8, episode_return=returns, episode_metrics=metrics)


def test_the_expected_score_is_elos() -> None:
    assert expected(0.0) == 0.5
    assert expected(400.0) == pytest.approx(10 / 11)
    assert expected(-200.0) == pytest.approx(0.240253, abs=1e-6)


def test_a_game_moves_the_newest_rating_by_what_was_unexpected() -> None:
    league = League({3: Standing(100.0), 7: Standing(100.0)}, opponent=1)
    league.count(games(8, (3, 1.0)))
    assert league.rating == 100.0 + K / 2
    standings = league.publish(8, [3, 7])
    assert standings[3] == Standing(100.0, games=1, score=0.75)
    # Version 7 was the newest one until now.
    assert standings[7] == Standing(100.0 + K / 2) and standings[8] == Standing(100.0 + K / 2)
    league.count(games(8, (3, 0.0), (3, -2.5)))
    assert league.publish(9, [3])[3].games == 3


def test_games_against_itself_other_players_and_versions_that_are_gone_do_not_count() -> None:
    league = League({3: Standing(), 5: Standing()}, opponent=1)
    league.count(games(5, (5, 1.0), (6, 1.0), (-1, 1.0), (4, 1.0)))
    league.count(
        Played(0, 1, 5, 8, episode_return=[1.0, 1.0], episode_metrics=[[0.5, math.nan], [0.5, math.inf]])
    )
    assert league.rating == 0.0
    league.publish(6, [3])
    league.count(games(7, (5, 1.0)))
    assert league.rating == 0.0 and sorted(league.publish(7, [3, 6])) == [3, 6, 7]


def test_a_league_goes_on_from_its_standings() -> None:
    assert League({2: Standing(40.0), 11: Standing(70.0)}, opponent=0).rating == 70.0
    assert League({}, opponent=0).rating == 0.0


def test_ratings_are_those_of_the_players() -> None:
    """Players of known strength; a version stays as good as it is, the newest one is 100 points better each time."""
    generator, strengths = np.random.default_rng(0), {0: 0.0}
    league = League({}, opponent=1)
    league.publish(0, [])
    for version in range(1, 6):
        strengths[version] = 100.0 * version
        league.publish(version, [*strengths])
        for _ in range(5_000):
            opponent = int(generator.integers(version))
            wins = generator.random() < expected(strengths[version] - strengths[opponent])
            league.count(games(version, (opponent, 1.0 if wins else -1.0)))
    ratings = {one: row.rating for one, row in league.publish(6, [*strengths]).items()}
    found = [ratings[version + 1] - ratings[version] for version in range(5)]
    assert found == pytest.approx([100.0] * 5, abs=50.0)
