"""Stacks read from the views equal those that the environment kept, frame by frame, whatever came in between."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.reference_stacks import Expected, Player, expected_transitions

from ddrl import codec
from ddrl.replay.rows import CompressedRows, DenseRows
from ddrl.replay.view import TransitionView
from ddrl.types import Batch, EnvSpec

GAMMA, N_STEP = 0.5, 3  # dyadic: all sums are exact
STORES = [DenseRows, CompressedRows]
SPACES = [((5, 3), "uint8"), ((2, 3, 2), "uint8"), ((6,), "uint8"), ((3,), "float32"), ((), "float32")]


def make_view(store: type, *, capacity: int, expected_rows: int = 16, frame_stack: int = 4) -> TransitionView:
    rows = store(frame_stack=frame_stack, expected_rows=expected_rows)
    return TransitionView(rows, capacity=capacity, gamma=GAMMA, n_step=N_STEP, frame_stack=frame_stack)


def assert_batch(batch: Batch, expected: list[Expected], input_shape: tuple[int, ...]) -> None:
    """Exactly these transitions, in this order."""
    assert len(batch.observation) == len(expected)
    assert batch.observation.shape[1:] == batch.next_observation.shape[1:] == input_shape
    for i, item in enumerate(expected):
        np.testing.assert_array_equal(batch.observation[i], item.observation.reshape(input_shape))
        assert batch.action[i] == item.action
        assert batch.n_step_return[i] == item.n_step_return
        assert batch.bootstrap_discount[i] == item.bootstrap_discount
        if item.next_observation is not None:
            np.testing.assert_array_equal(
                batch.next_observation[i], item.next_observation.reshape(input_shape)
            )


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("shape", "dtype"), SPACES)
def test_200_episodes_equal_the_plain_stacks(store: type, shape: tuple[int, ...], dtype: str) -> None:
    """Over the wire, with fragments of 1 to 40 steps, context from none to more than needed, growth and eviction."""
    player = Player(len(shape), shape=shape, dtype=dtype)
    spec = EnvSpec("x", shape, dtype, "discrete", (), (9,), frame_stack=4)
    view = make_view(store, capacity=300)
    rng = np.random.default_rng(0)
    held: list[list[Expected]] = []
    while player.num_episodes < 200:
        # The first fragments are short: their context is what was played.
        num_steps = int(rng.integers(1, 4 if player.num_fragments < 4 else 41))
        fragment = player.fragment(num_steps, context=3 + int(rng.integers(3)))
        held.append(expected_transitions(player.steps[-num_steps:], gamma=GAMMA, n=N_STEP))
        while sum(map(len, held)) > view.capacity:
            held.pop(0)

        view.admit(codec.decode(codec.encode(fragment)), b"%d-0" % fragment.seq)

        view.check_valid()
        expected = [item for items in held for item in items]
        assert len(view) == len(expected)
        order = rng.permutation(len(expected))
        assert_batch(view.gather(order), [expected[i] for i in order], spec.input_shape)
    assert view.first > 0, "some were evicted"


@pytest.mark.parametrize("store", STORES)
def test_plans_stay_right_after_what_they_read_is_evicted(store: type) -> None:
    player = Player(5)
    view = make_view(store, capacity=60)
    plans, expected = [], []
    for _ in range(12):
        view.admit(player.fragment(10, context=3), b"1-0")
        newest = expected_transitions(player.steps[-10:], gamma=GAMMA, n=N_STEP)
        plans.append(view.plan(np.arange(len(view) - len(newest), len(view))))
        expected.append(newest)
    for plan, items in zip(plans, expected, strict=True):
        assert_batch(plan(), items, (4, 5, 3))


@pytest.mark.parametrize("store", STORES)
def test_plans_may_be_carried_out_by_threads_meanwhile(store: type) -> None:
    player = Player(6, shape=(40, 40))
    view = make_view(store, capacity=240)
    rng = np.random.default_rng(1)
    held: list[list[Expected]] = []
    futures, expected = [], []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(40):
            view.admit(player.fragment(20, context=3), b"1-0")
            held = [*held, expected_transitions(player.steps[-20:], gamma=GAMMA, n=N_STEP)][-4:]
            items = [item for part in held for item in part]
            position = rng.integers(0, len(view), 16)
            futures.append(pool.submit(view.plan(position)))
            expected.append([items[i] for i in position])
    for future, one in zip(futures, expected, strict=True):
        assert_batch(future.result(), one, (4, 40, 40))


def test_context_beyond_the_stacks_takes_no_rows() -> None:
    rows = {}
    for context in (3, 30):
        player = Player(7, num_envs=2)
        player.fragment(40, context=0)
        store = DenseRows(frame_stack=4)
        TransitionView(store, capacity=100, gamma=GAMMA, n_step=N_STEP, frame_stack=4).admit(
            player.fragment(20, context=context), b"1-0"
        )
        rows[context] = len(store)
    truncated = sum(step.truncated for row in player.steps[-23:] for step in row)
    assert rows[3] == rows[30] == (20 + 3 + 1) * 2 + truncated


def test_the_stack_of_view_and_rows_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="frame_stack: 4, but the rows stack 2"):
        TransitionView(DenseRows(frame_stack=2), capacity=8, gamma=GAMMA, n_step=1, frame_stack=4)
