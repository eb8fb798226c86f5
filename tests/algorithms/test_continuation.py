"""Stopped and continued, the on-policy learners go on bit for bit; what does not fit is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from support.reference_ppo import CONTINUOUS, CPU, DISCRETE, PAIRS, make_feed, tensors
from torch import Tensor

from ddrl.algorithms.impala import config as impala
from ddrl.algorithms.impala.learner import make_learner as make_impala
from ddrl.algorithms.optim import adam, cpu_copies, optimizer_state, restore, rmsprop
from ddrl.algorithms.ppo import config as ppo
from ddrl.algorithms.ppo.learner import make_learner as make_ppo
from ddrl.types import EnvSpec

NORMALIZED = {"normalize_observations": True, "normalize_returns": True}
ANNEALED = {"final_learning_rate": 0.0, "anneal_steps": 400}
CASES: dict[str, tuple[EnvSpec, str, dict[str, Any]]] = {
    "ppo": (DISCRETE, "ppo", {}),
    "ppo normalized": (CONTINUOUS, "ppo", NORMALIZED | ANNEALED | {"estimator": "vtrace", "target_kl": 0.01}),
    "impala": (PAIRS, "impala", ANNEALED),
    "impala normalized": (CONTINUOUS, "impala", NORMALIZED),
    "impala adam": (DISCRETE, "impala", {"optimizer": "adam", "shared": True}),
}


def make(spec: EnvSpec, name: str, seed: int = 1, **options: Any) -> Any:
    options = {"hidden_sizes": (6, 5), "batch_size": 60} | options
    if name == "impala":
        return make_impala(impala.Config(**options), spec, device=CPU, seed=seed)
    return make_ppo(ppo.Config(minibatch_size=20, num_epochs=3, **options), spec, device=CPU, seed=seed)


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.mark.parametrize(("spec", "name", "options"), CASES.values(), ids=CASES)
def test_continuation_is_bit_equal(spec: EnvSpec, name: str, options: dict[str, Any]) -> None:
    original, copy = make(spec, name, 1, **options), make(spec, name, 2, **options)
    batches = [tensors(make_feed(spec, seed=seed, num_fragments=4)) for seed in range(4)]
    for batch in batches[:2]:
        original.update(batch)
    copy.load_state(load(save(original.state())))
    assert copy.num_updates == original.num_updates > 0
    assert_same(copy.weights(), original.weights())
    for batch in batches[2:]:
        assert_same(original.update(batch), copy.update(batch))
    assert_same(original.state(), copy.state())
    assert_same(original.weights(), copy.weights())


@pytest.mark.parametrize(("spec", "name", "options"), CASES.values(), ids=CASES)
def test_states_and_weights_are_copies(spec: EnvSpec, name: str, options: dict[str, Any]) -> None:
    learner, batch = make(spec, name, **options), tensors(make_feed(spec))
    learner.update(batch)
    taken = [learner.state(), learner.weights()]
    kept = [{key: tensor.clone() for key, tensor in part.items()} for part in taken]
    other = make(spec, name, 2, **options)
    other.load_state(taken[0])
    for again in (learner, other):
        again.update(batch)
        for part, before in zip(taken, kept, strict=True):
            assert_same(part, before)
    assert not torch.equal(learner.state()["network"], kept[0]["network"])


@pytest.mark.parametrize(
    ("name", "options", "others", "words"),
    [
        (
            "ppo",
            {},
            {"hidden_sizes": (6, 4)},
            r"network: shape \(\d+,\) in the state, \(\d+,\) here; use the",
        ),
        ("ppo", {}, {"shared": True}, "network: shape"),
        (
            "ppo",
            {},
            {"normalize_observations": True},
            r"observation_mean: shape \(3,\) in the state, \(0,\) here",
        ),
        ("impala", {}, {"optimizer": "adam"}, r"optimizer\.exp_avg: shape \(\d+,\) in the state, None here"),
        ("impala", {"optimizer": "adam"}, {}, r"optimizer\.exp_avg: shape None in the state"),
    ],
)
def test_states_of_another_configuration_are_refused(
    name: str, options: dict[str, Any], others: dict[str, Any], words: str
) -> None:
    learner = make(DISCRETE, name, **options)
    before = learner.state()
    other = make(DISCRETE, name, **others)
    other.update(tensors(make_feed(DISCRETE)))
    with pytest.raises(ValueError, match=words):
        learner.load_state(other.state())
    assert_same(learner.state(), before)


def test_restore_names_what_is_missing_and_unknown() -> None:
    expected = {"a": torch.ones(2)}
    restore(expected, {"a": torch.zeros(2), "b": torch.zeros(())}, b=torch.Size(()))
    assert expected["a"].tolist() == [0.0, 0.0]
    for state, words in (
        ({"a": torch.zeros(2)}, r"b: shape None in the state, \(\) here"),
        ({"a": torch.zeros(3), "b": torch.zeros(())}, r"a: shape \(3,\) in the state, \(2,\) here"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(()), "c": torch.ones(1)},
            r"c: shape \(1,\) in the state, None here",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            restore(expected, state, b=torch.Size(()))


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_optimizers_step_as_torchs_own_do(name: str) -> None:
    """Slots that are there from the start change nothing, and are all that an optimizer remembers."""
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
    assert {f"x.{slot}" for slot in optimizer.state[mine]} == optimizer_state("x", optimizer, mine).keys()
