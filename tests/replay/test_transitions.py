"""A replay of transitions against a plain list of those that environments played, stacks of frames included."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_items import Player, Transition
from support.replays import admit, gather, gather_all, make_replay

from ddrl import codec
from ddrl.replay.replay import Replay
from ddrl.replay.transitions import TransitionItems, expected_rows
from ddrl.types import Batch, EnvSpec, Fragment

GAMMA, N_STEP = 0.5, 3  # dyadic: all sums are exact
SPACES = [((4,), "float32"), ((5, 3), "uint8"), ((2, 3, 2), "uint8"), ((6,), "uint8"), ((), "float32")]


def make(
    *, capacity: int, compressed: bool = False, gamma: float = GAMMA, n: int = N_STEP, frame_stack: int = 1
) -> Replay:
    items = TransitionItems(gamma=gamma, n_step=n, frame_stack=frame_stack)
    return make_replay(items, capacity=capacity, compressed=compressed)


def of_one(fragment: Fragment, *, gamma: float = GAMMA, n: int = N_STEP) -> Batch:
    """All transitions of a fragment, as a replay gathers them."""
    replay = make(capacity=fragment.num_transitions, gamma=gamma, n=n)
    admit(replay, fragment)
    replay.check_valid()
    batch: Batch = gather_all(replay)
    return batch


def plain(num_steps: int = 3, num_envs: int = 2, context: int = 0) -> Fragment:
    """A fragment of one long episode in each environment."""
    player = Player(num_envs=num_envs, end_probability=0.0)
    player.fragment(context)
    return player.fragment(num_steps, context)


def assert_batch(batch: Batch, expected: list[Transition]) -> None:
    """Exactly these transitions, in this order."""
    equal = partial(np.testing.assert_array_equal, strict=True)
    equal(batch.observation, np.stack([item.observation for item in expected]))
    equal(batch.action, np.array([item.action for item in expected], batch.action.dtype))
    equal(batch.n_step_return, np.float32([item.n_step_return for item in expected]))
    equal(batch.bootstrap_discount, np.float32([item.bootstrap_discount for item in expected]))
    for found, item in zip(batch.next_observation, expected, strict=True):
        assert item.next_observation is None or np.array_equal(found, item.next_observation)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    space=st.sampled_from(SPACES),
    frame_stack=st.sampled_from([1, 1, 2, 4]),
    end_probability=st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0]),
    compressed=st.booleans(),
    values=st.booleans(),
    n=st.integers(1, 12),
    gamma=st.sampled_from([0.5, 1.0]),
)
def test_equals_a_list_of_transitions_after_each_admission(
    data: st.DataObject, space: tuple[tuple[int, ...], str], frame_stack: int, end_probability: float,
    compressed: bool, values: bool, n: int, gamma: float,
) -> None:  # fmt: skip
    """Over the wire, from several players, with context from none to more than needed, growth and eviction."""
    capacity = data.draw(st.integers(8, 100), label="capacity")
    players = [
        Player(
            data.draw(st.integers(0, 2**32)), player=number, num_envs=number + 1, observation=space[0], dtype=space[1],
            frame_stack=frame_stack, end_probability=end_probability, values=values, continuous=frame_stack == 2,
        )
        for number in range(3)
    ]  # fmt: skip
    inputs = EnvSpec("x", *space, "discrete", (), (9,), frame_stack=frame_stack).input_shape
    replay = make(capacity=capacity, compressed=compressed, gamma=gamma, n=n, frame_stack=frame_stack)
    replay.check_valid()
    held: list[list[Transition]] = []
    sizes = st.tuples(st.sampled_from(players), st.integers(1, 12), st.integers(0, 3))
    admitted = 0
    for number, (player, num_steps, more) in enumerate(data.draw(st.lists(sizes, min_size=1, max_size=20))):
        num_steps = min(num_steps, capacity // len(player.lanes))
        fragment = player.fragment(num_steps, player.context + more)
        held.append(player.transitions(gamma=gamma, n=n))
        admitted += len(held[-1])
        while sum(map(len, held)) > capacity:
            held.pop(0)

        read = codec.decode(codec.encode(fragment))
        packed = replay.pack(read)
        replay.admit(packed, b"%d-0" % number, version=0)

        replay.check_valid()
        expected = [item for items in held for item in items]
        assert len(replay) == replay.num_items == len(expected) == admitted - replay.first_item
        assert replay.oldest_entry_id == b"%d-0" % (number + 1 - len(held))
        order = np.random.default_rng(number).permutation(len(expected))
        batch = gather(replay, order)
        assert_batch(batch, [expected[i] for i in order])
        assert batch.observation.shape[1:] == inputs and batch.observation.dtype == space[1]
        errors = packed.cut.td_error
        assert (errors is None) == (not values)
        if values:
            assert errors.dtype == np.float32 and errors.tolist() == [item.td_error for item in held[-1]]


def test_each_observation_is_stored_once_and_context_beyond_the_stacks_not_at_all() -> None:
    for context in (3, 30):
        player = Player(7, frame_stack=4)
        player.fragment(40)
        replay = make(capacity=100, frame_stack=4)
        fragment = player.fragment(20, context)
        admit(replay, fragment)
        num_finals = np.count_nonzero(fragment.truncated[-23:])
        assert num_finals and len(replay.rows.ring) == (20 + 3 + 1) * 2 + num_finals


def test_memory_is_allocated_with_the_first_fragment_and_then_stays() -> None:
    replay, player, sizes = make(capacity=64), Player(end_probability=0), set()
    assert (replay.num_bytes, len(replay), replay.first_item, replay.oldest_entry_id) == (0, 0, 0, None)
    for _ in range(20):
        admit(replay, player.fragment(16))
        sizes.add(replay.num_bytes)
    assert sizes == {(64 + 8) * 4 * 4 + 64 * (8 + 4 + 8 + 4 + 4)}


def test_gather_repeats_positions_and_returns_arrays_of_its_own() -> None:
    replay = make(capacity=8)
    admit(replay, plain(4))
    first, batch = gather(replay, [5]).observation.copy(), gather(replay, [5, 5, 0])
    np.testing.assert_array_equal(batch.observation[:2], np.repeat(first, 2, axis=0))
    batch.observation[:] = 77
    np.testing.assert_array_equal(gather(replay, [5]).observation, first)
    assert gather(replay, []).observation.shape == (0, 4)


@pytest.mark.parametrize("position", [[-1], [8], [0, 100]])
def test_positions_outside_are_refused(position: list[int]) -> None:
    replay = make(capacity=20)
    for empty in (position, []):
        with pytest.raises(IndexError, match="empty"):
            gather(replay, empty)
    admit(replay, plain(4))
    with pytest.raises(IndexError, match=r"0\.\.7"):
        gather(replay, position)


def test_refused_fragments_change_nothing() -> None:
    replay, player = make(capacity=8), Player(1)
    with pytest.raises(ValueError, match=r"9 transitions .* capacity of 8"):
        admit(replay, plain(3, 3))
    assert replay.num_bytes == 0
    first = player.fragment(4)
    admit(replay, first)
    narrow = {"observation": first.observation[..., :3], "final_observation": first.final_observation[:, :3]}
    ending = Player(2, end_probability=1.0).fragment(4)
    bad = {
        r"observation is float32\[3\], but the replay holds float32\[4\]": replace(first, **narrow),
        "observation is uint8": Player(1, dtype="uint8").fragment(4),
        "action is float32": replace(first, action=np.zeros((4, 2), np.float32)),
        "final observations": replace(ending, final_index=np.zeros((0, 2), np.int32)),
        "T = 0": replace(first, context=4),
    }
    for message, fragment in bad.items():
        with pytest.raises(ValueError, match=message):
            admit(replay, fragment)
        replay.check_valid()
        assert_batch(gather_all(replay), player.transitions(gamma=GAMMA, n=N_STEP))
        assert (replay.oldest_entry_id, replay.first_item, len(replay)) == (b"0-0", 0, 8)


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity: 0"):
        make(capacity=0)


def test_hand_example_of_a_truncation() -> None:
    fragment, final = plain(3), np.full((1, 4), 77, np.float32)
    fragment.truncated[1, 0] = True
    fragment = replace(fragment, final_index=np.array([[1, 0]], np.int32), final_observation=final)
    batch, rows = of_one(fragment, n=2), fragment.observation[..., 0].tolist()
    assert batch.observation[:, 0].tolist() == [*rows[0], *rows[1], *rows[2]]
    assert batch.next_observation[:, 0].tolist() == [77, rows[2][1], 77, rows[3][1], *rows[3]]
    assert batch.bootstrap_discount.tolist() == [0.25, 0.25, 0.5, 0.25, 0.5, 0.5]


def test_final_observations_may_come_in_any_order() -> None:
    fragment = Player(3, num_envs=3, end_probability=0.6).fragment(8)
    order = np.random.default_rng(0).permutation(len(fragment.final_index))
    columns = {name: getattr(fragment, name)[order] for name in ("final_index", "final_observation")}
    assert len(order) > 3
    shuffled = of_one(replace(fragment, **columns))
    np.testing.assert_array_equal(of_one(fragment).next_observation, shuffled.next_observation)


@pytest.mark.parametrize("reward", [3e38, -3e38])
def test_rewards_without_finite_sums_are_refused(reward: float) -> None:
    """Three of 1e38 are finite, two of 3e38 are not; a sum of one is what it is."""
    large, larger = (replace(plain(), reward=np.full((3, 2), r, np.float32)) for r in (reward / 3, reward))
    assert np.isfinite(of_one(large, gamma=1.0, n=100).n_step_return).all()
    assert np.isfinite(of_one(larger, gamma=1.0, n=1).n_step_return).all()
    with pytest.raises(ValueError, match=r"rewards of up to 3e\+38 have no finite sum of n_step 2; lower"):
        of_one(larger, gamma=1.0, n=2)


COLUMN = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    "extras",
    [
        {"action_value": COLUMN},
        {"state_value": COLUMN},
        {"action_value": COLUMN, "state_value": COLUMN.astype(np.float64)},
        {"action_value": COLUMN[..., None], "state_value": COLUMN},
    ],
)
def test_values_of_another_form_are_refused(extras: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="action_value and state_value"):
        of_one(replace(plain(), extras=extras))


@pytest.mark.parametrize(
    ("context", "steps", "rows"), [(0, 8, 1125), (3, 32, 1125), (84, 40, 3125), (0, 7, 1143)]
)
def test_rows_of_a_thousand_transitions(context: int, steps: int, rows: int) -> None:
    assert expected_rows(1000, context=context, steps=steps) == rows


@pytest.mark.parametrize("compressed", [False, True])
def test_a_plan_outlives_its_items_and_may_be_carried_out_by_another_thread(compressed: bool) -> None:
    player = Player(6, num_envs=3, observation=(40, 40), dtype="uint8", frame_stack=4)
    replay = make(capacity=240, compressed=compressed, frame_stack=4)
    rng = np.random.default_rng(1)
    held: list[list[Transition]] = []
    plans, futures, expected = [], [], []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            admit(replay, player.fragment(20))
            held = [*held, player.transitions(gamma=GAMMA, n=N_STEP)][-4:]
            items = [item for part in held for item in part]
            position = rng.integers(0, len(replay), 16)
            futures.append(pool.submit(replay.plan(position)))
            plans.append(replay.plan(position))
            expected.append([items[i] for i in position])
    for future, plan, one in zip(futures, plans, expected, strict=True):
        assert_batch(future.result(), one)
        assert_batch(plan(), one)
