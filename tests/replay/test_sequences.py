"""How fragments are cut into sequences, and how surprising these are."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_sequences import Player

from ddrl.replay.sequences import (
    Cuts,
    at_beginning,
    cut,
    cut_fragment,
    memory_rows,
    priorities,
    targets,
)
from ddrl.types import SequenceShape

SHAPE = SequenceShape(burn_in=2, length=4, overlap=2)  # stride 2, context 5
SHAPES = (
    SHAPE,
    SequenceShape(burn_in=0, length=1, overlap=0),
    SequenceShape(burn_in=3, length=5, overlap=0),
    SequenceShape(burn_in=0, length=3, overlap=2),
    SequenceShape(burn_in=7, length=4, overlap=1),
    SequenceShape(burn_in=1, length=6, overlap=5),
)


def tuples(cuts: Cuts) -> list[tuple[int, int, int, int, bool]]:
    """(lane, start, length, burn_in, fresh) of each."""
    columns = (cuts.lane, cuts.start, cuts.length, cuts.burn_in, cuts.fresh)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def endings(num_steps: int, *steps: int) -> np.ndarray:
    """[T, 1] True at these steps."""
    return np.isin(np.arange(num_steps), steps)[:, None]


def test_an_episode_from_its_beginning() -> None:
    cuts = cut(endings(7), context=0, shape=SHAPE, begins=True)
    assert tuples(cuts) == [(0, 0, 4, 0, True), (0, 2, 4, 2, True), (0, 4, 3, 2, False)]
    assert cuts.first.tolist() == [0, 0, 2]
    assert cuts.last.tolist() == [3, 5, 6]
    assert memory_rows(cuts).tolist() == [[2, 0]]
    assert memory_rows(cuts).dtype == np.int32


def test_a_fragment_amid_an_episode_overlaps_the_one_before_with_all_its_burn_in() -> None:
    cuts = cut(endings(9), context=5, shape=SHAPE, begins=False)
    assert tuples(cuts) == [(0, 3, 4, 2, False), (0, 5, 4, 2, False)]
    assert memory_rows(cuts).tolist() == [[1, 0], [3, 0]]


def test_an_episode_that_ended_in_the_context_is_not_trained_again() -> None:
    cuts = cut(endings(7, 4), context=5, shape=SHAPE, begins=False)
    assert tuples(cuts) == [(0, 5, 2, 0, True)]
    assert memory_rows(cuts).shape == (0, 2)


def test_an_episode_that_began_in_the_context_has_the_burn_in_that_there_is() -> None:
    assert tuples(cut(endings(6, 1), context=5, shape=SHAPE, begins=False)) == [(0, 3, 3, 1, True)]
    assert tuples(cut(endings(6, 3), context=5, shape=SHAPE, begins=False)) == [(0, 4, 2, 0, True)]
    # The first step of the fragment may end an episode: the second one begins the next.
    assert tuples(cut(endings(6, 0), context=5, shape=SHAPE, begins=False)) == [(0, 3, 3, 2, True)]


def test_endings_cut() -> None:
    cuts = cut(endings(8, 0, 5, 7), context=0, shape=SHAPE, begins=True)
    assert tuples(cuts) == [
        (0, 0, 1, 0, True),
        (0, 1, 4, 0, True),
        (0, 3, 3, 2, True),
        (0, 6, 2, 0, True),
    ]


def test_lanes_come_one_after_the_other() -> None:
    ended = np.concatenate([endings(3, 2), endings(3, 0)], axis=1)
    cuts = cut(ended, context=0, shape=SHAPE, begins=True)
    assert tuples(cuts) == [(0, 0, 3, 0, True), (1, 0, 1, 0, True), (1, 1, 2, 0, True)]


def test_one_step_is_a_sequence() -> None:
    assert tuples(cut(endings(1), context=0, shape=SHAPE, begins=True)) == [(0, 0, 1, 0, True)]
    assert tuples(cut(endings(6), context=5, shape=SHAPE, begins=False)) == [(0, 3, 3, 2, False)]


def test_a_fragment_begins_until_there_is_enough_history() -> None:
    assert [at_beginning(context, shape=SHAPE, frame_stack=1) for context in (0, 4, 5)] == [True, True, False]
    assert [at_beginning(context, shape=SHAPE, frame_stack=4) for context in (5, 7, 8)] == [True, True, False]


@st.composite
def plays(draw: st.DrawFn) -> tuple[np.ndarray, list[int], int]:
    """Endings [steps, N] of a producer's life, the length of its fragments, and K."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=12))
    num_envs = draw(st.integers(1, 3))
    rate = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return generator.random((sum(lengths), num_envs)) < rate, lengths, draw(st.integers(1, 3))


