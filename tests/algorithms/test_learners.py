"""The promises of every learner: exact continuation, copies, refusal of other states, seeds, metrics, devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from support.algorithms import (
    CONTINUOUS,
    CPU,
    DISCRETE,
    OWN,
    Options,
    assert_same,
    digest,
    make_learner,
)
from support.reference_q import PIXELS
from support.reference_r2d2 import IMAGES
from support.subjects import CASES, CATEGORICAL, NATURE, NORMALIZED, SOFT, SPECS, batch_for, on_device
from torch.optim import Adam, RMSprop

from ddrl.algorithms.optim import adam, optimizer_state, rmsprop
from ddrl.networks.device import to_host
from ddrl.types import EnvSpec

OF_VALUES = ("network.exp_avg", "network.step", "num_updates")
each_case = pytest.mark.parametrize(("name", "spec", "options"), CASES.values(), ids=CASES)
METRICS = {
    "sac": {"critic_loss", "q_mean", "temperature", "policy_loss", "entropy"},
    "td3": {"critic_loss", "q_mean", "policy_loss"},
    "discrete_sac": {"critic_loss", "q_mean", "temperature", "policy_loss", "entropy"},
    "bc": {"policy_loss", "entropy"},
    "iql": {"critic_loss", "q_mean", "value_loss", "policy_loss", "entropy"},
    "ppo": {"kl", "clip_fraction", "entropy", "value_loss", "explained_variance", "learning_rate", "epochs"},
    "impala": {"policy_loss", "value_loss", "entropy", "rho", "learning_rate"},
    "pqn": {"loss", "q_mean", "td_error", "epsilon", "grad_norm"},
    "dqn": {"loss", "q_mean", "td_error", "epsilon", "grad_norm"},
    "r2d2": {"loss", "q_mean", "td_error", "grad_norm", "priority"},
    "docs.own_algorithm": {"loss", "q_mean"},
}


@each_case
def test_continuation_is_bit_equal(name: str, spec: EnvSpec, options: Options) -> None:
    original, other = (make_learner(name, spec, seed=seed, **options) for seed in (1, 2))
    batches = [batch_for(name, original, spec, seed) for seed in range(6)]
    for batch in batches[:3]:
        original.update(batch)
    state, weights = original.state(), original.weights()
    taken = {"state": digest(state), "weights": digest(weights)}
    other.load_state(state)
    assert_same(load(save(state)), state)
    assert other.num_updates == original.num_updates >= 3
    assert_same(other.weights(), original.weights())
    for batch in batches[3:]:
        assert_same(original.update(batch), other.update(batch))
    assert_same(original.state(), other.state())
    assert_same(load(save(original.weights())), other.weights())
    assert digest(original.state()) != taken["state"]
    assert {"state": digest(state), "weights": digest(weights)} == taken, "they are copies"


@each_case
def test_same_seed_same_run_other_seed_other_run(name: str, spec: EnvSpec, options: Options) -> None:
    found = []
    for seed in (1, 1, 2):
        learner = make_learner(name, spec, seed=seed, **options)
        start = digest(learner.weights())
        learner.update(batch_for(name, learner, spec, 0))
        found.append((start, digest(learner.state())))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0] and found[0][1] != found[2][1]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        *((name, {}, expected) for name, expected in METRICS.items()),
        ("dqn", CATEGORICAL | {"epsilon_ladder": True, "max_grad_norm": None}, {"loss", "q_mean"}),
        *(
            (name, {"prioritized": True}, METRICS[name] | {"priority"})
            for name in ("dqn", "sac", "td3", "discrete_sac")
        ),
        ("sac", {"prioritized": True, "num_quantiles": 5}, METRICS["sac"] | {"priority"}),
        ("r2d2", {"prioritized": False}, METRICS["r2d2"] - {"priority"}),
    ],
)
def test_metrics_are_detached_scalars(name: str, options: Options, expected: set[str]) -> None:
    learner = make_learner(name, SPECS[name], **options)
    metrics = learner.update(batch_for(name, learner, SPECS[name], 0))
    assert set(metrics) == expected
    assert not any(value.requires_grad for value in metrics.values())
    priority = metrics.pop("priority", torch.zeros(6))
    assert priority.shape == (6,) and bool((priority >= 0).all())
    assert all(value.shape == () for value in metrics.values())


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_targets_are_copied_at_each_period_or_follow_at_their_rate(name: str) -> None:
    hard, soft = make_learner(name, DISCRETE, target_period=3), make_learner(name, DISCRETE, **SOFT)
    for i in range(1, 8):
        for learner, rate in ((hard, float(i % 3 == 0)), (soft, 0.1)):
            before = learner.state()["target_network.value"]
            learner.update(batch_for(name, learner, DISCRETE, i))
            network, target = (learner.state()[f"{part}.value"] for part in ("network", "target_network"))
            torch.testing.assert_close(target, before + rate * (network - before))
            assert not torch.equal(network, before)


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_epsilon_is_annealed_and_published_with_the_weights(name: str) -> None:
    options = {"epsilon_ladder": False, "epsilon": 0.9, "final_epsilon": 0.1, "epsilon_anneal_updates": 4}
    learner = make_learner(name, DISCRETE, **options)
    assert float(learner.weights()["epsilon"]) == pytest.approx(0.9)
    for expected in (0.7, 0.5, 0.3, 0.1, 0.1):
        metrics = learner.update(batch_for(name, learner, DISCRETE, 0))
        published = learner.weights()["epsilon"]
        assert float(metrics["epsilon"]) == float(published) == pytest.approx(expected)
        assert published.dtype == torch.float32 and published.shape == ()


FRESH: list[tuple[str, Options, str, tuple[str, ...]]] = [
    ("sac", {"temperature": 0.2}, "critics and optimizers start fresh, the temperature at 0.2",
     ("critics.value", "target_critics.value", "actor.exp_avg", "actor.step")),
    ("td3", {}, "critics and optimizers start fresh", ("critics.value", "target_critics.value", "actor.exp_avg")),
    ("discrete_sac", {"temperature": 0.2}, "critics and optimizers start fresh, the temperature at 0.2",
     ("critics.value", "target_critics.value", "actor.exp_avg", "actor.step")),
    ("discrete_sac", {"form": "sqn"}, "the optimizer starts fresh", ("critics.exp_avg", "critics.step")),
    ("bc", {}, "the optimizer starts fresh", ("actor.exp_avg", "actor.step")),
    ("iql", {}, "values, critics and optimizers start fresh",
     ("critics.value", "target_critics.value", "value.value", "actor.exp_avg", "actor.step")),
    ("docs.own_algorithm", {}, "the optimizer starts fresh", ("adam.exp_avg", "adam.step")),
    ("pqn", {}, "the optimizer starts fresh, and epsilon at 0.05", OF_VALUES),
    ("dqn", {}, "the optimizer starts fresh, and epsilon at 0.05", OF_VALUES),
    ("dqn", {"noisy": True, "dueling": True}, "the optimizer starts fresh, and epsilon at 0", OF_VALUES),
    ("dqn", {"epsilon_ladder": True}, "the optimizer starts fresh", OF_VALUES),
    ("r2d2", {"epsilon_ladder": False, "epsilon": 0.1},
     "the optimizer starts fresh, and epsilon at 0.1", OF_VALUES),
    ("ppo", {"normalize_observations": True}, "the critic and the optimizer start fresh",
     ("optimizer.exp_avg", "return_count", "num_steps")),
    ("impala", {"shared": True}, "the critic's head and the optimizer start fresh",
     ("optimizer.square_avg", "return_count", "num_steps")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "fresh", "untouched"), FRESH)
def test_initial_weights_are_the_policy_and_the_rest_starts_fresh(
    name: str, options: Options, fresh: str, untouched: tuple[str, ...]
) -> None:
    spec = SPECS[name]
    source, learner, other = (make_learner(name, spec, **options) for _ in range(3))
    learner.from_policy = True
    for seed in range(3):
        source.update(batch_for(name, source, spec, seed))
    published = source.weights()
    assert learner.load_initial_weights(published) == fresh
    found, state, before = learner.weights(), learner.state(), other.state()
    assert found.keys() == published.keys()
    assert all(torch.equal(found[part], published[part]) for part in found if part != "epsilon")
    assert all(torch.equal(state[part], before[part]) for part in untouched)
    if name in ("dqn", "r2d2", "pqn"):
        assert name == "pqn" or torch.equal(state["target_network.value"], state["network.value"])
        rest = learner.config.epsilon if "epsilon" in options else learner.config.final_epsilon
        assert float(found["epsilon"]) == pytest.approx(rest)
    elif name in ("ppo", "impala"):
        parts, others = learner.network.state_dict(), other.network.state_dict()
        critic = {part for part in parts if part.startswith(("critic.", "value_head."))}
        assert critic and all(torch.equal(parts[part], others[part]) for part in critic)
    batch = batch_for(name, learner, spec, 3)
    assert digest(learner.update(batch)) != digest(other.update(batch))
    for part in found:  # the number of observations is not published: they count for many
        if part.startswith("observation_"):
            after = learner.weights()[part]
            assert not torch.equal(after, published[part])
            torch.testing.assert_close(after, published[part], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sac", {}),
        ("sac", {"network": OWN}),
        ("td3", {}),
        ("iql", {}),
        ("ppo", {"num_epochs": 1, "minibatch_size": 60, "normalize_returns": True}),
        ("ppo", {"num_epochs": 1, "minibatch_size": 60, "shared": True, "entropy_coefficient": 0.1}),
        ("impala", {}),
        ("impala", {"optimizer": "adam"}),
    ],
)
def test_the_critic_warms_up_before_a_given_policy_moves(
    name: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across a checkpoint; then the policy moves as slowly as at the start of an optimizer."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.algorithms")
    spec, rate = CONTINUOUS, 1e-3
    options = options | {"learning_rate": rate, "critic_warmup_updates": 12}
    original, other = (make_learner(name, spec, seed=seed, **options) for seed in (1, 2))
    original.from_policy = other.from_policy = True
    original.load_initial_weights(make_learner(name, spec, seed=3, **options).weights())
    given, critic = original.weights(), original.state()
    for i in range(12):
        original.update(batch_for(name, original, spec, i))
        assert_same(original.weights(), given)
        assert digest(original.state()) != digest(critic)
        critic = original.state()
        other.load_state(critic)
        original, other = other, original
    original.update(batch_for(name, original, spec, 12))
    moved = [(value - given[part]).abs().max().item() for part, value in original.weights().items()]
    assert any(moved)
    if name != "impala" or "optimizer" in options:
        assert max(moved) <= 1.01 * rate  # Adam's first step
    if "network" in options:
        assert (
            original.state()["critics.step"] == 1
        )  # the trunk's, which stood still, is not taken for its 13th


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sac", {"network": OWN}),
        ("ppo", {"num_epochs": 1, "minibatch_size": 60}),
        ("impala", {"optimizer": "adam"}),
    ],
)
def test_an_optimizer_of_a_checkpoint_moves_no_policy_while_the_critic_warms_up(
    name: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a branch: it begins with moments of the policy's gradients."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.algorithms")
    learner, other = (make_learner(name, CONTINUOUS, **options, critic_warmup_updates=5) for _ in range(2))
    for i in range(3):
        learner.update(batch_for(name, learner, CONTINUOUS, i))
    other.load_state(learner.state() | {"num_updates": torch.tensor(0)})
    other.from_policy, given = True, other.weights()
    other.update(batch_for(name, other, CONTINUOUS, 3))
    assert_same(other.weights(), given)


def test_a_learned_temperature_is_carried_over_unless_it_is_fixed_or_unknown() -> None:
    source, learner = (make_learner("sac", CONTINUOUS, initial_temperature=value) for value in (0.02, 1.0))
    fixed = make_learner("sac", CONTINUOUS, temperature=0.3)
    given = source.weights()
    assert learner.load_initial_weights(given).endswith("the temperature at 0.02")
    assert fixed.load_initial_weights(given).endswith("the temperature at 0.3")
    del given["log_temperature"]  # a policy of an earlier version
    assert make_learner("sac", CONTINUOUS).load_initial_weights(given).endswith("the temperature at 0.2")


@pytest.mark.parametrize(
    ("name", "options", "others", "words"),
    [
        ("sac", {}, {"num_critics": 3}, r"critics\.exp_avg: shape"),
        ("sac", {}, {"hidden_sizes": (9, 9)}, r"actor\.exp_avg: shape"),
        ("bc", {}, {"hidden_sizes": (8, 8)}, r"actor\.exp_avg: shape"),
        ("iql", {}, {"num_critics": 3}, r"critics\.exp_avg: shape"),
        ("ppo", {}, {"hidden_sizes": (6, 4)}, r"network: shape \(\d+,\) in the state, \(\d+,\) here; use the"),
        ("ppo", {}, {"normalize_observations": True}, r"observation_mean: shape \(3,\) in the state, \(0,\) here"),
        ("impala", {}, {"optimizer": "adam"}, r"optimizer\.exp_avg: shape \(\d+,\) in the state, None here"),
        ("impala", {"optimizer": "adam"}, {}, r"optimizer\.exp_avg: shape None in the state"),
        ("dqn", {}, {"hidden_sizes": (9, 7)}, r"network\.exp_avg: shape"),
        ("dqn", {"optimizer": "rmsprop"}, {}, r"network\.exp_avg: shape \(\d+,\) in the state, None here"),
        ("dqn", {}, {"noisy": True}, r"network\.exp_avg: shape"),
        ("r2d2", {}, {"recurrent_size": 8}, r"network\.exp_avg: shape"),
    ],
)  # fmt: skip
def test_other_states_are_refused(name: str, options: Options, others: Options, words: str) -> None:
    learner = make_learner(name, SPECS[name], **options)
    other = make_learner(name, SPECS[name], seed=2, **others)
    before = learner.state()
    with pytest.raises(ValueError, match=words):
        learner.load_state(other.state())
    if "hidden_sizes" in others:
        with pytest.raises(ValueError, match=r"shape \(.*\) in the state, \(.*\) here"):
            learner.load_initial_weights(other.weights())
    assert_same(learner.state(), before)


@pytest.mark.parametrize("name", ["sac", "td3", "dqn"])
def test_a_state_of_another_kind_of_device_is_loaded_but_for_its_random_numbers(name: str) -> None:
    """A GPU's generator has a state of 16 bytes."""
    learner = make_learner(name, SPECS[name], **({"noisy": True} if name == "dqn" else {}))
    own, state = learner.state()["noise"], learner.state()
    learner.update(batch_for(name, learner, SPECS[name], 12))
    learner.load_state(state | {"noise": torch.zeros(16, dtype=torch.uint8)})
    found = learner.state()
    assert len(own) > 16 and len(found["noise"]) == len(own)
    del state["noise"], found["noise"]
    assert_same(found, state)


