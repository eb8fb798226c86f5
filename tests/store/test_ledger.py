"""The ledger: every acknowledged fragment is consumed once, waits, or is recorded as lost."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import asdict, astuple, replace

import pytest
from redis import Redis
from support.learners import Run, crashing, in_threads, playing, training, until
from support.processes import EXACT
from support.runs import target_config
from support.store import append, fold_now

from ddrl.config import RunConfig
from ddrl.learner.ledger_rows import LedgerRows
from ddrl.learner.loop import Learner
from ddrl.replay.reader import Decoded
from ddrl.store import connection, keys, ledger, local_checkpoints, runs, stream, workers
from ddrl.store.checkpoints import Counters
from ddrl.store.ledger import ENDED, UNKNOWN, Row
from ddrl.store.local_checkpoints import Snapshot
from ddrl.store.stream import Answer
from ddrl.store.workers import Heartbeat


def config() -> RunConfig:
    """Small fragments, a stream that is trimmed all the time."""
    return target_config(
        stop={"return": None},
        replay={"capacity": 600, "warmup_steps": 100, "slack_steps": 2000, "samples_per_insert": 2},
        rollout={"max_fragment_steps": 5, "segment_s": 0.2},
    )


def staged(number: int, producer: int, seq: int, *, incarnation: int = 7) -> Decoded:
    return Decoded(b"%d-0" % number, 100, producer, incarnation, seq, 0, None)


# --- the learner's rows ----------------------------------------------------------------------------------


def test_rows_count_entries_and_changes_are_returned_once() -> None:
    rows = LedgerRows()
    for number, (producer, seq) in enumerate([(1, 0), (2, 0), (1, 1)], start=1):
        assert rows.objection(staged(number, producer, seq)) == ""
        assert rows.count(staged(number, producer, seq), consumed=producer == 1) == ""
    first = {1: Row(consumed=2, incarnation=7, last_seq=1), 2: Row(refused=1, incarnation=7, last_seq=0)}
    assert rows.rows == first
    assert rows.changes() == (first, b"3-0") and rows.changes() == ({}, b"3-0")
    rows.put_back(first)  # could not be stored
    rows.count(staged(4, 1, 2), consumed=True)
    assert rows.changes() == (first | {1: Row(consumed=3, incarnation=7, last_seq=2)}, b"4-0")
    rows.count(staged(5, 9, 0), consumed=True)
    rows.fold({2})
    assert rows.rows == {1: Row(3, 0, 0, 7, 2), 9: Row(1, 0, 0, 7, 0), ENDED: Row(refused=1)}
    assert set(rows.changes()[0]) == {9, ENDED}


def test_a_gap_of_any_number_leaves_counts_that_can_be_read() -> None:
    rows = LedgerRows()
    for producer in range(1_000):
        assert "left the stream unread" in rows.count(staged(producer + 1, producer, 2**53), consumed=True)
    assert rows.fragments < 10**16 and len(rows.rows) == 1_000


def test_a_repetition_is_known_by_its_number_also_after_a_restart() -> None:
    rows, restarted = LedgerRows(), LedgerRows()
    for number in range(3):
        rows.count(staged(number + 1, 5, number), consumed=True)
    again = staged(2, 5, 1)
    assert rows.objection(again) == "producer 5: fragment 1 is repeated, its newest is 2"
    assert rows.count(again, consumed=False) == ""
    assert rows.rows == {5: Row(consumed=3, incarnation=7, last_seq=2), UNKNOWN: Row(refused=1)}
    assert rows.objection(staged(4, 5, 0, incarnation=8)) == ""  # another process
    restarted.load(Counters(cursor="2-0", admitted=3, dead=1, ledger=rows.state()))
    assert restarted.objection(again) and restarted.rows == rows.rows and restarted.state() == rows.state()


def test_a_number_that_was_noted_for_a_moment_refuses_no_later_fragment() -> None:
    """A worker may raise a producer's record, write an entry of that number, and put the record back."""
    rows = LedgerRows()
    forged, own = (replace(staged(number, 5, number), newest_seq=number) for number in (10**12, 1))
    rows.count(staged(1, 5, 0), consumed=True)
    rows.count(forged, consumed=True)
    assert rows.objection(own) == ""
    rows.count(own, consumed=True)
    assert rows.rows[5].last_seq == 1 and "is repeated, its newest is 1" in rows.objection(own)


