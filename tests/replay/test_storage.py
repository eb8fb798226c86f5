"""Blocks by hand; the ring, the pool of arrays and both kinds of rows against plain lists."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_items import Player

from ddrl.networks.device import choose_device
from ddrl.replay import storage
from ddrl.replay.device_rows import DeviceRows
from ddrl.replay.storage import (
    ArrayPool,
    Block,
    CompressedRows,
    DenseRows,
    Ring,
    Rows,
    is_image,
    observation_block,
)
from ddrl.types import Fragment

both_stores = pytest.mark.parametrize("store", [DenseRows, CompressedRows])
IMAGE = {"observation": (5, 3), "dtype": "uint8"}


def hand_fragment(*, context: int = 0, image: bool = False) -> Fragment:
    """Three steps of two environments; 0 is truncated by step 1, 1 terminates with step 0.

    An observation is 10 * step + environment, the final one 99; images of it are 1 x 1.
    """
    made = Player(end_probability=0.0).fragment(3)
    made.truncated[1, 0] = made.terminated[0, 1] = True
    dtype, shape = (np.uint8, (1, 1)) if image else (np.float32, (1,))
    observation = (10 * np.arange(4)[:, None] + np.arange(2)).astype(dtype)
    return dataclasses.replace(
        made,
        context=context,
        observation=observation.reshape(4, 2, *shape),
        final_index=np.array([[1, 0]], np.int32),
        final_observation=np.full((1, *shape), 99, dtype),
    )


def played(player: Player, num_steps: int, *, context: int | None = None) -> Block:
    """The observations of the player's next steps."""
    return observation_block(player.fragment(num_steps, context), player.frame_stack)


def stored(store: type, player: Player, num_steps: int) -> tuple[Rows, Block]:
    """Return rows that hold the player's next steps, and these."""
    rows = store(frame_stack=player.frame_stack, expected_rows=128)
    made = played(player, num_steps)
    rows.append(rows.pack(made))
    return rows, made


VECTORS = [0, 1, 10, 11, 20, 21, 30, 31, 99], [[0, 2, 4, 6], [1, 3, 5, 7]], [[2, 8, 6], [3, 5, 7]]
IMAGES = [0, 10, 20, 30, 1, 11, 21, 31, 99], [[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 8, 3], [5, 6, 7]]


@pytest.mark.parametrize(
    ("image", "expected", "back", "ends"),
    [
        (False, VECTORS, [0, 0, 2, 0, 0, 2, 2, 2, 6], [6, 7, 8]),
        (True, IMAGES, [0, 1, 0, 1, 0, 0, 1, 1, 7], [3, 7, 8]),
    ],
)
def test_vectors_lie_step_by_step_and_images_environment_by_environment(
    image: bool, expected: tuple[list[Any], ...], back: list[int], ends: list[int]
) -> None:
    block = observation_block(hand_fragment(image=image), 3)
    found = (block.observation.reshape(-1), block.row.T, block.next_row.T)
    assert tuple(array.tolist() for array in found) == expected
    assert block.back is not None and block.back.dtype == np.int32 and block.back.tolist() == back
    stacks = block.stacks(np.array(ends), 3)
    assert stacks.shape == ((3, 3, 1, 1) if image else (3, 3))
    assert stacks.reshape(3, 3).tolist() == [[20, 20, 30], [11, 21, 31], [0, 10, 99]]


@pytest.mark.parametrize(
    ("context", "first_row", "finals"), [(None, 0, [[99]]), (5, 0, [[99]]), (1, 1, [[99]]), (0, 2, [])]
)
def test_context_is_kept_up_to_the_limit(context: int | None, first_row: int, finals: list[Any]) -> None:
    fragment = hand_fragment(context=2)
    block = observation_block(fragment, 2, context=context)
    assert block.next_row.shape == (3 - first_row, 2)
    assert block.observation[block.row].tolist() == fragment.observation[first_row:].tolist()
    assert block.observation[block.row.size :].tolist() == finals


def test_a_stack_reaches_no_farther_than_the_context_kept() -> None:
    block = observation_block(hand_fragment(context=2), 4, context=1)
    assert block.stacks(block.row[0], 4).tolist() == [[10] * 4, [11] * 4]
    assert block.stacks(block.row[2], 4).tolist() == [[20, 20, 20, 30], [11, 11, 21, 31]]
    assert observation_block(hand_fragment(), 1).back is None, "nothing is stacked"


def test_images_from_the_wire_are_not_copied() -> None:
    made = Player(**IMAGE, end_probability=0.0).fragment(3)
    lanes = np.ascontiguousarray(made.observation.swapaxes(0, 1))  # as the codec returns it
    block = observation_block(dataclasses.replace(made, observation=lanes.swapaxes(0, 1)), 4)
    assert np.shares_memory(block.observation, lanes)


def test_images_are_bytes_of_two_axes() -> None:
    images = [("uint8", (84, 84)), (np.dtype(np.uint8), (84, 84, 3))]
    others = [("uint8", (128,)), ("int8", (84, 84)), (np.float32, (84, 84))]
    assert [is_image(*space) for space in images + others] == [True] * 2 + [False] * 3


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
        rows = ring.rows(ring.first, len(held))
        assert rows["number"].tolist() == held
        assert rows["pair"].tolist() == [[x, -x] for x in held]
        for offset in (-ring.num_slots, ring.num_slots):
            assert ring.wrapped(np.arange(ring.num_slots) + offset).tolist() == list(range(ring.num_slots))
    assert ring.num_bytes == ring.num_slots * 24