def test_only_noisy_layers_save_a_random_state() -> None:
    """Its size depends on the device: a checkpoint without it continues on any."""
    learner = make_learner("dqn", DISCRETE)
    noise = make_learner("dqn", DISCRETE, noisy=True).state()["noise"]
    assert "noise" not in learner.state()
    with pytest.raises(ValueError, match=r"noise: shape \(\d+,\) in the state, None here"):
        learner.load_state(learner.state() | {"noise": noise})


@pytest.mark.parametrize(
    ("make", "torchs"),
    [
        (partial(adam, eps=1e-5), partial(Adam, eps=1e-5, fused=True)),
        (partial(rmsprop, eps=0.1, decay=0.9), partial(RMSprop, eps=0.1, alpha=0.9)),
    ],
)
def test_optimizers_step_as_torchs_own_do(make: Any, torchs: Any) -> None:
    mine, theirs = (torch.nn.Parameter(torch.arange(5.0)) for _ in range(2))
    optimizers = (mine, make(mine, learning_rate=0.1)), (theirs, torchs([theirs], lr=0.1))
    for step in range(3):
        for parameter, optimizer in optimizers:
            parameter.grad = torch.sin(torch.arange(5.0) + step)
            optimizer.step()
    assert torch.equal(mine, theirs)
    assert_same(*(optimizer_state("x", optimizer, parameter) for parameter, optimizer in optimizers))


