"""Elo ratings of a run's versions in a game of two players, from the games that they play in training.

The newest version inherits the rating of the one before, and its games change it until the next one is published. From
then on it stays, so that all are measured against the same opponents: the first version has 0. See A. Elo, The Rating
of Chessplayers (1978), 8.4 for the formula.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace

from ddrl.store.weights import Standing
from ddrl.types import Played

K = 4.0  # twice the points that a win against an equal opponent gives
SCALE = 400.0  # points of difference at which the better side scores ten times as much
MEMORY = 100  # games over which the score against a version is averaged


class League:
    """The standings of the versions that are kept; used by both threads of a learner.

    Args:
        standings: by version, as the server has them.
        opponent: place of the opponent's version in `Played.episode_metrics`.

    Attributes:
        rating: of the newest version.
    """

    def __init__(self, standings: Mapping[int, Standing], opponent: int) -> None:
        self._standings, self._opponent, self._lock = dict(standings), opponent, threading.Lock()
        self._newest = max(self._standings, default=-1)
        self.rating = self._standings.get(self._newest, Standing()).rating

    def count(self, played: Played) -> None:
        """Count the games of a fragment against versions that are kept, older than the one that played."""
        with self._lock:
            for game_return, metrics in zip(played.episode_return, played.episode_metrics, strict=False):
                version = metrics[self._opponent]  # a worker may have written any number
                standing = self._standings.get(int(version)) if math.isfinite(version) else None
                if standing is None or version >= played.policy_version:
                    continue
                score = 0.5 + 0.5 * ((game_return > 0) - (game_return < 0))
                self.rating += K * (score - expected(self.rating - standing.rating))
                games = standing.games + 1
                mean = standing.score + (score - standing.score) / min(games + 1, MEMORY)
                self._standings[int(version)] = replace(standing, games=games, score=mean)

    def publish(self, version: int, kept: Collection[int]) -> dict[int, Standing]:
        """Add a version, which begins with the rating that the one before ends with; return those that are kept."""
        with self._lock:
            if (before := self._standings.get(self._newest)) is not None:
                self._standings[self._newest] = replace(before, rating=self.rating)
            self._newest, self._standings[version] = version, Standing(rating=self.rating)
            kept = {*kept, version}
            self._standings = {one: row for one, row in self._standings.items() if one in kept}
            return dict(self._standings)


def expected(difference: float) -> float:
    """Return the expected score, 0..1, of a side whose rating is higher by `difference`."""
    return float(1.0 / (1.0 + 10.0 ** (-difference / SCALE)))
