"""Several ranks learn what one learner learns from the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import reference_ppo
from support.algorithms import CPU, DISCRETE, Options, make_learner
from support.ranks import together
from support.subjects import CASES, batch_for
from torch import Tensor

from ddrl.algorithms.actor_critic.learner import Prepared
from ddrl.networks.device import to_device
from ddrl.networks.ranks import Ranks
from ddrl.replay.fifo import blank_trajectories
from ddrl.types import EnvSpec

LONG = ("sac", "ppo", "dqn options", "r2d2")  # 200 updates; the others 20
LEFT_OUT = (
    "sac dropout",
    "sac batch norm",
    "dqn batch norm",
    "sac own network",
    "own",
)  # of a rank's own rows
RANDOM = ("noise", "generator")  # what each rank draws from differs with the number of its rows
SLOW = {"learning_rate": 1e-4}  # a larger one makes float32's rounding larger, too
PART_OF = {"recurrent_state": 0, "burn_in": 0, "number": 0, "weight": 0}  # axis; others of sequences: 1


def parts_of(
    name: str, learner: Any, spec: EnvSpec, seed: int, size: int
) -> tuple[Any, list[Any], list[int]]:
    """Return a batch, the part of each rank, and the rows of each part."""
    if learner.config.on_policy:
        memory = learner.config.recurrent_state_size
        feed = reference_ppo.make_feed(spec, seed=seed, num_fragments=3, state_size=memory)
        of_ranks = [feed[rank::size] for rank in range(size)]
        blank = to_device(blank_trajectories(spec, state_size=memory), CPU)
        parts = [reference_ppo.tensors(own) if own else blank for own in of_ranks]
        sizes = [sum(one.num_transitions for one in own) for own in of_ranks]
        return reference_ppo.tensors(feed), parts, sizes
    batch = batch_for(name, learner, spec, seed)
    columns = {column: value for column, value in vars(batch).items() if value is not None}
    axes = {column: PART_OF.get(column, 1) if name == "r2d2" else 0 for column in columns}
    rows = torch.arange(batch.action.shape[axes["action"]]).tensor_split(size)
    parts = [
        replace(batch, **{column: value.index_select(axes[column], own) for column, value in columns.items()})
        for own in rows
    ]
    return batch, parts, [len(own) for own in rows]


def assert_learns_together(
    alone: Any, batches: list[Any], size: int, num_updates: int, **of_learner: Any
) -> None:
    """One learner and ranks that get parts of its batches end with the same state, the ranks to the last bit."""

    def learn(ranks: Ranks) -> dict[str, Tensor]:
        learner = make_learner(ranks=ranks, **of_learner)
        for number in range(num_updates):
            _, parts, sizes = batches[number % len(batches)]
            ranks.split(sizes)
            learner.update(parts[ranks.rank])
        return {name: tensor for name, tensor in learner.state().items() if name not in RANDOM}

    for number in range(num_updates):
        alone.update(batches[number % len(batches)][0])
    first, *others = together(size, learn)
    for name, value in first.items():
        np.testing.assert_allclose(value, alone.state()[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert all(torch.equal(other[name], value) for other in others), name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", [name for name in CASES if name not in LEFT_OUT])
def test_ranks_learn_what_one_learner_learns(case: str, size: int) -> None:
    name, spec, options = CASES[case]
    options = options | SLOW
    if name in ("ppo", "pqn"):  # one minibatch: those of ranks are others than those of one learner
        options["minibatch_size"] = 60
    alone = make_learner(name, spec, **options)
    batches = [parts_of(name, alone, spec, seed, size) for seed in range(8)]
    num_updates = 200 if case in LONG else 20
    assert_learns_together(alone, batches, size, num_updates, name=name, spec=spec, **options)


def test_minibatches_that_no_rank_has_are_left_out() -> None:
    """Few long sequences make fewer minibatches than are wanted; a rank without a part takes part with a blank."""

    def learn(ranks: Ranks) -> list[str]:
        own = ["a", "b"][: 2 - ranks.rank]
        return [part for part in ranks.each(own, "blank", 4) if ranks.share >= 0.0]

    assert together(2, learn) == [["a", "b"], ["a", "blank"]]


def test_a_minibatch_is_the_ranks_minibatches_together() -> None:
    options: Options = SLOW | {"minibatch_size": 20}
    alone = make_learner("ppo", DISCRETE, **options)
    batches = [parts_of("ppo", alone, DISCRETE, seed, 2) for seed in range(4)]
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]  # as those of the ranks
    epochs = (parts for _, parts, _ in batches for _ in range(alone.config.num_epochs))

    def of_both(prepared: Prepared, num: int) -> Iterator[Prepared]:
        found = {value: row for row, value in enumerate(prepared.behavior_log_prob.tolist())}
        chosen = []
        for part, generator in zip(next(epochs), generators, strict=True):
            rows = torch.tensor([found[value] for value in part.behavior_log_prob[part.valid].tolist()])
            chosen.append(rows[torch.randperm(len(rows), generator=generator)].tensor_split(num))
        columns = {name: value for name, value in vars(prepared).items() if value is not None}
        for rows in map(torch.cat, zip(*chosen, strict=True)):
            yield Prepared(**{name: value[rows] for name, value in columns.items()})

    alone.minibatches = of_both
    assert_learns_together(alone, batches, 2, len(batches), name="ppo", spec=DISCRETE, **options)
