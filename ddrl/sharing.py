"""How several runs share processes: strictly by priority, then in process time by weight.

Every dispatcher keeps these accounts for itself, from figures that all of them read in the server, and sends its own
messages only; nobody decides for all. A run's excess is the process time that it got beyond its share of what all got
while it wanted any. Of the messages that may wait, each goes to the run that would be least ahead after playing it:
weighted fair queueing, with segments known to be in play counted as played.
The idea: Demers, Keshav and Shenker 1989; several servers: Blanquer and Ozden 2001.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddrl.store.run_state import Rival
from ddrl.store.workers import Heartbeat

PROCESSES_PER_MESSAGE = 4  # a segment lasts seconds, dispatchers look many times a second
WANTED_S = 1.0  # a run that is allowed to play now and then wants to all along
PLAYED_S = 3.0  # without play or messages for so long, a run that wants processes does not compete for them
RATE_S = 1.0  # over which the processes that play are counted; more than a fragment takes
FORGET_S = 10.0  # in which the account of a run that wants nothing fades
CREDIT_S = 20.0  # of its share: a run that could not use it has no claim to more later


class Capacity:
    """What serves which queue.

    Args:
        fleet: the workers; those that leave do not count.
    """

    def __init__(self, fleet: Iterable[Heartbeat] = ()) -> None:
        self._fleet = [worker for worker in fleet if not worker.draining]

    def processes(self, *queues: str) -> int:
        """Processes that serve at least one of the queues."""
        return sum(worker.processes for worker in self._fleet if not set(queues).isdisjoint(worker.queues))

    def meet(self, one: str, other: str) -> bool:
        """Whether messages of both queues may come to one process."""
        return one == other or any({one, other} <= set(worker.queues) for worker in self._fleet)

    def covers(self, one: str, other: str) -> bool:
        """Whether all that serves `other` serves `one`."""
        return all(one in worker.queues for worker in self._fleet if other in worker.queues)

    def messages(self, queue: str) -> int:
        """How many messages should wait in a queue, of all runs together: each frees nobody to wait for the next."""
        processes = self.processes(queue)
        return max(1, min(processes, 2), math.ceil(processes / PROCESSES_PER_MESSAGE))


@dataclass
class Account:
    """One run's standing.

    Attributes:
        told_ms, begun: of the run when it was last looked at.
        weight: of the run.
        is_peer: it has the priority of the one that keeps the account, hence shares with it.
        competes: it shares now.
        share: of what all get, 0 to 1.
        excess_s: process time beyond its share.
        playing: processes that play it, as appends tell, so some time ago.
        pending: segments begun that appends do not tell of yet.
        wanted_at, played_at: when it last wanted processes, and was last told to have had some (or was first seen).
    """

    told_ms: int
    begun: int
    weight: float = 1.0
    is_peer: bool = True
    competes: bool = False
    share: float = 0.0
    excess_s: float = 0.0
    playing: float = 0.0
    pending: float = 0.0
    wanted_at: float = -math.inf
    played_at: float = -math.inf


class Shares:
    """The accounts of a run and its rivals.

    Args:
        run: whose accounts.
        segment_s: of its messages; those of rivals are taken to be the same, which the excess corrects.
    """

    def __init__(self, run: str, segment_s: float) -> None:
        self._run, self._segment_s = run, segment_s
        self._at = -math.inf
        self.accounts: dict[str, Account] = {}

    def look(self, rivals: Sequence[Rival], capacity: Capacity, *, now_s: float) -> None:
        """Take note of what happened since the last look.

        Args:
            rivals: the run itself and those that processes of its may serve.
            capacity: of the fleet.
            now_s: of a monotonic clock.
        """
        elapsed_s = now_s - self._at if math.isfinite(self._at) else 0.0
        self._at = now_s
        mine = next(rival for rival in rivals if rival.run == self._run)
        told_s = {rival.run: self._note(rival, mine, elapsed_s, now_s) for rival in rivals}
        self.accounts = {run: account for run, account in self.accounts.items() if run in told_s}
        peers = {rival.run: rival for rival in rivals if self.accounts[rival.run].competes}
        most = max(1, capacity.processes(*(rival.queue for rival in peers.values())))
        shares = divide(
            {run: rival.weight for run, rival in peers.items()},
            {run: capacity.processes(rival.queue) / most or 1.0 for run, rival in peers.items()},
        )
        total_s = sum(told_s[run] for run in peers)
        for run, account in self.accounts.items():
            account.share = shares.get(run, 0.0)
            account.excess_s += told_s[run] - account.share * total_s
            if run not in peers:
                account.excess_s *= math.exp(-elapsed_s / FORGET_S)
        self._balance([self.accounts[run] for run in peers])

    def _note(self, rival: Rival, mine: Rival, elapsed_s: float, now_s: float) -> float:
        """Bring a run's account up to date, but for its excess; the process time that it has got meanwhile."""
        account = self.accounts.get(rival.run)
        if account is None:
            account = self.accounts[rival.run] = Account(rival.process_ms, rival.begun, played_at=now_s)
        told_s = max(0, rival.process_ms - account.told_ms) / 1e3
        begun = max(0, rival.begun - account.begun)
        account.told_ms, account.begun, account.weight = rival.process_ms, rival.begun, rival.weight
        if elapsed_s > 0:
            kept = math.exp(-elapsed_s / RATE_S)
            account.playing = kept * account.playing + (1 - kept) * told_s / elapsed_s
            account.pending = kept * account.pending + begun
        if rival.wants:
            account.wanted_at = now_s
        if told_s:
            account.played_at = now_s
        account.is_peer = rival.priority == mine.priority
        can_use = rival.waiting > 0 or now_s - account.played_at <= PLAYED_S or rival.run == self._run
        account.competes = account.is_peer and can_use and now_s - account.wanted_at <= WANTED_S
        return told_s

    def _balance(self, peers: Sequence[Account]) -> None:
        """Keep the excesses' sum at 0, and each within bounds."""
        surplus = sum(account.excess_s for account in peers)
        shared = sum(account.share for account in peers)
        processes = sum(account.playing for account in peers)
        for account in peers:
            account.excess_s -= surplus * account.share / shared
            bound = CREDIT_S * account.share * max(1.0, processes) + 2 * self._segment_s
            account.excess_s = min(bound, max(-bound, account.excess_s))

    def messages(self, total: int) -> int:
        """How many of `total` messages that wait should be the run's own."""
        segment_s = self._segment_s
        ahead = [
            (
                (account.excess_s + (account.playing / 2 + account.pending + 0.5) * segment_s)
                / account.weight,
                run,
            )
            for run, account in self.accounts.items()
            if account.competes
        ]
        if not ahead:
            return total
        heapq.heapify(ahead)
        mine = 0
        for _ in range(total):
            least, run = ahead[0]
            mine += run == self._run
            heapq.heapreplace(ahead, (least + segment_s / self.accounts[run].weight, run))
        return mine


def divide(weights: Mapping[str, float], most: Mapping[str, float]) -> dict[str, float]:
    """Shares of 1 by weight, none above its `most`: what one cannot use is divided among the others.

    Args:
        weights: by name, above 0.
        most: by name, above 0; where they do not add up to 1, neither do the shares.
    """
    shares: dict[str, float] = {}
    left, others = 1.0, dict(weights)
    while others:
        unit = left / sum(others.values())
        full = {name: most[name] for name, weight in others.items() if most[name] < unit * weight}
        shares |= full or {name: unit * weight for name, weight in others.items()}
        left -= sum(full.values())
        others = {name: weight for name, weight in others.items() if name not in shares}
    return shares
