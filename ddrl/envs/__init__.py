"""Environments: the only package that imports gymnasium (inside functions, so importing this is cheap)."""

from ddrl.envs.make import EnvError, check_spaces, describe, make_one, make_vector, spec_of
from ddrl.envs.requirements import capabilities, queue_for, requirement

__all__ = [
    "EnvError",
    "capabilities",
    "check_spaces",
    "describe",
    "make_one",
    "make_vector",
    "queue_for",
    "requirement",
    "spec_of",
]