@settings(max_examples=150, deadline=None)
@given(play=plays(), shape=st.sampled_from(SHAPES))
def test_invariants_over_the_life_of_a_producer(
    play: tuple[np.ndarray, list[int], int], shape: SequenceShape
) -> None:
    ended, lengths, frame_stack = play
    begin = np.zeros_like(ended, np.int64)  # first step of the episode that each step is in
    for step in range(1, len(ended)):
        begin[step] = np.where(ended[step - 1], step, begin[step - 1])
    times, limit = np.zeros(ended.shape, np.int64), np.zeros(ended.shape, np.int64)
    border = 0
    for length in lengths:
        end = border + length
        context = min(border, shape.context + frame_stack - 1)
        origin = border - context
        begins = at_beginning(context, shape=shape, frame_stack=frame_stack)
        cuts = cut(ended[origin:end], context=context, shape=shape, begins=begins)
        places = set()
        new = np.zeros_like(times)
        before: tuple[int, int, int] | None = None
        for lane, start, size, burn_in, fresh in tuples(cuts):
            first, start = start - burn_in + origin, start + origin
            stop = start + size
            episode = begin[start, lane]
            assert start < stop <= end, "within the fragment"
            assert border < stop, "never in the context alone"
            assert (begin[first:stop, lane] == episode).all(), "within one episode"
            assert 1 <= size <= shape.length, "as long as wanted at most"
            assert burn_in == min(shape.burn_in, start - episode), "burn-in wherever there is history"
            assert fresh == (first == episode), "fresh where the episode begins"
            if not fresh:
                places.add((first - origin, lane))
                assert max(first - frame_stack + 1, episode) >= origin, "its frames are there"
                assert first > origin, "so is the action before"
            assert size == shape.length or stop == end or ended[stop - 1, lane], "short only at an end"
            if before is not None and before[:2] == (lane, episode):
                assert start - before[2] == shape.stride, "neighbors share their overlap"
            else:
                assert start == max(episode, border - shape.overlap), "as far back as the overlap"
            before = (lane, episode, start)
            new[start:stop, lane] += 1
        assert {(step, lane) for step, lane in memory_rows(cuts).tolist()} == places
        assert len(places) == np.count_nonzero(~cuts.fresh), "no state is sent twice"
        assert len(np.unique(cuts.last * ended.shape[1] + cuts.lane)) == len(cuts), (
            "each has its own last step"
        )
        assert (new[border:end] >= 1).all(), "every new step is trained"
        times += new
        limit[border:end] += math.ceil(shape.length / shape.stride)
        limit[max(border - shape.overlap, 0) : border] += math.ceil(shape.overlap / shape.stride)
        border = end
    assert (times <= limit).all(), "few times"


def test_long_fragments_train_a_step_at_most_once_more_than_their_own_sequences() -> None:
    shape, length = SequenceShape(burn_in=4, length=8, overlap=4), 12
    times = np.zeros(20 * length, np.int64)
    for border in range(0, len(times), length):
        context = min(border, shape.context)
        begins = at_beginning(context, shape=shape, frame_stack=1)
        cuts = cut(endings(context + length), context=context, shape=shape, begins=begins)
        for start, size in zip(cuts.start + border - context, cuts.length, strict=True):
            times[start : start + size] += 1
    assert times.min() == 1
    assert times.max() == 2  # T is a multiple of the stride: then not even once more


