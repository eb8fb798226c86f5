"""Trunks for screens: DQN's of 2015, IMPALA's residual one, and a small one for little data.

All map float32 [B, H, W] (one channel), [B, C, H, W] or [B, H, W, C] (`layers.image_axes` says which) to features
[B, F], with dense layers after their convolutions. Parameters are named `convolutions.i.weight` [out, in, k, k] and
`convolutions.i.bias` [out], `layers.i.weight` [out, in] and `layers.i.bias` [out], i counted from the input.

With a norm after each convolution these have no biases, which it would cancel, but `convolutions.i.norm.weight` and
`convolutions.i.norm.bias` [out], and "batch" the buffers `convolutions.i.norm.mean` and `.variance` [out]; and all
weights start as Xavier's. GroupNorm with 16 groups and Xavier's weights are those of rainbow-with-ray
(github.com/fangyuedong/rainbow-with-ray), whose author reports less tuning and steadier curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ddrl.networks.custom import refuse
from ddrl.networks.layers import (
    Activation,
    Axes,
    channels_and_sides,
    channels_first,
    dense,
    image_axes,
    orthogonal,
    xavier,
)

NORMS = ("none", "group", "batch")
NUM_GROUPS = 16

# By name: least side of an image, what to use for smaller ones; channels, kernel's side and stride of each convolution.
_PLAIN: Mapping[str, tuple[int, str, tuple[tuple[int, int, int], ...]]] = {
    "nature": (36, "impala or conv", ((32, 8, 4), (64, 4, 2), (64, 3, 1))),
    "data_efficient": (25, "impala or conv", ((32, 5, 5), (64, 5, 5))),
}
_SECTIONS = (16, 32, 32)  # channels
_COPYING: Mapping[Activation, Activation] = {torch.tanh_: torch.tanh, torch.relu_: torch.relu}


class BatchNorm(nn.Module):
    """Batch normalization of images: by the batch in training mode, by running statistics in evaluation mode.

    As torch.nn.BatchNorm2d, but without its integer count of batches: all that is published of a network is float32.
    Source: Ioffe & Szegedy 2015, arXiv:1502.03167.

    Args:
        num_channels: C.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("variance", torch.ones(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same; in training mode the running statistics take over a tenth of the batch's."""
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, training=self.training)


class Convolution(nn.Conv2d):
    """A convolution, and what normalizes its output, if anything; on the CPU.

    Args:
        sizes: channels in, channels out, side of the kernel, stride.
        padding: zeros at each end.
        norm: one of NORMS.
        gain: of the orthogonal weights where there is no norm.
        generator: CPU generator of the initial weights.
    """

    norm: nn.Module | None

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        padding: int,
        *,
        norm: str,
        gain: float,
        generator: Generator | None,
    ) -> None:
        super().__init__(*sizes, padding, bias=norm == "none", device="meta")  # draws nothing
        if norm == "none":
            orthogonal(self, gain, generator)
        else:
            xavier(self, generator)
        channels = self.out_channels
        if norm == "group":
            self.norm = nn.GroupNorm(NUM_GROUPS, channels)
        else:
            self.norm = BatchNorm(channels) if norm == "batch" else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, H', W']."""
        x = super().forward(x)
        return x if self.norm is None else self.norm(x)


def _read(name: str, shape: tuple[int, ...], least_side: int, remedy: str) -> tuple[Axes, int, list[int]]:
    """Where the channels are, C and [H, W].

    Raises:
        NetworkError: observations that are no images, or too small ones.
    """
    if len(shape) not in (2, 3):
        other = "mlp" if len(shape) == 1 else "frames of one channel, or a network of your own"
        refuse(
            name, f"needs images [H, W], [C, H, W] or [H, W, C], but observations are {shape}; use {other}"
        )
    axes = image_axes(shape)
    channels, sides = channels_and_sides(shape, axes)
    if min(sides) < least_side:
        refuse(
            name,
            f"needs images of {least_side}x{least_side} pixels or more, but observations are {shape}; use {remedy}",
        )
    return axes, channels, sides


def _view(x: Tensor, axes: Axes) -> Tensor:
    """[B, *O] as [B, C, H, W]."""
    x = channels_first(x, axes)
    if torch.is_grad_enabled() and x.device.type == "cpu":
        # A quarter faster forward and backward there; forward alone is a little slower.
        return x.contiguous(memory_format=torch.channels_last)
    return x


class PlainTrunk(nn.Module):
    """Convolutions without padding, then dense layers.

    "nature": 32 of 8x8, stride 4, 64 of 4x4, stride 2, 64 of 3x3; from 36 pixels; usual hidden sizes (512,). Source:
    Mnih et al. 2015, "Human-level control through deep reinforcement learning" (Nature 518), methods.
    "data_efficient": 32 of 5x5, stride 5, 64 of 5x5, stride 5; from 25 pixels; usual hidden sizes (256,). Source: van
    Hasselt et al. 2019, "When to use parametric models in reinforcement learning?", arXiv:1906.05243, appendix.

    Args:
        name: of the two.
        observation_shape: (H, W), (C, H, W) or (H, W, C).
        hidden_sizes: width of each dense layer; the last one is `num_features`.
        activation: one of `ACTIVATIONS`.
        norm: one of NORMS.
        generator: CPU generator of the initial weights.

    Raises:
        NetworkError: observations that are no images, or too small ones.
    """

    def __init__(
        self,
        name: str,
        observation_shape: tuple[int, ...],
        hidden_sizes: Sequence[int],
        activation: Activation,
        *,
        norm: str = "none",
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        least_side, remedy, convolutions = _PLAIN[name]
        self._axes, channels, sides = _read(name, observation_shape, least_side, remedy)
        self.convolutions = nn.ModuleList()
        for out_channels, kernel, stride in convolutions:
            sizes = (channels, out_channels, kernel, stride)
            self.convolutions.append(Convolution(sizes, 0, norm=norm, gain=math.sqrt(2), generator=generator))
            channels, sides = out_channels, [(side - kernel) // stride + 1 for side in sides]
        self.layers, self.num_features = _dense(channels * math.prod(sides), hidden_sizes, norm, generator)
        self._activate = activation
        self._stages = tuple(self.convolutions)  # a ModuleList is slow to walk
        self._dense = tuple(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """[B, *O] -> [B, F]."""
        activate = self._activate
        x = _view(x, self._axes)
        for convolution in self._stages:
            x = activate(convolution(x))
        x = x.flatten(1)
        for layer in self._dense:
            x = activate(layer(x))
        return x


class ResidualTrunk(nn.Module):
    """IMPALA's residual network, then dense layers; for images from 8 pixels; usual hidden sizes (256,).

    Three sections of 16, 32 and 32 channels, each a convolution, a max pool of 3x3 with stride 2, and two residual
    blocks of activation, convolution, activation, convolution; all convolutions 3x3. Without norm their weights are
    orthogonal with gain 1, so that the sums of the blocks stay of the size of their inputs.
    Source: Espeholt et al. 2018, arXiv:1802.01561, figure 3 (right), without its LSTM.

    `convolutions` has five in each section: the first one, then two for each block.

    Args:
        observation_shape: (H, W), (C, H, W) or (H, W, C).
        hidden_sizes: width of each dense layer; the last one is `num_features`.
        activation: one of `ACTIVATIONS`.
        norm: one of NORMS.
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
        norm: str = "none",
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        self._axes, channels, sides = _read(
            "impala", observation_shape, 8, "conv, or mlp and gymnasium.wrappers.FlattenObservation"
        )
        self.convolutions = nn.ModuleList()
        for width in _SECTIONS:
            for num_inputs in (channels, width, width, width, width):
                sizes = (num_inputs, width, 3, 1)
                self.convolutions.append(Convolution(sizes, 1, norm=norm, gain=1.0, generator=generator))
            channels, sides = width, [(side + 1) // 2 for side in sides]
        self.layers, self.num_features = _dense(channels * math.prod(sides), hidden_sizes, norm, generator)
        self._activate, self._copying = activation, _COPYING[activation]
        stages = tuple(self.convolutions)  # a ModuleList is slow to walk
        self._sections = tuple(stages[i : i + 5] for i in range(0, len(stages), 5))
        self._dense = tuple(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """[B, *O] -> [B, F]."""
        activate, copying = self._activate, self._copying
        x = _view(x, self._axes)
        for first, *blocks in self._sections:
            x = F.max_pool2d(first(x), 3, stride=2, padding=1)
            for i in (0, 2):
                x = x + blocks[i + 1](activate(blocks[i](copying(x))))
        x = activate(x).flatten(1)
        for layer in self._dense:
            x = activate(layer(x))
        return x


def _dense(
    num_inputs: int, hidden_sizes: Sequence[int], norm: str, generator: Generator | None
) -> tuple[nn.ModuleList, int]:
    """The dense layers, and F."""
    layers = dense(num_inputs, hidden_sizes, generator, is_xavier=norm != "none")
    return nn.ModuleList(layers), layers[-1].out_features if layers else num_inputs
