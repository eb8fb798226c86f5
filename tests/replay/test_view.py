"""The view without stacks against a plain list of transitions (with stacks: test_stacks.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import Transition, make_fragment, slow_transitions

from ddrl.replay.rows import CompressedRows, DenseRows
from ddrl.replay.view import TransitionView, dense_bytes, expected_rows

GAMMA, N_STEP = 0.5, 3  # dyadic: all sums are exact


def dense(*, capacity: int, gamma: float = GAMMA, n_step: int = N_STEP) -> TransitionView:
    rows = DenseRows(expected_rows=max(1, expected_rows(capacity)))
    return TransitionView(rows, capacity=capacity, gamma=gamma, n_step=n_step)


def assert_equal(view: TransitionView, twin: list[Transition]) -> None:
    """Every transition of the view, gathered in random order, is the twin's, exactly."""
    assert len(view) == len(twin)
    order = np.random.default_rng(len(twin)).permutation(len(twin))
    batch = view.gather(order)
    for i, position in enumerate(order):
        item = twin[position]
        assert batch.observation[i].tolist() == item.observation.tolist()
        assert batch.action[i].tolist() == item.action.tolist()
        assert batch.n_step_return[i] == item.n_step_return
        assert batch.bootstrap_discount[i] == item.bootstrap_discount
        if item.next_observation is not None:
            assert batch.next_observation[i].tolist() == item.next_observation.tolist()


@st.composite
def fragment_sizes(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, float]]]:
    """A capacity, and (T, N, C, probability of an ending) of fragments that fit into it."""
    capacity = draw(st.integers(4, 60))
    size = st.tuples(
        st.integers(1, 12), st.integers(1, 5), st.integers(0, 2), st.sampled_from([0.0, 0.2, 1.0])
    )
    return capacity, draw(st.lists(size.filter(lambda s: s[0] * s[1] <= capacity), min_size=1, max_size=25))


@settings(max_examples=60, deadline=None)
@given(
    sizes=fragment_sizes(),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.float32, np.uint8]),
    store=st.sampled_from([DenseRows, CompressedRows]),
)
def test_equals_a_list_of_transitions_after_each_admission(
    sizes: tuple[int, list[tuple[int, int, int, float]]], seed: int, dtype: type, store: type
) -> None:
    capacity, fragments = sizes
    view = TransitionView(store(), capacity=capacity, gamma=GAMMA, n_step=N_STEP)
    view.check_valid()
    held: list[tuple[bytes, list[Transition]]] = []
    admitted = 0
    for serial, (num_steps, num_envs, context, end_probability) in enumerate(fragments):
        fragment = make_fragment(
            seed + serial,
            num_steps=num_steps,
            num_envs=num_envs,
            context=context,
            serial=serial,
            dtype=dtype,
            end_probability=end_probability,
        )
        held.append((b"%d-0" % serial, slow_transitions(fragment, gamma=GAMMA, n=N_STEP)))
        while sum(len(items) for _, items in held) > capacity:
            held.pop(0)
        admitted += num_steps * num_envs

        view.admit(fragment, b"%d-0" % serial)

        view.check_valid()
        assert_equal(view, [item for _, items in held for item in items])
        assert view.oldest_entry_id == held[0][0]
        assert view.first + len(view) == admitted
        assert view.gather(np.array([0])).observation.dtype == dtype


def test_oldest_fragments_are_evicted_whole() -> None:
    view = dense(capacity=10)
    for serial in range(3):
        view.admit(make_fragment(serial, num_steps=2, num_envs=2, serial=serial), b"%d-0" % serial)
    assert len(view) == 8
    assert (view.oldest_entry_id, view.first) == (b"1-0", 4)
    assert view.gather(np.array([0, 7])).observation[:, 0].tolist() == [1, 2]
    assert view.num_steps == 8


def test_short_fragments_grow_the_rows_and_keep_the_capacity() -> None:
    view = dense(capacity=100)
    view.admit(make_fragment(0, num_steps=50, num_envs=1, end_probability=0), b"0-0")
    before = view.num_bytes
    for serial in range(1, 250):
        view.admit(
            make_fragment(serial, num_steps=1, num_envs=1, serial=serial, end_probability=1.0),
            b"%d-0" % serial,
        )
        view.check_valid()
    assert len(view) == 100
    assert view.num_bytes > before
    assert view.gather(np.arange(100)).observation[:, 0].tolist() == list(range(150, 250))