@pytest.mark.parametrize(("name", "limit"), [("impala", 3.0), ("ppo", 0.01), ("dqn", 1e-2), ("r2d2", 1e-3)])
def test_gradients_are_scaled_down_to_the_norm(name: str, limit: float) -> None:
    found = []
    options = {"num_epochs": 1, "minibatch_size": 60} if name == "ppo" else {}
    for max_norm in (None, limit, 1e6):
        learner = make_learner(name, DISCRETE, max_grad_norm=max_norm, **options)
        metrics = learner.update(batch_for(name, learner, DISCRETE, 0))
        found.append(learner.parameters.vector.grad)
        if "grad_norm" in metrics:
            torch.testing.assert_close(metrics["grad_norm"], found[0].norm())
    assert torch.equal(found[0], found[2]), "never up"
    assert float(found[0].norm()) > 2 * limit
    assert float(found[1].norm()) == pytest.approx(limit, rel=1e-3)
    torch.testing.assert_close(found[1] / limit, found[0] / found[0].norm(), rtol=1e-3, atol=1e-6)


PRIORITIZED = {"double": True, "dueling": True, "prioritized": True, "learning_rate": 1e-3}
ON_GPU: dict[str, tuple[str, EnvSpec, Options]] = {
    "dqn": ("dqn", PIXELS, PRIORITIZED | NATURE),
    "dqn, group": ("dqn", PIXELS, PRIORITIZED | NATURE | {"norm": "group"}),
    "categorical": ("dqn", DISCRETE, PRIORITIZED | {"distribution": "categorical"}),
    "quantile": ("dqn", DISCRETE, PRIORITIZED | {"distribution": "quantile", "num_atoms": 7}),
    "r2d2, lstm": ("r2d2", DISCRETE, {}),
    "r2d2, gru": ("r2d2", DISCRETE, {"recurrent": "gru"}),
    "r2d2, images": ("r2d2", IMAGES, NATURE),
    "ppo": ("ppo", CONTINUOUS, NORMALIZED | {"learning_rate": 1e-3}),
    "impala": ("impala", CONTINUOUS, NORMALIZED | {"learning_rate": 1e-3}),
}


