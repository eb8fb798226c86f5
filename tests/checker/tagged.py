"""An environment whose steps can be recognized, and a network that logs which of them it learns from.

An observation is [4 numbers one-hot, 3 numbers tag]. The tag is the lane, two numbers of 24 bits that only this
environment has, and the count of steps before this one; so each step that is ever played has a tag of its own. The
network sees the one-hot only. Where CHECKER_LOG names a folder, each pass that has a gradient appends a record to a
file there: of the learner's passes these are the ones it learns by.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

LOG_VARIABLE = "CHECKER_LOG"
BRIGHT, TAG = slice(0, 4), slice(4, 7)
RECORD = struct.Struct("<d8s8sI")  # monotonic time, session, hash of the network's state, number of steps


def steps_of(tags: Any) -> Any:
    """Return the tags [..., 3] as uint64 [...]: the lane in the upper 40 bits, the step in the lower 24."""
    high, low, step = (tags[..., i].astype(np.uint64) for i in range(3))
    return (((high << 16) ^ low) << 24) | step


class Tagged(gymnasium.Env[Any, Any]):
    """Name the bright one of four: reward 1 if right; ten steps are an episode, which is truncated.

    Args:
        sleep_s: duration of a step.
    """

    def __init__(self, sleep_s: float = 0.0) -> None:
        self.observation_space = Box(0.0, 2.0**24, (7,), np.float32)
        self.action_space = Discrete(4)
        self._lane = np.frombuffer(os.urandom(8), np.uint32) >> 8
        self._lane[0] |= 1  # never 0, as in an observation that nobody played
        self._step, self._answer, self._sleep_s = 0, 0, sleep_s

    def _observe(self) -> Any:
        self._answer = int(self.np_random.integers(4))
        observation = np.zeros(7, np.float32)
        observation[self._answer] = 1.0
        observation[TAG] = *self._lane, self._step
        return observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = 10
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        reward = float(action == self._answer)
        self._step, self._left = self._step + 1, self._left - 1
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return self._observe(), reward, False, self._left == 0, {}


def network(observation_shape: tuple[int, ...]) -> Any:
    """Return features [B, 16] of observations [B, 7]."""
    import torch
    from torch import nn

    class Logging(nn.Module):
        num_passes: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.session = nn.Linear(4, 16), os.urandom(8)
            self.register_buffer("num_passes", torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            if torch.is_grad_enabled() and LOG_VARIABLE in os.environ:
                state = torch.cat([self.num_passes, self.layer.weight.detach().flatten()])
                log(self.session, state.numpy(), x[:, TAG].detach().numpy())
                self.num_passes += 1
            return torch.tanh(self.layer(x[:, BRIGHT]))

    return Logging()


def log(session: bytes, state: Any, tags: Any) -> None:
    """Append a record to the session's file; the last one of a killed process may be cut off."""
    tags = tags[(tags[:, 0] >= 1) & (tags == tags.round()).all(axis=1) & (tags < 2.0**24).all(axis=1)]
    if not len(tags):
        return  # noise with which ddrl tries a network
    digest = hashlib.blake2b(state.tobytes(), digest_size=8).digest()
    head = RECORD.pack(time.monotonic(), session, digest, len(tags))
    file = os.open(
        Path(os.environ[LOG_VARIABLE], f"{session.hex()}.steps"), os.O_WRONLY | os.O_APPEND | os.O_CREAT
    )
    os.write(file, head + steps_of(tags).tobytes())
    os.close(file)
