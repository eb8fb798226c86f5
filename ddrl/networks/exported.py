"""Parts of policies as torch modules that can be exported; float32 in and out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ddrl.networks.numpy_mlp import Layer
from ddrl.networks.recurrent import RecurrentCore


def mlp(layers: Sequence[Layer], activation: str) -> nn.Sequential:
    """Return the same network as `numpy_mlp.forward`: [N, in] -> [N, out]."""
    parts: list[nn.Module] = []
    for weight, bias in layers:
        linear = nn.Linear(len(weight), len(bias), device="meta").to_empty(device="cpu")
        linear.load_state_dict(
            {"weight": torch.from_numpy(weight.T.copy()), "bias": torch.from_numpy(bias.copy())}
        )
        parts += [linear, nn.Tanh() if activation == "tanh" else nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class Normalized(nn.Module):
    """Observations [N, O] in deviations from their mean, clipped at `bound` of them."""

    _mean: Tensor
    _std: Tensor

    def __init__(self, mean: np.ndarray, std: np.ndarray, bound: float) -> None:
        super().__init__()
        self.register_buffer("_mean", torch.from_numpy(mean))
        self.register_buffer("_std", torch.from_numpy(std))
        self._bound = bound

    def forward(self, x: Tensor) -> Tensor:
        """[N, O] -> [N, O]."""
        return ((x - self._mean) / self._std).clamp(-self._bound, self._bound)


class Bounded(nn.Module):
    """Raw actions [N, D], of the range [-1, 1], in the environment's unit and shape [N, *A].

    Args:
        low, high: [D] bounds.
        shape: `*A`.
        squash: by tanh; otherwise they are only clipped.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray, shape: tuple[int, ...], *, squash: bool) -> None:
        super().__init__()
        self._low, self._high = torch.from_numpy(low), torch.from_numpy(high)
        self._shape, self._squash = shape, squash

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, *A]."""
        x = torch.tanh(x) if self._squash else x
        scaled = x * ((self._high - self._low) / 2) + (self._high + self._low) / 2
        return torch.clamp(scaled, self._low, self._high).reshape(-1, *self._shape)


class Recurrent(nn.Module):
    """One step of a recurrent core between two modules: [N, *O] and hidden [N, H] -> [N, P] and the new hidden."""

    def __init__(self, before: nn.Module, core: RecurrentCore, after: nn.Module) -> None:
        super().__init__()
        self.before, self.core, self.after = before, core, after

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and the new hidden state."""
        features, hidden = self.core(self.before(x)[None], hidden)
        return self.after(features[0]), hidden
