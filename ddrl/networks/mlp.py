"""Multilayer perceptrons with ReLU, one or an ensemble evaluated as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """A ReLU network with a linear output, or E independent ones with one batched product per layer.

    Parameters are named `weights.i` [in, out] and `biases.i` [out], of an ensemble [E, in, out] and [E, 1, out], i
    counted from the input. Weights and biases start from U(-1/sqrt(in), 1/sqrt(in)), as in `torch.nn.Linear`.

    Args:
        sizes: widths from input to output; two or more.
        num_members: E; None for a single network.
        dropout: share of each hidden layer's outputs that is 0 where `forward` gets a generator; the others grow.
        layer_norm: normalize each hidden layer before its ReLU (no learned scale), after the dropout.
        generator: CPU generator of the initial weights; torch's global one when None.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        num_members: int | None = None,
        dropout: float = 0.0,
        layer_norm: bool = False,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()

        def uniform(shape: tuple[int, ...], num_inputs: int) -> nn.Parameter:
            bound = 1.0 / math.sqrt(num_inputs)
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))

        weight_axes, bias_axes = ((), ()) if num_members is None else ((num_members,), (num_members, 1))
        layers = list(pairwise(sizes))
        self.weights = nn.ParameterList(uniform((*weight_axes, i, o), i) for i, o in layers)
        self.biases = nn.ParameterList(uniform((*bias_axes, o), i) for i, o in layers)
        self.num_members = num_members
        self.dropout, self.layer_norm = dropout, layer_norm
        # A ParameterList is slow to walk.
        self._layers: tuple[tuple[Tensor, Tensor], ...] = tuple(zip(self.weights, self.biases, strict=True))

    def forward(
        self, x: Tensor, *, num_members: int | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Evaluate on rows [B, in]: [B, out], or [E, B, out] of an ensemble.

        Args:
            x: [B, in].
            num_members: evaluate only so many first members of an ensemble.
            generator: of the dropout; None: without.
        """
        layers = self._layers
        affine: Callable[..., Tensor] = torch.addmm if self.num_members is None else torch.baddbmm
        if self.num_members is not None:
            count = num_members or self.num_members
            layers = tuple((weight[:count], bias[:count]) for weight, bias in self._layers)
            x = x.expand(count, *x.shape)
        *hidden, (last_weight, last_bias) = layers
        for weight, bias in hidden:
            x = affine(bias, x, weight)
            if self.dropout and generator is not None:
                is_kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.dropout
                x = x * is_kept / (1.0 - self.dropout)
            if self.layer_norm:
                x = F.layer_norm(x, x.shape[-1:])
            x = torch.relu_(x)
        if self.num_members is not None and last_weight.shape[-1] == 1:
            # A product with one column: several times faster as a weighted sum.
            return (x * last_weight.transpose(1, 2)).sum(dim=-1, keepdim=True) + last_bias
        return affine(last_bias, x, last_weight)
