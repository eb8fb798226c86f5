"""Multilayer perceptrons: one network, an ensemble evaluated as one, and their parameters as one vector.

Small networks spend more time in the overhead of calls than in arithmetic. So an ensemble is a batched
matrix product per layer, and `FlatParameters` lets optimizers and target updates work on a single tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F


def _uniform(shape: tuple[int, ...], num_inputs: int, generator: Generator | None) -> nn.Parameter:
    """A parameter from U(-1/sqrt(num_inputs), 1/sqrt(num_inputs)): the default of `torch.nn.Linear`."""
    bound = 1.0 / math.sqrt(num_inputs)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))


class MLP(nn.Module):
    """ReLU network with a linear output: sizes (in, hidden..., out).

    Parameters are named `weights.i` [in, out] and `biases.i` [out], i counted from the input.

    Args:
        sizes: widths from input to output; two or more.
        layer_norm: normalize each hidden layer before its ReLU (no learned scale).
        generator: CPU generator of the initial weights; torch's global one when None.
    """

    def __init__(
        self, sizes: Sequence[int], *, layer_norm: bool = False, generator: Generator | None = None
    ) -> None:
        super().__init__()
        layers = list(pairwise(sizes))
        self.weights = nn.ParameterList(_uniform((i, o), i, generator) for i, o in layers)
        self.biases = nn.ParameterList(_uniform((o,), i, generator) for i, o in layers)
        self.layer_norm = layer_norm
        self._layers = tuple(zip(self.weights, self.biases, strict=True))  # ParameterList is slow to walk

    def forward(self, x: Tensor) -> Tensor:
        """[B, in] -> [B, out]."""
        *hidden, (last_weight, last_bias) = self._layers
        for weight, bias in hidden:
            x = torch.addmm(bias, x, weight)
            if self.layer_norm:
                x = F.layer_norm(x, x.shape[-1:])
            x = torch.relu_(x)
        return torch.addmm(last_bias, x, last_weight)


class EnsembleMLP(nn.Module):
    """E independent `MLP`s of one shape, evaluated together by one batched product per layer.

    Parameters are named `weights.i` [E, in, out] and `biases.i` [E, 1, out], i counted from the input.

    Args:
        num_members: E.
        sizes: widths from input to output; two or more.
        layer_norm: normalize each hidden layer before its ReLU (no learned scale).
        generator: CPU generator of the initial weights; torch's global one when None.
    """

    def __init__(
        self,
        num_members: int,
        sizes: Sequence[int],
        *,
        layer_norm: bool = False,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        layers = list(pairwise(sizes))
        self.num_members = num_members
        self.weights = nn.ParameterList(_uniform((num_members, i, o), i, generator) for i, o in layers)
        self.biases = nn.ParameterList(_uniform((num_members, 1, o), i, generator) for i, o in layers)
        self.layer_norm = layer_norm
        self._layers = tuple(zip(self.weights, self.biases, strict=True))  # ParameterList is slow to walk

    def forward(self, x: Tensor, *, num_members: int | None = None) -> Tensor:
        """Evaluate the first `num_members` members (None: all E) on the same rows: [B, in] -> [E, B, out]."""
        count = self.num_members if num_members is None else num_members
        x = x.expand(count, *x.shape)
        *hidden, (last_weight, last_bias) = self._layers
        for weight, bias in hidden:
            x = torch.baddbmm(bias[:count], x, weight[:count])
            if self.layer_norm:
                x = F.layer_norm(x, x.shape[-1:])
            x = torch.relu_(x)
        if last_weight.shape[-1] == 1:  # a product with one column: several times faster as a weighted sum
            weighted = x * last_weight[:count].transpose(1, 2)  # [E, B, in]
            x = weighted.sum(dim=-1, keepdim=True) + last_bias[:count]
            return x
        return torch.baddbmm(last_bias[:count], x, last_weight[:count])


class FlatParameters:
    """All parameters of a module as views of one vector: one kernel per optimizer step or target update.

    Attributes:
        vector: [P] the parameters in the module's order; its `.grad` is [P] and always allocated.
        parameters: the module's own parameters, which share the vector's memory.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names, self.parameters = zip(*module.named_parameters(), strict=True)
        self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in self.parameters]))
        self.vector.grad = torch.zeros_like(self.vector)
        sections = self.vector.detach().split_with_sizes([p.numel() for p in self.parameters])
        for parameter, section in zip(self.parameters, sections, strict=True):
            parameter.data = section.view(parameter.shape)

    def differentiate(self, loss: Tensor) -> None:
        """Set `vector.grad` to the gradient of a scalar loss with respect to these parameters *only*."""
        gradients = torch.autograd.grad(loss, self.parameters)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.vector.grad)

    def clip_gradient(self, max_norm: float) -> Tensor:
        """Scale `vector.grad` down to `max_norm` where it is longer; the norm [] that it had."""
        gradient = self.vector.grad
        assert gradient is not None, "there always is one"
        norm: Tensor = gradient.norm()
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def copies(self) -> dict[str, Tensor]:
        """CPU copies of the parameters by their names in the module, in one transfer."""
        vector = self.vector.detach().to("cpu", copy=True)
        sections = vector.split_with_sizes([parameter.numel() for parameter in self.parameters])
        parts = zip(self.parameters, sections, strict=True)
        return dict(zip(self._names, (part.view(own.shape) for own, part in parts), strict=True))
