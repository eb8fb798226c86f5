"""Draws by number, threads that gather ahead, priorities that come back, and a restart from a checkpoint."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import assert_same
from support.reference_items import Player
from support.replays import admit, assert_transitions, gather, make_replay

from ddrl.algorithms.dqn.config import Config
from ddrl.learner.core import REPLAY
from ddrl.learner.group import merged
from ddrl.replay.prioritized import Priorities, uniform
from ddrl.replay.replay import COUNT_DRAWS, MOST_CONTEXT, MOST_FIGURES, Replay
from ddrl.replay.transitions import TransitionItems
from ddrl.types import Fragment

B, K, SEED = 16, 3, 9
ALWAYS = {"num_steps": 10**6, "version": 0}  # the rate limiter never holds a draw back


def make(*, threads: int = 0, prioritized: bool = False, capacity: int = 600, **options: Any) -> Replay:
    priorities = None
    if prioritized:
        priorities = Priorities(Config(prioritized=True, priority_exponent=1.0, importance_exponent=1.0))
    items = TransitionItems(gamma=0.5, n_step=2, frame_stack=K)
    given = {"batch_size": B, "seed": SEED, "priorities": priorities, "threads": threads} | options
    return make_replay(items, capacity=capacity, compressed=threads > 0, **given)


def make_player() -> Player:
    return Player(num_envs=3, observation=(5, 3), dtype="uint8", frame_stack=K, n=2)


def fragments(num: int) -> list[Fragment]:
    """Return fragments of 60 transitions each."""
    player = make_player()
    return [player.fragment(20) for _ in range(num)]


def fill(replay: Replay, played: list[Fragment]) -> None:
    for fragment in played:
        admit(replay, fragment, version=2)


def drawn(replay: Replay, number: int) -> Any:
    batch = replay.draw(num_updates=number, **ALWAYS)
    assert batch is not None
    return batch


def test_uniform_draws_depend_on_the_update_number_and_carry_no_weight() -> None:
    replay = make()
    fill(replay, fragments(4))
    for number in (0, 7, 3):
        batch = drawn(replay, number)
        assert batch.number is None and batch.weight is None
        expected = gather(replay, uniform(replay.num_items, B, seed=SEED, draw=number))
        assert_same(vars(batch), vars(expected))


def test_draws_wait_for_the_warmup_the_rate_limiter_and_the_first_item() -> None:
    replay = make(warmup_steps=60)
    assert replay.draw(num_steps=1000, num_updates=0, version=0) is None  # the stream is gone
    fill(replay, fragments(1))
    assert replay.draw(num_steps=59, num_updates=0, version=0) is None
    assert replay.draw(num_steps=61, num_updates=1, version=0) is not None
    assert replay.draw(num_steps=61, num_updates=2, version=0) is None
    assert replay.step_budget(num_steps=61, num_updates=2, version=0) == 60 + 1 + 100


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_ahead_give_the_same_batches_as_none(threads: int) -> None:
    plain, ahead = make(), make(threads=threads)
    for replay in (plain, ahead):
        fill(replay, fragments(4))
    for number in (*range(30), 3, 4, 50, 50):  # at last another update than the next one: as after a restart
        assert_same(vars(drawn(ahead, number)), vars(drawn(plain, number)))
    ahead.close()


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("prioritized", [False, True])
def test_batches_hold_transitions_as_played_whatever_is_evicted_meanwhile(
    threads: int, prioritized: bool
) -> None:
    """Each row is checked against the transition it says it is, or for uniform draws against the one of its stack."""
    replay = make(threads=threads, prioritized=prioritized, capacity=150)
    player, everything = make_player(), []
    places: dict[bytes, int] = {}
    for seq in range(25):
        fragment = player.fragment(6 + seq % 7)
        for one in player.transitions(gamma=0.5, n=2):
            places[one.observation.tobytes()] = len(everything)
            everything.append(one)
        admit(replay, fragment)
        replay.check_valid()
        for number in range(3 * seq, 3 * seq + 3):
            batch = drawn(replay, number)
            found = [places[stack.tobytes()] for stack in batch.observation]
            assert_transitions(batch, [everything[place] for place in found])
            if prioritized:
                assert batch.number.tolist() == found
                assert batch.weight.dtype == np.float32 and batch.weight.max() == 1
                replay.update_priorities(batch, lambda size=number + 1: np.full(B, size, np.float32))
    replay.close()
    assert len(places) == len(everything) == replay.first_item + replay.num_items


@pytest.mark.parametrize(
    ("steps", "held", "device"), [(20, 600, None), (1, 200, None), (1, 40, torch.device("cpu"))]
)
def test_short_fragments_with_much_context_take_no_more_memory(
    steps: int, held: int, device: torch.device | None
) -> None:
    """One step with 12 of context has 14 observations, of which 4 * 750 are held, on a device 750; 20 steps have 33."""
    items = TransitionItems(gamma=0.5, n_step=2, frame_stack=12)
    replay = make_replay(items, capacity=600, batch_size=B, seed=SEED, device=device)
    player = Player(num_envs=1, observation=(5, 3), dtype="uint8", frame_stack=12, n=2)
    for _ in range(700 // steps):
        admit(replay, player.fragment(steps))
        replay.check_valid()
    assert len(replay.rows.ring) <= (1 if device else MOST_CONTEXT) * 750 and items.room(600)[0] == 750
    assert held <= len(replay) <= held + 20


def test_compressed_observations_that_do_not_compress_leave_before_the_capacity() -> None:
    items = TransitionItems(gamma=0.5, n_step=2, frame_stack=1)
    player = Player(num_envs=1, observation=(64, 64), dtype="uint8", frame_stack=1, n=2)
    replay = make_replay(items, capacity=600, batch_size=B, seed=SEED, compressed=True, most_bytes=400_000)
    for seed in range(30):
        fragment = player.fragment(20)
        noise = np.random.default_rng(seed).integers(0, 256, fragment.observation.shape, np.uint8)
        admit(replay, replace(fragment, observation=noise))
        replay.check_valid()
    assert 60 <= len(replay) <= 120 and replay.rows.num_bytes < 500_000


def test_td_errors_are_read_one_draw_later_and_then_decide_the_draws() -> None:
    replay = make(prioritized=True)
    fill(replay, fragments(4))
    read: list[int] = []  # numbers of the updates whose errors were asked for

    def draw_on(number: int, error: float) -> Any:
        batch = drawn(replay, number)
        replay.update_priorities(batch, lambda: read.append(number) or np.full(B, error, np.float32))
        return batch

    draw_on(0, 1e-3)
    second = draw_on(1, 1e6)
    assert read == []  # as a device would still be at it
    draw_on(2, 1e-3)
    assert read == [0]
    assert set(draw_on(3, 1e-3).number) <= set(second.number)  # a million times as likely
    assert read == [0, 1]
    replay.state()
    assert read == [0, 1, 2, 3]  # a checkpoint waits for all


@pytest.mark.parametrize("threads", [0, 2])
def test_a_restart_goes_on_with_the_same_priorities_and_draws(threads: int) -> None:
    """The first learner has evicted some, the second admits only what was held, and numbers items as the first did.

    Their slots go round the end of the tree, so that by other numbers others would be drawn.
    """
    first, played = make(prioritized=True, capacity=180, threads=threads), fragments(21)
    fill(first, played[:20])
    for number in range(20):
        batch = drawn(first, number)
        first.update_priorities(batch, lambda n=number: np.arange(B, dtype=np.float32) + n)
    state = first.state()
    assert state["priority"].dtype == np.float32 and len(state["priority"]) == first.num_items
    second = make(prioritized=True, capacity=180, threads=threads)
    fill(second, played[17:20])
    second.load_state(state)
    assert first.num_items == second.num_items and first.first_item == second.first_item > 1000
    drawn(first, 99)  # forgets what was chosen before the last errors were known
    for number in range(20, 24):
        assert_same(vars(drawn(first, number)), vars(drawn(second, number)))
    for replay in (first, second):
        fill(replay, played[20:])  # without values: the largest error ever seen counts, and is not forgotten
        assert replay.state()["priority"].max() == replay.state()["priority"][-1]
        replay.close()
    np.testing.assert_array_equal(first.state()["priority"], second.state()["priority"])


def test_the_state_of_an_empty_prioritized_replay_is_restored() -> None:
    """A learner may end before anything was played."""
    first, second = make(prioritized=True), make(prioritized=True)
    second.load_state(first.state())
    fill(second, fragments(1))
    assert second.num_items > 0


def test_priorities_come_back_to_entries_whose_ids_a_worker_has_chosen() -> None:
    """The numbers of an id are below 2^64, which int64 does not hold; honest appends then go on from them."""
    first, second = make(prioritized=True), make(prioritized=True)
    ids = [b"9-1", b"9-9223372036854775813", b"18446744073709551615-18446744073709551615"]
    for entry_id, fragment in zip(ids, fragments(3), strict=True):
        for replay in (first, second):
            replay.admit(replay.pack(fragment), entry_id, version=0)
    priorities = first.priorities
    assert priorities is not None
    priorities.update(np.arange(first.num_items), np.arange(first.num_items, dtype=np.float32) + 1.0)
    second.load_state(first.state())
    np.testing.assert_array_equal(first.state()["priority"], second.state()["priority"])
    state = {REPLAY + name: torch.from_numpy(array) for name, array in first.state().items()}
    again = merged([state])
    assert_same(
        {name: value.numpy() for name, value in again.items()}, {n: v.numpy() for n, v in state.items()}
    )


def test_a_fragment_without_items_takes_nobodys_place() -> None:
    """So that a replay of several ranks, which has said that it holds items, still holds one when they draw."""
    replay = make(prioritized=True, capacity=60)
    fill(replay, fragments(1))
    before = replay.num_items
    player = Player(num_envs=3, observation=(5, 3), dtype="uint8", frame_stack=K, n=2, end_probability=0.0)
    played = player.fragment(1)
    assert len(replay.pack(played).cut) == 0
    for _ in range(100):
        replay.admit(replay.pack(played), b"9-0", version=0)
    replay.check_valid()
    assert replay.num_items == before > 0


def test_uniform_replay_has_no_state_and_ignores_one() -> None:
    replay = make()
    fill(replay, fragments(1))
    assert replay.state() == {}
    replay.load_state({"priority": np.ones(60, np.float32), "largest": np.array(1.0)})
    prioritized = make(prioritized=True)
    fill(prioritized, fragments(1))
    prioritized.load_state({})  # a checkpoint from before the option was set
    np.testing.assert_allclose(prioritized.state()["priority"], np.ones(prioritized.num_items), rtol=1e-5)


def test_without_values_or_with_an_infinite_difference_new_items_get_the_largest_error_learned_from() -> None:
    """Finite columns pass the codec, but their difference may overflow. What a policy reported is not learned from."""
    replay, (first, second, third) = make(prioritized=True), fragments(3)
    zero, huge = first.reward * 0, second.reward * 0 + 3e38
    known = replace(first, reward=zero, extras={"state_value": zero, "action_value": zero + 5})
    wild = replace(second, extras={"action_value": -huge, "state_value": huge})
    with np.errstate(over="ignore"):
        fill(replay, [known])
        num_known = replay.num_items
        fill(replay, [wild, third])
    expected = np.repeat([5.0, 1.0], [num_known, replay.num_items - num_known])
    np.testing.assert_allclose(replay.state()["priority"], expected, rtol=1e-5)
    replay.check_valid()
    assert all(np.isfinite(drawn(replay, number).weight).all() for number in range(5))


def test_collectors_are_the_producers_of_the_last_two_counts() -> None:
    """One that is silent for one count only may play a long fragment; if nobody at all plays, one may."""
    replay, (played, *_) = make(), fragments(1)
    for producers, expected in [([5, 5, 5], 1), ([5, 6, 7], 3), ([5], 3), ([], 1), ([], 1)]:
        for producer in producers:
            admit(replay, replace(played, producer=producer))
        for number in range(COUNT_DRAWS):
            drawn(replay, number)
        assert replay.num_collectors == expected


def test_figures_have_the_staleness_since_the_last_ones() -> None:
    replay = make()
    fill(replay, fragments(2))
    row = replay.figures(num_steps=121, num_updates=3)
    assert (row["staleness"], row["replay_size"]) == (2.0, 120.0)
    assert row["samples_per_insert"] == pytest.approx(3 * B / 120)
    assert row["replay_bytes"] == replay.num_bytes > 0
    assert "staleness" not in replay.figures(num_steps=121, num_updates=3)


def test_what_a_follower_notes_and_nobody_reads_is_bounded() -> None:
    replay = make()
    (fragment,) = fragments(1)
    packed = replay.pack(fragment)
    for number in range(MOST_FIGURES + 10):
        replay.admit(packed, b"%d-0" % number, version=0)
    assert len(replay._admitted) == MOST_FIGURES
    for number in range(2 * COUNT_DRAWS):
        replay._seen.add(number)
        replay.draw_chosen({"number": number, "sizes": [[B]]})
    assert replay.num_collectors > 1 and len(replay._seen) <= COUNT_DRAWS


def test_close_stops_the_threads() -> None:
    before = threading.active_count()
    replay = make(threads=3)
    fill(replay, fragments(2))
    for number in range(8):
        drawn(replay, number)
    assert before < threading.active_count() <= before + 3
    replay.close()
    assert threading.active_count() == before
    make().close()  # without threads: nothing to end
