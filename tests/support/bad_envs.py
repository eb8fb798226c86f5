"""Environments that go wrong, for tests of workers: the toy `ddrl/Target-v0` until a number of steps."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium

from ddrl.envs.toy import target


def make(kind: str, steps: int = 50, marker: str = "") -> gymnasium.Env[Any, Any]:
    """An environment that goes wrong after `steps` steps.

    Args:
        kind: segfault; raise; hang, which lets other threads work; hold, which does not; eat, memory;
            sleep, 10 ms a step from the beginning; none.
        steps: of this environment.
        marker: a file; once it is there nothing goes wrong any more, and going wrong makes it.
    """
    return Bad(target(), kind, steps, marker)


class Bad(gymnasium.Wrapper[Any, Any, Any, Any]):
    """See `make`."""

    def __init__(self, env: gymnasium.Env[Any, Any], kind: str, steps: int, marker: str) -> None:
        super().__init__(env)
        self._kind, self._left, self._marker = kind, steps, marker
        self._eaten: list[bytearray] = []

    def step(self, action: Any) -> Any:
        """Goes wrong once no steps are left."""
        self._left -= 1
        if self._kind == "sleep":
            time.sleep(0.01)
        if (
            self._left < 0
            and self._kind not in ("none", "sleep")
            and not (self._marker and Path(self._marker).exists())
        ):
            if self._marker:
                Path(self._marker).touch()
            self._go_wrong()
        return super().step(action)

    def _go_wrong(self) -> None:
        if self._kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self._kind == "raise":
            raise RuntimeError("the simulator is out of order")
        elif self._kind == "hang":
            time.sleep(3600)
        elif self._kind == "hold":
            ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter's lock
        elif self._kind == "eat":
            self._eaten.append(bytearray(b"x") * 64 * 1024**2)
            time.sleep(0.05)
