"""The weights of another run's policy as the initial weights of a new run.

Published weights hold the actor or the network of action values, and the statistics of its normalization. The rest of a
learner's state starts fresh, and the run's journal says so; critics warm up before the policy moves.
"""

from __future__ import annotations

import numpy as np
import torch

from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.policy import LoadedPolicy
from ddrl.store import checkpoints, weights
from ddrl.store.connection import Redis
from ddrl.types import EnvSpec

# Algorithms whose policies have the same weights.
_KINDS = {"ppo": "actor-critic", "impala": "actor-critic"}

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
            f"--from {name}: is a policy of {theirs.name}, with which {ours.name} cannot begin; set algorithm.name="
            f"{theirs.name}, or leave --from out"
        )
    if config.rollout.random_until_learned:
        raise ConfigError(
            f"rollout.random_until_learned: true would play at random instead of by --from {name}; remove it"
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
            remedy = remedy or "choose a policy of the same network, or leave --from out"
            raise ConfigError(f"--from {name}: tensor {tensor} is {found} there and {wanted} here; {remedy}")
    if remedy is not None:
        raise ConfigError(f"--from {name}: the same weights would be another policy here; {remedy}")
    return name, weights.encode_weights(source.weights)


def learner_state(client: Redis, run: str) -> tuple[str, bytes] | None:
    """Return the name of a run's newest checkpoint, and what a new run can go on from: networks and optimizers.

    The new run counts updates from 0, as its replay is empty. None: there is no checkpoint yet.
    """
    if (found := checkpoints.load(client, run)) is None:
        return None
    blob, meta = found
    state = weights.decode_weights(blob)
    kept = {name: array for name, array in state.items() if not name.startswith(checkpoints.REPLAY)}
    if "num_updates" in kept:
        kept["num_updates"] = np.zeros_like(kept["num_updates"])
    return f"{run}, update {meta['updates']}", weights.encode_weights(kept)


def _remedy(theirs: base.Resolved, ours: base.Resolved) -> str | None:
    """Return what to change so that the weights fit; None if no option that matters differs."""
    there, here = _spaces(theirs.spec), _spaces(ours.spec)
    for name in there:
        if there[name] != here[name]:
            return (
                f"{theirs.spec.env_id} has {name} {there[name]}, {ours.spec.env_id} {here[name]}: "
                "choose a policy of an environment with the same spaces, or leave --from out"
            )
    for name in _DECIDING:
        option, own = (getattr(each.config, name, None) for each in (theirs, ours))
        if option != own:
            value = list(option) if isinstance(option, tuple) else option
            return f"set algorithm.{name}={value} as there, or leave --from out"
    return None


def _spaces(spec: EnvSpec) -> dict[str, str]:
    """Return what must be the same; the bounds of actions may differ, as policies act relative to them."""
    return {
        "observations": f"{spec.observation_dtype} {list(spec.input_shape)}",
        "actions": f"{spec.action_kind} {list(spec.action_shape)} {list(spec.action_sizes)}",
    }
