"""Optimizers, and learner states that are saved and restored bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddrl.algorithms.base import check_shapes

T = TypeVar("T", bound=torch.optim.Optimizer)


def _eager(kind: type[T]) -> type[T]:
    """Return a torch optimizer without the wrappers that import torch's compiler, which takes more than a second."""
    step, add = torch.no_grad()(inspect.unwrap(kind.step)), inspect.unwrap(kind.add_param_group)
    return type(kind.__name__, (kind,), {"step": step, "add_param_group": add})


_Adam, _RMSprop = _eager(torch.optim.Adam), _eager(torch.optim.RMSprop)


def adam(
    parameter: Tensor, *, learning_rate: float, eps: float = 1e-8, weight_decay: float = 0.0
) -> torch.optim.Adam:
    """Return Adam for one tensor; see `_with_state`."""
    options = {"lr": learning_rate, "eps": eps, "weight_decay": weight_decay, "fused": True}
    return _with_state(_Adam, parameter, ("exp_avg", "exp_avg_sq"), options)


def rmsprop(
    parameter: Tensor, *, learning_rate: float, eps: float, decay: float, weight_decay: float = 0.0
) -> torch.optim.RMSprop:
    """Return RMSProp for one tensor; see `_with_state`."""
    options = {"lr": learning_rate, "eps": eps, "alpha": decay, "weight_decay": weight_decay}
    return _with_state(_RMSprop, parameter, ("square_avg",), options)


def _with_state(
    kind: Callable[..., T], parameter: Tensor, moments: Sequence[str], options: Mapping[str, Any]
) -> T:
    """Return an optimizer of one tensor with its state allocated: torch does so at the first step, too late to restore.

    Args:
        kind: of optimizer.
        parameter: the tensor.
        moments: names of the tensors of its shape in the state, zeros at first.
        options: of the optimizer.
    """
    optimizer = kind([parameter], capturable=parameter.is_cuda, **options)
    zeros = {name: torch.zeros_like(parameter.detach()) for name in moments}
    optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **zeros}
    return optimizer


def set_options(*optimizers: torch.optim.Optimizer, **options: float) -> None:
    """Set options of optimizers, such as `lr`, from their next step on."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update(options)


def begin_anew(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Set an optimizer's moments and its count of steps to 0.

    Parameters that had no gradient for many of Adam's steps would take too long ones at first, by its count.
    """
    for tensor in optimizer.state[parameter].values():
        tensor.zero_()


def optimizer_state(name: str, optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's own tensors for a parameter, as "name.exp_avg" and so on; not copied."""
    return {f"{name}.{key}": tensor for key, tensor in optimizer.state[parameter].items()}


def adams(parameters: Mapping[str, Tensor], *, learning_rate: float) -> dict[str, torch.optim.Adam]:
    """Return an Adam for each parameter, by name."""
    return {name: adam(parameter, learning_rate=learning_rate) for name, parameter in parameters.items()}


def with_optimizers(
    parameters: Mapping[str, Tensor], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return parameters as "name.value", and the state of each one's optimizer; not copied."""
    named = {f"{name}.value": parameter for name, parameter in parameters.items()}
    for name, optimizer in optimizers.items():
        named |= optimizer_state(name, optimizer, parameters[name])
    return named


def cpu_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU copies that share no memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def restore(
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    generators: Mapping[str, torch.Generator] = MappingProxyType({}),
    /,
    **others: torch.Size,
) -> None:
    """Copy a state into the tensors and generators of the same names.

    Args:
        tensors: to be overwritten.
        state: `cpu_copies` of such tensors, the generators' states, and `others`.
        generators: one on another kind of device than that of the state goes on as it is.
        others: shapes of further entries of `state`, which the caller restores.

    Raises:
        ValueError: an entry is missing or unknown, or a tensor has another shape; nothing has changed then.
    """
    own = {name: generator.get_state() for name, generator in generators.items()}
    shapes = {name: state.get(name, value).shape for name, value in own.items()} | others
    check_shapes(state, {name: tensor.shape for name, tensor in tensors.items()} | shapes, source="state")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(state[name])
    for name, generator in generators.items():
        if state[name].shape == own[name].shape:
            generator.set_state(state[name].cpu())
