"""Trunks: from observations [B, *O] to features [B, F]. Whoever uses one adds the heads.

Chosen by name: "mlp" for vectors, "conv" for small images, those of `images` for screens, "module:callable" for one's
own.

The built-in ones start with orthogonal weights of gain sqrt(2) and biases of zero unless they say otherwise, and apply
the activation after each layer, the last included. Source: Huang et al. 2022, "The 37 Implementation Details of
Proximal Policy Optimization" (ICLR blog track), detail 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ddrl.networks.custom import NetworkError, custom_trunk, refuse
from ddrl.networks.images import NORMS, PlainTrunk, ResidualTrunk
from ddrl.networks.layers import (
    ACTIVATIONS,
    Activation,
    channels_and_sides,
    channels_first,
    dense,
    image_axes,
    orthogonal,
    orthogonal_linear,
)

__all__ = [
    "ACTIVATIONS",
    "ConvTrunk",
    "MLPTrunk",
    "NetworkError",
    "PlainTrunk",
    "ResidualTrunk",
    "make_trunk",
    "orthogonal_linear",
    "to_input",
]

LEAST_SIDE = 5  # of an image, in pixels
# By the shorter side of the image: channels, side of the kernel and stride of each convolution.
_CONVOLUTIONS = (
    (36, ((32, 8, 4), (64, 4, 2), (64, 3, 1))),  # Mnih et al. 2015 (Nature 518), methods
    (16, ((16, 3, 2), (32, 3, 2))),
    (LEAST_SIDE, ((16, 3, 1), (32, 3, 1))),  # the first as in MinAtar (arXiv:1903.03176)
)


def make_trunk(
    network: str,
    observation_shape: Sequence[int],
    *,
    hidden_sizes: Sequence[int],
    activation: str,
    norm: str = "none",
    kwargs: Mapping[str, Any] | None = None,
    generator: Generator | None = None,
) -> tuple[nn.Module, int]:
    """A trunk for observations of one shape, on the CPU.

    Args:
        network: "mlp" (`MLPTrunk`), "conv" (`ConvTrunk`), "nature" and "data_efficient" (`PlainTrunk`),
            "impala" (`ResidualTrunk`), or "module:callable" of an allowed module. The callable is called as
            `make(observation_shape, **kwargs)` and returns a `torch.nn.Module` that maps float32 [B, *O], as
            `to_input` gives them, to float32 features [B, F], F its own choice. Each row's features depend on this
            row only, and are the same in training as in evaluation mode: no BatchNorm, no Dropout. All its
            parameters are float32, trained and used by `forward`. What does not fit is refused.
        observation_shape: `*O`.
        hidden_sizes: widths of the dense layers of a built-in trunk.
        activation: "tanh" or "relu", of a built-in trunk.
        norm: "none", "group" or "batch", after each convolution of "nature" and "impala"; "none" for all others. With
            "batch" a row's features depend on the others in training mode, and on running statistics, which are
            buffers, in evaluation mode.
        kwargs: keyword arguments of one's own callable.
        generator: CPU generator of the initial weights; torch's global one when None. One's own callable finds
            the global one seeded from it, and nothing else in the process notices.

    Returns:
        The trunk, and F.

    Raises:
        NetworkError: unknown name, or a trunk that cannot serve these observations.
    """
    shape = tuple(observation_shape)
    if ":" not in network and network not in _BUILT_IN:
        refuse(network, f'is unknown; use {", ".join(_BUILT_IN)} or your own "module:callable"')
    if norm not in NORMS:
        refuse(network, f"norm {norm!r} is unknown; use {', '.join(NORMS[:-1])} or {NORMS[-1]}")
    if norm != "none" and network not in ("nature", "impala"):
        refuse(network, f"norm {norm!r} is for nature and impala only; set norm to none")
    if ":" in network:
        return custom_trunk(network, shape, kwargs or {}, generator=generator)
    if kwargs:
        refuse(
            network, f"takes no keyword arguments, but got {dict(kwargs)}; they are for a network of your own"
        )
    if activation not in ACTIVATIONS:
        refuse(network, f"activation {activation!r} is unknown; use {' or '.join(ACTIVATIONS)}")
    options = {} if norm == "none" else {"norm": norm}
    made = _BUILT_IN[network](shape, hidden_sizes, ACTIVATIONS[activation], generator=generator, **options)
    return made, made.num_features


def to_input(observation: Tensor) -> Tensor:
    """Observations as a network gets them: float32, with uint8 (pixels) divided by 255; of any shape."""
    if observation.dtype == torch.float32:
        return observation
    if observation.dtype == torch.uint8:
        return observation.float().div_(255.0)
    return observation.float()


class MLPTrunk(nn.Module):
    """Dense layers from a vector [O].

    Parameters are named `layers.i.weight` [out, in] and `layers.i.bias` [out], i counted from the input.

    Args:
        observation_shape: (O,).
        hidden_sizes: width of each layer; the last one is `num_features`.
        activation: one of `ACTIVATIONS`.
        generator: CPU generator of the initial weights.

    Raises:
        NetworkError: observations that are no vectors.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        hidden_sizes: Sequence[int],
        activation: Activation,
        *,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        if len(observation_shape) != 1:
            others = "conv for images, or " if len(observation_shape) == 3 else ""
            refuse(
                "mlp",
                f"needs a vector, but observations are {observation_shape}; use {others}"
                "gymnasium.wrappers.FlattenObservation",
            )
        layers = dense(observation_shape[0], hidden_sizes, generator)
        self.layers = nn.ModuleList(layers)
        self.num_features = layers[-1].out_features if layers else observation_shape[0]
        self._activate = activation
        self._pairs = [(layer.weight, layer.bias) for layer in layers]  # a ModuleList is slow to walk

    def forward(self, x: Tensor) -> Tensor:
        """[B, O] -> [B, F]."""
        activate = self._activate
        for weight, bias in self._pairs:
            x = activate(F.linear(x, weight, bias))
        return x


