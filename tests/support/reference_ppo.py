"""Slow twins of the on-policy learners, one transition at a time, and a fixed feed of fragments to learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from support import reference_returns as twin
from support.algorithms import CONTINUOUS, CPU, DISCRETE, PAIRS
from support.reference_items import make_fragment
from torch import Tensor

from ddrl.config import OnPolicyConfig
from ddrl.networks.device import to_device
from ddrl.replay.fifo import Fifo, trajectories
from ddrl.types import EnvSpec, Fragment, Trajectories

IMAGES = EnvSpec("Toy-v0", (6, 6, 2), "uint8", "discrete", (), (4,))
SPECS = {"discrete": DISCRETE, "pairs": PAIRS, "continuous": CONTINUOUS, "images": IMAGES}

Parameters = Mapping[str, Tensor]  # of the network, by name


class Row(NamedTuple):
    """One transition as a loss sees it: tensors [*O] and [*A], and numbers."""

    observation: Tensor
    action: Tensor
    old_log_prob: float
    advantage: float
    old_value: float
    return_: float


def make_feed(
    spec: EnvSpec, *, seed: int = 0, num_fragments: int = 12, state_size: int = 0
) -> list[Fragment]:
    """Fragments of three producers in turn, of 2, 3 and 4 lanes, that follow each other but for one that is lost.

    They have all endings, and behavior log probabilities that are not those of any policy that learns from them.
    The third producer's fragments are shorter, so that batches are padded. With a state size they have the recurrent
    states before their first steps.
    """
    rng = np.random.default_rng(seed)
    made: list[Fragment] = []
    for number in range(num_fragments):
        turn, producer = divmod(number, 3)
        shape = (4 if producer == 2 else 8, 2 + producer)
        kind = rng.choice(3, shape, p=(0.7, 0.15, 0.15))
        final_index = np.argwhere(kind == 2).astype(np.int32)
        observation = _observations(rng, spec, (shape[0] + 1, shape[1]))
        if turn:  # it begins where the producer's last one ended
            observation[0] = made[-3].observation[-1]
        extras = {"behavior_log_prob": rng.normal(-1.3, 0.5, shape).astype(np.float32)}
        if spec.action_kind == "continuous":
            raw = rng.normal(0.2, 1.0, (*shape, *spec.action_shape)).astype(np.float32)
            extras = {"behavior_log_prob": extras["behavior_log_prob"] - 1.5, "raw_action": raw}
            action = np.clip(raw, spec.action_low, spec.action_high).astype(np.float32)
            score = raw.sum(axis=2)
        else:
            action = rng.integers(np.array(spec.action_sizes), size=(*shape, len(spec.action_sizes)))
            score = action.sum(axis=2)
            action = action.reshape(*shape, *spec.action_shape)
        if state_size:
            lanes = np.arange(shape[1])
            extras["memory_index"] = np.stack([0 * lanes, lanes], axis=1).astype(np.int32)
            extras["memory"] = rng.normal(0, 0.5, (shape[1], state_size)).astype(np.float16)
        columns = {
            "observation": observation,
            "action": action,
            "terminated": kind == 1,
            "truncated": kind == 2,
        }
        columns["reward"] = (rng.normal(size=shape) + 0.5 * score).astype(np.float32)
        columns["final_index"] = final_index
        columns["final_observation"] = _observations(rng, spec, (len(final_index),))
        seq = turn + (turn > 1)  # number 2 of each is lost
        made.append(make_fragment(producer, seq, context=0, extras=extras, **columns))
    return made


def _observations(rng: np.random.Generator, spec: EnvSpec, shape: tuple[int, ...]) -> np.ndarray:
    full = (*shape, *spec.observation_shape)
    if spec.observation_dtype == "uint8":
        return rng.integers(0, 256, full).astype(np.uint8)
    return rng.normal((1.0, 0.0, -2.0), (0.5, 2.0, 1.0), full).astype(np.float32)


def tensors(fragments: Sequence[Fragment], gamma: float = 0.9) -> Trajectories:
    """Return a batch on the CPU."""
    return to_device(trajectories(fragments, gamma=gamma), CPU)


def feed(learner: Any, config: Any, fragments: Sequence[Fragment]) -> list[dict[str, Tensor]]:
    """Learn from fragments as a learner does, iteration by iteration, each one version behind; return the figures."""
    fifo = Fifo(config, OnPolicyConfig(max_staleness=len(fragments)), DISCRETE)
    for number, fragment in enumerate(fragments):
        fifo.admit(fragment, str(number).encode(), version=0)
    figures: list[dict[str, Tensor]] = []
    while (drawn := fifo.draw(num_steps=0, num_updates=0, version=len(figures))) is not None:
        figures.append(learner.update(to_device(drawn, CPU)))
    return figures


def leaves(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a network's parameters that take gradients of their own."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in named.items()}


def slow_features(parameters: Parameters, trunk: str, row: Tensor, activation: str) -> Tensor:
    """One observation [O] through the dense layers of "actor" or "critic": [F]."""
    index = 0
    while f"{trunk}.layers.{index}.weight" in parameters:
        weight, bias = (parameters[f"{trunk}.layers.{index}.{part}"] for part in ("weight", "bias"))
        row = torch.stack([(weight[j] * row).sum() + bias[j] for j in range(len(bias))])
        row = torch.tanh(row) if activation == "tanh" else row.clamp(min=0)
        index += 1
    return row


def slow_value(parameters: Parameters, row: Tensor, activation: str) -> Tensor:
    """V(s) of one observation."""
    trunk = "critic" if "critic.layers.0.weight" in parameters else "actor"
    features = slow_features(parameters, trunk, row, activation)
    return (parameters["value_head.weight"][0] * features).sum() + parameters["value_head.bias"][0]


def slow_policy(
    parameters: Parameters, row: Tensor, action: Tensor, spec: EnvSpec, activation: str
) -> tuple[Tensor, Tensor]:
    """Log pi(a | s) and entropy for one observation and one action [*A]."""
    features = slow_features(parameters, "actor", row, activation)
    weight, bias = parameters["policy_head.weight"], parameters["policy_head.bias"]
    output = [(weight[j] * features).sum() + bias[j] for j in range(len(bias))]
    if spec.action_kind == "continuous":
        return slow_gaussian(output, list(parameters["log_std"]), action.reshape(-1).tolist())
    return slow_categorical(output, action.reshape(-1).tolist(), spec.action_sizes)


def slow_categorical(
    logits: Sequence[Tensor], choices: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Log of the softmax at each choice, and -sum p log p, summed over the dimensions."""
    log_prob, entropy, first = torch.zeros(()), torch.zeros(()), 0
    for choice, size in zip(choices, sizes, strict=True):
        weights = [torch.exp(logit) for logit in logits[first : first + size]]
        probabilities = [weight / sum(weights) for weight in weights]
        log_prob = log_prob + torch.log(probabilities[choice])
        entropy = entropy - sum(p * torch.log(p) for p in probabilities)
        first += size
    return log_prob, entropy