def test_rings_are_allocated_with_the_first_fragment_and_then_stay() -> None:
    view = dense(capacity=64)
    assert (view.num_bytes, len(view), view.first, view.oldest_entry_id) == (0, 0, 0, None)
    sizes = set()
    for serial in range(20):
        view.admit(make_fragment(serial, num_steps=16, num_envs=2, end_probability=0), b"%d-0" % serial)
        sizes.add(view.num_bytes)
    assert sizes == {(64 + 8) * 4 * 4 + 64 * (8 + 4 + 2 * 4 + 4 + 4)}
    assert sizes == {
        dense_bytes(capacity=64, observation_shape=(4,), observation_dtype="float32", action_bytes=8)
    }


def test_gather_repeats_positions_and_gives_arrays_of_its_own() -> None:
    view = dense(capacity=8)
    view.admit(make_fragment(0, num_steps=4, num_envs=2), b"0-0")
    batch = view.gather(np.array([5, 5, 0]))
    assert batch.observation[:, 1:3].tolist() == [[2, 1], [2, 1], [0, 0]]
    batch.observation[:] = 77
    assert view.gather(np.array([5])).observation[0, 1] == 2
    assert view.gather(np.zeros(0, np.int64)).observation.shape == (0, 4)


@pytest.mark.parametrize("index", [[-1], [8], [0, 100]])
def test_gather_refuses_positions_outside(index: list[int]) -> None:
    view = dense(capacity=20)
    view.admit(make_fragment(0, num_steps=4, num_envs=2), b"0-0")
    with pytest.raises(IndexError, match=r"0\.\.7"):
        view.gather(np.array(index))


@pytest.mark.parametrize("index", [[], [0]])
def test_gather_from_an_empty_view_is_refused(index: list[int]) -> None:
    with pytest.raises(IndexError, match="empty"):
        dense(capacity=20).gather(np.array(index, np.int64))


def test_refused_fragments_change_nothing() -> None:
    view = dense(capacity=8)
    large = make_fragment(0, num_steps=3, num_envs=3)
    with pytest.raises(ValueError, match=r"9 transitions .* capacity of 8"):
        view.admit(large, b"0-0")
    assert view.num_bytes == 0
    first = make_fragment(1, num_steps=4, num_envs=2)
    view.admit(first, b"1-0")
    bad = {
        "observation is float32": dataclasses.replace(
            first, observation=first.observation[..., :3], final_observation=first.final_observation[:, :3]
        ),
        "observation is uint8": make_fragment(1, num_steps=4, num_envs=2, dtype=np.uint8),
        "action is int64": dataclasses.replace(first, action=np.zeros((4, 2), np.int64)),
        "action_value and state_value": dataclasses.replace(
            first, extras={"state_value": np.zeros((4, 2), np.float32)}
        ),
        "final observations": dataclasses.replace(
            make_fragment(2, num_steps=4, num_envs=2, end_probability=1.0),
            final_index=np.zeros((0, 2), np.int32),
        ),
    }
    for message, fragment in bad.items():
        with pytest.raises(ValueError, match=message):
            view.admit(fragment, b"2-0")
        view.check_valid()
        assert_equal(view, slow_transitions(first, gamma=GAMMA, n=N_STEP))
        assert (view.oldest_entry_id, view.first, len(view)) == (b"1-0", 0, 8)


@pytest.mark.parametrize("settings", [{"capacity": 0}, {"gamma": 1.5}, {"n_step": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        TransitionView(DenseRows(), **{"capacity": 8, "gamma": GAMMA, "n_step": N_STEP, **settings})


def test_admit_gives_the_td_errors_of_the_new_transitions() -> None:
    view = dense(capacity=100)
    plain = make_fragment(0, num_steps=6, num_envs=2, context=1)
    assert view.admit(plain, b"0-0") is None
    values = {name: np.ones((7, 2), np.float32) for name in ("action_value", "state_value")}
    errors = view.admit(dataclasses.replace(plain, extras=values), b"1-0")
    batch = view.gather(np.arange(12, 24))
    assert errors is not None and errors.dtype == np.float32
    np.testing.assert_array_equal(errors, np.abs(batch.n_step_return + batch.bootstrap_discount - 1))


@pytest.mark.parametrize(
    ("context", "steps", "rows"), [(0, 8, 1125), (3, 32, 1125), (84, 40, 3125), (0, 7, 1143)]
)
def test_rows_of_a_thousand_transitions(context: int, steps: int, rows: int) -> None:
    assert expected_rows(1000, context=context, steps=steps) == rows


def test_memory_of_a_million_frames_is_foretold() -> None:
    """84 x 84 bytes of 1,125,000 rows, each with 4 bytes for its stack, and 28 bytes a transition."""
    figure = dense_bytes(
        capacity=1_000_000, observation_shape=(84, 84), observation_dtype="uint8", frame_stack=4
    )
    assert figure == 1_125_000 * (84 * 84 + 4) + 28_000_000
