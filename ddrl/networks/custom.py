"""Custom networks: built by the user's callable, and checked before anything trains.

The requirements are those of `trunks.make_trunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Generator, Tensor, nn

from ddrl.config import ModuleError, first_line, load_callable


class NetworkError(ValueError):
    """A network that cannot be built or used; the message names it and the remedy in one line."""


def refuse(network: str, reason: str) -> NoReturn:
    """Raise a NetworkError about `network`."""
    raise NetworkError(f"network {network}: {reason}") from None


def custom_trunk(
    network: str,
    observation_shape: tuple[int, ...],
    kwargs: Mapping[str, Any],
    *,
    generator: Generator | None,
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
    with _seeded(generator):
        module = _make(network, make, observation_shape, kwargs)
        return module, _check(network, module, observation_shape)


@contextmanager
def _seeded(generator: Generator | None) -> Iterator[None]:
    """Seed torch's global CPU generator from `generator` for the block; restore it afterwards."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _make(
    network: str, make: Callable[..., Any], shape: tuple[int, ...], kwargs: Mapping[str, Any]
) -> nn.Module:
    """Return the user's module, not yet checked."""
    try:
        module = make(shape, **kwargs)
    except TypeError as error:
        refuse(
            network,
            f"observation shape {shape} and keyword arguments {dict(kwargs)} refused ({first_line(error)}); "
            "it is called as make(observation_shape, **kwargs)",
        )
    except Exception as error:
        refuse(
            network,
            f"making it raised {type(error).__name__} ({first_line(error)}); fix it for shape {shape}",
        )
    if not isinstance(module, nn.Module):
        refuse(network, f"returned {type(module).__name__}; return a torch.nn.Module")
    return module


def _check(network: str, module: nn.Module, shape: tuple[int, ...]) -> int:
    """Run the user's module on zeros and on noise, with batches of 2 and 1; return its F.

    Raises:
        NetworkError: it does not meet the requirements.
    """
    noise = torch.rand((2, *shape), generator=Generator().manual_seed(0))
    evaluated = _features(network, module.eval(), noise)
    module.train()
    features = _features(network, module, noise)
    with torch.no_grad():
        alone = _features(network, module, noise[:1])
        _features(network, module, torch.zeros(2, *shape))
    width = features.shape[1]
    for found, difference in (
        (alone, f"for batch 1 and {width} for batch 2"),
        (evaluated, f"in evaluation mode and {width} in training"),
    ):
        if found.shape[1] != width:
            refuse(network, f"returned {found.shape[1]} features {difference}; return the same number always")
    for found in (alone, evaluated):
        if not torch.allclose(found[0], features[0], rtol=1e-3, atol=1e-4):
            refuse(
                network,
                "the features of one observation change with its batch, by chance or in evaluation mode; "
                "use LayerNorm or GroupNorm instead of BatchNorm, and no Dropout",
            )
    _check_parameters(network, module, features)
    return width


def _features(network: str, module: nn.Module, observation: Tensor) -> Tensor:
    """Return the module's output for [B, *O]; refuse one of another form."""
    wanted = f"return float32 features [B, F] for observations {list(observation.shape)}"
    try:
        output = module(observation)
    except Exception as error:
        refuse(
            network,
            f"forward raised {type(error).__name__} ({first_line(error)}) on float32 {list(observation.shape)}; "
            "make it take [B, *observation_shape] of any B",
        )
    if not isinstance(output, Tensor):
        refuse(network, f"forward returned {type(output).__name__}, not a tensor; {wanted}")
    if output.ndim != 2 or output.shape[0] != observation.shape[0] or output.shape[1] < 1:
        refuse(network, f"forward returned shape {list(output.shape)}; {wanted}")
    if output.dtype != torch.float32:
        refuse(network, f"forward returned {str(output.dtype).removeprefix('torch.')}; {wanted}")
    if not bool(output.isfinite().all()):
        given = "noise in [0, 1]" if bool(observation.any()) else "zeros"
        refuse(
            network, f"forward returned NaN or infinity on {given}; check its initial weights and divisions"
        )
    return output


def _check_parameters(network: str, module: nn.Module, features: Tensor) -> None:
    """Refuse parameters that cannot be trained as one vector of float32 with one gradient."""
    named = dict(module.named_parameters())
    if not named:
        refuse(network, "has no trainable parameters; return a module with layers, or use mlp")
    for name, parameter in named.items():
        if not parameter.requires_grad:
            refuse(network, f"parameter {name} is not trainable; make it a buffer (register_buffer)")
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            refuse(network, f"parameter {name} is {dtype}; make it float32")
    if not features.requires_grad:
        refuse(
            network, "no gradient passes through forward; compute with torch and without detach or no_grad"
        )
    gradients = torch.autograd.grad(features.sum(), list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            refuse(network, f"parameter {name} has no effect on the features; use it in forward or remove it")
