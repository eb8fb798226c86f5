"""BC and IQL: densities and losses by hand and by slow twins, gradients, known answers, learning from mixed data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CONTINUOUS, DISCRETE, PAIRS, Options, assert_same, make_learner, make_policy
from support.learning import toy
from support.reference_q import make_batch
from torch import Tensor, tensor

from ddrl import envs
from ddrl.algorithms.bc.actor import LOG_STD_MIN, regression_loss
from ddrl.algorithms.iql.learner import MOST_WEIGHT, action_inputs, advantage_weight, expectile_loss
from ddrl.policy import LoadedPolicy
from ddrl.runs.evaluation import score
from ddrl.types import Batch, EnvSpec

CPU = torch.device("cpu")
HALF, MIDDLE = (
    np.array([2.0, 0.5], np.float32),
    np.array([0.0, 0.5], np.float32),
)  # of the bounds of CONTINUOUS
MASKED = replace(DISCRETE, observation_shape=(7,), has_mask=True)


# --- the losses ------------------------------------------------------------------------------------------


def test_expectile_loss_hand_numbers() -> None:
    """Q is 2 above V, then 1 below it: (0.7 * 4 + 0.3 * 1) / 2; of Q nothing is learned."""
    value, q = tensor([1.0, 3.0], requires_grad=True), tensor([3.0, 2.0], requires_grad=True)
    loss = expectile_loss(value, q, expectile=0.7)
    assert float(loss.detach()) == pytest.approx(1.55)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(value.grad, tensor([-0.7 * 2, 0.3 * 1]))
    assert q.grad is None


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_the_expectile_of_a_coin_is_its_level(expectile: float) -> None:
    """Half of the values are 0, half are 1; 0.5 is the mean."""
    q, grid = tensor([0.0, 1.0]), torch.linspace(0.0, 1.0, 1001)
    losses = torch.stack([expectile_loss(v.expand(2), q, expectile=expectile) for v in grid])
    assert float(grid[losses.argmin()]) == pytest.approx(expectile, abs=1e-3)


def test_advantage_weights_are_exponential_and_clipped() -> None:
    advantage = tensor([0.0, 1.0, -2.0, math.log(MOST_WEIGHT) / 3.0 + 0.01, 1e6])
    found = advantage_weight(advantage, inverse_temperature=3.0)
    torch.testing.assert_close(found, tensor([1.0, math.exp(3.0), math.exp(-6.0), 100.0, 100.0]))
    assert advantage_weight(advantage, inverse_temperature=0.0).tolist() == [1.0] * 5


def test_regression_loss_hand_numbers() -> None:
    log_prob, weight = tensor([-1.0, -4.0], requires_grad=True), tensor([2.0, 0.5], requires_grad=True)
    assert float(regression_loss(log_prob).detach()) == 2.5
    loss = regression_loss(log_prob, weight)
    assert float(loss.detach()) == 2.0
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(log_prob.grad, tensor([-1.0, -0.25]))
    assert weight.grad is None


def test_critics_see_actions_in_unit_or_one_hot() -> None:
    inputs, num = action_inputs(CONTINUOUS, CPU)
    assert num == 2
    torch.testing.assert_close(inputs(tensor([[-2.0, 1.0], [1.0, 0.25]])), tensor([[-1.0, 1.0], [0.5, -0.5]]))
    inputs, num = action_inputs(DISCRETE, CPU)
    assert num == 4 and inputs(tensor([2, 0])).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    inputs, num = action_inputs(PAIRS, CPU)
    assert num == 5 and inputs(tensor([[2, 0], [0, 1]])).tolist() == [[0, 0, 1, 1, 0], [1, 0, 0, 0, 1]]


# --- the policy ------------------------------------------------------------------------------------------


def slow_log_prob(actor: Any, spec: EnvSpec, observation: Tensor, action: Tensor) -> Tensor:
    """Return log pi(a | s) [B], row by row."""
    rows = []
    for seen, taken in zip(observation, action, strict=True):
        outputs = actor.network(seen[None])[0]
        if spec.action_kind == "continuous":
            std = actor.log_std.exp()
            scaled = (taken - torch.from_numpy(MIDDLE)) / torch.from_numpy(HALF)
            terms = [
                torch.distributions.Normal(torch.tanh(outputs[d]), std[d]).log_prob(scaled[d]) for d in range(2)  # type: ignore[no-untyped-call]
            ]  # fmt: skip
        else:
            if spec.has_mask:
                outputs = torch.where(seen[-4:] > 0, outputs, -math.inf)
            parts = outputs.split(list(spec.action_sizes))
            terms = [part.log_softmax(dim=0)[i] for part, i in zip(parts, taken.reshape(-1), strict=True)]
        rows.append(torch.stack(terms).sum())
    return torch.stack(rows)


def with_masks(batch: Batch) -> Batch:
    """Allow the action taken, and some others."""
    masks = (torch.arange(28).reshape(-1, 4) % 3 > 0).float()[: len(batch.action)]
    masks.scatter_(1, batch.action[:, None], 1.0)
    return replace(batch, observation=torch.cat((batch.observation[:, :3], masks), dim=1))


@pytest.mark.parametrize(
    "spec", [CONTINUOUS, DISCRETE, PAIRS, MASKED], ids=["box", "discrete", "pairs", "masked"]
)
def test_the_learner_has_the_slow_twins_log_likelihood(spec: EnvSpec) -> None:
    learner, batch = make_learner("bc", spec), make_batch(3, spec=spec)
    if spec.has_mask:
        batch = with_masks(batch)
    with torch.no_grad():
        if spec is CONTINUOUS:
            learner.actor.log_std.copy_(tensor([-1.2, 0.4]))
        expected = slow_log_prob(learner.actor, spec, batch.observation, batch.action)
        found, entropy = learner.actor(batch.observation, batch.action)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if spec is CONTINUOUS:
        torch.testing.assert_close(entropy[0], tensor(1.0 + math.log(2 * math.pi) - 0.8))
    loss = learner.update(batch)["policy_loss"]
    torch.testing.assert_close(loss, -expected.mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bc", "iql"])
@pytest.mark.parametrize(
    "spec", [CONTINUOUS, DISCRETE, PAIRS, MASKED], ids=["box", "discrete", "pairs", "masked"]
)
def test_the_policy_plays_what_the_learner_has_learned(name: str, spec: EnvSpec) -> None:
    """It acts by the mean or the most probable choices, and draws from the distribution, within the bounds."""
    learner = make_learner(name, spec)
    for seed in range(30):
        learner.update(
            with_masks(make_batch(seed, spec=spec)) if spec.has_mask else make_batch(seed, spec=spec)
        )
    policy, row = make_policy(name, spec, weights=learner.weights()), np.array([[0.3, -1.0, 2.0]], np.float32)
    if spec.has_mask:
        row = np.concatenate((row, [[1, 0, 1, 0]]), axis=1, dtype=np.float32)
    action, seen = policy.act(row), np.repeat(row, 20_000, axis=0)
    drawn, columns = policy.explore(seen, np.random.default_rng(0))
    with torch.no_grad():
        outputs = learner.actor.network(torch.from_numpy(row))[0]
    assert columns == {} and drawn.shape == (20_000, *spec.action_shape)
    assert drawn.dtype == action.dtype == (np.float32 if spec is CONTINUOUS else np.int64)
    if spec is CONTINUOUS:
        mean, std = outputs.tanh().numpy(), learner.actor.log_std.detach().exp().numpy()
        np.testing.assert_allclose(action[0], mean * HALF + MIDDLE, rtol=1e-4, atol=1e-5)
        unclipped = mean + std * np.random.default_rng(0).standard_normal((20_000, 2), np.float32)
        np.testing.assert_allclose(drawn, np.clip(unclipped, -1, 1) * HALF + MIDDLE, rtol=1e-4, atol=1e-5)
        assert ((drawn >= spec.action_low) & (drawn <= spec.action_high)).all()
        return
    if spec.has_mask:
        outputs[[1, 3]] = -math.inf
    for d, logits in enumerate(outputs.split(list(spec.action_sizes))):
        prob = logits.softmax(dim=0).numpy()
        assert action.reshape(-1)[d] == prob.argmax()
        share = np.bincount(drawn.reshape(20_000, -1)[:, d], minlength=len(prob)) / 20_000
        np.testing.assert_allclose(share, prob, atol=0.02)
        assert (share[prob == 0] == 0).all()


def test_the_deviation_stays_within_its_bounds_and_leaves_them_again() -> None:
    """The same action in every state: ever surer, down to the bound; then other actions widen it at once."""
    learner, batch = make_learner("bc", CONTINUOUS, learning_rate=0.1), make_batch(0, spec=CONTINUOUS)
    same = replace(batch, action=torch.zeros_like(batch.action))
    for _ in range(300):
        learner.update(same)
    assert learner.weights()["log_std"].tolist() == [LOG_STD_MIN] * 2
    for _ in range(5):
        learner.update(batch)
    assert (learner.weights()["log_std"] > LOG_STD_MIN).all()


# --- an update of IQL ------------------------------------------------------------------------------------


def slow_update(learner: Any, spec: EnvSpec, batch: Batch) -> dict[str, Tensor]:
    """Algorithm 1 of arXiv:2110.06169 row by row: losses and gradients, from copies of the networks."""
    nets = {
        name: copy.deepcopy(getattr(learner, name))
        for name in ("actor", "critics", "value", "target_critics")
    }
    config, losses = learner.config, {"value": [], "critics": [], "actor": []}  # type: ignore[var-annotated]
    log_prob = slow_log_prob(nets["actor"], spec, batch.observation, batch.action)
    for i in range(len(batch.action)):
        s, next_s = batch.observation[i : i + 1], batch.next_observation[i : i + 1]
        if spec.action_kind == "continuous":
            a = (batch.action[i : i + 1] - torch.from_numpy(MIDDLE)) / torch.from_numpy(HALF)
        else:
            a = torch.eye(4)[batch.action[i : i + 1]]
        target_q = min(nets["target_critics"](s, a).flatten().tolist())
        v = nets["value"](s)[0, 0]
        u = target_q - v
        losses["value"].append((config.expectile if float(u.detach()) > 0 else 1 - config.expectile) * u**2)
        y = float(batch.n_step_return[i]) + float(batch.bootstrap_discount[i]) * float(
            nets["value"](next_s).detach()
        )
        losses["critics"].append(((nets["critics"](s, a).flatten() - y) ** 2).sum())
        weight = min(math.exp(config.inverse_temperature * (target_q - float(v.detach()))), 100.0)
        losses["actor"].append(-weight * log_prob[i])
    found = {}
    for name, each in losses.items():
        found[name] = torch.stack(each).mean()
        gradients = torch.autograd.grad(found[name], list(nets[name].parameters()))
        found[f"{name} gradient"] = torch.cat([gradient.flatten() for gradient in gradients])
    return found


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["box", "discrete"])
@pytest.mark.parametrize(
    "options", [{}, {"expectile": 0.9, "inverse_temperature": 30.0, "n_step": 3, "num_critics": 3}]
)
def test_an_update_equals_the_slow_twin(spec: EnvSpec, options: Options) -> None:
    learner = make_learner("iql", spec, **options)
    batches = [make_batch(seed, spec=spec, n_step=learner.config.n_step) for seed in range(4)]
    for batch in batches[:3]:
        learner.update(batch)  # so that critics and targets differ
    expected, before = slow_update(learner, spec, batches[3]), learner.state()
    metrics = learner.update(batches[3])
    for name, metric in (("value", "value_loss"), ("critics", "critic_loss"), ("actor", "policy_loss")):
        torch.testing.assert_close(metrics[metric], expected[name].detach(), rtol=1e-4, atol=1e-5)
        gradient = learner._parameters[name].vector.grad
        torch.testing.assert_close(gradient, expected[f"{name} gradient"], rtol=1e-3, atol=1e-5)
    state = learner.state()
    target = before["target_critics.value"].lerp(state["critics.value"], learner.config.target_rate)
    torch.testing.assert_close(state["target_critics.value"], target)


def test_each_loss_moves_its_own_network_only() -> None:
    """Values and critics learn the same whatever the policy's weights are; it waits in a run from a given policy."""
    learner, other = (make_learner("iql", CONTINUOUS, inverse_temperature=beta) for beta in (1.0, 9.0))
    waiting = make_learner("iql", CONTINUOUS, critic_warmup_updates=4)
    waiting.from_policy = True
    given = waiting.weights()
    for seed in range(4):
        for each in (learner, other, waiting):
            each.update(make_batch(seed, spec=CONTINUOUS))
    states = [each.state() for each in (learner, other, waiting)]
    names = [name for name in states[0] if not name.startswith("actor.")]
    for state in states[1:]:
        assert_same({name: state[name] for name in names}, {name: states[0][name] for name in names})
        assert not torch.equal(state["actor.value"], states[0]["actor.value"])
    assert_same(waiting.weights(), given)
    waiting.update(make_batch(4, spec=CONTINUOUS))
    assert not torch.equal(waiting.weights()["log_std"], given["log_std"])


