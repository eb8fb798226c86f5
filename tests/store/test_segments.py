"""The store's part in sharing a fleet: who plays, who leaves, who claims, what became of each fragment."""

from __future__ import annotations

import time

from redis import Redis
from support.store import SPACES, append, make_config, note_playing, take

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
    assert [row["reason"] for row in runs.journal(client, run) if row["event"] == "crashed"][-1] == "signal 9"


def test_lost_processes_are_counted_once(client: Redis, run: str) -> None:
    lost, other = (note_playing(client, run, node="a", pid=pid) for pid in (1, 2))
    assert [segments.note_lost(client, run, lost, "a is gone") for _ in range(2)] == [True, False]
    assert list(segments.playing(client, run)) == [other]
    assert runs.state(client, run).lost_producers == 1


def test_a_node_that_leaves_yields_and_others_play_on(client: Redis, run: str, token: int) -> None:
    stream.allow(client, run, token, 1000, updates=0)
    client.hset(keys.state(run), "version", 0)
    segments.drain(client, "a")
    for node, answer in (("a", Answer.YIELD), ("b", Answer.GO)):
        assert append(client, run, 0, producer=ord(node), node=node).answer is answer
        assert stream.remaining(client, run, node=node).answer is answer
    assert 0 < client.ttl(keys.draining(run)) <= segments.DRAIN_S


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
    assert [row["event"] for row in runs.journal(client, run)].count("refused") == 1


def test_active_runs_want_what_they_may_play(client: Redis, run: str) -> None:
    time.sleep(0.002)  # runs are ordered by the millisecond
    other = runs.create(client, make_config(), SPACES, queues=("ddrl.rollout.box2d", "ddrl.evaluate.box2d"))
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
