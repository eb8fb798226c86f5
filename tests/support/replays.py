"""Replays to test with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ddrl.replay.rate_limiter import RateLimiter
from ddrl.replay.replay import Replay
from ddrl.replay.sequences import SequenceItems
from ddrl.replay.transitions import TransitionItems
from ddrl.types import Fragment


def make_replay(
    items: TransitionItems | SequenceItems,
    *,
    capacity: int,
    batch_size: int = 16,
    warmup_steps: int = 1,
    slack_steps: int = 100,
    **options: Any,
) -> Replay:
    """An empty replay that samples 32 transitions per insert."""
    limiter = RateLimiter(
        samples_per_insert=32.0, warmup_steps=warmup_steps, slack_steps=slack_steps, batch_size=batch_size
    )
    return Replay(items, limiter, capacity=capacity, batch_size=batch_size, **{"seed": 9} | options)


def admit(replay: Replay, fragment: Fragment, *, version: int = 0) -> None:
    """Admit a fragment as entry b"<seq>-0"."""
    replay.admit(replay.pack(fragment), b"%d-0" % fragment.seq, version=version)


def changed(fragment: Fragment, **columns: Any) -> Fragment:
    """A fragment with other columns; those it has no field for are extras, and None removes one of these."""
    fields = {name: value for name, value in columns.items() if hasattr(fragment, name)}
    extras = dict(fragment.extras) | {name: value for name, value in columns.items() if name not in fields}
    kept = {name: value for name, value in extras.items() if value is not None}
    return replace(fragment, **{"extras": kept} | fields)


def gather(replay: Replay, position: Any) -> Any:
    """The items at these positions, 0 the oldest."""
    return replay.plan(np.asarray(position, np.int64))()


def gather_all(replay: Replay) -> Any:
    """All items held."""
    return gather(replay, np.arange(replay.num_items))


def assert_distributed(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square test within five standard deviations: as far from `expected` as chance has it, and no closer."""
    degrees = len(expected) - 1  # mean; the variance is twice that
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5
