"""Ends a process whose environment hangs, or that takes too much memory: another one starts in its place.

A thread looks at the progress of what is watched. Where native code holds the interpreter no thread can, so a timer
of the kernel stands behind it: SIGALRM, whose default action ends the process. Both leave an exit status from which
the worker's main process reads what happened.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

log = logging.getLogger(__name__)

TOLD, NOT_TOLD = 75, 76
"""Exit statuses of a process that its watchdog ended: having told the run, or not."""

LOOK_S = 0.5  # at most, between two looks
TELL_S = 5.0  # for telling the run, before the process ends without
MEMORY_FACTOR = 2.0  # of the limit that is kept between segments


class Watch:
    """Watches over what this process plays. One a process, and only where that plays in its main thread.

    Args:
        tell: notes in the run's state why its process ends: (run, reason). Called from a thread of its own.
        memory_bytes: beyond which the process is ended in the middle of a segment; 0 is no limit.
    """

    def __init__(self, tell: Callable[[str, str], object], *, memory_bytes: int = 0) -> None:
        self._tell, self._memory_bytes = tell, memory_bytes
        self._thread: threading.Thread | None = None
        self._run = self._env_id = ""
        self._timeout_s = 0.0
        self._since: float | None = None  # of the step that is being played; None: nothing is watched
        self._lock = threading.Lock()  # so that no timer is set behind the back of a block that ends

    @contextmanager
    def over(self, run: str, env_id: str, timeout_s: float) -> Iterator[None]:
        """Watch the block: each of its steps, told by `step`, may take `timeout_s`."""
        if (
            threading.current_thread() is not threading.main_thread()
        ):  # a pool of threads: nothing to end alone
            yield
            return
        with self._lock:
            self._run, self._env_id, self._timeout_s = run, env_id, timeout_s
            self._since = time.monotonic()
            self._set_timer()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._since = None
                signal.setitimer(signal.ITIMER_REAL, 0)

    def step(self) -> None:
        """Say that a step was made."""
        if self._since is not None:
            self._since = time.monotonic()

    def _set_timer(self) -> None:
        """The kernel's timer, behind the thread's time to see and tell it."""
        signal.setitimer(signal.ITIMER_REAL, 1.25 * self._timeout_s + 2 * LOOK_S + TELL_S)

    def _look(self) -> None:
        while True:
            time.sleep(min(LOOK_S, self._timeout_s / 4))
            with self._lock:
                since = self._since
                if since is None:
                    continue
                if time.monotonic() - since > self._timeout_s:
                    self._end(
                        f"{self._env_id} took longer than {self._timeout_s:g} s for a step "
                        "(rollout.step_timeout_s); mend the environment or raise the limit"
                    )
                if self._memory_bytes and (used := resident_bytes()) > MEMORY_FACTOR * self._memory_bytes:
                    self._end(
                        f"the process holds {used / 1024**2:.0f} MiB in playing {self._env_id}, more than "
                        f"{MEMORY_FACTOR:g} times DDRL_PROCESS_MEMORY; lower env.num_envs or raise the limit"
                    )
                self._set_timer()

    def _end(self, what: str) -> NoReturn:
        reason = f"host {socket.gethostname()}: {what}"
        log.error("%s; process %d ends", reason, os.getpid())
        told = threading.Event()

        def tell() -> None:
            self._tell(self._run, reason)
            told.set()

        threading.Thread(target=tell, name="watchdog-tell", daemon=True).start()
        done = told.wait(TELL_S)
        sys.stderr.flush()
        os._exit(TOLD if done else NOT_TOLD)


def explain(status: str) -> str | None:
    """What happened to a process, by the words in which its pool tells its exit; None: its run knows already."""
    if f"exitcode {TOLD}" in status:
        return None
    if f"exitcode {NOT_TOLD}" in status:
        return "its watchdog ended it (its log says why); mend the environment"
    if "SIGALRM" in status:
        return "a step held the interpreter for longer than rollout.step_timeout_s; mend the environment"
    if "SIGKILL" in status:
        return "it was killed (signal 9), perhaps by the system for want of memory; lower env.num_envs or add memory"
    if "SIGSEGV" in status or "SIGABRT" in status or "SIGBUS" in status or "SIGILL" in status:
        return f"native code crashed ({status}); mend the environment or install its package again"
    return f"it ended by {status}; the worker's log may say why"


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
