"""What a recurrent policy carries from step to step, one row an environment; arrays that the player owns.

`state` [N, H] float32 is the policy's own. `previous_action` [N] int64 (-1 at an episode's start) and
`previous_reward` [N] float32, as scaled for training, are inputs of the next step, and kept here for it.
"""

from __future__ import annotations

import numpy as np

Memory = dict[str, np.ndarray]
NO_MEMORY: Memory = {}


def fresh(num_envs: int, size: int) -> Memory:
    """That of `num_envs` episodes that have not begun, with H = `size`."""
    return {
        "state": np.zeros((num_envs, size), np.float32),
        "previous_action": np.full(num_envs, -1, np.int64),
        "previous_reward": np.zeros(num_envs, np.float32),
    }


def remember(memory: Memory, action: np.ndarray, reward: np.ndarray, ended: np.ndarray) -> None:
    """Take note of a step, in place; rows whose episode has ended begin anew. Nothing where there is no memory.

    Args:
        memory: of N environments.
        action: [N] taken.
        reward: [N], as scaled for training.
        ended: [N] bool.
    """
    if memory:
        memory["state"][ended] = 0.0
        memory["previous_action"][:] = np.where(ended, -1, action)
        memory["previous_reward"][:] = np.where(ended, 0.0, reward)
