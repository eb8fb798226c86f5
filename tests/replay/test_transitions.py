"""A replay of transitions against a plain list, and stacks of frames against those that the environment kept."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import Transition, make_fragment, slow_transitions
from support.reference_stacks import Expected, Player, expected_transitions
from support.replays import admit, gather, gather_all, make_replay

from ddrl import codec
from ddrl.replay.replay import Replay
from ddrl.replay.transitions import TransitionItems, expected_rows
from ddrl.types import Batch, EnvSpec, Fragment

GAMMA, N_STEP = 0.5, 3  # dyadic: all sums are exact
SPACES = [((5, 3), "uint8"), ((2, 3, 2), "uint8"), ((6,), "uint8"), ((3,), "float32"), ((), "float32")]


def make(
    *,
    capacity: int,
    compressed: bool = False,
    gamma: float = GAMMA,
    n_step: int = N_STEP,
    frame_stack: int = 1,
) -> Replay:
    items = TransitionItems(gamma=gamma, n_step=n_step, frame_stack=frame_stack)
    return make_replay(items, capacity=capacity, compressed=compressed)


def of_one(fragment: Fragment, *, gamma: float = GAMMA, n_step: int = N_STEP) -> Batch:
    """All transitions of a fragment, as a replay gathers them."""
    replay = make(capacity=fragment.num_transitions, gamma=gamma, n_step=n_step)
    admit(replay, fragment)
    replay.check_valid()
    batch: Batch = gather_all(replay)
    return batch


def assert_equal(replay: Replay, twin: list[Transition]) -> None:
    """Every transition held, gathered in random order, is the twin's, exactly."""
    assert len(replay) == replay.num_items == len(twin)
    order = np.random.default_rng(len(twin)).permutation(len(twin))
    batch = gather(replay, order)
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
        st.integers(1, 12), st.integers(1, 5), st.integers(0, 3), st.sampled_from([0.0, 0.2, 0.9, 1.0])
    )
    return capacity, draw(st.lists(size.filter(lambda s: s[0] * s[1] <= capacity), min_size=1, max_size=25))


@settings(max_examples=100, deadline=None)
@given(
    sizes=fragment_sizes(),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.float32, np.uint8]),
    compressed=st.booleans(),
    n=st.integers(1, 12),
    gamma=st.sampled_from([0.5, 1.0]),
)
def test_equals_a_list_of_transitions_after_each_admission(
    sizes: tuple[int, list[tuple[int, int, int, float]]],
    seed: int,
    dtype: type,
    compressed: bool,
    n: int,
    gamma: float,
) -> None:
    capacity, fragments = sizes
    replay = make(capacity=capacity, compressed=compressed, gamma=gamma, n_step=n)
    replay.check_valid()
    held: list[list[Transition]] = []
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
        held.append(slow_transitions(fragment, gamma=gamma, n=n))
        while sum(map(len, held)) > capacity:
            held.pop(0)
        admitted += num_steps * num_envs

        admit(replay, fragment)

        replay.check_valid()
        assert_equal(replay, [item for items in held for item in items])
        assert replay.oldest_entry_id == b"%d-0" % (serial + 1 - len(held))
        assert replay.first_item + len(replay) == admitted
        assert gather(replay, [0]).observation.dtype == dtype


def test_each_observation_is_stored_once() -> None:
    fragment = make_fragment(0, num_steps=9, num_envs=3, context=2)
    replay = make(capacity=100)
    admit(replay, fragment)
    num_final = np.count_nonzero(fragment.truncated[2:])
    assert num_final and len(replay.rows.ring) == (9 + 1) * 3 + num_final


def test_oldest_fragments_are_evicted_whole() -> None:
    replay = make(capacity=10)
    for serial in range(3):
        admit(replay, make_fragment(serial, num_steps=2, num_envs=2, serial=serial))
    assert len(replay) == 8
    assert (replay.oldest_entry_id, replay.first_item) == (b"1-0", 4)
    assert gather(replay, [0, 7]).observation[:, 0].tolist() == [1, 2]


def test_short_fragments_grow_the_rows_and_keep_the_capacity() -> None:
    replay = make(capacity=100)
    admit(replay, make_fragment(0, num_steps=50, num_envs=1, end_probability=0))
    before = replay.num_bytes
    for serial in range(1, 250):
        admit(replay, make_fragment(serial, num_steps=1, num_envs=1, serial=serial, end_probability=1.0))
        replay.check_valid()
    assert len(replay) == 100
    assert replay.num_bytes > before
    assert gather_all(replay).observation[:, 0].tolist() == list(range(150, 250))


def test_memory_is_allocated_with_the_first_fragment_and_then_stays() -> None:
    replay = make(capacity=64)
    assert (replay.num_bytes, len(replay), replay.first_item, replay.oldest_entry_id) == (0, 0, 0, None)
    sizes = set()
    for serial in range(20):
        admit(replay, make_fragment(serial, num_steps=16, num_envs=2, serial=serial, end_probability=0))
        sizes.add(replay.num_bytes)
    assert sizes == {(64 + 8) * 4 * 4 + 64 * (8 + 4 + 2 * 4 + 4 + 4)}


