"""R2D2's learner: hand numbers, the slow twin of an update, what has no influence, and a memory task learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CPU
from support.reference_r2d2 import (
    IMAGES,
    LAST,
    NUM_CUES,
    RECALL,
    SHAPE,
    SMALL,
    VECTORS,
    make_sequences,
    play_recall,
    recall_sequences,
    slow_r2d2,
)
from torch import Tensor

from ddrl.algorithms.dqn.losses import q_loss
from ddrl.algorithms.r2d2.config import Config
from ddrl.algorithms.r2d2.learner import make_learner as make_r2d2
from ddrl.algorithms.r2d2.learner import sequence_loss, sequence_priority, sequence_targets
from ddrl.algorithms.r2d2.policy import Policy
from ddrl.algorithms.value_learning.learner import ValueLearner
from ddrl.types import EnvSpec, Sequences, SequenceShape

# The hand numbers' TD errors: two steps of 1 and -3, one step of 2 and one that was not played.
TD = torch.tensor([[1.0, 2.0], [-3.0, 0.0]])
VALID = torch.tensor([[True, True], [True, False]])


def test_targets_hand_numbers() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 0.0]]).unsqueeze(1)  # [3, 1, 2]
    target_q = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]).unsqueeze(1)
    rest = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.25], [0.5]]), torch.tensor([[2], [1]])
    double = sequence_targets(q, target_q, *rest, double=True, rescale_values=False)
    assert double.tolist() == [[1 + 0.25 * 50], [2 + 0.5 * 30]]
    single = sequence_targets(q, target_q, *rest, double=False, rescale_values=False)
    assert single.tolist() == [[1 + 0.25 * 60], [2 + 0.5 * 40]]


def test_rescaled_targets_hand_numbers() -> None:
    # h(3) = 1.003, h(8) = 2.008, h(15) = 3.015, and h(-x) = -h(x)
    target_q = torch.tensor([0.0, 0.0, 0.0, 2.008]).view(4, 1, 1)
    return_ = torch.tensor([[1.0], [7.0], [-11.0]])
    discount = torch.tensor([[0.25], [1.0], [1.0]])
    target = sequence_targets(target_q, target_q, return_, discount, torch.full((3, 1), 3))
    torch.testing.assert_close(target, torch.tensor([[1.003], [3.015], [-1.003]]))
    terminal = sequence_targets(target_q, target_q, return_, 0 * discount, torch.full((3, 1), 3))
    torch.testing.assert_close(terminal[1], torch.tensor([8**0.5 - 1 + 0.007]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ((0.5 + 4.5) / 2 + 0.5 * 2.0) / 2),
        ({"reduction": "sum"}, ((0.5 + 4.5) + 0.5 * 2.0) / 2),
    ],
)
def test_loss_hand_numbers(options: dict[str, object], expected: float) -> None:
    q = torch.arange(12.0).view(3, 2, 2)
    action = torch.tensor([[0, 1], [1, 0]])
    target = q[:2].gather(2, action.unsqueeze(2)).squeeze(2) + TD
    loss, td = sequence_loss(q, target, action, VALID, torch.tensor([1.0, 0.5]), **options)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(expected)
    assert td.tolist() == TD.tolist()


def test_loss_gradient_hand_numbers() -> None:
    q = torch.zeros(3, 2, 2, requires_grad=True)
    target = TD.clone().requires_grad_()
    action = torch.tensor([[0, 1], [1, 0]])
    sequence_loss(q, target, action, VALID, torch.tensor([1.0, 0.5]))[0].backward()
    expected = torch.zeros(3, 2, 2)  # - weight * td / played steps / sequences
    expected[0, 0, 0], expected[1, 0, 1], expected[0, 1, 1] = -1 / 4, 3 / 4, -0.5 * 2 / 2
    assert q.grad is not None and torch.equal(q.grad, expected)
    assert target.grad is None


def test_padding_gives_no_gradient_even_if_its_error_overflows() -> None:
    q = torch.full((3, 2, 2), 3e38, requires_grad=True)  # the error is infinite
    loss, _ = sequence_loss(
        q, -q.detach()[:2, :, 0], torch.zeros(2, 2, dtype=torch.int64), VALID & False, None
    )
    loss.backward()
    assert loss.item() == 0 and q.grad is not None and not q.grad.any()


def test_no_gradient_through_targets() -> None:
    q = torch.randn(3, 2, 2, requires_grad=True)
    some = torch.zeros(2, 2)
    target = sequence_targets(q, q, some, some + 1, torch.full((2, 2), 2))
    assert not target.requires_grad


def test_priority_hand_numbers() -> None:
    torch.testing.assert_close(sequence_priority(TD, VALID, mix=0.9), torch.tensor([0.9 * 3 + 0.1 * 2, 2.0]))
    assert sequence_priority(TD, VALID, mix=1.0).tolist() == [3.0, 2.0]
    assert sequence_priority(TD, VALID, mix=0.0).tolist() == [2.0, 2.0]


def test_full_sequences_of_a_feed_forward_network_are_transitions() -> None:
    """Where nothing is rescaled and a network gives each row's values by itself, the loss is that of DQN."""
    length, num, actions = 5, 4, 3
    q = torch.randn(length + 1, num, actions, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target_q = torch.randn(length + 1, num, actions, generator=torch.Generator().manual_seed(1))
    step = torch.arange(length)[:, None].expand(length, num)
    action, bootstrap = (step + torch.arange(num)) % actions, (step + 3).clamp(max=length)
    discount, return_ = 0.9 ** (bootstrap - step), torch.cos(7.0 * step + torch.arange(num))
    target = sequence_targets(q, target_q, return_, discount, bootstrap, rescale_values=False)
    valid = torch.ones(length, num, dtype=torch.bool)
    loss, td = sequence_loss(q, target, action, valid, None)

    rows = bootstrap, torch.arange(num).expand(length, num)
    twin, twin_td = q_loss(
        q[:-1].flatten(0, 1), q.detach()[rows].flatten(0, 1), target_q[rows].flatten(0, 1), action.flatten(),
        return_.flatten(), discount.flatten(), None, loss="mse",
    )  # fmt: skip
    torch.testing.assert_close(loss, twin)
    torch.testing.assert_close(td.flatten(), twin_td)
    gradients = (torch.autograd.grad(each, q)[0] for each in (loss, twin))
    torch.testing.assert_close(*gradients)


def make(spec: EnvSpec = VECTORS, seed: int = 1, **options: Any) -> ValueLearner[Config]:
    return make_r2d2(Config(**(SMALL | options)), spec, device=CPU, seed=seed)


def sequences(
    learner: ValueLearner[Config], spec: EnvSpec = VECTORS, shape: SequenceShape = SHAPE, **options: Any
) -> Sequences:
    return make_sequences(spec, shape, memory_size=learner.network.state_size, **options)


def set_apart(learner: ValueLearner[Config]) -> None:
    """Give the target network other parameters than the network's."""
    with torch.no_grad():
        for parameter in learner.target_network.parameters():
            parameter.mul_(-1.3).add_(0.1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recurrent": "gru", "dueling": False},
        {"double": False},
        {"rescale_values": False},
        {"loss_reduction": "sum", "priority_mix": 0.3},
        {"burn_in": 0},
    ],
    ids=str,
)
def test_one_update_equals_the_slow_twin(options: dict[str, Any]) -> None:
    learner = make(max_grad_norm=None, **options)
    set_apart(learner)
    config = learner.config
    batch = sequences(learner, shape=config.sequences)
    twin = slow_r2d2(
        learner.network.sequence, learner.target_network.sequence, batch, mix=config.priority_mix,
        double=config.double, rescale_values=config.rescale_values, reduction=config.loss_reduction,
    )  # fmt: skip
    gradient = torch.autograd.grad(twin.loss, list(learner.network.parameters()))
    metrics = learner.update(batch)
    found = learner.parameters.vector.grad
    assert found is not None
    torch.testing.assert_close(
        found, torch.cat([each.reshape(-1) for each in gradient]), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(metrics["loss"], twin.loss.detach())
    torch.testing.assert_close(metrics["priority"], torch.tensor(twin.priority))
    sizes = [abs(td) for each in twin.td for td in each]
    assert metrics["td_error"].item() == pytest.approx(np.mean(sizes), rel=1e-4)
    assert len(sizes) == int(batch.valid.sum())


def test_images_equal_the_slow_twin() -> None:
    options = {"network": "nature", "hidden_sizes": (8,), "burn_in": 2, "sequence_length": 3, "overlap": 1}
    learner = make(IMAGES, max_grad_norm=None, **options)
    set_apart(learner)
    batch = sequences(learner, IMAGES, learner.config.sequences, num_sequences=3)
    as_input = replace(batch, observation=batch.observation / 255)
    twin = slow_r2d2(learner.network.sequence, learner.target_network.sequence, as_input, mix=0.9)
    gradient = torch.autograd.grad(twin.loss, list(learner.network.parameters()))
    metrics = learner.update(batch)
    torch.testing.assert_close(metrics["loss"], twin.loss.detach(), rtol=1e-4, atol=1e-5)
    assert learner.parameters.vector.grad is not None
    expected = torch.cat([each.reshape(-1) for each in gradient])
    torch.testing.assert_close(learner.parameters.vector.grad, expected, rtol=1e-3, atol=1e-5)


def test_burn_in_moves_the_state_and_gets_no_gradient() -> None:
    """Other burn-in rows change the loss; no gradient reaches them, but one reaches the training slice's."""
    learner = make(max_grad_norm=None)
    batch = sequences(learner)
    longest = int(batch.burn_in.argmax())
    observation = batch.observation.clone().requires_grad_()
    seen: list[Tensor] = []
    original = learner.parameters.differentiate
    learner.parameters.differentiate = lambda loss: (  # type: ignore[method-assign]
        seen.append(torch.autograd.grad(loss, observation, retain_graph=True)[0]), original(loss)
    )[1]  # fmt: skip
    loss = learner.update(replace(batch, observation=observation))["loss"]
    assert not seen[0][: SHAPE.burn_in].any()
    assert seen[0][SHAPE.burn_in :].any()

    other = batch.observation.clone()
    other[0, longest] += 1.0
    assert make(max_grad_norm=None).update(replace(batch, observation=other))["loss"] != loss
    remembered = batch.recurrent_state.clone()
    remembered[0] += 1.0  # the first one has no burn-in: the stored state enters as it is
    assert make(max_grad_norm=None).update(replace(batch, recurrent_state=remembered))["loss"] != loss


@pytest.mark.parametrize("options", [{}, {"recurrent": "gru", "rescale_values": False}], ids=str)
def test_unused_rows_have_no_influence(options: dict[str, Any]) -> None:
    """Rows between burn-in and training slice, and rows and steps behind the last one, may hold anything finite."""
    results = []
    for garbage in (None, 1e6, -1e25):
        learner = make(**options)
        batch = sequences(learner, garbage=garbage)
        metrics = learner.update(batch)
        results.append((metrics, learner.state()["network.value"]))
    assert torch.isfinite(results[0][1]).all()
    for metrics, parameters in results[1:]:
        for name, value in metrics.items():
            torch.testing.assert_close(value, results[0][0][name], rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(parameters, results[0][1], rtol=1e-4, atol=1e-5)


def test_garbage_is_in_the_batch() -> None:
    """The test above would not notice a `make_sequences` that fills everything."""
    plain, junk = (make_sequences(VECTORS, SHAPE, memory_size=2, garbage=value) for value in (None, 1e6))
    assert (junk.observation == 1e6).any() and (junk.n_step_return == 1e6).any()
    assert torch.equal(plain.valid, junk.valid) and torch.equal(plain.burn_in, junk.burn_in)
    assert not plain.valid.all() and {0, SHAPE.burn_in} < set(plain.burn_in.tolist())


def test_priority_only_where_replay_is_prioritized() -> None:
    learner = make()
    batch = sequences(learner)
    metrics = learner.update(batch)
    assert metrics["priority"].shape == (6,) and (metrics["priority"] > 0).all()
    assert all(value.ndim == 0 for name, value in metrics.items() if name != "priority")
    assert not any(value.requires_grad for value in metrics.values())
    uniform = make().update(replace(batch, weight=None))
    ones = make().update(replace(batch, weight=torch.ones(6)))
    assert "priority" not in uniform
    assert uniform["loss"] == ones["loss"] != metrics["loss"]


def test_the_target_follows() -> None:
    hard, soft = make(target_period=2), make(target_rate=0.25)
    start = hard.state()["target_network.value"]
    assert torch.equal(start, hard.state()["network.value"])
    batch = sequences(hard)
    for learner in (hard, soft):
        learner.update(batch)
    assert torch.equal(hard.state()["target_network.value"], start)
    moved = start + 0.25 * (soft.state()["network.value"] - start)
    torch.testing.assert_close(soft.state()["target_network.value"], moved)
    hard.update(batch)
    assert torch.equal(hard.state()["target_network.value"], hard.state()["network.value"])
    assert not torch.equal(hard.state()["network.value"], start)


def test_epsilon_is_published_with_the_weights() -> None:
    learner = make(epsilon_ladder=False, epsilon=0.8, final_epsilon=0.2, epsilon_anneal_updates=4)
    assert learner.weights()["epsilon"].item() == pytest.approx(0.8)
    assert learner.update(sequences(learner))["epsilon"].item() == pytest.approx(0.65)
    assert learner.weights()["epsilon"].item() == pytest.approx(0.65)


@pytest.mark.learning
@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_solves_recall_from_given_sequences(recurrent: str) -> None:
    config = Config(
        recurrent=recurrent, recurrent_size=32, hidden_sizes=(32,), sequence_length=LAST + 1, overlap=0, burn_in=0,
        n_step=3, learning_rate=3e-3, adam_eps=1e-5, target_period=50,
    )  # fmt: skip
    learner, policy, rng = (
        make_r2d2(config, RECALL, device=CPU, seed=1),
        Policy(config, RECALL),
        np.random.default_rng(0),
    )
    for _ in range(1_000):
        learner.update(recall_sequences(rng, config, 64, learner.network.state_size))
    policy.load(learner.weights())
    cue = np.arange(NUM_CUES).repeat(4)
    assert play_recall(policy, cue) >= 0.9
    # Without memory the last step looks alike whatever the cue was, so its action is one and the same.
    assert play_recall(policy, cue, forgets=True) == pytest.approx(1 / NUM_CUES)
