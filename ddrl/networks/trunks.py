"""Trunks: from observations [B, *O] to features [B, F], to which heads are added.

Built-in trunks start with orthogonal weights of gain sqrt(2) and biases of zero unless they say otherwise, and apply
the activation after each layer, the last included. Source: Huang et al. 2022, "The 37 Implementation Details of
Proximal Policy Optimization" (ICLR blog track), detail 2.

Their parameters are named `convolutions.i.weight` [out, in, k, k], `convolutions.i.bias` [out], `layers.i.weight`
[out, in] and `layers.i.bias` [out], i counted from the input; with a norm `convolutions.i.norm.weight` and
`convolutions.i.norm.bias` [out] instead of the convolution's bias, and for "batch" the buffers
`convolutions.i.norm.mean` and `.variance` [out].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ddrl.networks.convolutional import Convolution, channels_first, fewest_zeros
from ddrl.networks.custom import custom_trunk, refuse
from ddrl.networks.layers import ACTIVATIONS, Activation, dense

Layers = tuple[tuple[int, int, int], ...]  # channels, side of the kernel and stride of each convolution

_NATURE: Layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # Mnih et al. 2015 (Nature 518), methods
_DATA_EFFICIENT: Layers = ((32, 5, 5), (64, 5, 5))  # van Hasselt et al. 2019, arXiv:1906.05243, appendix
# "conv", by the shorter side of the image from which each applies.
_CONV: tuple[tuple[int, Layers], ...] = (
    (36, _NATURE),
    (16, ((16, 3, 2), (32, 3, 2))),
    (5, ((16, 3, 1), (32, 3, 1))),  # the first as in MinAtar (arXiv:1903.03176)
)
_FLATTEN = "mlp and gymnasium.wrappers.FlattenObservation"
# Least side of an image in pixels, and what to use for smaller ones.
_LEAST_SIDES: Mapping[str, tuple[int, str]] = {
    "conv": (_CONV[-1][0], f"use {_FLATTEN}"),
    "nature": (36, "use impala or conv"),
    "impala": (8, f"use conv, or {_FLATTEN}"),
    "data_efficient": (25, "use impala or conv"),
}
BUILT_IN = ("mlp", *_LEAST_SIDES)
_RESIDUAL_CHANNELS = (16, 32, 32)
_COPYING: Mapping[Activation, Activation] = {torch.tanh_: torch.tanh, torch.relu_: torch.relu}


def make_trunk(
    network: str,
    observation_shape: Sequence[int],
    *,
    hidden_sizes: Sequence[int],
    activation: str,
    norm: str = "none",
    kwargs: Mapping[str, Any] | None = None,
    image_shapes: Sequence[tuple[int, ...]] = (),
    is_stack: bool = False,
    generator: Generator | None = None,
) -> tuple[nn.Module, int]:
    """Return a trunk for observations of one shape, on the CPU, and the number F of its features.

    Args:
        network: "mlp", "conv", "nature", "data_efficient" or "impala" (see `Trunk`), or "module:callable" of an
            allowed module. The callable is called as `make(observation_shape, **kwargs)` and returns a
            `torch.nn.Module` that maps float32 [B, *O], as `to_input` gives them, to float32 features [B, F] of any F.
            Each row's features depend on this row only, and are the same in training as in evaluation mode: no
            BatchNorm, no Dropout. All its parameters are float32, trained and used by `forward`. What does not fit is
            refused.
        observation_shape: `*O`.
        hidden_sizes: widths of the dense layers of a built-in trunk.
        activation: "tanh" or "relu", of a built-in trunk.
        norm: "none", or "layer" before each activation, or "group" or "batch" after each convolution of "nature",
            "impala" and "data_efficient"; your own network takes "none". With "batch" a row's features depend on the
            others in training mode, and on running statistics, which are buffers, in evaluation mode.
        kwargs: keyword arguments of your own callable.
        image_shapes: of images in observations that are vectors of bytes; see `MultiInput`.
        is_stack: images are frames [H, W], stacked; else the sizes tell the channels, see `channels_first`.
        generator: CPU generator of the initial weights; torch's global one when None. Your own callable is called with
            the global one seeded from it, which is restored afterwards.

    Raises:
        NetworkError: unknown name, or a trunk that cannot take these observations.
    """
    shape = tuple(observation_shape)
    if ":" not in network and network not in BUILT_IN:
        refuse(network, f'is unknown; use {", ".join(BUILT_IN)} or your own "module:callable"')
    takes_norm = BUILT_IN if norm == "layer" else ("nature", "impala", "data_efficient")
    if norm != "none" and network not in takes_norm:
        which = "built-in networks" if norm == "layer" else "nature, impala and data_efficient"
        refuse(network, f"norm {norm!r} is for {which} only; set norm to none")
    if image_shapes and (":" in network or network == "mlp"):
        refuse(
            network, f"takes no images beside numbers, as of shapes {list(image_shapes)}; use conv or nature"
        )
    if ":" in network:
        return custom_trunk(network, shape, kwargs or {}, generator=generator)
    make = (
        partial(MultiInput, image_shapes=image_shapes) if image_shapes else partial(Trunk, is_stack=is_stack)
    )
    options: dict[str, Any] = {"activation": ACTIVATIONS[activation], "norm": norm, "generator": generator}
    trunk = make(network, shape, hidden_sizes, **options)
    return trunk, trunk.num_features


def to_input(observation: Tensor) -> Tensor:
    """Return observations as networks take them: float32, uint8 (pixels) divided by 255; of any shape."""
    if observation.dtype == torch.uint8:
        return observation.float().div_(255.0)
    return observation.float()


@torch.inference_mode()
def evaluate(module: nn.Module, observation: np.ndarray, *, by_row: bool) -> np.ndarray:
    """Return a module's output for observations, on the CPU: [N, *O] -> [N, F], float32.

    Args:
        module: maps observations as `to_input` gives them.
        observation: [N, *O].
        by_row: each row goes through the module by itself, so that its output does not depend on the others.
    """
    rows = to_input(torch.from_numpy(np.ascontiguousarray(observation)))
    # Copies, for kernels round differently by the strides (NumPy's [None] gives 0) and the place of a row too.
    layout = torch.contiguous_format
    parts = [row[None].clone(memory_format=layout) for row in rows] if by_row else [rows]
    return torch.cat([module(part) for part in parts]).numpy()


class Trunk(nn.Module):
    """Convolutions, unless for vectors, then dense layers.

    "mlp": no convolutions, for vectors [O].
    "conv": for small images [H, W, C] or [C, H, W]; by the shorter side from 36 pixels the convolutions of "nature",
    from 16 pixels two of 3x3, stride 2, 16 and 32 channels, from 5 pixels the same with stride 1. Zeros pad the border,
    as few as let every pixel be seen.
    "nature": 32 of 8x8, stride 4, 64 of 4x4, stride 2, 64 of 3x3, without padding; usual hidden sizes (512,).
    "data_efficient": 32 of 5x5, stride 5, 64 of 5x5, stride 5, without padding; usual hidden sizes (256,).
    "impala": residual, from 8 pixels; usual hidden sizes (256,). Three sections of 16, 32 and 32 channels, each a
    convolution, a max pool of 3x3 with stride 2, and two residual blocks of activation, convolution, activation,
    convolution; all convolutions 3x3. Without norm their weights are orthogonal with gain 1, so that the sums of the
    blocks stay of the size of their inputs. `convolutions` has five in each section: the first one, then two for each
    block. Source: Espeholt et al. 2018, arXiv:1802.01561, figure 3 (right), without its LSTM.
    The last three also take images [H, W] of one channel.

    Args:
        network: of these.
        observation_shape: `*O`.
        hidden_sizes: width of each dense layer; the last one is `num_features`.
        activation: one of `ACTIVATIONS`.
        norm, is_stack: see `make_trunk`.
        generator: CPU generator of the initial weights.

    Raises:
        NetworkError: unsuitable observations.
    """

    def __init__(
        self,
        network: str,
        observation_shape: tuple[int, ...],
        hidden_sizes: Sequence[int],
        activation: Activation,
        *,
        norm: str,
        generator: Generator | None,
        is_stack: bool = False,
    ) -> None:
        super().__init__()
        self._network, self._is_stack = network, is_stack
        self._stages: tuple[Convolution, ...] = ()
        if network == "mlp":
            if len(observation_shape) != 1:
                others = "conv for images, or " if len(observation_shape) == 3 else ""
                wrapper = f"{others}gymnasium.wrappers.FlattenObservation"
                refuse("mlp", f"needs a vector, but observations are {observation_shape}; use {wrapper}")
            num_inputs = observation_shape[0]
        else:
            channels, sides = _image(network, observation_shape, is_stack)
            make = partial(Convolution, norm=norm, generator=generator)
            if network == "impala":
                convolutions, num_inputs = _residual_convolutions(channels, sides, make)
            else:
                convolutions, num_inputs = _plain_convolutions(network, channels, sides, make)
            self.convolutions = nn.ModuleList(convolutions)
            self._stages = tuple(convolutions)  # a ModuleList is slow to walk
        self.layers = dense(num_inputs, hidden_sizes, generator, is_xavier=norm != "none")
        self.num_features = hidden_sizes[-1] if hidden_sizes else num_inputs
        self._activate, self._copying = activation, _COPYING[activation]
        self._has_layer_norm = norm == "layer"
        # To find a parameter through its module costs as much as a small operation.
        self._dense: list[tuple[Any, Any]] = [(layer.weight, layer.bias) for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        """[B, *O] -> [B, F]."""
        activate = self._activate
        if self._stages:
            x = x if self._is_stack else channels_first(x)
            # By a quarter faster to train with on a CPU; a forward pass alone is a little slower in it. A GPU's kernels
            # would copy other layouts to it one by one.
            if x.is_cuda or (self._network != "conv" and torch.is_grad_enabled() and x.device.type == "cpu"):
                x = x.contiguous(memory_format=torch.channels_last)
            if self._network == "impala":
                x = activate(self._residual_sums(x))
            else:
                for convolution in self._stages:
                    x = activate(convolution(x))
            x = x.flatten(1)
        for weight, bias in self._dense:
            x = F.linear(x, weight, bias)
            x = activate(F.layer_norm(x, x.shape[1:]) if self._has_layer_norm else x)
        return x

    def _residual_sums(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 32, H', W'], by the convolutions of "impala"."""
        for start in range(0, len(self._stages), 5):
            first, *blocks = self._stages[start : start + 5]
            x = F.max_pool2d(first(x), 3, stride=2, padding=1)
            for i in (0, 2):
                x = x + blocks[i + 1](self._activate(blocks[i](self._copying(x))))
        return x


