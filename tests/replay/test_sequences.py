"""Sequences: how fragments are cut, and a replay of them against a list cut from whole histories by the slow twin."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_sequences import STATE_SIZE, Player, SlowSequence
from support.replays import admit, gather, make_replay

from ddrl.replay.replay import Replay
from ddrl.replay.sequences import (
    Cuts,
    SequenceItems,
    cut,
    cut_fragment,
    expected_sequence_rows,
    recurrent_state_index,
    targets,
    td_errors,
)
from ddrl.types import Fragment, Sequences, SequenceShape

CUT_SHAPE = SequenceShape(burn_in=2, length=4, overlap=2)  # stride 2, context 5
CUT_SHAPES = (
    CUT_SHAPE,
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


def test_an_episode_from_its_beginning() -> None:
    cuts = cut(endings(7), context=0, shape=CUT_SHAPE, begins=True)
    assert tuples(cuts) == [(0, 0, 4, 0, True), (0, 2, 4, 2, True), (0, 4, 3, 2, False)]
    assert cuts.first.tolist() == [0, 0, 2]
    assert cuts.last.tolist() == [3, 5, 6]
    assert recurrent_state_index(cuts).tolist() == [[2, 0]]
    assert recurrent_state_index(cuts).dtype == np.int32


def test_a_fragment_amid_an_episode_overlaps_the_one_before_with_all_its_burn_in() -> None:
    cuts = cut(endings(9), context=5, shape=CUT_SHAPE, begins=False)
    assert tuples(cuts) == [(0, 3, 4, 2, False), (0, 5, 4, 2, False)]
    assert recurrent_state_index(cuts).tolist() == [[1, 0], [3, 0]]


def test_an_episode_that_ended_in_the_context_is_not_trained_again() -> None:
    cuts = cut(endings(7, 4), context=5, shape=CUT_SHAPE, begins=False)
    assert tuples(cuts) == [(0, 5, 2, 0, True)]
    assert recurrent_state_index(cuts).shape == (0, 2)


def test_an_episode_that_began_in_the_context_has_the_burn_in_that_there_is() -> None:
    assert tuples(cut(endings(6, 1), context=5, shape=CUT_SHAPE, begins=False)) == [(0, 3, 3, 1, True)]
    assert tuples(cut(endings(6, 3), context=5, shape=CUT_SHAPE, begins=False)) == [(0, 4, 2, 0, True)]
    # The first step of the fragment may end an episode: the second one begins the next.
    assert tuples(cut(endings(6, 0), context=5, shape=CUT_SHAPE, begins=False)) == [(0, 3, 3, 2, True)]


def test_endings_cut() -> None:
    cuts = cut(endings(8, 0, 5, 7), context=0, shape=CUT_SHAPE, begins=True)
    assert tuples(cuts) == [
        (0, 0, 1, 0, True),
        (0, 1, 4, 0, True),
        (0, 3, 3, 2, True),
        (0, 6, 2, 0, True),
    ]


def test_environments_come_one_after_the_other() -> None:
    ended = np.concatenate([endings(3, 2), endings(3, 0)], axis=1)
    cuts = cut(ended, context=0, shape=CUT_SHAPE, begins=True)
    assert tuples(cuts) == [(0, 0, 3, 0, True), (1, 0, 1, 0, True), (1, 1, 2, 0, True)]


def test_one_step_is_a_sequence() -> None:
    assert tuples(cut(endings(1), context=0, shape=CUT_SHAPE, begins=True)) == [(0, 0, 1, 0, True)]
    assert tuples(cut(endings(6), context=5, shape=CUT_SHAPE, begins=False)) == [(0, 3, 3, 2, False)]


@st.composite
def plays(draw: st.DrawFn) -> tuple[np.ndarray, list[int], int]:
    """Endings [steps, N] of all that a producer plays, the length of its fragments, and K."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=12))
    num_envs = draw(st.integers(1, 3))
    rate = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return generator.random((sum(lengths), num_envs)) < rate, lengths, draw(st.integers(1, 3))


