"""Rollout messages of one run, kept waiting for processes; processes that are lost, and runs that only crash.

A rollout message is a permission to play one segment, not a piece of work: losing it or delivering it twice changes
nothing. Sending is a callable, so nothing here knows Celery.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from ddrl.store import keys, ledger, runs, segments, stream, workers
from ddrl.store.connection import Redis, call
from ddrl.store.runs import RunState
from ddrl.store.workers import Heartbeat

log = logging.getLogger(__name__)

PROCESSES_PER_MESSAGE = 4  # a segment takes seconds, and ten times a second missing messages are sent
SENT_AT_ONCE = 100  # as the learner's other work waits meanwhile
SURVEY_S = 2.0  # between two looks at the workers
OUTAGE_S = 4.0  # between two surveys: after such a time, what the server knows of workers is old
MEAN_S = 30.0  # over which the processes that play are counted
MAX_PROCESSES = 20_000  # of the fleet that count; a worker may claim any number
PLAYING_PER_PROCESS, MIN_PLAYING = 4, 1_000  # fields of `playing` that are not too many
LOST_AT_ONCE = 100  # reasons for which one survey notes processes as lost; all others have one more
CLAIM_AFTER_S = 0.3  # of waiting messages
CLAIM_EVERY_S = 1.0


class Dispatcher:
    """Keeps a few rollout messages waiting in the queue of one run, and claims processes for it.

    A message names no run: the server chooses one when a process takes it (`ddrl.store.segments.choose`), so the
    messages of all dispatchers serve all runs. Where they wait though the run wants processes, the dispatcher claims
    some that play runs of lower priority: these end their segments at their next append.

    Args:
        client: connection to the server.
        run: its id.
        token: fencing token.
        max_crashes: processes in a row that may crash without a fragment before the run is paused.
        send: sends one message, given its queue and the time limit of its task in seconds.
    """

    def __init__(
        self, client: Redis, run: str, token: int, *, max_crashes: int, send: Callable[[str, float], None]
    ) -> None:
        self._client, self._run, self._token = client, run, token
        self._max_crashes, self._send = max_crashes, send
        self._queue, self._limit_s, self._num_messages = "", 0.0, 0
        self._nodes: frozenset[str] = frozenset()  # workers that serve the queue
        self._survey_at = self._claim_at = 0.0
        self._surveyed_at = self._trusted_at = time.monotonic()
        self._suspects: frozenset[str] = frozenset()
        self._spent_s: tuple[float, float] | None = None
        self._mean_processes, self._useful_processes, self._processes = 0.0, 0.0, 0.0
        self._admitted = 0  # fragments, at the last survey
        self.num_processes = 0
        """Most processes that a survey has found."""

    def tick(self, admitted: int = 0) -> int:
        """Send messages that are missing; return how many are. To be called ten times a second.

        Args:
            admitted: fragments that the learner has admitted so far.

        Raises:
            redis.exceptions.RedisError, UnreachableError: the server does not serve; call again.
            LeaseLostError: another learner took over.
            UnknownRunError, RunGoneError: the server came back without the run, or older.
        """
        now = time.monotonic()
        if now >= self._survey_at:
            self._survey(now, admitted)
        waiting = segments.waiting(self._client, self._queue)
        if not waiting:
            self._claim_at = now + CLAIM_AFTER_S
        elif now >= self._claim_at:
            self._claim_at = now + CLAIM_EVERY_S
            self._claim()
        missing = max(0, self._num_messages - waiting)
        for _ in range(min(missing, SENT_AT_ONCE)):
            self._send(self._queue, self._limit_s)
        return missing

    def _claim(self) -> None:
        """End segments of runs of lower priority, the lowest first, as messages wait and this run wants processes."""
        loads = segments.active(self._client)
        mine = next((load for load in loads if load.run == self._run), None)
        if mine is None or not mine.wants:
            return
        left, level = self._num_messages, segments.LEVELS
        lower = [load for load in loads if level[load.priority] > level[mine.priority]]
        for load in sorted(lower, key=lambda load: -level[load.priority]):
            processes = segments.playing(self._client, load.run).values()
            claimed = min(left, sum(process.node in self._nodes for process in processes))
            if claimed:
                stream.claim(self._client, load.run, claimed, for_ms=round(CLAIM_EVERY_S * 1e3))
                left -= claimed
            if not left:
                break

    # --- every few seconds -------------------------------------------------------------------------------

    def _survey(self, now: float, admitted: int) -> None:
        """Look at workers, settings and process time; note lost processes; pause a run that only crashes."""
        fleet = workers.alive(self._client)
        state = runs.state(self._client, self._run)
        self._queue, draining = state.queue, keys.draining(self._run)
        left_s = self._client.ttl(draining)
        if left_s == -1 or left_s > segments.DRAIN_S:  # a worker that leaves lets it expire
            self._client.expire(draining, segments.DRAIN_S)
        serving = [worker for worker in fleet if self._queue in worker.queues]
        self._nodes = frozenset(worker.node for worker in serving)
        processes = min(sum(worker.processes for worker in serving if not worker.draining), MAX_PROCESSES)
        self.num_processes = max(processes, self.num_processes)
        # Many may be lost at once, which is to be noted.
        self._processes = max(processes, 0.9 * self._processes)
        self._num_messages = max(1, min(processes, 2), math.ceil(processes / PROCESSES_PER_MESSAGE))
        self._limit_s = max((load.limit_s for load in segments.active(self._client)), default=0.0)
        elapsed_s = now - self._surveyed_at
        if elapsed_s > OUTAGE_S:
            self._trusted_at = now + 2 * workers.TTL_S
        self._survey_at, self._surveyed_at = now + SURVEY_S, now
        self._report_processes(state, elapsed_s, processes)
        if now >= self._trusted_at:
            self._find_lost(fleet)
        if admitted == self._admitted:
            self._quarantine(state)
        self._admitted = admitted

    def _report_processes(self, state: RunState, elapsed_s: float, processes: int) -> None:
        """Report how many processes played the run, as means over about MEAN_S, and how many producers it may have."""
        waited_s = state.allowance_wait_s + state.room_wait_s
        spent_s = state.process_s, state.process_s - waited_s
        if self._spent_s is not None and elapsed_s > 0:
            kept, most = math.exp(-elapsed_s / MEAN_S), max(1, processes)
            present, useful = (
                min(max(0.0, now - before) / elapsed_s, most)
                for now, before in zip(spent_s, self._spent_s, strict=True)
            )
            self._mean_processes = kept * self._mean_processes + (1 - kept) * present
            self._useful_processes = kept * self._useful_processes + (1 - kept) * useful
        self._spent_s = spent_s
        fields = {
            "mean_processes": f"{self._mean_processes:.4f}",
            "useful_processes": f"{self._useful_processes:.4f}",
            "processes": processes,
            "max_producers": min(ledger.MIN_PRODUCERS + 4 * processes, ledger.MAX_PRODUCERS),
        }
        call(self._client, "set_fields", [keys.state(self._run)] * 2, [self._token, fields])

    def _find_lost(self, fleet: Sequence[Heartbeat]) -> None:
        """Note processes that play and are gone, once two surveys in a row say so: heartbeats may be a little late."""
        if self._client.hlen(keys.playing(self._run)) > PLAYING_PER_PROCESS * self._processes + MIN_PLAYING:
            self._client.delete(keys.playing(self._run))  # a worker wrote it; those that play note it again
        nodes: defaultdict[str, set[int]] = defaultdict(set)  # several workers may have been given one name
        for worker in fleet:
            nodes[worker.node].update(worker.pids)
        unlisted = {worker.node for worker in fleet if not worker.pids}
        gone = {}
        for process, one in segments.playing(self._client, self._run).items():
            if one.node not in nodes:
                gone[process] = f"worker {one.node} is gone"
            elif one.node not in unlisted and one.pid not in nodes[one.node]:
                gone[process] = f"process {one.pid} of {one.node} is gone"
        lost = defaultdict(list)  # reason -> processes
        for process in self._suspects & gone.keys():
            lost[gone.pop(process)].append(process)
        for reason in list(lost)[LOST_AT_ONCE:]:
            lost["others of the fleet are gone"] += lost.pop(reason)
        for reason, processes in lost.items():
            log.warning("%s: lost processes (%d): %s", self._run, len(processes), reason)
            segments.note_lost(self._client, self._run, processes, reason)
        self._suspects = frozenset(gone)

    def _quarantine(self, state: RunState) -> None:
        """Pause a run whose processes crash instead of playing."""
        if state.status == "active" and state.crashes >= self._max_crashes:
            reason = (
                f"quarantined: {state.crashes} processes ended without a fragment: {state.error}; "
                f"fix the environment and `ddrl resume {self._run}`"
            )
            log.error("%s: %s", self._run, reason)
            runs.set_status(self._client, self._run, "paused", reason, token=self._token)
