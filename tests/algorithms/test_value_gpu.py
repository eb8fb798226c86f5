"""DQN and R2D2 on a GPU: updates as on the CPU, which wait for nothing, and checkpoints that change the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.reference_q import CPU, PIXELS, VECTORS, as_arrays, make_batch
from support.reference_r2d2 import IMAGES, SHAPE, SMALL, make_sequences

from ddrl.algorithms.base import Resolved, config_class
from ddrl.networks.device import to_device, to_host
from ddrl.types import EnvSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda")
NATURE = {"network": "nature", "hidden_sizes": (32,)}
DQN_OPTIONS = {
    "double": True,
    "dueling": True,
    "prioritized": True,
    "target_period": 2,
    "learning_rate": 1e-3,
}
CASES: dict[str, tuple[str, EnvSpec, dict[str, Any]]] = {
    "dqn": ("dqn", PIXELS, DQN_OPTIONS | NATURE),
    "dqn, group": ("dqn", PIXELS, DQN_OPTIONS | NATURE | {"norm": "group"}),
    "categorical": ("dqn", VECTORS, DQN_OPTIONS | {"distribution": "categorical"}),
    "quantile": ("dqn", VECTORS, DQN_OPTIONS | {"distribution": "quantile", "num_atoms": 7}),
    "r2d2, lstm": ("r2d2", VECTORS, SMALL),
    "r2d2, gru": ("r2d2", VECTORS, SMALL | {"recurrent": "gru"}),
    "r2d2, images": ("r2d2", IMAGES, SMALL | NATURE),
}
each_case = pytest.mark.parametrize(("name", "spec", "options"), CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _all_digits() -> Iterator[None]:
    """By default convolutions and recurrent layers round their factors to ten bits."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def make(name: str, spec: EnvSpec, options: dict[str, Any], device: torch.device) -> Any:
    return Resolved(name, config_class(name)(**options), spec).learner(device=device, seed=1)


def batch_for(learner: Any, spec: EnvSpec, seed: int, device: torch.device) -> Any:
    if not learner.network.state_size:
        made = make_batch(seed, spec=spec, weight=np.linspace(0.2, 1.0, 6))
    else:
        made = make_sequences(spec, SHAPE, memory_size=learner.network.state_size, seed=seed)
    return to_device(as_arrays(made), device)


@each_case
def test_an_update_is_that_of_the_cpu(name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
    here, there = (make(name, spec, options, device) for device in (CPU, GPU))
    for key, value in here.weights().items():
        assert torch.equal(there.weights()[key], value), "the same start"
    for seed in range(3):  # the first steps of Adam are signs: so each starts where the CPU is
        there.load_state(here.state())
        found = there.update(batch_for(there, spec, seed, GPU))
        expected = here.update(batch_for(here, spec, seed, CPU))
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(
            to_host(found.pop("priority"))(), expected.pop("priority"), rtol=1e-3, atol=1e-4
        )
        for key, value in expected.items():
            torch.testing.assert_close(found[key].cpu(), value, rtol=1e-3, atol=1e-4, msg=key)
        gradient, other = here.parameters.vector.grad, there.parameters.vector.grad.cpu()
        assert float((other - gradient).norm()) < 1e-3 * float(gradient.norm())
    assert there.num_updates == here.num_updates == 3


@each_case
def test_an_update_waits_for_nothing(name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
    learner = make(name, spec, options, GPU)
    learner.update(batch_for(learner, spec, 0, GPU))  # the libraries start, and may wait
    batch = batch_for(learner, spec, 1, GPU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics = learner.update(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(metrics["loss"])


@each_case
def test_a_checkpoint_changes_the_device(name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
    there = make(name, spec, options, GPU)
    there.update(batch_for(there, spec, 0, GPU))
    here = make(name, spec, options, CPU)
    here.load_state(there.state())
    for key, value in here.state().items():
        assert torch.equal(value, there.state()[key]), key