@settings(max_examples=150, deadline=None)
@given(play=plays(), shape=st.sampled_from(CUT_SHAPES))
def test_invariants_over_all_fragments_of_a_producer(
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
        begins = context < shape.context + frame_stack - 1
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
        assert {(step, lane) for step, lane in recurrent_state_index(cuts).tolist()} == places
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
        begins = context < shape.context
        cuts = cut(endings(context + length), context=context, shape=shape, begins=begins)
        for start, size in zip(cuts.start + border - context, cuts.length, strict=True):
            times[start : start + size] += 1
    assert times.min() == 1
    assert times.max() == 2  # T is a multiple of the stride: then not even once more


@pytest.mark.parametrize(
    ("ended", "context", "shape", "begins", "message"),
    [
        (endings(5), 4, CUT_SHAPE, False, "context: 4 steps amid an episode, but sequences need 5"),
        (endings(5), 5, CUT_SHAPE, True, "has no new step"),
        (endings(5), -1, CUT_SHAPE, True, "has no new step"),
        (np.zeros((5, 0), np.bool_), 0, CUT_SHAPE, True, "has no new step"),
        (np.zeros(5, np.bool_), 0, CUT_SHAPE, True, "has no new step"),
        (endings(5), 0, SequenceShape(0, 4, 4), True, "overlap below length"),
        (endings(5), 0, SequenceShape(-1, 4, 2), True, "must be at least 0"),
        (endings(5), 0, SequenceShape(0, 4, -1), True, "must be at least 0"),
    ],
)
def test_cuts_that_are_impossible_are_refused(
    ended: np.ndarray, context: int, shape: SequenceShape, begins: bool, message: str
) -> None:
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


def test_td_errors_by_hand() -> None:
    fragment, _ = Player(0, num_envs=1, shape=CUT_SHAPE, end_probability=0.0).fragment(3)
    extras = {
        "action_value": np.array([[1], [0], [-2]], np.float32),
        "state_value": np.array([[7], [4], [6]], np.float32),
    }
    fragment = dataclasses.replace(
        fragment, reward=np.array([[1], [2], [3]], np.float32), extras=dict(fragment.extras) | extras
    )
    cuts = cut_fragment(fragment, CUT_SHAPE, 1)
    options = {"gamma": 0.5, "n": 1, "rescaled": False, "mix": 0.75}
    # Targets 1 + 2, 2 + 3 and 3 + 3, the last by the value of the state before; errors 2, 5 and 8.
    found = td_errors(fragment, cuts, **options)
    assert found is not None and found.dtype == np.float32
    assert found.tolist() == [0.75 * 8 + 0.25 * 5]
    truncated = dataclasses.replace(fragment, truncated=endings(3, 1))
    # 2 + 2 by the value of the truncated step's own state, not of the next episode's first: errors 2, 4; and 8.
    found = td_errors(truncated, cut_fragment(truncated, CUT_SHAPE, 1), **options)
    assert found is not None
    assert found.tolist() == [0.75 * 4 + 0.25 * 3, 8]
    terminated = dataclasses.replace(fragment, terminated=endings(3, 1))
    found = td_errors(terminated, cut_fragment(terminated, CUT_SHAPE, 1), **options)
    assert found is not None
    assert found.tolist() == [0.75 * 2 + 0.25 * 2, 8]
    assert td_errors(dataclasses.replace(fragment, extras={}), cuts, **options) is None
    short = dict(fragment.extras) | {"state_value": np.zeros((2, 1), np.float32)}
    with pytest.raises(ValueError, match="action_value and state_value are not both"):
        td_errors(dataclasses.replace(fragment, extras=short), cuts, **options)


@pytest.mark.parametrize("seed", range(4))
def test_td_errors_equal_the_slow_twin(seed: int) -> None:
    player = Player(seed, num_envs=3, shape=CUT_SHAPES[seed], gamma=0.875, n_step=seed + 1)
    for num_steps in (7, 1, 20, 9):
        fragment, slow = player.fragment(num_steps)
        found = td_errors(
            fragment,
            cut_fragment(fragment, player.shape, 1),
            gamma=player.gamma,
            n=player.n_step,
            rescaled=True,
            mix=0.9,
        )
        np.testing.assert_allclose(found, [one.td_error for one in slow], rtol=1e-5, atol=1e-6)


# --- a replay of sequences --------------------------------------------------------------------------------------------

SHAPE = SequenceShape(burn_in=3, length=4, overlap=2)
SHAPES = (
    SHAPE,
    SequenceShape(burn_in=0, length=3, overlap=0),
    SequenceShape(burn_in=1, length=5, overlap=4),
    SequenceShape(burn_in=6, length=2, overlap=1),
)
GAMMA, N_STEP = 0.5, 2  # dyadic: all sums are exact
FIELDS = [field.name for field in dataclasses.fields(Sequences) if field.name not in ("number", "weight")]
TIME_MAJOR = set(FIELDS) - {"recurrent_state", "burn_in"}


def make(
    player: Player, *, capacity: int, compressed: bool = False, shape: SequenceShape | None = None
) -> Replay:
    items = SequenceItems(
        shape=shape or player.shape,
        gamma=player.gamma,
        n_step=player.n_step,
        state_size=STATE_SIZE,
        frame_stack=player.frame_stack,
    )
    return make_replay(items, capacity=capacity, compressed=compressed)


def make_player(seed: int = 0, **options: Any) -> Player:
    return Player(seed, **{"num_envs": 2, "shape": SHAPE, "gamma": GAMMA, "n_step": N_STEP} | options)


def assert_equal(found: Sequences, twin: list[SlowSequence], *, images: bool) -> None:
    """Every field of every sequence, exactly, and of the dtype that `Sequences` promises."""
    assert found.number is None and found.weight is None
    for name in FIELDS:
        got = getattr(found, name)
        want = np.stack([getattr(one, name) for one in twin], axis=1 if name in TIME_MAJOR else 0)
        np.testing.assert_array_equal(got, want, err_msg=name)
    for name in ("previous_action", "burn_in", "action", "bootstrap"):
        assert getattr(found, name).dtype == np.int64, name
    for name in ("previous_reward", "recurrent_state", "n_step_return", "bootstrap_discount"):
        assert getattr(found, name).dtype == np.float32, name
    assert found.valid.dtype == np.bool_
    assert found.observation.dtype == (np.uint8 if images else np.float32)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Player, int, list[int]]:
    """A player, a capacity, and the lengths of fragments that fit into it."""
    shape = draw(st.sampled_from(SHAPES))
    num_envs = draw(st.integers(1, 3))
    capacity = draw(st.integers(max(shape.length, num_envs), 60))
    lengths = draw(st.lists(st.integers(1, max(1, min(16, capacity // num_envs))), min_size=1, max_size=14))
    player = Player(
        draw(st.integers(0, 2**32)),
        num_envs=num_envs,
        shape=shape,
        frame_stack=draw(st.integers(1, 3)),
        end_probability=draw(st.sampled_from([0.0, 0.1, 0.4])),
        images=draw(st.booleans()),
        values=draw(st.booleans()),
        gamma=GAMMA,
        n_step=draw(st.integers(1, shape.length)),
    )
    return player, capacity, lengths


@settings(max_examples=60, deadline=None)
@given(history=histories(), compressed=st.booleans())
def test_equals_a_list_of_sequences_after_each_admission(
    history: tuple[Player, int, list[int]], compressed: bool
) -> None:
    player, capacity, lengths = history
    replay = make(player, capacity=capacity, compressed=compressed)
    replay.check_valid()
    held: list[tuple[int, list[SlowSequence]]] = []
    admitted = 0
    for serial, num_steps in enumerate(lengths):
        fragment, slow = player.fragment(num_steps)
        held.append((fragment.num_transitions, slow))
        admitted += len(slow)
        while sum(steps for steps, _ in held) > capacity:
            held.pop(0)

        admit(replay, fragment)

        replay.check_valid()
        twin = [one for _, slow in held for one in slow]
        assert (replay.num_items, replay.first_item) == (len(twin), admitted - len(twin))
        assert len(replay) == sum(steps for steps, _ in held)
        assert replay.oldest_entry_id == f"{serial + 1 - len(held)}-0".encode()
        td_error = replay.pack(fragment).cut.td_error
        if player.has_values:
            assert td_error is not None
            np.testing.assert_allclose(td_error, [one.td_error for one in slow], rtol=1e-5, atol=1e-6)
        else:
            assert td_error is None
        order = np.random.default_rng(serial).permutation(len(twin))
        assert_equal(gather(replay, order), [twin[i] for i in order], images=player.images)


def test_producers_share_a_replay() -> None:
    players = [make_player(seed, num_envs=seed + 1) for seed in range(3)]
    replay = make(players[0], capacity=500)
    twin = []
    for turn in range(12):
        fragment, slow = players[turn % 3].fragment(1 + turn)
        admit(replay, fragment)
        twin += slow
    replay.check_valid()
    assert_equal(gather(replay, np.arange(len(twin))), twin, images=False)


def test_dense_and_compressed_rows_give_the_same() -> None:
    results = []
    for compressed in (False, True):
        player = make_player(images=True, frame_stack=4, end_probability=0.1)
        replay = make(player, capacity=300, compressed=compressed)
        for _ in range(20):
            admit(replay, player.fragment(10)[0])
        results.append(gather(replay, np.random.default_rng(1).integers(0, replay.num_items, 64)))
    dense, compact = results
    assert dense.observation.shape == (SHAPE.burn_in + SHAPE.length + 1, 64, 4, 2, 2)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(dense, name), getattr(compact, name), err_msg=name)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_plan_outlives_its_items(compressed: bool) -> None:
    player = make_player(images=True, frame_stack=2)
    replay = make(player, capacity=24, compressed=compressed)
    fragment, slow = player.fragment(12)
    admit(replay, fragment)
    read = replay.plan(np.arange(len(slow)))
    for _ in range(1, 4):
        admit(replay, player.fragment(12)[0])
    assert replay.first_item >= len(slow)
    assert_equal(read(), slow, images=True)


def test_admission_and_gathering_copy() -> None:
    player = make_player()
    replay = make(player, capacity=24)
    fragment, slow = player.fragment(9)
    admit(replay, fragment)
    for column in (fragment.observation, fragment.action, fragment.reward, fragment.extras["memory"]):
        column[:] = 77
    for name in FIELDS:
        getattr(gather(replay, np.arange(len(slow))), name)[:] = 1
    assert_equal(gather(replay, np.arange(len(slow))), slow, images=False)


def test_positions_are_checked() -> None:
    player = make_player()
    replay = make(player, capacity=24)
    assert (replay.num_items, replay.first_item, len(replay), replay.oldest_entry_id) == (0, 0, 0, None)
    with pytest.raises(IndexError, match="empty"):
        gather(replay, np.array([], np.int64))
    with pytest.raises(IndexError, match="empty"):
        gather(replay, np.array([0]))
    admit(replay, player.fragment(5)[0])
    assert replay.num_bytes > 0
    for position in (-1, replay.num_items):
        with pytest.raises(IndexError, match="the items held"):
            gather(replay, np.array([0, position]))


def of_extras(**changes: Any) -> Callable[[Fragment], Fragment]:
    """With these further columns instead; None takes one away."""

    def change(fragment: Fragment) -> Fragment:
        extras = {
            name: value for name, value in (dict(fragment.extras) | changes).items() if value is not None
        }
        return dataclasses.replace(fragment, extras=extras)

    return change


def other_states(fragment: Fragment) -> Fragment:
    """One state fewer than needed."""
    index, memory = fragment.extras["memory_index"], fragment.extras["memory"]
    return of_extras(memory_index=index[1:], memory=memory[1:])(fragment)


def other_places(fragment: Fragment) -> Fragment:
    """As many states as needed, one of another step."""
    return of_extras(memory_index=fragment.extras["memory_index"] + [[1, 0]])(fragment)


def of_reward(reward: float) -> Callable[[Fragment], Fragment]:
    """With this reward for the last step of lane 1."""

    def change(fragment: Fragment) -> Fragment:
        fragment = dataclasses.replace(fragment, reward=fragment.reward.copy())
        fragment.reward[-1, 1] = reward
        return fragment

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_extras(memory_index=None), "plays another algorithm"),
        (of_extras(memory=None), "plays another algorithm"),
        (other_states, "its worker plays with other settings"),
        (other_places, "its worker plays with other settings"),
        (of_extras(memory=np.zeros((2, STATE_SIZE), np.float16)), "2 recurrent states, but not of the"),
        (of_extras(memory=np.float16(0)), r"memory is float16\[\], expected float16"),
        (
            lambda one: of_extras(memory=one.extras["memory"].astype(np.float32))(one),
            r"memory is float32\[12, 3\], expected float16 \[S, 3\]",
        ),
        (
            lambda one: of_extras(memory=one.extras["memory"][:, :2])(one),
            r"memory is float16\[12, 2\], expected float16 \[S, 3\]",
        ),
        (of_reward(3e38), r"rewards of up to 3e\+38 have no finite sum of n_step 2"),
        (of_reward(-2e38), r"rewards of up to 2e\+38 have no finite sum of n_step 2"),
        (lambda one: dataclasses.replace(one, context=7), "7 steps of context, but its sequences need 6"),
        (of_extras(state_value=np.zeros((3, 2), np.float32)), "action_value and state_value"),
        (lambda one: dataclasses.replace(one, action=one.action.astype(np.float32)), "discrete actions"),
        (lambda one: dataclasses.replace(one, action=one.action[:, :, None]), "discrete actions"),
        (lambda one: dataclasses.replace(one, observation=one.observation[..., :3]), "observation"),
        (lambda one: dataclasses.replace(one, truncated=~one.truncated & ~one.terminated), "final"),
        (lambda one: make_player(num_envs=5).fragment(9)[0], "45 transitions exceed the capacity of 40"),
    ],
)
def test_refused_fragments_change_nothing(change: Callable[[Fragment], Fragment], message: str) -> None:
    player = make_player(end_probability=0.0)
    replay = make(player, capacity=40)
    twin = []
    for _ in range(2):
        fragment, slow = player.fragment(9)
        admit(replay, fragment)
        twin += slow
    next_fragment, next_slow = player.fragment(12)
    with pytest.raises(ValueError, match=message) as caught:
        admit(replay, change(next_fragment))
    assert "\n" not in str(caught.value)
    replay.check_valid()
    assert (len(replay), replay.first_item, replay.oldest_entry_id) == (36, 0, b"0-0")
    assert_equal(gather(replay, np.arange(replay.num_items)), twin, images=False)
    admit(replay, next_fragment)
    replay.check_valid()
    assert_equal(
        gather(replay, replay.num_items - len(next_slow) + np.arange(len(next_slow))), next_slow, images=False
    )


@pytest.mark.parametrize("width", [STATE_SIZE - 1, STATE_SIZE + 1, 2**26])
def test_states_of_another_width_are_refused(width: int) -> None:
    """Before there is memory for them, whether or not a sequence needs any."""
    player = make_player(end_probability=0.0)
    replay = make(player, capacity=100)
    first, second = player.fragment(9)[0], player.fragment(9)[0]
    for valid in (first, second):
        wide = np.broadcast_to(np.float16(1), (len(valid.extras["memory"]), width))
        with pytest.raises(
            ValueError, match=rf"memory is float16\[\d+, {width}\], expected float16 \[S, 3\]"
        ):
            admit(replay, of_extras(memory=wide)(valid))
        assert replay.num_bytes == 0 or replay.num_items
        admit(replay, valid)
    replay.check_valid()


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_no_more_context_than_sequences_need(frame_stack: int) -> None:
    """Fragments of one new step and a long history would fill the memory while the capacity counts one step."""
    player = make_player(frame_stack=frame_stack, end_probability=0.0)
    replay = make(player, capacity=100)
    fragments = [player.fragment(4)[0] for _ in range(3)]
    most = SHAPE.context + frame_stack - 1
    assert [one.context for one in fragments] == [0, 4, most]
    for fragment in fragments:
        admit(replay, fragment)
    longer = dataclasses.replace(player.fragment(4)[0], context=most + 1)
    with pytest.raises(ValueError, match=f"{most + 1} steps of context, but its sequences need {most}"):
        admit(replay, longer)


@pytest.mark.parametrize("shape", [SHAPE, SequenceShape(burn_in=6, length=40, overlap=10)])
def test_expected_rows_are_room_for_a_full_replay(shape: SequenceShape) -> None:
    """Of fragments of about 32 steps, whole strides of sequences; nothing grows, and little is left over."""
    capacity, num_steps = 2000, -(-32 // shape.stride) * shape.stride
    player = make_player(shape=shape, frame_stack=2, end_probability=0.0)
    room = expected_sequence_rows(capacity, shape, 2)
    replay = make(player, capacity=capacity)
    sizes = set()
    for _ in range(2 * capacity // (2 * num_steps)):
        admit(replay, player.fragment(num_steps)[0])
        sizes.add(replay.num_bytes)
    assert len(sizes) == 1 and 0.9 * room < len(replay.rows.ring) <= room


def test_a_capacity_below_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity: 3 transitions hold no item of 4 steps; use at least 4"):
        make(make_player(), capacity=3)
