"""Ends a process whose environment hangs, or that takes too much memory or gets none; the pool starts another one.

A thread checks the progress of what is watched. No thread runs while native code holds the interpreter, so a kernel
timer stands behind it: SIGALRM, whose default action ends the process. From the exit status the worker's main
process knows what happened.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ddrl.runs.monitoring import resident_bytes
from ddrl.store.connection import causes

log = logging.getLogger(__name__)

REPORTED, UNREPORTED, NO_MEMORY = 75, 76, 77
"""Exit statuses of a process that was ended here: the run knows why, the report did not succeed in time, or there was
no memory for one."""

CHECK_EVERY_S = 0.5  # at most
REPORT_S = 5.0  # for the report to the run, before the process ends without it
MEMORY_FACTOR = 2.0  # times the limit that holds between segments


class Watchdog:
    """Ends this process when a step of an environment takes too long or the process too much memory.

    One a process, and only where that plays in its main thread.

    Args:
        report: stores in the run's state why its process ends: (run, reason). Called from another thread.
        memory_bytes: the process is ended in the middle of a segment at MEMORY_FACTOR times this; 0 is no limit.
    """

    def __init__(self, report: Callable[[str, str], object], *, memory_bytes: int = 0) -> None:
        self._report, self._memory_bytes = report, memory_bytes
        self._thread: threading.Thread | None = None
        self._step_began: float | None = None  # None: nothing is watched
        self._lock = threading.Lock()  # so that the thread sets no timer after the watched block has ended

    @contextmanager
    def watch(self, run: str, env_id: str, timeout_s: float) -> Iterator[None]:
        """Watch the block; each of its steps may take `timeout_s`."""
        if threading.current_thread() is not threading.main_thread():
            yield  # in a pool of threads none can be ended alone
            return
        self._run, self._env_id, self._timeout_s = run, env_id, timeout_s
        self._begin()
        if self._thread is None:
            self._thread = threading.Thread(target=self._check_forever, name="watchdog", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._rest()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing in the block, which waits for the server; a new step begins behind it."""
        is_watching = self._step_began is not None
        if is_watching:
            self._rest()
        try:
            yield
        finally:
            if is_watching:
                self._begin()

    def _begin(self) -> None:
        with self._lock:
            self._step_began = time.monotonic()
            self._set_timer()

    def _rest(self) -> None:
        with self._lock:
            self._step_began = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def step(self) -> None:
        """Note that a step was made; the next one begins."""
        if self._step_began is not None:
            self._step_began = time.monotonic()

    def _set_timer(self) -> None:
        """Set the kernel's timer to when the thread has had its time to notice and report."""
        signal.setitimer(signal.ITIMER_REAL, 1.25 * self._timeout_s + 2 * CHECK_EVERY_S + REPORT_S)

    def _check_forever(self) -> None:
        while True:
            time.sleep(min(CHECK_EVERY_S, self._timeout_s / 4))
            with self._lock:
                if (began := self._step_began) is None:
                    continue
                if time.monotonic() - began > self._timeout_s:
                    self._end(
                        f"{self._env_id} took longer than {self._timeout_s:g} s for a step "
                        "(rollout.step_timeout_s); fix the environment or raise the limit"
                    )
                limit = MEMORY_FACTOR * self._memory_bytes
                if limit and (used := resident_bytes(os.getpid())) > limit:
                    self._end(
                        f"the process holds {used / 1024**2:.0f} MiB while playing {self._env_id}, more than "
                        f"{MEMORY_FACTOR:g} times DDRL_PROCESS_MEMORY; lower env.num_envs or raise the limit"
                    )
                self._set_timer()

    def _end(self, what: str) -> NoReturn:
        reason = f"host {socket.gethostname()}: {what}"
        log.error("%s; process %d ends", reason, os.getpid())
        is_reported = threading.Event()

        def report() -> None:
            self._report(self._run, reason)
            is_reported.set()

        threading.Thread(target=report, name="watchdog-report", daemon=True).start()
        is_reported.wait(REPORT_S)
        sys.stderr.flush()
        os._exit(REPORTED if is_reported.is_set() else UNREPORTED)


@contextmanager
def ends_without_memory() -> Iterator[None]:
    """End this process if the block finds no memory: a module that it could only half import never works again."""
    try:
        yield
    except Exception as error:
        is_alone = threading.current_thread() is threading.main_thread()  # not in a pool of threads
        if is_alone and any(map(_lacks_memory, causes(error))):
            os._exit(NO_MEMORY)
        raise


def _lacks_memory(error: BaseException) -> bool:
    """Return whether Python or its loader of libraries says so; texts of other errors may hold what a worker wrote."""
    return (
        isinstance(error, MemoryError)
        or (type(error) is RuntimeError and str(error) == "can't start new thread")
        or (type(error) is SystemError and str(error) == "error return without exception set")
        or (isinstance(error, ImportError) and "failed to map segment from shared object" in str(error))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    )


def explain(status: str) -> str | None:
    """Return why a process of the pool ended, from the pool's message about it; None if its run knows already."""
    if f"exitcode {REPORTED}" in status:
        return None
    if f"exitcode {UNREPORTED}" in status:
        return "its watchdog ended it (its log says why); fix the environment"
    if f"exitcode {NO_MEMORY}" in status:
        return "it had no memory left; lower env.num_envs, or start fewer processes"
    if "SIGALRM" in status:
        return "a step held the interpreter for longer than rollout.step_timeout_s; fix the environment"
    if "SIGKILL" in status:
        return "it was killed (signal 9), perhaps by the system for lack of memory; lower env.num_envs or add memory"
    if any(name in status for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL")):
        return f"native code crashed ({status}); fix the environment or install its package again"
    return f"it ended by {status}; the worker's log may say why"
