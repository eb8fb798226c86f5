"""Sequences: how fragments are cut, and a replay of them against a list cut from whole histories by the slow twin."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_items import STATE_SIZE, Player, SlowSequence
from support.replays import CheckedReplay, admit, changed, make_replay

from ddrl.replay.replay import Replay
from ddrl.replay.sequences import (
    Cuts,
    SequenceItems,
    cut,
    expected_sequence_rows,
    recurrent_state_index,
    targets,
    td_errors,
)
from ddrl.types import Sequences, SequenceShape

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
    """(environment, start, length, burn_in, fresh) of each."""
    columns = (cuts.lane, cuts.start, cuts.length, cuts.burn_in, cuts.fresh)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def endings(num_steps: int, *steps: int) -> np.ndarray:
    """[T, 1] True at these steps."""
    return np.isin(np.arange(num_steps), steps)[:, None]


TWO = np.hstack([endings(3, 2), endings(3, 0)])


@pytest.mark.parametrize(
    ("ended", "context", "expected", "states"),
    [
        (endings(7), 0, [(0, 0, 4, 0, True), (0, 2, 4, 2, True), (0, 4, 3, 2, False)], [[2, 0]]),
        (endings(8, 0, 5, 7), 0, [(0, 0, 1, 0, True), (0, 1, 4, 0, True), (0, 3, 3, 2, True), (0, 6, 2, 0, True)], []),
        (endings(1), 0, [(0, 0, 1, 0, True)], []),
        # Amid an episode it overlaps the fragment before, with all its burn-in.
        (endings(9), 5, [(0, 3, 4, 2, False), (0, 5, 4, 2, False)], [[1, 0], [3, 0]]),
        (endings(6), 5, [(0, 3, 3, 2, False)], [[1, 0]]),
        # An episode that ended in the context is not trained again.
        (endings(7, 4), 5, [(0, 5, 2, 0, True)], []),
        # One that began there has the burn-in that there is.
        (endings(6, 1), 5, [(0, 3, 3, 1, True)], []),
        (endings(6, 3), 5, [(0, 4, 2, 0, True)], []),
        (endings(6, 0), 5, [(0, 3, 3, 2, True)], []),
        # Environments come one after the other.
        (TWO, 0, [(0, 0, 3, 0, True), (1, 0, 1, 0, True), (1, 1, 2, 0, True)], []),
    ],
)  # fmt: skip
def test_cuts_by_hand(ended: np.ndarray, context: int, expected: list[Any], states: list[list[int]]) -> None:
    cuts = cut(ended, context, SHAPE)
    assert tuples(cuts) == expected
    assert cuts.first.tolist() == [start - burn_in for _, start, _, burn_in, _ in expected]
    assert cuts.last.tolist() == [start + length - 1 for _, start, length, _, _ in expected]
    index = recurrent_state_index(cuts)
    assert index.tolist() == states and index.dtype == np.int32 and index.shape[1] == 2


@st.composite
def plays(draw: st.DrawFn) -> tuple[np.ndarray, list[int], int]:
    """Endings [steps, N] of all that a producer plays, the length of its fragments, and K."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=12))
    num_envs = draw(st.integers(1, 3))
    rate = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return generator.random((sum(lengths), num_envs)) < rate, lengths, draw(st.integers(1, 3))


@settings(max_examples=150, deadline=None)
@given(play=plays(), shape=st.sampled_from(SHAPES))
def test_each_new_step_is_trained_and_few_times_whatever_the_fragments(
    play: tuple[np.ndarray, list[int], int], shape: SequenceShape
) -> None:
    """Counts the trained steps only; the slow twin below checks the cuts."""
    ended, lengths, frame_stack = play
    times, limit = np.zeros(ended.shape, np.int64), np.zeros(ended.shape, np.int64)
    border = 0
    for length in lengths:
        end, context = border + length, min(border, shape.context + frame_stack - 1)
        origin = border - context
        cuts = cut(ended[origin:end], context, shape, frame_stack)
        new = np.zeros_like(times)
        for lane, start, size, burn_in, _ in tuples(cuts):
            assert start + size > context, "never in the context alone"
            first, stop = origin + start - burn_in, origin + start + size
            assert not ended[first : stop - 1, lane].any(), "within one episode"
            new[stop - size : stop, lane] += 1
        assert (new[border:end] >= 1).all(), "every new step is trained"
        assert len(np.unique(recurrent_state_index(cuts), axis=0)) == np.count_nonzero(~cuts.fresh)
        times += new
        limit[border:end] += math.ceil(shape.length / shape.stride)
        limit[max(border - shape.overlap, 0) : border] += math.ceil(shape.overlap / shape.stride)
        border = end
    assert (times <= limit).all(), "few times"


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


