"""Collectors of any policy, and a policy that plays at random."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from ddrl import envs
from ddrl.algorithms.base import RecurrentState
from ddrl.config import EnvConfig, ReplayConfig, RolloutConfig, RunConfig
from ddrl.types import EnvSpec, SequenceShape
from ddrl.worker.collector import Collector

Explored = tuple[np.ndarray, Mapping[str, np.ndarray]]


class RandomPolicy:
    """Plays at random; keeps copies of its inputs, and returns the number of the step as an extra."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []
        self.generator = np.random.default_rng(3)

    def load(self, weights: Mapping[str, Any]) -> None:
        pass

    def initial_state(self, num_envs: int) -> RecurrentState:
        return {}

    def explore(self, observation: np.ndarray, generator: Any, state: RecurrentState) -> Explored:
        self.seen.append(observation.copy())
        serial = np.full(len(observation), len(self.seen), np.float32)
        return self.generator.integers(5, size=len(observation)), {"serial": serial}


def make_collector(
    env: EnvConfig,
    *,
    policy: Any,
    version: int | None = 1,
    spec: EnvSpec | None = None,
    context: int = 0,
    sequences: SequenceShape | None = None,
    rollout: Mapping[str, Any] = MappingProxyType({}),
    hindsight: int = 0,
    seed: int = 1,
    **identity: Any,
) -> Collector:
    """A collector of run "r", producer 5, incarnation 7, with weights of `version` unless that is None."""
    resolved: Any = SimpleNamespace(spec=spec or envs.describe(env), context=context, sequences=sequences)
    resolved.policy = lambda producer: policy
    settings = RolloutConfig(**{"fragment_s": 5} | dict(rollout))
    replay = ReplayConfig(hindsight=hindsight)
    config = RunConfig(env=env, rollout=settings, replay=replay, seed=seed, algorithm={"name": "none"})
    identity = {"run": "r", "producer": 5, "incarnation": 7, "random_until_learned": True} | identity
    made = Collector(config=config, resolved=resolved, **identity)
    if version is not None:
        made.load(version, {})
    return made
