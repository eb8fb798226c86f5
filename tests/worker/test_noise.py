"""Noise over time: its distribution at each step, its spectrum, and that it moves what has inertia."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from ddrl.worker.noise import PERIOD, drifting_uniform, pink_noise


def test_pink_noise_is_standard_normal_with_a_power_of_one_over_the_frequency() -> None:
    noise = pink_noise(256, (4_000, 2), np.random.default_rng(1))
    assert noise.shape == (256, 4_000, 2)
    assert noise.std(axis=(1, 2)) == pytest.approx(np.ones(256), abs=0.05), "at each step"
    assert abs(noise.mean()) < 0.02
    power = np.square(np.abs(np.fft.rfft(noise, axis=0))).mean(axis=(1, 2))
    slope, _ = np.polyfit(np.log(np.arange(1, 128)), np.log(power[1:128]), 1)
    assert slope == pytest.approx(-1.0, abs=0.03)
    assert power[1] / power[0] == pytest.approx(2.0, rel=0.1)
    assert abs(np.corrcoef(noise[:, 0, 0], noise[:, 1, 0])[0, 1]) < 0.9
    assert abs((noise[:, :, 0] * noise[:, :, 1]).mean()) < 0.05, "series are independent"


def test_draws_are_uniform_and_drift_in_every_second_environment() -> None:
    uniform = drifting_uniform((2_000, 1), np.random.default_rng(1))
    drawn = np.stack([next(uniform) for _ in range(PERIOD + 5)])[:, :, 0]
    assert abs(np.corrcoef(drawn[100, 1::2], drawn[101, 1::2])[0, 1]) < 0.12
    whole, drawn = drawn, drawn[:, ::2]
    for step in (0, 500, PERIOD - 1, PERIOD + 4):
        shares, _ = np.histogram(drawn[step], bins=4, range=(0.0, 1.0))
        assert shares == pytest.approx(np.full(4, 250), abs=55), step
    correlation = np.corrcoef(drawn[100], drawn[130])[0, 1]
    assert 0.2 < correlation < 0.5
    again = drifting_uniform((2_000, 1), np.random.default_rng(1))
    np.testing.assert_array_equal(next(again)[:, 0], whole[0])


def test_it_takes_a_car_out_of_the_valley() -> None:
    """White noise never does."""
    env = gymnasium.make("MountainCarContinuous-v0")
    uniform = drifting_uniform((1,), np.random.default_rng(1))

    def arrives(seed: int) -> bool:
        env.reset(seed=seed)
        while True:
            _, _, terminated, truncated, _ = env.step((2.0 * next(uniform) - 1.0).astype(np.float32))
            if terminated or truncated:
                return bool(terminated)

    assert sum(map(arrives, range(12))) >= 3
    env.close()
