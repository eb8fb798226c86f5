"""Slow twin of R2D2: one sequence and one recurrent step at a time; and sequences of all kinds to learn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from support.reference_returns import slow_rescale, slow_unrescale
from torch import Tensor

from ddrl.types import EnvSpec, Sequences, SequenceShape

IMAGES = EnvSpec("Toy-v0", (36, 36), "uint8", "discrete", (), (4,), frame_stack=2)
SHAPE = SequenceShape(burn_in=4, length=5, overlap=2)

# (observation [1, 1, *I], previous_action [1, 1], previous_reward [1, 1], state [1, H]) -> (q [1, 1, A], state [1, H])
Network = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class SlowResult(NamedTuple):
    """The results of one update: loss with gradient, TD errors of each sequence's steps, priorities."""

    loss: Tensor
    td: list[list[float]]
    priority: list[float]


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
    """Return sequences of every length and burn-in, every second one of which ends by termination, as tensors.

    Args:
        garbage: what numbers hold in rows and steps that no sequence uses; None: like those in use.
    """
    rng, junk = np.random.default_rng(seed), np.random.default_rng([seed, garbage is not None])
    rows, num, actions = shape.burn_in + shape.length + 1, num_sequences, spec.action_sizes[0]
    burn_in = rng.integers(shape.burn_in + 1, size=num)
    num_steps = rng.integers(1, shape.length + 1, size=num)
    burn_in[[0, -1]], num_steps[[0, -1]] = (0, shape.burn_in), (shape.length, 1)  # the first and the last one
    row, step = np.arange(rows)[:, None], np.arange(shape.length)[:, None]
    is_seen = (row < burn_in) | (row >= shape.burn_in) & (row <= shape.burn_in + num_steps)  # [rows, num]
    valid = step < num_steps  # [length, num]
    reward = np.concatenate([rng.normal(0, 2, valid.shape) * valid, np.zeros((n, num))])
    bootstrap = np.minimum(step + n, num_steps)
    is_over = (bootstrap == num_steps) & (np.arange(num) % 2 == 1)
    if spec.observation_dtype == "uint8":
        observation: np.ndarray = rng.integers(256, size=(rows, num, *spec.input_shape), dtype=np.uint8)
    else:
        observation = rng.normal(size=(rows, num, *spec.input_shape)).astype(np.float32)
    weight = rng.uniform(0.3, 1, num)
    numbers = {
        "observation": observation,
        "previous_reward": rng.normal(size=is_seen.shape),
        "n_step_return": sum(gamma**i * reward[i : i + shape.length] for i in range(n)),
        "bootstrap_discount": np.where(is_over, 0.0, gamma ** (bootstrap - step)),
    }
    if garbage is not None:
        for column in numbers.values():
            column[~(is_seen if len(column) == rows else valid)] = np.asarray(garbage).astype(column.dtype)
    floats = {
        name: column if column is observation else np.float32(column) for name, column in numbers.items()
    }
    columns = floats | {
        "previous_action": _where(is_seen, rng.integers(-1, actions, is_seen.shape), junk, actions),
        "recurrent_state": rng.normal(0, 0.5, (num, memory_size)).astype(np.float32),
        "burn_in": burn_in,
        "action": _where(valid, rng.integers(actions, size=valid.shape), junk, actions),
        "bootstrap": _where(valid, bootstrap, junk, shape.length + 1),
        "valid": valid,
        "number": np.arange(num),
        "weight": (weight / weight.max()).astype(np.float32),
    }
    return Sequences(**{name: torch.from_numpy(value) for name, value in columns.items()})


def _where(is_used: np.ndarray, column: np.ndarray, junk: np.random.Generator, end: int) -> np.ndarray:
    """Return a column with random numbers below `end` where it is not used."""
    return np.where(is_used, column, junk.integers(end, size=is_used.shape))
