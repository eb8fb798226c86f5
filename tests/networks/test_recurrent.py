"""ddrl.networks.recurrent: a slow twin, stepping, states of sequences of different lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor

from ddrl.networks.parameters import FlatParameters
from ddrl.networks.recurrent import RecurrentCore

T, B, F, A, S = 6, 4, 3, 2, 5
Kind = Literal["lstm", "gru"]
KINDS: tuple[Kind, ...] = ("lstm", "gru")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def core(kind: Kind, seed: int = 0) -> RecurrentCore:
    return RecurrentCore(kind, F, A, S, generator=seeded(seed))


def inputs(module: RecurrentCore, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = seeded(seed)
    return (
        torch.randn(T, B, F, generator=generator),
        torch.randint(-1, A, (T, B), generator=generator),
        torch.randn(T, B, generator=generator),
        torch.randn(B, module.state_size, generator=generator).clamp(-0.9, 0.9),
    )


def slow_lstm(module: RecurrentCore, x: list[float], h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of one row by the equations of torch.nn.LSTM; gates in the order i, f, g, o."""
    layer = module.layer
    gates = (
        layer.weight_ih_l0 @ torch.tensor(x) + layer.bias_ih_l0 + layer.weight_hh_l0 @ h + layer.bias_hh_l0
    )
    i, f, g, o = gates.chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def test_lstm_equals_a_slow_twin() -> None:
    module = core("lstm")
    features, action, reward, state = inputs(module)
    output, after = module(features, action, reward, state)
    assert output.shape == (T, B, S)
    assert after.shape == (B, 2 * S)
    for b in range(B):
        h, c = state[b, :S], state[b, S:]
        for t in range(T):
            one_hot = [float(action[t, b] == a) for a in range(A)]
            h, c = slow_lstm(module, [*features[t, b].tolist(), *one_hot, reward[t, b].item()], h, c)
            torch.testing.assert_close(output[t, b], h)
        torch.testing.assert_close(after[b], torch.cat((h, c)))


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_equals_stepping(kind: Kind) -> None:
    module = core(kind)
    assert module.state_size == {"lstm": 2 * S, "gru": S}[kind]
    columns = inputs(module)
    output, after = module(*columns)
    state = columns[3]
    for t in range(T):
        step, state = module(*(column[t : t + 1] for column in columns[:3]), state)
        torch.testing.assert_close(step, output[t : t + 1])
        torch.testing.assert_close(step[0], state[:, :S])  # the output is the first part of the state
    torch.testing.assert_close(state, after)


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_has_the_state_of_its_own_length(kind: Kind) -> None:
    module = core(kind)
    *columns, state = inputs(module)
    lengths = torch.tensor([3, 6, 1, 5])
    output, after = module(*columns, state, lengths)
    assert output.shape == (T, B, S)
    for b, length in enumerate(lengths.tolist()):
        alone = [column[:length, b : b + 1] for column in columns]
        expected, own = module(*alone, state[b : b + 1])
        torch.testing.assert_close(output[:length, b : b + 1], expected)
        torch.testing.assert_close(after[b : b + 1], own)
    longer = [column.clone() for column in columns]
    longer[0][3:, 0], longer[2][1:, 2] = 1e6, 1e6
    torch.testing.assert_close(module(*longer, state, lengths)[1], after)


@pytest.mark.parametrize("kind", KINDS)
def test_previous_action_and_reward_count_and_no_action_is_zeros(kind: Kind) -> None:
    module = core(kind)
    features, _, _, state = inputs(module)
    zero = torch.zeros(T, B)
    outputs = [module(features, torch.full((T, B), a), zero, state)[0] for a in (-1, 0, 1)]
    outputs.append(module(features, torch.full((T, B), -1), zero + 1, state)[0])
    for i, one in enumerate(outputs):
        assert not any(torch.allclose(one, other) for other in outputs[i + 1 :])
    with torch.no_grad():
        module.layer.weight_ih_l0[:, F : F + A] = 0
    deaf = [module(features, torch.full((T, B), a), zero, state)[0] for a in (-1, 0, 1)]
    torch.testing.assert_close(deaf[0], outputs[0])
    torch.testing.assert_close(deaf[1], outputs[0])
    torch.testing.assert_close(deaf[2], outputs[0])


@pytest.mark.parametrize("kind", KINDS)
def test_start_is_reproducible_and_leaves_the_global_generator(kind: Kind) -> None:
    before = torch.get_rng_state()
    first, second, other = core(kind), core(kind), core(kind, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert a.abs().max() <= S**-0.5
    assert all(name.startswith("layer.") for name in first.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_time_and_flat_parameters(kind: Kind) -> None:
    module, twin = core(kind), core(kind)
    columns = inputs(module)
    output, after = module(*columns)
    (output.square().sum() + after.sum()).backward()
    assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in module.parameters())
    flat = FlatParameters(twin)
    output, after = twin(*columns)
    flat.differentiate(output.square().sum() + after.sum())
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(flat.vector.grad, expected)
    with torch.no_grad():
        flat.vector.mul_(0.5)
    assert not torch.allclose(twin(*columns)[0], output)  # the layer reads the vector's memory
