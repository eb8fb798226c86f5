"""Recurrent PPO and IMPALA: a slow twin that plays step by step, whole sequences, a task that needs memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CONTINUOUS, DISCRETE, Options, make_learner
from support.learning import learn, toy
from support.reference_ppo import make_feed, tensors
from torch import Tensor, nn

from ddrl.algorithms.ppo.learner import clipped_surrogate, value_loss
from ddrl.config import OnPolicyConfig
from ddrl.replay import fifo
from ddrl.replay.fifo import Fifo, trajectories
from ddrl.types import EnvSpec, Fragment

MEMORY: Options = {"recurrent": "lstm", "recurrent_size": 7, "shared": True}
EACH = [(DISCRETE, "lstm"), (DISCRETE, "gru"), (CONTINUOUS, "lstm")]


def recurrent_feed(learner: Any, spec: EnvSpec, **options: Any) -> list[Fragment]:
    return make_feed(spec, state_size=learner.config.recurrent_state_size, **options)


def slow_rows(learner: Any, fragments: list[Fragment], *, gamma: float) -> dict[str, Tensor]:
    """Each transition's outputs, fragment by fragment and lane by lane, by a cell that starts anew at each episode.

    Also the one-step return, by the value of the observation that truly came next, and the row of the episode's
    next transition, -1: none is there.
    """
    network, size = learner.network, learner.config.recurrent_size
    kind = nn.LSTMCell if learner.config.recurrent == "lstm" else nn.GRUCell
    cell = kind(network.core.layer.input_size, size)
    cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh = network.core.layer.parameters()

    def step(seen: np.ndarray, state: Any) -> tuple[Tensor, Tensor, Any]:
        state = cell(network.actor(torch.from_numpy(seen)[None]), state)
        features = state[0] if learner.config.recurrent == "lstm" else state
        return network.policy_head(features)[0], network.value_head(features)[0, 0], state

    found: dict[str, list[Any]] = {"log_prob": [], "entropy": [], "value": [], "return_": [], "behavior": []}
    following: list[int] = []
    before: dict[tuple[int, int], int] = {}  # row, by producer and lane, of chains of fragments
    states: dict[tuple[int, int], Any] = {}  # likewise
    played: dict[int, int] = {}
    for one in fragments:
        is_joined = played.get(one.producer) == one.seq - 1
        played[one.producer] = one.seq
        finals = {tuple(at): seen for at, seen in zip(one.final_index, one.final_observation, strict=True)}
        for lane in range(one.num_envs):
            memory = torch.from_numpy(one.extras["memory"][lane].astype(np.float32))[None]
            sent: Any = memory.split(size, dim=1) if learner.config.recurrent == "lstm" else memory
            at = one.producer, lane
            state: Any = states[at] if is_joined else sent
            if not is_joined:
                before.pop(at, None)
            for t in range(one.num_steps):
                if at in before:
                    following[before[at]] = len(following)
                before[at] = len(following)
                following.append(-1)
                parameters, value, state = step(one.observation[t, lane], state)
                action = torch.from_numpy(np.asarray(one.extras.get("raw_action", one.action)[t, lane]))[None]
                log_prob, entropy = learner.log_prob(parameters[None], action)
                target = torch.tensor(one.reward[t, lane])
                if not one.terminated[t, lane]:
                    seen = finals.get((t, lane), one.observation[t + 1, lane])
                    target = target + gamma * step(seen, state)[1].detach()
                if one.ended[t, lane]:
                    state = None
                    del before[at]
                states[at] = state
                found["log_prob"].append(log_prob[0])
                found["entropy"].append(entropy[0])
                found["value"].append(value)
                found["return_"].append(target)
                found["behavior"].append(torch.tensor(one.extras["behavior_log_prob"][t, lane]))
    return {name: torch.stack(column) for name, column in found.items()} | {
        "following": torch.tensor(following)
    }


@pytest.mark.parametrize(("spec", "kind"), EACH)
def test_an_update_equals_the_twin_that_plays_step_by_step(spec: EnvSpec, kind: str) -> None:
    options = MEMORY | {"recurrent": kind, "batch_size": 72, "minibatch_size": 72, "num_epochs": 1}
    options |= {"lambda_": 0.0, "gamma": 0.9, "max_grad_norm": None, "normalize_advantages": False}
    ppo = make_learner("ppo", spec, **options, entropy_coefficient=0.02)
    fragments = recurrent_feed(ppo, spec, num_fragments=4)
    batch = tensors(fragments)
    rows = slow_rows(ppo, fragments, gamma=0.9)
    advantage = rows["return_"] - rows["value"].detach()
    loss = clipped_surrogate(rows["log_prob"], rows["behavior"], advantage, clip=ppo.config.clip)
    loss = loss + 0.5 * value_loss(rows["value"], rows["value"].detach(), rows["return_"], clip=None)
    loss = loss - 0.02 * rows["entropy"].mean()
    gradient = torch.autograd.grad(loss, list(ppo.network.parameters()))
    prepared = ppo.prepare(batch, estimator="gae")
    rows_of = []  # of each fragment, [N, T]
    for one in fragments:
        start = rows_of[-1].max() + 1 if rows_of else 0
        rows_of.append(start + np.arange(one.num_transitions).reshape(one.num_envs, -1))
    # Chain by chain, lane by lane: the last fragment goes on with the first.
    chained = np.concatenate([np.concatenate([rows_of[0], rows_of[3]], axis=1), *rows_of[1:3]], axis=None)
    for name in ("log_prob", "value", "return_"):
        torch.testing.assert_close(
            getattr(prepared, name), rows[name].detach()[chained], rtol=1e-4, atol=1e-5
        )
    ppo.update(batch)
    expected = torch.cat([part.flatten() for part in gradient])
    torch.testing.assert_close(ppo.parameters.vector.grad, expected, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(("spec", "kind"), EACH)
def test_impala_equals_that_twin_too(spec: EnvSpec, kind: str) -> None:
    """V-trace with lambda 0: one-step corrections, and advantages by the corrected value of what came next."""
    options = MEMORY | {"recurrent": kind, "lambda_": 0.0, "gamma": 0.9, "max_grad_norm": None}
    impala = make_learner("impala", spec, **options, critic_warmup_updates=0)
    fragments = recurrent_feed(impala, spec, num_fragments=4)
    rows = slow_rows(impala, fragments, gamma=0.9)
    ratio, value = (rows["log_prob"] - rows["behavior"]).exp().detach(), rows["value"].detach()
    target = value + ratio.clamp(max=1.0) * (rows["return_"] - value)
    correction = torch.where(rows["following"] >= 0, (target - value)[rows["following"]], 0.0)
    advantage = ratio.clamp(max=1.0) * (rows["return_"] + 0.9 * correction - value)
    loss = -(advantage * rows["log_prob"]).mean() - impala.config.entropy_coefficient * rows["entropy"].mean()
    loss = loss + impala.config.value_coefficient * 0.5 * (rows["value"] - target).square().mean()
    gradient = torch.autograd.grad(len(value) * loss, list(impala.network.parameters()))
    metrics = impala.update(tensors(fragments))
    assert float(metrics["rho"]) == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert float(metrics["entropy"]) == pytest.approx(float(rows["entropy"].detach().mean()), rel=1e-4)
    expected = torch.cat([part.flatten() for part in gradient])
    torch.testing.assert_close(impala.parameters.vector.grad, expected, rtol=1e-3, atol=1e-4)


def test_minibatches_are_of_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = make_learner("ppo", DISCRETE, **MEMORY)
    batch = tensors(recurrent_feed(ppo, DISCRETE))
    whole = ppo.prepare(batch, estimator="gae")
    sequences = {
        (tuple(map(tuple, seen.tolist())), tuple(state.tolist()))
        for seen, state in zip(
            whole.observation.split(whole.length.tolist()), whole.recurrent_state, strict=True
        )
    }
    orders = []
    for _ in range(2):
        parts = list(whole.minibatches(5, ppo.generator))
        assert len(parts) == 5 and all(abs(len(part) - len(whole) / 5) <= 8 for part in parts)
        found = [
            (tuple(map(tuple, seen.tolist())), tuple(state.tolist()))
            for part in parts
            for seen, state in zip(
                part.observation.split(part.length.tolist()), part.recurrent_state, strict=True
            )
        ]
        assert set(found) == sequences and len(found) == len(sequences)
        orders.append(found)
    assert orders[0] != orders[1], "each epoch has its own order"
    few = list(whole.minibatches(10_000, ppo.generator))
    assert len(few) == len(sequences) and min(map(len, few)) >= 1


@pytest.mark.parametrize("least", [1, 64])
def test_sequences_go_on_over_fragments_but_not_for_ever(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fifo, "LEAST_SEQUENCE", least)
    ppo = make_learner("ppo", DISCRETE, **MEMORY)
    first, second, third, last = fragments = recurrent_feed(ppo, DISCRETE, num_fragments=4)
    assert (first.producer, first.seq + 1) == (last.producer, last.seq)
    made = trajectories(fragments, gamma=0.9)
    ends = sum(int(one.ended[:-1].sum()) for one in fragments)
    borders = last.num_envs if least == 1 else int(first.ended[-1].sum())
    assert len(made.length) == ends + sum(one.num_envs for one in (first, second, third)) + borders
    used = fragments if least == 1 else (first, second, third)
    sent = sorted(tuple(row) for one in used for row in one.extras["memory"].astype(np.float32).tolist())
    states = [tuple(row) for row in made.recurrent_state.tolist()]
    assert sorted(state for state in states if any(state)) == sent, "the others begin with their episode"
    assert made.length.sum() == made.valid.sum() == len(set(made.place.tolist()))
    assert made.valid.reshape(-1)[made.place].all()
    first = np.cumsum(made.length) - made.length
    inner = np.delete(np.arange(len(made.place)), first)
    lanes = made.row.shape[1]
    assert np.array_equal(made.place[inner], made.place[inner - 1] + lanes), (
        "one step of a lane after another"
    )
    assert made.continues.reshape(-1)[made.place[inner - 1]].all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": None}, "no columns memory_index and memory; its worker plays another algorithm"),
        ({"memory": np.zeros((2, 5), np.float16)}, r"memory is float16\[2, 5\], expected float16 \[S, 14\]"),
        ({"memory_index": np.zeros((2, 2), np.int32)}, "2 recurrent states, but not of the 2 steps"),
    ],
)
def test_fragments_of_other_workers_are_refused(change: Options, words: str) -> None:
    ppo = make_learner("ppo", DISCRETE, **MEMORY)
    fragment = recurrent_feed(ppo, DISCRETE, num_fragments=1)[0]
    queue = Fifo(ppo.config, OnPolicyConfig(), DISCRETE)
    assert queue.pack(fragment).extras.keys() == {"behavior_log_prob", "memory"}
    extras = {name: value for name, value in (fragment.extras | change).items() if value is not None}
    with pytest.raises(ValueError, match=words):
        queue.pack(replace(fragment, extras=extras))
    plain = Fifo(make_learner("ppo", DISCRETE).config, OnPolicyConfig(), DISCRETE)
    assert plain.pack(fragment).extras.keys() == {"behavior_log_prob"}, "a feed-forward learner ignores it"


PPO = {"name": "ppo", "batch_size": 512, "minibatch_size": 128, "learning_rate": 3e-3}
IMPALA = {"name": "impala", "batch_size": 320, "optimizer": "adam", "learning_rate": 3e-3}


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "recurrent", "most_steps"),
    [(PPO, "lstm", 40_000), (PPO, "none", 10_000), (IMPALA, "gru", 40_000)],
)
def test_recall_needs_memory(algorithm: Options, recurrent: str, most_steps: int) -> None:
    """A cue that is shown four steps before the question: without memory one in four answers is right."""
    memory = {"recurrent": recurrent, "recurrent_size": 32, "shared": True} if recurrent != "none" else {}
    env = {"id": "ddrl/Recall-v0", "kwargs": {"delay": 3}, "num_envs": 16}
    run = toy(env["id"], algorithm | memory | {"hidden_sizes": [32], "entropy_coefficient": 0.01}, env=env)
    outcome = learn(run, most_steps=most_steps, target=0.95, evaluate_every=4_000, num_episodes=200)
    assert (outcome.return_mean >= 0.95) == (recurrent != "none"), outcome
