"""Players of known games, by their names in `env.opponent`; and examples for players of your own."""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, COLUMNS = 6, 7

# [69, 4]: the cells of each line of four, counted row by row from the top.
_LINES = np.array(
    [
        [COLUMNS * (row + i * down) + column + i * right for i in range(4)]
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
        for row in range(ROWS - 3 * down)
        for column in range(3 * (right < 0), COLUMNS - 3 * (right > 0))
    ]
)


def lookahead(shown: Any, generator: np.random.Generator) -> int:
    """Play connect four by looking one move ahead.

    Args:
        shown: as PettingZoo shows a side its game: "observation" [6, 7, 2], own stones and the other's, and
            "action_mask" [7].
        generator: chooses among columns that are as good.

    Returns:
        A column that wins, else one in which the other side would win, else any that is free.
    """
    free = np.flatnonzero(shown["action_mask"])
    stones = np.moveaxis(shown["observation"], 2, 0).reshape(2, ROWS * COLUMNS)
    taken = shown["observation"].sum(axis=(0, 2))
    lands = COLUMNS * (ROWS - 1 - taken[free]) + free  # cells
    for own in stones:
        completes = np.zeros(ROWS * COLUMNS, np.bool_)
        completes[_LINES[own[_LINES].sum(axis=1) == 3]] = True
        if completes[lands].any():
            free = free[completes[lands]]
            break
    return int(generator.choice(free))


PLAYERS = {"lookahead": (lookahead, (2 * ROWS * COLUMNS + COLUMNS,))}
"""Each with the shape of its game's observations, masks included."""