class MultiInput(nn.Module):
    """The convolutions of `Trunk`, of its own for each image, joined with numbers; then dense layers.

    Its parameters are named `images.i.*` and `joined.*`, as those of `Trunk`.

    Args:
        network: as of `Trunk`, but for "mlp".
        observation_shape: number of bytes of an observation: those of its images, then those of float32 numbers.
        hidden_sizes: as of `Trunk`.
        image_shapes: of each image.
        options: activation, norm and generator, as of `Trunk`.

    Raises:
        NetworkError: unsuitable images.
    """

    def __init__(
        self,
        network: str,
        observation_shape: tuple[int, ...],
        hidden_sizes: Sequence[int],
        image_shapes: Sequence[tuple[int, ...]],
        **options: Any,
    ) -> None:
        super().__init__()
        trunks = [Trunk(network, shape, (), **options) for shape in image_shapes]
        self.images = nn.ModuleList(trunks)
        self._shapes = image_shapes
        sizes = list(map(math.prod, image_shapes))
        self._sections = [*sizes, observation_shape[0] - sum(sizes)]
        num_inputs = sum(trunk.num_features for trunk in trunks) + self._sections[-1] // 4
        self.joined = Trunk("mlp", (num_inputs,), hidden_sizes, **options)
        self.num_features = self.joined.num_features

    def forward(self, x: Tensor) -> Tensor:
        """[B, O] bytes divided by 255 -> [B, F]."""
        *images, rest = x.split_with_sizes(self._sections, dim=1)
        parts = [
            trunk(image.reshape(-1, *shape))
            for trunk, image, shape in zip(self.images, images, self._shapes, strict=True)
        ]
        if rest.shape[1]:
            parts.append((255.0 * rest).round().to(torch.uint8).contiguous().view(torch.float32))
        features: Tensor = self.joined(torch.cat(parts, dim=1))
        return features


