"""Where a learner's batches come from: sampled from a view, or each fragment once."""

from __future__ import annotations

from typing import Any

from ddrl.config import RunConfig
from ddrl.replay.fifo import Fifo
from ddrl.replay.pacing import Pacing
from ddrl.replay.sampled import Sampled
from ddrl.replay.view import DenseView


def experience(config: RunConfig, options: Any, *, on_policy: bool) -> Sampled | Fifo:
    """What a run's config asks for.

    Args:
        options: the algorithm's: gamma and batch_size, off-policy n_step too.
        on_policy: each fragment is learned from once, in order.

    Raises:
        ValueError: a pace that cannot be kept.
    """
    if on_policy:
        return Fifo(batch_size=options.batch_size, gamma=options.gamma, **config.on_policy.model_dump())
    replay = config.replay
    pacing = Pacing(
        samples_per_insert=replay.samples_per_insert,
        warmup_steps=replay.warmup_steps,
        slack_steps=replay.slack_steps,
        batch_size=options.batch_size,
    )
    view = DenseView(capacity=replay.capacity, gamma=options.gamma, n_step=options.n_step)
    grain = max(1, replay.slack_steps // 8)
    return Sampled(view, pacing, batch_size=options.batch_size, seed=config.seed, grain=grain)
