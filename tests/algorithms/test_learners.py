"""What every learner promises: continuation bit for bit, copies, refusal of other states, seeds, metrics, devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from support.algorithms import (
    CONTINUOUS,
    CPU,
    DISCRETE,
    PAIRS,
    assert_same,
    batch_for,
    digest,
    make_learner,
)
from support.reference_q import PIXELS
from support.reference_r2d2 import IMAGES

from ddrl.algorithms.optim import adam, cpu_copies, optimizer_state, restore, rmsprop
from ddrl.networks.device import to_device, to_host
from ddrl.types import EnvSpec

NORMALIZED = {"normalize_observations": True, "normalize_returns": True}
ANNEALED = {"final_learning_rate": 0.0, "anneal_steps": 400}
CATEGORICAL = {"distribution": "categorical", "num_atoms": 5, "v_min": -3.0, "v_max": 4.0}
SOFT = {"target_period": None, "target_rate": 0.1}
NATURE = {"network": "nature", "hidden_sizes": (16,)}
CASES: dict[str, tuple[str, EnvSpec, dict[str, Any]]] = {
    "sac": ("sac", CONTINUOUS, {}),
    "sac fixed": ("sac", CONTINUOUS, {"temperature": 0.2}),
    "sac delayed": ("sac", CONTINUOUS, {"policy_delay": 2, "layer_norm": True}),
    "ppo": ("ppo", DISCRETE, {}),
    "ppo normalized": ("ppo", CONTINUOUS, NORMALIZED | ANNEALED | {"estimator": "vtrace", "target_kl": 0.01}),
    "impala": ("impala", PAIRS, ANNEALED),
    "impala normalized": ("impala", CONTINUOUS, NORMALIZED),
    "impala adam": ("impala", DISCRETE, {"optimizer": "adam", "shared": True}),
    "dqn": ("dqn", DISCRETE, {}),
    "dqn options": ("dqn", DISCRETE, {"double": True, "dueling": True, "prioritized": True, "optimizer": "rmsprop"}),
    "dqn noisy": ("dqn", DISCRETE, {"noisy": True, "double": True, "epsilon_ladder": True} | CATEGORICAL),
    "dqn soft": ("dqn", DISCRETE, {"distribution": "quantile", "num_atoms": 5} | SOFT),
    "dqn batch norm": ("dqn", PIXELS, {"network": "nature", "norm": "batch", "double": True}),
    "r2d2": ("r2d2", DISCRETE, {"target_period": 3}),
    "r2d2 soft": ("r2d2", DISCRETE, {"target_rate": 0.1, "recurrent": "gru"}),
    "r2d2 rmsprop": ("r2d2", DISCRETE, {"optimizer": "rmsprop", "adam_eps": 1e-3}),
}  # fmt: skip
each_case = pytest.mark.parametrize(("name", "spec", "options"), CASES.values(), ids=CASES)
METRICS = {
    "sac": {"critic_loss", "q_mean", "temperature", "policy_loss", "entropy"},
    "ppo": {"kl", "clip_fraction", "entropy", "value_loss", "explained_variance", "learning_rate", "epochs"},
    "impala": {"policy_loss", "value_loss", "entropy", "rho", "learning_rate"},
    "dqn": {"loss", "q_mean", "td_error", "epsilon", "grad_norm"},
    "r2d2": {"loss", "q_mean", "td_error", "grad_norm", "priority"},
}


@each_case
def test_continuation_is_bit_equal(name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
    original, other = (make_learner(name, spec, seed=seed, **options) for seed in (1, 2))
    batches = [batch_for(name, original, spec, seed) for seed in range(6)]
    for batch in batches[:3]:
        original.update(batch)
    state = original.state()
    other.load_state(load(save(state)))
    assert other.num_updates == original.num_updates >= 3
    assert_same(other.weights(), original.weights())
    for batch in batches[3:]:
        assert_same(original.update(batch), other.update(batch))
    assert_same(original.state(), other.state())
    assert_same(load(save(original.weights())), other.weights())
    assert digest(original.state()) != digest(state)


@each_case
def test_states_and_weights_are_copies(name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
    learner, other = (make_learner(name, spec, seed=seed, **options) for seed in (1, 2))
    learner.update(batch_for(name, learner, spec, 0))
    taken = [learner.state(), learner.weights()]
    kept = [{key: tensor.clone() for key, tensor in part.items()} for part in taken]
    other.load_state(taken[0])
    for each in (learner, other):
        each.update(batch_for(name, learner, spec, 1))
        for part, before in zip(taken, kept, strict=True):
            assert_same(part, before)
    assert digest(learner.state()) != digest(kept[0])


@each_case
def test_same_seed_same_run_other_seed_other_run(name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
    found = []
    for seed in (1, 1, 2):
        learner = make_learner(name, spec, seed=seed, **options)
        start = digest(learner.weights())
        learner.update(batch_for(name, learner, spec, 0))
        found.append((start, digest(learner.state())))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0] and found[0][1] != found[2][1]


@pytest.mark.parametrize("case", METRICS)
def test_metrics_are_detached_scalars_and_the_priority_a_row(case: str) -> None:
    name, spec, options = CASES[case]
    learner = make_learner(name, spec, **options)
    metrics = learner.update(batch_for(name, learner, spec, 0))
    assert set(metrics) == METRICS[name]
    priority = metrics.pop("priority", torch.zeros(6))
    assert priority.shape == (6,) and bool((priority >= 0).all()) and not priority.requires_grad
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())


def test_metrics_follow_the_options_of_dqn() -> None:
    for options, expected in (
        (CATEGORICAL | {"epsilon_ladder": True, "max_grad_norm": None}, {"loss", "q_mean"}),
        ({"prioritized": True}, METRICS["dqn"] | {"priority"}),
    ):
        learner = make_learner("dqn", DISCRETE, **options)
        assert set(learner.update(batch_for("dqn", learner, DISCRETE, 0))) == expected


@pytest.mark.parametrize(
    ("name", "options", "others", "words"),
    [
        ("sac", {}, {"num_critics": 3}, r"critics\.exp_avg: shape"),
        ("ppo", {}, {"hidden_sizes": (6, 4)}, r"network: shape \(\d+,\) in the state, \(\d+,\) here; use the"),
        ("ppo", {}, {"shared": True}, "network: shape"),
        ("ppo", {}, {"normalize_observations": True}, r"observation_mean: shape \(3,\) in the state, \(0,\) here"),
        ("impala", {}, {"optimizer": "adam"}, r"optimizer\.exp_avg: shape \(\d+,\) in the state, None here"),
        ("impala", {"optimizer": "adam"}, {}, r"optimizer\.exp_avg: shape None in the state"),
        ("dqn", {}, {"hidden_sizes": (9, 7)}, r"network\.exp_avg: shape"),
        ("dqn", {"optimizer": "rmsprop"}, {}, r"network\.exp_avg: shape \(\d+,\) in the state, None here"),
        ("dqn", {}, {"noisy": True}, r"network\.exp_avg: shape"),
        ("r2d2", {}, {"recurrent_size": 8}, r"network\.exp_avg: shape"),
    ],
)  # fmt: skip
def test_states_of_another_configuration_are_refused(
    name: str, options: dict[str, Any], others: dict[str, Any], words: str
) -> None:
    spec = CONTINUOUS if name == "sac" else DISCRETE
    learner, other = make_learner(name, spec, **options), make_learner(name, spec, seed=2, **others)
    before = learner.state()
    with pytest.raises(ValueError, match=words):
        learner.load_state(other.state())
    assert_same(learner.state(), before)


def test_only_noisy_layers_save_a_random_state() -> None:
    """Its size depends on the device: a checkpoint without it continues on any."""
    learner = make_learner("dqn", DISCRETE)
    noise = make_learner("dqn", DISCRETE, noisy=True).state()["noise"]
    assert "noise" not in learner.state()
    with pytest.raises(ValueError, match=r"noise: shape \(\d+,\) in the state, None here"):
        learner.load_state(learner.state() | {"noise": noise})


def test_restore_names_what_is_missing_and_unknown() -> None:
    tensors = {"a": torch.ones(2)}
    restore(tensors, {"a": torch.zeros(2), "b": torch.zeros(())}, b=torch.Size(()))
    assert tensors["a"].tolist() == [0.0, 0.0]
    for state, words in (
        ({"a": torch.zeros(2)}, r"b: shape None in the state, \(\) here"),
        ({"a": torch.zeros(3), "b": torch.zeros(())}, r"a: shape \(3,\) in the state, \(2,\) here"),
        ({"a": torch.zeros(2), "b": torch.zeros(()), "c": torch.ones(1)}, r"c: shape \(1,\) in the state, None here"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            restore(tensors, state, b=torch.Size(()))


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_optimizers_step_as_torchs_own_do(name: str) -> None:
    """State allocated from the start changes nothing, and is all that an optimizer keeps."""
    mine, theirs = (torch.nn.Parameter(torch.arange(5.0)) for _ in range(2))
    if name == "adam":
        optimizer: torch.optim.Optimizer = adam(mine, learning_rate=0.1, eps=1e-5)
        reference: torch.optim.Optimizer = torch.optim.Adam([theirs], lr=0.1, eps=1e-5, fused=True)
    else:
        optimizer = rmsprop(mine, learning_rate=0.1, eps=0.1, decay=0.9)
        reference = torch.optim.RMSprop([theirs], lr=0.1, eps=0.1, alpha=0.9)
    assert not any(tensor.any() for tensor in optimizer_state("x", optimizer, mine).values())
    for step in range(3):
        for parameter, one in ((mine, optimizer), (theirs, reference)):
            parameter.grad = torch.sin(torch.arange(5.0) + step)
            one.step()
    assert torch.equal(mine, theirs)
    assert_same(
        cpu_copies(optimizer_state("x", optimizer, mine)), cpu_copies(optimizer_state("x", reference, theirs))
    )


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
ON_GPU: dict[str, tuple[str, EnvSpec, dict[str, Any]]] = {
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

    def batch(self, name: str, learner: Any, spec: EnvSpec, seed: int, device: torch.device) -> Any:
        made = batch_for(name, learner, spec, seed)
        arrays = {key: value.numpy() for key, value in vars(made).items() if value is not None}
        return to_device(type(made)(**arrays), device)

    def test_an_update_is_that_of_the_cpu(self, name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
        here, there = (make_learner(name, spec, device=device, **options) for device in (CPU, self.GPU))
        assert_same(there.weights(), here.weights())
        for seed in range(3):  # the first steps of Adam are signs: so each starts where the CPU is
            there.load_state(here.state())
            found = dict(there.update(self.batch(name, there, spec, seed, self.GPU)))
            expected = here.update(self.batch(name, here, spec, seed, CPU))
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                there_value = torch.from_numpy(to_host(found[key].reshape(-1))())
                rtol, atol = (1e-2, 1e-3) if name in ("ppo", "impala") else (1e-3, 1e-4)
                torch.testing.assert_close(there_value, value.reshape(-1), rtol=rtol, atol=atol, msg=key)
            if name in ("dqn", "r2d2"):
                gradient, other = here.parameters.vector.grad, there.parameters.vector.grad.cpu()
                assert float((other - gradient).norm()) < 1e-3 * float(gradient.norm())
            else:
                for key, value in here.state().items():
                    torch.testing.assert_close(there.state()[key], value, rtol=1e-2, atol=1e-3)
        assert there.num_updates == here.num_updates >= 3

    def test_an_update_waits_for_nothing(self, name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
        if name in ("ppo", "impala"):
            pytest.skip("on-policy updates select their transitions on the device, and wait for their number")
        learner = make_learner(name, spec, device=self.GPU, **options)
        learner.update(self.batch(name, learner, spec, 0, self.GPU))  # the libraries start, and may wait
        batch = self.batch(name, learner, spec, 1, self.GPU)
        torch.cuda.set_sync_debug_mode("error")
        try:
            metrics = learner.update(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.isfinite(metrics["loss"])

    def test_a_checkpoint_changes_the_device(self, name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
        there, here = (make_learner(name, spec, device=device, **options) for device in (self.GPU, CPU))
        there.update(self.batch(name, there, spec, 0, self.GPU))
        here.load_state(there.state())
        assert_same(here.state(), there.state())
