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

    Args:
        prediction: [..., Z] quantiles, in units of the return; the only argument with a gradient.
        target: [..., K] samples or quantiles.
        delta: kappa, in reward units: below it the loss is quadratic, and quantiles turn into expectiles.
    """
    num = prediction.shape[-1]
    tau = (torch.arange(num, device=prediction.device, dtype=prediction.dtype) + 0.5) / num  # [Z]
    difference = target[..., None, :] - prediction[..., :, None]  # [..., Z, K]
    share = (tau[:, None] - (difference < 0).to(tau.dtype)).abs()
    huber = F.huber_loss(difference, torch.zeros_like(difference), reduction="none", delta=delta)
    return (share * huber).mean(dim=-1).sum(dim=-1)
