"""Dense layers with learned noise on their weights, which explores in place of random actions."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ddrl.networks.layers import uniform_


class NoisyLinear(nn.Module):
    """y = (W + S_W * e_out e_in^T) x + b + S_b * e_out, with factorised Gaussian noise.

    Both e are of sign(z) sqrt(|z|), z ~ N(0, 1). The means W and b are used alone until noise is drawn, and
    again after `mean_weights`. Noise is no part of the state.
    Source: Fortunato et al. 2018, "Noisy networks for exploration", arXiv:1706.10295, sections 3 (b) and 3.2.

    Parameters are named `weight` [out, in], `bias` [out], `weight_scale` [out, in] and `bias_scale` [out].

    Args:
        num_inputs: width of x.
        num_outputs: width of y.
        noise_scale: sigma_0; the scales S start at noise_scale / sqrt(num_inputs).
        generator: CPU generator of the initial means; torch's global one when None.
    """

    input_noise: Tensor
    output_noise: Tensor

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        noise_scale: float = 0.5,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.empty(num_outputs))
        uniform_(self, num_inputs, generator)
        scale = noise_scale / math.sqrt(num_inputs)
        self.weight_scale = nn.Parameter(torch.full((num_outputs, num_inputs), scale))
        self.bias_scale = nn.Parameter(torch.full((num_outputs,), scale))
        self.register_buffer("input_noise", torch.zeros(num_inputs), persistent=False)
        self.register_buffer("output_noise", torch.zeros(num_outputs), persistent=False)
        self._is_noisy = False

    @torch.no_grad()
    def draw_noise(self, generator: Generator) -> None:
        """Use fresh noise from now on; drawn on the generator's device, best that of the layer."""
        for noise in (self.input_noise, self.output_noise):
            z = torch.randn(noise.shape, generator=generator, device=generator.device)
            noise.copy_(z.sign() * z.abs().sqrt())
        self._is_noisy = True

    def mean_weights(self) -> None:
        """Use no noise from now on."""
        self._is_noisy = False

    def forward(self, x: Tensor) -> Tensor:
        """[B, in] -> [B, out]; all rows under the same noise."""
        y = F.linear(x, self.weight, self.bias)
        if not self._is_noisy:
            return y
        # The product of the noises is never written out: a second product of matrices instead.
        deviation = F.linear(x * self.input_noise, self.weight_scale, self.bias_scale)
        return torch.addcmul(y, deviation, self.output_noise)
