"""A player of connect four that looks one move ahead, for env.opponent."""

import numpy as np


def play(shown, generator):
    """Return a column [0, 7): one that wins, else one where the other side would win, else any.

    Args:
        shown: as PettingZoo shows a side its game: "observation" [6, 7, 2], own stones and the other's, and
            "action_mask" [7].
        generator: of what is random.
    """
    free = np.flatnonzero(shown["action_mask"])
    mine, theirs = np.moveaxis(shown["observation"], 2, 0)
    for stones in (mine, theirs):
        winning = [column for column in free if _wins(stones, _row(mine + theirs, column), column)]
        if winning:
            return generator.choice(winning)
    return generator.choice(free)


def _row(taken, column):
    """Return the row on which a stone lands; row 5 is the lowest."""
    return 5 - int(taken[:, column].sum())


def _wins(stones, row, column):
    """Return whether a stone there makes four in a line."""
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        line = 1
        for sign in (1, -1):
            y, x = row + sign * down, column + sign * right
            while 0 <= y < 6 and 0 <= x < 7 and stones[y, x]:
                line, y, x = line + 1, y + sign * down, x + sign * right
        if line >= 4:
            return True
    return False
