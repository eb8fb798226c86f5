"""DQN: losses by hand numbers, slow twins, identities and gradients; one update, targets, statistics, a known value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import reference_q as twin
from support.algorithms import DISCRETE, Options, digest, make_learner
from support.reference_q import PIXELS, make_batch
from support.subjects import CATEGORICAL, QUANTILE, batch_for
from torch import Tensor, tensor

from ddrl.algorithms.dqn.losses import categorical_loss, project, q_loss, quantile_loss
from ddrl.networks.heads import expected_values, support
from ddrl.types import Batch, EnvSpec

B, A, Z = 7, 3, 5
V = {"v_min": -2.0, "v_max": 3.0}

Loss = Callable[..., tuple[Tensor, Tensor]]
Slow = Callable[..., tuple[Tensor, list[float]]]
CASES: dict[str, tuple[Loss, Slow, tuple[int, ...], Options]] = {
    "huber": (q_loss, twin.slow_q_loss, (), {"loss": "huber", "huber_delta": 0.7}),
    "mse": (q_loss, twin.slow_q_loss, (), {"loss": "mse", "huber_delta": 1.0}),
    "categorical": (categorical_loss, twin.slow_categorical_loss, (Z,), V),
    "quantile": (quantile_loss, twin.slow_quantile_loss, (Z,), {"huber_delta": 0.7}),
}
each_loss = pytest.mark.parametrize("name", CASES)


def arguments(tail: tuple[int, ...], seed: int = 0) -> list[Any]:
    """Those that all losses share, float64; some transitions have terminated."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    discount = tensor([0.9, 0.81, 0.0, 0.9, 0.0, 1.0, 0.729], dtype=torch.float64)
    return [
        normal(B, A, *tail).requires_grad_(), normal(B, A), 2 * normal(B, A, *tail),
        torch.randint(A, (B,), generator=generator), normal(B), discount,
        torch.rand(B, generator=generator, dtype=torch.float64) + 0.1,
    ]  # fmt: skip


@each_loss
def test_equals_the_slow_twin_and_its_gradient(name: str) -> None:
    loss, slow, tail, options = CASES[name]
    weighted = arguments(tail)
    for args in (weighted, [*weighted[:6], None]):
        (found, priority), (expected, slow_priority) = loss(*args, **options), slow(*args, **options)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(priority, tensor(slow_priority, dtype=torch.float64))
        assert priority.shape == (B,) and not priority.requires_grad
        (gradient,) = torch.autograd.grad(found, args[0])
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, args[0])[0])


@each_loss
def test_gradient_by_finite_differences_and_none_through_targets(name: str) -> None:
    loss, _, tail, options = CASES[name]
    first, *rest = arguments(tail, seed=3)
    assert torch.autograd.gradcheck(lambda x: loss(x, *rest, **options)[0], (first,))
    others = [rest[i].requires_grad_() for i in (0, 1, 3, 4)]
    assert torch.autograd.grad(loss(first, *rest, **options)[0], others, allow_unused=True) == (None,) * 4


@each_loss
def test_termination_removes_the_bootstrap_and_truncation_does_not(name: str) -> None:
    loss, _, tail, options = CASES[name]
    args = arguments(tail)
    before = loss(*args, **options)[1]
    args[2] = args[2] + 0.5 * arguments(tail, seed=1)[2]
    changed = (loss(*args, **options)[1] - before).abs() > 1e-9
    assert changed.tolist() == (args[5] != 0).tolist()


@each_loss
def test_double_with_equal_networks_is_plain(name: str) -> None:
    """And with other ones it is not: the choice is `next_q`'s, the value the target network's."""
    loss, _, tail, options = CASES[name]
    args = arguments(tail)
    atoms = support(Z, **V, like=args[0]) if name == "categorical" else None
    own = args[2] if not tail else expected_values(args[2], atoms)
    plain, same_order, reverse = (loss(args[0], q, *args[2:], **options)[0] for q in (own, own * 2 + 1, -own))
    assert torch.equal(plain, same_order) and not torch.equal(plain, reverse)


