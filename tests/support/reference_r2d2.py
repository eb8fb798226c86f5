"""Slow twin of R2D2: one sequence and one recurrent step at a time; and sequences of all kinds to learn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddrl.algorithms.base import advance
from ddrl.algorithms.r2d2.config import Config
from ddrl.algorithms.r2d2.policy import Policy
from ddrl.types import EnvSpec, Sequences, SequenceShape

IMAGES = EnvSpec("Toy-v0", (36, 36), "uint8", "discrete", (), (4,), frame_stack=2)
SHAPE = SequenceShape(burn_in=4, length=5, overlap=2)

# (observation [1, 1, *I], previous_action [1, 1], previous_reward [1, 1], state [1, H]) -> (q [1, 1, A], state [1, H])
Network = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class SlowResult(NamedTuple):
    """What one update looks at: the loss with its gradient, TD errors of each sequence's steps, priorities."""

    loss: Tensor
    td: list[list[float]]
    priority: list[float]


def slow_rescale(x: float, eps: float = 1e-3) -> float:
    """Pohlen et al. 2018, section 3.2, as printed."""
    return float(np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + eps * x)


def slow_unrescale(x: float, eps: float = 1e-3) -> float:
    """Pohlen et al. 2018, proposition A.2, as printed."""
    return float(np.sign(x) * (((np.sqrt(1 + 4 * eps * (abs(x) + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1))


def slow_r2d2(
    network: Network, target_network: Network, batch: Sequences,
    *, mix: float, double: bool = True, rescale_values: bool = True, reduction: Literal["mean", "sum"] = "mean",
) -> SlowResult:  # fmt: skip
    """The loss of a batch. Rows and steps that no sequence uses are never looked at."""
    total, tds, priorities = torch.zeros(()), [], []
    num_sequences = len(batch.recurrent_state)
    for b in range(num_sequences):
        online = _values(network, batch, b)
        with torch.no_grad():
            target_q = _values(target_network, batch, b)
        td, error = [], torch.zeros(())
        num_steps = len(online) - 1
        for t in range(num_steps):
            prediction = online[t][int(batch.action[t, b])]
            at = int(batch.bootstrap[t, b])
            value = float(target_q[at][int((online if double else target_q)[at].argmax())])
            value = slow_unrescale(value) if rescale_values else value
            target = float(batch.n_step_return[t, b]) + float(batch.bootstrap_discount[t, b]) * value
            target = slow_rescale(target) if rescale_values else target
            td.append(target - prediction.item())
            error = error + 0.5 * (target - prediction) ** 2
        weight = 1.0 if batch.weight is None else float(batch.weight[b])
        total = total + weight * (error / num_steps if reduction == "mean" else error)
        sizes = [abs(x) for x in td]
        priorities.append(mix * max(sizes) + (1 - mix) * sum(sizes) / len(sizes))
        tds.append(td)
    return SlowResult(total / num_sequences, tds, priorities)


def _values(network: Network, batch: Sequences, b: int) -> list[Tensor]:
    """[A] of each row in use of one training slice, after its burn-in."""

    def step(row: int, state: Tensor) -> tuple[Tensor, Tensor]:
        at = (slice(row, row + 1), slice(b, b + 1))
        output, state = network(
            batch.observation[at], batch.previous_action[at], batch.previous_reward[at], state
        )
        return output[0, 0], state

    state = batch.recurrent_state[b : b + 1]
    for row in range(int(batch.burn_in[b])):
        _, state = step(row, state)
    state = state.detach()
    first = len(batch.observation) - len(batch.action) - 1
    values = []
    for row in range(first, first + int(batch.valid[:, b].sum()) + 1):
        value, state = step(row, state)
        values.append(value)
    return values


def make_sequences(
    spec: EnvSpec, shape: SequenceShape, *, memory_size: int, num_sequences: int = 6, seed: int = 0, gamma: float = 0.9,
    n: int = 3, garbage: float | None = None,
) -> Sequences:  # fmt: skip
    """Sequences of every length and burn-in, some of which end by termination, as tensors.

    Args:
        garbage: what rows and steps that no sequence uses hold; None: a used row once more, and zeros.
    """
    rng = np.random.default_rng(seed)
    burn_in_rows, length = shape.burn_in, shape.length
    rows, actions = burn_in_rows + length + 1, spec.action_sizes[0]
    made = _empty(spec, rows, length, num_sequences, memory_size, rng)
    junk = np.random.default_rng(seed + 1)
    for b in range(num_sequences):
        # the first has no burn-in and is full, the last has all burn-in and one step
        burn_in = {0: 0, num_sequences - 1: burn_in_rows}.get(b, int(rng.integers(burn_in_rows + 1)))
        num_steps = {0: length, num_sequences - 1: 1}.get(b, int(rng.integers(1, length + 1)))
        reward, terminated = rng.normal(0, 2, num_steps), b % 2 == 1
        made["burn_in"][b] = burn_in
        for t in range(num_steps):
            k = min(n, num_steps - t)
            made["n_step_return"][t, b] = sum(gamma**i * reward[t + i] for i in range(k))
            made["bootstrap"][t, b] = t + k
            made["bootstrap_discount"][t, b] = 0.0 if terminated and t + k == num_steps else gamma**k
            made["valid"][t, b] = True
        last = burn_in_rows + num_steps
        for row in (*range(burn_in, burn_in_rows), *range(last + 1, rows)):
            if garbage is None:
                for name in ("observation", "previous_action", "previous_reward"):
                    made[name][row, b] = made[name][last, b]
            else:
                made["observation"][row, b] = np.asarray(garbage).astype(made["observation"].dtype)
                made["previous_action"][row, b] = junk.integers(-1, actions)
                made["previous_reward"][row, b] = -garbage
        if garbage is not None:
            unused = slice(num_steps, None)
            made["action"][unused, b] = junk.integers(actions, size=length - num_steps)
            made["bootstrap"][unused, b] = junk.integers(length + 1, size=length - num_steps)
            made["n_step_return"][unused, b], made["bootstrap_discount"][unused, b] = garbage, garbage
    return Sequences(**{name: torch.from_numpy(value) for name, value in made.items()})


def _empty(
    spec: EnvSpec, rows: int, length: int, num_sequences: int, memory_size: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Columns of the right shapes, with random inputs and no step that was played."""
    seen, steps, actions = (rows, num_sequences), (length, num_sequences), spec.action_sizes[0]
    if spec.observation_dtype == "uint8":
        observation: np.ndarray = rng.integers(256, size=(*seen, *spec.input_shape), dtype=np.uint8)
    else:
        observation = rng.normal(size=(*seen, *spec.input_shape)).astype(np.float32)
    weight = rng.uniform(0.3, 1, num_sequences)
    return {
        "observation": observation,
        "previous_action": rng.integers(-1, actions, seen),
        "previous_reward": rng.normal(size=seen).astype(np.float32),
        "recurrent_state": rng.normal(0, 0.5, (num_sequences, memory_size)).astype(np.float32),
        "burn_in": np.zeros(num_sequences, np.int64),
        "action": rng.integers(actions, size=steps),
        "n_step_return": np.zeros(steps, np.float32),
        "bootstrap_discount": np.zeros(steps, np.float32),
        "bootstrap": np.zeros(steps, np.int64),
        "valid": np.zeros(steps, np.bool_),
        "number": np.arange(num_sequences),
        "weight": (weight / weight.max()).astype(np.float32),
    }


NUM_CUES, LAST = 3, 5  # the cue is seen at step 0, and asked for at step 5
RECALL = EnvSpec("Recall-v0", (NUM_CUES,), "float32", "discrete", (), (NUM_CUES,))


def play_recall(policy: Policy, cue: np.ndarray, *, forgets: bool = False) -> float:
    """Share of episodes whose last action is the cue. One that forgets sees nothing but the observation."""
    state = policy.initial_state(len(cue))
    for step in range(LAST + 1):
        if forgets:
            state = policy.initial_state(len(cue))
        action = policy.act(np.eye(NUM_CUES, dtype=np.float32)[cue] * (step == 0), state)
        advance(state, action, np.zeros(len(cue), np.float32), np.zeros(len(cue), np.bool_))
    return float(np.mean(action == cue))


def recall_sequences(rng: np.random.Generator, config: Config, size: int, memory_size: int) -> Sequences:
    """Whole episodes of random actions; only the last one is rewarded, by 1 where it is the cue."""
    num_steps, cue = LAST + 1, rng.integers(NUM_CUES, size=size)
    action = rng.integers(NUM_CUES, size=(num_steps, size))
    observation = np.zeros((num_steps + 1, size, NUM_CUES), np.float32)
    observation[0, np.arange(size), cue] = 1.0
    bootstrap = np.minimum(np.arange(num_steps)[:, None] + config.n_step, num_steps).repeat(size, axis=1)
    k = bootstrap - np.arange(num_steps)[:, None]
    is_over = bootstrap == num_steps
    reward = (action[-1] == cue).astype(np.float32)
    columns = {
        "observation": observation,
        "previous_action": np.concatenate([np.full((1, size), -1), action]),
        "previous_reward": np.zeros((num_steps + 1, size), np.float32),
        "recurrent_state": np.zeros((size, memory_size), np.float32),
        "burn_in": np.zeros(size, np.int64),
        "action": action,
        "n_step_return": (config.gamma ** (k - 1) * is_over * reward).astype(np.float32),
        "bootstrap_discount": (config.gamma**k * ~is_over).astype(np.float32),
        "bootstrap": bootstrap,
        "valid": np.ones((num_steps, size), np.bool_),
    }
    return Sequences(**{name: torch.from_numpy(value) for name, value in columns.items()})
