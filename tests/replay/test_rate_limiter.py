"""The rate limiter: hand numbers, no deadlock, and a bounded ratio under any schedule."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ddrl.replay.rate_limiter import RateLimiter


def make(**options: Any) -> RateLimiter:
    return RateLimiter(
        **{"samples_per_insert": 32, "warmup_steps": 0, "slack_steps": 100, "batch_size": 256} | options
    )


def test_hand_numbers() -> None:
    limiter = make(warmup_steps=1000)
    # One batch of 256 is paid for by 8 inserts at 32 samples each.
    cases = {(999, 0): False, (1007, 0): False, (1008, 0): True, (1008, 1): False, (1016, 1): True}
    assert {counts: limiter.can_sample(*counts) for counts in cases} == cases
    assert [limiter.step_budget(updates) for updates in (0, 1, 10)] == [1100, 1108, 1180]
    rounded_up = make(samples_per_insert=3, slack_steps=4, batch_size=10)
    assert [rounded_up.step_budget(updates) for updates in (0, 1, 2, 3)] == [4, 8, 11, 14]


@st.composite
def valid_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid settings, often at the very edge of deadlock."""
    ratio = draw(st.floats(0.01, 200) | st.sampled_from([0.1, 1 / 3, 1.0, 32.0]))
    batch_size = draw(st.integers(1, 600))
    least = -(-batch_size // Fraction(ratio))
    slack = int(least) + draw(st.sampled_from([0, 1, 1000]))
    warmup = draw(st.integers(0, 2000))
    return dict(samples_per_insert=ratio, warmup_steps=warmup, slack_steps=slack, batch_size=batch_size)


@hypothesis_settings(max_examples=100, deadline=None)
@given(settings=valid_settings(), data=st.data())
def test_never_a_deadlock_and_the_ratio_stays_bounded(settings: dict[str, Any], data: st.DataObject) -> None:
    limiter = make(**settings)
    ratio, warmup = Fraction(settings["samples_per_insert"]), int(settings["warmup_steps"])
    slack, batch = int(settings["slack_steps"]), int(settings["batch_size"])
    largest = data.draw(st.sampled_from([1, 7, 64, 5000]), label="largest fragment")
    preferences = data.draw(st.lists(st.booleans(), min_size=1, max_size=8), label="who goes first, repeated")
    sizes = data.draw(st.lists(st.integers(1, largest), min_size=1, max_size=8), label="sizes, repeated")
    inserted = updates = 0
    for step in range(400):
        may_sample = limiter.can_sample(inserted, updates)
        may_append = inserted < limiter.step_budget(updates)
        assert may_sample or may_append
        if may_sample and (preferences[step % len(preferences)] or not may_append):
            updates += 1
        else:
            inserted += sizes[step % len(sizes)]
        samples = updates * batch
        assert samples <= ratio * max(inserted - warmup, 0)
        assert inserted - warmup < samples / ratio + slack + largest


@given(settings=valid_settings(), inserted=st.integers(0, 10**12), updates=st.integers(0, 10**10))
def test_at_any_counters_one_side_may_go_on(settings: dict[str, Any], inserted: int, updates: int) -> None:
    limiter = make(**settings)
    assert limiter.can_sample(inserted, updates) or inserted < limiter.step_budget(updates)
    # The same at the moment at which the collectors have just used up their budget.
    assert limiter.can_sample(limiter.step_budget(updates), updates)


@given(settings=valid_settings())
def test_less_slack_than_a_batch_needs_is_refused(settings: dict[str, Any]) -> None:
    ratio, batch_size = Fraction(settings["samples_per_insert"]), int(settings["batch_size"])
    least = int(-(-batch_size // ratio))
    message = rf"replay\.slack_steps: {least - 1} .* batch of {batch_size}.* use at least {least}$"
    with pytest.raises(ValueError, match=message):
        make(**settings | {"slack_steps": least - 1})


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="samples_per_insert"):
        make(samples_per_insert=ratio)
