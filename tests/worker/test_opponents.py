"""Which versions a process plays against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ddrl.config import SelfPlayConfig
from ddrl.store.weights import Standing, WeightsIndex
from ddrl.worker.opponents import LOADED, Opponents, chance, pool


class Loaded:
    """A policy that knows which weights it has."""

    def load(self, weights: Mapping[str, Any]) -> None:
        self.weights = weights


def stored(versions: int, **standings: Standing) -> WeightsIndex:
    """Return that the server keeps so many versions, and their standings, v3=... of version 3."""
    by_version = {int(name[1:]): standing for name, standing in standings.items()}
    return WeightsIndex(versions - 1, -1, 0.0, dict.fromkeys(range(versions), 1), standings=by_version)


def opponents(**options: Any) -> Opponents:
    make: Any = Loaded
    return Opponents(SelfPlayConfig(**options), make, np.random.default_rng(1))


def draw(drawing: Opponents, index: WeightsIndex, times: int = 2_000) -> Counter[int]:
    """Return how often each version is among those that are drawn."""
    found: Counter[int] = Counter()
    for _ in range(times):
        drawing.draw_versions(index, lambda version: {"version": version})
        found.update(drawing.drawn)
    return found


def test_the_pool_is_spread_evenly_from_the_first_to_the_last() -> None:
    assert pool([1, 2, 3], 3) == [1, 2, 3]
    assert pool(list(range(0, 101, 10)), 3) == [0, 50, 100]
    assert pool([4, 5], 1) == [5] and pool([4], 20) == [4]
    assert len(pool(list(range(1000)), 20)) == 20
    assert pool([0, 20, 40, 60, *range(71, 81)], 5) == [
        0,
        20,
        40,
        60,
        80,
    ]  # and the newest ten, nearly the same


def test_uniform_draws_each_version_as_often() -> None:
    found = draw(opponents(opponents="uniform"), stored(5, v2=Standing(0.0, 9, 1.0)))
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert np.array([*found.values()]) / (2_000 * LOADED) == pytest.approx([0.2] * 5, abs=0.02)


def test_prioritized_draws_by_the_square_of_the_share_that_a_version_wins() -> None:
    standings = {"v0": Standing(0, 9, 1.0), "v1": Standing(0, 9, 0.0), "v2": Standing(0, 9, 0.75)}
    found = draw(opponents(opponents="prioritized"), stored(4, **standings))
    chances = np.array([0.01, 1.0, 0.0625, 0.25])  # of a version without games: half of them
    assert [chance(standings.get(f"v{version}")) for version in range(4)] == chances.tolist()
    shares = np.array([found[version] for version in range(4)]) / found.total()
    assert shares == pytest.approx(chances / chances.sum(), abs=0.02)


def test_the_policy_itself_plays_its_share_and_the_others_the_rest() -> None:
    drawing, own = opponents(opponents="uniform", latest_share=0.7), Loaded()
    policy: Any = own
    assert drawing.draw(9, policy) == (9, own)  # nothing else is loaded
    drawing.draw_versions(stored(3), lambda version: {"version": version})
    drawn = [drawing.draw(9, policy) for _ in range(2_000)]
    assert np.mean([version == 9 for version, _ in drawn]) == pytest.approx(0.7, abs=0.04)
    assert all(
        found is own if version == 9 else found.weights == {"version": version} for version, found in drawn
    )


def test_latest_is_only_the_policy_itself() -> None:
    drawing = opponents(opponents="latest")
    drawing.draw_versions(stored(3), lambda version: pytest.fail("fetched"))
    assert not drawing.loaded


def test_versions_that_were_dropped_meanwhile_are_left_out() -> None:
    drawing = opponents(opponents="uniform", latest_share=0.0)
    for _ in range(20):
        drawing.draw_versions(stored(5), lambda version: {"version": version} if version < 2 else None)
        assert set(drawing.drawn) <= {0, 1}
    drawing.draw_versions(stored(5), lambda version: None)
    own: Any = Loaded()
    if not drawing.loaded:
        assert drawing.draw(7, own) == (7, own)


def test_a_version_that_is_drawn_again_is_not_fetched_again() -> None:
    drawing, fetched = opponents(opponents="uniform"), Counter[int]()

    def fetch(version: int) -> dict[str, int]:
        fetched[version] += 1
        return {"version": version}

    for _ in range(10):
        drawing.draw_versions(stored(1), fetch)
    assert fetched == {0: 1}
