"""Transfers to and from the device; updates read nothing back from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CPU, DISCRETE, make_learner
from support.reference_r2d2 import SHAPE, make_sequences
from support.subjects import SOFT, batch_for, on_device

from ddrl.config import ConfigError, LearnerConfig
from ddrl.networks.device import choose_device, set_up, to_device, to_host
from ddrl.types import Batch

META = torch.device("meta")  # has shapes only: reading a value fails


@pytest.fixture(autouse=True)
def _parameters_stay_the_same_objects() -> Iterator[None]:
    """Moved to a GPU they do, to this device only by this setting."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_what_is_looked_up_on_the_host_stays_there() -> None:
    batch = make_sequences(DISCRETE, SHAPE, memory_size=2)
    moved = on_device(batch, META)
    assert moved.number is None
    assert moved.burn_in.device == CPU and moved.burn_in.tolist() == batch.burn_in.tolist()
    others = [value for name, value in vars(moved).items() if name not in ("number", "burn_in")]
    assert others and all(value.device == META for value in others)
    here = on_device(batch, CPU)
    assert all(np.array_equal(getattr(here, name), getattr(batch, name)) for name in ("action", "burn_in"))
    ready = torch.ones(2, device=META)  # as of a replay on the device
    assert to_device(Batch(ready, np.zeros(2), *(np.zeros(2, np.float32),) * 3), META).observation is ready
    assert to_host(torch.arange(3.0))().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dqn", {"double": True, "dueling": True, "prioritized": True, "target_period": 1}),
        ("dqn", {"distribution": "categorical", "max_grad_norm": 1.0, "prioritized": True}),
        ("dqn", {"distribution": "quantile", "prioritized": True} | SOFT),
        ("r2d2", {"recurrent": "lstm", "target_period": 1}),
        ("r2d2", {"recurrent": "gru", "target_period": 1}),
    ],
    ids=str,
)
def test_an_update_waits_for_nothing(name: str, options: dict[str, Any]) -> None:
    learner = make_learner(name, DISCRETE, device=META, **options)
    metrics = learner.update(on_device(batch_for(name, learner, DISCRETE, 0), META))
    assert metrics["priority"].shape == (6,) and metrics["loss"].device == META


def test_bfloat16_rounds_the_factors_of_matrix_products() -> None:
    one = torch.rand(256, 256, generator=torch.Generator().manual_seed(1))
    exact = one @ one
    try:
        set_up(LearnerConfig(device="cpu", precision="bfloat16"))
        error = (one @ one - exact).abs() / exact
    except ConfigError:
        assert torch.allclose(one @ one, exact, rtol=1e-5), "refused, though it rounds"
        pytest.skip("this CPU does not round")
    finally:
        set_up(LearnerConfig(device="cpu"))
    assert 1e-5 < float(error.max()) < 1e-2
    assert torch.equal(one @ one, exact)


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with pytest.raises(ConfigError, match=r"learner\.precision: bfloat16 is not on this machine \(cpu\)"):
        set_up(LearnerConfig(device="cpu", precision="bfloat16"))


def test_learners_of_one_machine_take_its_gpus_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = []
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        found.append(str(choose_device("auto")))
    assert found == ["cuda:0", "cuda:1", "cuda:0"]
