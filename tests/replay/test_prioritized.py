"""Uniform, stratified and prioritized draws: distribution, weights, and independence of all but their arguments."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.replays import assert_distributed

from ddrl.algorithms.dqn.config import Config
from ddrl.replay.prioritized import Priorities, stratified, uniform

PINNED = [79, 102, 370, 155, 575, 442]


@pytest.mark.parametrize("num", [2, 7, 64, 1000])
def test_chi_square_of_the_positions(num: int) -> None:
    size, draws = 500, 200
    counts = np.zeros(num)
    for draw in range(draws):
        counts += np.bincount(uniform(num, size, seed=11, draw=draw), minlength=num)
    assert_distributed(counts, np.full(num, size * draws / num))


def test_first_positions_of_successive_draws_and_seeds_are_uniform() -> None:
    by_draw = [int(uniform(10, 1, seed=1, draw=draw)[0]) for draw in range(2000)]
    by_seed = [int(uniform(10, 1, seed=seed, draw=1)[0]) for seed in range(2000)]
    for values in (by_draw, by_seed):
        assert_distributed(np.bincount(values, minlength=10), np.full(10, 200.0))
    assert abs(np.corrcoef(by_draw[:-1], by_draw[1:])[0, 1]) < 0.1


def test_known_words_of_philox() -> None:
    """Pinned, so that no version of NumPy or of this file changes a run's draws unnoticed."""
    fresh = np.random.Philox(key=np.array([5, 9], np.uint64)).random_raw(6)
    expected = [int(word) * 1000 >> 64 for word in fresh]
    assert uniform(1000, 6, seed=5, draw=9).tolist() == expected == PINNED
    assert uniform(1000, 4, seed=5, draw=9).tolist() == PINNED[:4], "a shorter draw begins the longer one"


def test_draws_are_independent_of_order_history_and_threads() -> None:
    def draw_all(order: range) -> list[list[int]]:
        uniform(17, 5, seed=8, draw=123)  # an odd number of words in between
        return [uniform(1000, 64, seed=6, draw=draw).tolist() for draw in order]

    expected = draw_all(range(50))
    assert draw_all(range(49, -1, -1)) == expected[::-1]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw_all, [range(50)] * 4)) == [expected] * 4


@pytest.mark.parametrize("num", [1, 2**31 + 7, 2**53])
def test_range_and_dtype(num: int) -> None:
    index = uniform(num, 2000, seed=2**64 - 1, draw=2**64 - 1)
    assert index.dtype == np.int64 and index.shape == (2000,)
    assert index.min() >= 0 and index.max() < num
    assert uniform(num, 0, seed=0, draw=0).shape == (0,)


def test_stratified_takes_one_mass_of_each_part() -> None:
    for draw in range(100):
        mass = stratified(8.0, 16, seed=1, draw=draw)
        assert (np.floor(mass * 2) == np.arange(16)).all()
    first = np.array([stratified(1.0, 4, seed=1, draw=draw) for draw in range(2000)]) * 4 - np.arange(4)
    counts = np.histogram(first, bins=20, range=(0, 1))[0]
    assert_distributed(counts, np.full(20, 400.0))  # within its part it is uniform


def test_stratified_uses_the_same_words_as_uniform_and_nothing_else() -> None:
    part = stratified(1000.0 * 6, 6, seed=5, draw=9) - 1000.0 * np.arange(6)
    assert np.floor(part).astype(int).tolist() == PINNED
    assert stratified(1.0, 0, seed=0, draw=0).shape == (0,)
    assert stratified(1e-300, 9, seed=0, draw=0).max() <= 1e-300


# --- priorities -------------------------------------------------------------------------------------------------------

ALPHA = 0.6


def make(**options: Any) -> Priorities:
    """Priorities of at most 1024 items."""
    return Priorities(Config(**{"prioritized": True, "priority_exponent": ALPHA} | options))


def p_of(td_error: float) -> float:
    return float(np.float32((td_error + 1e-6) ** ALPHA))


