"""The view of sequences against a plain list of them, cut from whole histories by the slow twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_sequences import STATE_SIZE, Player, SlowSequence

from ddrl.replay.rows import CompressedRows, DenseRows
from ddrl.replay.sequence_view import SequenceView, expected_rows
from ddrl.types import Fragment, Sequences, SequenceShape

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


def make_view(player: Player, *, capacity: int, compressed: bool = False) -> SequenceView:
    rows = CompressedRows if compressed else DenseRows
    return SequenceView(
        rows(frame_stack=player.frame_stack),
        shape=player.shape,
        capacity=capacity,
        gamma=player.gamma,
        n_step=player.n_step,
        memory_size=STATE_SIZE,
    )


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
def lives(draw: st.DrawFn) -> tuple[Player, int, list[int]]:
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
@given(life=lives(), compressed=st.booleans())
def test_equals_a_list_of_sequences_after_each_admission(
    life: tuple[Player, int, list[int]], compressed: bool
) -> None:
    player, capacity, lengths = life
    view = make_view(player, capacity=capacity, compressed=compressed)
    view.check_valid()
    held: list[tuple[int, list[SlowSequence]]] = []
    admitted = 0
    for serial, num_steps in enumerate(lengths):
        fragment, slow = player.fragment(num_steps)
        held.append((fragment.num_transitions, slow))
        admitted += len(slow)
        while sum(steps for steps, _ in held) > capacity:
            held.pop(0)

        surprise = view.admit(fragment, f"{serial}-0".encode())

        view.check_valid()
        twin = [one for _, slow in held for one in slow]
        assert (len(view), view.first) == (len(twin), admitted - len(twin))
        assert view.num_steps == sum(steps for steps, _ in held)
        assert view.oldest_entry_id == f"{serial + 1 - len(held)}-0".encode()
        if player.has_values:
            assert surprise is not None
            np.testing.assert_allclose(surprise, [one.surprise for one in slow], rtol=1e-5, atol=1e-6)
        else:
            assert surprise is None
        order = np.random.default_rng(serial).permutation(len(twin))
        assert_equal(view.gather(order), [twin[i] for i in order], images=player.images)


def test_producers_share_a_view() -> None:
    players = [make_player(seed, num_envs=seed + 1) for seed in range(3)]
    view = make_view(players[0], capacity=500)
    twin = []
    for turn in range(12):
        fragment, slow = players[turn % 3].fragment(1 + turn)
        view.admit(fragment, b"%d-0" % turn)
        twin += slow
    view.check_valid()
    assert_equal(view.gather(np.arange(len(twin))), twin, images=False)


def test_dense_and_compressed_rows_give_the_same() -> None:
    results = []
    for compressed in (False, True):
        player = make_player(images=True, frame_stack=4, end_probability=0.1)
        view = make_view(player, capacity=300, compressed=compressed)
        for serial in range(20):
            view.admit(player.fragment(10)[0], b"%d-0" % serial)
        results.append(view.gather(np.random.default_rng(1).integers(0, len(view), 64)))
    dense, compact = results
    assert dense.observation.shape == (SHAPE.burn_in + SHAPE.length + 1, 64, 4, 2, 2)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(dense, name), getattr(compact, name), err_msg=name)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_plan_outlives_what_it_has_chosen(compressed: bool) -> None:
    player = make_player(images=True, frame_stack=2)
    view = make_view(player, capacity=24, compressed=compressed)
    fragment, slow = player.fragment(12)
    view.admit(fragment, b"0-0")
    read = view.plan(np.arange(len(slow)))
    for serial in range(1, 4):
        view.admit(player.fragment(12)[0], b"%d-0" % serial)
    assert view.first >= len(slow)
    assert_equal(read(), slow, images=True)


def test_what_is_read_is_a_copy() -> None:
    player = make_player()
    view = make_view(player, capacity=24)
    fragment, slow = player.fragment(9)
    view.admit(fragment, b"0-0")
    for column in (fragment.observation, fragment.action, fragment.reward, fragment.extras["memory"]):
        column[:] = 77
    for name in FIELDS:
        getattr(view.gather(np.arange(len(slow))), name)[:] = 1
    assert_equal(view.gather(np.arange(len(slow))), slow, images=False)


def test_positions_are_checked() -> None:
    player = make_player()
    view = make_view(player, capacity=24)
    assert (len(view), view.first, view.num_steps, view.oldest_entry_id) == (0, 0, 0, None)
    with pytest.raises(IndexError, match="empty"):
        view.gather(np.array([], np.int64))
    with pytest.raises(IndexError, match=r"0\.\.0 outside"):
        view.gather(np.array([0]))
    view.admit(player.fragment(5)[0], b"0-0")
    assert view.num_bytes > 0
    for position in (-1, len(view)):
        with pytest.raises(IndexError, match="the view's positions"):
            view.gather(np.array([0, position]))


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
        (of_extras(state_value=np.zeros((3, 2), np.float32)), "state_value has shape"),
        (lambda one: dataclasses.replace(one, action=one.action.astype(np.float32)), "discrete actions"),
        (lambda one: dataclasses.replace(one, action=one.action[:, :, None]), "discrete actions"),
        (lambda one: dataclasses.replace(one, observation=one.observation[..., :3]), "observation"),
        (lambda one: dataclasses.replace(one, truncated=~one.truncated & ~one.terminated), "final"),
        (lambda one: make_player(num_envs=5).fragment(9)[0], "45 transitions exceed the capacity of 40"),
    ],
)
def test_refused_fragments_change_nothing(change: Callable[[Fragment], Fragment], message: str) -> None:
    player = make_player(end_probability=0.0)
    view = make_view(player, capacity=40)
    twin = []
    for serial in range(2):
        fragment, slow = player.fragment(9)
        view.admit(fragment, b"%d-0" % serial)
        twin += slow
    next_fragment, next_slow = player.fragment(12)
    with pytest.raises(ValueError, match=message) as caught:
        view.admit(change(next_fragment), b"2-0")
    assert "\n" not in str(caught.value)
    view.check_valid()
    assert (view.num_steps, view.first, view.oldest_entry_id) == (36, 0, b"0-0")
    assert_equal(view.gather(np.arange(len(view))), twin, images=False)
    view.admit(next_fragment, b"2-0")
    view.check_valid()
    assert_equal(view.gather(len(view) - len(next_slow) + np.arange(len(next_slow))), next_slow, images=False)


@pytest.mark.parametrize("width", [STATE_SIZE - 1, STATE_SIZE + 1, 2**26])
def test_a_strangers_states_do_not_decide_the_width(width: int) -> None:
    """They are refused before there is memory for them, whether or not a sequence needs any."""
    player = make_player(end_probability=0.0)
    view = make_view(player, capacity=100)
    first, second = player.fragment(9)[0], player.fragment(9)[0]
    for honest in (first, second):
        wide = np.broadcast_to(np.float16(1), (len(honest.extras["memory"]), width))
        with pytest.raises(
            ValueError, match=rf"memory is float16\[\d+, {width}\], expected float16 \[S, 3\]"
        ):
            view.admit(of_extras(memory=wide)(honest), b"0-0")
        assert view.num_bytes == 0 or len(view)
        view.admit(honest, b"0-0")
    view.check_valid()


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_no_more_context_than_sequences_need(frame_stack: int) -> None:
    """Fragments of one new step and a long history would fill the memory while the capacity counts one step."""
    player = make_player(frame_stack=frame_stack, end_probability=0.0)
    view = make_view(player, capacity=100)
    fragments = [player.fragment(4)[0] for _ in range(3)]
    most = SHAPE.context + frame_stack - 1
    assert [one.context for one in fragments] == [0, 4, most]
    for number, fragment in enumerate(fragments):
        view.admit(fragment, b"%d-0" % number)
    longer = dataclasses.replace(player.fragment(4)[0], context=most + 1)
    with pytest.raises(ValueError, match=f"{most + 1} steps of context, but its sequences need {most}"):
        view.admit(longer, b"3-0")


@pytest.mark.parametrize("shape", [SHAPE, SequenceShape(burn_in=6, length=40, overlap=10)])
def test_expected_rows_are_room_for_a_full_view(shape: SequenceShape) -> None:
    """Of fragments of about 32 steps, whole strides of sequences; nothing grows, and little is left over."""
    capacity, num_steps = 2000, -(-32 // shape.stride) * shape.stride
    player = make_player(shape=shape, frame_stack=2, end_probability=0.0)
    room = expected_rows(capacity, shape, 2)
    rows = DenseRows(frame_stack=2, expected_rows=room)
    view = SequenceView(
        rows, shape=shape, capacity=capacity, gamma=GAMMA, n_step=N_STEP, memory_size=STATE_SIZE
    )
    sizes = set()
    for serial in range(2 * capacity // (2 * num_steps)):
        view.admit(player.fragment(num_steps)[0], b"%d-0" % serial)
        sizes.add(view.num_bytes)
    assert len(sizes) == 1 and 0.9 * room < len(rows) <= room


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"memory_size": 0}, "memory_size: 0 is no recurrent state"),
        ({"capacity": 3}, "capacity: 3 transitions hold no sequence of 4 steps; use at least 4"),
        ({"gamma": 1.5}, "gamma: 1.5 is no discount"),
        ({"n_step": 0}, "n_step: 0 does not fit into sequences of 4 steps; use 1 to 4"),
        ({"n_step": 5}, "n_step: 5 does not fit into sequences of 4 steps; use 1 to 4"),
        ({"priority_mix": 2.0}, "priority_mix: 2.0 is no share"),
    ],
)
def test_refused_settings(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceView(
            DenseRows(),
            **{"shape": SHAPE, "capacity": 40, "gamma": GAMMA, "n_step": N_STEP, "memory_size": 3} | setting,
        )
