"""Hindsight experience replay: transitions of the same play towards goals that it reached later.

Source: Andrychowicz et al. 2017, arXiv:1707.01495, algorithm 1 with the goals of section 4.5's strategy `future`, of
which a fragment holds as much as it has steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddrl.envs.goals import Goals
from ddrl.replay.storage import Block, Columns
from ddrl.types import Fragment


@dataclass(frozen=True)
class Hindsight:
    """Gives each transition of a fragment further goals.

    Attributes:
        goals: of the environment.
        num: K, goals drawn for each step.
    """

    goals: Goals
    num: int

    def extend(self, items: Columns, fragment: Fragment, block: Block, *, gamma: float) -> Columns:
        """Return the transitions and, behind them, K of each step that did not terminate its episode.

        Their goals are drawn uniformly from those that the episode has reached in the fragment from that step on; the
        draw depends on the fragment alone. What a step reached that terminated its episode is unknown.

        Args:
            items: transitions of one step each, as `TransitionItems.cut` makes them.
            fragment: C+T steps of N environments.
            block: the observations of its new steps.
            gamma: discount of one step.

        Returns:
            The same columns, and `goal` [M, G], the desired one.

        Raises:
            ValueError: compute_reward fails.
        """
        step = np.arange(fragment.num_steps)[:, None]  # [T, 1]
        is_last, terminated, action = (
            column[fragment.context :] for column in (fragment.ended, fragment.terminated, fragment.action)
        )
        is_last[-1] = True
        # The last step of the episode that each step is in.
        last = np.minimum.accumulate(np.where(is_last, step, step[-1])[::-1], axis=0)[::-1]
        last = last - np.take_along_axis(terminated, last, axis=0)
        time, lane = (np.tile(index, self.num) for index in np.nonzero(~terminated))  # [K * M]
        random = np.random.default_rng((fragment.producer, fragment.incarnation, fragment.seq))
        later = random.integers(time, last[time, lane] + 1)
        row, next_row = block.row[time, lane], block.next_row[time, lane]
        achieved = block.observation[:, self.goals.achieved]
        goal = achieved[block.next_row[later, lane]]
        more: Columns = {
            "row": row,
            "ahead": (next_row - row).astype(np.int32),
            "action": action[time, lane],
            "n_step_return": self.goals.reward(achieved[next_row], goal),
            "bootstrap_discount": np.full(len(row), gamma, np.float32),
            "goal": goal,
        }
        own: Columns = {**items, "goal": block.observation[items["row"], self.goals.desired]}
        return {name: np.concatenate([column, more[name]]) for name, column in own.items()}