class Slow:
    """A dictionary from number to priority."""

    def __init__(self) -> None:
        self.p: dict[int, float] = {}
        self.first = self.next = 0
        self.largest = 1.0

    def append(self, num: int, errors: np.ndarray | None) -> None:
        for i in range(num):
            self.p[self.next] = p_of(self.largest if errors is None else errors[i])
            self.next += 1

    def drop(self, first: int) -> None:
        self.p = {number: p for number, p in self.p.items() if number >= first}
        self.first = first

    def update(self, numbers: np.ndarray, errors: np.ndarray) -> None:
        for number, error in zip(numbers, errors, strict=True):
            self.largest = max(self.largest, error)
            if number in self.p:
                self.p[int(number)] = p_of(error)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_against_the_slow_twin(seed: int) -> None:
    """Appended, dropped, updated late and twice, and restored, in any order."""
    generator = np.random.default_rng(seed)
    fast, slow = make(), Slow()
    for _ in range(150):
        what = generator.integers(6)
        if what <= 1:
            num = min(int(generator.integers(0, 300)), 1024 - len(fast))
            errors = generator.random(num) * 3 if what and num else None
            fast.append(num, errors), slow.append(num, errors)
        elif what == 2:
            first = int(generator.integers(fast.first, fast.first + len(fast) + 1))
            fast.drop(first), slow.drop(first)
        elif what == 3:
            saved, fast = fast.state(), make()
            fast.append(len(slow.p), None)
            fast.renumber(slow.first)
            fast.load_state(saved)
        elif slow.next:
            numbers = generator.integers(max(slow.first - 50, 0), slow.next, size=64)
            errors = generator.random(64) * 5
            fast.update(numbers, errors), slow.update(numbers, errors)
        fast.check_valid()
        assert (fast.first, len(fast)) == (slow.first, len(slow.p))
        found = fast.state()
        assert found["priority"].tolist() == list(slow.p.values()) and found["largest"] == slow.largest
        if slow.p:
            position, number, weight = fast.draw(32, seed=seed, draw=30)
            assert set(number.tolist()) <= set(slow.p) and np.array_equal(number - slow.first, position)
            p = np.array([slow.p[int(n)] for n in number])
            raw = (len(slow.p) * p / sum(slow.p.values())) ** -fast.beta(30)
            np.testing.assert_allclose(weight, raw / raw.max(), rtol=1e-5)
    assert slow.next > 1024  # items go round the end of the slots


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_chi_square_of_prioritized_draws(alpha: float) -> None:
    """Batches of one: masses of a larger batch are stratified, hence more even than chance allows."""
    num, draws = 50, 8000
    errors = np.random.default_rng(5).random(num) * 4
    priorities = make(priority_exponent=alpha)
    priorities.append(num, errors)
    expected = (errors + 1e-6) ** alpha / ((errors + 1e-6) ** alpha).sum() * draws
    positions = np.concatenate([priorities.draw(1, seed=7, draw=draw)[0] for draw in range(draws)])
    assert_distributed(np.bincount(positions, minlength=num), expected)


def test_weighted_mean_is_unbiased() -> None:
    """With beta 1, and the batch's maximum put back, weights undo what priorities did."""
    num, size, draws = 300, 64, 2000
    generator = np.random.default_rng(6)
    errors = generator.random(num) + 0.05
    value = errors + 0.3 * generator.standard_normal(num)  # goes with the priority: what bias would show
    priorities = make(importance_exponent=1.0)
    priorities.append(num, errors)
    p = priorities.state()["priority"].astype(float)
    weighted, plain = [], []
    for draw in range(draws):
        position, _, weight = priorities.draw(size, seed=3, draw=draw)
        highest = p.sum() / (num * p[position].min())
        weighted.append((weight * highest * value[position]).mean())
        plain.append(value[position].mean())
    error = np.std(weighted) / draws**0.5
    assert abs(np.mean(weighted) - value.mean()) < 5 * error
    assert abs(np.mean(plain) - (p / p.sum() * value).sum()) < 5 * np.std(plain) / draws**0.5
    assert abs(np.mean(plain) - value.mean()) > 5 * error  # so the test can fail