# --- known answers ---------------------------------------------------------------------------------------


def learn(
    name: str, spec: EnvSpec, data: Callable[[np.random.Generator], Batch], num: int, **options: Any
) -> Any:
    """Return a learner after so many updates on batches of the data."""
    rng, learner = np.random.default_rng(0), make_learner(name, spec, **options)
    for _ in range(num):
        learner.update(data(rng))
    return learner


def bandit(rng: np.random.Generator, share: float = 0.5, size: int = 128) -> Batch:
    """Two of four actions are played: action 1, with this share, is worth 1, action 0 is worth 0."""
    is_good, seen = rng.random(size) < share, torch.ones(size, 3)
    action, reward = torch.from_numpy(is_good.astype(np.int64)), torch.from_numpy(is_good.astype(np.float32))
    return Batch(seen, action, reward, torch.zeros(size), seen)


@pytest.mark.parametrize(("expectile", "beta"), [(0.7, 3.0), (0.9, 1.0)])
def test_a_bandits_value_and_policy_are_known(expectile: float, beta: float) -> None:
    """V is the expectile of 0 and 1, at equal shares its level; pi(a) is in proportion to exp(beta * Q(a))."""
    options = {"expectile": expectile, "inverse_temperature": beta, "target_rate": 0.05}
    learner = learn("iql", DISCRETE, bandit, 600, learning_rate=3e-3, **options)
    seen = torch.ones(1, 3)
    with torch.no_grad():
        value, prob = float(learner.value(seen)), learner.actor.network(seen)[0].softmax(dim=0)
        q = learner.critics(seen.expand(2, 3), torch.eye(4)[:2])[..., 0]
    torch.testing.assert_close(q, tensor([[0.0, 1.0]]).expand(2, 2), rtol=0, atol=0.05)
    assert value == pytest.approx(expectile, abs=0.05)
    assert float(prob[1]) == pytest.approx(1 / (1 + math.exp(-beta)), abs=0.03)
    assert float(prob[2:].sum()) < 0.02, "actions that are not in the data are not played"


