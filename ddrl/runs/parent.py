"""Ends a child process with the parent that started it, however the parent dies.

The parent keeps the writing end of a pipe; the kernel closes it with the process. Nothing is orphaned, on Linux
as on macOS.
"""

from __future__ import annotations

import os
import signal
import threading

FD_VARIABLE = "DDRL_PARENT_FD"
GRACE_S = 10.0


def follow(signum: signal.Signals) -> None:
    """Send `signum` to this process when the parent is gone, and end it by force if it stays GRACE_S longer.

    Does nothing in a process that was not started with DDRL_PARENT_FD.
    """
    fd = os.environ.pop(FD_VARIABLE, None)
    if fd is None:
        return

    def wait() -> None:
        os.read(int(fd), 1)
        os.kill(os.getpid(), signum)
        threading.Event().wait(GRACE_S)
        os._exit(1)

    threading.Thread(target=wait, name="follow-parent", daemon=True).start()
