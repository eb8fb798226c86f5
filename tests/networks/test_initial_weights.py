"""Networks start by their generator alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.networks import same, seeded, trunk
from torch import nn

from ddrl.networks.actor_critic import ActorCritic
from ddrl.networks.heads import NoisyLinear
from ddrl.networks.mlp import MLP
from ddrl.networks.q_network import QNetwork
from ddrl.networks.recurrent import RecurrentCore

Make = Callable[[int | None], nn.Module]


def generator(seed: int | None) -> torch.Generator | None:
    return None if seed is None else seeded(seed)


def actor_critic(**options: Any) -> Make:
    given = {"num_outputs": 4, "hidden_sizes": (6, 5), "activation": "tanh", **options}
    return lambda seed: ActorCritic("mlp", (3,), generator=generator(seed), **given)


def q_network(network: str, shape: tuple[int, ...], **options: Any) -> Make:
    given = {"num_actions": 3, "hidden_sizes": (8, 6), **options}
    return lambda seed: QNetwork(network, shape, generator=generator(seed), **given)


def a_trunk(network: str, norm: str = "none") -> Make:
    shape = (4,) if network == "mlp" else (3, 40, 40)
    return lambda seed: trunk(network, shape, seed=seed, norm=norm)


LSTM, GRU = ({"recurrent": kind, "recurrent_size": 7} for kind in ("lstm", "gru"))
NETWORKS: dict[str, Make] = {
    "MLP": lambda seed: MLP((3, 5, 2), num_members=2, generator=generator(seed)),
    "LSTM": lambda seed: RecurrentCore("lstm", 3, 2, 5, generator=generator(seed)),
    "GRU": lambda seed: RecurrentCore("gru", 3, 2, 5, generator=generator(seed)),
    "noisy": lambda seed: NoisyLinear(5, 3, generator=generator(seed)),
    "actor-critic": actor_critic(shared=False),
    "shared actor-critic": actor_critic(shared=True),
    "q": q_network("mlp", (4,)),
    "q, noisy": q_network("nature", (4, 40, 40), norm="batch", dueling=True, noisy=True),
    "q, lstm": q_network("impala", (16, 16), norm="group", **LSTM),
    "q, gru": q_network("data_efficient", (30, 30, 3), distribution="quantile", num_atoms=5, **GRU),
    **{f"trunk {name}": a_trunk(name) for name in ("mlp", "conv", "nature", "impala", "data_efficient")},
    **{f"trunk {name}, {norm}": a_trunk(name, norm) for name in ("nature", "impala") for norm in ("group", "batch")},
}  # fmt: skip


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_a_seed_decides_and_the_global_generator_is_left_alone(make: Make) -> None:
    before = torch.get_rng_state()
    first, second, other = (make(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first, second) and not same(first, other)
    assert not same(make(None), make(None)), "without a generator the global one goes on"
