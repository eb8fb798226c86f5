"""The sum tree: the slot of a mass, by hand, by a slow twin and by its distribution."""

from __future__ import annotations

import numpy as np
import pytest
from support.replays import assert_distributed

from ddrl.replay.sum_tree import SumTree

SIZES = [1, 16, 17, 4096, 4097, 70_001, 2**20 + 3]


def slow_slot(values: np.ndarray, mass: float) -> int:
    """The first slot where the running sum passes the mass."""
    total = 0.0
    for slot, value in enumerate(values):
        total += value
        if total > mass:
            return slot
    raise AssertionError("the mass is not below the total")


def test_by_hand() -> None:
    tree = SumTree(6)
    tree.set(np.array([1, 3, 4, 1]), np.array([9.0, 1.0, 5.0, 2.0]))
    mass = np.array([0.0, 1.9, 2.0, 2.9, 3.0, 7.9])
    assert tree.total == 8.0 and tree.sample(mass).tolist() == [1, 1, 3, 3, 4, 4]
    tree.set(np.array([4]), 0.0)
    assert tree.total == 3.0 and tree.get(np.array([4, 1])).tolist() == [0.0, 2.0]
    tree.check_valid()


@pytest.mark.parametrize("capacity", SIZES)
def test_random_changes_against_the_slow_twin(capacity: int) -> None:
    """Values are integers, so that sums are exact and every slot must agree."""
    generator = np.random.default_rng(capacity)
    tree, twin = SumTree(capacity), np.zeros(capacity)
    for step in range(6 if capacity > 10**6 else 12):
        if step % 3:
            slots = generator.integers(capacity, size=200)
            values = generator.integers(0, 4, size=200).astype(float)
            tree.set(slots, values)
            for slot, value in zip(slots, values, strict=True):  # the last value of a repeated slot stays
                twin[slot] = value
        else:
            start, stop = np.sort(generator.integers(capacity + 1, size=2))
            twin[start:stop] = generator.integers(0, 3)
            tree.set_range(int(start), int(stop), twin[start:stop])
        tree.set(np.array([capacity // 2]), 1.0)
        twin[capacity // 2] = 1.0
        tree.check_valid()
        assert tree.total == twin.sum()
        mass = generator.integers(int(twin.sum()), size=300) + 0.5 * generator.integers(2, size=300)
        expected = np.cumsum(twin).searchsorted(mass, side="right")
        assert np.array_equal(tree.sample(mass), expected)
        assert [slow_slot(twin, m) for m in mass[:2]] == expected[:2].tolist()


@pytest.mark.parametrize("capacity", SIZES)
def test_never_a_slot_of_value_zero(capacity: int) -> None:
    """Also at the upper end, where sums are rounded, and with values that vanish beside others."""
    generator = np.random.default_rng(1)
    for scale in (1.0, 1e-300, 1e200):
        tree = SumTree(capacity)
        slots = generator.integers(capacity, size=max(capacity // 3, 1))
        tree.set(slots, generator.random(len(slots)) ** 20 * scale + scale * 1e-20)
        total = tree.total
        ends = np.array([0.0, total / 3, np.nextafter(total, 0), total, total * (1 + 1e-9)])
        mass = np.concatenate([ends, generator.random(2000) * total, tree.get(slots[:100]).cumsum()])
        drawn = tree.sample(mass)
        assert drawn.min() >= 0 and drawn.max() < capacity
        assert (tree.get(drawn) > 0).all()


def test_no_drift_after_many_changes() -> None:
    generator = np.random.default_rng(3)
    tree = SumTree(10_000)
    for _ in range(500):
        values = generator.random(256) * 10.0 ** generator.integers(-9, 9)
        tree.set(generator.integers(10_000, size=256), values)
    tree.check_valid()
    tree.set_range(0, 10_000, 0.0)
    assert tree.total == 0.0  # to the last bit


def test_chi_square_of_the_draws() -> None:
    generator = np.random.default_rng(4)
    tree, values = SumTree(9000), np.zeros(9000)
    slots = generator.permutation(9000)[:400]
    values[slots] = generator.random(400) + 0.1
    tree.set(slots, values[slots])
    drawn = np.bincount(tree.sample(generator.random(200_000) * tree.total), minlength=9000)
    assert_distributed(drawn[slots], values[slots] / values.sum() * 200_000)
    assert drawn.sum() == drawn[slots].sum()


def test_a_draw_from_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="every value is 0"):
        SumTree(3).sample(np.zeros(1))
