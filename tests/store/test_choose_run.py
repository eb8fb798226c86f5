"""Sharing of process time by the script that chooses: a real server, and workers whose time is simulated."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter

import pytest
from redis import Redis
from support.runs import target_config
from support.store import SPACES, want_processes

from ddrl.store import keys, runs, segments, stream
from ddrl.store.segments import Process

PLAIN, BOX2D = "ddrl.rollout", "ddrl.rollout.box2d"
SEGMENT_MS = 200


def add_run(client: Redis, *, queue: str = PLAIN, segment_ms: int = SEGMENT_MS, **options: object) -> str:
    """A run that wants processes."""
    rollout = {"segment_s": segment_ms / 1e3, "fragment_s": 0.02}
    run = runs.create(client, target_config(rollout=rollout, **options), SPACES, queues=(queue, "e"))
    want_processes(client, run)
    return run


class Fleet:
    """Processes that take one segment after the other, in simulated milliseconds.

    Args:
        client: connection to the server.
        processes: how many serve which queues.
    """

    def __init__(self, client: Redis, processes: dict[tuple[str, ...], int]) -> None:
        self._client = client
        self._chance = random.Random(1)
        self._served = [queues for queues, num in processes.items() for _ in range(num)]
        self._busy: list[tuple[float, int, str, int]] = []  # until, process, run, spent ms
        self._idle = list(range(len(self._served)))
        self.now_ms = 0.0
        self.lengths: dict[str, tuple[float, float]] = {}
        """By run, the shortest and longest segment as a part of SEGMENT_MS, where not nearly all of it."""

    def play(self, segments_long: float) -> Counter[str]:
        """Let the processes play that many SEGMENT_MS; the time of the segments that ended meanwhile, by run."""
        spent, until = Counter[str](), self.now_ms + segments_long * SEGMENT_MS
        while self.now_ms < until:
            for number in self._idle:
                run = segments.choose(self._client, Process("node", number), self._served[number])
                length = round(SEGMENT_MS * self._chance.uniform(*self.lengths.get(run or "", (0.97, 1.0))))
                heapq.heappush(self._busy, (self.now_ms + length, number, run or "", length))
            self.now_ms, number, run, length = heapq.heappop(self._busy)
            if run:
                segments.end(self._client, run, Process("node", number), spent_ms=length, process_ms=length)
            spent[run] += length
            self._idle = [number]
        return spent

    def shares(self, segments_long: float, expected: dict[str, float], *, rel: float = 0.06) -> bool:
        """Return whether runs get the expected numbers of processes from now on."""
        spent = self.play(segments_long)
        found = {run: time_ms / SEGMENT_MS / segments_long for run, time_ms in spent.items()}
        return found == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize(("num", "length"), [(2, 1), (10, 1), (100, 1), (2, 300)])
def test_runs_share_process_time_by_weight(client: Redis, num: int, length: int) -> None:
    options = ((1.0, PLAIN), (2.0, BOX2D), (4.0, PLAIN))
    expected = {
        add_run(client, weight=weight, queue=queue, segment_ms=length * SEGMENT_MS): num * weight / 7
        for weight, queue in options
    }
    fleet = Fleet(client, {(PLAIN, BOX2D): num})
    fleet.lengths = dict.fromkeys(expected, (0.97 * length, length))
    fleet.play(5 * length)
    assert fleet.shares((2000 / num + 20) * length, expected, rel=0.03)


def test_processes_that_choose_at_once_spread_by_weight(client: Redis) -> None:
    one, three = add_run(client), add_run(client, weight=3.0)
    chosen = Counter(segments.choose(client, Process("n", number), [PLAIN]) for number in range(40))
    assert chosen == {one: 10, three: 30}


def test_process_time_is_shared_not_segments(client: Redis) -> None:
    long, cut, short = (add_run(client) for _ in range(3))
    fleet = Fleet(client, {(PLAIN,): 9})
    fleet.lengths = {cut: (0.1, 1.0), short: (0.1, 0.1)}
    fleet.play(20)
    assert fleet.shares(100, {long: 3, cut: 3, short: 3}, rel=0.05)


def test_a_run_that_starts_or_comes_back_gets_its_share_and_no_more(client: Redis) -> None:
    first, second = add_run(client), add_run(client)
    fleet = Fleet(client, {(PLAIN,): 8})
    assert fleet.shares(50, {first: 4, second: 4})
    expected = {first: 2, second: 2, add_run(client, weight=2.0): 4}
    fleet.play(2)
    assert fleet.shares(25, expected)
    runs.set_status(client, second, "paused", "")
    fleet.play(50)
    runs.set_status(client, second, "active", "")
    fleet.play(2)
    assert fleet.shares(25, expected)


def test_a_run_without_allowance_gives_way_and_claims_nothing_later(client: Redis) -> None:
    steady, other = add_run(client), add_run(client)
    fleet = Fleet(client, {(PLAIN,): 8})
    client.hset(keys.state(other), "appended_steps", 10**9)
    assert fleet.shares(50, {steady: 8})
    time.sleep(2.1 * SEGMENT_MS / 1e3)  # less counts as if it had wanted processes all along
    client.hset(keys.state(other), "appended_steps", 0)
    fleet.play(2)
    assert fleet.shares(25, {steady: 4, other: 4})


def test_a_run_that_has_allowance_now_and_then_shares_all_along(client: Redis) -> None:
    flickers, _ = add_run(client), add_run(client)
    fleet = Fleet(client, {(PLAIN,): 8})
    spent = Counter[str]()
    for turn in range(1000):
        client.hset(keys.state(flickers), "appended_steps", 0 if turn % 10 < 3 else 10**9)
        spent += fleet.play(1 / 50)
    assert spent[flickers] > 0.25 * spent.total() and not spent[""]  # it could be chosen for 0.3 of the time


def test_capabilities_that_only_some_workers_have(client: Redis) -> None:
    plain, box2d = add_run(client), add_run(client, queue=BOX2D)
    few = Fleet(client, {(PLAIN,): 8, (PLAIN, BOX2D): 2})
    few.play(20)
    assert few.shares(50, {plain: 8, box2d: 2}, rel=0.05)
    late = add_run(client, weight=2.0)
    few.play(20)
    assert few.shares(100, {plain: 8 / 3, late: 16 / 3, box2d: 2}, rel=0.05)


def test_a_changed_weight_or_priority_holds_from_the_next_choice_on(client: Redis) -> None:
    first, second = add_run(client), add_run(client, weight=3.0)
    fleet = Fleet(client, {(PLAIN,): 4})
    fleet.play(50)
    client.hset(keys.state(first), "weight", 9)
    fleet.play(5)
    assert fleet.shares(50, {first: 3, second: 1})
    client.hset(keys.state(second), "priority", "high")
    fleet.play(2)
    assert fleet.shares(500, {second: 4})
    client.hset(keys.state(second), "priority", "normal")
    fleet.play(200)  # it gives back a bounded part of what it had as a run of high priority
    assert fleet.shares(50, {first: 3, second: 1})


@pytest.mark.parametrize(
    "reason", ["paused", "no-learner", "no-weights", "drains", "queue", "limit", "cannot-play"]
)
def test_a_run_that_a_process_may_not_play_is_not_chosen(client: Redis, reason: str) -> None:
    run = add_run(client)
    if reason == "paused":
        runs.set_status(client, run, "paused", "")
    elif reason == "no-learner":
        client.delete(keys.lease(run))
    elif reason == "no-weights":
        client.hset(keys.state(run), "version", -1)
    elif reason == "drains":
        segments.drain(client, "node")
    queue, limit_s = BOX2D if reason == "queue" else PLAIN, 100.0 if reason == "limit" else 300.0
    excluded = [run] if reason == "cannot-play" else []
    process = Process("node", 1)
    assert segments.choose(client, process, [queue], limit_s=limit_s, cannot_play=excluded) is None
    assert segments.playing(client, run) == {}


def test_a_run_without_steps_left_is_chosen_where_no_other_wants_the_process(client: Redis) -> None:
    waits, low = add_run(client, priority="high"), add_run(client, priority="low")
    client.hset(keys.state(waits), "appended_steps", 10**9)
    assert segments.choose(client, Process("n", 1), [PLAIN]) == low
    runs.set_status(client, low, "paused", "")
    assert segments.choose(client, Process("n", 1), [PLAIN]) == waits


def test_a_choice_whose_reply_was_lost_counts_once(client: Redis) -> None:
    run, process = add_run(client), Process("node", 7, 3)
    for _ in range(3):
        assert segments.choose(client, process, [PLAIN], task="t") == run
    ((name, one),) = segments.playing(client, run).items()
    assert (name, one.node, one.pid, one.task) == (str(process), "node", 7, "t")
    assert abs(one.since_s - runs.server_ms(client) / 1e3) < 5
    assert segments.run_of_task(client, "t") == run and segments.run_of_task(client, "other") is None
    assert segments.active(client)[0].virtual_ms == SEGMENT_MS
    for _ in range(2):
        segments.end(client, run, process, spent_ms=50, process_ms=20, allowance_wait_ms=10, room_wait_ms=5)
    state = runs.state(client, run)
    assert (state.process_s, state.allowance_wait_s, state.room_wait_s) == (0.02, 0.01, 0.005)
    assert segments.active(client)[0].virtual_ms == 50 and segments.playing(client, run) == {}


def test_a_claim_does_not_keep_a_process_from_its_run(client: Redis) -> None:
    low, high = add_run(client, priority="low"), add_run(client, priority="high")
    stream.claim(client, low, 1, for_ms=60_000)
    assert segments.choose(client, Process("n", 1), [PLAIN]) == high