def test_gather_repeats_positions_and_returns_arrays_of_its_own() -> None:
    replay = make(capacity=8)
    admit(replay, make_fragment(0, num_steps=4, num_envs=2))
    batch = gather(replay, [5, 5, 0])
    assert batch.observation[:, 1:3].tolist() == [[2, 1], [2, 1], [0, 0]]
    batch.observation[:] = 77
    assert gather(replay, [5]).observation[0, 1] == 2
    assert gather(replay, []).observation.shape == (0, 4)


@pytest.mark.parametrize("position", [[-1], [8], [0, 100]])
def test_positions_outside_are_refused(position: list[int]) -> None:
    replay = make(capacity=20)
    for _ in range(2):
        with pytest.raises(IndexError, match=r"empty|0\.\.7"):
            gather(replay, position)
        admit(replay, make_fragment(0, num_steps=4, num_envs=2))


def test_an_empty_replay_gathers_nothing() -> None:
    with pytest.raises(IndexError, match="empty"):
        gather(make(capacity=20), [])


def test_refused_fragments_change_nothing() -> None:
    replay = make(capacity=8)
    with pytest.raises(ValueError, match=r"9 transitions .* capacity of 8"):
        admit(replay, make_fragment(0, num_steps=3, num_envs=3))
    assert replay.num_bytes == 0
    first = make_fragment(1, num_steps=4, num_envs=2, serial=1)
    admit(replay, first)
    bad = {
        r"observation is float32\[3\], but the replay holds float32\[4\]": dataclasses.replace(
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
        "T = 0": dataclasses.replace(first, context=len(first.reward)),
    }
    for message, fragment in bad.items():
        with pytest.raises(ValueError, match=message):
            admit(replay, fragment)
        replay.check_valid()
        assert_equal(replay, slow_transitions(first, gamma=GAMMA, n=N_STEP))
        assert (replay.oldest_entry_id, replay.first_item, len(replay)) == (b"1-0", 0, 8)


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity: 0"):
        make(capacity=0)


def test_hand_example_of_a_truncation() -> None:
    fragment = make_fragment(0, num_steps=3, num_envs=2, end_probability=0.0)
    fragment.truncated[1, 0] = True
    fragment = dataclasses.replace(
        fragment,
        final_index=np.array([[1, 0]], np.int32),
        final_observation=np.array([[0, 1, 0, 1]], np.float32),
    )
    batch = of_one(fragment, n_step=2)
    assert batch.observation[:, 1:].tolist() == [[t, lane, 0] for t in range(3) for lane in range(2)]
    final = [1, 0, 1]
    assert batch.next_observation[:, 1:].tolist() == [
        final,
        [2, 1, 0],
        final,
        [3, 1, 0],
        [3, 0, 0],
        [3, 1, 0],
    ]
    assert batch.bootstrap_discount.tolist() == [0.25, 0.25, 0.5, 0.25, 0.5, 0.5]


def test_final_observations_may_come_in_any_order() -> None:
    fragment = make_fragment(3, num_steps=8, num_envs=3, context=2, end_probability=0.6)
    order = np.random.default_rng(0).permutation(len(fragment.final_index))
    shuffled = dataclasses.replace(
        fragment,
        final_index=fragment.final_index[order],
        final_observation=fragment.final_observation[order],
    )
    assert len(order) > 3
    np.testing.assert_array_equal(of_one(fragment).next_observation, of_one(shuffled).next_observation)


@pytest.mark.parametrize("reward", [3e38, -3e38])
def test_rewards_without_finite_sums_are_refused(reward: float) -> None:
    """Three of 1e38 are finite, two of 3e38 are not; a sum of one is what it is."""
    fragment = make_fragment(0, num_steps=3, num_envs=2, end_probability=0.0)
    large = dataclasses.replace(fragment, reward=np.full((3, 2), reward / 3, np.float32))
    assert np.isfinite(of_one(large, gamma=1.0, n_step=100).n_step_return).all()
    larger = dataclasses.replace(fragment, reward=np.full((3, 2), reward, np.float32))
    assert np.isfinite(of_one(larger, gamma=1.0, n_step=1).n_step_return).all()
    with pytest.raises(ValueError, match=r"rewards of up to 3e\+38 have no finite sum of n_step 2; lower"):
        of_one(larger, gamma=1.0, n_step=2)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 8),
    context=st.integers(0, 3),
    n=st.integers(1, 5),
    end_probability=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_td_errors_by_the_values_of_the_acting_policy(
    seed: int, num_steps: int, context: int, n: int, end_probability: float
) -> None:
    fragment = make_fragment(
        seed, num_steps=num_steps, num_envs=2, context=context, end_probability=end_probability
    )
    items = TransitionItems(gamma=0.5, n_step=n)
    assert items.cut(fragment).td_error is None
    rng = np.random.default_rng(seed)
    values = {
        name: rng.integers(-8, 9, fragment.reward.shape).astype(np.float32)
        for name in ("action_value", "state_value")
    }
    fragment = dataclasses.replace(fragment, extras=values)
    errors = items.cut(fragment).td_error
    assert errors is not None and errors.dtype == np.float32
    for i, item in enumerate(slow_transitions(fragment, gamma=0.5, n=n)):
        step, lane = context + i // 2, i % 2
        last = step + item.num_steps - 1
        seen = last if fragment.truncated[last, lane] or last + 1 == len(fragment.reward) else last + 1
        target = item.n_step_return + item.bootstrap_discount * values["state_value"][seen, lane]
        assert errors[i] == abs(target - values["action_value"][step, lane])


