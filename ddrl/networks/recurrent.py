"""A recurrent core between trunk and head."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ddrl.networks.device import send
from ddrl.networks.layers import uniform_
from ddrl.networks.placement import device


class RecurrentCore(nn.Module):
    """One layer of LSTM or GRU; names of parameters and initial distributions as of torch.nn.LSTM and torch.nn.GRU.

    Args:
        kind: "lstm" or "gru".
        num_inputs: I.
        size: S, units of the layer: the width of its output.
        generator: CPU generator of the initial weights; None: torch's global one.

    Attributes:
        state_size: H: S for "gru"; 2 S for "lstm" (output h, then cell c).
    """

    def __init__(
        self, kind: Literal["lstm", "gru"], num_inputs: int, size: int, *, generator: Generator | None = None
    ) -> None:
        super().__init__()
        layer = nn.LSTM if kind == "lstm" else nn.GRU
        # On "meta", torch's own initial weights take no time and draw no random numbers.
        self.layer = layer(num_inputs, size, device="meta").to_empty(device=device())
        uniform_(self.layer, size, generator)
        self.state_size = 2 * size if kind == "lstm" else size
        self._is_lstm = kind == "lstm"

    def forward(self, x: Tensor, state: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the core over sequences, each within one episode; the state is not reset inside one.

        Args:
            x: [T, B, I].
            state: [B, H] before the first row.
            lengths: [B] int64 on the CPU, in 1..T: number of leading rows in use; None: all.

        Returns:
            [T, B, S] outputs, zero beyond a sequence's length, and the state [B, H] after each sequence's own length.
        """
        if lengths is None:
            return self._run(x, state)
        # Sort on the CPU: with enforce_sorted=False, sorting and restoring the order would each wait for the device.
        lengths, order = lengths.sort(descending=True)
        by_length, back = send(order, x.device), send(order.argsort(), x.device)
        packed = pack_padded_sequence(x.index_select(1, by_length), lengths)
        packed_output, new_state = self._run(packed, state.index_select(0, by_length))
        output, _ = pad_packed_sequence(packed_output, total_length=len(x))
        return output.index_select(1, back), new_state.index_select(0, back)

    def flat(self, x: Tensor, state: Tensor, lengths: Tensor) -> Tensor:
        """Return the outputs [R, S] of sequences that lie one after another in [R, I]; R is the sum of their lengths.

        Args:
            x: their rows.
            state: [B, H] before the first row of each.
            lengths: [B] int64 on the CPU, at least 1.
        """
        first = lengths.cumsum(0) - lengths
        lengths, order = lengths.sort(descending=True)
        step = torch.arange(int(lengths[0])).unsqueeze(1)
        is_used = step < lengths  # [T, B]
        place = send((first[order] + step)[is_used], x.device)
        packed = PackedSequence(x.index_select(0, place), is_used.sum(dim=1))
        output = self._run(packed, state.index_select(0, send(order, x.device)))[0].data
        return torch.empty_like(output).index_copy(0, place, output)

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
