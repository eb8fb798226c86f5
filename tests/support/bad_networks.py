"""A network of a user's own, for tests of what workers may import."""

from __future__ import annotations

from typing import Any

from torch import nn


def make(observation_shape: tuple[int, ...], **_: Any) -> nn.Module:
    """Features of a vector."""
    return nn.Sequential(nn.Linear(observation_shape[0], 8), nn.Tanh())
