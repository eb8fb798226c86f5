"""On-policy learning: targets and statistics that PPO and IMPALA share, their losses, and the slow twins of updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import reference_ppo as twin
from support.algorithms import CONTINUOUS, DISCRETE, PAIRS, Options, digest, make_learner
from support.reference_ppo import IMAGES, SPECS, feed, leaves, make_feed, tensors
from torch import Tensor, tensor

from ddrl.algorithms.actor_critic.learner import Prepared
from ddrl.algorithms.impala.learner import policy_gradient_loss
from ddrl.algorithms.ppo.learner import clipped_surrogate, value_loss
from ddrl.types import EnvSpec, Fragment

each_name = pytest.mark.parametrize("name", ["ppo", "impala"])


def make_ppo(spec: EnvSpec = DISCRETE, **options: Any) -> Any:
    return make_learner("ppo", spec, **options)


def by_hand() -> Fragment:
    """One lane: observations 1 to 5, truncated at 50 after the second step, terminated after the third."""
    return replace(
        make_feed(DISCRETE, num_fragments=1)[0],
        observation=np.arange(1, 6, dtype=np.float32).reshape(5, 1, 1),
        action=np.zeros((4, 1), np.int64),
        reward=np.array([[10], [20], [30], [40]], np.float32),
        terminated=np.arange(4)[:, None] == 2,
        truncated=np.arange(4)[:, None] == 1,
        final_index=np.array([[1, 0]], np.int32),
        final_observation=np.array([[50]], np.float32),
        extras={"behavior_log_prob": np.full((4, 1), np.log(0.25), np.float32)},
    )


@pytest.mark.parametrize(
    ("estimator", "lambda_", "expected"),
    [
        ("gae", 0.0, [10 + 0.5 * 2, 20 + 0.5 * 50, 30, 40 + 0.5 * 5]),
        ("gae", 1.0, [10 + 0.5 * 45, 45, 30, 42.5]),
        ("td_lambda", 0.5, [10 + 0.5 * (0.5 * 2 + 0.5 * 45), 45, 30, 42.5]),
        ("monte_carlo", 0.95, [32.5, 45, 30, 42.5]),
        ("vtrace", 1.0, [32.5, 45, 30, 42.5]),
        ("upgo", 1.0, [32.5, 45, 30, 42.5]),
    ],
)
def test_targets_of_a_critic_with_known_values(estimator: str, lambda_: float, expected: list[float]) -> None:
    """V(s) = s: a truncation bootstraps from 50, not from the 3 that the next episode begins with."""
    spec = replace(DISCRETE, observation_shape=(1,))
    learner = make_ppo(spec, gamma=0.5, lambda_=lambda_, estimator=estimator)
    learner.network = lambda x, *_: (torch.zeros(len(x), 4), x[:, 0])
    prepared = learner.prepare(tensors([by_hand()], gamma=0.5), estimator=estimator)
    assert prepared.value.tolist() == [1, 2, 3, 4]
    assert prepared.return_.tolist() == pytest.approx(expected)
    assert (prepared.advantage + prepared.value).tolist() == pytest.approx(expected)
    assert prepared.log_prob.tolist() == pytest.approx([np.log(0.25)] * 4)
    assert not any(column.requires_grad for column in vars(prepared).values() if column is not None)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_iteration_begins_where_it_was_prepared(spec: EnvSpec) -> None:
    options = {"network": "conv"} if spec is IMAGES else {"normalize_observations": True}
    learner = make_ppo(spec, normalize_returns=True, **options)
    prepared = learner.prepare(tensors(make_feed(spec)), estimator="gae")
    assert prepared.observation.dtype == (torch.uint8 if spec is IMAGES else torch.float32)
    log_prob, entropy, value = learner.evaluate(prepared)
    torch.testing.assert_close(log_prob.detach(), prepared.log_prob, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value.detach(), prepared.value, rtol=1e-4, atol=1e-5)
    assert entropy.shape == (len(prepared),)


@each_name
def test_observations_are_normalized_by_all_rows_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is normalized by itself. Within an iteration the statistics are constant."""
    learner, fragments = make_learner(name, DISCRETE, normalize_observations=True), make_feed(DISCRETE)
    for one in fragments:
        one.observation[..., 2] = one.final_observation[..., 2] = 5.0  # a sensor that is stuck
    fragments[8].observation[0, 0, :2] = (1e6, -1e6)  # far out: clipped
    used: list[np.ndarray] = []
    means: list[list[float]] = []
    evaluate = learner.evaluate

    def spy(part: Prepared) -> Any:
        used.append(part.observation.numpy())
        means.append(learner.state()["observation_mean"].tolist())
        return evaluate(part)

    monkeypatch.setattr(learner, "evaluate", spy)
    start, seen = learner.weights(), np.zeros((0, 3))
    assert start["observation_mean"].tolist() == [0.0] * 3 and start["observation_std"].tolist() == [1.0] * 3
    for i in range(0, 12, 4):
        batch = tensors(fragments[i : i + 4])
        rows = batch.observation.double().numpy()
        before, seen = seen if i else rows, np.concatenate([seen, rows])
        learner.update(batch)
        expected = np.clip((rows - before.mean(axis=0)) / np.maximum(before.std(axis=0), 1e-4), -10, 10)
        np.testing.assert_allclose(used[-1], expected[batch.row[batch.valid]], rtol=1e-4, atol=1e-4)
        assert means == means[:1] * len(means), "they move at the end of an iteration"
        means.clear()
        state, weights = learner.state(), learner.weights()
        assert int(state["observation_count"]) == len(seen)
        np.testing.assert_allclose(state["observation_mean"].numpy(), seen.mean(axis=0), rtol=1e-9)
        np.testing.assert_allclose(
            state["observation_variance"].numpy(), seen.var(axis=0), rtol=1e-9, atol=1e-12
        )
        std = np.maximum(seen.std(axis=0), 1e-4)
        assert std[2] == 1e-4
        for part, published in (("mean", seen.mean(axis=0)), ("std", std)):
            np.testing.assert_allclose(weights[f"observation_{part}"].numpy(), published, rtol=1e-5)
            assert weights[f"observation_{part}"].dtype == torch.float32
    assert np.abs(used[-1]).max() == 10.0