def test_weights_are_at_most_1_and_by_hand() -> None:
    priorities = make(priority_exponent=1.0, importance_exponent=0.5, final_importance_exponent=0.5)
    priorities.append(3, [1.0, 4.0, 16.0])
    position, number, weight = priorities.draw(2000, seed=0, draw=0)
    assert set(position.tolist()) == {0, 1, 2} and weight.dtype == np.float32
    for item, expected in ((0, 1.0), (1, 0.5), (2, 0.25)):
        np.testing.assert_allclose(weight[position == item], expected, rtol=1e-5)
    priorities.append(1, [0.0])
    _, _, weight = priorities.draw(20, seed=0, draw=0)  # the new one is not drawn: the batch's maximum counts
    assert weight.max() == 1.0 and weight.min() > 0


def test_weights_by_the_largest_of_the_replay() -> None:
    """The least likely item decides though it is not drawn, and no longer does once it is dropped."""
    options = {"priority_exponent": 1.0, "importance_exponent": 0.5, "final_importance_exponent": 0.5}
    priorities = make(importance_maximum="replay", **options)
    priorities.append(1020, np.full(1020, 1e-9))
    priorities.append(1, [0.25])
    priorities.drop(1020)
    priorities.append(7, [4.0] * 7)  # beyond the end of the slots
    position, _, weight = priorities.draw(200, seed=0, draw=0)
    np.testing.assert_allclose(weight[position > 0], 0.25, rtol=1e-5)
    priorities.append(1, [0.0])
    assert priorities.draw(20, seed=0, draw=0)[2].max() < 0.01
    priorities.drop(1021)
    priorities.drop(1029 - 1)
    assert priorities.draw(20, seed=0, draw=0)[2].max() == 1.0


def test_beta_goes_linearly_by_update_number() -> None:
    priorities = make(importance_anneal_updates=100)
    assert [priorities.beta(n) for n in (0, 50, 100, 10**9)] == pytest.approx([0.4, 0.7, 1.0, 1.0])
    priorities.append(2, [1.0, 3.0])
    weights = [priorities.draw(64, seed=0, draw=draw)[2].min() for draw in (0, 100)]
    assert weights == pytest.approx([3**-0.24, 3**-0.6], rel=1e-4)


def test_restored_from_the_newest_item_backwards() -> None:
    old = make()
    old.append(20, np.arange(20) / 10)
    old.drop(5)
    old.update(np.array([7]), [1.9]), old.update(np.array([7]), [0.7])
    saved = old.state()
    for held, known in ((15, 15), (10, 10), (18, 15)):
        new = make()
        new.append(2), new.drop(2)  # other numbers than they had
        new.append(held, np.full(held, 0.01))
        new.load_state(saved)
        expected = [p_of(0.01)] * (held - known) + [p_of(n / 10) for n in range(20 - known, 20)]
        assert new.state()["priority"].tolist() == expected and new.state()["largest"] == 1.9
        new.check_valid()


def test_errors_beyond_float32_count_as_the_largest_that_it_holds() -> None:
    """As of a reward of 3e38, whose loss and gradient may be finite; a difference of two such values is NaN."""
    priorities = make()
    priorities.append(4, [np.inf, np.nan, 1e39, 1.0])
    stored = priorities.state()["priority"]
    assert np.isfinite(stored).all() and stored[0] == stored[1] == stored[2] > 1e9 * stored[3]


def test_negative_errors_are_refused_and_change_nothing() -> None:
    priorities = make()
    priorities.append(3)
    before = priorities.state()
    with pytest.raises(ValueError, match="td_error: .* give numbers of at least 0"):
        priorities.append(2, [1.0, -1.0])
    with pytest.raises(ValueError, match="td_error"):
        priorities.update(np.array([0, 1]), [-1.0, 1.0])
    assert all(np.array_equal(before[name], value) for name, value in priorities.state().items())


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", [1, np.nan]), ("priority", [1, -1]), ("priority", [[1]]), ("priority", None), ("largest", np.inf)],
)  # fmt: skip
def test_a_checkpoint_with_other_things_is_refused(name: str, value: Any) -> None:
    priorities = make()
    priorities.append(2)
    saved = priorities.state() | {name: value}
    if value is None:
        del saved[name]
    with pytest.raises(ValueError, match="another checkpoint"):
        priorities.load_state(saved)