def test_q_loss_hand_numbers() -> None:
    q = tensor([[1.0, 9.0], [8.0, 0.0], [7.0, 2.0]], requires_grad=True)
    next_q = tensor([[0.0, 1.0], [5.0, 4.0], [1.0, 2.0]])
    next_target_q = tensor([[6.0, 4.0], [1.0, 2.0], [100.0, 200.0]])
    args = q, next_q, next_target_q, tensor([0, 1, 1]), tensor([1.0, 0.0, 2.5]), tensor([0.5, 0.5, 0.0])
    loss, td_error = q_loss(*args, None)
    # targets: 1 + 0.5 * 4 = 3; 0 + 0.5 * 1 = 0.5; terminated, 2.5
    torch.testing.assert_close(td_error, tensor([2.0, 0.5, 0.5]))
    assert float(loss.detach()) == pytest.approx((1.5 + 0.125 + 0.125) / 3)
    (gradient,) = torch.autograd.grad(loss, q)
    torch.testing.assert_close(gradient, tensor([[-1.0, 0.0], [0.0, -0.5], [0.0, -0.5]]) / 3)
    loss, _ = q_loss(*args, tensor([0.5, 1.0, 1.0]), loss="mse")
    assert float(loss.detach()) == pytest.approx((0.5 * 2.0 + 0.125 + 0.125) / 3)
    loss, _ = q_loss(*args, None, huber_delta=0.5)
    assert float(loss.detach()) == pytest.approx((0.5 * (2.0 - 0.25) + 0.125 + 0.125) / 3)


def test_projection_hand_numbers() -> None:
    return_, discount = tensor([0.0, 0.5, 0.25, 9.0]), tensor([1.0, 1.0, 0.0, 1.0])
    expected = [
        [0.2, 0.3, 0.5],  # not moved
        [0.1, 0.25, 0.65],  # -0.5: half to -1, half to 0; 0.5: half to 0, half to 1; 1.5: clipped to 1
        [0.0, 0.75, 0.25],  # terminated: all mass at the reward
        [0.0, 0.0, 1.0],  # beyond the support
    ]
    moved = project(tensor([[0.2, 0.3, 0.5]] * 4), return_, discount, v_min=-1.0, v_max=1.0)
    torch.testing.assert_close(moved, tensor(expected))


def test_projection_keeps_mass_and_inside_the_support_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    prob = torch.randn((200, 51), generator=generator).softmax(dim=1)
    return_, discount = torch.randn(200, generator=generator), 0.8 * torch.rand(200, generator=generator)
    moved = project(prob, return_, discount, v_min=-10.0, v_max=10.0)
    assert bool((moved >= 0).all())
    torch.testing.assert_close(moved.sum(dim=1), torch.ones(200))
    for b in range(0, 200, 20):
        slow = twin.slow_projection(prob[b].tolist(), float(return_[b]), float(discount[b]), -10.0, 10.0)
        torch.testing.assert_close(moved[b], tensor(slow), atol=1e-6, rtol=1e-4)
    atoms = support(51, v_min=-10.0, v_max=10.0, like=prob)
    is_inside = return_.abs() + 10 * discount < 10
    assert int(is_inside.sum()) > 100
    expected = (return_ + discount * (prob @ atoms))[is_inside]
    torch.testing.assert_close((moved @ atoms)[is_inside], expected, atol=1e-4, rtol=1e-4)


def test_categorical_loss_hand_numbers() -> None:
    logits = torch.zeros(1, 1, 3, requires_grad=True)  # uniform over -1, 0, 1
    next_q, next_logits, action = torch.zeros(1, 1), torch.zeros(1, 1, 3), tensor([0])
    rest = next_q, next_logits, action, tensor([0.5]), tensor([0.0])
    loss, divergence = categorical_loss(logits, *rest, None, v_min=-1.0, v_max=1.0)
    # the target is (0, 1/2, 1/2), so the divergence from uniform is log 3 - log 2
    assert float(loss.detach()) == pytest.approx(math.log(3) - math.log(2))
    assert float(divergence[0]) == pytest.approx(math.log(3) - math.log(2))
    (gradient,) = torch.autograd.grad(loss, logits)  # softmax - target
    torch.testing.assert_close(gradient, tensor([[[1 / 3, 1 / 3 - 1 / 2, 1 / 3 - 1 / 2]]]))


