"""Environments: the only package that imports gymnasium (inside functions, so importing this is cheap)."""

from ddrl.envs.make import (
    Vector,
    check_spaces,
    check_vector,
    describe,
    make_one,
    make_vector,
    spec_of,
    training_reward,
)
from ddrl.envs.requirements import (
    EnvError,
    capabilities,
    check_installed,
    prepare,
    queue_for,
    queues,
    requirement,
)

__all__ = [
    "EnvError",
    "Vector",
    "capabilities",
    "check_installed",
    "check_spaces",
    "check_vector",
    "describe",
    "make_one",
    "make_vector",
    "prepare",
    "queue_for",
    "queues",
    "requirement",
    "spec_of",
    "training_reward",
]
