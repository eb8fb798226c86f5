"""The experience that a run's config asks for: how it is held, and how much of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.reference_items import STATE_SIZE, Player
from support.replays import admit, gather_all

from ddrl import config, envs
from ddrl.algorithms import base
from ddrl.config import ReplayConfig, RolloutConfig
from ddrl.replay.experience import fits_on, is_compressed, longest_fragment_steps, make_experience
from ddrl.replay.replay import Replay
from ddrl.replay.sequences import cut, td_errors
from ddrl.types import EnvSpec, SequenceShape

GAME = EnvSpec("game", (84, 84), "uint8", "discrete", (), (6,), frame_stack=4)
SHAPE = SequenceShape(burn_in=40, length=80, overlap=40)
R2D2 = {"name": "r2d2", "hidden_sizes": [16], "recurrent_size": 8, "sequence_length": 20, "overlap": 10}


@pytest.mark.parametrize(("shape", "num_rows"), [(None, 1125), (SHAPE, 3125)])
def test_auto_compresses_what_needs_more_than_the_memory(shape: SequenceShape | None, num_rows: int) -> None:
    """1000 transitions of 28 bytes and their rows of 84 x 84 + 4; as sequences, by 40 with 84 of context, more rows."""
    needed = num_rows * 7060 + 28_000
    for memory_bytes, expected in ((needed, False), (needed - 1, True)):
        replay = ReplayConfig.model_validate({"capacity": 1000, "memory_bytes": memory_bytes})
        assert is_compressed(replay, GAME, shape) is expected


def test_a_gpu_holds_dense_images_of_half_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed, gpu = 1125 * 7060 + 28_000, torch.device("cuda")
    free = 2 * needed
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * free))
    replay = ReplayConfig.model_validate({"capacity": 1000, "memory_bytes": 2**20})
    vectors = replace(GAME, observation_shape=(84,), observation_dtype="float32")
    assert fits_on(gpu, replay, GAME, None), "whatever the host may hold"
    assert not fits_on(torch.device("cpu"), replay, GAME, None)
    assert not fits_on(gpu, replay, vectors, None)
    assert not fits_on(gpu, replay.model_copy(update={"observations": "compressed"}), GAME, None)
    free -= 1
    assert not fits_on(gpu, replay, GAME, None)


@pytest.mark.parametrize(
    ("most", "shape", "longest"),
    [(512, None, 512), (512, SHAPE, 520), (520, SHAPE, 520), (40, SHAPE, 40), (41, SHAPE, 80)],
)
def test_fragments_of_sequences_are_whole_strides(
    most: int, shape: SequenceShape | None, longest: int
) -> None:
    assert longest_fragment_steps(RolloutConfig(max_fragment_steps=most), shape) == longest


@pytest.mark.parametrize(("recurrent", "size"), [("lstm", 16), ("gru", 8)])
def test_recurrent_states_are_as_wide_as_the_players(recurrent: str, size: int) -> None:
    run = config.validate({"env": {"id": "CartPole-v1"}, "algorithm": R2D2 | {"recurrent": recurrent}})
    spec = envs.describe(run.env)
    resolved = base.resolve(run, spec)
    assert resolved.config.recurrent_state_size == size
    assert resolved.policy().initial_state(3)["hidden"].shape == (3, size)
    held = make_experience(run, resolved.config, spec)
    message = rf"memory is float16\[\d+, {STATE_SIZE}\], expected float16 \[S, {size}\]"
    with pytest.raises(ValueError, match=message):
        held.pack(Player(shape=resolved.sequences).fragment(10))
    held.close()


def test_transitions_follow_the_options() -> None:
    dqn = {"name": "dqn", "gamma": 0.5, "n_step": 3}
    run = config.validate({"env": {"id": "CartPole-v1"}, "algorithm": dqn})
    spec = envs.describe(run.env)
    held = make_experience(run, base.resolve(run, spec).config, spec)
    admit(held, Player(end_probability=0.0, n=3).fragment(20))
    assert set(gather_all(held).bootstrap_discount.tolist()) == {0.5**3}
    held.close()


def test_errors_of_sequences_follow_the_options() -> None:
    sizes = {"recurrent": "gru", "recurrent_size": STATE_SIZE, "sequence_length": 20, "overlap": 10}
    own = {"gamma": 0.5, "n_step": 3, "rescale_values": False, "priority_mix": 0.25}
    run = config.validate({"env": {"id": "CartPole-v1"}, "algorithm": R2D2 | sizes | own})
    spec = envs.describe(run.env)
    resolved = base.resolve(run, spec)
    held = make_experience(run, resolved.config, spec)
    assert resolved.sequences is not None
    fragment = Player(shape=resolved.sequences, values=True, end_probability=0.0).fragment(20)
    cuts = cut(fragment.ended, fragment.context, resolved.sequences)
    expected = td_errors(fragment, cuts, gamma=0.5, n=3, rescaled=False, mix=0.25)
    np.testing.assert_array_equal(held.pack(fragment).cut.td_error, expected)
    held.close()


@pytest.mark.parametrize(("options", "largest"), [({}, 1.0), ({"importance_maximum": "replay"}, 0.5)])
def test_priorities_follow_the_options(options: dict[str, Any], largest: float) -> None:
    """Of items with errors 1 and 4, the second one is drawn alone; its weight by the first one's is 0.5."""
    dqn = {"name": "dqn", "prioritized": True, "priority_exponent": 1.0, "batch_size": 1} | options
    dqn |= {"importance_exponent": 0.5, "final_importance_exponent": 0.5}
    run = config.validate({"env": {"id": "CartPole-v1"}, "algorithm": dqn})
    spec = envs.describe(run.env)
    held = make_experience(run, base.resolve(run, spec).config, spec)
    assert isinstance(held, Replay) and held.priorities is not None
    held.priorities.append(2, [1.0, 4.0])
    drawn = [held.priorities.draw(1, seed=0, draw=number) for number in range(20)]
    weights = [float(weight[0]) for position, _, weight in drawn if position[0] == 1]
    assert len(weights) > 10 and weights == pytest.approx([largest] * len(weights), rel=1e-5)
