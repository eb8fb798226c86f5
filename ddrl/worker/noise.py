"""Random actions that drift, for exploration before anything is learned."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

PERIOD = 1024  # steps that are drawn at once
MOST_DRAWN = 2**21  # numbers; fewer steps are drawn at once where theirs would be more

_erf = np.vectorize(math.erf, otypes=[np.float64])


def drifting_uniform(shape: tuple[int, ...], generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield draws, float64 uniform in [0, 1]; those of every second environment drift: pink noise, slow and far.

    White noise hardly moves what has inertia: a thousand steps of it never take a car out of a valley. Pink noise does
    not need to know how long a push has to last. But it throws over what walks, which then learns to crawl: so the
    other environments get white noise (docs/defaults.md).
    Source: Eberhard et al. 2023, "Pink noise is all you need: colored noise exploration in deep RL" (ICLR).

    Args:
        shape: [N, *A] of a draw, N environments; its entries are independent. The first environment's drift.
        generator: source of the draws.
    """
    num_steps = min(PERIOD, 2 * max(32, MOST_DRAWN // math.prod(shape) // 2))
    while True:
        drawn = 0.5 * (1.0 + _erf(pink_noise(num_steps, shape, generator) / math.sqrt(2.0)))
        others = drawn[:, 1::2]
        others[:] = generator.random(others.shape)
        yield from drawn


def pink_noise(num_steps: int, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Return standard normal noise [num_steps, *shape] with a power of 1/f at the frequency f over its first axis.

    Source: Timmer & Koenig 1995, "On generating power law noise": independent Gaussian Fourier coefficients.

    Args:
        num_steps: even.
        shape: of the independent series.
        generator: source of the draws.
    """
    frequency = np.arange(num_steps // 2 + 1, dtype=np.float64)
    frequency[0] = 1.0  # the mean varies as the slowest wave does
    scale = (frequency**-0.5).reshape(-1, *[1] * len(shape))
    real, imaginary = scale * generator.standard_normal((2, len(frequency), *shape))
    # The mean and the fastest wave have one coefficient where the others have two.
    power = scale[0] ** 2 + scale[-1] ** 2 + 4.0 * (scale[1:-1] ** 2).sum(axis=0)
    imaginary[[0, -1]] = 0.0
    noise: np.ndarray = np.fft.irfft(real + 1j * imaginary, num_steps, axis=0) * (num_steps / np.sqrt(power))
    return noise
