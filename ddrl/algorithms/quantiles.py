"""Quantile regression, which DQN and SAC share: distributions of returns as quantiles of equal probability.

Source: Dabney et al. 2018, arXiv:1710.10044, equation 10.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def quantile_huber(prediction: Tensor, target: Tensor, *, delta: float = 1.0) -> Tensor:
    """Return [...] the sum over the predicted quantiles i of the mean over the target's j of the asymmetric Huber loss.

    It is |tau_i - 1{u < 0}| * Huber(u), u = target_j - prediction_i, at the midpoints tau_i = (i + 1/2) / Z.

    Targets are sorted, so those below and above a prediction, closer than delta or further, are four ranges, whose sums
    are differences of prefix sums. Time and memory grow with Z + K, not with Z * K. Prefix sums are large: float64.

    Args:
        prediction: [..., Z] quantiles, in units of the return; the only argument with a gradient.
        target: [..., K] samples or quantiles.
        delta: kappa, in reward units: below it the loss is quadratic, and quantiles turn into expectiles.
    """
    num, x = prediction.shape[-1], prediction.double()
    tau = (torch.arange(num, device=x.device, dtype=x.dtype) + 0.5) / num  # [Z]
    y = target.double().sort(dim=-1).values.expand(*x.shape[:-1], -1).contiguous()  # [..., K]
    powers = torch.stack((torch.ones_like(y), y, y.square()))
    prefix = F.pad(powers.cumsum(-1), (1, 0))  # [3, ..., K + 1] number, sum and sum of squares of the first k
    with torch.no_grad():
        places = [torch.searchsorted(y, x + edge) for edge in (-delta, 0.0, delta)]
    low, middle, high = (prefix.gather(-1, place.expand(3, *x.shape)) for place in places)  # [3, ..., Z]

    def near(number: Tensor, total: Tensor, squares: Tensor) -> Tensor:
        return 0.5 * (squares - 2.0 * x * total + x.square() * number)

    def far(number: Tensor, total: Tensor, _: Tensor, *, sign: int) -> Tensor:
        return delta * (sign * (total - x * number) - 0.5 * delta * number)

    below = near(*middle - low) + far(*low, sign=-1)
    above = near(*high - middle) + far(*prefix[..., -1:] - high, sign=1)
    return (((1.0 - tau) * below + tau * above).sum(dim=-1) / y.shape[-1]).to(prediction.dtype)
