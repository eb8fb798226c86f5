"""Learners and policies by the name of their algorithm, and comparisons of what they hold."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ddrl.algorithms.base import Policy, Resolved, config_class
from ddrl.types import EnvSpec

CPU = torch.device("cpu")


def make_learner(
    name: str, spec: EnvSpec, *, seed: int = 1, device: torch.device = CPU, **options: Any
) -> Any:
    """Return a learner with these options."""
    return Resolved(name, config_class(name)(**options), spec).learner(device=device, seed=seed)


def make_policy(
    name: str, spec: EnvSpec, *, weights: Mapping[str, Any] | None = None, producer: int = 0, **options: Any
) -> Policy:
    """Return a policy with these options, and weights if given."""
    policy = Resolved(name, config_class(name)(**options), spec).policy(producer=producer)
    if weights is not None:
        policy.load(weights)
    return policy


def own_network(shape: tuple[int, ...], width: int = 5) -> nn.Module:
    """A custom network, named "algorithms:own_network"."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.Tanh())


def digest(named: Mapping[str, Any]) -> str:
    """Return a hash of all names, types, shapes and values, of tensors or arrays."""
    sha = hashlib.sha256()
    for name, value in sorted(named.items()):
        array = np.ascontiguousarray(value)
        sha.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return sha.hexdigest()


def assert_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Names, types and values of tensors are equal, to the last bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name
