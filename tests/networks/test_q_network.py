"""ddrl.networks.q_network and heads: shapes of all combinations, dueling by hand, sequences, noise, states."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ddrl.networks.custom import NetworkError
from ddrl.networks.heads import Head, dueling
from ddrl.networks.layers import ACTIVATIONS
from ddrl.networks.parameters import FlatParameters
from ddrl.networks.q_network import QNetwork
from ddrl.networks.trunks import to_input

A, Z = 3, 5
INPUTS = {
    "mlp": (4,),
    "conv": (2, 10, 10),
    "nature": (4, 40, 40),
    "impala": (16, 16),
    "data_efficient": (30, 30, 3),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(network: str = "mlp", *, seed: int = 0, **options: Any) -> QNetwork:
    return QNetwork(
        network,
        options.pop("input_shape", INPUTS[network]),
        **{"num_actions": A, "hidden_sizes": (8, 6), "generator": seeded(seed), **options},
    )


def observation(network: str, *leading: int, seed: int = 1) -> Tensor:
    shape = (*leading, *INPUTS[network])
    if network == "mlp":
        return torch.randn(shape, generator=seeded(seed))
    return to_input(torch.randint(0, 256, shape, generator=seeded(seed), dtype=torch.uint8))


def sequence_inputs(network: QNetwork, kind: str, steps: int, rows: int) -> tuple[Tensor, ...]:
    generator = seeded(3)
    return (
        observation(kind, steps, rows),
        torch.randint(-1, A, (steps, rows), generator=generator),
        torch.randn(steps, rows, generator=generator),
        torch.rand(rows, network.state_size, generator=generator) - 0.5,
    )


HEADS = list(itertools.product((False, True), ("none", "categorical", "quantile"), (False, True)))


@pytest.mark.parametrize("network", INPUTS)
@pytest.mark.parametrize(("is_dueling", "distribution", "noisy"), HEADS)
def test_shapes(network: str, is_dueling: bool, distribution: str, noisy: bool) -> None:
    options = {"dueling": is_dueling, "distribution": distribution, "noisy": noisy, "num_atoms": Z}
    net = made(network, **options)
    expected = (2, A) if distribution == "none" else (2, A, Z)
    x = observation(network, 2)
    assert net(x).shape == expected
    net.draw_noise(seeded())
    assert net(x).shape == expected
    assert net.state_size == 0

    for recurrent, size in (("lstm", 14), ("gru", 7)):
        net = made(network, recurrent=recurrent, recurrent_size=7, **options)
        assert net.state_size == size
        columns = sequence_inputs(net, network, 3, 2)
        for lengths in (None, torch.tensor([1, 3])):
            output, state = net.sequence(*columns, lengths=lengths)
            assert output.shape == (3, *expected)
            assert state.shape == (2, size)
            assert output.dtype == state.dtype == torch.float32


def test_where_the_dense_layers_are() -> None:
    def widths(**options: Any) -> tuple[list[int], int | None]:
        net = made("nature", **options)
        hidden = net.head.hidden
        return [len(layer.weight) for layer in net.trunk.layers], None if hidden is None else len(
            hidden.weight
        )

    assert widths() == ([8, 6], None)
    assert widths(dueling=True) == ([8], 12)  # 6 of each stream
    assert widths(noisy=True) == ([8], 6)
    assert widths(recurrent="lstm", recurrent_size=5) == ([8], 6)
    assert widths(recurrent="lstm", recurrent_size=5, dueling=True) == ([8], 12)
    assert widths(dueling=True, hidden_sizes=()) == ([], None)
    assert widths(dueling=True, hidden_sizes=(6,)) == ([], 12)


def test_parameters_of_known_networks() -> None:
    def count(net: QNetwork) -> int:
        return sum(parameter.numel() for parameter in net.parameters())

    screens = {"input_shape": (4, 84, 84), "num_actions": 18, "hidden_sizes": (512,)}
    assert count(made("nature", **screens)) == 1_684_128 + 18 * 513
    convolutions = 1_684_128 - 3137 * 512
    assert count(made("nature", dueling=True, **screens)) == convolutions + 2 * 3137 * 512 + 19 * 513
    rainbow = made("nature", dueling=True, noisy=True, distribution="categorical", num_atoms=51, **screens)
    assert count(rainbow) == convolutions + 2 * (2 * 3137 * 512 + 51 * 19 * 513)
    r2d2 = made("nature", dueling=True, recurrent="lstm", **screens | {"hidden_sizes": (512, 512)})
    lstm = 2048 * (512 + 18 + 1 + 512 + 2)
    assert count(r2d2) == 1_684_128 + lstm + 2 * 513 * 512 + 19 * 513


def test_dueling_by_hand() -> None:
    value = torch.tensor([[10.0], [-1.0]])
    advantage = torch.tensor([[[1.0], [2.0], [6.0]], [[0.0], [0.0], [-3.0]]])
    assert dueling(value, advantage).squeeze(2).tolist() == [[8.0, 9.0, 13.0], [0.0, 0.0, -3.0]]
    atoms = dueling(torch.tensor([[1.0, 2.0]]), torch.tensor([[[4.0, 0.0], [0.0, 6.0]]]))
    assert atoms.tolist() == [[[3.0, -1.0], [-1.0, 5.0]]]  # each atom less its own mean


def test_a_dueling_network_by_hand() -> None:
    net = made(dueling=True, input_shape=(2,), hidden_sizes=(2, 1), num_actions=2)
    net.load_state_dict(
        {
            "trunk.layers.0.weight": torch.eye(2),
            "trunk.layers.0.bias": torch.tensor([0.0, 1.0]),
            "head.hidden.weight": torch.tensor([[1.0, 1.0], [2.0, -1.0]]),  # value's, advantage's
            "head.hidden.bias": torch.tensor([0.5, 1.0]),
            "head.advantage.weight": torch.tensor([[1.0], [-3.0]]),
            "head.advantage.bias": torch.tensor([0.0, 1.0]),
            "head.value.weight": torch.tensor([[2.0]]),
            "head.value.bias": torch.tensor([-1.0]),
        }
    )
    # (1, -2) -> (1, -1) -> relu (1, 0); streams 1.5 and 3; V = 2, A = (3, -8), mean -2.5
    assert net(torch.tensor([[1.0, -2.0]])).tolist() == [[7.5, -3.5]]


def test_a_plain_network_by_hand() -> None:
    net = made(input_shape=(2,), hidden_sizes=(2,), num_actions=2, distribution="quantile", num_atoms=2)
    net.load_state_dict(
        {
            "trunk.layers.0.weight": torch.tensor([[1.0, 0.0], [0.0, -1.0]]),
            "trunk.layers.0.bias": torch.zeros(2),
            "head.advantage.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 2.0]]),
            "head.advantage.bias": torch.tensor([0.0, 0.0, 1.0, 0.0]),
        }
    )
    assert net(torch.tensor([[3.0, -2.0]])).tolist() == [[[3.0, 2.0], [6.0, 1.0]]]


@pytest.mark.parametrize("is_dueling", [False, True])
def test_noisy_head_equals_its_explicit_weights(is_dueling: bool) -> None:
    net = made(noisy=True, dueling=is_dueling, hidden_sizes=(8, 6))
    x = observation("mlp", 4)
    means = net(x)
    net.draw_noise(seeded(1))
    noisy = net(x)
    assert not torch.allclose(noisy, means)
    plain = Head(8, A, hidden_size=6, activation=ACTIVATIONS["relu"], is_dueling=is_dueling)
    state = {}
    for name, layer in net.head.named_children():
        state[f"{name}.weight"] = layer.weight + layer.weight_scale * torch.outer(
            layer.output_noise, layer.input_noise
        )
        state[f"{name}.bias"] = layer.bias + layer.bias_scale * layer.output_noise
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(net.trunk(x)).squeeze(2), noisy)
    net.mean_weights()
    assert torch.equal(net(x), means)
    net.draw_noise(seeded(1))
    assert torch.equal(net(x), noisy)


def test_noise_of_each_layer_is_its_own() -> None:
    net = made(noisy=True, dueling=True, hidden_sizes=(6, 6))
    net.draw_noise(seeded())
    assert len({layer.input_noise[0].item() for layer in net.head.children()}) == 3
    plain = made()
    x = observation("mlp", 2)
    before = plain(x)
    plain.draw_noise(seeded())
    assert torch.equal(plain(x), before)
    scaled = made(noisy=True, noise_scale=0.1)
    assert scaled.head.advantage.weight_scale.max().item() == pytest.approx(0.1 / 6**0.5)


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
@pytest.mark.parametrize("network", ["mlp", "nature"])
def test_sequence_equals_stepping(network: str, recurrent: str) -> None:
    net = made(network, recurrent=recurrent, recurrent_size=7, dueling=True)
    *columns, state = sequence_inputs(net, network, 5, 2)
    output, after = net.sequence(*columns, state)
    for t in range(5):
        step, state = net.sequence(*(column[t : t + 1] for column in columns), state)
        torch.testing.assert_close(step[0], output[t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-5)


def test_sequence_lengths_give_each_rows_own_state() -> None:
    net = made(recurrent="lstm", recurrent_size=7)
    *columns, state = sequence_inputs(net, "mlp", 5, 3)
    _, after = net.sequence(*columns, state, lengths=torch.tensor([2, 5, 1]))
    for b, length in enumerate((2, 5, 1)):
        alone = [column[:length, b : b + 1] for column in columns]
        torch.testing.assert_close(after[b : b + 1], net.sequence(*alone, state[b : b + 1])[1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dueling": True},
        {"dueling": True, "noisy": True, "distribution": "categorical", "num_atoms": Z},
        {"recurrent": "lstm", "recurrent_size": 7, "dueling": True},
        {"recurrent": "gru", "recurrent_size": 7},
    ],
)
@pytest.mark.parametrize(
    ("network", "norm"), [("mlp", "none"), ("nature", "none"), ("nature", "batch"), ("impala", "group")]
)
def test_gradients_reach_every_parameter(network: str, norm: str, options: dict[str, Any]) -> None:
    options = {"norm": norm, "hidden_sizes": (32, 32), "activation": "tanh", **options}
    net = made(network, **options)
    net.draw_noise(seeded())
    flat = FlatParameters(net)
    if net.core is None:
        output = net(observation(network, 4))
    else:
        output, _ = net.sequence(*sequence_inputs(net, network, 3, 4))
    flat.differentiate((output * torch.randn(output.shape, generator=seeded(2))).sum())
    assert flat.vector.grad is not None
    for name, parameter in net.named_parameters():
        assert parameter.data_ptr() >= flat.vector.data_ptr(), name
    sections = flat.vector.grad.split([p.numel() for p in flat.parameters])
    for (name, _), section in zip(net.named_parameters(), sections, strict=True):
        assert bool(section.abs().max() > 0), name


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {}),
    ("nature", {"norm": "batch", "dueling": True, "noisy": True}),
    ("impala", {"norm": "group", "recurrent": "lstm", "recurrent_size": 7}),
    ("data_efficient", {"distribution": "quantile", "num_atoms": Z, "recurrent": "gru", "recurrent_size": 7}),
]


@pytest.mark.parametrize(("network", "options"), OPTIONS)
def test_start_is_reproducible_and_leaves_the_global_generator(network: str, options: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    first, second, other = (made(network, seed=seed, **options) for seed in (1, 1, 2))
    first.draw_noise(seeded())
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(first.parameters(), second.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert any(
        not torch.equal(one, two) for one, two in zip(first.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize(("network", "options"), OPTIONS)
def test_the_state_is_all_that_a_policy_needs(network: str, options: dict[str, Any]) -> None:
    learner, player = made(network, **options), made(network, seed=1, **options)
    columns = sequence_inputs(learner, network, 3, 2)

    def values(net: QNetwork) -> Tensor:
        return net(columns[0][0]) if net.core is None else net.sequence(*columns)[0]

    values(learner)  # moves the statistics of BatchNorm
    state = learner.state_dict()
    assert all(value.dtype == torch.float32 and not value.requires_grad for value in state.values())
    assert not any("noise" in name or "actions" in name for name in state)
    statistics = set(state) - {name for name, _ in learner.named_parameters()}
    assert len(statistics) == (6 if options.get("norm") == "batch" else 0)
    learner.eval()
    player.eval()
    assert not torch.allclose(values(player), values(learner))
    player.load_state_dict(state)
    assert torch.equal(values(player), values(learner))


def test_a_copy_is_independent() -> None:
    net = made("nature", norm="batch", dueling=True, noisy=True)
    x = observation("nature", 2)
    target = copy.deepcopy(net).eval().requires_grad_(False)
    expected = target(x)
    for _ in range(2):
        net(x)
    with torch.no_grad():
        FlatParameters(net).vector.mul_(0.5)
    net.draw_noise(seeded())
    assert torch.equal(target(x), expected)
    target.draw_noise(seeded())
    assert not torch.equal(target(x), expected)


def test_what_is_refused() -> None:
    with pytest.raises(NetworkError, match=r"network nature: needs images"):
        made("nature", input_shape=(4,))
    with pytest.raises(NetworkError, match=r"network mlp: norm 'group' is for nature and impala only"):
        made(norm="group")
    with pytest.raises(AssertionError, match="takes sequences"):
        made(recurrent="gru")(observation("mlp", 2))
    with pytest.raises(AssertionError, match="only a recurrent network"):
        made().sequence(observation("mlp", 1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2, 0))


def test_a_network_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "q_network_of_ones_own.py").write_text(
        "from torch import nn\ndef make(shape, width):\n    return nn.Sequential(nn.Flatten(), nn.Linear(9, width))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "q_network_of_ones_own")
    net = QNetwork(
        "q_network_of_ones_own:make",
        (3, 3),
        num_actions=A,
        hidden_sizes=(6,),
        dueling=True,
        kwargs={"width": 4},
        generator=seeded(),
    )
    assert net(torch.rand(2, 3, 3)).shape == (2, A)
    assert net.head.hidden is not None
    assert net.head.hidden.weight.shape == (12, 4)
