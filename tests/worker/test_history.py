"""The last steps of a producer: what they lead, what becomes of their finals, and that they are copies."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.worker.history import History


def played(begin: int, end: int) -> np.ndarray:
    """Steps `begin` to `end` of two environments, each value its own: [T, 2] float32."""
    return np.stack([np.arange(begin, end), 1000 + np.arange(begin, end)], axis=1).astype(np.float32)


def test_nothing_is_held_at_first() -> None:
    history = History(3)
    column = played(0, 4)
    assert (len(history), history.finals) == (0, {})
    assert history.lead("reward", column) is column


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_it_leads_whatever_comes_with_the_last_steps(num_steps: int) -> None:
    """Fragments of any length, shorter ones than the history too: context and new steps are one piece of the past."""
    history, generator, time = History(num_steps), np.random.default_rng(num_steps), 0
    for _ in range(40):
        end = time + int(generator.integers(1, 6))
        context = min(time, num_steps)
        assert len(history) == context
        reward = history.lead("reward", played(time, end))
        np.testing.assert_array_equal(reward, played(time - context, end))
        assert reward.dtype == np.float32
        observation = np.concatenate([reward, played(end, end + 1)])  # has a row more than the others
        history.keep({"observation": observation, "reward": reward}, {})
        kept = min(end, num_steps)
        np.testing.assert_array_equal(history.lead("observation", observation[:0]), played(end - kept, end))
        time = end


def test_what_was_not_there_before_leads_with_zeros() -> None:
    """Random play gives no further columns; those of the policy after it begin with zeros."""
    history = History(2)
    history.keep({"reward": played(0, 5)}, {})
    value = history.lead("state_value", np.ones((3, 2, 4), np.float16))
    assert value.dtype == np.float16
    np.testing.assert_array_equal(value[:2], np.zeros((2, 2, 4)))
    np.testing.assert_array_equal(value[2:], np.ones((3, 2, 4)))


def test_finals_are_counted_from_the_new_first_row() -> None:
    history = History(3)
    finals = {(step, lane): np.array([step, lane]) for step, lane in [(0, 1), (2, 0), (3, 1), (4, 0)]}
    history.keep({"reward": played(0, 5)}, finals)
    assert {place: final.tolist() for place, final in history.finals.items()} == {
        (0, 0): [2, 0],
        (1, 1): [3, 1],
        (2, 0): [4, 0],
    }
    history.keep({"reward": history.lead("reward", played(5, 6))}, history.finals)  # a step later
    assert list(history.finals) == [(0, 1), (1, 0)]
    short = History(3)
    short.keep({"reward": played(0, 2)}, {(0, 0): np.zeros(1), (1, 1): np.ones(1)})
    assert list(short.finals) == [(0, 0), (1, 1)]  # fewer steps than wanted: all of them


def test_it_holds_copies() -> None:
    history, reward = History(2), played(0, 4)
    history.keep({"reward": reward}, {})
    reward[:] = -1
    lead = history.lead("reward", played(4, 5))
    np.testing.assert_array_equal(lead, played(2, 5))
    lead[:] = -1
    np.testing.assert_array_equal(history.lead("reward", played(4, 5)), played(2, 5))


def test_without_context_nothing_is_kept() -> None:
    history, column = History(0), played(4, 5)
    history.keep({"reward": played(0, 4)}, {(3, 0): np.zeros(1)})
    assert (len(history), history.finals) == (0, {})
    assert history.lead("reward", column) is column
