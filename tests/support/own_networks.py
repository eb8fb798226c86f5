"""Networks of a user's own: some that can be used, and one for each thing that may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[tuple[int, ...]], Any]
AT_IMPORT = torch.rand(5)  # as some modules do; it may not move the seed of what follows


class Good(nn.Module):
    def __init__(self, observation_shape: tuple[int, ...], width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(observation_shape[0], width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def changed(
    forward: Callable[[Any, Tensor], Any], prepare: Callable[[Any], Any] = lambda module: None
) -> Make:
    """`Good` with another forward pass, and changed after it was made."""

    class Changed(Good):
        def __init__(self, observation_shape: tuple[int, ...]) -> None:
            super().__init__(observation_shape)
            prepare(self)

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    return Changed


def sequential(*layers: nn.Module) -> Make:
    return lambda shape: nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 3), *layers)


def fails(message: str) -> Any:
    raise RuntimeError(message)


def global_draws(shape: tuple[int, ...]) -> nn.Module:
    """`Good` with three draws of the global generator as a buffer."""
    module = Good(shape)
    module.register_buffer("drawn", torch.rand(3))
    return module


def scaled(shape: tuple[int, ...], width: int = 5) -> nn.Module:
    module = nn.Sequential(nn.Linear(shape[0], width), nn.Tanh())
    module.register_buffer("scale", module[0].weight.detach()[0].clone())
    return module


kept = scaled((3,))
scale = nn.Parameter(torch.ones((), dtype=torch.float64))


def one_for_all(shape: tuple[int, ...]) -> nn.Module:
    return kept


def gives_list(shape: tuple[int, ...]) -> Any:
    return [1]


def raises(shape: tuple[int, ...]) -> Any:
    return fails("too small\nreally")


def type_error_within(shape: tuple[int, ...]) -> Any:
    return len(3)  # type: ignore[arg-type]


def flatten(shape: tuple[int, ...]) -> nn.Module:
    return nn.Flatten()


def lazy(shape: tuple[int, ...]) -> nn.Module:
    return nn.LazyLinear(6)


dropout = sequential(nn.Dropout(0.5))
batch_norm = sequential(nn.BatchNorm1d(3))
batch_norm_2d = sequential(nn.Unflatten(1, (1, 1, 3)), nn.BatchNorm2d(1), nn.Flatten())
forward_fails = changed(lambda self, x: fails("first line\nsecond"))
gives_tuple = changed(lambda self, x: (self.layer(x), None))
three_axes = changed(lambda self, x: self.layer(x)[:, None])
mean_of_batch = changed(lambda self, x: self.layer(x).mean(0, keepdim=True))
no_features = changed(lambda self, x: self.layer(x)[:, :0])
gives_double = changed(lambda self, x: self.layer(x).double())
nan_on_zeros = changed(lambda self, x: self.layer(x) / x.norm(dim=1, keepdim=True))
nan_on_noise = changed(lambda self, x: self.layer(x) + torch.where(x.any(), float("nan"), 0.0))
batch_wide = changed(lambda self, x: self.layer(x)[:, :1].expand(-1, len(x) + 1))
centers = changed(lambda self, x: self.layer(x) - self.layer(x).mean(0))
twice_in_training = changed(lambda self, x: self.layer(x) * (2 if self.training else 1))
less_in_evaluation = changed(lambda self, x: self.layer(x)[:, : None if self.training else 2])
detached = changed(lambda self, x: self.layer(x).detach())
double = changed(Good.forward, Good.double)
frozen = changed(Good.forward, lambda module: module.layer.bias.requires_grad_(False))
unused = changed(Good.forward, lambda module: module.add_module("other", nn.Linear(2, 2)))
mixed = changed(
    lambda self, x: self.layer(x) * self.scale.float(),
    lambda module: module.register_parameter("scale", scale),
)
