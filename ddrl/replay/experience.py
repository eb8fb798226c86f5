"""Make the experience that a run's config asks for: a replay, or for on-policy algorithms a queue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddrl.config import ReplayConfig, RolloutConfig, RunConfig
from ddrl.envs.goals import find_goals
from ddrl.replay.fifo import Fifo
from ddrl.replay.hindsight import Hindsight
from ddrl.replay.prioritized import Priorities
from ddrl.replay.rate_limiter import RateLimiter
from ddrl.replay.replay import Replay
from ddrl.replay.sequences import SequenceItems, expected_sequence_rows
from ddrl.replay.transitions import TransitionItems, expected_rows
from ddrl.types import EnvSpec, SequenceShape

if TYPE_CHECKING:
    import torch

    from ddrl.networks.ranks import Ranks

_TRANSITION_BYTES = 8 + 4 + 4 + 4 + 8  # row, ahead, n_step_return, bootstrap_discount, discrete action


def make_experience(
    config: RunConfig,
    options: Any,
    spec: EnvSpec,
    *,
    recorded: int | None = None,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
) -> Replay | Fifo:
    """Return an empty replay, or for an on-policy algorithm a queue.

    Args:
        config: of the run.
        options: the algorithm's, an `AlgorithmConfig`: on_policy, sequences, gamma and batch_size; off-policy n_step
            too; if `prioritized` is among them and true, the exponents; with sequences, recurrent_state_size,
            priority_mix and rescale_values.
        spec: of the environment.
        recorded: context steps of the fragments, which another algorithm may have recorded; None: what is needed.
        device: the learner's; a GPU holds images where they fit.
        ranks: that learn together; None: one alone.

    Raises:
        ValueError: a pace that cannot be kept, or a capacity that holds nothing.
        EnvError: with replay.hindsight, the environment cannot be made here, or has no goals.
    """
    if options.on_policy:
        return Fifo(options, config.on_policy, spec, ranks=ranks)
    replay, sequences = config.replay, options.sequences
    priorities = None
    if getattr(options, "prioritized", False):
        steps = longest_fragment_steps(config.rollout, sequences) + options.n_step - 1
        largest = steps * config.env.num_envs
        # New items come before old ones go.
        priorities = Priorities(options, (replay.capacity + largest) * (1 + replay.hindsight))
    common = {"gamma": options.gamma, "n_step": options.n_step, "frame_stack": spec.frame_stack}
    hindsight = Hindsight(find_goals(config.env), replay.hindsight) if replay.hindsight else None
    repeated = None if recorded is None else recorded - spec.frame_stack + 1
    items: TransitionItems | SequenceItems = TransitionItems(**common, repeated=repeated, hindsight=hindsight)
    if sequences is not None:
        items = SequenceItems(
            **common,
            shape=sequences,
            state_size=options.recurrent_state_size,
            priority_mix=options.priority_mix,
            rescaled=options.rescale_values,
        )
    place = device if fits_on(device, replay, spec, sequences) else None
    compressed = place is None and is_compressed(replay, spec, sequences)
    return Replay(
        items,
        rate_limiter(replay, options),
        capacity=replay.capacity,
        batch_size=options.batch_size,
        seed=config.seed,
        compressed=compressed,
        device=place,
        most_bytes=int(replay.memory_bytes),
        priorities=priorities,
        threads=replay.threads if compressed else 0,
        lockstep=config.learner.lockstep,
        budget_increment=max(1, replay.slack_steps // 8),
        ranks=ranks,
    )


def rate_limiter(replay: ReplayConfig, options: Any) -> RateLimiter:
    """Return the rate limiter of a run; `options` are the algorithm's.

    Raises:
        ValueError: a pace that cannot be kept.
    """
    pace = replay.model_dump(include={"samples_per_insert", "slack_steps"})
    pace["warmup_steps"] = warmup_steps(replay, options)
    # A sequence counts with all of its steps.
    return RateLimiter(**pace, batch_size=getattr(options, "transitions_per_update", options.batch_size))


def warmup_steps(replay: ReplayConfig, options: Any) -> int:
    """Return the transitions before the first update; `options` are the algorithm's."""
    return replay.warmup_steps or min(options.warmup_steps, replay.capacity)


def longest_fragment_steps(rollout: RolloutConfig, sequences: SequenceShape | None) -> int:
    """Return the largest T that a collector sends: whole strides of sequences."""
    stride = sequences.stride if sequences else 1
    return -(-rollout.max_fragment_steps // stride) * stride


def is_compressed(replay: ReplayConfig, spec: EnvSpec, sequences: SequenceShape | None) -> bool:
    """Return whether a replay holds its observations compressed.

    With `auto`, images are where dense ones would need more than `memory_bytes`. What a replay of sequences holds
    beside its images is about a hundredth of them.
    """
    if replay.observations != "auto":
        return replay.observations == "compressed"
    return _image_bytes(replay, spec, sequences) > int(replay.memory_bytes)


def fits_on(
    device: torch.device | None, replay: ReplayConfig, spec: EnvSpec, sequences: SequenceShape | None
) -> bool:
    """Return whether a learner's device is a GPU whose free memory is twice what a replay's images need."""
    needed = _image_bytes(replay, spec, sequences)
    if device is None or device.type != "cuda" or replay.observations == "compressed" or not needed:
        return False
    import torch

    return 2 * needed <= torch.cuda.mem_get_info(device)[0]


def _image_bytes(replay: ReplayConfig, spec: EnvSpec, sequences: SequenceShape | None) -> int:
    """Return the bytes of a replay of images that holds them as they are; 0 for other observations."""
    if spec.observation_dtype != "uint8":
        return 0
    num_rows = expected_rows(replay.capacity)
    if sequences is not None:
        num_rows = expected_sequence_rows(replay.capacity, sequences, spec.frame_stack)
    row = math.prod(spec.observation_shape) + 4 * (spec.frame_stack > 1)
    return num_rows * row + replay.capacity * _TRANSITION_BYTES
