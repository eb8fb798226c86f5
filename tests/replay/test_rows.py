"""The ring and the two stores of rows against plain lists."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import make_fragment
from support.reference_stacks import Player

from ddrl.replay import outputs as outputs_module
from ddrl.replay import rows as rows_module
from ddrl.replay.blocks import Block, block, stacked
from ddrl.replay.outputs import Outputs
from ddrl.replay.ring import Ring
from ddrl.replay.rows import CompressedRows, DenseRows, Rows

STORES = [DenseRows, CompressedRows]


@settings(max_examples=100, deadline=None)
@given(
    room=st.integers(1, 12),
    moves=st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=1, max_size=30),
)
def test_a_ring_holds_what_a_list_would(room: int, moves: list[tuple[int, float]]) -> None:
    ring, held, appended = Ring(room), [], 0
    for num_rows, share in moves:
        values = np.arange(appended, appended + num_rows)
        assert ring.append(number=values, pair=np.stack([values, -values], 1)) == appended
        appended += num_rows
        held += values.tolist()
        dropped = int(share * len(held))
        ring.drop(dropped)
        held = held[dropped:]
        assert (len(ring), ring.first) == (len(held), appended - len(held))
        slots = ring.slots(ring.first + np.arange(len(held)))
        assert ring.columns["number"][slots].tolist() == held
        assert ring.columns["pair"][slots].tolist() == [[x, -x] for x in held]
        for offset in (-ring.num_slots, ring.num_slots):
            assert ring.wrapped(np.arange(ring.num_slots) + offset).tolist() == list(range(ring.num_slots))
    assert ring.num_bytes == ring.num_slots * 24


def test_a_ring_grows_by_a_quarter() -> None:
    ring = Ring(8)
    ring.append(x=np.zeros(8))
    ring.append(x=np.zeros(1))
    assert ring.num_slots == 10
    ring.append(x=np.zeros(20))
    assert ring.num_slots == 29


def test_a_ring_refuses_other_columns() -> None:
    ring = Ring(8)
    ring.append(x=np.zeros((2, 3)))
    for bad in ({"y": np.zeros((2, 3))}, {"x": np.zeros((2, 3)), "y": np.zeros(2)}):
        with pytest.raises(ValueError, match="columns"):
            ring.append(**bad)
    with pytest.raises(ValueError, match=r"x is float64\[4\], but the view holds float64\[3\]"):
        ring.check("x", np.zeros((2, 4)))
    with pytest.raises(ValueError, match="room: 0"):
        Ring(0)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("shape", "dtype"), [((5, 3), "uint8"), ((3,), "float32"), ((2, 2), "float64")])
@pytest.mark.parametrize("frame_stack", [1, 4])
def test_reads_the_stacks_of_every_block_held(
    store: type, shape: tuple[int, ...], dtype: str, frame_stack: int
) -> None:
    player = Player(1, frame_stack=frame_stack, shape=shape, dtype=dtype)
    rows: Rows = store(frame_stack=frame_stack, expected_rows=8)
    rng = np.random.default_rng(0)
    held: list[tuple[int, Block]] = []
    for _ in range(15):
        made = block(player.fragment(int(rng.integers(1, 40)), context=6), frame_stack)
        held.append((rows.append(rows.pack(made)), made))
        rows.check_valid()
        if len(held) > 3:
            rows.drop(len(held.pop(0)[1].rows))
            rows.check_valid()
        assert len(rows) == sum(len(made.rows) for _, made in held)
        numbers = np.concatenate([first + np.arange(len(made.rows)) for first, made in held])
        expected = np.concatenate([stacked(made, np.arange(len(made.rows)), frame_stack) for _, made in held])
        order = rng.integers(0, len(numbers), (3, 7))
        np.testing.assert_array_equal(rows.plan(numbers[order])(), expected[order])
        assert rows.plan(numbers[:0])().shape == (0, *expected.shape[1:])
    assert held[0][0] > 0, "numbers never begin anew"


@pytest.mark.parametrize("store", STORES)
def test_other_observations_are_refused_and_change_nothing(store: type) -> None:
    rows: Rows = store()
    made = block(make_fragment(0, num_steps=3, num_envs=2), 1)
    rows.append(rows.pack(made))
    before = (len(rows), rows.num_bytes)
    for observations, message in [
        (made.rows[:, :3], r"observation is float32\[3\]"),
        (made.rows.astype("f8"), "is float64"),
    ]:
        bad = Block(observations, made.at, made.after, None)
        for refuse in (rows.check, rows.append):
            with pytest.raises(ValueError, match=message):
                refuse(rows.pack(bad))
    assert (len(rows), rows.num_bytes) == before
    rows.check_valid()


def test_chunks_are_evened_out_and_leave_with_their_block() -> None:
    """A lane of 61 rows makes three chunks of 20 or 21; a final observation its own."""
    rows = CompressedRows(frame_stack=4)
    player = Player(2, num_envs=2)
    first, second = (block(player.fragment(60, context=0), 4) for _ in range(2))
    rows.append(rows.pack(first))
    finals = len(first.rows) - 122
    assert finals > 0
    assert np.bincount(rows._ring.columns["chunk"][: len(rows)]).tolist() == [21, 20, 20] * 2 + [1] * finals
    rows.append(rows.pack(second))
    rows.drop(len(first.rows))
    rows.check_valid()
    assert rows._first_chunk == 6 + finals
    rows.drop(len(second.rows))
    rows.check_valid()
    assert rows._chunk_bytes == 0 and not rows._chunks


def test_frames_that_resemble_each_other_take_little_memory() -> None:
    still = np.random.default_rng(0).integers(0, 256, (1, 1, 40, 40)).astype(np.uint8)
    made = block(make_fragment(0, num_steps=63, num_envs=2, end_probability=0.0), 4)
    image = Block(np.repeat(still[0], 128, axis=0), made.at.T.reshape(2, 64).T, made.after, made.back)
    rows = CompressedRows(frame_stack=4, expected_rows=128)
    rows.append(rows.pack(image))
    assert rows.num_bytes < 128 * 1600 / 10


def test_a_chunk_is_decompressed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = CompressedRows(frame_stack=4)
    made = block(Player(3, num_envs=2).fragment(15, context=0), 4)
    rows.append(rows.pack(made))
    calls = []
    real = rows_module.blosc2.decompress2
    monkeypatch.setattr(
        rows_module.blosc2, "decompress2", lambda data, **kwargs: (calls.append(data), real(data, **kwargs))
    )
    plan = rows.plan(made.at.T[:, [3, 9, 3, 12]])
    assert not calls, "planning decompresses nothing"
    plan()
    assert len(calls) == len(set(calls)) == 2


def test_threads_decompress_into_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have decompressed their chunk before either copies from it."""
    rows = CompressedRows(frame_stack=4)
    made = block(Player(4, num_envs=2).fragment(15, context=0), 4)
    rows.append(rows.pack(made))
    both, real = threading.Barrier(2, timeout=30), rows_module.blosc2.decompress2

    def slow(data: bytes, **kwargs: Any) -> None:
        real(data, **kwargs)
        both.wait()

    monkeypatch.setattr(rows_module.blosc2, "decompress2", slow)
    plans = [rows.plan(made.at[:, lane]) for lane in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(plan) for plan in plans]]
    for lane in range(2):
        np.testing.assert_array_equal(found[lane], stacked(made, made.at[:, lane], 4))