CAPTURED: dict[str, tuple[str, EnvSpec, Options]] = {
    "sac": ("sac", CONTINUOUS, {}),
    "sac, dropout, every second": ("sac", CONTINUOUS, {"dropout": 0.1, "policy_delay": 2}),
    "tqc": ("sac", CONTINUOUS, {"num_quantiles": 7, "prioritized": True}),
    "crossq": ("sac", CONTINUOUS, {"batch_norm": True, "target_rate": 0.01}),
    "td3": ("td3", CONTINUOUS, {}),
    "ppo": ("ppo", CONTINUOUS, {"value_clip": 0.2, "clip": 0.3, "final_clip": 0.1, "anneal_steps": 3000}),
    "discrete_sac": ("discrete_sac", DISCRETE, {}),
    "bc": ("bc", CONTINUOUS, {}),
    "iql": ("iql", CONTINUOUS, {}),
    "iql, discrete": ("iql", DISCRETE, {}),
    "noisy": ("dqn", DISCRETE, PRIORITIZED | {"noisy": True, "target_period": 3}),
    "rmsprop": ("dqn", DISCRETE, {"optimizer": "rmsprop"} | SOFT),
    **{name: case for name, case in ON_GPU.items() if case[0] == "dqn"},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "spec", "options"), CAPTURED.values(), ids=CAPTURED)
