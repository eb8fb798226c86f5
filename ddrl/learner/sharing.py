"""How several runs share processes: strictly by priority, then in process time by weight.

Nobody decides for all. Every dispatcher tells the server how far its run is ahead: the process time that it got beyond
its share of what all got while it wanted any. Of the few messages that may wait, each is due from the run that would be
least ahead after playing it, and every dispatcher sends those that are due from its own: weighted fair queueing, with
segments in play counted as played.
The idea: Demers, Keshav and Shenker 1989; several servers: Blanquer and Ozden 2001.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddrl.store.run_state import Rival
from ddrl.store.workers import Heartbeat

PROCESSES_PER_MESSAGE = 4  # a segment lasts seconds, dispatchers look many times a second
WANTED_S = 1.0  # a run that is allowed to play now and then wants to all along
PLAYED_S = 3.0  # without play or messages for so long, a run that wants processes does not compete for them
RATE_S = 1.0  # over which the processes that play are counted; more than a fragment takes
RECENT_S = 30.0  # over which shares are shown to people
FORGET_S = 10.0  # in which the account of a run that wants nothing fades
BALANCE_S = 1.0  # in which what all are ahead is brought to a sum of 0
EMPTY_LOOKS = 2  # in a row, before a run sends out of its turn
CREDIT_S = 20.0  # of its share: a run that could not use it has no claim to more later


class Capacity:
    """What serves which queue.

    Args:
        fleet: the workers; those that leave do not count.
    """

    def __init__(self, fleet: Iterable[Heartbeat] = ()) -> None:
        self._processes: Counter[frozenset[str]] = Counter()  # by the queues that they serve
        for worker in fleet:
            if not worker.draining:
                self._processes[frozenset(worker.queues)] += worker.processes

    def processes(self, *queues: str) -> int:
        """Processes that serve at least one of the queues."""
        return sum(num for served, num in self._processes.items() if not served.isdisjoint(queues))

    def meet(self, one: str, other: str) -> bool:
        """Whether messages of both queues may come to one process."""
        return one == other or any(one in served and other in served for served in self._processes)

    def covers(self, one: str, other: str) -> bool:
        """Whether all that serves `other` serves `one`."""
        return all(one in served for served in self._processes if other in served)

    def messages(self, queue: str) -> int:
        """How many messages should wait in a queue, of all runs together: each frees nobody to wait for the next."""
        processes = self.processes(queue)
        return max(1, min(processes, 2), math.ceil(processes / PROCESSES_PER_MESSAGE))


@dataclass
class Account:
    """One run's standing.

    Attributes:
        rival: the run as last seen.
        competes: it shares now.
        share: of the process time that all those get, 0 to 1.
        playing: processes that play it, as appends tell, so some time ago.
        pending: segments begun that appends do not tell of yet.
        wanted_at, played_at: when it last wanted processes, and was last told to have had some (or was first seen).
    """

    rival: Rival
    competes: bool = False
    share: float = 0.0
    playing: float = 0.0
    pending: float = 0.0
    wanted_at: float = -math.inf
    played_at: float = -math.inf


class Shares:
    """What a run's dispatcher knows of the run and its rivals, and what follows for its messages.

    Args:
        run: its id.
        segment_s: of its messages; those of rivals are taken to be the same, which what they are ahead corrects.
    """

    def __init__(self, run: str, segment_s: float) -> None:
        self._run, self._segment_s = run, segment_s
        self._at = -math.inf
        self._empty_looks = 0  # in a row
        self._capacity = Capacity()
        self.accounts: dict[str, Account] = {}
        self._mine_s = self._all_s = 0.0
        self.ahead_s = 0.0
        """Process time that the run got beyond its share, to be told to all."""

    @property
    def recent(self) -> float:
        """The run's part of the process time of all runs near it, over about RECENT_S."""
        return self._mine_s / self._all_s if self._all_s else 0.0

    def look(self, rivals: Sequence[Rival], capacity: Capacity, *, length: int, now_s: float) -> None:
        """Take note of what happened since the last look.

        Args:
            rivals: active runs, this one among them.
            capacity: of the fleet.
            length: messages that wait in the run's own list, whosesoever.
            now_s: of a monotonic clock.
        """
        elapsed_s = now_s - self._at if math.isfinite(self._at) else 0.0
        self._at, self._capacity = now_s, capacity
        self._empty_looks = 0 if length else self._empty_looks + 1
        mine = next(rival for rival in rivals if rival.run == self._run)
        near = [rival for rival in rivals if capacity.meet(rival.queue, mine.queue)]
        told_s = {rival.run: self._note(rival, mine, elapsed_s, now_s) for rival in near}
        self.accounts = {rival.run: self.accounts[rival.run] for rival in near}
        kept = math.exp(-elapsed_s / RECENT_S)
        self._mine_s = kept * self._mine_s + told_s[self._run]
        self._all_s = kept * self._all_s + sum(told_s.values())
        competing = {run: account for run, account in self.accounts.items() if account.competes}
        most = max(1, capacity.processes(*(account.rival.queue for account in competing.values())))
        shares = divide(
            {run: account.rival.weight for run, account in competing.items()},
            {
                run: capacity.processes(account.rival.queue) / most or 1.0
                for run, account in competing.items()
            },
        )
        for run, account in self.accounts.items():
            account.share = shares.get(run, 0.0)
        share = shares.get(self._run, 0.0)
        self.ahead_s += told_s[self._run] - share * sum(told_s[run] for run in competing)
        if self._run not in competing:
            self.ahead_s *= math.exp(-elapsed_s / FORGET_S)
        surplus = sum(self._ahead_s(account) for account in competing.values())
        self.ahead_s -= min(1.0, elapsed_s / BALANCE_S) * share * surplus
        processes = sum(account.playing for account in competing.values())
        bound = CREDIT_S * share * max(1.0, processes) + 2 * self._segment_s
        self.ahead_s = min(bound, max(-bound, self.ahead_s))

    def _note(self, rival: Rival, mine: Rival, elapsed_s: float, now_s: float) -> float:
        """Bring a run's account up to date; the process time that it has got meanwhile."""
        account = self.accounts.setdefault(rival.run, Account(rival, played_at=now_s))
        told_s = max(0, rival.process_ms - account.rival.process_ms) / 1e3
        begun = max(0, rival.begun - account.rival.begun)
        account.rival = rival
        if elapsed_s > 0:
            kept = math.exp(-elapsed_s / RATE_S)
            account.playing = kept * account.playing + (1 - kept) * told_s / elapsed_s
            account.pending = kept * account.pending + begun
        if rival.wants:
            account.wanted_at = now_s
        if told_s:
            account.played_at = now_s
        wants = rival.priority == mine.priority and now_s - account.wanted_at <= WANTED_S
        waits_its_turn = rival.run == self._run or rival.waiting > 0 or rival.ahead_ms > 0
        account.competes = wants and (waits_its_turn or now_s - account.played_at <= PLAYED_S)
        return told_s

    def _ahead_s(self, account: Account) -> float:
        return self.ahead_s if account.rival.run == self._run else account.rival.ahead_ms / 1e3

    def wanted(self) -> int:
        """How many messages of the run should wait now."""
        account = self.accounts[self._run]
        mine = account.rival
        total = self._capacity.messages(mine.queue)
        others = [
            other.rival for other in self.accounts.values() if other is not account and other.rival.wants
        ]
        if not others:
            return total
        if not mine.wants:
            return 0
        wanted = self._turns(total)
        if wanted or self._empty_looks < EMPTY_LOOKS:
            return wanted
        # Nothing waits, so those whose turn it is do not use their processes, unless theirs wait elsewhere.
        for other in others:
            elsewhere = other.priority == mine.priority and other.queue != mine.queue
            if elsewhere and other.waiting and self._capacity.covers(other.queue, mine.queue):
                return 0
        return max(1, math.ceil(total * account.share))

    def _turns(self, total: int) -> int:
        """How many of `total` messages should be the run's: each goes to whoever is least ahead after playing it."""
        segment_s = self._segment_s
        ahead = []
        for run, account in self.accounts.items():
            if account.competes:
                to_come_s = (account.playing / 2 + account.pending + 0.5) * segment_s
                ahead.append(((self._ahead_s(account) + to_come_s) / account.rival.weight, run))
        heapq.heapify(ahead)
        mine = 0
        for _ in range(total):
            least, run = ahead[0]
            mine += run == self._run
            heapq.heapreplace(ahead, (least + segment_s / self.accounts[run].rival.weight, run))
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
