"""The value rescaling of Pohlen et al. 2018: hand numbers, inverses, and what float32 keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ddrl.returns import rescale, unrescale

FLOAT32 = 2.0**-23  # one unit in the last place, relative


def everywhere() -> Tensor:
    """Numbers of both signs and all sizes up to 1e5, and 0."""
    size = torch.logspace(-12, 5, 4001, dtype=torch.float64)
    return torch.cat(
        (-size, torch.zeros(1, dtype=torch.float64), size, torch.linspace(-1e5, 1e5, 4001).double())
    )


def paper_rescale(x: float, eps: float) -> float:
    """Section 3.2 as printed."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def paper_unrescale(x: float, eps: float) -> float:
    """Proposition A.2 as printed."""
    return math.copysign(((math.sqrt(1 + 4 * eps * (abs(x) + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1, x)


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest error, as a share of what is expected."""
    return float(((found.double() - expected) / torch.where(expected == 0, 1.0, expected)).abs().max())


def test_hand_numbers() -> None:
    x = torch.tensor([0.0, 3.0, -3.0, 8.0, -99.0], dtype=torch.float64)
    expected = torch.tensor([0.0, 1.003, -1.003, 2.008, -9.099], dtype=torch.float64)
    torch.testing.assert_close(rescale(x), expected)
    torch.testing.assert_close(unrescale(expected), x)
    torch.testing.assert_close(rescale(x, 0.5), torch.tensor([0.0, 2.5, -2.5, 6.0, -58.5]).double())
    torch.testing.assert_close(
        unrescale(torch.tensor([2.5, -58.5]).double(), 0.5), torch.tensor([3.0, -99.0]).double()
    )


@pytest.mark.parametrize("eps", [1e-3, 1e-2, 0.3])
def test_as_printed_in_the_paper(eps: float) -> None:
    x = torch.linspace(-300, 300, 601, dtype=torch.float64)
    slow = torch.tensor([paper_rescale(float(v), eps) for v in x], dtype=torch.float64)
    torch.testing.assert_close(rescale(x, eps), slow, rtol=1e-12, atol=1e-12)
    slow = torch.tensor([paper_unrescale(float(v), eps) for v in x], dtype=torch.float64)
    torch.testing.assert_close(unrescale(x, eps), slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1e-2])
def test_each_is_the_inverse_of_the_other(eps: float) -> None:
    x = everywhere()
    assert relative(rescale(unrescale(x, eps), eps), x) < 1e-14
    assert relative(unrescale(rescale(x, eps), eps), x) < 1e-14


def test_float32_loses_a_few_units_in_the_last_place() -> None:
    x = everywhere().float()
    assert relative(rescale(x), rescale(x.double())) < 2 * FLOAT32
    assert relative(unrescale(x), unrescale(x.double())) < 4 * FLOAT32
    assert relative(unrescale(rescale(x)), x.double()) < 4 * FLOAT32


def test_odd_monotonic_and_of_the_same_kind() -> None:
    x = everywhere().sort().values.unique()
    for function in (rescale, unrescale):
        assert torch.equal(function(-x), -function(x))
        assert bool((function(x).diff() > 0).all())
        small = torch.ones((2, 3, 1), dtype=torch.float32)
        assert function(small).shape == small.shape and function(small).dtype == torch.float32


def test_gradient() -> None:
    x = torch.tensor([0.0, 3.0, -8.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(rescale(x).sum(), x)  # 1 / (2 sqrt(|x| + 1)) + eps
    torch.testing.assert_close(gradient, torch.tensor([0.501, 0.251, 1 / 6 + 0.001]).double())


def test_arrays_give_what_tensors_give() -> None:
    """Of workers' values the learner makes initial priorities without torch."""
    x = everywhere()
    for function in (rescale, unrescale):
        found = function(x.numpy())
        assert isinstance(found, np.ndarray) and found.dtype == np.float64
        np.testing.assert_allclose(found, function(x).numpy(), rtol=1e-14)