def test_graphs_learn_what_single_kernels_do(name: str, spec: EnvSpec, options: Options) -> None:
    gpu = torch.device("cuda")
    eager, captured = (make_learner(name, spec, device=gpu, **options) for _ in range(2))
    eager._captured._captures = False
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for seed in range(100):
            if seed == 50:
                for learner in (eager, captured):
                    slower = learner.config.model_copy(update={"learning_rate": 1e-3})
                    learner.apply_options(slower)
            batch = on_device(batch_for(name, eager, spec, seed), gpu)
            expected, found = (dict(learner.update(batch)) for learner in (eager, captured))
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[key], value, rtol=1e-5, atol=1e-5, msg=f"{key}, update {seed}"
                )
    assert captured._captured._graphs and captured._captured._captures
    for key, value in eager.state().items():
        torch.testing.assert_close(captured.state()[key], value, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "spec", "options"), ON_GPU.values(), ids=ON_GPU)
class TestOnAGpu:
    GPU = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def _all_digits(self) -> Iterator[None]:
        """By default convolutions and recurrent layers round their factors to ten bits."""
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield

    def test_an_update_is_that_of_the_cpu(self, name: str, spec: EnvSpec, options: Options) -> None:
        here, there = (make_learner(name, spec, device=device, **options) for device in (CPU, self.GPU))
        assert_same(there.weights(), here.weights())
        for seed in range(3):  # the first steps of Adam are signs: so each starts where the CPU is
            there.load_state(here.state())
            found = dict(there.update(on_device(batch_for(name, there, spec, seed), self.GPU)))
            expected = here.update(on_device(batch_for(name, here, spec, seed), CPU))
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                there_value = torch.from_numpy(to_host(found[key].reshape(-1))())
                rtol, atol = (1e-2, 1e-3) if name in ("ppo", "impala", "pqn") else (1e-3, 1e-4)
                torch.testing.assert_close(there_value, value.reshape(-1), rtol=rtol, atol=atol, msg=key)
            if name in ("dqn", "r2d2"):
                gradient, other = here.parameters.vector.grad, there.parameters.vector.grad.cpu()
                assert float((other - gradient).norm()) < 1e-3 * float(gradient.norm())
            else:
                for key, value in here.state().items():
                    torch.testing.assert_close(there.state()[key], value, rtol=1e-2, atol=1e-3)
        assert there.num_updates == here.num_updates >= 3
        here.load_state(there.state())  # a checkpoint changes the device
        assert_same(here.state(), there.state())

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_an_update_waits_for_nothing(self, name: str, spec: EnvSpec, options: Options) -> None:
        if name in ("ppo", "impala"):
            pytest.skip("on-policy updates select their transitions on the device, and wait for their number")
        learner = make_learner(name, spec, device=self.GPU, **options)
        learner.update(
            on_device(batch_for(name, learner, spec, 0), self.GPU)
        )  # the libraries start, and may wait
        for seed in range(1, 100):
            given = batch_for(name, learner, spec, seed)
            torch.cuda.set_sync_debug_mode("default" if seed == 3 else "error")  # where a capture begins
            try:
                metrics = learner.update(on_device(given, self.GPU))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert torch.isfinite(metrics["loss"])
