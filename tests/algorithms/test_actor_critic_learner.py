"""What the on-policy learners share: targets of a batch, statistics of observations and of returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CONTINUOUS, DISCRETE, make_learner
from support.reference_ppo import IMAGES, SPECS, feed, make_feed, tensors
from torch import Tensor

from ddrl.algorithms.actor_critic.learner import Prepared
from ddrl.types import EnvSpec, Fragment

each_name = pytest.mark.parametrize("name", ["ppo", "impala"])


def ppo(spec: EnvSpec = DISCRETE, **options: Any) -> Any:
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
    learner = ppo(spec, gamma=0.5, lambda_=lambda_, estimator=estimator)
    learner.network = lambda x: (torch.zeros(len(x), 4), x[:, 0])
    prepared = learner.prepare(tensors([by_hand()], gamma=0.5), estimator=estimator)
    assert prepared.value.tolist() == [1, 2, 3, 4]
    assert prepared.return_.tolist() == pytest.approx(expected)
    assert (prepared.advantage + prepared.value).tolist() == pytest.approx(expected)
    assert prepared.log_prob.tolist() == pytest.approx([np.log(0.25)] * 4)
    assert not any(column.requires_grad for column in vars(prepared).values())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_iteration_begins_where_it_was_prepared(spec: EnvSpec) -> None:
    options = {"network": "conv"} if spec is IMAGES else {"normalize_observations": True}
    learner = ppo(spec, normalize_returns=True, **options)
    prepared = learner.prepare(tensors(make_feed(spec)), estimator="gae")
    assert prepared.observation.dtype == (torch.uint8 if spec is IMAGES else torch.float32)
    log_prob, entropy, value = learner.evaluate(prepared)
    torch.testing.assert_close(log_prob.detach(), prepared.log_prob, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value.detach(), prepared.value, rtol=1e-4, atol=1e-5)
    assert entropy.shape == (len(prepared),)


@each_name
def test_observation_statistics_are_those_of_all_rows_seen(name: str) -> None:
    learner, fragments = make_learner(name, DISCRETE, normalize_observations=True), make_feed(DISCRETE)
    for one in fragments:
        one.observation[..., 2] = one.final_observation[..., 2] = 5.0  # a sensor that is stuck
    seen: list[np.ndarray] = []
    start = learner.weights()
    assert start["observation_mean"].tolist() == [0.0] * 3 and start["observation_std"].tolist() == [1.0] * 3
    for i in range(0, 12, 4):
        batch = tensors(fragments[i : i + 4])
        learner.update(batch)
        seen.append(batch.observation.double().numpy())
        rows, state, weights = np.concatenate(seen), learner.state(), learner.weights()
        assert int(state["observation_count"]) == len(rows)
        np.testing.assert_allclose(state["observation_mean"].numpy(), rows.mean(axis=0), rtol=1e-9)
        variance, std = state["observation_variance"].numpy(), np.maximum(rows.std(axis=0), 1e-4)
        np.testing.assert_allclose(variance, rows.var(axis=0), rtol=1e-9, atol=1e-12)
        assert std[2] == 1e-4
        for part, expected in (("mean", rows.mean(axis=0)), ("std", std)):
            np.testing.assert_allclose(weights[f"observation_{part}"].numpy(), expected, rtol=1e-5)
            assert weights[f"observation_{part}"].dtype == torch.float32


def published(learner: Any) -> tuple[np.ndarray, np.ndarray]:
    weights = learner.weights()
    return weights["observation_mean"].numpy(), weights["observation_std"].numpy()


@each_name
def test_statistics_are_constant_within_an_iteration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published with weights is what the next batch is normalized by, in all its epochs."""
    learner, fragments = make_learner(name, DISCRETE, normalize_observations=True), make_feed(DISCRETE)
    learner.update(tensors(fragments[:4]))
    fragments[4].observation[0, 0] = (1e6, -1e6, 0.0)  # far out: clipped
    batch, (mean, std) = tensors(fragments[4:8]), published(learner)
    used: list[Prepared] = []
    held: list[float] = []
    evaluate = learner.evaluate

    def spy(part: Prepared) -> Any:
        used.append(part)
        held.append(float(learner.state()["observation_mean"].sum()))
        return evaluate(part)

    monkeypatch.setattr(learner, "evaluate", spy)
    learner.update(batch)
    assert len(set(held)) == 1
    assert not np.array_equal(published(learner)[0], mean), "it moves at the end"
    expected = np.clip((batch.observation.numpy() - mean) / std, -10, 10)[batch.row[batch.valid].numpy()]
    assert np.abs(expected).max() == 10.0
    whole = used[-1].observation.numpy()
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)


def test_the_first_batch_is_normalized_by_itself() -> None:
    """Nothing was seen before it, and an untrained policy is nearly uniform however it sees."""
    learner, batch = ppo(normalize_observations=True), tensors(make_feed(DISCRETE))
    prepared, rows = learner.prepare(batch, estimator="gae"), batch.observation.numpy()
    expected = ((rows - rows.mean(axis=0)) / rows.std(axis=0))[batch.row[batch.valid].numpy()]
    np.testing.assert_allclose(prepared.observation.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_statistics_of_returns() -> None:
    """The first returns are taken as they are, the second count half; later ones a tenth."""
    learner = ppo(normalize_returns=True, gamma=0.0)
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
    learner, fragments = ppo(CONTINUOUS, normalize_returns=True, gamma=0.9), make_feed(CONTINUOUS)
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


@pytest.mark.parametrize("scale", [0.001, 100.0])
@pytest.mark.parametrize("shared", [False, True])
def test_with_normalized_returns_the_size_of_rewards_does_not_matter(scale: float, shared: bool) -> None:
    """Also of value_clip, which is in units of rewards; and without the option it does matter."""
    fragments = make_feed(DISCRETE)

    def learned(factor: float, *, normalize: bool) -> Tensor:
        learner = ppo(shared=shared, normalize_returns=normalize, value_clip=0.3 * factor)
        feed(learner, learner.config, [replace(one, reward=one.reward * factor) for one in fragments])
        network: Tensor = learner.state()["network"]
        return network

    one, other = (learned(factor, normalize=True) for factor in (1.0, scale))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    difference = learned(1.0, normalize=False) - learned(scale, normalize=False)
    assert float(difference.abs().max()) > 1e-3
