"""Heads: from features to the values of actions, or to their distributions."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ddrl.networks.layers import Activation, orthogonal_linear, uniform_, uniform_linear
from ddrl.networks.placement import device


def expected_values(output: Tensor, atoms: Tensor | None) -> Tensor:
    """Return action values from a head's output.

    Args:
        output: [B, A, Z] logits over `atoms`; with `atoms` None, a value (Z = 1) or quantiles.
        atoms: [Z] the support of a categorical distribution.

    Returns:
        [B, A] in units of the return.
    """
    return output.mean(dim=2) if atoms is None else output.softmax(dim=2) @ atoms


def support(num_atoms: int, *, v_min: float, v_max: float, like: Tensor) -> Tensor:
    """Return the atoms of a categorical distribution: [Z], evenly spaced, in units of the return."""
    return torch.linspace(v_min, v_max, num_atoms, device=like.device, dtype=like.dtype)


def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """Return action values Q = V + A - mean_a A, for each atom separately.

    Source: Wang et al. 2016, arXiv:1511.06581, equation 9; atoms: Hessel et al. 2018, arXiv:1710.02298.

    Args:
        value: [B, Z].
        advantage: [B, A, Z].

    Returns:
        [B, A, Z].
    """
    return advantage + (value.unsqueeze(1) - advantage.mean(dim=1, keepdim=True))


class Head(nn.Module):
    """An optional hidden layer, then Z outputs for each of A actions (a value, logits of atoms, or quantiles).

    If dueling, each stream has its own hidden layer; both are one matrix, with the value stream first. Parameters are
    named `hidden.*` [(1 or 2) * hidden_size, F], `value.*` [Z, ...] (dueling only) and `advantage.*` [A * Z, ...], each
    with `weight` and `bias` as in torch.nn.Linear, or as in `NoisyLinear`.

    Args:
        num_features: F.
        num_actions: A.
        num_atoms: Z.
        hidden_size: width of the hidden layer, or of each stream's; None: no hidden layer.
        activation: after the hidden layer, in place.
        is_dueling: use two streams, combined by `dueling`.
        noise_scale: sigma_0 of noisy layers. None: plain ones, an orthogonal hidden layer (gain sqrt(2)) and uniform
            output layers.
        generator: CPU generator of the initial weights; None: torch's global one.
    """

    def __init__(
        self,
        num_features: int,
        num_actions: int,
        *,
        num_atoms: int = 1,
        hidden_size: int | None,
        activation: Activation,
        is_dueling: bool,
        noise_scale: float | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()

        def linear(num_inputs: int, num_outputs: int, num_parts: int = 1) -> nn.Module:
            if noise_scale is None:
                return uniform_linear(num_inputs, num_outputs, generator)
            return NoisyLinear(num_inputs, num_outputs, noise_scale, generator, num_parts)

        self.hidden: nn.Module | None = None
        width = num_features
        if hidden_size is not None:
            num_streams, width = 2 if is_dueling else 1, hidden_size
            sizes = num_features, num_streams * width
            if noise_scale is None:
                self.hidden = orthogonal_linear(*sizes, math.sqrt(2), generator, num_parts=num_streams)
            else:
                self.hidden = linear(*sizes, num_streams)
        # The larger output layer first, so that its weights stay aligned in the vector of `FlatParameters`.
        self.advantage = linear(width, num_actions * num_atoms)
        self.value = linear(width, num_atoms) if is_dueling else None
        self._shape = (-1, num_actions, num_atoms)
        self._activate = activation

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, A, Z]."""
        if self.hidden is not None:
            x = self._activate(self.hidden(x))
        if self.value is None:
            output: Tensor = self.advantage(x).view(self._shape)
            return output
        of_value, of_advantage = (x, x) if self.hidden is None else x.chunk(2, dim=1)
        return dueling(self.value(of_value), self.advantage(of_advantage).view(self._shape))


class NoisyLinear(nn.Module):
    """y = (W + S_W * e_out e_in^T) x + b + S_b * e_out, with factorized Gaussian noise.

    Each e has entries sign(z) sqrt(|z|), z ~ N(0, 1). The means W and b are used alone until `draw_noise`, and again
    after `disable_noise`. The noise is not in `state_dict()`.
    Source: Fortunato et al. 2018, "Noisy networks for exploration", arXiv:1706.10295, sections 3 (b) and 3.2.

    Parameters are named `weight` [out, in], `bias` [out], `weight_scale` [out, in] and `bias_scale` [out].

    Args:
        num_inputs: width of x.
        num_outputs: width of y.
        noise_scale: sigma_0; the scales S start at noise_scale / sqrt(num_inputs).
        generator: CPU generator of the initial means; None: torch's global one.
        num_parts: layers that are one matrix, each with an e_in of its own: the streams of a dueling head.
    """

    input_noise: Tensor
    output_noise: Tensor

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        noise_scale: float = 0.5,
        generator: Generator | None = None,
        num_parts: int = 1,
    ) -> None:
        super().__init__()
        on = device()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs, device=on))
        self.bias = nn.Parameter(torch.empty(num_outputs, device=on))
        uniform_(self, num_inputs, generator)  # weight and bias: the scales do not exist yet
        scale = noise_scale / math.sqrt(num_inputs)
        self.weight_scale = nn.Parameter(torch.full((num_outputs, num_inputs), scale, device=on))
        self.bias_scale = nn.Parameter(torch.full((num_outputs,), scale, device=on))
        self.register_buffer("input_noise", torch.zeros(num_parts, num_inputs, device=on), persistent=False)
        self.register_buffer("output_noise", torch.zeros(num_outputs, device=on), persistent=False)
        self._is_noisy = False

    @torch.no_grad()
    def draw_noise(self, generator: Generator) -> None:
        """Use fresh noise from now on, drawn on the generator's device and copied to the layer's if that is another."""
        for noise in (self.input_noise, self.output_noise):
            z = torch.randn(noise.shape, generator=generator, device=generator.device)
            noise.copy_(z.sign() * z.abs().sqrt())
        self._is_noisy = True

    def disable_noise(self) -> None:
        """Use no noise from now on."""
        self._is_noisy = False

    def forward(self, x: Tensor) -> Tensor:
        """[B, in] -> [B, out], with the same noise for all rows."""
        y = F.linear(x, self.weight, self.bias)
        if not self._is_noisy:
            return y
        # A second linear layer, instead of building the noise matrix [out, in].
        num_parts = len(self.input_noise)
        scales = zip(self.weight_scale.chunk(num_parts), self.bias_scale.chunk(num_parts), strict=True)
        parts = [F.linear(x * noise, *scale) for noise, scale in zip(self.input_noise, scales, strict=True)]
        deviation = parts[0] if num_parts == 1 else torch.cat(parts, dim=1)
        return torch.addcmul(y, deviation, self.output_noise)
