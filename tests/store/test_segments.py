"""Sharing a fleet: who plays, who leaves, who claims, and which run a process is given, in simulated time."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter

import pytest
from redis import Redis
from support.runs import target_config
from support.store import SPACES, append, events, make_config, make_run, take, want_processes

from ddrl.store import keys, runs, segments, stream
from ddrl.store.segments import Process
from ddrl.store.stream import Answer


def test_nothing_is_noted_of_a_run_that_is_gone(client: Redis) -> None:
    assert segments.note_crash(client, "gone", "signal 11") == 0
    segments.note_refusal(client, "gone", "host", "too old")
    segments.end(client, "gone", Process("a", 1), process_ms=5)
    stream.claim(client, "gone", 1)
    assert not client.keys("*gone*")


def test_crashes_count_until_the_next_fragment(client: Redis, run: str) -> None:
    assert [segments.note_crash(client, run, f"signal {n}") for n in (11, 6)] == [1, 2]
    assert (runs.state(client, run).crashes, runs.state(client, run).error) == (2, "signal 6")
    append(client, run, 0)
    state = runs.state(client, run)
    assert (state.crashes, state.crashes_total) == (0, 2)
    assert segments.note_crash(client, run, "signal 9") == 1
    assert [row["reason"] for row in runs.journal(client, run)[0] if row["event"] == "crashed"][
        -1
    ] == "signal 9"


def test_a_repeated_report_of_a_crash_counts_once(client: Redis, run: str) -> None:
    """A reply may be lost, and another process report a crash before the report comes again."""
    ids = [f"{n:16}" for n in (1, 1, 1, 1, 1, 2, 1, *range(3, 18), 2)]
    counts = [segments.note_crash(client, run, "signal 11", report_id=one) for one in ids]
    assert counts == [1] * 5 + [2, 2, *range(3, 18), 17] and runs.state(client, run).crashes_total == 17
    assert len(runs.journal(client, run)[0]) == 1 + 17
    client.hset(keys.counts(run), "crash_ids", ids[0] * 10**6)  # of a worker
    assert segments.note_crash(client, run, "signal 11", report_id=ids[0]) == 18
    assert client.hstrlen(keys.counts(run), "crash_ids") < 500


def test_of_long_reasons_the_beginning_is_read(client: Redis, run: str) -> None:
    client.hset(keys.refusals(run), "h" * 5_000, "x" * 10_000)
    client.hset(keys.counts(run), "error", "y" * 10_000)
    assert segments.refusals(client, run) == {"h" * 500: "x" * 500}
    assert runs.state(client, run).error == "y" * 500


def test_a_node_that_leaves_yields_and_others_play_on(client: Redis, run: str, token: int) -> None:
    stream.allow(client, run, token, 1000, updates=0)
    client.hset(keys.state(run), "version", 0)
    segments.drain(client, "a")
    for node, answer in (("a", Answer.YIELD), ("b", Answer.GO)):
        assert append(client, run, 0, producer=ord(node), node=node).answer is answer
        assert stream.remaining(client, run, node=node).answer is answer
    assert 0 < client.ttl(keys.draining(run)) <= segments.DRAIN_S
    segments.stay(client, "a")  # begun again under the same name
    assert stream.remaining(client, run, node="a").answer is Answer.GO


def test_a_claim_takes_as_many_processes_as_it_names_and_lapses(client: Redis, run: str, token: int) -> None:
    stream.allow(client, run, token, 1000, updates=0)
    stream.claim(client, run, 2, for_ms=60_000)
    answers = [append(client, run, 0, producer=producer).answer for producer in (1, 2, 3)]
    assert answers == [Answer.YIELD, Answer.YIELD, Answer.GO]
    stream.claim(client, run, 1, for_ms=1)
    time.sleep(0.05)
    assert append(client, run, 1).answer is Answer.GO


def test_refusals_name_the_host_and_are_journalled_once(client: Redis, run: str) -> None:
    for _ in range(3):
        segments.note_refusal(client, run, "b", "b: ddrl 0.1, the run needs 0.2; upgrade b")
    assert segments.refusals(client, run) == {"b": "b: ddrl 0.1, the run needs 0.2; upgrade b"}
    assert events(client, run).count("refused") == 1


def test_active_runs_want_what_they_may_play(client: Redis, run: str) -> None:
    time.sleep(0.002)  # runs are ordered by the millisecond
    other = make_run(client)
    runs.set_status(client, runs.create(client, make_config(), SPACES), "paused", "")
    assert [load.run for load in segments.active(client)] == [run, other] == runs.active_names(client)
    assert not any(load.wants for load in segments.active(client))  # none has a learner
    stream.allow(client, run, take(client, run), 20, updates=0)
    client.hset(keys.state(run), "version", 0)
    assert [load.wants for load in segments.active(client)] == [True, False]
    append(client, run, 0), append(client, run, 1, process_ms=70)
    first, second = segments.active(client)
    assert (first.wants, first.process_ms, first.weight, first.priority) == (False, 70, 1.0, "normal")
    assert first.limit_s == 5 + 2 * 60 and second.queue == "ddrl.rollout.box2d"


# --- the choice of a run -------------------------------------------------------------------------------


PLAIN, BOX2D = "ddrl.rollout", "ddrl.rollout.box2d"
SEGMENT_MS = 200


def add_run(client: Redis, *, queue: str = PLAIN, segment_ms: int = SEGMENT_MS, **options: object) -> str:
    """A run that wants processes."""
    rollout = {"segment_s": segment_ms / 1e3, "fragment_s": 0.02}
    run = runs.create(client, target_config(rollout=rollout, **options), SPACES, queues=(queue, "e"))
    want_processes(client, run)
    return run


class Fleet:
    """Processes that take one segment after the other, in simulated milliseconds; each serves some queues."""

    def __init__(self, client: Redis, served: list[tuple[str, ...]]) -> None:
        self._client, self._served = client, served
        self._chance, self._now_ms = random.Random(1), 0.0
        self._busy: list[tuple[float, int, str, int]] = []  # until, process, run, spent ms
        self._idle = list(range(len(served)))
        self.lengths: dict[str, tuple[float, float]] = {}
        """By run, the shortest and longest segment as a part of SEGMENT_MS, where not nearly all of it."""

    def play(self, segments_long: float) -> Counter[str]:
        """Let the processes play that many SEGMENT_MS; the time of the segments that ended meanwhile, by run."""
        spent, until = Counter[str](), self._now_ms + segments_long * SEGMENT_MS
        while self._now_ms < until:
            for number in self._idle:
                run = segments.choose(self._client, Process("node", number), self._served[number])
                length = round(SEGMENT_MS * self._chance.uniform(*self.lengths.get(run or "", (0.97, 1.0))))
                heapq.heappush(self._busy, (self._now_ms + length, number, run or "", length))
            self._now_ms, number, run, length = heapq.heappop(self._busy)
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
    expected = {}
    for weight, queue in ((1.0, PLAIN), (2.0, BOX2D), (4.0, PLAIN)):
        run = add_run(client, weight=weight, queue=queue, segment_ms=length * SEGMENT_MS)
        expected[run] = num * weight / 7
    fleet = Fleet(client, [(PLAIN, BOX2D)] * num)
    fleet.lengths = dict.fromkeys(expected, (0.97 * length, length))
    fleet.play(5 * length)
    assert fleet.shares((2000 / num + 20) * length, expected, rel=0.03)


def test_processes_that_choose_at_once_spread_by_weight(client: Redis) -> None:
    one, three = add_run(client), add_run(client, weight=3.0)
    chosen = Counter(segments.choose(client, Process("n", number), [PLAIN]) for number in range(40))
    assert chosen == {one: 10, three: 30}


def test_process_time_is_shared_not_segments(client: Redis) -> None:
    long, cut, short = (add_run(client) for _ in range(3))
    fleet = Fleet(client, [(PLAIN,)] * 9)
    fleet.lengths = {cut: (0.1, 1.0), short: (0.1, 0.1)}
    fleet.play(20)
    assert fleet.shares(100, {long: 3, cut: 3, short: 3}, rel=0.05)


def test_a_run_that_starts_or_comes_back_gets_its_share_and_no_more(client: Redis) -> None:
    first, second = add_run(client), add_run(client)
    fleet = Fleet(client, [(PLAIN,)] * 8)
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
    fleet = Fleet(client, [(PLAIN,)] * 8)
    client.hset(keys.counts(other), "appended_steps", 10**9)
    assert fleet.shares(50, {steady: 8})
    time.sleep(2.1 * SEGMENT_MS / 1e3)  # less counts as if it had wanted processes all along
    client.hset(keys.counts(other), "appended_steps", 0)
    fleet.play(2)
    assert fleet.shares(25, {steady: 4, other: 4})


def test_a_run_that_has_allowance_now_and_then_shares_all_along(client: Redis) -> None:
    flickers, _ = add_run(client), add_run(client)
    fleet = Fleet(client, [(PLAIN,)] * 8)
    spent = Counter[str]()
    for turn in range(1000):
        client.hset(keys.counts(flickers), "appended_steps", 0 if turn % 10 < 3 else 10**9)
        spent += fleet.play(1 / 50)
    assert spent[flickers] > 0.25 * spent.total() and not spent[""]  # it could be chosen for 0.3 of the time


def test_a_run_is_not_kept_from_its_share_by_forged_processes_and_time(client: Redis) -> None:
    honest, forged = add_run(client), add_run(client)
    for run in (honest, forged):
        client.hset(keys.state(run), "processes", 8)  # as its dispatcher does
    fleet = Fleet(client, [(PLAIN,)] * 8)
    fleet.play(5)
    client.hset(keys.playing(forged), mapping={f"x{n}": '{"node": "n", "pid": 1}' for n in range(1_000)})
    client.hincrbyfloat(keys.counts(forged), "virtual_ms", 2e5)  # 1,000 segments
    fleet.play(15)
    assert fleet.shares(25, {honest: 4, forged: 4})


def test_capabilities_that_only_some_workers_have(client: Redis) -> None:
    plain, box2d = add_run(client), add_run(client, queue=BOX2D)
    few = Fleet(client, [(PLAIN,)] * 8 + [(PLAIN, BOX2D)] * 2)
    few.play(20)
    assert few.shares(50, {plain: 8, box2d: 2}, rel=0.05)
    late = add_run(client, weight=2.0)
    few.play(20)
    assert few.shares(100, {plain: 8 / 3, late: 16 / 3, box2d: 2}, rel=0.05)


def test_a_changed_weight_or_priority_holds_from_the_next_choice_on(client: Redis) -> None:
    first, second = add_run(client), add_run(client, weight=3.0)
    fleet = Fleet(client, [(PLAIN,)] * 4)
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


def test_a_run_that_a_process_may_not_play_is_not_chosen(client: Redis) -> None:
    paused, without_learner, without_weights, run = (add_run(client) for _ in range(4))
    runs.set_status(client, paused, "paused", "")
    client.delete(keys.lease(without_learner))
    client.hset(keys.state(without_weights), "version", -1)
    process = Process("node", 1)
    assert segments.choose(client, process, [BOX2D]) is None
    assert segments.choose(client, process, [PLAIN], limit_s=100.0) == ""
    assert segments.choose(client, process, [PLAIN], cannot_play=[run]) is None
    segments.drain(client, "node")
    assert segments.choose(client, process, [PLAIN]) is None and segments.playing(client, run) == {}
    segments.stay(client, "node")
    assert segments.choose(client, process, [PLAIN]) == run


def test_a_run_without_steps_left_is_chosen_where_no_other_wants_the_process(client: Redis) -> None:
    waits, low = add_run(client, priority="high"), add_run(client, priority="low")
    client.hset(keys.counts(waits), "appended_steps", 10**9)
    assert segments.choose(client, Process("n", 1), [PLAIN]) == low
    runs.set_status(client, low, "paused", "")
    assert segments.choose(client, Process("n", 1), [PLAIN]) == waits


def test_a_choice_whose_reply_was_lost_counts_once(client: Redis) -> None:
    run, process = add_run(client), Process("node", 7, 3)
    for _ in range(3):
        assert segments.choose(client, process, [PLAIN], task="t") == run
    ((name, one),) = segments.playing(client, run).items()
    assert (name, one.node, one.pid, one.task) == (str(process), "node", 7, "t")
    assert abs(one.since_ms - runs.server_ms(client)) < 5_000
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
