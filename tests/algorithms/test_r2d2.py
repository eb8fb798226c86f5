"""R2D2's learner: hand numbers, the slow twin of an update, rows without influence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import DISCRETE, Options, make_learner
from support.reference_r2d2 import IMAGES, SHAPE, make_sequences, slow_r2d2
from torch import Tensor, tensor

from ddrl.algorithms.dqn.losses import q_loss
from ddrl.algorithms.r2d2.learner import sequence_loss, sequence_priority, sequence_targets
from ddrl.types import EnvSpec, Sequences

# The hand numbers' TD errors: two steps of 1 and -3, one step of 2 and one that was not played.
TD = tensor([[1.0, 2.0], [-3.0, 0.0]])
VALID = tensor([[True, True], [True, False]])
ACTION = tensor([[0, 1], [1, 0]])


def test_targets_hand_numbers() -> None:
    q = tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 0.0]]).unsqueeze(1).requires_grad_()  # [3, 1, 2]
    target_q = tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]).unsqueeze(1)
    args = q, target_q, tensor([[1.0], [2.0]]), tensor([[0.25], [0.5]]), tensor([[2], [1]])
    double = sequence_targets(*args, double=True, rescale_values=False)
    assert double.tolist() == [[1 + 0.25 * 50], [2 + 0.5 * 30]] and not double.requires_grad
    single = sequence_targets(*args, double=False, rescale_values=False)
    assert single.tolist() == [[1 + 0.25 * 60], [2 + 0.5 * 40]]
    # h(3) = 1.003, h(8) = 2.008, h(15) = 3.015, and h(-x) = -h(x)
    q, return_ = tensor([0.0, 0.0, 0.0, 2.008]).view(4, 1, 1), tensor([[1.0], [7.0], [-11.0]])
    discount, last = tensor([[0.25], [1.0], [1.0]]), torch.full((3, 1), 3)
    target = sequence_targets(q, q, return_, discount, last)
    torch.testing.assert_close(target, tensor([[1.003], [3.015], [-1.003]]))
    terminal = sequence_targets(q, q, return_, 0 * discount, last)
    torch.testing.assert_close(terminal[1], tensor([8**0.5 - 1 + 0.007]))


@pytest.mark.parametrize(("reduction", "steps"), [("mean", 2), ("sum", 1)])
def test_loss_and_gradient_hand_numbers(reduction: Any, steps: int) -> None:
    """The gradient is - weight * td / played steps / sequences; the target takes none."""
    q = torch.arange(12.0).view(3, 2, 2).requires_grad_()
    target = (q.detach()[:2].gather(2, ACTION.unsqueeze(2)).squeeze(2) + TD).requires_grad_()
    loss, td = sequence_loss(q, target, ACTION, VALID, tensor([1.0, 0.5]), reduction=reduction)
    assert loss.item() == pytest.approx(((0.5 + 4.5) / steps + 0.5 * 2.0) / 2)
    assert td.tolist() == TD.tolist()
    loss.backward()
    expected = torch.zeros(3, 2, 2)
    expected[0, 0, 0], expected[1, 0, 1], expected[0, 1, 1] = -1 / steps / 2, 3 / steps / 2, -0.5 * 2 / 2
    assert q.grad is not None and torch.equal(q.grad, expected)
    assert target.grad is None


def test_padding_gives_no_gradient_even_if_its_error_overflows() -> None:
    q = torch.full((3, 2, 2), 3e38, requires_grad=True)  # the error is infinite
    loss, _ = sequence_loss(q, -q.detach()[:2, :, 0], 0 * ACTION, VALID & False, None)
    loss.backward()
    assert loss.item() == 0 and q.grad is not None and not q.grad.any()


def test_priority_hand_numbers() -> None:
    for mix, first in ((0.9, 0.9 * 3 + 0.1 * 2), (1.0, 3.0), (0.0, 2.0)):
        torch.testing.assert_close(sequence_priority(TD, VALID, mix=mix), tensor([first, 2.0]))


def test_full_sequences_of_a_feed_forward_network_are_transitions() -> None:
    """Without value rescaling and memory the loss equals that of DQN."""
    length, num, actions = 5, 4, 3
    q = torch.randn(length + 1, num, actions, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target_q = torch.randn(length + 1, num, actions, generator=torch.Generator().manual_seed(1))
    step = torch.arange(length)[:, None].expand(length, num)
    action, bootstrap = (step + torch.arange(num)) % actions, (step + 3).clamp(max=length)
    discount, return_ = 0.9 ** (bootstrap - step), torch.cos(7.0 * step + torch.arange(num))
    target = sequence_targets(q, target_q, return_, discount, bootstrap, rescale_values=False)
    loss, td = sequence_loss(q, target, action, torch.ones(length, num, dtype=torch.bool), None)
    rows = bootstrap, torch.arange(num).expand(length, num)
    columns = (q[:-1], q.detach()[rows], target_q[rows], action, return_, discount)
    twin, twin_td = q_loss(*(column.flatten(0, 1) for column in columns), None, loss="mse")
    torch.testing.assert_close(loss, twin)
    torch.testing.assert_close(td.flatten(), twin_td)
    torch.testing.assert_close(*(torch.autograd.grad(each, q)[0] for each in (loss, twin)))


def make(spec: EnvSpec = DISCRETE, **options: Any) -> Any:
    return make_learner("r2d2", spec, **options)


def sequences(learner: Any, spec: EnvSpec = DISCRETE, **options: Any) -> Sequences:
    size = learner.network.state_size
    return make_sequences(spec, learner.config.sequences, memory_size=size, **options)


SHORT = {"hidden_sizes": (8,), "burn_in": 2, "sequence_length": 3, "overlap": 1}


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (DISCRETE, {}),
        (DISCRETE, {"recurrent": "gru", "dueling": False}),
        (DISCRETE, {"double": False}),
        (DISCRETE, {"rescale_values": False}),
        (DISCRETE, {"loss_reduction": "sum", "priority_mix": 0.3}),
        (DISCRETE, {"burn_in": 0}),
        (IMAGES, {"network": "nature"} | SHORT),
    ],
    ids=str,
)
def test_one_update_equals_the_slow_twin(spec: EnvSpec, options: Options) -> None:
    learner = make(spec, max_grad_norm=None, **options)
    with torch.no_grad():  # the target network has other parameters than the network
        for parameter in learner.target_network.parameters():
            parameter.mul_(-1.3).add_(0.1)
    config, batch = learner.config, sequences(learner, spec, num_sequences=3 if spec is IMAGES else 6)
    twin = slow_r2d2(
        learner.network.sequence, learner.target_network.sequence,
        replace(batch, observation=batch.observation / 255) if spec is IMAGES else batch, mix=config.priority_mix,
        double=config.double, rescale_values=config.rescale_values, reduction=config.loss_reduction,
    )  # fmt: skip
    gradient = torch.autograd.grad(twin.loss, list(learner.network.parameters()))
    metrics = learner.update(batch)
    expected = torch.cat([each.reshape(-1) for each in gradient])
    torch.testing.assert_close(learner.parameters.vector.grad, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(metrics["loss"], twin.loss.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(metrics["priority"], tensor(twin.priority), rtol=1e-4, atol=1e-5)
    sizes = [abs(td) for each in twin.td for td in each]
    assert metrics["td_error"].item() == pytest.approx(np.mean(sizes), rel=1e-4)
    assert len(sizes) == int(batch.valid.sum())


def test_burn_in_moves_the_state_and_gets_no_gradient() -> None:
    """Other burn-in rows change the loss; no gradient reaches them, but one reaches the training slice's."""
    learner = make()
    batch = sequences(learner)
    observation, seen = batch.observation.clone().requires_grad_(), []
    original = learner.parameters.differentiate

    def differentiate(loss: Tensor) -> None:
        seen.append(torch.autograd.grad(loss, observation, retain_graph=True)[0])
        original(loss)

    learner.parameters.differentiate = differentiate
    loss = learner.update(replace(batch, observation=observation))["loss"]
    assert not seen[0][: SHAPE.burn_in].any() and seen[0][SHAPE.burn_in :].any()
    other, state = batch.observation.clone(), batch.recurrent_state.clone()
    other[0, int(batch.burn_in.argmax())] += 1.0
    state[0] += 1.0  # the first one has no burn-in: the stored state enters as it is
    for changed in ({"observation": other}, {"recurrent_state": state}):
        assert make().update(replace(batch, **changed))["loss"] != loss


@pytest.mark.parametrize("options", [{}, {"recurrent": "gru", "rescale_values": False}], ids=str)
def test_unused_rows_have_no_influence(options: Options) -> None:
    """Rows between burn-in and training slice, and rows and steps behind the last one, may hold anything finite."""
    results = []
    for garbage in (None, 1e6, -1e25):
        learner = make(**options)
        batch = sequences(learner, garbage=garbage)
        if garbage is not None:
            assert (batch.observation == garbage).any() and (batch.n_step_return == garbage).any()
        assert not batch.valid.all() and {0, SHAPE.burn_in} < set(batch.burn_in.tolist())
        results.append((learner.update(batch), learner.state()["network.value"]))
    assert torch.isfinite(results[0][1]).all()
    for metrics, parameters in results[1:]:
        for name, value in metrics.items():
            torch.testing.assert_close(value, results[0][0][name], rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(parameters, results[0][1], rtol=1e-4, atol=1e-5)