@pytest.mark.parametrize("store", [DenseRows, CompressedRows, partial(DeviceRows, choose_device("auto"))])
@pytest.mark.parametrize(("shape", "dtype"), [((5, 3), "uint8"), ((3,), "float32"), ((2, 2), "float64")])
@pytest.mark.parametrize("frame_stack", [1, 4])
def test_stacks_of_every_block_held_can_be_read(
    store: Callable[..., Rows], shape: tuple[int, ...], dtype: str, frame_stack: int
) -> None:
    player = Player(1, observation=shape, dtype=dtype, frame_stack=frame_stack)
    rows = store(frame_stack=frame_stack, expected_rows=8)
    rng = np.random.default_rng(0)
    held: list[tuple[int, Block]] = []
    for _ in range(8):
        pair = [played(player, int(rng.integers(1, 40)), context=6) for _ in range(2)]
        num_bytes, num_rows = rows.num_bytes, len(rows.ring)
        packed = [(rows.pack(made), made) for made in pair]
        assert (len(rows.ring), rows.num_bytes) == (num_rows, num_bytes), "packing changes nothing"
        for one, made in reversed(packed):  # what was packed fits, whatever is appended meanwhile
            held.append((rows.append(one), made))
            rows.check_valid()
            if len(held) > 3:
                rows.drop(len(held.pop(0)[1].observation))
                rows.check_valid()
        assert len(rows.ring) == sum(len(made.observation) for _, made in held)
        every = [np.arange(len(made.observation)) for _, made in held]
        numbers = np.concatenate([first + rows for (first, _), rows in zip(held, every, strict=True)])
        stacks = [made.stacks(rows, frame_stack) for (_, made), rows in zip(held, every, strict=True)]
        expected, order = np.concatenate(stacks), rng.integers(0, len(numbers), (3, 7))
        found = torch.as_tensor(rows.plan(numbers[order])()).cpu()
        np.testing.assert_array_equal(found, expected[order])
        assert rows.plan(numbers[:0])().shape == (0, *expected.shape[1:])
    assert held[0][0] > 0, "numbers never begin anew"
    for _, made in held:
        rows.drop(len(made.observation))
        rows.check_valid()


def test_chunks_are_numbered_beyond_what_32_bits_hold() -> None:
    player, rows = Player(3, frame_stack=4, **IMAGE), CompressedRows(frame_stack=4)
    rows._first_chunk = rows._next_chunk = 2**31 - 1
    for _ in range(3):
        rows.append(rows.pack(played(player, 15)))
    rows.check_valid()


def test_a_chunk_is_decompressed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, made = stored(CompressedRows, Player(3, frame_stack=4, **IMAGE), 15)
    calls, real = [], storage.blosc2.decompress2
    spy = lambda data, **kwargs: calls.append(data) or real(data, **kwargs)  # noqa: E731
    monkeypatch.setattr(storage.blosc2, "decompress2", spy)
    plan = rows.plan(made.row.T[:, [3, 9, 3, 12]])
    assert not calls, "planning decompresses nothing"
    plan()
    assert len(calls) == len(set(calls)) == 2


def test_threads_decompress_into_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have decompressed their chunk before either copies from it."""
    rows, made = stored(CompressedRows, Player(4, frame_stack=4, **IMAGE), 15)
    both, real = threading.Barrier(2, timeout=30), storage.blosc2.decompress2

    def slow(data: bytes, **kwargs: Any) -> None:
        real(data, **kwargs)
        both.wait()

    monkeypatch.setattr(storage.blosc2, "decompress2", slow)
    plans = [rows.plan(made.row[:, lane]) for lane in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(plan) for plan in plans]]
    for lane in range(2):
        np.testing.assert_array_equal(found[lane], made.stacks(made.row[:, lane], 4))


def test_large_arrays_are_used_again_when_nobody_refers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "POOLED_BYTES", 1)
    pool, floats = ArrayPool(), np.dtype("f4")
    first = pool.take((4, 3), floats)
    view, address = first[1:], first.ctypes.data
    del first
    second = pool.take((4, 3), floats)
    assert not np.shares_memory(view, second), "a view still refers to it"
    del view
    assert pool.take((4, 3), floats).ctypes.data == address
    in_use = [second, *(pool.take((4, 3), floats) for _ in range(20))]
    assert len({array.ctypes.data for array in in_use}) == 21 and pool.num_bytes == 21 * 48
    del in_use[3:]
    newest = pool.take((4, 3), floats)
    assert pool.num_bytes == (3 + 1 + storage.MAX_IDLE) * 48  # those in use, and for the next batch
    del newest
    other = pool.take((2,), np.dtype("u1"))
    assert other.dtype == np.uint8 and pool.num_bytes == 3 * 48 + 2  # batches have another shape now


@both_stores
def test_pooled_batches_count_as_memory(store: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the rows: images that resemble each other take a tenth of their size where they are compressed."""
    monkeypatch.setattr(storage, "POOLED_BYTES", 1)
    player = Player(frame_stack=4, observation=(40, 40), dtype="uint8", end_probability=0.0)
    rows, made = stored(store, player, 63)
    before = rows.num_bytes
    assert before < 128 * 1600 / 10 or store is DenseRows
    batch = rows.plan(made.row[:, 0])()
    assert rows.num_bytes == before + batch.nbytes


def test_large_batches_of_pairs_are_read_in_parts() -> None:
    """The same as one by one."""
    player = Player(observation=(84, 84), dtype="uint8", end_probability=0.0)
    rows, made = stored(DenseRows, player, 119)
    numbers = np.random.default_rng(1).integers(0, 240, (2, 200))
    np.testing.assert_array_equal(rows.plan(numbers)(), made.observation[numbers])
