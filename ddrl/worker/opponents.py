"""Draws the opponents of a process in a game of two players: its own policy, and versions that the server keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddrl.algorithms.base import Policy
from ddrl.config import SelfPlayConfig
from ddrl.store.weights import Standing, WeightsIndex

LOADED = 4  # versions that a process plays against until it draws again
LEAST_CHANCE = 0.01  # of a version that the policy always beats, beside 1 of one that always wins


class Opponents:
    """The policies that play the other side.

    Args:
        options: which to draw.
        make: returns a policy without weights.
        generator: of what is random.

    Attributes:
        loaded: by version, the policies that were drawn last.
        drawn: their versions, one that was drawn twice twice.
    """

    def __init__(
        self, options: SelfPlayConfig, make: Callable[[], Policy], generator: np.random.Generator
    ) -> None:
        self._options, self._make, self._generator = options, make, generator
        self.loaded: dict[int, Policy] = {}
        self.drawn: list[int] = []

    def draw_versions(self, stored: WeightsIndex, fetch: Callable[[int], Mapping[str, Any] | None]) -> None:
        """Draw the versions that are played against from now on; games that have begun go on as they are.

        Args:
            stored: the versions on the server.
            fetch: returns the weights of a version; None: it was dropped meanwhile.
        """
        if self._options.opponents == "latest" or not stored.sizes:
            return
        versions = pool(sorted(stored.sizes), self._options.pool)
        chances = np.ones(len(versions))
        if self._options.opponents == "prioritized":
            chances = np.array([chance(stored.standings.get(version)) for version in versions])
        drawn = self._generator.choice(versions, LOADED, p=chances / chances.sum())
        found: dict[int, Policy] = {}
        for version in drawn.tolist():
            if version in self.loaded:
                found[version] = self.loaded[version]
            elif version not in found and (arrays := fetch(version)) is not None:
                found[version] = self._make()
                found[version].load(arrays)
        self.drawn = [version for version in drawn.tolist() if version in found]
        self.loaded = found

    def draw(self, latest: int, own: Policy) -> tuple[int, Policy]:
        """Return the opponent of a game, and its version.

        Args:
            latest: version of the process's own policy.
            own: that policy, which goes on changing.
        """
        if not self.loaded or self._generator.random() < self._options.latest_share:
            return latest, own
        version = self.drawn[self._generator.integers(len(self.drawn))]
        return version, self.loaded[version]


def pool(versions: list[int], size: int) -> list[int]:
    """Return at most `size` versions, in order: those nearest to numbers spread evenly from the first to the last.

    So that of the newest, which all are kept for a while, there are no more than of others.
    """
    wanted = np.linspace(versions[0], versions[-1], max(2, size))[-size:]
    places = np.abs(np.subtract.outer(wanted, versions)).argmin(axis=1)
    return [versions[place] for place in sorted({*places.tolist()})]


def chance(standing: Standing | None) -> float:
    """Return how likely a version is drawn, relative to others: the square of the share of games that it wins.

    That is AlphaStar's prioritized fictitious self-play, f_hard with p = 2 (Vinyals et al. 2019, Methods).
    """
    return max(LEAST_CHANCE, (1.0 - (standing or Standing()).score) ** 2)
