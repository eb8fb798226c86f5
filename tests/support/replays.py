"""Replays to test with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from support.reference_items import Transition

from ddrl.replay.rate_limiter import RateLimiter
from ddrl.replay.replay import Replay
from ddrl.replay.sequences import SequenceItems
from ddrl.replay.transitions import TransitionItems
from ddrl.types import Batch, Fragment


def make_replay(
    items: TransitionItems | SequenceItems,
    *,
    capacity: int,
    batch_size: int = 16,
    warmup_steps: int = 1,
    slack_steps: int = 100,
    **options: Any,
) -> Replay:
    """Return an empty replay that samples 32 transitions per insert."""
    pace = {"samples_per_insert": 32.0, "warmup_steps": warmup_steps, "slack_steps": slack_steps}
    limiter = RateLimiter(**pace, batch_size=batch_size)
    return Replay(items, limiter, capacity=capacity, batch_size=batch_size, **{"seed": 9} | options)


def admit(replay: Replay, fragment: Fragment, *, version: int = 0) -> None:
    """Admit a fragment as entry b"<seq>-0"."""
    replay.admit(replay.pack(fragment), b"%d-0" % fragment.seq, version=version)


def changed(fragment: Fragment, **columns: Any) -> Fragment:
    """Return a fragment with other columns; those it has no field for are extras, and None removes one of these."""
    fields = {name: value for name, value in columns.items() if hasattr(fragment, name)}
    extras = dict(fragment.extras) | {name: value for name, value in columns.items() if name not in fields}
    kept = {name: value for name, value in extras.items() if value is not None}
    return replace(fragment, **{"extras": kept} | fields)


def gather(replay: Replay, position: Any) -> Any:
    """Return the items at these positions, 0 the oldest."""
    return replay.plan(np.asarray(position, np.int64))()


def gather_all(replay: Replay) -> Any:
    """Return all items held."""
    return gather(replay, np.arange(replay.num_items))


class CheckedReplay:
    """A replay beside the plain list of the items that it must hold."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._held: list[tuple[bytes, int, int, list[Any]]] = []
        """Id, transitions, observations and items of each fragment."""
        self._num_fragments = self._num_items = 0  # admitted
        self._plans: list[tuple[Callable[[], Any], list[Any]]] = []
        replay.check_valid()

    def admit(self, fragment: Fragment, items: list[Any]) -> Any:
        """Admit a fragment that must give these items; plan to gather all held, in any order; its TD errors."""
        replay, entry_id = self._replay, b"%d-0" % self._num_fragments
        packed = replay.pack(fragment)
        self._num_fragments, self._num_items = self._num_fragments + 1, self._num_items + len(items)
        if items:  # others are not held
            self._held.append((entry_id, fragment.num_transitions, len(packed.cut.block.observation), items))
        while len(self._held) > 1 and (
            sum(num_transitions for _, num_transitions, _, _ in self._held) > replay.capacity
            or sum(len(items) for _, _, _, items in self._held) > replay.capacity
            or sum(num_rows for _, _, num_rows, _ in self._held) > replay._most_rows
        ):
            del self._held[0]
        replay.admit(packed, entry_id, version=0)
        overwrite(vars(fragment) | dict(fragment.extras))  # it was copied
        replay.check_valid()
        expected = [item for _, _, _, items in self._held for item in items]
        assert len(replay) == sum(num_transitions for _, num_transitions, _, _ in self._held)
        assert (replay.num_items, replay.first_item) == (len(expected), self._num_items - len(expected))
        assert replay.oldest_entry_id == (self._held[0][0] if self._held else None)
        if expected:
            order = np.random.default_rng(self._num_fragments).integers(0, len(expected), 2 * len(expected))
            self._plans.append((replay.plan(order), [expected[i] for i in order]))
        return packed.cut.td_error

    def check(self, assert_equal: Callable[[Any, list[Any]], None]) -> None:
        """Gather what was planned, though much of it has left the replay; batches share no memory."""
        for gather_batch, expected in self._plans:
            batch = gather_batch()
            assert_equal(batch, expected)
            overwrite(vars(batch))


def overwrite(columns: Mapping[str, Any]) -> None:
    """Set all arrays to 1."""
    for column in columns.values():
        if isinstance(column, np.ndarray):
            column[...] = 1


def assert_transitions(batch: Batch, expected: list[Transition]) -> None:
    """Exactly these transitions, in this order."""
    equal = partial(np.testing.assert_array_equal, strict=True)
    equal(batch.observation, np.stack([item.observation for item in expected]))
    equal(batch.action, np.array([item.action for item in expected], batch.action.dtype))
    equal(batch.n_step_return, np.float32([item.n_step_return for item in expected]))
    equal(batch.bootstrap_discount, np.float32([item.bootstrap_discount for item in expected]))
    for found, item in zip(batch.next_observation, expected, strict=True):
        assert item.next_observation is None or np.array_equal(found, item.next_observation)


def assert_distributed(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square test within five standard deviations: as far from `expected` as chance has it, and no closer."""
    degrees = len(expected) - 1  # mean; the variance is twice that
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5