def test_statistics_of_returns() -> None:
    """The first returns are taken as they are, the second count half; later ones a tenth."""
    learner = make_ppo(normalize_returns=True, gamma=0.0)
    rewards = []
    for seed in range(2):
        batch = tensors(make_feed(DISCRETE, seed=seed), gamma=0.0)
        rewards.append(batch.reward[batch.valid].double().numpy() + 1e4)
        shifted = replace(batch, reward=batch.reward + 1e4)
        prepared = learner.prepare(shifted, estimator="gae")
        weight = [1.0] if seed == 0 else [0.5, 0.5]
        mean = sum(w * r.mean() for w, r in zip(weight, rewards, strict=True))
        square = sum(w * ((r - mean) ** 2).mean() for w, r in zip(weight, rewards, strict=True))
        assert learner.return_scale == pytest.approx((mean, square**0.5), rel=1e-4)
        found = prepared.return_.double().numpy()
        np.testing.assert_allclose(found, (rewards[-1] - mean) / square**0.5, atol=2e-3)
    learner.load_state(learner.state() | {"return_count": torch.tensor(50.0, dtype=torch.float64)})
    old_mean, _ = learner.return_scale
    batch = tensors(make_feed(DISCRETE), gamma=0.0)
    learner.prepare(replace(batch, reward=0 * batch.reward), estimator="gae")
    assert learner.return_scale[0] == pytest.approx(0.9 * old_mean)


