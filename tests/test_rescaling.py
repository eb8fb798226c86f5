"""The value rescaling of Pohlen et al. 2018: hand numbers, inverses, and what float32 keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.reference_returns import slow_rescale, slow_unrescale
from torch import Tensor
from torch.testing import assert_close

from ddrl.returns import rescale, unrescale

FLOAT32 = 2.0**-23  # one unit in the last place, relative


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def everywhere() -> Tensor:
    """Numbers of both signs and all sizes up to 1e5, and 0."""
    size = torch.logspace(-12, 5, 4001, dtype=torch.float64)
    return torch.cat((-size, double(0.0), size, torch.linspace(-1e5, 1e5, 4001).double()))


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest error, as a share of what is expected."""
    return float(((found.double() - expected) / torch.where(expected == 0, 1.0, expected)).abs().max())


@pytest.mark.parametrize(
    ("eps", "x", "expected"),
    [
        (1e-3, [0.0, 3.0, -3.0, 8.0, -99.0], [0.0, 1.003, -1.003, 2.008, -9.099]),
        (0.5, [0.0, 3.0, -3.0, 8.0, -99.0], [0.0, 2.5, -2.5, 6.0, -58.5]),
    ],
)
def test_hand_numbers(eps: float, x: list[float], expected: list[float]) -> None:
    assert_close(rescale(double(*x), eps), double(*expected))
    assert_close(unrescale(double(*expected), eps), double(*x))


@pytest.mark.parametrize("eps", [1e-3, 1e-2, 0.3])
def test_as_printed_in_the_paper(eps: float) -> None:
    x = torch.linspace(-300, 300, 601, dtype=torch.float64)
    assert_close(rescale(x, eps), double(*(slow_rescale(float(v), eps) for v in x)), rtol=1e-12, atol=1e-12)
    assert_close(unrescale(x, eps), double(*(slow_unrescale(float(v), eps) for v in x)), rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("function", [rescale, unrescale])
def test_odd_monotonic_and_of_the_kind_of_its_input(function) -> None:
    x = everywhere().sort().values.unique()
    assert torch.equal(function(-x), -function(x))
    assert bool((function(x).diff() > 0).all())
    small = function(torch.ones((2, 3, 1), dtype=torch.float32))
    assert small.shape == (2, 3, 1) and small.dtype == torch.float32
    array = function(x.numpy())  # the learner makes priorities of workers' values without torch
    assert isinstance(array, np.ndarray) and array.dtype == np.float64
    np.testing.assert_allclose(array, function(x).numpy(), rtol=1e-14)


def test_gradient() -> None:
    x = double(0.0, 3.0, -8.0).requires_grad_()
    (gradient,) = torch.autograd.grad(rescale(x).sum(), x)  # 1 / (2 sqrt(|x| + 1)) + eps
    assert_close(gradient, double(0.501, 0.251, 1 / 6 + 0.001))