class ConvTrunk(nn.Module):
    """Convolutions, then dense layers, from a small image [H, W, C] or [C, H, W].

    `layers.image_axes` says which axis is that of channels. The convolutions go by the shorter side of the image: from
    36 pixels three of kernels 8, 4, 3, strides 4, 2, 1 and 32, 64, 64 channels; from 16 pixels two of 3x3, stride 2,
    16 and 32 channels; from 5 pixels the same with stride 1. Zeros pad the border, as few as let every pixel be seen.

    Parameters are named `convolutions.i.weight` [out, in, k, k], `convolutions.i.bias` [out], `layers.i.weight`
    [out, in] and `layers.i.bias` [out], i counted from the input.

    Args:
        observation_shape: (H, W, C) or (C, H, W).
        hidden_sizes: width of each dense layer; the last one is `num_features`.
        activation: one of `ACTIVATIONS`.
        generator: CPU generator of the initial weights.

    Raises:
        NetworkError: observations that are no images, or too small ones.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        hidden_sizes: Sequence[int],
        activation: Activation,
        *,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        if len(observation_shape) != 3:
            other = "mlp" if len(observation_shape) == 1 else "mlp and gymnasium.wrappers.FlattenObservation"
            if len(observation_shape) == 2 and min(observation_shape) >= 36:
                other = "nature or impala"
            refuse(
                "conv",
                f"needs images [H, W, C] or [C, H, W], but observations are {observation_shape}; use {other}",
            )
        self._axes = image_axes(observation_shape)
        channels, sides = channels_and_sides(observation_shape, self._axes)
        if min(sides) < LEAST_SIDE:
            refuse(
                "conv",
                f"needs images of {LEAST_SIDE}x{LEAST_SIDE} pixels or more, but observations are "
                f"{observation_shape}; use mlp and gymnasium.wrappers.FlattenObservation",
            )
        self.convolutions = nn.ModuleList()
        self._convolutions: list[tuple[Tensor, Tensor | None, int, tuple[int, int]]] = []
        for out_channels, kernel, stride in next(
            layers for least, layers in _CONVOLUTIONS if min(sides) >= least
        ):
            padding = (_padding(sides[0], kernel, stride), _padding(sides[1], kernel, stride))
            sides = [
                (side + 2 * pad - kernel) // stride + 1 for side, pad in zip(sides, padding, strict=True)
            ]
            layer = orthogonal(
                nn.Conv2d(channels, out_channels, kernel, stride, padding, device="meta"),
                math.sqrt(2),
                generator,
            )
            self.convolutions.append(layer)
            self._convolutions.append((layer.weight, layer.bias, stride, padding))
            channels = out_channels
        num_inputs = channels * math.prod(sides)
        layers = dense(num_inputs, hidden_sizes, generator)
        self.layers = nn.ModuleList(layers)
        self.num_features = layers[-1].out_features if layers else num_inputs
        self._activate = activation
        self._pairs = [(layer.weight, layer.bias) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, C] or [B, C, H, W], as at construction -> [B, F]."""
        activate = self._activate
        x = channels_first(x, self._axes)
        for weight, bias, stride, padding in self._convolutions:
            x = activate(F.conv2d(x, weight, bias, stride, padding))
        x = x.flatten(1)
        for weight, bias in self._pairs:
            x = activate(F.linear(x, weight, bias))
        return x


def _padding(side: int, kernel: int, stride: int) -> int:
    """The fewest zeros at both ends with which the last kernel reaches the last pixel."""
    return next(pad for pad in count() if (side + 2 * pad - kernel) % stride <= pad)


_BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "mlp": MLPTrunk,
    "conv": ConvTrunk,
    "nature": partial(PlainTrunk, "nature"),
    "impala": ResidualTrunk,
    "data_efficient": partial(PlainTrunk, "data_efficient"),
}
