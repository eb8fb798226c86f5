"""The store's part in sharing a fleet: who plays, who leaves, who claims, what became of each fragment."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import redis
from redis import Redis
from support.store import SPACES, append, make_config, make_run, take

from ddrl.config import live_options
from ddrl.store import connection, keys, ledger, logs, runs, segments, stream
from ddrl.store.connection import StoreError
from ddrl.store.ledger import Row
from ddrl.store.stream import Answer


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return make_run(client)


def test_the_count_of_waiting_messages_is_set_right_by_an_empty_queue(client: Redis, run: str) -> None:
    queue = "ddrl.rollout"
    segments.sent(client, run, 3)
    client.lpush(keys.queue(queue, "high"), "a", "b", "c")
    assert segments.waiting(client, run, queue, "high") == 3
    segments.begin(client, run)
    assert segments.waiting(client, run, queue, "high") == 2
    assert segments.waiting(client, run, queue, "low") == 0  # of that priority none wait
    segments.begin(client, run)  # delivered twice
    assert runs.state(client, run).waiting == 0


def test_producers_play_from_begin_to_end_and_time_is_added_up(client: Redis, run: str) -> None:
    segments.playing(client, run, 4, node="a@host", pid=12)
    playing = segments.players(client, run)[4]
    assert (playing.node, playing.pid) == ("a@host", 12)
    assert abs(playing.since_s - runs.server_ms(client) / 1e3) < 5
    append(client, run, 0, played_ms=200, process_ms=300, allowance_wait_ms=40, room_wait_ms=30)
    segments.end(client, run, 4, process_ms=1000, allowance_wait_ms=500, room_wait_ms=0)
    state = runs.state(client, run)
    assert (state.process_s, state.played_s, state.allowance_wait_s, state.room_wait_s) == (
        1.3,
        0.2,
        0.54,
        0.03,
    )
    assert segments.players(client, run) == {}


def test_nothing_is_noted_of_a_run_that_is_gone(client: Redis) -> None:
    assert segments.note_crash(client, "gone", "signal 11") == 0
    segments.note_refusal(client, "gone", "host", "too old")
    segments.end(client, "gone", 1, process_ms=5)
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


def test_lost_producers_are_counted_once(client: Redis, run: str) -> None:
    segments.playing(client, run, 4, node="a", pid=1), segments.playing(client, run, 5, node="a", pid=2)
    assert segments.lost(client, run, [4, 9], "a is gone") == 1
    assert segments.lost(client, run, [4], "a is gone") == 0
    assert list(segments.players(client, run)) == [5]
    assert runs.state(client, run).lost_producers == 1


def test_a_node_that_leaves_is_told_to_yield_and_others_are_not(client: Redis, run: str) -> None:
    token = take(client, run)
    stream.allow(client, run, token, 1000, updates=0)
    client.hset(keys.state(run), "version", 0)
    segments.drain(client, "a")
    assert append(client, run, 0, node="a").answer is Answer.YIELD
    assert append(client, run, 0, producer=2, node="b").answer is Answer.GO
    assert stream.remaining(client, run, node="a").answer is Answer.YIELD
    assert stream.remaining(client, run, node="b").answer is Answer.GO
    assert 0 < client.ttl(keys.draining(run)) <= segments.DRAIN_S


def test_a_claim_is_taken_by_as_many_processes_as_it_asks_for_and_lapses(client: Redis, run: str) -> None:
    stream.allow(client, run, take(client, run), 1000, updates=0)
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


def test_rivals_are_the_active_runs_and_want_what_they_may_play(client: Redis, run: str) -> None:
    time.sleep(0.002)  # runs are ordered by the millisecond
    other = runs.create(client, make_config(), SPACES, queues=("ddrl.rollout.box2d", "ddrl.evaluate.box2d"))
    third = runs.create(client, make_config(), SPACES)
    runs.set_status(client, third, "paused", "")
    assert [rival.run for rival in runs.active(client)] == [run, other] == runs.active_names(client)
    assert not any(rival.wants for rival in runs.active(client))  # none has a learner
    stream.allow(client, run, take(client, run), 20, updates=0)
    client.hset(keys.state(run), "version", 0)
    assert [rival.wants for rival in runs.active(client)] == [True, False]
    append(client, run, 0), append(client, run, 1, process_ms=70)
    first, second = runs.active(client)
    assert (first.wants, first.process_ms, first.weight, first.priority) == (False, 70, 1.0, "normal")
    assert second.queue == "ddrl.rollout.box2d"


def test_settings_change_whole_or_not_at_all(client: Redis, run: str) -> None:
    new = make_config().model_copy(update={"weight": 2.5, "priority": "high"})
    changes = {"weight": (1.0, 2.5), "priority": ("normal", "high")}
    assert runs.change(client, run, new, changes, version=0) == 1 == runs.config_version(client, run)
    assert runs.config(client, run) == new
    state = runs.state(client, run)
    assert (state.weight, state.priority) == (2.5, "high")
    rows = [row for row in runs.journal(client, run) if row["event"] == "set"]
    assert [(row["option"], row["from"], row["to"]) for row in rows] == [
        ("weight", "1.0", "2.5"),
        ("priority", '"normal"', '"high"'),
    ]
    with pytest.raises(StoreError, match="changed meanwhile"):
        runs.change(client, run, make_config(), {}, version=0)
    assert runs.config(client, run) == new
    assert "weight" in live_options(type(new)) and "seed" not in live_options(type(new))


def audit_of(client: Redis, run: str, producer: int) -> tuple[int, ...]:
    account = ledger.audit(client, run).accounts[producer]
    names = ("appended", "consumed", "waiting", "trimmed", "refused", "duplicates", "difference")
    return tuple(getattr(account, name) for name in names)


def test_the_audit_accounts_for_every_fragment_of_every_producer(client: Redis, run: str) -> None:
    token = take(client, run)
    for seq in range(4):
        append(client, run, seq)
    append(client, run, 3)  # repeated
    append(client, run, 0, producer=2)
    client.xadd(keys.experience(run), {"h": "junk"})
    assert audit_of(client, run, 1) == (4, 0, 4, 0, 0, 1, 0)
    entries = stream.read(client, run, b"0-0", count=10)
    assert [entry.producer for entry in entries] == [1, 1, 1, 1, 2, ledger.UNKNOWN]
    ledger.put(client, run, token, {1: Row(2, 1, 0, 7, 2)}, entries[2].entry_id)
    found = ledger.audit(client, run)
    assert audit_of(client, run, 1) == (4, 2, 1, 0, 1, 1, 0)
    assert found.is_balanced and found.total("appended") == 5 and found.unknown == 1
    client.xdel(keys.experience(run), entries[4].entry_id)  # lost unread
    found = ledger.audit(client, run)
    assert not found.is_balanced and found.accounts[2].difference == 1
    ledger.put(client, run, token, {1: Row(5, 1, 0, 7, 3)}, entries[3].entry_id)  # one counted twice
    assert ledger.audit(client, run).accounts[1].difference == -2
    ledger.replace(client, run, token, {2: Row(1, 0, 0, 7, 0)}, entries[0].entry_id)
    assert ledger.read(client, run)[0] == {1: Row(), 2: Row(1, 0, 0, 7, 0)}


def test_an_audit_of_nothing_is_balanced(client: Redis, run: str) -> None:
    assert ledger.audit(client, run).is_balanced


def test_lines_of_log_are_kept_and_trouble_with_the_server_is_not(client: Redis, run: str) -> None:
    handler = logs.Handler(client, run, "learner here")
    record = logging.LogRecord("ddrl", logging.WARNING, __file__, 1, "%d entries refused", (3,), None)
    handler.emit(record)
    rows, cursor = logs.read(client, run)
    assert [(row["source"], row["level"], row["text"]) for row in rows] == [
        ("learner here", "WARNING", "3 entries refused")
    ]
    assert logs.read(client, run, cursor) == ([], cursor)
    gone = redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.1)
    logs.Handler(gone, run, "x").emit(record)
    gone.close()


def test_whoever_logs_more_than_a_stalled_server_takes_does_not_wait_nor_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, sent = threading.Event(), []

    def add(*row: object) -> None:
        answers.wait()
        sent.append(row[-1])

    monkeypatch.setattr(logs, "add", add)
    monkeypatch.setattr(connection, "connect", redis.Redis)  # which connects at its first command
    monkeypatch.setattr(logs, "MOST_WAITING", 3)
    with logs.sending("target", "learner here"):
        for number in range(100):
            logging.getLogger("ddrl").error("line %d", number)
        answers.set()
    assert 3 <= len(sent) <= 4 and sent[:3] == [f"line {number}" for number in range(3)]
    assert "Logging error" not in capsys.readouterr().err