def test_predictions_stay_what_they_were_when_the_unit_moves() -> None:
    learner, fragments = make_ppo(CONTINUOUS, normalize_returns=True, gamma=0.9), make_feed(CONTINUOUS)
    learner.update(tensors(fragments[:4]))
    batch = tensors(fragments[4:8])
    batch = replace(batch, reward=batch.reward * 30 + 5)

    def predictions() -> Tensor:
        mean, std = learner.return_scale
        with torch.no_grad():
            value = learner.network(batch.observation)[1]
        return value * std + mean

    before, scale = predictions(), learner.return_scale
    prepared = learner.prepare(batch, estimator="gae")
    assert learner.return_scale[1] > 5 * scale[1]
    torch.testing.assert_close(predictions(), before, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        now = learner.network(prepared.observation)[1]
    torch.testing.assert_close(prepared.value, now, rtol=1e-4, atol=1e-5)


@each_name
@pytest.mark.parametrize("scale", [0.001, 100.0])
@pytest.mark.parametrize("shared", [False, True])
def test_with_normalized_returns_the_size_of_rewards_does_not_matter(
    scale: float, shared: bool, name: str
) -> None:
    """Also of value_clip, which is in units of rewards; and without the option it does matter."""
    fragments = make_feed(DISCRETE)

    def learned(factor: float, *, normalize: bool) -> Tensor:
        clip = {"value_clip": 0.3 * factor} if name == "ppo" else {}
        learner = make_learner(name, DISCRETE, shared=shared, normalize_returns=normalize, **clip)
        feed(learner, learner.config, [replace(one, reward=one.reward * factor) for one in fragments])
        network: Tensor = learner.state()["network"]
        return network

    one, other = (learned(factor, normalize=True) for factor in (1.0, scale))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    difference = learned(1.0, normalize=False) - learned(scale, normalize=False)
    assert float(difference.abs().max()) > 1e-3


# --- losses ----------------------------------------------------------------------------------------------


def test_policy_gradient_loss_hand_numbers_and_gradient() -> None:
    log_prob = tensor([-1.0, -2.0, -0.5], requires_grad=True)
    loss = policy_gradient_loss(log_prob, tensor([2.0, -1.0, 0.0]))
    torch.testing.assert_close(loss, tensor((2.0 - 2.0 + 0.0) / 3))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    torch.testing.assert_close(gradient, tensor([-2.0, 1.0, 0.0]) / 3)


def test_clipped_surrogate_hand_numbers_and_gradient() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5, 1.1; it is clipped where the advantage pushes on in the same direction."""
    ratio, advantage = tensor([1.5, 0.5, 1.5, 0.5, 1.1]), tensor([2.0, -2.0, -2.0, 2.0, 2.0])
    old = tensor([-1.0, -2.0, -1.0, -2.0, -0.5])
    log_prob = (old + ratio.log()).requires_grad_()
    loss = clipped_surrogate(log_prob, old, advantage, clip=0.2)
    expected = [1.2 * 2, 0.8 * -2, 1.5 * -2, 0.5 * 2, 1.1 * 2]
    torch.testing.assert_close(loss, tensor(-sum(expected) / 5))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    torch.testing.assert_close(gradient, tensor([0.0, 0.0, 3.0, -1.0, -2.2]) / 5)


def test_an_action_that_the_old_policy_never_took_gives_a_finite_update() -> None:
    old, advantage = tensor([-3e38, -100.0, 100.0]), tensor([-1.0, 1.0, 1.0])
    log_prob = torch.zeros(3, requires_grad=True)
    loss = clipped_surrogate(log_prob, old, advantage, clip=0.2)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert loss.isfinite() and (gradient.abs() < 1e-40).all()


@pytest.mark.parametrize(
    ("clip", "first", "gradient"),
    # Clipped to 0.2, 0.2, 0.2 and not at all: the first would gain by going on and may not, the others may.
    [(None, 4, [-2.0, 0.5, 3.0, -0.5]), (0.2, 2.8**2, [0.0, 0.5, 3.0, -0.5])],
)
def test_value_loss_hand_numbers(clip: float | None, first: float, gradient: list[float]) -> None:
    value, old = torch.ones(4, requires_grad=True), tensor([0.0, 0.0, 0.0, 0.9])
    loss = value_loss(value, old, tensor([3.0, 0.5, -2.0, 1.5]), clip=clip)
    torch.testing.assert_close(loss, tensor(0.5 * (first + 0.25 + 9 + 0.25) / 4))
    torch.testing.assert_close(torch.autograd.grad(loss, value)[0], tensor(gradient) / 4)


def test_losses_equal_their_slow_twins_sample_by_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(200, generator=generator) for _ in range(3))
    for clip in (0.1, 0.3):
        for loss, slow, sign in (
            (clipped_surrogate, twin.slow_surrogate, -1),
            (value_loss, twin.slow_value_loss, 1),
        ):
            each = [slow(x, float(y), float(z), clip=clip) for x, y, z in zip(a, b, c, strict=True)]
            torch.testing.assert_close(loss(a, b, c, clip=clip), sign * torch.stack(each).mean())


# --- updates ---------------------------------------------------------------------------------------------


def slow_outputs(
    parameters: twin.Parameters, rows: Sequence[twin.Row], spec: EnvSpec, activation: str
) -> list[Tensor]:
    """Log probability, entropy and value [N] of each row, by a network of these parameters."""
    with torch.no_grad():
        each = [
            (
                *twin.slow_policy(parameters, row.observation, row.action, spec, activation),
                twin.slow_value(parameters, row.observation, activation),
            )
            for row in rows
        ]
    return [torch.stack(column).double() for column in zip(*each, strict=True)]


def assert_twins(
    learner: Any, metrics: Any, loss: Tensor, parameters: twin.Parameters, expected: Options, *, atol: float
) -> None:
    """The last gradient is that of a slow loss, and the metrics are as expected."""
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(parameters.values()))])
    torch.testing.assert_close(learner.parameters.vector.grad, gradient, atol=atol, rtol=1e-3)
    found, expected = ({name: float(value) for name, value in each.items()} for each in (metrics, expected))
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        *((DISCRETE, {"estimator": each}) for each in ("gae", "td_lambda", "vtrace", "upgo", "monte_carlo")),
        (PAIRS, {"estimator": "vtrace", "normalize_advantages": False, "value_coefficient": 2.0}),
        (CONTINUOUS, {"estimator": "gae", "value_clip": 0.05}),
        (CONTINUOUS, {"estimator": "upgo", "shared": True, "activation": "relu"}),
    ],
)
def test_updates_of_ppo_equal_the_slow_twin(spec: EnvSpec, options: Options) -> None:
    """One minibatch of all transitions, padding left out; the second epoch is no longer where the first began."""
    options = {
        "batch_size": 72, "minibatch_size": 72, "max_grad_norm": None, "entropy_coefficient": 0.02, "lambda_": 0.8,
        "learning_rate": 0.05,
    } | options  # fmt: skip
    batch, start = tensors(make_feed(spec, num_fragments=4)), make_ppo(spec, **options)
    assert not batch.valid.all()
    begin, config = leaves(dict(start.network.named_parameters())), start.config
    rows = twin.slow_rows(
        begin, batch, spec, estimator=config.estimator, lambda_=config.lambda_, activation=config.activation,
        old="begin" if config.corrects_staleness else "behavior",
    )  # fmt: skip
    old_log_prob, old_value, return_ = (
        tensor([getattr(row, name) for row in rows]).double()
        for name in ("old_log_prob", "old_value", "return_")
    )
    first, _, _ = slow_outputs(begin, rows, spec, config.activation)
    before = begin
    for num_epochs in (1, 2):
        ppo = make_ppo(spec, **options, num_epochs=num_epochs)
        metrics = ppo.update(batch)
        loss = twin.slow_ppo_loss(before, rows, spec, config, normalize=config.normalize_advantages)
        after = leaves(dict(ppo.network.named_parameters()))
        log_prob, entropy, value = slow_outputs(after, rows, spec, config.activation)
        moved, log_ratio = log_prob - first, log_prob - old_log_prob
        expected = {
            "kl": (moved.exp() - 1 - moved).mean(),
            "clip_fraction": ((log_ratio.exp() - 1).abs() > 0.2).double().mean(),
            "entropy": entropy.mean(),
            "value_loss": 0.5 * (value - return_).square().mean(),
            "explained_variance": 1 - (return_ - old_value).var() / return_.var(),
            "learning_rate": 0.05,
            "epochs": num_epochs,
        }
        assert_twins(ppo, metrics, loss, before, expected, atol=2e-6)
        before = after


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (DISCRETE, {}),
        (DISCRETE, {"estimator": "upgo", "lambda_": 0.7}),
        (PAIRS, {"shared": True, "rho_bar": 1.7, "value_coefficient": 2.0}),
        (CONTINUOUS, {"activation": "relu", "rho_bar": 0.6, "entropy_coefficient": 0.1}),
        (CONTINUOUS, {"reward_clip": 0.5, "estimator": "upgo", "rho_bar": 2.0}),
    ],
)
def test_an_update_of_impala_equals_the_slow_twin(spec: EnvSpec, options: Options) -> None:
    impala = make_learner("impala", spec, max_grad_norm=None, **options)
    impala.update(tensors(make_feed(spec, num_fragments=4, seed=1)))  # so that it is not where it started
    config, begin = impala.config, leaves(dict(impala.network.named_parameters()))
    batch = learned = tensors(make_feed(spec, num_fragments=4))
    assert not batch.valid.all()
    metrics = impala.update(batch)
    if config.reward_clip is not None:
        clipped = [[min(0.5, max(-0.5, float(reward))) for reward in step] for step in batch.reward]
        learned = replace(batch, reward=tensor(clipped))
        assert (batch.reward - learned.reward).abs().max() > 1
    rows = twin.slow_rows(
        begin, learned, spec, estimator=config.estimator, lambda_=config.lambda_, activation=config.activation,
        old="behavior", rho_bar=config.rho_bar,
    )  # fmt: skip
    loss = twin.slow_impala_loss(begin, rows, spec, config) * len(rows)  # the paper sums
    log_prob, entropy, _ = slow_outputs(begin, rows, spec, config.activation)
    expected = {
        "policy_loss": -(tensor([row.advantage for row in rows]) * log_prob).mean(),
        "value_loss": 0.5 * tensor([row.return_ - row.old_value for row in rows]).square().mean(),
        "entropy": entropy.mean(),
        "rho": (log_prob - tensor([row.old_log_prob for row in rows])).exp().mean(),
        "learning_rate": 4.8e-4,
    }
    assert_twins(impala, metrics, loss, begin, expected, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_steps_of_the_optimizers_of_impala(optimizer: str) -> None:
    """From slots of zero: rmsprop moves by g / (sqrt(0.01) |g| + 0.1), adam by the sign of g nearly."""
    options = {"optimizer": optimizer, "learning_rate": 1e-2, "max_grad_norm": None}
    impala = make_learner("impala", DISCRETE, **options)
    before = impala.parameters.vector.detach().clone()
    impala.update(tensors(make_feed(DISCRETE)))
    gradient, moved = impala.parameters.vector.grad, impala.parameters.vector.detach() - before
    size = gradient.abs()
    expected = gradient / (0.1 * size + 0.1) if optimizer == "rmsprop" else gradient / (size + 1e-5)
    torch.testing.assert_close(moved, -1e-2 * expected, rtol=1e-3, atol=1e-6)


def test_kl_ends_epochs_early() -> None:
    """With V-trace, whose ratio starts at 1."""

    def epochs(target_kl: float | None) -> tuple[float, int]:
        ppo = make_ppo(num_epochs=6, target_kl=target_kl, estimator="vtrace", learning_rate=2e-3)
        return float(ppo.update(tensors(make_feed(DISCRETE)))["epochs"]), ppo.num_updates

    assert epochs(None) == epochs(1e3) == (6.0, 6 * 11)
    assert epochs(1e-9) == (1.0, 11), "the epoch that goes too far is the last one"
    assert 1.0 < epochs(4e-3)[0] < 6.0


@pytest.mark.parametrize(("minibatch_size", "num"), [(20, 4), (28, 3), (30, 2), (60, 1)])
def test_minibatches_share_the_transitions_evenly(
    minibatch_size: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppo, batch = make_ppo(minibatch_size=minibatch_size), tensors(make_feed(DISCRETE, num_fragments=4))
    seen: list[Tensor] = []
    evaluate = ppo.evaluate
    monkeypatch.setattr(ppo, "evaluate", lambda part: seen.append(part.observation) or evaluate(part))
    ppo.update(batch)
    *parts, whole = seen  # the last one is for the figures
    assert ppo.num_updates == len(parts) == 2 * num and len(whole) == 72
    assert all(abs(len(part) - 72 / num) < 1 for part in parts)
    first, second = torch.cat(parts[:num]), torch.cat(parts[num:])
    assert not torch.equal(first, second), "each epoch has its own order"
    for epoch in (first, second):
        assert torch.equal(epoch.sort(dim=0).values, whole.sort(dim=0).values)


def test_schedules_reach_their_final_values() -> None:
    options = {"final_learning_rate": 0.0, "final_clip": 0.1, "final_entropy_coefficient": 0.0}
    ppo = make_ppo(anneal_steps=144, entropy_coefficient=0.4, **options)
    batch = tensors(make_feed(DISCRETE, num_fragments=4))
    for expected in ((1e-2, 0.2, 0.4), (5e-3, 0.15, 0.2), (0.0, 0.1, 0.0), (0.0, 0.1, 0.0)):
        found = [ppo.scheduled(name) for name in ("learning_rate", "clip", "entropy_coefficient")]
        assert found == pytest.approx(expected)
        before = digest(ppo.weights())
        assert float(ppo.update(batch)["learning_rate"]) == pytest.approx(expected[0])
        assert (digest(ppo.weights()) == before) == (expected[0] == 0.0)


def test_a_few_huge_observations_do_not_make_all_others_alike() -> None:
    """One forged fragment must not blind a policy that has seen many; what was constant may begin to vary."""
    learner = make_learner("ppo", CONTINUOUS, normalize_observations=True)
    batch = tensors(make_feed(CONTINUOUS))
    rows = torch.randn((2_000, 3), generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.0])
    learner.observe(replace(batch, observation=rows))
    learner.observe(replace(batch, observation=torch.full((100, 3), 1e6)))
    std = learner.weights()["observation_std"]
    assert 10 < std[0] < 50 and 50 < std[1] < 250 and std[2] > 1e5
    for _ in range(200):
        learner.observe(replace(batch, observation=rows))
    assert learner.weights()["observation_std"][0] < 3
