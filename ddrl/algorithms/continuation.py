"""What learners share to be stopped and continued bit for bit: optimizers with slots from the start, and states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def adam(parameter: Tensor, *, learning_rate: float, eps: float = 1e-8) -> torch.optim.Adam:
    """Adam for one tensor, its slots allocated at once (torch waits for the first step, too late to load)."""
    optimizer = torch.optim.Adam([parameter], lr=learning_rate, eps=eps, fused=True)
    optimizer.state[parameter] = {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter.detach()),
        "exp_avg_sq": torch.zeros_like(parameter.detach()),
    }
    return optimizer


def rmsprop(parameter: Tensor, *, learning_rate: float, eps: float, decay: float) -> torch.optim.RMSprop:
    """RMSProp for one tensor, its slots allocated at once."""
    optimizer = torch.optim.RMSprop([parameter], lr=learning_rate, eps=eps, alpha=decay)
    optimizer.state[parameter] = {
        "step": torch.zeros((), device=parameter.device),
        "square_avg": torch.zeros_like(parameter.detach()),
    }
    return optimizer


def slots(name: str, optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The optimizer's own tensors for a parameter, as "name.slot"."""
    return {f"{name}.{slot}": tensor for slot, tensor in optimizer.state[parameter].items()}


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies that share no memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def restore(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], **others: torch.Size) -> None:
    """Copy a state into the live tensors of its names.

    Args:
        tensors: what to fill.
        state: what `copies` of them gave, and more.
        others: shapes of that more, which the caller restores.

    Raises:
        ValueError: as `check_state`; nothing has changed then.
    """
    check_state({name: tensor.shape for name, tensor in tensors.items()} | others, state)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(state[name])


def check_state(expected: Mapping[str, torch.Size], state: Mapping[str, Tensor]) -> None:
    """Refuse a state, or published weights, that are not those of this learner.

    Raises:
        ValueError: an entry is missing, unknown or of another shape (the configuration differs).
    """
    for name in sorted(expected.keys() | state.keys()):
        found = tuple(state[name].shape) if name in state else None
        wanted = tuple(expected[name]) if name in expected else None
        if found != wanted:
            raise ValueError(
                f"{name}: shape {found} in the state, {wanted} here; use the configuration and the "
                f"environment that wrote it"
            )
