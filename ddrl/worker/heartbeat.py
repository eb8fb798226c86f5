"""A worker's heartbeat, the other reports of its main process to the server, and what it says about its machine.

It only reports: pauses and the like reach a worker by the answers to its appends (`segment`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ddrl.celery import EVALUATE
from ddrl.store import connection, keys, segments, workers
from ddrl.store.connection import Redis
from ddrl.store.workers import Heartbeat

log = logging.getLogger(__name__)

DRAIN_EVERY_S = 0.5  # a run may start while the worker drains
STOP_S = 2.0  # for the last message to the server
MAX_MESSAGES = 10_000  # in a list of a queue; a run and its learner send again what is missing
MAX_REQUESTS = 500  # likewise of evaluations for commands, each of which has 50 wait at a time
LOOK_EVERY_S = 5.0  # at their number

Report = Callable[["Redis"], object]


class HeartbeatSender:
    """Sends a worker's heartbeats, its drain and its lost processes from a thread of its own.

    A worker's main thread must never wait for the server. Reports go to the thread through a queue whose `put` may
    be called in a signal handler; one that fails is repeated with the next heartbeat.

    Args:
        heartbeat: what is sent, except what changes.
        pids: returns the process ids of the pool.
    """

    def __init__(self, heartbeat: Heartbeat, pids: Callable[[], tuple[int, ...]]) -> None:
        self.node, self.pids = heartbeat.node, pids
        self._heartbeat, self._draining = heartbeat, False
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Send heartbeats from now on."""
        self._reports.put(lambda client: segments.stay(client, self.node))
        self._thread.start()

    def drain(self) -> None:
        """End the segments of this worker at their next append, until it stops."""
        self._draining = True
        self._reports.put(lambda client: None)  # the thread need not wait for the next heartbeat

    def report_crash(self, task: str, run: str, reason: str) -> None:
        """Report to a run that a process could not play it; an empty `run` is the one that the task plays."""
        report_id = secrets.token_hex(8)  # the same when it is repeated

        def report(client: Redis) -> None:
            played = run or segments.run_of_task(client, task) or ""
            segments.note_crash(client, played, reason, report_id=report_id)

        self._reports.put(report)

    def stop(self) -> None:
        """Remove the heartbeat; wait at most STOP_S for the server."""
        self._reports.put(None)
        self._thread.join(STOP_S)

    def _work(self) -> None:
        client = connection.connect()
        waiting: list[Report] = []
        look_at = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                report = self._reports.get(timeout=DRAIN_EVERY_S if self._draining else workers.BEAT_S)
                if report is None:
                    with contextlib.suppress(Exception):
                        workers.leave(client, self._heartbeat)
                    return
                waiting.append(report)
            try:
                if self._draining:
                    segments.drain(client, self.node)
                workers.beat(client, replace(self._heartbeat, pids=self.pids(), draining=self._draining))
                while waiting:
                    waiting[0](client)
                    waiting.pop(0)
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + LOOK_EVERY_S
                    delete_floods(client, self._heartbeat.queues)
            except connection.OUTAGES:
                pass  # the next round tries again
            except Exception:
                log.exception("worker %s: cannot send its heartbeat", self.node)


def delete_floods(client: Redis, queues: Iterable[str]) -> None:
    """Delete the lists of queues with more messages than ddrl sends, behind which its own would wait."""
    for queue_name, name in ((one, name) for one in queues for name in keys.lists(one)):
        is_of_requests = queue_name.startswith(EVALUATE) and name == keys.queue(queue_name)
        if (length := client.llen(name)) > (MAX_REQUESTS if is_of_requests else MAX_MESSAGES):
            log.warning("%r: has %d messages, which nobody sends: they are deleted", name, length)
            client.delete(name)