def test_categorical_loss_is_zero_where_nothing_is_left_to_learn() -> None:
    logits = torch.randn((2000, 2, 5), generator=torch.Generator().manual_seed(0))
    action = logits.softmax(dim=2)[..., -1].argmax(dim=1)
    next_q = torch.nn.functional.one_hot(action, 2).float()
    args = logits, next_q, logits, action, torch.zeros(2000), torch.ones(2000), None
    loss, priority = categorical_loss(*args, v_min=-2.0, v_max=2.0)
    assert float(loss) == pytest.approx(0.0, abs=1e-5)
    assert bool((priority >= 0).all()), "whatever rounding does"


def test_quantile_loss_hand_numbers() -> None:
    quantiles = tensor([[[0.0, 2.0]]], requires_grad=True)  # at tau 1/4 and 3/4
    rest = torch.zeros(1, 1), tensor([[[1.0, 4.0]]]), torch.zeros(1, dtype=torch.int64), tensor([0.0])
    loss, td_error = quantile_loss(quantiles, *rest, tensor([1.0]), None)
    # u: 0.25 * (0.5 + 3.5) / 2 of the first; |0.75 - 1| * 0.5 and 0.75 * 1.5, halved, of the second
    assert float(loss.detach()) == pytest.approx(0.25 * 4.0 / 2 + (0.25 * 0.5 + 0.75 * 1.5) / 2)
    assert float(td_error[0]) == 2.5 - 1.0
    (gradient,) = torch.autograd.grad(loss, quantiles)
    torch.testing.assert_close(gradient, tensor([[[-0.25 * 2 / 2, (0.25 - 0.75) / 2]]]))


def test_quantiles_of_a_known_distribution_are_found() -> None:
    """Terminated steps with rewards 0 ... 99: the quantiles at tau settle near 100 tau."""
    value, zeros = torch.zeros(1, 1, 5, requires_grad=True), torch.zeros(100)
    rest = torch.zeros(100, 1), torch.zeros(100, 1, 5), zeros.long(), torch.arange(100.0), zeros, None
    for _ in range(200):
        loss, _ = quantile_loss(value.expand(100, 1, 5), *rest, huber_delta=0.1)
        (gradient,) = torch.autograd.grad(loss, value)
        with torch.no_grad():
            value -= 200.0 * gradient
    expected = tensor([10.0, 30.0, 50.0, 70.0, 90.0])
    torch.testing.assert_close(value.detach()[0, 0], expected, atol=2.0, rtol=0.0)


def test_expected_values_hand_numbers() -> None:
    quantiles = tensor([[[1.0, 3.0], [0.0, 5.0]]])
    torch.testing.assert_close(expected_values(quantiles, None), tensor([[2.0, 2.5]]))
    logits = tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])
    torch.testing.assert_close(expected_values(logits, tensor([-1.0, 1.0])), tensor([[0.5, 0.0]]))


# --- updates ---------------------------------------------------------------------------------------------

BATCH_NORM = {"network": "nature", "norm": "batch"}


def make(spec: EnvSpec = DISCRETE, **options: Any) -> Any:
    return make_learner("dqn", spec, **options)


