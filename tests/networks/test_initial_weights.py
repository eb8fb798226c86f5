"""Networks start by their generator alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.networks import GRU, LSTM, actor_critic, q_network, same, seeded
from torch import nn

from ddrl.networks.mlp import MLP

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "MLP": lambda seed: MLP((3, 5, 2), num_members=2, generator=seeded(seed)),
    "actor-critic": actor_critic,
    "shared actor-critic": partial(actor_critic, shared=True),
    "mlp": q_network,
    "mlp, noisy": partial(q_network, noisy=True),
    "conv": partial(q_network, "conv"),
    "nature, batch": partial(q_network, "nature", norm="batch", dueling=True, noisy=True),
    "impala": partial(q_network, "impala"),
    "impala, group": partial(q_network, "impala", norm="group", **LSTM),
    "data_efficient": partial(q_network, "data_efficient", distribution="quantile", num_atoms=5, **GRU),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_a_seed_decides_and_the_global_generator_is_left_alone(make: Callable[..., nn.Module]) -> None:
    before = torch.get_rng_state()
    first, second, other = (make(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first, second) and not same(first, other)
    assert not same(make(seed=None), make(seed=None)), "without a generator the global one goes on"
