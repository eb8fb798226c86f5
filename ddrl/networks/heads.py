"""Heads: from features to the values of actions, or their distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from ddrl.networks.layers import Activation, orthogonal_linear, uniform_linear
from ddrl.networks.noisy import NoisyLinear


def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """Action values Q = V + A - mean_a A, of every atom by itself.

    Source: Wang et al. 2016, arXiv:1511.06581, equation 9; atoms: Hessel et al. 2018, arXiv:1710.02298.

    Args:
        value: [B, Z].
        advantage: [B, A, Z].

    Returns:
        [B, A, Z].
    """
    return advantage + (value.unsqueeze(1) - advantage.mean(dim=1, keepdim=True))


class Head(nn.Module):
    """Up to one hidden layer, then the values of A actions with Z atoms each; dueling or not.

    Dueling, each of the two streams has a hidden layer of its own; they are one matrix, the value's first. Parameters
    are named `hidden.*` [1 or 2 * hidden_size, F], `value.*` [Z, ...] (dueling only) and `advantage.*` [A * Z, ...],
    each with `weight` and `bias` as of torch.nn.Linear, or as of `NoisyLinear`.

    Args:
        num_features: F.
        num_actions: A.
        num_atoms: Z.
        hidden_size: width of the hidden layer, or of each stream's; None for none.
        activation: after the hidden layer, in place.
        is_dueling: with two streams.
        noise_scale: sigma_0 of noisy layers; None for plain ones. A hidden plain layer is orthogonal with gain sqrt(2).
        generator: CPU generator of the initial weights; torch's global one when None.
    """

    def __init__(
        self,
        num_features: int,
        num_actions: int,
        *,
        num_atoms: int = 1,
        hidden_size: int | None,
        activation: Activation,
        is_dueling: bool,
        noise_scale: float | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()

        def linear(num_inputs: int, num_outputs: int) -> nn.Module:
            if noise_scale is None:
                return uniform_linear(num_inputs, num_outputs, generator)
            return NoisyLinear(num_inputs, num_outputs, noise_scale=noise_scale, generator=generator)

        self.hidden: nn.Module | None = None
        width = num_features if hidden_size is None else hidden_size
        if hidden_size is not None:
            count = 2 if is_dueling else 1
            if noise_scale is None:
                self.hidden = _streams(num_features, [hidden_size] * count, generator)
            else:
                self.hidden = linear(num_features, count * hidden_size)
        # The large and even sizes first, for memory is aligned by what comes before (`mlp.FlatParameters`).
        self.advantage = linear(width, num_actions * num_atoms)
        self.value = linear(width, num_atoms) if is_dueling else None
        self._shape = (-1, num_actions, num_atoms)
        self._activate = activation

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, A, Z]."""
        if self.hidden is not None:
            x = self._activate(self.hidden(x))
        if self.value is None:
            output: Tensor = self.advantage(x).view(self._shape)
            return output
        of_value, of_advantage = (x, x) if self.hidden is None else x.chunk(2, dim=1)
        return dueling(self.value(of_value), self.advantage(of_advantage).view(self._shape))


def _streams(num_inputs: int, sizes: Sequence[int], generator: Generator | None) -> nn.Linear:
    """Orthogonal layers side by side in one: all see the same inputs."""
    layers = [orthogonal_linear(num_inputs, size, math.sqrt(2), generator) for size in sizes]
    joined = nn.Linear(num_inputs, sum(sizes), device="meta").to_empty(device="cpu")
    with torch.no_grad():
        joined.weight.copy_(torch.cat([layer.weight for layer in layers]))
        joined.bias.zero_()
    return joined
