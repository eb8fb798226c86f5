"""MLPs against the slow twin, and the flat view of parameters."""

from __future__ import annotations

import math

import pytest
import torch
from support.networks import seeded
from support.reference import mlp

from ddrl.networks import mlp as mlp_module
from ddrl.networks.mlp import MLP, BatchRenorm
from ddrl.networks.parameters import FlatParameters


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("sizes", [(3, 2), (3, 7, 2), (3, 7, 5, 1)])
def test_networks_and_ensembles_equal_the_slow_twin(sizes: tuple[int, ...], layer_norm: bool) -> None:
    x = torch.randn(4, sizes[0], generator=seeded())
    single = MLP(sizes, layer_norm=layer_norm, generator=seeded())
    ensemble = MLP(sizes, num_members=3, layer_norm=layer_norm, generator=seeded())
    members = [list(zip(single.weights, single.biases, strict=True))]
    pairs = list(zip(ensemble.weights, ensemble.biases, strict=True))
    members += [[(w[e], b[e, 0]) for w, b in pairs] for e in range(3)]
    output = ensemble(x)
    for layers, found in zip(members, (single(x), *output), strict=True):
        expected = torch.stack([mlp(layers, row, layer_norm=layer_norm) for row in x])
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ensemble(x, num_members=2), output[:2])


def test_dropout_leaves_hidden_units_out_by_its_generator_alone() -> None:
    network = MLP((3, 1000, 2), num_members=2, dropout=0.3, generator=seeded())
    plain = MLP((3, 1000, 2), num_members=2, generator=seeded())
    x = torch.randn(4, 3, generator=seeded())
    assert torch.equal(network(x), plain(x))
    kept = torch.rand(2, 4, 1000, generator=seeded()) >= 0.3
    assert float(kept.float().mean()) == pytest.approx(0.7, abs=0.02)
    hidden = torch.relu(torch.baddbmm(plain.biases[0], x.expand(2, 4, 3), plain.weights[0])) * kept / 0.7
    expected = torch.baddbmm(plain.biases[1], hidden, plain.weights[1])
    torch.testing.assert_close(network(x, generator=seeded()), expected)


def test_batch_renormalization_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One feature; arXiv:1702.03275, algorithm 1, with 0.001 added to variances and a hundredth of each batch noted."""
    norm, x = BatchRenorm((1, 1)), torch.tensor([[9.0], [11.0]])  # mean 10, variance 1
    first = norm(x, train=True)
    torch.testing.assert_close(first, torch.tensor([[-1.0], [1.0]]) / math.sqrt(1.001))  # plain at first
    assert float(norm.mean) == pytest.approx(0.1) and float(norm.variance) == pytest.approx(1.0)
    torch.testing.assert_close(norm(x, train=False), (x - 0.1) / math.sqrt(1.001))
    monkeypatch.setattr(mlp_module, "_SETTLED", 1.0)
    second = norm(x, train=True)  # the shift (10 - 0.1) / 1.0005 is bounded by 5
    torch.testing.assert_close(second, torch.tensor([[-1.0], [1.0]]) / math.sqrt(1.001) + 5)
    norm.mean.fill_(9.5), norm.variance.fill_(0.25)
    ratio = math.sqrt(1.001 / 0.251)
    expected = torch.tensor([[-1.0], [1.0]]) / math.sqrt(1.001) * ratio + 0.5 / math.sqrt(0.251)
    torch.testing.assert_close(norm(x, train=True), expected)
    torch.testing.assert_close(
        expected, (x - 9.5) / math.sqrt(0.251)
    )  # within bounds: as by the running statistics
    norm.variance.fill_(1e-6)
    spread = norm(x, train=True).diff(dim=0)
    torch.testing.assert_close(
        spread, torch.tensor([[2 / math.sqrt(1.001) * 3]])
    )  # the ratio is bounded by 3


def test_renormalized_networks_equal_their_folded_twin() -> None:
    network = MLP((3, 7, 5, 2), batch_norm=True, generator=seeded())
    ensemble = MLP((3, 7, 5, 1), num_members=2, batch_norm=True, generator=seeded())
    x = torch.randn(64, 3, generator=seeded()) * torch.tensor([1.0, 10.0, 100.0])
    for _ in range(30):
        network(x, train=True), ensemble(x, train=True)
    plain = MLP((3, 7, 5, 2))
    plain.load_state_dict(network.folded())
    torch.testing.assert_close(plain(x), network(x))
    again = MLP((3, 7, 5, 2), batch_norm=True)
    again.load_state_dict(network.state_dict() | network.folded())
    again.unfold()
    torch.testing.assert_close(again(x), network(x))
    assert not torch.allclose(network(x[:9], train=True), network(x[:9]), atol=1e-3)
    for member in range(2):
        one = MLP((3, 7, 5, 1), batch_norm=True)
        parts = {name: part[member] for name, part in ensemble.state_dict().items() if part.ndim}
        one.load_state_dict(
            {n: p[0] if n.startswith("biases") else p for n, p in parts.items()}, strict=False
        )
        torch.testing.assert_close(one(x), ensemble(x)[member])
    torch.testing.assert_close(ensemble(x, num_members=1), ensemble(x)[:1])


def test_members_differ_and_start_like_linear() -> None:
    network = MLP((16, 256, 1), num_members=2, generator=seeded())
    for weight, bias, num_inputs in zip(network.weights, network.biases, (16, 256), strict=True):
        bound = 1 / math.sqrt(num_inputs)
        assert not torch.equal(weight[0], weight[1])
        assert 0.98 * bound < float(weight.detach().abs().max()) <= bound
        assert float(bias.detach().abs().max()) <= bound


def test_flat_parameters_share_memory_and_differentiate() -> None:
    network, twin = MLP((3, 5, 2), generator=seeded()), MLP((3, 5, 2), generator=seeded())
    flat = FlatParameters(network)
    x = torch.randn(4, 3, generator=seeded())
    assert flat.vector.numel() == sum(p.numel() for p in network.parameters())
    torch.testing.assert_close(network(x), twin(x))
    expected = torch.autograd.grad(twin(x).square().sum(), list(twin.parameters()))
    for _ in range(2):  # the gradient is set, not added
        flat.differentiate(network(x).square().sum())
        torch.testing.assert_close(flat.vector.grad, torch.cat([part.flatten() for part in expected]))
    with torch.no_grad():
        flat.vector.zero_()
    assert not network(x).any()
