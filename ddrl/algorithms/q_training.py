"""What the learners of DQN and R2D2 share: the optimizer, the target's pace, what is published and what is kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ddrl.algorithms.continuation import adam, copies, restore, rmsprop, slots
from ddrl.algorithms.live import retune
from ddrl.algorithms.q_learning import Options
from ddrl.networks.mlp import FlatParameters


def make_optimizer(config: Options, vector: Tensor) -> torch.optim.Optimizer:
    """The configured optimizer for the network's parameters [P]."""
    if config.optimizer == "adam":
        return adam(vector, learning_rate=config.learning_rate, eps=config.adam_eps)
    return rmsprop(vector, learning_rate=config.learning_rate, eps=3e-3, decay=0.95)


def retune_optimizer(config: Options, optimizer: torch.optim.Optimizer) -> None:
    """Bring the live options of the optimizer into force."""
    retune(optimizer, lr=config.learning_rate)
    if config.optimizer == "adam":
        retune(optimizer, eps=config.adam_eps)


def target_share(config: Options, num_updates: int) -> float:
    """The share of its way to the network that the target goes after so many updates: 0, all of it or target_rate."""
    if config.target_rate is not None:
        return config.target_rate
    assert config.target_period is not None, "Options sets one of the two"
    return 1.0 if num_updates % config.target_period == 0 else 0.0


@torch.no_grad()
def follow(target: Tensor, value: Tensor, share: float) -> None:
    """Move `target` in place by a share, above 0, of its way to `value`; counts are copied."""
    if share < 1.0 and target.is_floating_point():
        target.lerp_(value, share)
    else:
        target.copy_(value)


def buffers(network: nn.Module) -> dict[str, Tensor]:
    """What a network carries besides its parameters, by name: statistics, constants of one's own. Noise is not kept."""
    kept = network.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in network.named_buffers() if name in kept}


def weights(
    config: Options, network: FlatParameters, kept: Mapping[str, Tensor], num_updates: int
) -> dict[str, Tensor]:
    """What a `Policy` needs, as CPU copies: the network's parameters and buffers by name, and epsilon."""
    return network.copies() | copies(kept) | {"epsilon": torch.tensor(config.epsilon_at(num_updates))}


def warm_start(config: Options, network: nn.Module, published: Mapping[str, Tensor]) -> str:
    """Give a network what `weights` returned; what starts fresh, as of `base.Algorithm.warm_start`.

    Raises:
        ValueError: they are those of another configuration; nothing has changed then.
    """
    restore(dict(network.named_parameters()) | buffers(network), published, epsilon=torch.Size(()))
    if config.epsilon_ladder:
        return "the optimizer starts fresh"
    return f"the optimizer starts fresh, and epsilon at {config.epsilon:g} (algorithm.epsilon)"


def live_tensors(
    network: FlatParameters,
    target: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    kept: Mapping[str, Tensor],
    target_kept: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """What updates change, by name, not copied.

    Args:
        network: the online network's parameters.
        target: [P] those of the target.
        optimizer: of the former.
        kept: the online network's `buffers`.
        target_kept: those of the target.
    """
    named = {"network.value": network.vector, "target_network.value": target}
    named |= slots("network", optimizer, network.vector)
    named |= {f"network.{name}": buffer for name, buffer in kept.items()}
    return named | {f"target_network.{name}": buffer for name, buffer in target_kept.items()}
