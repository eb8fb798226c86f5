"""Multilayer perceptrons with ReLU, one or an ensemble evaluated as one; batch renormalization."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

_EPSILON = 1e-3  # added to variances
_RATE = 0.01  # share of a batch in the running statistics
_MOST_RATIO, _MOST_SHIFT = 3.0, 5.0  # of batch to running statistics, in deviations
_SETTLED = 100_000.0  # batches before which the running statistics do not count


class BatchRenorm(nn.Module):
    """Batch renormalization of [..., B, F] features, without learned scale and shift: a linear layer follows.

    In training a batch is normalized by its own statistics, then brought near to what the running ones would give,
    within bounds. Source: Ioffe 2017, arXiv:1702.03275, algorithm 1; constants of Bhatt et al. 2024 (CrossQ, ICLR).

    Attributes:
        mean, variance: [..., 1, F] running statistics.
        num_batches: [] float32, seen in training.
    """

    mean: Tensor
    variance: Tensor
    num_batches: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(*shape))
        self.register_buffer("variance", torch.ones(*shape))
        self.register_buffer("num_batches", torch.zeros(()))

    def forward(self, x: Tensor, *, train: bool, num_members: int | None = None) -> Tensor:
        """Return normalized features; in training move the running statistics."""
        mean, deviation = self.mean[:num_members], (self.variance[:num_members] + _EPSILON).sqrt()
        if not train:
            return (x - mean) / deviation
        own_variance, own_mean = torch.var_mean(x, dim=-2, correction=0, keepdim=True)
        own_deviation = (own_variance + _EPSILON).sqrt()
        with torch.no_grad():
            is_settled = self.num_batches >= _SETTLED
            ratio = (own_deviation / deviation).clamp(1 / _MOST_RATIO, _MOST_RATIO)
            shift = ((own_mean - mean) / deviation).clamp(-_MOST_SHIFT, _MOST_SHIFT)
            ratio, shift = torch.where(is_settled, ratio, 1.0), torch.where(is_settled, shift, 0.0)
            self.mean.lerp_(own_mean, _RATE)
            self.variance.lerp_(own_variance, _RATE)
            self.num_batches += 1.0
        return (x - own_mean) / own_deviation * ratio + shift


class MLP(nn.Module):
    """A ReLU network with a linear output, or E independent ones with one batched product per layer.

    Parameters are named `weights.i` [in, out] and `biases.i` [out], of an ensemble [E, in, out] and [E, 1, out], i
    counted from the input. Weights and biases start from U(-1/sqrt(in), 1/sqrt(in)), as in `torch.nn.Linear`.

    Args:
        sizes: widths from input to output; two or more.
        num_members: E; None for a single network.
        dropout: share of each hidden layer's outputs that is 0 where `forward` gets a generator; the others grow.
        layer_norm: normalize each hidden layer before its ReLU (no learned scale), after the dropout.
        batch_norm: normalize the inputs of every layer by `BatchRenorm`.
        generator: CPU generator of the initial weights; torch's global one when None.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        num_members: int | None = None,
        dropout: float = 0.0,
        layer_norm: bool = False,
        batch_norm: bool = False,
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
        self._norms = tuple(BatchRenorm((*weight_axes, 1, i)) for i, _ in layers if batch_norm)
        self.norms = nn.ModuleList(self._norms)
        self.num_members = num_members
        self.dropout, self.layer_norm = dropout, layer_norm
        # A ParameterList is slow to walk.
        self._layers: tuple[tuple[Tensor, Tensor], ...] = tuple(zip(self.weights, self.biases, strict=True))

    def forward(
        self,
        x: Tensor,
        *,
        num_members: int | None = None,
        generator: Generator | None = None,
        train: bool = False,
    ) -> Tensor:
        """Evaluate on rows [B, in]: [B, out], or [E, B, out] of an ensemble.

        Args:
            x: [B, in].
            num_members: evaluate only so many first members of an ensemble, not in training.
            generator: of the dropout; None: without.
            train: normalize by the batch's statistics and move the running ones; without `batch_norm` of no effect.
        """
        layers = self._layers
        affine: Callable[..., Tensor] = torch.addmm if self.num_members is None else torch.baddbmm
        if self.num_members is not None:
            count = num_members or self.num_members
            layers = tuple((weight[:count], bias[:count]) for weight, bias in self._layers)
            x = x.expand(count, *x.shape)
        *hidden, (last_weight, last_bias) = layers
        for i, (weight, bias) in enumerate(hidden):
            if self._norms:
                x = self._norms[i](x, train=train, num_members=num_members)
            x = affine(bias, x, weight)
            if self.dropout and generator is not None:
                is_kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.dropout
                x = x * is_kept / (1.0 - self.dropout)
            if self.layer_norm:
                x = F.layer_norm(x, x.shape[-1:])
            x = torch.relu_(x)
        if self._norms:
            x = self._norms[-1](x, train=train, num_members=num_members)
        if self.num_members is not None and last_weight.shape[-1] == 1:
            # A product with one column: several times faster as a weighted sum.
            return (x * last_weight.transpose(1, 2)).sum(dim=-1, keepdim=True) + last_bias
        return affine(last_bias, x, last_weight)

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """Return weights.i and biases.i of a single network without norms that gives the same outside of training."""
        parts: dict[str, Tensor] = {}
        pairs = zip(self._layers, self._norms, strict=False)  # there may be no norms
        for i, ((weight, bias), norm) in enumerate(pairs):
            scale = (norm.variance + _EPSILON).rsqrt()  # [1, in]
            parts[f"weights.{i}"] = scale.T * weight
            parts[f"biases.{i}"] = bias - ((norm.mean * scale) @ weight)[0]
        return parts

    @torch.no_grad()
    def unfold(self) -> None:
        """Take weights and biases as those of `folded`, and make them the network's own."""
        for (weight, bias), norm in zip(self._layers, self._norms, strict=False):
            bias += (norm.mean @ weight)[0]
            weight *= (norm.variance + _EPSILON).sqrt().T