def test_large_arrays_are_used_again_when_nobody_refers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "POOLED_BYTES", 1)
    outputs = Outputs()
    first = outputs.take((4, 3), np.dtype("f4"))
    view = first[1:]
    second = outputs.take((4, 3), np.dtype("f4"))
    assert not np.shares_memory(first, second)
    address = first.ctypes.data
    del first
    third = outputs.take((4, 3), np.dtype("f4"))
    assert third.ctypes.data != address, "a view still refers to it"
    del view
    assert outputs.take((4, 3), np.dtype("f4")).ctypes.data == address
    assert outputs.take((4, 3), np.dtype("u1")).dtype == np.uint8


def test_of_large_arrays_those_in_use_are_kept_and_hardly_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "POOLED_BYTES", 1)
    outputs = Outputs()
    in_use = [outputs.take((2,), np.dtype("f4")) for _ in range(20)]
    assert len({array.ctypes.data for array in in_use}) == 20 and outputs.num_bytes == 20 * 8
    del in_use[3:]
    newest = outputs.take((2,), np.dtype("f4"))
    assert outputs.num_bytes == (3 + 1 + outputs_module.MAX_IDLE) * 8  # those in use, and for the next batch
    del newest
    other = outputs.take((2,), np.dtype("u1"))
    assert outputs.num_bytes == 3 * 8 + other.nbytes  # batches have another shape now


@pytest.mark.parametrize("store", STORES)
def test_batches_that_are_kept_count_as_memory(store: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "POOLED_BYTES", 1)
    rows: Rows = store(frame_stack=2)
    made = block(Player(5, num_envs=2, frame_stack=2).fragment(15, context=0), 2)
    rows.append(rows.pack(made))
    before = rows.num_bytes
    batch = rows.plan(made.at[:, 0])()
    assert rows.num_bytes == before + batch.nbytes


@pytest.mark.parametrize("store", STORES)
def test_packing_changes_nothing_and_fits_whatever_is_appended_meanwhile(store: type) -> None:
    rows: Rows = store(frame_stack=3)
    player = Player(6, frame_stack=3)
    one, two = (block(player.fragment(num_steps, context=2), 3) for num_steps in (40, 9))
    empty = rows.num_bytes
    late = rows.pack(one)
    assert (len(rows), rows.num_bytes) == (0, empty)
    first_of_two = rows.append(rows.pack(two))
    first_of_one = rows.append(late)
    rows.check_valid()
    assert (first_of_two, first_of_one) == (0, len(two.rows))
    for made, first in ((one, first_of_one), (two, first_of_two)):
        every = np.arange(len(made.rows))
        np.testing.assert_array_equal(rows.plan(first + every)(), stacked(made, every, 3))


def test_large_batches_of_pairs_are_read_in_parts() -> None:
    """So many that `_parts` divides them; the same as one by one."""
    frames = np.random.default_rng(0).integers(0, 256, (2, 120, 84, 84)).astype(np.uint8)
    made = block(make_fragment(0, num_steps=119, num_envs=2, end_probability=0.0), 1)
    at = np.arange(240).reshape(2, 120).T
    rows = DenseRows()
    rows.append(rows.pack(Block(frames.reshape(240, 84, 84), at, made.after, None)))
    numbers = np.random.default_rng(1).integers(0, 240, (2, 200))
    np.testing.assert_array_equal(rows.plan(numbers)(), frames.reshape(240, 84, 84)[numbers])