@pytest.mark.parametrize(
    ("ended", "context", "shape", "begins", "message"),
    [
        (endings(5), 4, SHAPE, False, "context: 4 steps amid an episode, but sequences need 5"),
        (endings(5), 5, SHAPE, True, "has no new step"),
        (endings(5), -1, SHAPE, True, "has no new step"),
        (np.zeros((5, 0), np.bool_), 0, SHAPE, True, "has no new step"),
        (np.zeros(5, np.bool_), 0, SHAPE, True, "has no new step"),
        (endings(5), 0, SequenceShape(0, 4, 4), True, "overlap below length"),
        (endings(5), 0, SequenceShape(-1, 4, 2), True, "must be at least 0"),
        (endings(5), 0, SequenceShape(0, 4, -1), True, "must be at least 0"),
    ],
)
def test_refused(ended: np.ndarray, context: int, shape: SequenceShape, begins: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cut(ended, context=context, shape=shape, begins=begins)
    assert "\n" not in str(caught.value)


def test_targets_by_hand() -> None:
    reward = np.array([[1, 1], [2, 2], [4, 4], [99, 8]], np.float32)  # the first ends after three steps
    return_, discount, bootstrap, valid = targets(
        reward, np.array([3, 4]), np.array([True, False]), gamma=0.5, n=2
    )
    assert return_.T.tolist() == [[2, 4, 4, 0], [2, 4, 8, 8]]
    assert discount.T.tolist() == [[0.25, 0, 0, 0], [0.25, 0.25, 0.25, 0.5]]
    assert bootstrap.T.tolist() == [[2, 3, 3, 3], [2, 3, 4, 4]]
    assert valid.T.tolist() == [[True, True, True, False], [True] * 4]
    assert return_.dtype == discount.dtype == np.float32


def test_priorities_by_hand() -> None:
    fragment, _ = Player(0, num_envs=1, shape=SHAPE, end_probability=0.0).fragment(3)
    extras = {
        "action_value": np.array([[1], [0], [-2]], np.float32),
        "state_value": np.array([[7], [4], [6]], np.float32),
    }
    fragment = dataclasses.replace(
        fragment, reward=np.array([[1], [2], [3]], np.float32), extras=dict(fragment.extras) | extras
    )
    cuts = cut_fragment(fragment, SHAPE, 1)
    options = {"gamma": 0.5, "n": 1, "rescaled": False, "mix": 0.75}
    # Targets 1 + 2, 2 + 3 and 3 + 3, the last by the value of the state before; errors 2, 5 and 8.
    found = priorities(fragment, cuts, **options)
    assert found is not None and found.dtype == np.float32
    assert found.tolist() == [0.75 * 8 + 0.25 * 5]
    truncated = dataclasses.replace(fragment, truncated=endings(3, 1))
    # 2 + 2 by the value of the truncated step's own state, not of the next episode's first: errors 2, 4; and 8.
    found = priorities(truncated, cut_fragment(truncated, SHAPE, 1), **options)
    assert found is not None
    assert found.tolist() == [0.75 * 4 + 0.25 * 3, 8]
    terminated = dataclasses.replace(fragment, terminated=endings(3, 1))
    found = priorities(terminated, cut_fragment(terminated, SHAPE, 1), **options)
    assert found is not None
    assert found.tolist() == [0.75 * 2 + 0.25 * 2, 8]
    assert priorities(dataclasses.replace(fragment, extras={}), cuts, **options) is None
    short = dict(fragment.extras) | {"state_value": np.zeros((2, 1), np.float32)}
    with pytest.raises(ValueError, match=r"state_value has shape \[2, 1\], expected \[3, 1\]"):
        priorities(dataclasses.replace(fragment, extras=short), cuts, **options)


@pytest.mark.parametrize("seed", range(4))
def test_priorities_equal_the_slow_twin(seed: int) -> None:
    player = Player(seed, num_envs=3, shape=SHAPES[seed], gamma=0.875, n_step=seed + 1)
    for num_steps in (7, 1, 20, 9):
        fragment, slow = player.fragment(num_steps)
        found = priorities(
            fragment,
            cut_fragment(fragment, player.shape, 1),
            gamma=player.gamma,
            n=player.n_step,
            rescaled=True,
            mix=0.9,
        )
        np.testing.assert_allclose(found, [one.surprise for one in slow], rtol=1e-5, atol=1e-6)