def slow_gaussian(
    mean: Sequence[Tensor], log_std: Sequence[Tensor], action: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Log of the product of normal densities, and the sum of log(std sqrt(2 pi e))."""
    log_prob, entropy = torch.zeros(()), torch.zeros(())
    for m, s, a in zip(mean, log_std, action, strict=True):
        std = torch.exp(s)
        log_prob = log_prob - (a - m) ** 2 / (2 * std**2) - torch.log(std * math.sqrt(2 * math.pi))
        entropy = entropy + torch.log(std * math.sqrt(2 * math.pi * math.e))
    return log_prob, entropy


def slow_rows(
    parameters: Parameters, batch: Trajectories, spec: EnvSpec, *, estimator: str, lambda_: float,
    activation: str, old: str, rho_bar: float = 1.0,
) -> list[Row]:  # fmt: skip
    """The transitions of a batch, lane by lane, with targets from the papers' sums; old is "behavior" or "begin"."""
    rows = []
    num_steps, num_lanes = batch.row.shape
    with torch.no_grad():
        value = [float(slow_value(parameters, row, activation)) for row in batch.observation]
    for b in range(num_lanes):
        played = [t for t in range(num_steps) if batch.valid[t, b]]
        here = [batch.observation[int(batch.row[t, b])] for t in played]
        behavior = [float(batch.behavior_log_prob[t, b]) for t in played]
        with torch.no_grad():
            log_prob = [
                float(slow_policy(parameters, row, batch.action[t, b], spec, activation)[0])
                for t, row in zip(played, here, strict=True)
            ]
        lane = twin.Steps(
            reward=[float(batch.reward[t, b]) for t in played],
            discount=[float(batch.discount[t, b]) for t in played],
            value=[value[int(batch.row[t, b])] for t in played],
            next_value=[value[int(batch.next_row[t, b])] for t in played],
            continues=[bool(batch.continues[t, b]) for t in played],
            log_rho=[mine - theirs for mine, theirs in zip(log_prob, behavior, strict=True)],
        )
        for i, t in enumerate(played):
            advantage, return_ = slow_targets(estimator, lane, i, lambda_=lambda_, rho_bar=rho_bar)
            start = behavior[i] if old == "behavior" else log_prob[i]
            rows.append(Row(here[i], batch.action[t, b], start, advantage, lane.value[i], return_))
    return rows


def slow_targets(
    estimator: str, lane: twin.Steps, start: int, *, lambda_: float, rho_bar: float = 1.0
) -> tuple[float, float]:
    """Advantage and the critic's target for one start of one lane."""
    if estimator == "monte_carlo":
        return_ = twin.slow_monte_carlo(lane, start)
        return return_ - lane.value[start], return_
    if estimator in ("gae", "td_lambda"):
        return twin.slow_gae(lane, start, lambda_=lambda_), twin.slow_td_lambda(lane, start, lambda_=lambda_)
    advantage, return_ = twin.slow_vtrace(lane, start, lambda_=lambda_, rho_bar=rho_bar, pg_rho_bar=rho_bar)
    return (twin.slow_upgo(lane, start)[0] if estimator == "upgo" else advantage), return_


def slow_surrogate(log_prob: Tensor, old_log_prob: float, advantage: float, *, clip: float) -> Tensor:
    """arXiv:1707.06347, equation 7, for one sample, as figure 1 draws it."""
    ratio = torch.exp(log_prob) / math.exp(old_log_prob)
    if advantage >= 0:
        return advantage * ratio if ratio < 1 + clip else torch.tensor(advantage * (1 + clip))
    return advantage * ratio if ratio > 1 - clip else torch.tensor(advantage * (1 - clip))


def slow_value_loss(value: Tensor, old_value: float, return_: float, *, clip: float | None) -> Tensor:
    """Half the larger of the squared errors of a value and of the same value kept within `clip` of the old one."""
    error = (value - return_) ** 2
    if clip is not None:
        moved = float(value.detach()) - old_value
        near = value if abs(moved) <= clip else torch.tensor(old_value + math.copysign(clip, moved))
        other = (near - return_) ** 2
        error = other if bool(other > error) else error
    return 0.5 * error


def slow_ppo_loss(
    parameters: Parameters, rows: Sequence[Row], spec: EnvSpec, config: Any, *, normalize: bool
) -> Tensor:
    """arXiv:1707.06347, equation 9, negated, over one minibatch."""
    advantages = torch.tensor([row.advantage for row in rows])
    mean, std = (float(advantages.mean()), float(advantages.std())) if normalize else (0.0, 1.0)
    total = torch.zeros(())
    for row in rows:
        log_prob, entropy = slow_policy(parameters, row.observation, row.action, spec, config.activation)
        value = slow_value(parameters, row.observation, config.activation)
        objective = slow_surrogate(log_prob, row.old_log_prob, (row.advantage - mean) / std, clip=config.clip)
        error = slow_value_loss(value, row.old_value, row.return_, clip=config.value_clip)
        total = total + objective - config.value_coefficient * error + config.entropy_coefficient * entropy
    return -total / len(rows)


def slow_impala_loss(parameters: Parameters, rows: Sequence[Row], spec: EnvSpec, config: Any) -> Tensor:
    """arXiv:1802.01561, section 4.2: the three gradients, as means; the advantage has its rho already."""
    total = torch.zeros(())
    for row in rows:
        log_prob, entropy = slow_policy(parameters, row.observation, row.action, spec, config.activation)
        error = (row.return_ - slow_value(parameters, row.observation, config.activation)) ** 2
        total = total - row.advantage * log_prob + config.value_coefficient * 0.5 * error
        total = total - config.entropy_coefficient * entropy
    return total / len(rows)
