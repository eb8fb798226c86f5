"""The last steps of a producer, which lead its next fragment as context."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Place = tuple[int, int]
"""A step, counted from the first row of a fragment, and an environment."""


class History:
    """The last `num_steps` steps that were played; fewer before so many were, and then all.

    Args:
        num_steps: C.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._columns: dict[str, np.ndarray] = {}
        self.finals: dict[Place, np.ndarray] = {}
        """True observations after the truncated ones of these steps, in order of time."""

    def __len__(self) -> int:
        """Steps held."""
        return len(next(iter(self._columns.values()), ()))

    @property
    def num_bytes(self) -> int:
        """Bytes of what is held."""
        return sum(array.nbytes for array in (*self._columns.values(), *self.finals.values()))

    def lead(self, name: str, column: np.ndarray) -> np.ndarray:
        """A column [T, N, ...] with the steps held before it, [C+T, N, ...]; zeros where it did not exist then."""
        if not len(self):
            return column
        past = self._columns.get(name)
        if past is None:
            past = np.zeros((len(self), *column.shape[1:]), column.dtype)
        return np.concatenate([past, column])

    def keep(self, columns: Mapping[str, np.ndarray], finals: Mapping[Place, np.ndarray]) -> None:
        """Hold copies of the last steps of columns [C+T, N, ...] of one fragment, and of their finals."""
        if not self._num_steps:
            return
        rows = min(len(column) for column in columns.values())
        first = max(rows - self._num_steps, 0)
        self._columns = {name: column[first:rows].copy() for name, column in columns.items()}
        self.finals = {(step - first, lane): final for (step, lane), final in finals.items() if step >= first}
