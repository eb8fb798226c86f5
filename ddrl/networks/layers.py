"""Layers with reproducible initial weights.

Initial weights are drawn from a given generator, and from torch's global one only where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

from ddrl.networks.placement import device

L = TypeVar("L", bound=nn.Linear | nn.Conv2d)
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: Mapping[str, Activation] = {"tanh": torch.tanh_, "relu": torch.relu_}  # both in place


def orthogonal(layer: L, gain: float, generator: Generator | None, *, num_parts: int = 1) -> L:
    """Give a layer on the "meta" device memory, orthogonal weights times `gain` and biases of zero.

    Args:
        layer: to be filled.
        gain: scale of the weights.
        generator: of the weights.
        num_parts: equal parts of the outputs; each is orthogonal by itself.
    """
    layer.to_empty(device=device())
    with torch.no_grad():
        for part in layer.weight.chunk(num_parts):
            nn.init.orthogonal_(part, gain, generator)
    return _zero_bias(layer)


def xavier(layer: L, generator: Generator | None) -> L:
    """Give a layer on the "meta" device memory, Xavier's uniform weights and biases of zero, if any.

    Source: Glorot & Bengio 2010, "Understanding the difficulty of training deep feedforward neural networks", eq. 16.
    """
    layer.to_empty(device=device())
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    return _zero_bias(layer)


def _zero_bias(layer: L) -> L:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def orthogonal_linear(
    num_inputs: int, num_outputs: int, gain: float, generator: Generator | None, *, num_parts: int = 1
) -> nn.Linear:
    """Return a dense layer as of `orthogonal`."""
    layer = nn.Linear(num_inputs, num_outputs, device="meta")  # draws nothing from the global generator
    return orthogonal(layer, gain, generator, num_parts=num_parts)


def uniform_(layer: nn.Module, num_inputs: int, generator: Generator | None) -> None:
    """Fill all parameters from U(-1/sqrt(num_inputs), 1/sqrt(num_inputs)), torch's default."""
    bound = 1.0 / math.sqrt(num_inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=generator)


def uniform_linear(num_inputs: int, num_outputs: int, generator: Generator | None) -> nn.Linear:
    """Return a dense layer as of `uniform_`."""
    layer = nn.Linear(num_inputs, num_outputs, device="meta").to_empty(device=device())
    uniform_(layer, num_inputs, generator)
    return layer


def dense(
    num_inputs: int, hidden_sizes: Sequence[int], generator: Generator | None, *, is_xavier: bool = False
) -> nn.ModuleList:
    """Return dense layers of these widths: orthogonal weights of gain sqrt(2), or Xavier's."""
    layers = [nn.Linear(i, o, device="meta") for i, o in pairwise([num_inputs, *hidden_sizes])]
    return nn.ModuleList(
        xavier(layer, generator) if is_xavier else orthogonal(layer, math.sqrt(2), generator)
        for layer in layers
    )
