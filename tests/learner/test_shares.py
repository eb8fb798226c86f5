"""Who sends how much: the real accounts, in a fleet that is simulated step by step; no server."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ddrl.learner.dispatcher import LOOK_PER_RUN_S, LOOK_S
from ddrl.learner.sharing import Capacity, Shares, divide
from ddrl.store.run_state import Rival
from ddrl.store.workers import Heartbeat

STEP_S = 0.01
FRAGMENT_S = 0.25
TASK_S = 0.01  # between two segments of a process


@dataclass
class Run:
    """A run, and its dispatcher's accounts.

    Attributes:
        segment_s: how long a segment lasts, of processes that find enough to do.
        wants: whether it may play at a time.
        joins_s, leaves_s: its learner's.
        is_mute: its dispatcher is stuck.
        shortest: part of a segment that is played at least; the rest of it is not, by chance.
    """

    name: str
    weight: float = 1.0
    segment_s: float = 5.0
    queue: str = "q"
    wants: Callable[[float], bool] = lambda _: True
    joins_s: float = 0.0
    leaves_s: float = float("inf")
    is_mute: bool = False
    shortest: float = 0.97
    process_s: float = 0.0
    begun: int = 0
    waiting: int = 0
    history: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shares = Shares(self.name, self.segment_s)
        self.look_at = self.joins_s + random.Random(self.name).random() * LOOK_S

    def rival(self, now_s: float) -> Rival:
        return Rival(
            self.name, self.weight, "normal", self.queue, round(self.process_s * 1e3), self.wants(now_s),
            self.waiting, self.begun, round(self.shares.ahead_s * 1e3),
        )  # fmt: skip


@dataclass
class Process:
    queues: tuple[str, ...] = ("q",)
    run: Run | None = None
    until_s: float = 0.0
    told_s: float = 0.0
    free_s: float = 0.0


def simulate(runs: list[Run], fleet: list[Process], duration_s: float) -> float:
    """Let runs share processes; each run's process time at every second, and what part of it nobody used."""
    chance = random.Random(1)
    nodes = [Heartbeat(str(i), "h", 1, 1, process.queues, {}) for i, process in enumerate(fleet)]
    capacity, lists = Capacity(nodes), {run.queue: deque[Run]() for run in runs}
    for step in range(round(duration_s / STEP_S)):
        now = step * STEP_S
        active = [run for run in runs if run.joins_s <= now < run.leaves_s]
        for process in fleet:
            run = process.run
            if run is not None and now >= min(process.told_s + FRAGMENT_S, process.until_s):
                run.process_s += now - process.told_s
                process.told_s = now
                if now >= process.until_s:
                    process.run, process.free_s = None, now + TASK_S
            found = next((queue for queue in process.queues if lists.get(queue)), None)
            if process.run is None and now >= process.free_s and found is not None:
                run = lists[found].popleft()
                run.waiting, run.begun = run.waiting - 1, run.begun + 1
                if run in active:
                    part = chance.uniform(run.shortest, 1.0)
                    process.run, process.until_s, process.told_s = run, now + part * run.segment_s, now
                process.queues = (*process.queues[1:], process.queues[0])  # Kombu takes them in turns
        rivals = [run.rival(now) for run in active]
        for run in active:
            if now >= run.look_at and not run.is_mute:
                run.look_at = now + max(LOOK_S, LOOK_PER_RUN_S * len(active))
                run.shares.look(rivals, capacity, length=len(lists[run.queue]), now_s=now)
                missing = max(0, run.shares.wanted() - run.waiting)
                lists[run.queue].extend([run] * missing)
                run.waiting += missing
        if step % 100 == 0:
            for run in runs:
                run.history.append(run.process_s)
    return 1.0 - sum(run.process_s for run in runs) / duration_s / len(fleet)


def used(runs: list[Run], since: int, until: int = -1) -> list[float]:
    """Processes that each run had on average between two seconds of the simulation."""
    seconds = (until if until >= 0 else len(runs[0].history) + until) - since
    return [(run.history[until] - run.history[since]) / seconds for run in runs]


def weighted(*weights: float, segment_s: float = 5.0) -> list[Run]:
    return [Run(f"run-{i}", weight, segment_s) for i, weight in enumerate(weights)]


@pytest.mark.parametrize("num", [2, 10])
def test_three_runs_share_by_weight(num: int) -> None:
    runs = weighted(1, 2, 4)
    idle = simulate(runs, [Process() for _ in range(num)], 240)
    assert used(runs, 40) == pytest.approx([num / 7, num * 2 / 7, num * 4 / 7], rel=0.05)
    assert idle < 0.03


