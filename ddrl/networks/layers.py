"""What networks are built of: activations, layers with reproducible initial weights, and the axes of images.

Layers draw their initial weights from a given generator only, and leave torch's global one alone when there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

L = TypeVar("L", bound=nn.Linear | nn.Conv2d)
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: Mapping[str, Activation] = {"tanh": torch.tanh_, "relu": torch.relu_}  # both in place

MOST_FIRST_CHANNELS = 4  # of an image that is not square, whose axes do not tell


class Axes(Enum):
    """Where an image has its channels."""

    FIRST = "first"
    LAST = "last"
    NONE = "none"


def image_axes(shape: Sequence[int]) -> Axes:
    """[H, W] has no channel axis, [C, H, W] and [H, W, C] are told apart by their sizes.

    The channel axis is the last one, unless the first is the shorter one, and the other two are equal or it is of at
    most MOST_FIRST_CHANNELS.
    """
    if len(shape) == 2:
        return Axes.NONE
    first, middle, last = shape
    is_first = first < last and (middle == last or first <= MOST_FIRST_CHANNELS)
    return Axes.FIRST if is_first else Axes.LAST


def channels_and_sides(shape: Sequence[int], axes: Axes) -> tuple[int, list[int]]:
    """C, and [H, W], of an image of this shape."""
    if axes is Axes.NONE:
        return 1, [*shape]
    if axes is Axes.FIRST:
        return shape[0], [*shape[1:]]
    return shape[2], [*shape[:2]]


def channels_first(x: Tensor, axes: Axes) -> Tensor:
    """A view [B, C, H, W] of [B, *O]."""
    if axes is Axes.NONE:
        return x.unsqueeze(1)
    return x.permute(0, 3, 1, 2) if axes is Axes.LAST else x


def orthogonal(layer: L, gain: float, generator: Generator | None) -> L:
    """Give a layer made on the "meta" device its memory, orthogonal weights times `gain` and biases of zero."""
    layer.to_empty(device="cpu")
    nn.init.orthogonal_(layer.weight, gain, generator)
    return _without_bias(layer)


def xavier(layer: L, generator: Generator | None) -> L:
    """Give a layer made on the "meta" device its memory, Xavier's uniform weights and biases of zero, if any.

    Source: Glorot & Bengio 2010, "Understanding the difficulty of training deep feedforward neural networks", eq. 16.
    """
    layer.to_empty(device="cpu")
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    return _without_bias(layer)


def _without_bias(layer: L) -> L:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def orthogonal_linear(
    num_inputs: int, num_outputs: int, gain: float, generator: Generator | None
) -> nn.Linear:
    """A dense layer with orthogonal weights times `gain` and biases of zero."""
    layer = nn.Linear(num_inputs, num_outputs, device="meta")  # draws nothing from the global generator
    return orthogonal(layer, gain, generator)


def uniform_(layer: nn.Module, num_inputs: int, generator: Generator | None) -> None:
    """Fill all parameters from U(-1/sqrt(num_inputs), 1/sqrt(num_inputs)): torch's default."""
    bound = 1.0 / math.sqrt(num_inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=generator)


def uniform_linear(num_inputs: int, num_outputs: int, generator: Generator | None) -> nn.Linear:
    """A dense layer as torch makes them."""
    layer = nn.Linear(num_inputs, num_outputs, device="meta").to_empty(device="cpu")
    uniform_(layer, num_inputs, generator)
    return layer


def dense(
    num_inputs: int, hidden_sizes: Sequence[int], generator: Generator | None, *, is_xavier: bool = False
) -> list[nn.Linear]:
    """Dense layers of these widths: orthogonal weights of gain sqrt(2), or Xavier's."""
    sizes = list(pairwise([num_inputs, *hidden_sizes]))
    if is_xavier:
        return [xavier(nn.Linear(i, o, device="meta"), generator) for i, o in sizes]
    return [orthogonal_linear(i, o, math.sqrt(2), generator) for i, o in sizes]