# --- on a real server ------------------------------------------------------------------------------------


def finish(run: Run, learner: Learner) -> None:
    """Let a learner read the whole stream, and finish."""
    with training(learner):
        run.catch_up(learner)
    learner.finish()


@pytest.mark.parametrize("churns", [False, True])
def test_the_ledger_balances_while_learners_die(server, monkeypatch, churns: bool) -> None:
    """With `churns` every segment has a producer of its own, which is folded soon afterwards."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw, run = random.Random(seed), Run(server, config())
    if churns:
        monkeypatch.setattr("ddrl.learner.publisher.FOLD_EVERY_S", 0.02)
        monkeypatch.setattr("ddrl.store.ledger.QUIET_S", 0.1)
        monkeypatch.setattr("ddrl.store.ledger.ACTOR_QUIET_S", 0.1)
    stop, audits = threading.Event(), []

    def audit_all_along() -> None:
        while not stop.wait(0.01):
            audits.append(run.audit())

    segments = 1 if churns else None
    with in_threads(audit_all_along, stop=stop.set), playing(run.url, run.id, num=2, segments=segments):
        for _ in range(5 if EXACT else 3):
            learner = run.learner()
            with crashing(learner, learner.shared.updates + draw.randrange(1, 200 if churns else 60)) as dead:
                until(dead.is_set)
        learner = run.learner()
        goal = learner.shared.updates + 50
        with training(learner):
            until(lambda: learner.shared.updates >= goal)
    learner.stopping.clear()
    finish(run, learner)
    audit, appended = run.audit(), run.state.appended_fragments
    assert len(audits) > 10 and audit.unknown == 0
    if churns:
        assert audit.accounts[ENDED].appended > 0
        assert len(audit.accounts) < int(run.client.get(keys.PRODUCERS))
    else:
        assert len(audit.accounts) == 2
    assert audit.total("consumed") == audit.total("appended") == learner.counters.admitted == appended
    assert audit.total("waiting") == 0
    assert len(run.entries) < appended, "it was trimmed on the way"


def test_a_lost_fragment_is_found(server) -> None:
    run = Run(server, config())
    for steps in (400, 100):  # of two producers
        run.play(steps, anew=True)
    entries = run.entries
    (loser,) = {entry.producer for entry in entries[:3]}
    run.client.xdel(keys.experience(run.id), entries[2].entry_id)
    assert ledger.audit(run.client, run.id).accounts[loser].difference == 1  # before any learner looks
    finish(run, run.learner())
    found = run.audit()
    assert found.accounts[loser].trimmed == 1 and found.total("trimmed") == 1
    assert found.total("consumed") == len(entries) - 1
    lost = [row["reason"] for row in runs.journal(run.client, run.id)[0] if row["event"] == "lost fragments"]
    number = entries[3].count(b"q")
    assert lost == [f"1 fragment of producer {loser} before number {number} left the stream unread"]


def audit_of(client: Redis, run: str, producer: int) -> tuple[int, ...]:
    account = ledger.audit(client, run).accounts[producer]
    _, *counts = astuple(account)  # appended, consumed, waiting, trimmed, refused, duplicates
    return (*counts, account.difference)


def test_the_audit_accounts_for_every_fragment_of_every_producer(client: Redis, run: str, token: int) -> None:
    assert ledger.audit(client, run).is_balanced  # of nothing
    for seq in (0, 1, 2, 3, 3):  # one is repeated
        append(client, run, seq)
    append(client, run, 0, producer=2)
    client.xadd(keys.experience(run), {"h": "junk"})
    assert audit_of(client, run, 1) == (4, 0, 4, 0, 0, 1, 0)
    entries = stream.read(client, run, b"0-0", count=10)
    assert [entry.producer for entry in entries] == [1, 1, 1, 1, 2, UNKNOWN]
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


def test_a_server_that_forgot_appends_counts_them_as_trimmed(client: Redis, run: str, token: int) -> None:
    """A producer goes on with its numbers where the server came back older, and the learner's rows agree."""
    rows = LedgerRows()
    for seq in (0, 1):
        append(client, run, seq)
    client.xtrim(keys.experience(run), maxlen=0)
    append(client, run, 4)
    for entry in stream.read(client, run, b"0-0", count=9):
        one = staged(3, entry.producer, entry.count(b"q"))
        rows.count(replace(one, entry_id=entry.entry_id), consumed=True)
    ledger.put(client, run, token, *rows.changes())
    assert audit_of(client, run, 1) == (5, 1, 0, 4, 0, 0, 0)


