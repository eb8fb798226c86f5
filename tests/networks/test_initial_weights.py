"""Networks start by their generator alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.networks import same, seeded
from torch import nn

from ddrl.networks.actor_critic import ActorCritic
from ddrl.networks.mlp import MLP
from ddrl.networks.q_network import QNetwork

Make = Callable[[int | None], nn.Module]


def generator(seed: int | None) -> torch.Generator | None:
    return None if seed is None else seeded(seed)


def actor_critic(shared: bool) -> Make:
    given: dict[str, Any] = {"num_outputs": 4, "hidden_sizes": (6, 5), "activation": "tanh", "shared": shared}
    return lambda seed: ActorCritic("mlp", (3,), generator=generator(seed), **given)


def q_network(network: str, shape: tuple[int, ...] = (4, 40, 40), **options: Any) -> Make:
    given = {"num_actions": 3, "hidden_sizes": (8, 6), **options}
    return lambda seed: QNetwork(network, shape, generator=generator(seed), **given)


LSTM, GRU = ({"recurrent": kind, "recurrent_size": 7} for kind in ("lstm", "gru"))
NETWORKS: dict[str, Make] = {
    "MLP": lambda seed: MLP((3, 5, 2), num_members=2, generator=generator(seed)),
    "actor-critic": actor_critic(shared=False),
    "shared actor-critic": actor_critic(shared=True),
    "mlp": q_network("mlp", (4,)),
    "mlp, noisy": q_network("mlp", (4,), noisy=True),
    "conv": q_network("conv"),
    "nature, batch": q_network("nature", norm="batch", dueling=True, noisy=True),
    "impala": q_network("impala"),
    "impala, group": q_network("impala", norm="group", **LSTM),
    "data_efficient": q_network("data_efficient", distribution="quantile", num_atoms=5, **GRU),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_a_seed_decides_and_the_global_generator_is_left_alone(make: Make) -> None:
    before = torch.get_rng_state()
    first, second, other = (make(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first, second) and not same(first, other)
    assert not same(make(None), make(None)), "without a generator the global one goes on"
