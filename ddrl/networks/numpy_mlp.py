"""The forward pass of a multilayer perceptron in NumPy, for policies that act without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

Layer = tuple[np.ndarray, np.ndarray]
"""Weight [in, out] and bias [out]."""

ACTIVATIONS: Mapping[str, Callable[..., Any]] = {"tanh": np.tanh, "relu": partial(np.maximum, 0.0)}


def forward(
    layers: Sequence[Layer], x: np.ndarray, *, activation: Callable[..., Any], by_row: bool
) -> np.ndarray:
    """Return the network's output: float32 [N, in] -> [N, out], without activation after the last layer.

    Args:
        layers: from input to output; one or more.
        x: [N, in].
        activation: one of `ACTIVATIONS`, after each hidden layer.
        by_row: each row is a vector-matrix product of its own, so that its result does not depend on the other rows:
            a matrix product rounds a row differently by its place and by the number of rows, but is faster.
    """
    if by_row:
        x = x[:, None]  # [N, 1, in]: NumPy multiplies row by row
    *hidden, (last_weight, last_bias) = layers
    for weight, bias in hidden:
        x = x @ weight
        x += bias
        activation(x, out=x)
    output: np.ndarray = x @ last_weight + last_bias
    return output.reshape(len(x), -1)
