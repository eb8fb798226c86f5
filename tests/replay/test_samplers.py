"""Uniform and stratified draws: distribution, and independence of everything but their arguments."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from ddrl.replay.samplers import stratified, uniform

PINNED = [79, 102, 370, 155, 575, 442]


@pytest.mark.parametrize("num", [2, 7, 64, 1000])
def test_chi_square_of_the_positions(num: int) -> None:
    size, draws = 500, 200
    counts = np.zeros(num)
    for draw in range(draws):
        counts += np.bincount(uniform(num, size, seed=11, draw=draw), minlength=num)
    expected = size * draws / num
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = num - 1
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5  # mean and variance: degrees, 2 * degrees


def test_first_positions_of_successive_draws_and_seeds_are_uniform() -> None:
    by_draw = [int(uniform(10, 1, seed=1, draw=draw)[0]) for draw in range(2000)]
    by_seed = [int(uniform(10, 1, seed=seed, draw=1)[0]) for seed in range(2000)]
    for values in (by_draw, by_seed):
        counts = np.bincount(values, minlength=10)
        assert ((counts - 200) ** 2 / 200).sum() < 9 + 5 * 18**0.5
    assert abs(np.corrcoef(by_draw[:-1], by_draw[1:])[0, 1]) < 0.1


def test_known_words_of_philox() -> None:
    """Pinned, so that no version of NumPy or of this file changes a run's draws unnoticed."""
    fresh = np.random.Philox(key=np.array([5, 9], np.uint64)).random_raw(6)
    expected = [int(word) * 1000 >> 64 for word in fresh]
    assert uniform(1000, 6, seed=5, draw=9).tolist() == expected == PINNED


def test_independent_of_order_and_history() -> None:
    forward = [uniform(1000, 32, seed=3, draw=draw) for draw in range(20)]
    uniform(17, 5, seed=8, draw=123)  # an odd number of words in between
    backward = [uniform(1000, 32, seed=3, draw=draw) for draw in reversed(range(20))]
    assert all(np.array_equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))


def test_different_draws_and_seeds_differ() -> None:
    draws = {uniform(10**6, 8, seed=seed, draw=draw).tobytes() for seed in range(30) for draw in range(30)}
    assert len(draws) == 900


def test_shorter_draw_is_the_beginning_of_a_longer_one() -> None:
    assert np.array_equal(uniform(50, 7, seed=1, draw=2), uniform(50, 100, seed=1, draw=2)[:7])


def test_same_in_another_process() -> None:
    code = "from ddrl.replay.samplers import uniform; print(uniform(10**6, 20, seed=4, draw=77).tolist())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(uniform(10**6, 20, seed=4, draw=77).tolist())


def test_same_in_threads_that_draw_at_once() -> None:
    expected = [uniform(1000, 64, seed=6, draw=draw).tolist() for draw in range(50)]
    results: list[list[list[int]]] = []

    def draw_all() -> None:
        results.append([uniform(1000, 64, seed=6, draw=draw).tolist() for draw in range(50)])

    threads = [threading.Thread(target=draw_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


@pytest.mark.parametrize("num", [1, 2**31 + 7, 2**53])
def test_range_and_dtype(num: int) -> None:
    index = uniform(num, 2000, seed=2**64 - 1, draw=2**64 - 1)
    assert index.dtype == np.int64
    assert index.shape == (2000,)
    assert index.min() >= 0
    assert index.max() < num
    assert uniform(num, 0, seed=0, draw=0).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [((0, 1, 0, 0), "num"), ((1, -1, 0, 0), "size"), ((1, 1, -1, 0), "seed"), ((1, 1, 0, 2**64), "draw")],
)
def test_arguments_out_of_range_are_refused(arguments: tuple[int, int, int, int], match: str) -> None:
    num, size, seed, draw = arguments
    with pytest.raises(ValueError, match=match):
        uniform(num, size, seed=seed, draw=draw)


def test_stratified_takes_one_mass_of_each_part() -> None:
    for draw in range(100):
        mass = stratified(8.0, 16, seed=1, draw=draw)
        assert (np.floor(mass * 2) == np.arange(16)).all()
    first = np.array([stratified(1.0, 4, seed=1, draw=draw) for draw in range(2000)]) * 4 - np.arange(4)
    counts = np.histogram(first, bins=20, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 19 + 5 * 38**0.5  # within its part it is uniform


def test_stratified_uses_the_same_words_as_uniform_and_nothing_else() -> None:
    part = stratified(1000.0 * 6, 6, seed=5, draw=9) - 1000.0 * np.arange(6)
    assert np.floor(part).astype(int).tolist() == PINNED
    assert stratified(1.0, 0, seed=0, draw=0).shape == (0,)
    assert stratified(1e-300, 9, seed=0, draw=0).max() <= 1e-300


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0.0, 1, 0, 0), "total"), ((float("nan"), 1, 0, 0), "total"), ((float("inf"), 1, 0, 0), "total"),
        ((1.0, -1, 0, 0), "size"), ((1.0, 1, 2**64, 0), "seed"),
    ],
)  # fmt: skip
def test_stratified_refuses(arguments: tuple[float, int, int, int], match: str) -> None:
    total, size, seed, draw = arguments
    with pytest.raises(ValueError, match=match):
        stratified(total, size, seed=seed, draw=draw)