@pytest.mark.parametrize(
    ("truncated", "terminated", "expected"),
    [
        # Targets 1 + 2, 2 + 3, 3 + 3: the last by the value of the state before.
        ([], [], [0.75 * 8 + 0.25 * 5]),
        ([1], [], [0.75 * 4 + 0.25 * 3, 8]),  # 2 + 2 by the truncated step's own state: errors 2, 4; and 8
        ([], [1], [0.75 * 2 + 0.25 * 2, 8]),
    ],
)
def test_td_errors_by_hand(truncated: list[int], terminated: list[int], expected: list[float]) -> None:
    values = {"action_value": [1, 0, -2], "state_value": [7, 4, 6]}
    fragment = dataclasses.replace(
        Player(num_envs=1, end_probability=0.0).fragment(3),
        reward=np.array([[1], [2], [3]], np.float32),
        truncated=endings(3, *truncated),
        terminated=endings(3, *terminated),
        extras={name: np.array(column, np.float32)[:, None] for name, column in values.items()},
    )
    cuts = cut(fragment.ended, 0, SHAPE)
    found = td_errors(fragment, cuts, gamma=0.5, n=1, rescaled=False, mix=0.75)
    assert found is not None and found.dtype == np.float32 and found.tolist() == expected


def test_many_short_sequences_beside_a_long_one_need_no_memory_of_as_many_long_ones() -> None:
    num_envs, num_steps = 64, 240
    ended = np.ones((num_steps, num_envs), np.bool_)
    ended[:, 0] = False
    values = np.random.default_rng(3).normal(size=(2, num_steps, num_envs)).astype(np.float32)
    fragment = dataclasses.replace(
        Player(num_envs=num_envs, end_probability=0.0).fragment(num_steps),
        terminated=ended,
        truncated=np.zeros_like(ended),
        extras={"action_value": values[0], "state_value": values[1]},
    )
    cuts = cut(ended, 0, SequenceShape(burn_in=0, length=120, overlap=60))
    find = partial(td_errors, fragment, gamma=0.5, n=2, rescaled=True, mix=0.75)
    tracemalloc.start()
    found = find(cuts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None and len(cuts) == len(found) > 15_000
    assert peak < 50 * 2**20  # 200 MiB, were all as long as the longest
    for i in (0, 1, 5_000, len(cuts) - 1):
        alone = find(Cuts(*(column[i : i + 1] for column in vars(cuts).values())))
        assert alone is not None and alone == found[i]


# --- a replay of sequences --------------------------------------------------------------------------------------------

GAMMA, N_STEP = 0.5, 2  # dyadic: all sums are exact
FIELDS = [field.name for field in dataclasses.fields(Sequences) if field.name not in ("number", "weight")]
INTEGERS = ("previous_action", "burn_in", "action", "bootstrap")
FLOATS = ("previous_reward", "recurrent_state", "n_step_return", "bootstrap_discount")
DTYPES = dict.fromkeys(INTEGERS, np.int64) | dict.fromkeys(FLOATS, np.float32)
TIME_MAJOR = set(FIELDS) - {"recurrent_state", "burn_in"}


def make(player: Player, *, capacity: int, compressed: bool = False, n_step: int = N_STEP) -> Replay:
    assert player.shape is not None
    items = SequenceItems(
        shape=player.shape, gamma=GAMMA, n_step=n_step, state_size=STATE_SIZE, frame_stack=player.frame_stack
    )
    return make_replay(items, capacity=capacity, compressed=compressed)


def make_player(seed: int = 0, **options: Any) -> Player:
    return Player(seed, **{"shape": SHAPE, "values": True} | options)


def test_each_sequence_counts_with_its_recurrent_state() -> None:
    player = make_player(end_probability=1.0, num_envs=4)
    fragment = player.fragment(20)
    packed = make(player, capacity=1_000).pack(fragment)
    assert packed.num_bytes >= fragment.num_bytes + 4 * 20 * 4 * STATE_SIZE  # an episode has one step


def assert_sequences(found: Sequences, twin: list[SlowSequence]) -> None:
    """Every field of every sequence, exactly, and of the dtype that `Sequences` promises."""
    assert found.number is None and found.weight is None
    for name in FIELDS:
        got = getattr(found, name)
        want = np.stack([getattr(one, name) for one in twin], axis=1 if name in TIME_MAJOR else 0)
        np.testing.assert_array_equal(got, want, err_msg=name)
        assert got.dtype == DTYPES.get(name, want.dtype), name


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=st.sampled_from(SHAPES),
    frame_stack=st.integers(1, 3),
    end_probability=st.sampled_from([0.0, 0.1, 0.4]),
    images=st.booleans(),
    values=st.booleans(),
    compressed=st.booleans(),
)
def test_equals_a_list_of_sequences_after_each_admission(
    data: st.DataObject, shape: SequenceShape, frame_stack: int, end_probability: float, images: bool, values: bool,
    compressed: bool,
) -> None:  # fmt: skip
    """Producers share the replay."""
    n = data.draw(st.integers(1, shape.length), label="n_step")
    capacity = data.draw(st.integers(max(shape.length, 3), 60), label="capacity")
    space = {"observation": (2, 2), "dtype": "uint8"} if images else {}
    players = [
        Player(
            data.draw(st.integers(0, 2**32)), player=number, num_envs=data.draw(st.integers(1, 3)), shape=shape,
            frame_stack=frame_stack, end_probability=end_probability, values=values, **space,
        )
        for number in range(data.draw(st.integers(1, 2)))
    ]  # fmt: skip
    checked = CheckedReplay(make(players[0], capacity=capacity, compressed=compressed, n_step=n))
    turns = st.lists(st.tuples(st.sampled_from(players), st.integers(1, 16)), min_size=1, max_size=14)
    for player, num_steps in data.draw(turns):
        fragment = player.fragment(min(num_steps, capacity // len(player.lanes)))
        items = player.sequences(gamma=GAMMA, n=n)
        td_error = checked.admit(fragment, items)
        assert (td_error is None) == (not values)
        if values:
            np.testing.assert_allclose(td_error, [one.td_error for one in items], rtol=1e-5, atol=1e-6)
    checked.check(assert_sequences)


PLAYER = make_player(end_probability=0.0)
FRAGMENT = [PLAYER.fragment(num_steps) for num_steps in (9, 9, 12)][2]
INDEX, STATES = FRAGMENT.extras["memory_index"], FRAGMENT.extras["memory"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"memory_index": None}, "plays another algorithm"),
        ({"memory": None}, "plays another algorithm"),
        ({"memory_index": INDEX[1:], "memory": STATES[1:]}, "its worker plays with other settings"),
        ({"memory_index": INDEX + [[1, 0]]}, "its worker plays with other settings"),
        ({"memory": STATES[:2]}, "2 recurrent states, but not of the"),
        ({"memory": np.float16(0)}, r"memory is float16\[\], expected float16"),
        ({"memory": STATES.astype("f4")}, r"memory is float32\[12, 3\], expected float16 \[S, 3\]"),
        ({"memory": STATES[:, :2]}, r"memory is float16\[12, 2\], expected"),
        ({"memory": np.broadcast_to(np.float16(1), (12, 2**26))}, r"float16\[12, 67108864\], expected"),
        ({"reward": FRAGMENT.reward * 0 - 2e38}, r"rewards of up to 2e\+38 have no finite sum of n_step 2"),
        ({"state_value": np.zeros((3, 2), np.float32)}, "action_value and state_value are not both"),
        (
            vars(make_player(num_envs=5).fragment(9)),
            r"45 transitions .* capacity of 40; raise replay\.capacity",
        ),
    ],
)
def test_fragments_that_cannot_be_learned_from_are_refused(columns: dict[str, Any], message: str) -> None:
    replay = make(PLAYER, capacity=40)
    replay.pack(FRAGMENT)
    with pytest.raises(ValueError, match=message) as caught:
        replay.pack(changed(FRAGMENT, **columns))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [SHAPE, SequenceShape(burn_in=6, length=40, overlap=10)])
def test_expected_rows_are_room_for_a_full_replay(shape: SequenceShape) -> None:
    """Fragments have about 32 steps, a whole number of strides; no array grows, and little room is left over."""
    capacity, num_steps = 600, -(-32 // shape.stride) * shape.stride
    player = make_player(shape=shape, frame_stack=2, end_probability=0.0)
    room = expected_sequence_rows(capacity, shape, 2)
    replay, sizes = make(player, capacity=capacity), set()
    for _ in range(2 * capacity // (2 * num_steps)):
        admit(replay, player.fragment(num_steps))
        sizes.add(replay.num_bytes)
    assert len(sizes) == 1 and 0.85 * room < len(replay.rows.ring) <= room
