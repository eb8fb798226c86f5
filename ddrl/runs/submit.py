"""Submit a run: check all of its configuration first, then create it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ddrl import envs
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig, Section
from ddrl.envs import requirements
from ddrl.replay.experience import is_compressed, longest_fragment_steps, rate_limiter
from ddrl.replay.fifo import check_staleness
from ddrl.replay.storage import is_image
from ddrl.store import connection, runs
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from redis import Redis

FRAGMENTS_IN_BUDGET = 8  # uncompressed: below, one fragment could be more than what the learner keeps free
CHECKPOINTS_BYTES = 64 * 1024**2  # two checkpoints, with room for their parts and the server's own needs


def prepare(config: RunConfig, *, processes: int = 1) -> EnvSpec:
    """Check that environment, algorithm and pace fit together; return the environment's spaces.

    Args:
        processes: least number that will play.

    Raises:
        EnvError: the environment cannot be made here.
        ConfigError: the algorithm cannot be used, or cannot serve this environment, or settings contradict.
    """
    spaces = envs.describe(config.env)
    check(config, spaces, processes=processes)
    return spaces


def check(config: RunConfig, spaces: EnvSpec, *, processes: int = 1) -> base.Resolved:
    """Check that algorithm and pace fit together on an environment of these spaces; return the algorithm.

    Raises:
        ConfigError: the algorithm cannot be used, or cannot serve this environment, or settings contradict.
    """
    resolved = base.resolve(config, spaces)
    try:
        if resolved.on_policy:
            _check_on_policy(config, resolved, processes)
        else:
            _check_off_policy(config, resolved)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_budget(config, resolved)
    return resolved


def _check_budget(config: RunConfig, resolved: base.Resolved) -> None:
    """Refuse a stream that holds too few of the largest fragments; ConfigError."""
    longest, num_envs = longest_fragment_steps(config.rollout, resolved.sequences), config.env.num_envs
    if resolved.on_policy:
        longest = min(longest, resolved.config.batch_size // num_envs + 1)
    lane = FRAGMENTS_IN_BUDGET * num_envs
    needed = lane * _lane_bytes(resolved, longest)
    budget = int(config.replay.max_bytes)
    if budget < needed:
        stride = resolved.sequences.stride if resolved.sequences else 1
        steps = longest
        while steps > 0 and lane * _lane_bytes(resolved, steps) > budget:
            steps -= stride
        remedy = f", or rollout.max_fragment_steps {steps}" if steps > 0 else ""
        raise ConfigError(
            f"replay.max_bytes: {budget} holds fewer than {FRAGMENTS_IN_BUDGET} of the largest fragments; use at least "
            f"{needed}{remedy}"
        )


def _lane_bytes(resolved: base.Resolved, steps: int) -> int:
    """Return the uncompressed bytes of one environment's part of a fragment of `steps`, with its context."""
    spec, sequences = resolved.spec, resolved.sequences
    row = np.dtype(spec.observation_dtype).itemsize * math.prod(spec.observation_shape)
    # Two actions, a reward, a log probability or two values, flags.
    transition = row + 8 * math.prod(spec.action_shape) + 16
    states = 0
    if sequences is not None:  # float16 states before sequences that begin amid an episode, and their indices
        states = -(-steps // sequences.stride) * (2 * resolved.config.recurrent_state_size + 8)
    return row + (resolved.context + steps) * transition + states


def _check_off_policy(config: RunConfig, resolved: base.Resolved) -> None:
    """Refuse a pace that cannot be kept, and settings without effect; ValueError."""
    replay, spec, options = config.replay, resolved.spec, resolved.config
    rate_limiter(replay, options)
    _refuse_set(config, "on_policy", [*type(config.on_policy).model_fields], f"algorithm {resolved.name}")
    if spec.action_kind != "continuous":
        what = f"algorithm {resolved.name} with {spec.action_kind} actions"
        _refuse_set(config, "rollout", ["action_noise"], what)
    fragment_steps, num_envs = config.rollout.max_fragment_steps, config.env.num_envs
    stride = resolved.sequences.stride if resolved.sequences else 1
    if fragment_steps < stride:
        raise ValueError(
            f"rollout.max_fragment_steps: {fragment_steps} is less than the {stride} steps from one sequence to the "
            f"next, by which fragments grow; use at least {stride}, or more algorithm.overlap"
        )
    if options.n_step > fragment_steps:
        raise ValueError(
            f"algorithm.n_step: {options.n_step} is longer than a fragment, rollout.max_fragment_steps "
            f"{fragment_steps}; use at most {fragment_steps}"
        )
    if config.rollout.random_until_learned and not resolved.can_start_at_random:
        raise ValueError(
            f"rollout.random_until_learned: true gives no recurrent states, which {resolved.name} needs; remove it"
        )
    largest = longest_fragment_steps(config.rollout, resolved.sequences) * num_envs
    if resolved.sequences is not None and resolved.sequences.length > replay.capacity:
        raise ValueError(
            f"replay.capacity: {replay.capacity} cannot hold one sequence of {resolved.sequences.length} steps; use at "
            f"least {max(largest, resolved.sequences.length)}"
        )
    if largest > replay.capacity:
        most = replay.capacity // (num_envs * stride) * stride
        remedy = f"use at most {most}" if most else f"use replay.capacity {largest}"
        strides = f", in strides of {stride}," if stride > 1 else ""
        raise ValueError(
            f"rollout.max_fragment_steps: {fragment_steps} steps of {num_envs} environments{strides} exceed "
            f"replay.capacity {replay.capacity}; {remedy}"
        )
    are_images = is_image(spec.observation_dtype, spec.observation_shape)
    if replay.observations == "compressed" and not are_images:
        raise ValueError(
            f"replay.observations: compressed is for images, but {spec.env_id} has observations "
            f"{spec.observation_dtype} {list(spec.observation_shape)}; use dense"
        )
    if not is_compressed(replay, spec, resolved.sequences):
        _refuse_set(config, "replay", ["threads"], "a view whose observations are dense")
    if replay.observations != "auto":
        _refuse_set(config, "replay", ["memory_bytes"], f"observations: {replay.observations}")
    if not are_images:
        _refuse_set(config, "replay", ["memory_bytes"], "observations that are no images")


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
    if pace.stale == "correct" and not resolved.config.corrects_staleness:
        raise ValueError(
            f"on_policy.stale: correct needs importance weights, which estimator {resolved.config.estimator} has not; "
            "use algorithm.estimator vtrace, or on_policy.stale: drop"
        )
    if pace.collect == "sync" and pace.forced_lag:
        raise ValueError(
            f"on_policy.forced_lag: {pace.forced_lag} needs play to go on; use on_policy.collect: async"
        )
    if pace.collect == "sync" and pace.stale == "correct":
        what = f"{resolved.name} with collect: sync and stale: correct"
        _refuse_set(config, "on_policy", ["max_staleness"], what)
    if config.rollout.random_until_learned:
        raise ValueError(
            f"rollout.random_until_learned: true gives actions that {resolved.name} cannot learn from; remove it"
        )
    what = f"algorithm {resolved.name}"
    _refuse_set(config, "rollout", ["action_noise"], what)
    _refuse_set(
        config, "replay", [name for name in type(config.replay).model_fields if name != "max_bytes"], what
    )
    _refuse_set(config, "learner", ["publish_every_s", "lockstep"], what)


def _refuse_set(config: RunConfig, section: str, names: Iterable[str], what: str) -> None:
    """Refuse settings other than the default that have no effect on something; ValueError."""
    part: Section = getattr(config, section)
    for name in names:
        if (value := getattr(part, name)) != type(part).model_fields[name].default:
            raise ValueError(f"{section}.{name}: {value} has no effect on {what}; remove it")


def create(
    client: Redis, config: RunConfig, spaces: EnvSpec, *, initial: tuple[str, bytes] | None = None
) -> str:
    """Create the run: from now on learners and workers find it. Return its id.

    Args:
        client: connection to the server.
        config: of the run.
        spaces: as `prepare` returned them.
        initial: source of the initial weights, and the weights as safetensors; None: random weights.

    Raises:
        ConfigError: the server's memory cannot hold what the run may need.
    """
    check_memory(client, config)
    network = requirements.custom_network(config)
    return runs.create(
        client,
        config,
        spaces,
        queues=(
            envs.queue_for("ddrl.rollout", config.env.id, network),
            envs.queue_for("ddrl.evaluate", config.env.id, network),
        ),
        versions=requirements.run_versions(config),
        initial=initial,
    )


def check_memory(client: Redis, config: RunConfig, *, run: str | None = None) -> None:
    """Refuse a run that may need more than the server's memory holds; ConfigError.

    Args:
        client: connection to the server.
        config: of the run.
        run: its id if it exists already.
    """
    maxmemory = connection.maxmemory(client)
    others = runs.reserved_bytes(client, but=run)
    needed = int(config.replay.max_bytes) + int(config.weights.max_bytes) + CHECKPOINTS_BYTES
    if 0 < maxmemory < needed + others:
        also = f", the streams of other runs {others >> 20} MiB," if others else ""
        raise ConfigError(
            f"replay.max_bytes: {config.replay.max_bytes.human_readable()} and what else the run keeps need "
            f"{needed >> 20} MiB{also or ','} but the server's maxmemory is {maxmemory >> 20} MiB; lower "
            "replay.max_bytes or raise maxmemory"
        )
