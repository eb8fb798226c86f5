"""The rate limiter between acting and learning: off-policy, samples_per_insert kept on both sides.

With I transitions inserted, W of them for warm-up, u updates of B transitions, S slack steps:

    the learner may update       while  I >= W  and  (u + 1) * B <= samples_per_insert * (I - W)
    the collectors may append    while  I < W + u * B / samples_per_insert + S

So the samples never exceed samples_per_insert per transition after the warm-up, and the collectors are
never more than S steps, plus the fragments already in flight, ahead of that ratio. If both had to wait,
I - W >= u * B / samples_per_insert + S and samples_per_insert * (I - W) < (u + 1) * B, which together
mean samples_per_insert * S < B: such settings are refused, so nothing can deadlock.
The idea: Cassirer et al. 2021 (Reverb), arXiv:2102.04736, the SampleToInsertRatio rate limiter.
"""

from __future__ import annotations

import math


class RateLimiter:
    """Decides who may go on, from two counters alone: no clock, no state, exact integer arithmetic.

    Args:
        samples_per_insert: transitions sampled per transition inserted after the warm-up, above 0.
        warmup_steps: transitions inserted before the first update, at least 0.
        slack_steps: transitions that collectors may be ahead of the ratio, at least batch_size / samples_per_insert:
            enough to pay for one batch.
        batch_size: transitions sampled by one update, at least 1.

    Raises:
        ValueError: names the setting, its value and the nearest one that can be used.
    """

    def __init__(
        self, *, samples_per_insert: float, warmup_steps: int, slack_steps: int, batch_size: int
    ) -> None:
        if not (math.isfinite(samples_per_insert) and samples_per_insert > 0):
            raise ValueError(f"replay.samples_per_insert: {samples_per_insert}; use a finite number above 0")
        # A float is a ratio of two integers; with them no rounding can make both sides wait.
        self._samples, self._inserts = float(samples_per_insert).as_integer_ratio()
        least = -(-batch_size * self._inserts // self._samples)
        if slack_steps < least:
            raise ValueError(
                f"replay.slack_steps: {slack_steps} at replay.samples_per_insert {samples_per_insert:g} pays "
                f"for less than one batch of {batch_size}, so learner and collectors could wait for each "
                f"other forever; use at least {least}"
            )
        self._warmup_steps = warmup_steps
        self._slack_steps = slack_steps
        self._batch_size = batch_size

    def can_sample(self, num_inserted: int, num_updates: int) -> bool:
        """Return whether the learner may do update number `num_updates` (counted from 0) now.

        Args:
            num_inserted: transitions appended since the start of the run, warm-up included.
            num_updates: updates finished.
        """
        paid = num_inserted - self._warmup_steps
        return paid >= 0 and (num_updates + 1) * self._batch_size * self._inserts <= self._samples * paid

    def samples_per_insert(self, num_inserted: int, num_updates: int) -> float:
        """Return the transitions sampled so far per transition appended after the warm-up."""
        return num_updates * self._batch_size / max(num_inserted - self._warmup_steps, 1)

    def step_budget(self, num_updates: int) -> int:
        """Return the transitions below which collectors may append.

        A fragment is accepted whole, so each process may pass the budget by one fragment.

        Args:
            num_updates: updates finished.
        """
        due = -(-num_updates * self._batch_size * self._inserts // self._samples)  # rounded up
        return self._warmup_steps + due + self._slack_steps