SLOW: dict[str, tuple[Slow, tuple[str, ...]]] = {  # the twin of the loss, and the options that it takes
    "none": (twin.slow_q_loss, ("loss", "huber_delta")),
    "categorical": (twin.slow_categorical_loss, ("v_min", "v_max")),
    "quantile": (twin.slow_quantile_loss, ("huber_delta",)),
}
KINDS: dict[str, Options] = {
    "plain": {},
    "double": {"double": True},
    "mse": {"loss": "mse", "double": True},
    "delta": {"huber_delta": 0.1},
    "dueling": {"dueling": True},
    "categorical": CATEGORICAL,
    "categorical, double": CATEGORICAL | {"double": True},
    "quantile": QUANTILE | {"huber_delta": 0.5},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_one_update_equals_the_slow_twin(options: Options) -> None:
    dqn = make(**options, max_grad_norm=None, prioritized=True)
    config = dqn.config
    with torch.no_grad():  # the target network prefers other actions than the network
        for parameter in dqn.target_network.parameters():
            parameter.mul_(-1.3).add_(0.1)
    batch = batch_for("dqn", dqn, DISCRETE, 7)
    network, target = copy.deepcopy(dqn.network), copy.deepcopy(dqn.target_network)
    output, next_online = network(batch.observation), network(batch.next_observation)
    next_target = target(batch.next_observation)

    def values(given: Tensor) -> Tensor:
        if config.distribution == "categorical":
            return (given.softmax(dim=2) * torch.linspace(config.v_min, config.v_max, 5)).sum(dim=2)
        return given.mean(dim=2) if config.distribution == "quantile" else given

    assert (values(next_online).argmax(dim=1) != values(next_target).argmax(dim=1)).any()
    rest = (batch.action, batch.n_step_return, batch.bootstrap_discount, batch.weight)
    args = (output, values(next_online if config.double else next_target).detach(), next_target, *rest)
    slow, names = SLOW[config.distribution]
    loss, td_error = slow(*args, **{name: getattr(config, name) for name in names})
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])

    metrics = dqn.update(batch)
    torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["priority"], torch.tensor(td_error).abs(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(metrics["q_mean"], values(output.detach()).max(dim=1).values.mean())
    torch.testing.assert_close(dqn.parameters.vector.grad, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_weight_decay_is_a_share_of_the_parameters_in_their_gradient(optimizer: str) -> None:
    dqn = make(optimizer=optimizer, weight_decay=0.01, learning_rate=1e-2)
    before = dqn.parameters.vector.detach().clone()
    dqn.update(batch_for("dqn", dqn, DISCRETE, 7))
    gradient = dqn.parameters.vector.grad + 0.01 * before
    if optimizer == "adam":  # its first step: both moments are those of this gradient
        step = gradient / (gradient.abs() + 1e-8)
    else:
        step = gradient / (math.sqrt(0.05) * gradient.abs() + 3e-3)
    torch.testing.assert_close(dqn.parameters.vector.detach(), before - 1e-2 * step, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("options", [{"target_period": 2}, {"target_period": None, "target_rate": 0.5}])
def test_statistics_of_batches_reach_target_and_weights(options: Options) -> None:
    dqn = make(PIXELS, double=True, **BATCH_NORM, **options)
    assert len(dqn.buffers) == 6, "two for each convolution"
    for i in range(2):
        before = dqn.state()
        dqn.update(make_batch(i, spec=PIXELS))
    state, weights, rate = dqn.state(), dqn.weights(), options.get("target_rate", 1.0)
    for name in dqn.buffers:
        online, target = state[f"network.{name}"], state[f"target_network.{name}"]
        assert float(online.abs().max()) > 0
        torch.testing.assert_close(target, (1 - rate) * before[f"target_network.{name}"] + rate * online)
        assert torch.equal(weights[name], online)
    assert dqn.network.training


def test_statistics_are_those_of_the_first_state_alone() -> None:
    found = []
    for double in (False, True):
        dqn = make(PIXELS, double=double, **BATCH_NORM)
        dqn.update(make_batch(spec=PIXELS))
        found.append(digest(dqn.buffers))
    assert found[0] == found[1]


ENDLESS = [{}, {"double": True, "n_step": 3}, CATEGORICAL | {"num_atoms": 51, "v_max": 20.0}, QUANTILE]


@pytest.mark.learning
@pytest.mark.parametrize("options", ENDLESS)
def test_endless_reward_is_worth_its_sum(options: Options) -> None:
    """1 each step, for ever: 1 / (1 - gamma), whatever is done and however many steps are summed."""
    spec = EnvSpec("Toy-v0", (1,), "float32", "discrete", (), (2,))
    dqn = make(spec, **{"hidden_sizes": (16,), "gamma": 0.9, "target_period": 10} | options)
    n, ones = dqn.config.n_step, torch.ones(8, 1)
    sums = torch.full((8,), sum(0.9**i for i in range(n)))
    for _ in range(1000):
        metrics = dqn.update(Batch(ones, torch.arange(8) % 2, sums, torch.full((8,), 0.9**n), ones))
    assert float(metrics["q_mean"]) == pytest.approx(10.0, rel=0.03)