def test_bc_has_the_shares_and_the_gaussian_of_the_data() -> None:
    learner = learn("bc", DISCRETE, partial(bandit, share=0.3), 400, learning_rate=3e-3)
    with torch.no_grad():
        prob = learner.actor.network(torch.ones(1, 3))[0].softmax(dim=0)
    torch.testing.assert_close(prob, tensor([0.7, 0.3, 0.0, 0.0]), rtol=0, atol=0.03)

    def draws(rng: np.random.Generator) -> Batch:
        scaled = rng.normal([0.4, -0.3], [0.1, 0.3], (256, 2))
        action = torch.from_numpy((scaled * HALF + MIDDLE).astype(np.float32))
        return Batch(torch.ones(256, 3), action, torch.zeros(256), torch.zeros(256), torch.ones(256, 3))

    learner = learn("bc", CONTINUOUS, draws, 600, learning_rate=1e-2)
    policy = make_policy("bc", CONTINUOUS, weights=learner.weights())
    expected = np.array([0.4, -0.3]) * HALF + MIDDLE
    np.testing.assert_allclose(policy.act(np.ones((1, 3), np.float32))[0], expected, atol=0.05)
    np.testing.assert_allclose(learner.weights()["log_std"].exp(), [0.1, 0.3], rtol=0.15)