def _plain_convolutions(
    network: str, channels: int, sides: Sequence[int], make: Callable[..., Convolution]
) -> tuple[list[Convolution], int]:
    """Return the convolutions of "conv", "nature" or "data_efficient", and the number of their outputs."""
    layers = {"nature": _NATURE, "data_efficient": _DATA_EFFICIENT}.get(network) or next(
        layers for least_side, layers in _CONV if min(sides) >= least_side
    )
    convolutions = []
    for width, kernel, stride in layers:
        padding = tuple(fewest_zeros(side, kernel, stride) if network == "conv" else 0 for side in sides)
        convolutions.append(make((channels, width, kernel, stride), padding))
        sides = [(side + 2 * pad - kernel) // stride + 1 for side, pad in zip(sides, padding, strict=True)]
        channels = width
    return convolutions, channels * math.prod(sides)


def _residual_convolutions(
    channels: int, sides: Sequence[int], make: Callable[..., Convolution]
) -> tuple[list[Convolution], int]:
    """Return the convolutions of "impala", and the number of their outputs."""
    convolutions = []
    for width in _RESIDUAL_CHANNELS:
        inputs = (channels, width, width, width, width)
        convolutions += [make((num_inputs, width, 3, 1), 1, gain=1.0) for num_inputs in inputs]
        channels, sides = width, [(side + 1) // 2 for side in sides]
    return convolutions, channels * math.prod(sides)


def _image(network: str, shape: tuple[int, ...], is_stack: bool) -> tuple[int, list[int]]:
    """Return C and [H, W] of images.

    Raises:
        NetworkError: observations that are not images, or too small ones.
    """
    if network == "conv" and len(shape) != 3:
        other = "mlp" if len(shape) == 1 else _FLATTEN
        if len(shape) == 2 and min(shape) >= 36:
            other = "nature or impala"
        refuse(network, f"needs images [H, W, C] or [C, H, W], but observations are {shape}; use {other}")
    if len(shape) not in (2, 3):
        other = "mlp" if len(shape) == 1 else "frames of one channel, or your own network"
        needed = "images [H, W], [C, H, W] or [H, W, C]"
        refuse(network, f"needs {needed}, but observations are {shape}; use {other}")
    channels, *sides = shape if is_stack else channels_first(torch.empty(1, *shape, device="meta")).shape[1:]
    least_side, remedy = _LEAST_SIDES[network]
    if min(sides) < least_side:
        pixels = f"{least_side}x{least_side} pixels or more"
        refuse(network, f"needs images of {pixels}, but observations are {shape}; {remedy}")
    return channels, sides
