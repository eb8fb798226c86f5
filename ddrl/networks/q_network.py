"""Values of discrete actions: a trunk, an optional recurrent core, and a head, with the options of Rainbow and R2D2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from ddrl.networks.heads import Head, NoisyLinear, expected_values, support
from ddrl.networks.layers import ACTIVATIONS
from ddrl.networks.placement import device
from ddrl.networks.recurrent import RecurrentCore


class QNetwork(nn.Module):
    """Action values, or their distributions, of observations or sequences of them.

    `hidden_sizes` are the widths of the dense layers between the trunk's convolutions, or inputs, and the output. All
    belong to the trunk, except for the last one if the head is dueling (one in each stream) or noisy, or if there is a
    recurrent core: then it belongs to the head. A custom network takes only the head's layer.

    Parameters are named `core.*` (recurrent only; see `RecurrentCore`), `trunk.*` and `head.*` (`Head`). Everything
    that a policy needs is in `state_dict()`, in float32; noise and atoms are not.

    Args:
        make_trunk: returns a new trunk with dense layers of these `hidden_sizes`, on the CPU, and the number of its
            features; see `ddrl.networks.trunks.make_trunk`.
        num_actions: A.
        hidden_sizes: widths of the dense layers.
        activation: "tanh" or "relu", of the head.
        dueling: two streams, Q = V + A - mean A.
        distribution: output for each action: its value, the logits of atoms, or values at quantiles.
        num_atoms: Z, of a distribution.
        v_min: the lowest atom of "categorical", in units of the return.
        v_max: the highest atom.
        noisy: dense layers of the head have learned noise.
        noise_scale: sigma_0 of that.
        recurrent: the core between trunk and head.
        recurrent_size: units of the core.
        generator: CPU generator of the initial weights; torch's global one when None.

    Attributes:
        is_noisy: some layers have learned noise.
        state_size: H, numbers in a recurrent state; 0 without a core.

    Raises:
        NetworkError: as `make_trunk`.
    """

    atoms: Tensor | None
    _actions: Tensor

    def __init__(
        self,
        make_trunk: Callable[..., tuple[nn.Module, int]],
        *,
        num_actions: int,
        hidden_sizes: Sequence[int],
        activation: str = "relu",
        dueling: bool = False,
        distribution: Literal["none", "categorical", "quantile"] = "none",
        num_atoms: int = 1,
        v_min: float = -10.0,
        v_max: float = 10.0,
        noisy: bool = False,
        noise_scale: float = 0.5,
        recurrent: Literal["none", "lstm", "gru"] = "none",
        recurrent_size: int = 512,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        in_trunk, hidden_size = list(hidden_sizes), None
        if in_trunk and (dueling or noisy or recurrent != "none"):
            *in_trunk, hidden_size = in_trunk
        trunk, num_features = make_trunk(hidden_sizes=in_trunk)
        self.core: RecurrentCore | None = None
        if recurrent != "none":
            # Registered first: cuDNN needs its weights aligned, at the start of the vector of `FlatParameters`.
            self.core = RecurrentCore(
                recurrent, num_features + num_actions + 1, recurrent_size, generator=generator
            )
            self.register_buffer("_actions", torch.arange(num_actions, device=device()), persistent=False)
            num_features = recurrent_size
        self.trunk = trunk
        self.head = Head(
            num_features,
            num_actions,
            num_atoms=1 if distribution == "none" else num_atoms,
            hidden_size=hidden_size,
            activation=ACTIVATIONS[activation],
            is_dueling=dueling,
            noise_scale=noise_scale if noisy else None,
            generator=generator,
        )
        atoms = support(num_atoms, v_min=v_min, v_max=v_max, like=next(self.parameters()).detach())
        self.register_buffer("atoms", atoms if distribution == "categorical" else None, persistent=False)
        self._has_values = distribution == "none"
        self._noisy = tuple(layer for layer in self.modules() if isinstance(layer, NoisyLinear))
        self.is_noisy = bool(self._noisy)
        self.state_size = 0 if self.core is None else self.core.state_size

    def forward(self, observation: Tensor) -> Tensor:
        """[B, *I] float32, as `to_input` gives it -> values [B, A], or logits of atoms or quantiles [B, A, Z]."""
        assert self.core is None, "a recurrent network takes sequences"
        output: Tensor = self.head(self.trunk(observation))
        return output.squeeze(2) if self._has_values else output

    def expected(self, output: Tensor) -> Tensor:
        """Return the action values [B, A] of what `forward` returned, in units of the return."""
        return output if self._has_values else expected_values(output, self.atoms)

    def sequence(
        self,
        observation: Tensor,
        previous_action: Tensor,
        previous_reward: Tensor,
        state: Tensor,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Evaluate B sequences; recurrent networks only.

        The core's inputs are the features, the previous action (one-hot) and the tanh of the previous reward.
        Source: Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (ICLR),
        section 2.3; of the tanh, which keeps large rewards from saturating the gates: Acme's R2D2.

        Args:
            observation: [T, B, *I] float32, as `to_input` gives it.
            previous_action: [T, B] int64, taken before each row; -1 where there is none, which encodes as all zeros.
            previous_reward: [T, B] float32, received before each row; 0 where there is none.
            state: [B, H] float32 before the first row; zeros at an episode's start.
            lengths: [B] int64 on the CPU, in 1..T, rows of each sequence in use; all when None.

        Returns:
            [T, B, A], or [T, B, A, Z], undefined beyond a sequence's length; and the state [B, H] after it.
        """
        assert self.core is not None, "only a recurrent network takes sequences"
        leading = observation.shape[:2]
        features = self.trunk(observation.flatten(0, 1)).unflatten(0, leading)
        action = (previous_action.unsqueeze(-1) == self._actions).to(features.dtype)  # [T, B, A]
        inputs = torch.cat((features, action, previous_reward.tanh().unsqueeze(-1)), dim=-1)
        features, state = self.core(inputs, state, lengths)
        output: Tensor = self.head(features.flatten(0, 1)).unflatten(0, leading)
        return output.squeeze(3) if self._has_values else output, state

    def draw_noise(self, generator: Generator) -> None:
        """Use fresh noise in all noisy layers from now on; it is drawn on the generator's device."""
        for layer in self._noisy:
            layer.draw_noise(generator)

    def disable_noise(self) -> None:
        """Use no noise from now on, as initially."""
        for layer in self._noisy:
            layer.disable_noise()
