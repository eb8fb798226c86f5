"""The weights of another run's policy as the initial weights of a new run.

Published weights hold the actor or the network of action values, and the statistics of its normalization. The rest of a
learner's state starts fresh, and the run's journal says so; critics warm up before the policy moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.policy import LoadedPolicy
from ddrl.store import checkpoints, weights
from ddrl.store.connection import Redis
from ddrl.types import EnvSpec

# Algorithms whose policies have the same weights.
_KINDS = {"ppo": "actor-critic", "impala": "actor-critic", "bc": "regression", "iql": "regression"}

# Options that change what weights mean, even if their shapes are the same.
_DECIDING = (
    *("network", "network_kwargs", "hidden_sizes", "activation", "norm", "batch_norm", "dueling", "noisy"),
    *("distribution", "num_atoms", "v_min", "v_max"),
    *("recurrent", "recurrent_size", "rescale_values", "normalize_observations"),
)


def initial_weights(source: LoadedPolicy, config: RunConfig, spaces: EnvSpec) -> tuple[str, bytes]:
    """Return the name of the source of a new run's initial weights, and the weights as safetensors.

    Args:
        source: the policy.
        config: of the new run.
        spaces: of its environment.

    Raises:
        ConfigError: the run's algorithm cannot use that policy; the message names what differs and the remedy.
    """
    name = f"{source.run}@{source.version}"
    theirs, ours = base.resolve(source.config, source.spaces), base.resolve(config, spaces)
    if _KINDS.get(theirs.name, theirs.name) != _KINDS.get(ours.name, ours.name):
        raise ConfigError(
            f"{name}: is a policy of {theirs.name}, with which {ours.name} cannot begin; set algorithm.name="
            f"{theirs.name}, or begin without it"
        )
    if config.rollout.random_until_learned:
        raise ConfigError(
            f"rollout.random_until_learned: true would play at random instead of by {name}; remove it"
        )
    remedy = _remedy(theirs, ours)
    fresh = ours.learner(device=torch.device("cpu"), seed=config.seed).weights()
    there, here = (
        {tensor: list(value.shape) for tensor, value in part.items() if tensor != "log_temperature"}
        for part in (source.weights, fresh)
    )
    for tensor in (*here, *there):
        if there.get(tensor) != here.get(tensor):
            found, wanted = there.get(tensor, "missing"), here.get(tensor, "unknown")
            remedy = remedy or "choose a policy of the same network, or begin without it"
            raise ConfigError(f"{name}: tensor {tensor} is {found} there and {wanted} here; {remedy}")
    if remedy is not None:
        raise ConfigError(f"{name}: the same weights would be another policy here; {remedy}")
    return name, weights.encode_weights(source.weights)


@dataclass(frozen=True)
class LearnerState:
    """A learner's networks and optimizers without its replay, from which a new run can go on.

    Attributes:
        source: the run, and the update of its newest checkpoint.
        blob: tensors as safetensors; updates count from 0, as the replay is empty.
        spent: env_steps, updates and time (s) that it took.
    """

    source: str
    blob: bytes
    spent: Mapping[str, float]


def learner_state(client: Redis, run: str, *, begins_anew: bool) -> LearnerState | None:
    """Return the state of a run's learner at its newest checkpoint; None if it has none yet.

    Args:
        client: connection to the server.
        run: its id.
        begins_anew: schedules begin anew, too; else they go on.
    """
    if (found := checkpoints.load(client, run)) is None:
        return None
    counters, state = checkpoints.Counters.decode(found[1]), weights.decode_weights(found[0])
    kept = {name: array for name, array in state.items() if not name.startswith(checkpoints.REPLAY)}
    counts = ("num_updates", "num_steps") if begins_anew else ("num_updates",)
    kept |= {name: np.zeros_like(kept[name]) for name in counts if name in kept}
    spent = {"env_steps": counters.env_steps, "updates": counters.updates, "time": counters.elapsed_s}
    return LearnerState(f"{run}, update {counters.updates}", weights.encode_weights(kept), spent)


def check_state(state: LearnerState, config: RunConfig, spaces: EnvSpec) -> None:
    """Refuse a run whose learner cannot go on from a state.

    Raises:
        ConfigError: names what differs.
    """
    learner = base.resolve(config, spaces).learner(device=torch.device("cpu"), seed=config.seed)
    arrays = weights.decode_weights(state.blob)
    try:
        learner.load_state({name: torch.from_numpy(array) for name, array in arrays.items()})
    except ValueError as error:
        raise ConfigError(f"{state.source}: has a learner of other settings ({error})") from None


def _remedy(theirs: base.Resolved, ours: base.Resolved) -> str | None:
    """Return what to change so that the weights fit; None if no option that matters differs."""
    there, here = _spaces(theirs.spec), _spaces(ours.spec)
    for name in there:
        if there[name] != here[name]:
            return (
                f"{theirs.spec.env_id} has {name} {there[name]}, {ours.spec.env_id} {here[name]}: "
                "choose a policy of an environment with the same spaces, or begin without it"
            )
    is_sqn = getattr(ours.config, "form", None) == "sqn"  # whose policy is its critics
    for name in (*_DECIDING, "average_critics") if is_sqn else _DECIDING:
        option, own = (getattr(each.config, name, None) for each in (theirs, ours))
        if option != own:
            value = list(option) if isinstance(option, tuple) else option
            return f"set algorithm.{name}={value} as there, or begin without it"
    return None


def _spaces(spec: EnvSpec) -> dict[str, str]:
    """Return what must be the same; the bounds of actions may differ, as policies act relative to them."""
    return {
        "observations": f"{spec.observation_dtype} {list(spec.input_shape)}",
        "actions": f"{spec.action_kind} {list(spec.action_shape)} {list(spec.action_sizes)}",
    }
