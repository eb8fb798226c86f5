"""A replay of transitions against a plain list of those that environments played, stacks of frames included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_items import Player
from support.replays import CheckedReplay, admit, assert_transitions, changed, gather_all, make_replay

from ddrl import codec
from ddrl.replay.replay import Replay
from ddrl.replay.transitions import TransitionItems
from ddrl.types import Batch, Fragment

GAMMA, N_STEP = 0.5, 3  # dyadic: all sums are exact
SPACES = [((4,), "float32"), ((5, 3), "uint8"), ((2, 3, 2), "uint8"), ((6,), "uint8"), ((), "float32")]


def make(
    *, capacity: int, compressed: bool = False, gamma: float = GAMMA, n: int = N_STEP, frame_stack: int = 1,
    repeated: int | None = None,
) -> Replay:  # fmt: skip
    items = TransitionItems(gamma=gamma, n_step=n, frame_stack=frame_stack, repeated=repeated)
    return make_replay(items, capacity=capacity, compressed=compressed)


def of_one(fragment: Fragment, *, gamma: float = GAMMA, n: int = N_STEP) -> Batch:
    """All transitions of a fragment, as a replay gathers them."""
    replay = make(capacity=fragment.num_transitions, gamma=gamma, n=n)
    admit(replay, fragment)
    replay.check_valid()
    batch: Batch = gather_all(replay)
    return batch


def plain(num_steps: int = 3, num_envs: int = 2) -> Fragment:
    """A fragment of one long episode in each environment."""
    return Player(num_envs=num_envs, end_probability=0.0).fragment(num_steps)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    space=st.sampled_from(SPACES),
    frame_stack=st.sampled_from([1, 1, 2, 4]),
    end_probability=st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0]),
    compressed=st.booleans(),
    values=st.booleans(),
    n=st.integers(1, 12),
    repeated=st.none() | st.integers(0, 12),
    gamma=st.sampled_from([0.5, 1.0]),
)
def test_equals_a_list_of_transitions_after_each_admission(
    data: st.DataObject, space: tuple[tuple[int, ...], str], frame_stack: int, end_probability: float,
    compressed: bool, values: bool, n: int, repeated: int | None, gamma: float,
) -> None:  # fmt: skip
    """Over the wire, from several players, with context from none to more than needed, growth and eviction."""
    capacity = data.draw(st.integers(39, 100), label="capacity")  # 13 steps of three environments
    players = [
        Player(
            data.draw(st.integers(0, 2**32)), player=number, num_envs=number + 1, observation=space[0], dtype=space[1],
            frame_stack=frame_stack, end_probability=end_probability, values=values, continuous=frame_stack == 2,
            n=n if repeated is None else repeated + 1,
        )
        for number in range(3)
    ]  # fmt: skip
    replay = make(
        capacity=capacity, compressed=compressed, gamma=gamma, n=n, frame_stack=frame_stack, repeated=repeated
    )
    checked = CheckedReplay(replay)
    turns = st.tuples(st.sampled_from(players), st.integers(1, 12), st.integers(0, 3))
    for player, num_steps, more in data.draw(st.lists(turns, min_size=1, max_size=20)):
        most = capacity // len(player.lanes) - n + 1
        fragment = player.fragment(min(num_steps, most), player.context + more)
        items = player.transitions(gamma=gamma, n=n, repeated=repeated)
        td_error = checked.admit(codec.decode(codec.encode(fragment)), items)
        assert (td_error is None) == (not values)
        if values:
            assert td_error.dtype == np.float32 and td_error.tolist() == [item.td_error for item in items]
    checked.check(assert_transitions)


@pytest.mark.parametrize(("context", "kept"), [(3, 3), (5, 5), (30, 5)])
def test_each_observation_is_stored_once_and_context_beyond_stacks_and_sums_not_at_all(
    context: int, kept: int
) -> None:
    player, replay = Player(7, frame_stack=4), make(capacity=100, frame_stack=4)
    player.fragment(40)
    fragment = player.fragment(20, context)
    admit(replay, fragment)
    num_finals = np.count_nonzero(fragment.truncated[-20 - kept :])
    assert num_finals and len(replay.rows.ring) == (20 + kept + 1) * 2 + num_finals


def test_memory_is_allocated_with_the_first_fragment_and_then_stays() -> None:
    replay, player, sizes = make(capacity=64), Player(end_probability=0), set()
    assert (replay.num_bytes, len(replay), replay.first_item, replay.oldest_entry_id) == (0, 0, 0, None)
    for _ in range(20):
        admit(replay, player.fragment(16))
        sizes.add(replay.num_bytes)
    assert sizes == {(64 + 24) * 4 * 4 + 64 * (8 + 4 + 8 + 4 + 4)}


def test_hand_example_of_a_truncation() -> None:
    fragment, final = plain(3), np.full((1, 4), 77, np.float32)
    fragment.truncated[1, 0] = True
    fragment = replace(fragment, final_index=np.array([[1, 0]], np.int32), final_observation=final)
    batch, rows = of_one(fragment, n=2), fragment.observation[..., 0].tolist()
    assert batch.observation[:, 0].tolist() == [*rows[0], *rows[1]]  # the sums from rows[2] go on
    assert batch.next_observation[:, 0].tolist() == [77, rows[2][1], 77, rows[3][1]]
    assert batch.bootstrap_discount.tolist() == [0.25, 0.25, 0.5, 0.25]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_sums_go_on_from_fragment_to_fragment_however_short(steps: int) -> None:
    """As slow environments give them; none is whole in the first four steps, until then more may be played."""
    player, replay = Player(end_probability=0.0, n=5), make(capacity=1000, n=5)
    budget = {"num_updates": 0, "version": 0}
    assert replay.step_budget(num_steps=10**6, **budget) > 10**6
    for _ in range(42 // steps):
        admit(replay, player.fragment(steps))
    assert replay.num_items == (42 - 4) * 2 and replay.step_budget(num_steps=10**6, **budget) < 10**6
    assert (gather_all(replay).bootstrap_discount == GAMMA**5).all()
    assert replay.figures(num_steps=84, num_updates=0)["n_step_mean"] == 5
    assert "n_step_mean" not in replay.figures(num_steps=84, num_updates=0)


@pytest.mark.parametrize("repeated", [0, 2])
def test_where_fragments_repeat_too_little_each_step_is_learned_from_once(repeated: int) -> None:
    """As of another algorithm, or of fewer steps than a sum has, 5: fragments of one step too."""
    player = Player(end_probability=0.0, n=repeated + 1)
    replay = make(capacity=1000, n=5, repeated=repeated)
    for steps in (7, 1, 2, 10, 1, 1, 8):
        admit(replay, player.fragment(steps))
    batch = gather_all(replay)
    assert len(batch.observation) == len(np.unique(batch.observation[:, 0])) == (30 - repeated) * 2


@pytest.mark.parametrize("reward", [3e38, -3e38])
def test_rewards_without_finite_sums_are_refused(reward: float) -> None:
    """Three of 1e38 are finite, two of 3e38 are not; a sum of one is what it is."""
    large, larger = (replace(plain(), reward=np.full((3, 2), r, np.float32)) for r in (reward / 3, reward))
    assert np.isfinite(of_one(large, gamma=1.0, n=3).n_step_return).all()
    assert np.isfinite(of_one(larger, gamma=1.0, n=1).n_step_return).all()
    with pytest.raises(ValueError, match=r"rewards of up to 3e\+38 have no finite sum of n_step 2; lower"):
        of_one(larger, gamma=1.0, n=2)


COLUMN = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    ("action_value", "state_value"),
    [(COLUMN, None), (None, COLUMN), (COLUMN, COLUMN.astype(np.float64)), (COLUMN[..., None], COLUMN)],
)
def test_values_of_another_form_are_refused(action_value: Any, state_value: Any) -> None:
    with pytest.raises(ValueError, match="action_value and state_value"):
        of_one(changed(plain(), action_value=action_value, state_value=state_value))