def corridor(rng: np.random.Generator, size: int = 64) -> Batch:
    """Four places in a row, left (0) or right (1); reward 1 at the right end, where an episode ends.

    Three in four actions go left, so that the reward is rare, and far from the first place.
    """
    place, action = rng.integers(0, 3, size), (rng.random(size) < 0.25).astype(np.int64)
    following = np.where(action == 1, place + 1, np.maximum(place - 1, 0))
    has_ended = following == 3
    seen, then = (torch.eye(4)[torch.from_numpy(each)] for each in (place, following))
    reward, discount = has_ended.astype(np.float32), np.where(has_ended, 0.0, 0.9).astype(np.float32)
    return Batch(seen, torch.from_numpy(action), torch.from_numpy(reward), torch.from_numpy(discount), then)


CORRIDOR = EnvSpec("corridor", (4,), "float32", "discrete", (), (2,))


def test_iql_finds_what_no_episode_of_the_data_shows() -> None:
    """With a large expectile V is nearly that of the best policy, 0.9^steps; BC goes left as the data do."""
    options = {"hidden_sizes": (32,), "learning_rate": 3e-3}
    more = {"expectile": 0.98, "inverse_temperature": 30.0, "target_rate": 0.1}
    iql = learn("iql", CORRIDOR, corridor, 1_200, **options, **more)
    bc = learn("bc", CORRIDOR, corridor, 300, **options)
    seen = torch.eye(4)[:3]
    with torch.no_grad():
        value = iql.value(seen)[:, 0]
    torch.testing.assert_close(value, tensor([0.81, 0.9, 1.0]), rtol=0, atol=0.06)
    for learner, name, expected in ((iql, "iql", 1), (bc, "bc", 0)):
        policy = make_policy(name, CORRIDOR, weights=learner.weights(), hidden_sizes=(32,))
        assert policy.act(seen.numpy()).tolist() == [expected] * 3


