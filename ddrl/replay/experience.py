"""Where a learner's batches come from: sampled from a view, or each fragment once."""

from __future__ import annotations

import logging
from typing import Any

from ddrl.config import ReplayConfig, RolloutConfig, RunConfig
from ddrl.replay.blocks import is_image
from ddrl.replay.fifo import Fifo
from ddrl.replay.prioritized import Priorities
from ddrl.replay.rate_limiter import Pacing
from ddrl.replay.rows import CompressedRows, DenseRows
from ddrl.replay.sampled import Sampled
from ddrl.replay.sequence_view import SequenceView
from ddrl.replay.sequence_view import expected_rows as expected_rows_of_sequences
from ddrl.replay.view import TransitionView, dense_bytes, expected_rows
from ddrl.types import EnvSpec, SequenceShape

log = logging.getLogger(__name__)


def experience(
    config: RunConfig, options: Any, spec: EnvSpec, *, on_policy: bool, sequences: SequenceShape | None = None
) -> Sampled | Fifo:
    """What a run's config asks for.

    Args:
        options: the algorithm's: gamma and batch_size; off-policy n_step too; if `prioritized` is among them and true,
            the exponents; with sequences, recurrent_state_size, priority_mix and rescale_values.
        spec: of the environment.
        on_policy: each fragment is learned from once, in order.
        sequences: shape of what a recurrent algorithm learns from; None: transitions.

    Raises:
        ValueError: a pace that cannot be kept, or a capacity that holds nothing.
    """
    if on_policy:
        pace = config.on_policy.model_dump()
        return Fifo(batch_size=options.batch_size, gamma=options.gamma, frame_stack=spec.frame_stack, **pace)
    replay = config.replay
    pacing = Pacing(
        samples_per_insert=replay.samples_per_insert,
        warmup_steps=replay.warmup_steps,
        slack_steps=replay.slack_steps,
        batch_size=samples_per_update(options),
    )
    compressed = is_compressed(replay, spec, sequences)
    store = CompressedRows if compressed else DenseRows
    rows = store(frame_stack=spec.frame_stack, expected_rows=_expected_rows(replay, spec, sequences))
    view: TransitionView | SequenceView
    if sequences is None:
        view = TransitionView(
            rows,
            capacity=replay.capacity,
            gamma=options.gamma,
            n_step=options.n_step,
            frame_stack=spec.frame_stack,
        )
    else:
        view = SequenceView(
            rows,
            shape=sequences,
            capacity=replay.capacity,
            gamma=options.gamma,
            n_step=options.n_step,
            memory_size=options.recurrent_state_size,
            priority_mix=options.priority_mix,
            rescaled=options.rescale_values,
        )
    priorities = None
    if getattr(options, "prioritized", False):
        largest = longest_fragment(config.rollout, sequences) * config.env.num_envs
        priorities = Priorities(
            replay.capacity + largest,  # the new come before the old go
            exponent=options.priority_exponent,
            importance_exponent=options.importance_exponent,
            final_importance_exponent=options.final_importance_exponent,
            anneal_updates=options.importance_anneal_updates,
        )
    return Sampled(
        view,
        pacing,
        batch_size=options.batch_size,
        seed=config.seed,
        grain=max(1, replay.slack_steps // 8),
        priorities=priorities,
        threads=replay.threads if compressed else 0,
        lockstep=config.learner.lockstep,
    )


def samples_per_update(options: Any) -> int:
    """Transitions that an update learns from: batch_size, or that many sequences' steps."""
    samples: int = getattr(options, "transitions_per_update", options.batch_size)
    return samples


def longest_fragment(rollout: RolloutConfig, sequences: SequenceShape | None) -> int:
    """The largest T that a collector sends: whole strides of sequences."""
    stride = sequences.stride if sequences else 1
    return -(-rollout.max_fragment_steps // stride) * stride


def is_compressed(replay: ReplayConfig, spec: EnvSpec, sequences: SequenceShape | None = None) -> bool:
    """Whether the learner holds observations compressed; of sequences of that shape, None: transitions."""
    if replay.observations != "auto":
        return replay.observations == "compressed"
    needed = dense_bytes(
        capacity=replay.capacity,
        observation_shape=spec.observation_shape,
        observation_dtype=spec.observation_dtype,
        frame_stack=spec.frame_stack,
        num_rows=_expected_rows(replay, spec, sequences),
    )
    return is_image(spec.observation_dtype, spec.observation_shape) and needed > int(replay.memory_bytes)


def _expected_rows(replay: ReplayConfig, spec: EnvSpec, sequences: SequenceShape | None) -> int:
    if sequences is None:
        return expected_rows(replay.capacity)
    return expected_rows_of_sequences(replay.capacity, sequences, spec.frame_stack)


def to_refill(held: int, rebuilt: int, warmup_steps: int) -> int:
    """Steps to be played before updates go on with a view that has lost its stream: it is warmed up anew.

    Args:
        held: transitions of the view, as its checkpoint says.
        rebuilt: of these, found in the stream.
        warmup_steps: transitions before the first update.
    """
    missing = min(warmup_steps, held) - rebuilt
    if missing > 0:
        log.warning("the stream has lost what was held; updates go on after %d more steps", missing)
    return max(0, missing)
