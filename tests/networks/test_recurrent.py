"""Recurrent cores: a slow twin, stepping, states of sequences of different lengths."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from support.networks import q_network, seeded
from torch import Tensor

from ddrl.networks.recurrent import RecurrentCore

T, B, F, S = 6, 4, 3, 5
Kind = Literal["lstm", "gru"]
each_kind = pytest.mark.parametrize("kind", ["lstm", "gru"])


def core(kind: Kind) -> RecurrentCore:
    return RecurrentCore(kind, F, S, generator=seeded())


def inputs(module: RecurrentCore) -> tuple[Tensor, Tensor]:
    generator = seeded(1)
    state = torch.randn(B, module.state_size, generator=generator).clamp(-0.9, 0.9)
    return torch.randn(T, B, F, generator=generator), state


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
    x, state = inputs(module)
    output, after = module(x, state)
    assert (output.shape, after.shape) == ((T, B, S), (B, module.state_size))
    slow = list(state)
    for t in range(T):
        step, state = module(x[t : t + 1], state)
        torch.testing.assert_close(step[0], output[t])
        for b in range(B):
            slow[b] = slow_step(kind, module.layer, x[t, b], slow[b])
            torch.testing.assert_close(output[t, b], slow[b][:S])
    torch.testing.assert_close(after, torch.stack(slow))
    torch.testing.assert_close(state, after)


@each_kind
def test_each_row_has_the_state_of_its_own_length(kind: Kind) -> None:
    module = core(kind)
    x, state = inputs(module)
    lengths = torch.tensor([3, 6, 1, 5])
    output, after = module(x, state, lengths)
    assert output.shape == (T, B, S)
    for b, length in enumerate(lengths.tolist()):
        expected, own = module(x[:length, b : b + 1], state[b : b + 1])
        torch.testing.assert_close(output[:length, b : b + 1], expected)
        torch.testing.assert_close(after[b : b + 1], own)
    longer = x.clone()
    longer[3:, 0], longer[1:, 2] = 1e6, 1e6
    torch.testing.assert_close(module(longer, state, lengths)[1], after)
    flat = module.flat(torch.cat([x[:length, b] for b, length in enumerate(lengths)]), state, lengths)
    torch.testing.assert_close(flat, torch.cat([output[:length, b] for b, length in enumerate(lengths)]))


def test_sequences_of_very_different_lengths_take_memory_for_their_rows_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a thousand steps among a thousand of one: as a table they would be a million rows."""
    module, lengths = core("gru"), torch.tensor([1] * 1_000 + [1_000])
    largest: list[int] = []
    run = module._run
    monkeypatch.setattr(module, "_run", lambda x, state: largest.append(x.data.numel()) or run(x, state))
    state = torch.zeros(1_001, S)
    flat = module.flat(torch.randn(2_000, F, generator=seeded()), state, lengths)
    assert flat.shape == (2_000, S) and largest == [2_000 * F]


def test_a_value_networks_core_sees_the_last_action_and_reward() -> None:
    core = {"recurrent": "lstm", "recurrent_size": S}
    network = q_network(input_shape=(F,), num_actions=2, hidden_sizes=(4, 4), **core)
    seen, state = inputs(network.core)
    action, reward = torch.randint(-1, 2, (T, B), generator=seeded(2)), torch.randn(T, B, generator=seeded(3))
    rows = [[] for _ in range(T)]
    for t in range(T):
        for b in range(B):
            one_hot = [float(action[t, b] == a) for a in range(2)]  # zeros for -1, no action
            features = network.trunk(seen[t, b][None])[0].tolist()
            rows[t].append([*features, *one_hot, math.tanh(reward[t, b])])
    output, after = network.core(torch.tensor(rows), state)
    values, last = network.sequence(seen, action, reward, state)
    torch.testing.assert_close(values, network.head(output.flatten(0, 1)).squeeze(2).unflatten(0, (T, B)))
    torch.testing.assert_close(last, after)