@pytest.mark.parametrize(
    "extras",
    [
        {"action_value": np.zeros((3, 2), np.float32)},
        {"state_value": np.zeros((3, 2), np.float32)},
        {"action_value": np.zeros((3, 2), np.float32), "state_value": np.zeros((3, 2), np.float64)},
        {"action_value": np.zeros((3, 2, 1), np.float32), "state_value": np.zeros((3, 2), np.float32)},
    ],
)
def test_values_of_another_form_are_refused(extras: dict[str, np.ndarray]) -> None:
    fragment = dataclasses.replace(make_fragment(0, num_steps=3, num_envs=2), extras=extras)
    with pytest.raises(ValueError, match="action_value and state_value"):
        of_one(fragment)


@pytest.mark.parametrize(
    ("context", "steps", "rows"), [(0, 8, 1125), (3, 32, 1125), (84, 40, 3125), (0, 7, 1143)]
)
def test_rows_of_a_thousand_transitions(context: int, steps: int, rows: int) -> None:
    assert expected_rows(1000, context=context, steps=steps) == rows


# --- stacks of frames -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), SPACES)
def test_200_episodes_equal_the_plain_stacks(compressed: bool, shape: tuple[int, ...], dtype: str) -> None:
    """Over the wire, with fragments of 1 to 40 steps, context from none to more than needed, growth and eviction."""
    player = Player(len(shape), shape=shape, dtype=dtype)
    spec = EnvSpec("x", shape, dtype, "discrete", (), (9,), frame_stack=4)
    replay = make(capacity=300, compressed=compressed, frame_stack=4)
    rng = np.random.default_rng(0)
    held: list[list[Expected]] = []
    while player.num_episodes < 200:
        # The first fragments are short: their context is what was played.
        num_steps = int(rng.integers(1, 4 if player.num_fragments < 4 else 41))
        fragment = player.fragment(num_steps, context=3 + int(rng.integers(3)))
        held.append(expected_transitions(player.steps[-num_steps:], gamma=GAMMA, n=N_STEP))
        while sum(map(len, held)) > replay.capacity:
            held.pop(0)

        admit(replay, codec.decode(codec.encode(fragment)))

        replay.check_valid()
        expected = [item for items in held for item in items]
        assert len(replay) == len(expected)
        order = rng.permutation(len(expected))
        assert_batch(gather(replay, order), [expected[i] for i in order], spec.input_shape)
    assert replay.first_item > 0, "some were evicted"


@pytest.mark.parametrize("compressed", [False, True])
def test_a_plan_outlives_its_items_and_may_be_carried_out_by_another_thread(compressed: bool) -> None:
    player = Player(6, shape=(40, 40))
    replay = make(capacity=240, compressed=compressed, frame_stack=4)
    rng = np.random.default_rng(1)
    held: list[list[Expected]] = []
    plans, futures, expected = [], [], []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(40):
            admit(replay, player.fragment(20, context=3))
            held = [*held, expected_transitions(player.steps[-20:], gamma=GAMMA, n=N_STEP)][-4:]
            items = [item for part in held for item in part]
            position = rng.integers(0, len(replay), 16)
            futures.append(pool.submit(replay.plan(position)))
            plans.append(replay.plan(position))
            expected.append([items[i] for i in position])
    for future, plan, one in zip(futures, plans, expected, strict=True):
        assert_batch(future.result(), one, (4, 40, 40))
        assert_batch(plan(), one, (4, 40, 40))


def test_context_beyond_the_stacks_takes_no_rows() -> None:
    rows = {}
    for context in (3, 30):
        player = Player(7, num_envs=2)
        player.fragment(40, context=0)
        replay = make(capacity=100, frame_stack=4)
        admit(replay, player.fragment(20, context=context))
        rows[context] = len(replay.rows.ring)
    truncated = sum(step.truncated for row in player.steps[-23:] for step in row)
    assert rows[3] == rows[30] == (20 + 3 + 1) * 2 + truncated
