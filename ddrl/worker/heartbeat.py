"""A worker's voice: its heartbeat, its leave-taking, and the word of processes that ended without one.

Everything goes out from one thread, for a worker's main thread must never wait for the server. Orders reach it through
a queue whose `put` may be called from a signal handler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddrl.store import connection, segments, workers
from ddrl.store.workers import Heartbeat

log = logging.getLogger(__name__)

DRAIN_EVERY_S = 0.5  # runs may begin meanwhile
FAREWELL_S = 2.0  # for the last word to the server
_DRAIN, _GO = "drain", "go"


class Presence:
    """Tells the server of a worker until it is gone.

    Args:
        heartbeat: what is said, but for what changes.
        pids: gives the ids of the pool's processes as of now.
    """

    def __init__(self, heartbeat: Heartbeat, pids: Callable[[], tuple[int, ...]]) -> None:
        self._heartbeat, self._pids = heartbeat, pids
        self._orders: queue.SimpleQueue[str | tuple[str, str]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="presence", daemon=True)
        self._ending = False

    @property
    def node(self) -> str:
        """The worker's name on the server."""
        return self._heartbeat.node

    def start(self) -> None:
        """Say that the worker is there, and go on saying so."""
        self._thread.start()

    def drain(self) -> None:
        """Have all segments of this worker end, from now on and until it is gone."""
        self._orders.put(_DRAIN)

    def note_crash(self, run: str, reason: str) -> None:
        """Have it noted that a process could not play the run."""
        self._orders.put((run, reason))

    def leave(self) -> None:
        """Say that the worker goes; waits FAREWELL_S for that at most."""
        self._orders.put(_GO)
        self._thread.join(FAREWELL_S)

    def end_at_once(self) -> None:
        """End this worker and its processes now, in order: its heartbeat goes first."""
        if self._ending:
            return
        self._ending = True
        threading.Thread(target=self._end, name="end-at-once", daemon=True).start()

    def _end(self) -> None:
        log.warning("worker %s: asked again, ends at once", self.node)
        self.leave()
        for pid in self._pids():
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        logging.shutdown()
        os._exit(1)

    def _work(self) -> None:
        client = connection.connect()
        crashes: list[tuple[str, str]] = []
        draining, welcome, pause_s = False, False, 0.0
        while True:
            try:
                order = self._orders.get(timeout=pause_s)
            except queue.Empty:
                order = ""
            if isinstance(order, tuple):
                crashes.append(order)
            draining = draining or order == _DRAIN
            pause_s = DRAIN_EVERY_S if draining else workers.BEAT_S
            try:
                if order == _GO:
                    workers.leave(client, self._heartbeat)
                    return
                if not welcome:
                    segments.stay(client, self.node)
                    welcome = True
                if draining:
                    segments.drain(client, self.node)
                while crashes:
                    segments.note_crash(client, *crashes[0])
                    crashes.pop(0)
                workers.beat(client, replace(self._heartbeat, pids=self._pids(), draining=draining))
            except Exception as error:  # the worker plays on, and so must this
                if order == _GO:
                    return
                if not isinstance(error, connection.OUTAGES):
                    log.exception("worker %s: cannot tell of itself", self.node)


def gpus() -> tuple[str, ...]:
    """Names of this machine's NVIDIA GPUs, as its driver tells them; none where there is no driver."""
    told = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [
        line.partition(":")[2].strip() for path in told for line in _lines(path) if line.startswith("Model")
    ]
    if names or shutil.which("nvidia-smi") is None:
        return tuple(names)
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def memory_bytes() -> int:
    """Memory of this machine, or what its container allows; 0 where the system does not say."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
    allowed = _lines(Path("/sys/fs/cgroup/memory.max"))
    return min(physical, int(allowed[0])) if allowed and allowed[0].isdigit() else physical


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def without_spaces(name: str) -> str:
    """A host's or worker's name as the server keeps it among other words."""
    return "_".join(name.split())
