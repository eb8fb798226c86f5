"""Convolutions for images: their axes, their normalization, and the sizes of the built-in trunks."""

from __future__ import annotations

import math
from itertools import count

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ddrl.networks.layers import orthogonal, xavier

NUM_GROUPS = 16
MOST_FIRST_CHANNELS = 4  # of an image that is not square, whose axes its sizes do not decide


def channels_first(x: Tensor) -> Tensor:
    """Return a view [B, C, H, W] of images [B, H, W], [B, C, H, W] or [B, H, W, C]; the last two differ by their sizes.

    The channel axis is the last one, unless the first is the shorter one, and the other two are equal or it is of at
    most MOST_FIRST_CHANNELS.
    """
    if x.ndim == 3:
        return x.unsqueeze(1)
    _, first, middle, last = x.shape
    is_first = first < last and (middle == last or first <= MOST_FIRST_CHANNELS)
    return x if is_first else x.permute(0, 3, 1, 2)


def fewest_zeros(side: int, kernel: int, stride: int) -> int:
    """Return the least padding at both ends with which the last kernel reaches the last pixel."""
    return next(pad for pad in count() if (side + 2 * pad - kernel) % stride <= pad)


class BatchNorm(nn.Module):
    """Batch normalization of images: by the batch in training mode, by running statistics in evaluation mode.

    As torch.nn.BatchNorm2d, but without its integer count of batches: all published tensors are float32.
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
        """[B, C, H, W] -> the same; training moves the running statistics a tenth of the way to the batch's."""
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, training=self.training)


class Convolution(nn.Conv2d):
    """A convolution with optional normalization of its output, on the CPU.

    With a norm it has Xavier's weights and no bias, since the norm has one. GroupNorm with 16 groups and Xavier's
    weights are those of rainbow-with-ray (github.com/fangyuedong/rainbow-with-ray), whose author reports less tuning
    and steadier curves; "layer" is one group.

    Args:
        sizes: channels in, channels out, side of the kernel, stride.
        padding: zeros at the ends of both sides.
        norm: "none", "group", "batch" or "layer".
        gain: of the orthogonal weights without a norm.
        generator: CPU generator of the initial weights.
    """

    norm: nn.Module | None

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        padding: int | tuple[int, int],
        *,
        norm: str,
        gain: float = math.sqrt(2),
        generator: Generator | None,
    ) -> None:
        super().__init__(*sizes, padding, bias=norm == "none", device="meta")  # draws nothing
        if norm == "none":
            orthogonal(self, gain, generator)
            self.norm = None
        else:
            xavier(self, generator)
            channels = self.out_channels
            num_groups = 1 if norm == "layer" else NUM_GROUPS
            self.norm = BatchNorm(channels) if norm == "batch" else nn.GroupNorm(num_groups, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, H', W']."""
        x = super().forward(x)
        return x if self.norm is None else self.norm(x)
