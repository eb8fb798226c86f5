"""Submit: everything that can be refused is refused here, before anything exists."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ddrl import envs
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.replay.pacing import Pacing
from ddrl.store import connection, runs
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from redis import Redis

FRAGMENTS_IN_BUDGET = 8  # uncompressed: below, one fragment could be more than what the learner keeps free
CHECKPOINTS_BYTES = 64 * 1024**2  # two checkpoints, with room for their parts and the server's own needs


def prepare(config: RunConfig) -> EnvSpec:
    """Check that environment, algorithm and pace fit together; the environment's spaces.

    Raises:
        EnvError: the environment cannot be made here.
        ConfigError: the algorithm cannot be used, or cannot serve this environment, or settings contradict.
    """
    spaces = envs.describe(config.env)
    resolved = base.resolve(config, spaces)
    try:
        Pacing.check(
            samples_per_insert=config.replay.samples_per_insert,
            warmup_steps=config.replay.warmup_steps,
            slack_steps=config.replay.slack_steps,
            batch_size=resolved.config.batch_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    largest = config.rollout.max_fragment_steps * config.env.num_envs
    if largest > config.replay.capacity:
        most = config.replay.capacity // config.env.num_envs
        raise ConfigError(
            f"rollout.max_fragment_steps: {config.rollout.max_fragment_steps} steps of {config.env.num_envs} "
            f"environments exceed replay.capacity {config.replay.capacity}; use at most {max(most, 1)}"
        )
    row = np.dtype(spaces.observation_dtype).itemsize * math.prod(spaces.observation_shape)
    transition = row + 4 * math.prod(spaces.action_shape) + 8  # an action, a reward, two flags
    needed = FRAGMENTS_IN_BUDGET * largest * transition
    if config.replay.max_bytes < needed:
        steps = int(config.replay.max_bytes) // (FRAGMENTS_IN_BUDGET * config.env.num_envs * transition)
        raise ConfigError(
            f"replay.max_bytes: {int(config.replay.max_bytes)} holds fewer than {FRAGMENTS_IN_BUDGET} of the largest "
            f"fragments; use at least {needed}, or rollout.max_fragment_steps {max(steps, 1)}"
        )
    return spaces


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