def test_counts_are_raised_though_a_worker_wrote_what_is_no_number(
    client: Redis, run: str, token: int
) -> None:
    for producer in ("1", "2"):
        client.hset(keys.producers(run), producer, '{"incarnation": "a", "seq": NaN, "fragments": 1e999}')
    record = '{"incarnation":"a","seq":3,"fragments":4}'
    script_keys = [keys.state(run), keys.producers(run), keys.PRODUCERS, keys.counts(run)]
    args = [token, 9, 90, 2, "1", "a", 3, record, "2", "b", 3, record]
    assert connection.call(client, "recount", script_keys, args)
    assert [json.loads(value) for value in client.hvals(keys.producers(run))] == [json.loads(record)] * 2
    assert client.hget(keys.counts(run), "appended_fragments") == b"9"


# --- producers whose processes have ended ------------------------------------------------------------------


def fold(client: Redis, run: str, token: int, checkpoint: dict[int, Row]) -> int:
    """Fold what may be folded, after a checkpoint of these rows; return how many producers were."""
    rows = {str(producer): astuple(row) for producer, row in checkpoint.items()}
    return fold_now(client, run, token, rows)


def test_rows_without_a_record_go_once_no_checkpoint_has_them(client: Redis, run: str, token: int) -> None:
    """A worker may delete all records; the learner has added these rows to its row of the ended."""
    rows = {producer: Row(producer).encode() for producer in (1, 2, ENDED, ledger.UNKNOWN)}
    client.hset(keys.ledger(run), mapping={**rows, "cursor": "1-0"})
    assert [fold(client, run, token, {2: Row(2)}) for _ in range(2)] == [1, 0]
    assert ledger.read(client, run)[0] == {n: Row(n) for n in (2, ENDED, ledger.UNKNOWN)}


def test_producers_that_ended_become_one_account_and_stay_gone(server) -> None:
    run = Run(server, config())
    for _ in range(3):
        run.play(100, anew=True)
    finish(run, run.learner())
    client, token, rows, before = run.client, run.take(), run.meta["ledger"], run.audit()
    assert ledger.fold(client, run.id, token, rows) == 0  # they have appended just now
    older = {int(producer): Row(*row) for producer, row in rows.items()}
    older[2] = Row(0, 0, 0, 7, 0)  # a checkpoint from which 2 would be read again
    assert [fold(client, run.id, token, older) for _ in range(2)] == [2, 0]
    audit = run.audit()
    assert set(audit.accounts) == {2, ENDED} and audit.accounts[2] == before.accounts[2]
    assert all(audit.total(name) == before.total(name) for name in ("appended", "consumed", "duplicates"))
    assert ledger.unlisted(client, run.id, [1, 2, 3]) == [1, 3]

    # A folded producer that repeats its last fragment, whose reply was lost, is not counted again.
    entry = run.entries[-1]
    reply = append(client, run.id, entry.count(b"q"), producer=3, incarnation=entry.count(b"i"))
    assert entry.producer == 3 and reply.answer is Answer.STOPPED
    assert run.audit() == audit

    again = run.learner()  # from the earlier checkpoint, which still has them
    assert set(again.shared.ledger.rows) == {2, ENDED} and run.audit() == audit
    again.finish()
    run.play(100)  # by the third one, as a new producer
    finish(run, run.learner())
    audit = run.audit()
    assert set(audit.accounts) == {2, 4, ENDED} and audit.unknown == 0


