"""A recurrent core between trunk and head, whose inputs include the previous action and reward."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ddrl.networks.device import send
from ddrl.networks.layers import uniform_


class RecurrentCore(nn.Module):
    """One layer of LSTM or GRU over features, previous action (one-hot) and the tanh of the previous reward.

    Source of the inputs: Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning"
    (ICLR), section 2.3; of the tanh, which keeps large rewards from saturating the gates: Acme's R2D2. Parameter names
    and initial distributions are those of torch.nn.LSTM and torch.nn.GRU.

    Args:
        kind: "lstm" or "gru".
        num_features: F.
        num_actions: A.
        size: S, units of the layer: the width of its output.
        generator: CPU generator of the initial weights; None: torch's global one.

    Attributes:
        state_size: H: S for "gru"; 2 S for "lstm" (output h, then cell c).
    """

    actions: Tensor

    def __init__(
        self,
        kind: Literal["lstm", "gru"],
        num_features: int,
        num_actions: int,
        size: int,
        *,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        layer = nn.LSTM if kind == "lstm" else nn.GRU
        # On "meta", torch's own initial weights take no time and draw no random numbers.
        self.layer = layer(num_features + num_actions + 1, size, device="meta").to_empty(device="cpu")
        uniform_(self.layer, size, generator)
        self.register_buffer("actions", torch.arange(num_actions), persistent=False)
        self.state_size = 2 * size if kind == "lstm" else size
        self._is_lstm = kind == "lstm"

    def forward(
        self,
        features: Tensor,
        previous_action: Tensor,
        previous_reward: Tensor,
        state: Tensor,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the core over sequences, each within one episode; the state is not reset inside one.

        Args:
            features: [T, B, F].
            previous_action: [T, B] int64, taken before each row; -1 at an episode's start, which encodes as all zeros.
            previous_reward: [T, B] float32, received before each row.
            state: [B, H] before the first row.
            lengths: [B] int64 on the CPU, in 1..T: number of leading rows in use; None: all.

        Returns:
            [T, B, S] outputs, zero beyond a sequence's length, and the state [B, H] after each sequence's own length.
        """
        action = previous_action.unsqueeze(-1) == self.actions  # [T, B, A]
        reward = previous_reward.tanh().unsqueeze(-1)
        x = torch.cat((features, action.to(features.dtype), reward), dim=-1)
        if lengths is None:
            return self._run(x, state)
        # Sort on the CPU: with enforce_sorted=False, sorting and restoring the order would each wait for the device.
        lengths, order = lengths.sort(descending=True)
        by_length, back = send(order, x.device), send(order.argsort(), x.device)
        packed = pack_padded_sequence(x.index_select(1, by_length), lengths)
        packed_output, new_state = self._run(packed, state.index_select(0, by_length))
        output, _ = pad_packed_sequence(packed_output, total_length=len(x))
        return output.index_select(1, back), new_state.index_select(0, back)

    def _run(self, inputs: Tensor | PackedSequence, state: Tensor) -> tuple[Any, Tensor]:
        """Run the layer from state [B, H]. Return its outputs, packed if the inputs are, and the new state."""
        before = state.unsqueeze(0)
        if self._is_lstm:
            hidden, cell = before.chunk(2, dim=-1)
            output, after = self.layer(inputs, (hidden.contiguous(), cell.contiguous()))
            new_state = torch.cat(after, dim=-1)
        else:
            output, new_state = self.layer(inputs, before.contiguous())
        return output, new_state.squeeze(0)
