"""Networks of action values: shapes of all heads, hand numbers, noise, gradients, states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.networks import GRU, LSTM, SHAPES, count, gradients, q_network, seeded
from torch import Tensor

from ddrl.networks.heads import dueling
from ddrl.networks.parameters import FlatParameters
from ddrl.networks.q_network import QNetwork
from ddrl.networks.trunks import to_input

A, Z = 3, 5
HEADS = list(itertools.product((False, True), ("none", "categorical", "quantile"), (False, True)))


def observation(network: str, *leading: int) -> Tensor:
    shape = (*leading, *SHAPES[network])
    if network == "mlp":
        return torch.randn(shape, generator=seeded(1))
    return to_input(torch.randint(0, 256, shape, generator=seeded(1), dtype=torch.uint8))


def sequence_inputs(network: QNetwork, kind: str, steps: int, rows: int) -> tuple[Tensor, ...]:
    generator = seeded(3)
    action = torch.randint(-1, A, (steps, rows), generator=generator)
    reward = torch.randn(steps, rows, generator=generator)
    state = torch.rand(rows, network.state_size, generator=generator) - 0.5
    return observation(kind, steps, rows), action, reward, state


@pytest.mark.parametrize("network", ["mlp", "data_efficient"])
@pytest.mark.parametrize(("is_dueling", "distribution", "noisy"), HEADS)
def test_shapes(network: str, is_dueling: bool, distribution: str, noisy: bool) -> None:
    options = {"dueling": is_dueling, "distribution": distribution, "noisy": noisy, "num_atoms": Z}
    net, expected = q_network(network, **options), (2, A) if distribution == "none" else (2, A, Z)
    x = observation(network, 2)
    assert net(x).shape == expected and net.state_size == 0
    net.draw_noise(seeded())
    assert net(x).shape == expected
    for recurrent, size in ((LSTM, 14), (GRU, 7)):
        net = q_network(network, **options, **recurrent)
        assert net.state_size == size
        columns = sequence_inputs(net, network, 3, 2)
        for lengths in (None, torch.tensor([1, 3])):
            output, state = net.sequence(*columns, lengths=lengths)
            assert (output.shape, state.shape) == ((3, *expected), (2, size))
            assert output.dtype == state.dtype == torch.float32


def test_parameters_of_known_networks() -> None:
    screens = {"input_shape": (4, 84, 84), "num_actions": 18, "hidden_sizes": (512,)}
    assert count(q_network("nature", **screens)) == 1_684_128 + 18 * 513
    convolutions = 1_684_128 - 3137 * 512
    assert count(q_network("nature", dueling=True, **screens)) == convolutions + 2 * 3137 * 512 + 19 * 513
    rainbow = q_network(
        "nature", dueling=True, noisy=True, distribution="categorical", num_atoms=51, **screens
    )
    assert count(rainbow) == convolutions + 2 * (2 * 3137 * 512 + 51 * 19 * 513)
    assert count(q_network("nature", noisy=True, **screens)) == convolutions + 2 * (3137 * 512 + 18 * 513)
    two_layers, lstm = screens | {"hidden_sizes": (512, 256)}, 2048 * (512 + 18 + 1 + 512 + 2)
    for is_dueling, head in ((False, 513 * 256 + 18 * 257), (True, 2 * 513 * 256 + 19 * 257)):
        r2d2 = q_network("nature", dueling=is_dueling, recurrent="lstm", **two_layers)
        assert count(r2d2) == 1_684_128 + lstm + head


def test_dueling_by_hand() -> None:
    advantage = torch.tensor([[[1.0], [2.0], [6.0]], [[0.0], [0.0], [-3.0]]])
    found = dueling(torch.tensor([[10.0], [-1.0]]), advantage)
    assert found.squeeze(2).tolist() == [[8.0, 9.0, 13.0], [0.0, 0.0, -3.0]]
    atoms = dueling(torch.tensor([[1.0, 2.0]]), torch.tensor([[[4.0, 0.0], [0.0, 6.0]]]))
    assert atoms.tolist() == [[[3.0, -1.0], [-1.0, 5.0]]]  # each atom less its own mean


DUELING_BY_HAND = {
    "trunk.layers.0.weight": [[1.0, 0.0], [0.0, 1.0]], "trunk.layers.0.bias": [0.0, 1.0],
    "head.hidden.weight": [[1.0, 1.0], [2.0, -1.0]], "head.hidden.bias": [0.5, 1.0],  # value's, advantage's
    "head.advantage.weight": [[1.0], [-3.0]], "head.advantage.bias": [0.0, 1.0],
    "head.value.weight": [[2.0]], "head.value.bias": [-1.0],
}  # fmt: skip
PLAIN_BY_HAND = {
    "trunk.layers.0.weight": [[1.0, 0.0], [0.0, -1.0]], "trunk.layers.0.bias": [0.0, 0.0],
    "head.advantage.weight": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 2.0]],
    "head.advantage.bias": [0.0, 0.0, 1.0, 0.0],
}  # fmt: skip


def test_networks_by_hand() -> None:
    """Dueling: (1, -2) -> (1, -1) -> relu (1, 0); streams 1.5 and 3; V = 2, A = (3, -8), mean -2.5."""
    sizes: dict[str, Any] = {"input_shape": (2,), "num_actions": 2}
    net = q_network(dueling=True, hidden_sizes=(2, 1), **sizes)
    net.load_state_dict({name: torch.tensor(value) for name, value in DUELING_BY_HAND.items()})
    assert net(torch.tensor([[1.0, -2.0]])).tolist() == [[7.5, -3.5]]
    net = q_network(hidden_sizes=(2,), distribution="quantile", num_atoms=2, **sizes)
    net.load_state_dict({name: torch.tensor(value) for name, value in PLAIN_BY_HAND.items()})
    assert net(torch.tensor([[3.0, -2.0]])).tolist() == [[[3.0, 2.0], [6.0, 1.0]]]


def test_noise_of_each_layer_is_its_own() -> None:
    net = q_network(noisy=True, dueling=True, hidden_sizes=(6, 6))
    net.draw_noise(seeded())
    noises = [noise for layer in net.head.children() for noise in layer.input_noise]
    assert len({noise[0].item() for noise in noises}) == 4  # hidden and output layers of both streams
    plain, x = q_network(), observation("mlp", 2)
    before = plain(x)
    plain.draw_noise(seeded())
    assert torch.equal(plain(x), before)
    scaled = q_network(noisy=True, noise_scale=0.1)
    assert scaled.head.advantage.weight_scale.max().item() == pytest.approx(0.1 / 6**0.5)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {}),
    ("nature", {"dueling": True, "noisy": True, "distribution": "categorical", "num_atoms": Z}),
    ("nature", {"norm": "batch", "dueling": True, "noisy": True}),
    ("impala", {"norm": "group", "dueling": True, **LSTM}),
    ("data_efficient", {"distribution": "quantile", "num_atoms": Z, **GRU}),
]
each_network = pytest.mark.parametrize(("network", "options"), OPTIONS)


@each_network
def test_gradients_reach_every_parameter(network: str, options: dict[str, Any]) -> None:
    net = q_network(network, hidden_sizes=(32, 32), activation="tanh", **options)
    net.draw_noise(seeded())
    flat = FlatParameters(net)
    if net.core is None:
        output = net(observation(network, 4))
    else:
        output, _ = net.sequence(*sequence_inputs(net, network, 3, 4))
    sections = gradients(flat, (output * torch.randn(output.shape, generator=seeded(2))).sum())
    for (name, _), section in zip(net.named_parameters(), sections, strict=True):
        assert bool(section.any()), name


@each_network
def test_what_is_published_is_float32_without_noise(network: str, options: dict[str, Any]) -> None:
    net = q_network(network, **options)
    state = net.state_dict()
    assert all(value.dtype == torch.float32 and not value.requires_grad for value in state.values())
    assert not any("noise" in name or "actions" in name or "atoms" in name for name in state)
    statistics = set(state) - {name for name, _ in net.named_parameters()}
    assert len(statistics) == (6 if options.get("norm") == "batch" else 0)
