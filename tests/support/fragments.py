"""Fragments to test with."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddrl.types import Fragment


def plain_fragment(
    *, seq: int, context: int, truncated: np.ndarray, finals: Any = None, **columns: Any
) -> Fragment:
    """A fragment of producer 1, version 0, without finished episodes.

    Args:
        finals: (step, environment) -> final observation of the truncated steps, in order of time.
        columns: observation, action, reward, terminated, and extras.
    """
    finals, observation = finals or {}, columns["observation"]
    return Fragment(
        run="run",
        producer=1,
        incarnation=7,
        seq=seq,
        policy_version=0,
        context=context,
        truncated=truncated,
        final_index=np.array(list(finals), np.int32).reshape(-1, 2),
        final_observation=np.array(list(finals.values()), observation.dtype).reshape(
            -1, *observation.shape[2:]
        ),
        episode_return=np.zeros(0, np.float32),
        episode_length=np.zeros(0, np.int32),
        **columns,
    )
