"""Custom networks: built by the user's callable, and checked before anything trains.

The requirements are those of `trunks.make_trunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Generator, Tensor, nn

from ddrl.config import ModuleError, first_line, load_callable
from ddrl.networks.placement import new_layers_on


class NetworkError(ValueError):
    """A network that cannot be built or used; the message names it and the remedy in one line."""


def refuse(network: str, reason: str) -> NoReturn:
    """Raise a NetworkError about `network`."""
    raise NetworkError(f"network {network}: {reason}") from None


def custom_trunk(
    network: str, observation_shape: tuple[int, ...], kwargs: Mapping[str, Any], generator: Generator | None
) -> tuple[nn.Module, int]:
    """Return the trunk that `network`, "module:callable", builds for observations of one shape, and its F.

    Args:
        network: of an allowed module.
        observation_shape: `*O`.
        kwargs: keyword arguments of the callable.
        generator: source of the seed of torch's global CPU generator while the network is built; None: leave it.

    Raises:
        NetworkError: it cannot be built, or does not meet the requirements of `trunks.make_trunk`.
    """
    try:
        make = load_callable(network)  # not seeded: importing may draw numbers, and happens only once
    except ModuleError as error:
        raise NetworkError(f"network {error}") from None
    try:
        seed = None if generator is None else int(torch.randint(2**63 - 1, (), generator=generator))
        with torch.random.fork_rng(devices=[], enabled=seed is not None), new_layers_on("cpu"):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            module = _make(make, observation_shape, kwargs)
            return module, _check(module, observation_shape)
    except NetworkError as error:
        refuse(network, str(error))


def _make(make: Callable[..., Any], shape: tuple[int, ...], kwargs: Mapping[str, Any]) -> nn.Module:
    """Return the user's module, not yet checked.

    Raises:
        NetworkError: it cannot be built; `custom_trunk` adds the network's name to the message.
    """
    try:
        module = make(shape, **kwargs)
    except TypeError as error:
        raise NetworkError(
            f"observation shape {shape} and keyword arguments {dict(kwargs)} refused ({first_line(error)}); it is "
            "called as make(observation_shape, **kwargs)"
        ) from None
    except Exception as error:
        raised = f"{type(error).__name__} ({first_line(error)})"
        raise NetworkError(f"making it raised {raised}; fix it for shape {shape}") from None
    if not isinstance(module, nn.Module):
        raise NetworkError(f"returned {type(module).__name__}; return a torch.nn.Module")
    return module


def _check(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Run the user's module on zeros and on noise, with batches of 2 and 1; return its F."""
    noise = torch.rand((2, *shape), generator=Generator().manual_seed(0))
    evaluated = _features(module.eval(), noise)
    features = _features(module.train(), noise)
    with torch.no_grad():
        alone = _features(module, noise[:1])
        _features(module, torch.zeros(2, *shape))
    width = features.shape[1]
    for found, difference in (
        (alone.shape[1], f"for batch 1 and {width} for batch 2"),
        (evaluated.shape[1], f"in evaluation mode and {width} in training"),
    ):
        if found != width:
            raise NetworkError(f"returned {found} features {difference}; return the same number always")
    if not all(torch.allclose(found[0], features[0], rtol=1e-3, atol=1e-4) for found in (alone, evaluated)):
        raise NetworkError(
            "the features of one observation change with its batch, by chance or in evaluation mode; "
            "use LayerNorm or GroupNorm instead of BatchNorm, and no Dropout"
        )
    _check_parameters(module, features)
    return width


def _features(module: nn.Module, observation: Tensor) -> Tensor:
    """Return the module's output for [B, *O]; refuse one of another form."""
    wanted = f"return float32 features [B, F] for observations {list(observation.shape)}"
    try:
        output = module(observation)
    except Exception as error:
        raise NetworkError(
            f"forward raised {type(error).__name__} ({first_line(error)}) on float32 {list(observation.shape)}; "
            "make it take [B, *observation_shape] of any B"
        ) from None
    if not isinstance(output, Tensor):
        raise NetworkError(f"forward returned {type(output).__name__}, not a tensor; {wanted}")
    if output.ndim != 2 or output.shape[0] != observation.shape[0] or output.shape[1] < 1:
        raise NetworkError(f"forward returned shape {list(output.shape)}; {wanted}")
    if output.dtype != torch.float32:
        raise NetworkError(f"forward returned {_name(output.dtype)}; {wanted}")
    if not bool(output.isfinite().all()):
        given = "noise in [0, 1]" if bool(observation.any()) else "zeros"
        remedy = "check its initial weights and divisions"
        raise NetworkError(f"forward returned NaN or infinity on {given}; {remedy}")
    return output


def _check_parameters(module: nn.Module, features: Tensor) -> None:
    """Refuse parameters that cannot be trained as one vector of float32 with one gradient."""
    named = dict(module.named_parameters())
    if not named:
        raise NetworkError("has no trainable parameters; return a module with layers, or use mlp")
    for name, parameter in named.items():
        if not parameter.requires_grad:
            raise NetworkError(f"parameter {name} is not trainable; make it a buffer (register_buffer)")
        if parameter.dtype != torch.float32:
            raise NetworkError(f"parameter {name} is {_name(parameter.dtype)}; make it float32")
    if not features.requires_grad:
        remedy = "compute with torch and without detach or no_grad"
        raise NetworkError(f"no gradient passes through forward; {remedy}")
    total, parameters = features.sum(), [*named.values()]
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(total, parameters, allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            remedy = "use it in forward or remove it"
            raise NetworkError(f"parameter {name} has no effect on the features; {remedy}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
