"""What comes before learning: the device, a warm start of the libraries, and whether the server has the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.store import budget
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from redis import Redis

    from ddrl.learner.loop import Learner


def choose_device(name: str) -> torch.device:
    """The torch device of a config's `learner.device`.

    Raises:
        ConfigError: it is not on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"learner.device: {name!r} is not on this machine; use auto or cpu") from None
    return device


def warm_up(config: RunConfig, spaces: EnvSpec) -> None:
    """Do beforehand what a learner's first seconds consist of, for the sake of a quick take-over."""
    device = choose_device(config.learner.device)
    base.resolve(config, spaces).learner(device=device, seed=config.seed).weights()


def check_memory(client: Redis, run: str, token: int, config: RunConfig, learner: Learner) -> None:
    """Refuse to begin what the server's memory cannot hold to its end.

    Args:
        client: connection to the server.
        run: its id.
        token: fencing token.
        config: the run's.
        learner: its, restored.

    Raises:
        ConfigError: it cannot.
        LeaseLostError: another learner took over.
    """
    parameters = _num_bytes(learner.algorithm.weights())
    checkpoint = _num_bytes(learner.algorithm.state())
    if learner.experience.state():  # priorities, of items yet to come
        checkpoint += 4 * config.replay.capacity
    needed = budget.needed_bytes(config, checkpoint_bytes=checkpoint, weights_bytes=parameters)
    budget.check(client, run, token, needed)


def _num_bytes(arrays: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in arrays.values())
