"""Several ranks learn what one learner learns from the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CPU, DISCRETE, Options, make_learner
from support.ranks import learn_parts, lose_one, on_gpus, parts_of, together
from support.subjects import CASES, on_device

from ddrl.algorithms.actor_critic.learner import Prepared
from ddrl.networks.ranks import Ranks

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


def assert_learns_together(
    alone: Any, batches: list[Any], size: int, num_updates: int, **of_learner: Any
) -> None:
    """One learner and ranks that get parts of its batches end with the same state, the ranks to the last bit."""
    for number in range(num_updates):
        alone.update(batches[number % len(batches)][0])
    assert_alike(
        alone, together(size, lambda ranks: learn_parts(ranks, CPU, batches, num_updates, of_learner))
    )


def assert_alike(alone: Any, of_ranks: list[tuple[dict[str, np.ndarray], int]]) -> None:
    """Ranks have the state of a learner that learned alone, and each other's to the last bit."""
    first, *others = (state for state, _ in of_ranks)
    expected = alone.state()
    for name in first.keys() - {*RANDOM}:
        np.testing.assert_allclose(first[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert all(np.array_equal(other[name], first[name]) for other in others), name


def prepare(case: str, size: int) -> tuple[dict[str, Any], list[Any]]:
    """Return what makes a learner of a case, and eight batches with their parts."""
    name, spec, options = CASES[case]
    options = options | SLOW
    if name in ("ppo", "pqn"):  # one minibatch: those of ranks are others than those of one learner
        options["minibatch_size"] = 60
    of_learner = {"name": name, "spec": spec, **options}
    alone = make_learner(**of_learner)
    return of_learner, [parts_of(name, alone, spec, seed, size) for seed in range(8)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", [name for name in CASES if name not in LEFT_OUT])
def test_ranks_learn_what_one_learner_learns(case: str, size: int) -> None:
    of_learner, batches = prepare(case, size)
    num_updates = 200 if case in LONG else 20
    assert_learns_together(make_learner(**of_learner), batches, size, num_updates, **of_learner)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("case", "size"), [*((case, 2) for case in (*LONG, "td3", "pqn")), ("sac", 3), ("ppo", 3)]
)
def test_ranks_on_gpus_learn_what_one_learner_learns(case: str, size: int) -> None:
    gpu = torch.device("cuda")
    of_learner, batches = prepare(case, size)
    alone = make_learner(**of_learner, device=gpu)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for number in range(200):
            alone.update(on_device(batches[number % len(batches)][0], gpu))
    of_ranks = on_gpus(size, learn_parts, batches, 200, of_learner)
    assert all(of_ranks), "a rank has ended"
    assert_alike(alone, of_ranks)
    assert all((num > 0) == (case != "r2d2") for _, num in of_ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_that_waits_for_a_lost_rank_is_free_again() -> None:
    of_learner, batches = prepare("sac", 2)
    (text, num_graphs), lost = on_gpus(2, lose_one, batches, of_learner)
    assert lost is None and num_graphs > 0
    assert "a learner of the group is lost" in text


def test_advantages_that_are_all_alike_stay_finite() -> None:
    """The mean of their squares may be below the square of their mean, by rounding."""

    def standardized(ranks: Ranks) -> list[float]:
        learner = make_learner("ppo", DISCRETE, ranks=ranks)
        ranks.split([500, 500])
        found: list[float] = learner.standardized(torch.full((500,), -0.2784961760044098)).tolist()
        return found

    assert together(2, standardized) == [[0.0] * 500] * 2


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
