"""Replays of several ranks: their draws together are those of one replay, and their states fit any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import together
from support.reference_items import Player
from support.replays import assert_distributed, make_replay

from ddrl.algorithms.dqn.config import Config
from ddrl.learner.core import REPLAY
from ddrl.learner.group import merged
from ddrl.networks.ranks import Ranks
from ddrl.replay.prioritized import Priorities
from ddrl.replay.replay import Replay
from ddrl.replay.transitions import TransitionItems

BETA = 0.6
BATCH = 2  # larger ones are stratified: more even than chance


def replay_of(
    ranks: Ranks | None, *, prioritized: bool = True, lockstep: bool = False, **options: Any
) -> Replay:
    priorities = None
    if prioritized:
        options |= dict.fromkeys(("importance_exponent", "final_importance_exponent"), BETA)
        priorities = Priorities(Config(prioritized=True, priority_exponent=0.7, **options), 1_000)
    items = TransitionItems(gamma=0.9, n_step=1)
    return make_replay(
        items, capacity=400, batch_size=BATCH, ranks=ranks, priorities=priorities, lockstep=lockstep
    )


def fill(replay: Replay, rank: int, size: int) -> int:
    """Admit every `size`-th of 12 fragments of different lengths; return the number of steps of all."""
    player, num_steps = Player(end_probability=0.0, num_envs=1), 0
    for number in range(12):
        fragment = player.fragment(3 + number)
        num_steps += fragment.num_transitions
        if number % size == rank:
            replay.admit(replay.pack(fragment), b"%d-0" % number, version=0)
    return num_steps


def errors(replay: Replay) -> np.ndarray:
    """Give each item a TD error of its own, by its reward, and return them."""
    batch: Any = replay.plan(np.arange(replay.num_items))()
    found = np.abs(batch.n_step_return).astype(np.float32) + 0.1
    assert replay.priorities is not None
    replay.priorities.update(np.arange(replay.num_items) + replay.first_item, found)
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("prioritized", [False, True])
def test_draws_of_all_ranks_follow_the_priorities_of_all_items(size: int, prioritized: bool) -> None:
    """Chi-square, over items of all ranks; and each weight is what one replay would give."""
    replays = [
        replay_of(Ranks(rank, size) if rank else Ranks(0, size), prioritized=prioritized)
        for rank in range(size)
    ]
    for rank, replay in enumerate(replays):
        num_steps = fill(replay, rank, size)
    p = [
        (errors(one).astype(float) + 1e-6) ** 0.7 if prioritized else np.ones(one.num_items)
        for one in replays
    ]
    lead, counts, num_draws = replays[0], [np.zeros(len(one)) for one in p], 6_000
    lead.others = [one.total for one in replays[1:]]
    for update in range(num_draws):
        own = lead.draw(num_steps=10**9, num_updates=update, version=0)
        parts = [own, *(one.draw_chosen(lead.chosen) for one in replays[1:])]
        assert sum(lead.chosen["sizes"][0]) == BATCH
        for rank, part in enumerate(parts):
            drawn = part.number if prioritized else _numbers(replays[rank], part)
            np.add.at(counts[rank], drawn[: lead.chosen["sizes"][0][rank]], 1)
    expected = np.concatenate(p) / np.concatenate(p).sum() * BATCH * num_draws
    assert_distributed(np.concatenate(counts), expected)
    assert num_steps == len(expected)


def _numbers(replay: Replay, batch: Any) -> np.ndarray:
    """The numbers of drawn items, by their observations."""
    held: Any = replay.plan(np.arange(replay.num_items))()
    places = {row.tobytes(): number for number, row in enumerate(held.observation)}
    return np.array([places[row.tobytes()] for row in batch.observation])


@pytest.mark.parametrize("maximum", ["batch", "replay"])
@pytest.mark.parametrize("sizes", [[1, 1], [2, 0], [0, 2]])
def test_weights_of_all_ranks_have_one_scale(sizes: list[int], maximum: str) -> None:
    """That of the batch, in which a rank may have no part, or that of all items."""

    def weights(ranks: Ranks) -> tuple[np.ndarray, ...]:
        replay = replay_of(ranks, importance_maximum=maximum)
        fill(replay, ranks.rank, 2)
        p = (errors(replay).astype(float) + 1e-6) ** 0.7
        mass = torch.zeros(2, dtype=torch.float64)
        mass[ranks.rank] = replay.total
        ranks.add(mass)
        replay.others = [float(mass[1 - ranks.rank])]
        batch: Any = replay.begin(replay.draw_chosen({"number": 0, "sizes": [sizes]}))
        num = sizes[ranks.rank]
        return p, p[batch.number][:num], batch.weight[:num]

    held, drawn, given = (np.concatenate(parts) for parts in zip(*together(2, weights), strict=True))
    least = drawn.min() if maximum == "batch" else held.min()
    np.testing.assert_allclose(given, (least / drawn) ** BETA, rtol=1e-5)
    assert len(drawn) == BATCH


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2)])
def test_priorities_are_restored_by_another_number_of_ranks(before: int, after: int) -> None:
    found, states = {}, []
    for rank in range(before):
        replay = replay_of(Ranks(rank, before) if before > 1 else None)
        fill(replay, rank, before)
        errors(replay)
        state = {REPLAY + name: torch.from_numpy(array) for name, array in replay.state().items()}
        states.append(state)
    state = merged(states) if before > 1 else states[0]
    arrays = {name.removeprefix(REPLAY): value.numpy() for name, value in state.items()}
    for rank in range(after):
        replay = replay_of(Ranks(rank, after) if after > 1 else None)
        fill(replay, rank, after)
        replay.load_state(arrays)
        batch: Any = replay.plan(np.arange(replay.num_items))()
        assert replay.priorities is not None
        kept = replay.priorities.state()["priority"]
        expected = (np.abs(batch.n_step_return).astype(np.float32).astype(float) + 0.1 + 1e-6) ** 0.7
        np.testing.assert_allclose(kept, expected, rtol=1e-5)
        found[rank] = len(kept)
    assert sum(found.values()) == sum(3 + number for number in range(12))


def test_a_rank_without_items_makes_all_wait_and_play_go_on() -> None:
    lead = replay_of(Ranks(0, 2))
    num_steps = fill(lead, 0, 1)
    pace = {"num_steps": num_steps, "num_updates": 0, "version": 0}
    assert lead.draw(**pace) is None and lead.step_budget(**pace) > num_steps
    lead.others = [1.0]
    assert lead.draw(**pace) is not None