def half_good(rng: np.random.Generator, size: int = 128) -> Batch:
    """Half of the actions in ddrl/Target-v0 are nearly right, half are random."""
    seen, then = (rng.uniform(-1.5, 1.5, (size, 1)).astype(np.float32) for _ in range(2))
    right = np.clip(seen + rng.normal(0.0, 0.05, (size, 1)), -2.0, 2.0)
    action = np.where(rng.random((size, 1)) < 0.5, right, rng.uniform(-2.0, 2.0, (size, 1))).astype(
        np.float32
    )
    reward = -((action - seen)[:, 0] ** 2)
    columns = seen, action, reward, np.full(size, 0.5, np.float32), then
    return Batch(*map(torch.from_numpy, columns))


def test_of_data_that_are_half_good_iql_learns_more_than_bc() -> None:
    """BC aims half way, at -1.9 of an episode's return at best; the best is 0, and random actions give -20.8."""
    options: Options = {"hidden_sizes": (32,), "learning_rate": 3e-3}
    returns = {}
    for name, more in (("bc", {}), ("iql", {"target_rate": 0.05})):
        run = toy("ddrl/Target-v0", {"name": name})
        spec = envs.describe(run.env)
        learner = learn(name, spec, half_good, 1_000, **options, **more)
        policy = make_policy(name, spec, weights=learner.weights(), **options)
        found = score(LoadedPolicy(policy, run, spec, "run", 0), range(9000, 9050), num_envs=50, epsilon=0)
        returns[name] = found.return_mean
    assert returns["bc"] < -1.3 and returns["iql"] > -0.6, returns
