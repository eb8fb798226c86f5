"""Environments that go wrong, for tests of workers, and a custom network that workers may not import."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium

from ddrl.envs.toy import target


def make(kind: str, steps: int = 50, marker: str = "") -> gymnasium.Env[Any, Any]:
    """Return the toy `ddrl/Target-v0`, which goes wrong after `steps` steps.

    Args:
        kind: segfault; raise, and then again when it is closed; hang, which lets other threads work; hold, which does
            not; eat, memory; exhaust, which finds none; sleep, 10 ms a step from the beginning; none.
        steps: of this environment.
        marker: a file; once it is there nothing goes wrong any more, and going wrong makes it.
    """
    env, taken, eaten = target(), itertools.count(), list[bytearray]()
    play = env.step

    def closed() -> None:
        raise RuntimeError("the simulator does not answer")

    def step(action: Any) -> Any:
        is_due = next(taken) >= steps and not (marker and Path(marker).exists())
        if is_due and marker:
            Path(marker).touch()
        if kind == "sleep":
            time.sleep(0.01)
        elif is_due and kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif is_due and kind == "raise":
            env.close = closed  # type: ignore[method-assign]
            raise RuntimeError("the simulator is out of order")
        elif is_due and kind == "exhaust":
            raise MemoryError("std::bad_alloc")
        elif is_due and kind == "hang":
            time.sleep(3600)
        elif is_due and kind == "hold":
            ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter's lock
        elif is_due and kind == "eat":
            eaten.append(bytearray(b"x") * 64 * 1024**2)
            time.sleep(0.05)
        return play(action)

    env.step = step  # type: ignore[method-assign]
    return env


def network(observation_shape: tuple[int, ...], **_: Any) -> Any:
    """Return features of a vector."""
    from torch import nn  # players of the environments do without

    return nn.Sequential(nn.Linear(observation_shape[0], 8), nn.Tanh())
