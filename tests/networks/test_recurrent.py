"""Recurrent cores: a slow twin, stepping, states of sequences of different lengths."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from support.networks import seeded
from torch import Tensor

from ddrl.networks.recurrent import RecurrentCore

T, B, F, A, S = 6, 4, 3, 2, 5
Kind = Literal["lstm", "gru"]
each_kind = pytest.mark.parametrize("kind", ["lstm", "gru"])


def core(kind: Kind) -> RecurrentCore:
    return RecurrentCore(kind, F, A, S, generator=seeded())


def inputs(module: RecurrentCore) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = seeded(1)
    state = torch.randn(B, module.state_size, generator=generator).clamp(-0.9, 0.9)
    reward = torch.randn(T, B, generator=generator)
    action = torch.randint(-1, A, (T, B), generator=generator)
    return torch.randn(T, B, F, generator=generator), action, reward, state


def slow_step(kind: Kind, layer: Any, x: Tensor, state: Tensor) -> Tensor:
    """One step of one row by the equations of torch.nn.LSTM (gates i, f, g, o) and torch.nn.GRU (r, z, n)."""
    h, c = state[:S], state[S:]
    of_input, of_state = layer.weight_ih_l0 @ x + layer.bias_ih_l0, layer.weight_hh_l0 @ h + layer.bias_hh_l0
    if kind == "lstm":
        i, f, g, o = (of_input + of_state).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return torch.cat((o.sigmoid() * c.tanh(), c))
    reset, update, new = zip(of_input.chunk(3), of_state.chunk(3), strict=True)
    z = sum(update).sigmoid()  # type: ignore[union-attr]
    n = (new[0] + sum(reset).sigmoid() * new[1]).tanh()  # type: ignore[union-attr]
    return (1 - z) * n + z * h


@each_kind
def test_sequences_equal_the_slow_twin_and_stepping(kind: Kind) -> None:
    module = core(kind)
    assert module.state_size == {"lstm": 2 * S, "gru": S}[kind]
    features, action, reward, state = columns = inputs(module)
    output, after = module(*columns)
    assert (output.shape, after.shape) == ((T, B, S), (B, module.state_size))
    slow = list(state)
    for t in range(T):
        step, state = module(*(column[t : t + 1] for column in columns[:3]), state)
        torch.testing.assert_close(step[0], output[t])
        for b in range(B):
            one_hot = [float(action[t, b] == a) for a in range(A)]  # zeros for -1, no action
            x = torch.tensor([*features[t, b].tolist(), *one_hot, math.tanh(reward[t, b])])
            slow[b] = slow_step(kind, module.layer, x, slow[b])
            torch.testing.assert_close(output[t, b], slow[b][:S])
    torch.testing.assert_close(after, torch.stack(slow))
    torch.testing.assert_close(state, after)


@each_kind
def test_each_row_has_the_state_of_its_own_length(kind: Kind) -> None:
    module = core(kind)
    *columns, state = inputs(module)
    lengths = torch.tensor([3, 6, 1, 5])
    output, after = module(*columns, state, lengths)
    assert output.shape == (T, B, S)
    for b, length in enumerate(lengths.tolist()):
        expected, own = module(*(column[:length, b : b + 1] for column in columns), state[b : b + 1])
        torch.testing.assert_close(output[:length, b : b + 1], expected)
        torch.testing.assert_close(after[b : b + 1], own)
    longer = [column.clone() for column in columns]
    longer[0][3:, 0], longer[2][1:, 2] = 1e6, 1e6
    torch.testing.assert_close(module(*longer, state, lengths)[1], after)
