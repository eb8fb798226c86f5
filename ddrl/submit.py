"""Submit: everything that can be refused is refused here, before anything exists."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ddrl import envs
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig, Section
from ddrl.replay.experience import is_compressed, is_image, samples_per_update
from ddrl.replay.pacing import Pacing, check_staleness
from ddrl.store import connection, runs
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from redis import Redis

FRAGMENTS_IN_BUDGET = 8  # uncompressed: below, one fragment could be more than what the learner keeps free
CHECKPOINTS_BYTES = 64 * 1024**2  # two checkpoints, with room for their parts and the server's own needs


def prepare(config: RunConfig, *, processes: int = 1) -> EnvSpec:
    """Check that environment, algorithm and pace fit together; the environment's spaces.

    Args:
        processes: that will play at least, as far as is known.

    Raises:
        EnvError: the environment cannot be made here.
        ConfigError: the algorithm cannot be used, or cannot serve this environment, or settings contradict.
    """
    spaces = envs.describe(config.env)
    resolved = base.resolve(config, spaces)
    try:
        if resolved.on_policy:
            _check_on_policy(config, resolved, processes)
        else:
            _check_off_policy(config, resolved)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    largest = config.rollout.max_fragment_steps * config.env.num_envs
    if resolved.on_policy:
        largest = min(largest, resolved.config.batch_size + config.env.num_envs)
    row = np.dtype(spaces.observation_dtype).itemsize * math.prod(spaces.observation_shape)
    transition = (
        row + 8 * math.prod(spaces.action_shape) + 12
    )  # two actions, a reward, a log probability, flags
    needed = FRAGMENTS_IN_BUDGET * largest * transition
    if config.replay.max_bytes < needed:
        steps = int(config.replay.max_bytes) // (FRAGMENTS_IN_BUDGET * config.env.num_envs * transition)
        raise ConfigError(
            f"replay.max_bytes: {int(config.replay.max_bytes)} holds fewer than {FRAGMENTS_IN_BUDGET} of the largest "
            f"fragments; use at least {needed}, or rollout.max_fragment_steps {max(steps, 1)}"
        )
    return spaces


def _check_off_policy(config: RunConfig, resolved: base.Resolved) -> None:
    """Refuse a pace that cannot be kept, and settings without effect; ValueError."""
    replay, spec, options = config.replay, resolved.spec, resolved.config
    Pacing.check(
        samples_per_insert=replay.samples_per_insert,
        warmup_steps=replay.warmup_steps,
        slack_steps=replay.slack_steps,
        batch_size=samples_per_update(options),
    )
    _refuse_set(config.on_policy, "on_policy", list(type(config.on_policy).model_fields), resolved.name)
    if spec.action_kind != "continuous":
        _refuse_set(
            config.rollout, "rollout", ["action_noise"], f"{resolved.name} with {spec.action_kind} actions"
        )
    fragment_steps = config.rollout.max_fragment_steps
    if options.n_step > fragment_steps:
        raise ValueError(
            f"algorithm.n_step: {options.n_step} is longer than a fragment, rollout.max_fragment_steps "
            f"{fragment_steps}; use at most {fragment_steps}"
        )
    if config.rollout.random_until_learned and not resolved.can_begin_at_random:
        raise ValueError(
            f"rollout.random_until_learned: true gives no recurrent states, which {resolved.name} needs; remove it"
        )
    largest = fragment_steps * config.env.num_envs
    if resolved.sequences is not None and resolved.sequences.length > replay.capacity:
        raise ValueError(
            f"replay.capacity: {replay.capacity} cannot hold one sequence of {resolved.sequences.length} steps; use at "
            f"least {largest}"
        )
    if largest > replay.capacity:
        most = replay.capacity // config.env.num_envs
        raise ValueError(
            f"rollout.max_fragment_steps: {fragment_steps} steps of {config.env.num_envs} environments exceed "
            f"replay.capacity {replay.capacity}; use at most {max(most, 1)}"
        )
    if replay.observations == "compressed" and not is_image(spec):
        raise ValueError(
            f"replay.observations: compressed is for images, but {spec.env_id} has observations "
            f"{spec.observation_dtype} {list(spec.observation_shape)}; use dense"
        )
    if not is_compressed(replay, spec):
        _refuse_set(replay, "replay", ["threads"], "a view whose observations are dense")
    if replay.observations != "auto":
        _refuse_set(replay, "replay", ["memory_bytes"], f"observations: {replay.observations}")


def _check_on_policy(config: RunConfig, resolved: base.Resolved, processes: int) -> None:
    """Refuse a staleness that cannot be kept, and settings without effect; ValueError."""
    pace, batch_size, num_envs = config.on_policy, resolved.config.batch_size, config.env.num_envs
    check_staleness(collect=pace.collect, max_staleness=pace.max_staleness, forced_lag=pace.forced_lag)
    if num_envs * processes > batch_size:
        most = batch_size // processes
        remedy = f"env.num_envs {most}" if most else f"algorithm.batch_size {num_envs * processes}"
        raise ValueError(
            f"on_policy.max_staleness: {pace.max_staleness} cannot be kept, for one step of the fleet, {processes} x "
            f"{num_envs} environments, is more than algorithm.batch_size {batch_size}; use {remedy}"
        )
    if pace.stale == "correct" and not resolved.corrects:
        raise ValueError(
            f"on_policy.stale: correct needs importance weights, which estimator {resolved.config.estimator} has not; "
            "use algorithm.estimator vtrace, or on_policy.stale: drop"
        )
    if pace.collect == "sync" and pace.forced_lag:
        raise ValueError(
            f"on_policy.forced_lag: {pace.forced_lag} needs play to go on; use on_policy.collect: async"
        )
    if pace.collect == "sync" and pace.stale == "correct":
        _refuse_set(
            pace, "on_policy", ["max_staleness"], f"{resolved.name} with collect: sync and stale: correct"
        )
    if config.rollout.random_until_learned:
        raise ValueError(
            f"rollout.random_until_learned: true gives actions that {resolved.name} cannot learn from; remove it"
        )
    _refuse_set(config.rollout, "rollout", ["action_noise"], resolved.name)
    _refuse_set(
        config.replay,
        "replay",
        [name for name in type(config.replay).model_fields if name != "max_bytes"],
        resolved.name,
    )
    _refuse_set(config.learner, "learner", ["publish_every_s"], resolved.name)


def _refuse_set(section: Section, prefix: str, names: list[str], what: str) -> None:
    """Refuse settings other than the default that have no effect on something; ValueError."""
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{prefix}.{name}: {getattr(section, name)} has no effect on {what}; remove it")


def create(client: Redis, config: RunConfig, spaces: EnvSpec) -> str:
    """Store the run; from now on learners and workers find it.

    Raises:
        ConfigError: the server's memory cannot hold what the run may need.
    """
    maxmemory = connection.maxmemory(client)
    needed = int(config.replay.max_bytes) + int(config.weights.max_bytes) + CHECKPOINTS_BYTES
    if 0 < maxmemory < needed:
        raise ConfigError(
            f"replay.max_bytes: {config.replay.max_bytes.human_readable()} and what else the run keeps need "
            f"{needed >> 20} MiB, but the server's maxmemory is {maxmemory >> 20} MiB; lower replay.max_bytes or "
            "raise maxmemory"
        )
    return runs.create(client, config, spaces)
