"""Policies as people use them: exported to one file, loaded anywhere, without server and run folder.

The file is safetensors; its metadata holds the environment, the spaces and the algorithm's options as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ddrl import envs
from ddrl.algorithms import base
from ddrl.algorithms.base import advance
from ddrl.config import ConfigError, EnvConfig, ModuleError, RunConfig, first_line, validate_stored
from ddrl.envs.frame_stack import FrameStack
from ddrl.networks.placement import new_layers_on
from ddrl.store import runs, weights
from ddrl.store.connection import Redis, StoreError
from ddrl.store.local_checkpoints import write_whole
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    import gymnasium

FORMAT = "ddrl-policy-2"


class NoWeightsError(StoreError):
    """A version is not on the server: never published, or pruned."""


class PolicyFileError(ValueError):
    """A file that is not a policy, or whose weights do not fit its config; one line with the remedy."""


@dataclass
class LoadedPolicy:
    """A policy with what it was trained for.

    Attributes:
        policy: acts on [N, *I] inputs.
        config: the run's, resolved.
        spaces: of its environment.
        run, version: its source.
        weights: as published.
    """

    policy: base.Policy
    config: RunConfig
    spaces: EnvSpec
    run: str
    version: int
    weights: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.begin()

    @property
    def env(self) -> EnvConfig:
        """The environment of the run."""
        return self.config.env

    @property
    def metadata(self) -> dict[str, str]:
        """Facts that a file holds beside the weights, by name."""
        return _metadata(self.run, self.version, self.config, self.spaces)

    def make_env(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """Return a Gymnasium environment as the policy plays it.

        It has the run's arguments, time limit, action repeat and Atari protocol. Observations are single frames, which
        `action` stacks. Rewards are the environment's own, and an episode of an ALE game is a whole game.

        Args:
            render_mode: of Gymnasium. ALE games have only "rgb_array".

        Raises:
            EnvError: it cannot be made here: a package is missing, a module is not in DDRL_ALLOW_MODULES, or its spaces
                are not those that the policy knows.
        """
        made = envs.make_one(self.env, render_mode)
        envs.check_spaces(made, self.spaces)
        return made

    def begin(self) -> None:
        """Start an episode: forget the frames and the recurrent state of the last one. Call it after each reset."""
        self._stack, self._state = FrameStack(1, self.spaces), self.policy.initial_state(1)
        self._last_action: np.ndarray | None = None  # [1, *A]

    def action(self, observation: np.ndarray, reward: float = 0.0) -> np.ndarray:
        """Return the deterministic action [*A] for the next observation [*O] of an episode.

        Args:
            observation: as the environment of `env` returns it; not stacked.
            reward: of the step that led to it; used by recurrent policies only.
        """
        is_first = np.array([self._last_action is None])
        if self._state and self._last_action is not None:
            learned = envs.training_reward(self.env, np.array([reward]))
            advance(self._state, self._last_action, learned, is_first)
        seen = self._stack.push(np.asarray(observation, self.spaces.observation_dtype)[None], is_first)
        self._last_action = self.policy.act(seen, self._state)
        return cast(np.ndarray, self._last_action[0])


def load(path: str | Path) -> LoadedPolicy:
    """Read an exported policy.

    Raises:
        PolicyFileError: the file is missing, not a policy, or its weights do not fit.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PolicyFileError(
            f"{path}: cannot be read ({error.strerror}); export one with `ddrl export`"
        ) from None
    try:
        arrays, metadata = weights.decode_weights(data), weights.weights_metadata(data)
    except weights.WeightsError as error:
        raise PolicyFileError(f"{path}: is not a policy ({error}); export one with `ddrl export`") from None
    if metadata.get("format") != FORMAT:
        found = " ".join(metadata.get("format", "no format").split())[:80]
        raise PolicyFileError(f"{path}: is {found}, not {FORMAT}; export it again with this version of ddrl")
    try:
        config = validate_stored(json.loads(metadata["config"]))
        spaces = EnvSpec.from_json(json.loads(metadata["spaces"]))
        run, version = metadata["run"], int(metadata["version"])
        if (spaces.has_mask, spaces.frame_stack) != (config.env.action_mask, config.env.frame_stack):
            raise ValueError("env.action_mask or env.frame_stack of its config and of its spaces differ")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PolicyFileError(
            f"{path}: was exported by another version of ddrl ({first_line(error)}); export it again with this version"
        ) from None
    return _build(arrays, config, spaces, run, version, source=str(path))


def from_run(client: Redis, run: str, version: int) -> LoadedPolicy:
    """Load a version that the server keeps.

    Raises:
        UnknownRunError: there is no such run.
        NoWeightsError: the version is not there.
    """
    arrays = weights.decode_weights(weights_blob(client, run, version))
    config, spaces = runs.config(client, run), runs.spaces(client, run)
    return _build(arrays, config, spaces, run, version, source=f"{run}@{version}")


def save(client: Redis, run: str, version: int, path: Path) -> None:
    """Write a version to a file, whole or not at all.

    Raises:
        UnknownRunError: there is no such run.
        NoWeightsError: the version is not there.
    """
    metadata = _metadata(run, version, runs.config(client, run), runs.spaces(client, run))
    write_whole(
        path, weights.encode_weights(weights.decode_weights(weights_blob(client, run, version)), metadata)
    )


def _metadata(run: str, version: int, config: RunConfig, spaces: EnvSpec) -> dict[str, str]:
    known = {"config": config.model_dump_json(by_alias=True), "spaces": json.dumps(asdict(spaces))}
    return {"format": FORMAT, "run": run, "version": str(version), **known}


def weights_blob(client: Redis, run: str, version: int) -> bytes:
    """Return the weights of a version that the server keeps, as safetensors.

    Raises:
        NoWeightsError: the version is not there.
    """
    if (blob := weights.get(client, run, version)) is None:
        kept = sorted(weights.index(client, run).sizes)
        start = f"the newest of {len(kept)} kept are" if len(kept) > 12 else "kept are"
        there = "none is published yet"
        if kept:
            nearest = min(kept, key=lambda one: abs(one - version))
            there = f"{start} {', '.join(map(str, kept[-12:]))}, the nearest is {nearest}"
        raise NoWeightsError(f"run {run}: no weights of version {version}; {there}")
    return blob


def _build(
    arrays: Mapping[str, np.ndarray], config: RunConfig, spaces: EnvSpec, run: str, version: int, source: str
) -> LoadedPolicy:
    try:
        resolved = base.resolve(config, spaces)
        with new_layers_on("meta"):  # shapes are compared before networks of any size take memory
            resolved.policy().load(arrays)
        policy = resolved.policy()
        policy.load(arrays)
        policy.act(np.zeros((1, *spaces.input_shape), spaces.observation_dtype), policy.initial_state(1))
    except (ConfigError, ModuleError):
        raise
    except Exception as error:  # whatever networks do with sizes and weights of others
        raise PolicyFileError(
            f"{source}: weights do not fit the networks of its config ({first_line(error)}); export the policy again"
        ) from None
    return LoadedPolicy(policy, config, spaces, run, version, arrays)