def test_short_segments_share_as_well() -> None:
    runs = weighted(1, 2, 4, segment_s=0.25)
    simulate(runs, [Process(), Process()], 60)
    one, two, four = used(runs, 10)
    assert (two / one, four / one) == (pytest.approx(2, rel=0.05), pytest.approx(4, rel=0.05))


def test_it_is_process_time_that_is_shared_not_segments() -> None:
    runs = [Run("long", 1, 5.0), Run("short", 1, 0.5), Run("cut", 1, 5.0, shortest=0.1)]
    simulate(runs, [Process() for _ in range(9)], 240)
    assert used(runs, 60) == pytest.approx([3, 3, 3], rel=0.06)


def test_many_runs_share_a_large_fleet() -> None:
    runs = weighted(*(1 + number % 5 for number in range(50)))
    idle = simulate(runs, [Process() for _ in range(1000)], 30)
    assert used(runs, 10) == pytest.approx([1000 * run.weight / 150 for run in runs], rel=0.15)
    assert idle < 0.05


def test_a_run_that_joins_gets_its_share_at_once_and_no_more() -> None:
    runs = [Run("a"), Run("b"), Run("late", 2, joins_s=60)]
    simulate(runs, [Process() for _ in range(8)], 150)
    assert used(runs, 20, 60) == pytest.approx([4, 4, 0], rel=0.05)
    assert used(runs, 60, 80) == pytest.approx([2, 2, 4], rel=0.2)
    assert used(runs, 80) == pytest.approx([2, 2, 4], rel=0.05)


def test_what_a_run_leaves_or_does_not_want_serves_the_others() -> None:
    runs = [Run("leaves", leaves_s=60), Run("seldom", wants=lambda now_s: now_s > 120), Run("stays")]
    simulate(runs, [Process() for _ in range(8)], 180)
    assert used(runs, 20, 60) == pytest.approx([4, 0, 4], rel=0.05)
    assert used(runs, 70, 120) == pytest.approx([0, 0, 8], rel=0.05)
    assert used(runs, 130) == pytest.approx([0, 4, 4], rel=0.1)  # it has no claim to what it did not want


def test_a_run_that_may_play_now_and_then_shares_all_along() -> None:
    runs = [Run("flickers", wants=lambda now_s: now_s % 1 < 0.3), Run("steady")]
    idle = simulate(runs, [Process() for _ in range(8)], 120)
    assert used(runs, 20)[0] >= 2.5 and idle < 0.05  # it asks for processes at a third of the looks only


def test_a_stuck_dispatcher_holds_nobody_back() -> None:
    runs = [Run("stuck", 10, is_mute=True), Run("well", segment_s=1.0)]
    idle = simulate(runs, [Process() for _ in range(4)], 60)
    assert idle < 0.05


def test_runs_that_only_a_part_of_the_fleet_can_play() -> None:
    special, plain = Run("special", queue="special"), Run("plain")
    fleet = [Process(("q", "special")) for _ in range(2)] + [Process() for _ in range(8)]
    idle = simulate([special, plain], fleet, 120)
    assert idle < 0.05  # though the special one has not its half, nobody idles for that
    assert used([special, plain], 40)[0] >= 0.9  # of the two that can play it


def test_divide() -> None:
    assert divide({"a": 1, "b": 3}, {"a": 1.0, "b": 1.0}) == {"a": 0.25, "b": 0.75}
    assert divide({"a": 1, "b": 1, "c": 2}, {"a": 0.1, "b": 1.0, "c": 1.0}) == pytest.approx(
        {"a": 0.1, "b": 0.3, "c": 0.6}
    )
    assert divide({"a": 1, "b": 1}, {"a": 0.2, "b": 0.3}) == {"a": 0.2, "b": 0.3}
    assert divide({}, {}) == {}


def test_capacity_counts_what_stays_and_serves() -> None:
    def node(name: str, processes: int, *queues: str, draining: bool = False) -> Heartbeat:
        return Heartbeat(name, "h", 1, processes, queues, {}, draining=draining)

    capacity = Capacity([node("a", 4, "q", "box"), node("b", 8, "q"), node("c", 16, "q", draining=True)])
    assert [capacity.processes(queue) for queue in ("q", "box", "none")] == [12, 4, 0]
    assert capacity.processes("q", "box") == 12
    assert capacity.covers("q", "box") and not capacity.covers("box", "q")
    assert capacity.meet("q", "box") and not capacity.meet("q", "none")
    assert [capacity.messages(queue) for queue in ("q", "box", "none")] == [3, 2, 1]