@pytest.mark.parametrize(
    "value",
    [f"5 1 0 -{10**330} host 3 0 n", f"5 1 0 {10**330} host 3 0 n", "5 1 0 9 \x1b[31mhost 3 0 n", "5 1 0 9"],
)
def test_a_producer_that_cannot_be_right_is_none(value: str) -> None:
    assert ledger.Producer.decode(b"5 1 0 9 host 3 0 n").seq == 1  # as earlier versions wrote it
    assert ledger.Producer.decode(value.encode()) == ledger.Producer()


def test_a_producer_whose_process_lives_is_not_folded(client: Redis, run: str, token: int) -> None:
    for producer, pid in ((1, 11), (2, 12)):
        append(client, run, 0, producer=producer, node="node", pid=pid)
    rows = dict.fromkeys((1, 2), Row(1, 0, 0, 7, 0))
    ledger.put(client, run, token, rows, stream.read(client, run, b"0-0", count=2)[-1].entry_id)
    workers.beat(client, Heartbeat("node", "host", 1, 2, (), {}, pids=(12, 13)))
    assert fold(client, run, token, rows) == 1
    audit = ledger.audit(client, run)
    assert set(audit.accounts) == {2, ENDED} and audit.is_balanced


def test_of_many_producers_those_of_living_processes_are_kept(
    client: Redis, run: str, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process keeps the one that appended last: a worker may write any number of records."""
    monkeypatch.setattr(ledger, "MIN_PRODUCERS", 2)
    client.set(keys.PRODUCERS, 4)
    for producer, pid in ((1, 11), (2, 12), (3, 12), (4, 13)):
        append(client, run, 0, producer=producer, node="node", pid=pid)
    rows = dict.fromkeys((1, 2, 3, 4), Row(1, 0, 0, 7, 0))
    ledger.put(client, run, token, rows, stream.read(client, run, b"0-0", count=4)[-1].entry_id)
    workers.beat(client, Heartbeat("node", "host", 1, 2, (), {}, pids=(12, 13)))
    assert fold(client, run, token, rows) == 2
    assert set(ledger.audit(client, run).accounts) == {3, 4, ENDED}
    reply = append(client, run, 1, producer=4, node="node", pid=13)
    assert reply.answer is not Answer.STOPPED


def test_an_actor_that_has_no_heartbeat_may_be_silent_for_minutes(
    client: Redis, run: str, token: int
) -> None:
    client.set(keys.PRODUCERS, 2)
    for producer, node in ((1, "-"), (2, "gone")):
        append(client, run, 0, producer=producer, node=node)
        record = json.loads(client.hget(keys.producers(run), str(producer)) or "")
        record["last_ms"] -= 120_000
        client.hset(keys.producers(run), str(producer), json.dumps(record))
    rows = dict.fromkeys((1, 2), Row(1, 0, 0, 7, 0))
    ledger.put(client, run, token, rows, stream.read(client, run, b"0-0", count=2)[-1].entry_id)
    checkpoint = {str(producer): astuple(row) for producer, row in rows.items()}
    assert ledger.fold(client, run, token, checkpoint) == 1
    assert append(client, run, 1, producer=1).answer is not Answer.STOPPED
    assert append(client, run, 1, producer=2, node="gone").answer is Answer.STOPPED


def test_a_producer_is_folded_once_a_checkpoint_covers_it(client: Redis, run: str, token: int) -> None:
    first, second = ({1: Row(count, 0, 0, 7, count - 1)} for count in (1, 2))
    append(client, run, 0)
    ledger.put(client, run, token, first, b"0-1")
    append(client, run, 1)
    assert fold(client, run, token, first) == 0  # one waits to be read
    last = stream.read(client, run, b"0-0", count=2)[-1].entry_id
    ledger.put(client, run, token, second, last)
    assert fold(client, run, token, first) == 0  # it was read after that
    assert fold(client, run, token, second) == 1
    meta = asdict(Counters(cursor=last.decode(), ledger={str(ENDED): astuple(Row(2))}))
    snapshot = Snapshot(run, token, local_checkpoints.record(client, run), meta, b"tensors")
    client.flushall()
    assert local_checkpoints.restore(client, snapshot)  # its account is there, too
    audit = ledger.audit(client, run)
    assert audit.is_balanced and audit.unknown == 0
    assert [(one, account.appended) for one, account in audit.accounts.items()] == [(ENDED, 2)]
