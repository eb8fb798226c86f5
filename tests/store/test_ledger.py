"""The ledger: every acknowledged fragment is consumed once, waits, or is told of, whoever is killed on the way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest
from redis import Redis
from support.runs import play_steps, start, target_config
from test_learner import make_learner, take, training, until
from test_lockstep import alive
from test_on_policy_learner import pick_config, playing

from ddrl.config import RunConfig
from ddrl.learner.accounts import Accounts
from ddrl.learner.loop import Learner
from ddrl.replay.reader import Staged
from ddrl.store import keys, ledger, runs, seeds, stream
from ddrl.store import leases as lease
from ddrl.store.checkpoints import Counters
from ddrl.store.ledger import RETIRED, STRANGER, Row
from ddrl.store.stream import Answer


@pytest.fixture
def client(server) -> Redis:
    return server.client


def config() -> RunConfig:
    """Small fragments, a stream that is trimmed all the time."""
    return target_config(
        stop={"return": None},
        replay={"capacity": 600, "warmup_steps": 100, "slack_steps": 2000, "samples_per_insert": 2},
        rollout={"max_fragment_steps": 5, "segment_s": 0.2},
    )


def staged(fragments: int, producer: int, seq: int, *, incarnation: int = 7) -> Staged:
    entry_id = b"%d-0" % fragments
    return Staged(
        entry_id, fragments, 8 * fragments, 100 * fragments, 100, producer, incarnation, seq, 0, None
    )


# --- the learner's side ----------------------------------------------------------------------------------


def test_rows_follow_what_is_taken_and_changes_are_told_once() -> None:
    accounts = Accounts()
    for number, (producer, seq) in enumerate([(1, 0), (2, 0), (1, 1)], start=1):
        assert accounts.objection(staged(number, producer, seq)) == ""
        assert accounts.take(staged(number, producer, seq), consumed=producer == 1) == ""
    rows = {1: Row(consumed=2, incarnation=7, last_seq=1), 2: Row(refused=1, incarnation=7, last_seq=0)}
    assert accounts.rows == rows
    assert accounts.changes() == (rows, b"3-0") and accounts.changes() == ({}, b"3-0")
    accounts.put_back(rows)  # could not be told
    accounts.take(staged(4, 1, 2), consumed=True)
    changed, cursor = accounts.changes()
    assert changed == {1: Row(consumed=3, incarnation=7, last_seq=2), 2: rows[2]} and cursor == b"4-0"


def test_a_repetition_is_known_by_its_number_also_after_a_restart() -> None:
    accounts = Accounts()
    for number in range(3):
        accounts.take(staged(number + 1, 5, number), consumed=True)
    again = staged(2, 5, 1)
    assert accounts.objection(again) == "producer 5: fragment 1 is repeated, its newest is 2"
    assert accounts.take(again, consumed=False) == ""
    assert accounts.rows[5] == Row(consumed=3, incarnation=7, last_seq=2)
    assert accounts.rows[STRANGER] == Row(refused=1)  # its producer's append would have refused it
    assert accounts.objection(staged(4, 5, 0, incarnation=8)) == ""  # another process
    restored = Accounts()
    told = accounts.state(b"0-0")
    restored.load_state(Counters(cursor="2-0", admitted=3, dead=1, **told))
    assert restored.objection(again) and restored.rows == accounts.rows
    assert restored.state(b"0-0") == told and told["strange"] == ["2-0"]
    assert restored.state(b"3-0")["strange"] == []  # not held any more


def test_what_is_gone_is_counted_at_once_and_claimed_by_its_producer_s_next_number() -> None:
    accounts = Accounts()
    accounts.take(staged(1, 1, 0), consumed=True)
    gone = accounts.take(staged(5, 2, 0), consumed=True)  # fragments 2, 3 and 4
    assert gone == "3 fragments between 1-0 and 5-0 went from the stream unread"
    assert accounts.rows[STRANGER].unread == 3
    assert accounts.take(staged(6, 1, 3), consumed=True) == ""
    assert accounts.rows[1] == Row(consumed=2, unread=2, incarnation=7, last_seq=3)
    assert accounts.rows[STRANGER].unread == 1
    accounts.take(staged(7, 1, 9), consumed=True)  # a producer that skips numbers has lost nothing
    assert accounts.rows[1].unread == 3 and accounts.rows[STRANGER].unread == 0


def test_where_no_count_is_known_none_is_missed() -> None:
    accounts = Accounts()
    accounts.load_state(Counters(admitted=9, cursor="9-0"))  # a checkpoint without a ledger
    assert accounts.take(staged(50, 1, 49), consumed=True) == ""
    assert accounts.take(staged(52, 1, 51), consumed=True).startswith("1 fragment between 50-0 and 52-0")


def test_one_row_stands_for_those_that_went() -> None:
    accounts = Accounts()
    for number, (producer, seq) in enumerate([(1, 0), (2, 0), (1, 1), (3, 0), (9, 0)], start=1):
        accounts.take(staged(number, producer, seq), consumed=producer != 2)
    accounts.changes()
    accounts.take(staged(6, 1, 2), consumed=True)
    accounts.retire(3, {3})  # 9 is later: new, and not told yet
    stays = {3: Row(1, 0, 0, 7, 0), 9: Row(1, 0, 0, 7, 0)}
    assert accounts.rows == stays | {RETIRED: Row(consumed=3, refused=1)}
    assert accounts.changes()[0] == {RETIRED: Row(consumed=3, refused=1)}  # nothing of those that went
    accounts.retire(3, set())
    assert accounts.rows == {9: stays[9], RETIRED: Row(consumed=4, refused=1)}


def test_who_was_retired_is_known_no_more_and_who_did_not_append_is_still_objected_to() -> None:
    accounts = Accounts()
    for number in range(4):
        accounts.take(staged(number + 1, number % 2, number // 2), consumed=True)
    accounts.retire(1, {0})
    assert (
        accounts.objection(staged(2, 1, 0)) == "no append wrote it: its counts are old"
    )  # a copy of its first one
    assert accounts.objection(staged(5, 9, 0)) == accounts.objection(staged(3, 9, 0)) == ""


def test_where_the_server_came_back_older_what_is_appended_then_is_taken() -> None:
    accounts = Accounts()
    for number in range(9):
        accounts.take(staged(number + 1, 1, number), consumed=True)
    late = staged(7, 1, 11)  # counted from less, and with a gap
    assert accounts.objection(late) == "no append wrote it: its counts are old"
    accounts.rewind(9)
    assert accounts.objection(late) and accounts.fragments == 9
    accounts.rewind(6)
    assert not accounts.objection(late) and accounts.take(late, consumed=True) == ""
    assert accounts.take(staged(9, 1, 13), consumed=True).startswith("1 fragment between")


# --- on a real server ------------------------------------------------------------------------------------


@contextmanager
def audited(client: Redis, run: str) -> Iterator[list[ledger.Audit]]:
    """Audits of a run, one after another, while the context lasts: each must balance."""
    stop, audits = threading.Event(), []

    def go() -> None:
        while not stop.is_set():
            audits.append(ledger.audit(client, run))
            time.sleep(0.01)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield audits
    finally:
        stop.set()
        thread.join()
    wrong = [audit for audit in audits if not audit.is_balanced]
    assert not wrong, wrong[0]


@pytest.mark.parametrize("churns", [False, True])
def test_accounts_balance_at_every_moment_while_learners_are_killed(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch, churns: bool
) -> None:
    """Where it churns, every segment has a process of its own, and silent ones are retired at once."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    run = start(client, config())
    if churns:
        monkeypatch.setattr("ddrl.learner.publisher.RETIRE_EVERY_S", 0.02)
        monkeypatch.setattr("ddrl.learner.publisher.RETIRE_AFTER_S", 0.1)
    with audited(client, run) as audits, playing(server.url, run, num=2, segments=1 if churns else None):
        for _ in range(5):
            learner = make_learner(client, run, take(client, run), server.url)
            learner.restore()
            kill_at = learner.num_updates + draw.randrange(1, 600 if churns else 60)
            with alive(learner, kill_at) as dead:
                until(dead.is_set)
        learner = make_learner(client, run, take(client, run), server.url)
        learner.restore()
        with training(learner):
            goal = learner.num_updates + 50
            until(lambda: learner.num_updates >= goal)
    learner.stopping.clear()
    with training(learner):
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
    learner.finish()
    audit = ledger.audit(client, run)
    state = runs.state(client, run)
    assert len(audits) > 10 and audit.strangers == 0
    if churns:
        assert audit.accounts[RETIRED].appended > 0 and 2 < len(audit.accounts) < int(
            client.get(keys.PRODUCERS)
        )
    else:
        assert len(audit.accounts) == 2
    assert audit.total("consumed") == audit.total("appended") == state.appended_fragments
    assert learner.counters.admitted == state.appended_fragments and audit.total("waiting") == 0
    assert client.xlen(keys.experience(run)) < state.appended_fragments, "it was trimmed on the way"


def test_on_policy_fragments_that_are_too_stale_are_consumed_too(client: Redis, server) -> None:
    run = start(client, pick_config(on_policy={"collect": "sync", "max_staleness": 0}))
    learner = make_learner(client, run, take(client, run), server.url)
    learner.restore()
    with audited(client, run), playing(server.url, run, num=3), training(learner):
        until(lambda: learner.experience.num_dropped > 2)
    learner.finish()
    audit = ledger.audit(client, run)
    assert audit.is_balanced and audit.total("consumed") == learner.counters.admitted


def learned(client: Redis, url: str, run: str) -> Learner:
    """A learner that has taken all there is, and finished."""
    learner = make_learner(client, run, take(client, run), url)
    learner.restore()
    last = client.xrevrange(keys.experience(run), count=1)[0][0]
    with training(learner):
        until(lambda: learner.accounts.cursor == last)
    learner.finish()
    return learner


def test_a_planted_loss_is_found(client: Redis, server) -> None:
    run = start(client, config())
    token = take(client, run)
    players = play_steps(client, run, token, 400)
    play_steps(client, run, token, 100)  # another producer
    entries = stream.read(client, run, b"0-0", count=1000)
    (loser,) = {entry.producer for entry in entries[:3]}
    client.xdel(keys.experience(run), entries[2].entry_id)
    before = ledger.audit(client, run)
    assert before.accounts[loser].difference == 1 and not before.is_balanced  # before any learner looks
    learner = learned(client, server.url, run)
    found = ledger.audit(client, run)
    assert found.accounts[loser].trimmed == 1 and found.total("trimmed") == 1
    assert found.is_balanced and found.total("consumed") == len(entries) - 1
    told = [row for row in runs.journal(client, run) if row["event"] == "lost"]
    wanted = f"1 fragment between {entries[1].entry_id.decode()} and {entries[3].entry_id.decode()}"
    assert [row["reason"] for row in told] == [f"{wanted} went from the stream unread"]

    last = stream.read(client, run, entries[-1].entry_id, count=1)
    assert not last and learner.accounts.rows[STRANGER].unread == 0
    play_steps(client, run, take(client, run), 40, players=players)
    newest = client.xrevrange(keys.experience(run), count=1)[0][0]
    client.xdel(keys.experience(run), newest)  # whose producer says no more
    learned(client, server.url, run)
    assert ledger.audit(client, run).accounts[loser].difference == 1


def test_a_planted_double_and_a_stranger_are_refused_and_found(client: Redis, server) -> None:
    run = start(client, config())
    token = take(client, run)
    players = play_steps(client, run, token, 200)
    entries = stream.read(client, run, b"0-0", count=1000)
    twice = dict(entries[-1].fields)
    client.xadd(keys.experience(run), twice)
    unsigned = {name: value for name, value in twice.items() if name not in (b"p", b"i", b"q")}
    client.xadd(keys.experience(run), unsigned)
    producer = entries[-1].producer
    before = ledger.audit(client, run)
    assert (before.accounts[producer].difference, before.strangers) == (-1, 1)
    play_steps(client, run, token, 100, players=players)
    learner = learned(client, server.url, run)
    audit = ledger.audit(client, run)
    assert (audit.accounts[producer].difference, audit.strangers) == (0, 2)
    assert audit.accounts[producer].refused == 0 and audit.total("trimmed") == 0
    assert learner.counters.admitted == runs.state(client, run).appended_fragments
    reasons = [fields[b"reason"] for _, fields in client.xrange(keys.dead(run))]
    assert reasons == [b"producer %d: fragment %d is repeated, its newest is %d" % (
        producer, entries[-1].count(b"q"), entries[-1].count(b"q")), b"no append wrote it"]  # fmt: skip

    again = make_learner(client, run, take(client, run), server.url)
    again.restore()  # nor does the view that is rebuilt hold them
    size = len(learner.experience.view)
    assert len(again.experience.view) == size == runs.state(client, run).appended_steps
    everything = np.arange(size)
    for name, array in vars(learner.experience.view.gather(everything)).items():
        np.testing.assert_array_equal(array, getattr(again.experience.view.gather(everything), name))
    assert again.accounts.rows == learner.accounts.rows
    again.finish()


def test_counts_that_cannot_be_are_not_believed(client: Redis, server) -> None:
    """Entries without the append: counts beyond what was appended, a number far ahead, an honest producer's name."""
    run = start(client, config())
    token = take(client, run)
    players = play_steps(client, run, token, 200)
    honest = dict(stream.read(client, run, b"0-0", count=1000)[-1].fields)
    huge = b"999999999999"
    for forged in (
        {b"f": huge},
        {b"n": huge},
        {b"b": huge, b"s": huge},
        {b"q": b"500"},
        {b"h": b"{}", b"q": b"600"},
    ):
        client.xadd(keys.experience(run), {**honest, **forged})
    play_steps(client, run, token, 100, players=players)
    learner = learned(client, server.url, run)
    state, audit = runs.state(client, run), ledger.audit(client, run)
    assert audit.is_balanced and audit.strangers == 5 and audit.total("trimmed") == 0
    assert audit.total("consumed") == state.appended_fragments == learner.counters.admitted
    assert learner.num_steps == state.appended_steps
    assert learner.service.retention._total == state.appended_bytes
    again = make_learner(client, run, take(client, run), server.url)
    again.restore()
    assert len(again.experience.view) == len(learner.experience.view) == state.appended_steps
    again.finish()


# --- producers that have been silent for long ------------------------------------------------------------


def test_producers_that_went_become_one_account_and_stay_gone(client: Redis, server) -> None:
    run = start(client, config())
    token = take(client, run)
    players = [play_steps(client, run, token, 100) for _ in range(3)]
    learner = learned(client, server.url, run)
    token, counters = take(client, run), learner.service.retention.checkpoint
    before = ledger.audit(client, run)
    assert counters is not None
    assert ledger.retire(client, run, token, counters.ledger, silent_s=3600.0) == 0
    older = {**counters.ledger, "2": (0, 0, 0, 7, 0)}  # a checkpoint from which 2 would be read again
    assert ledger.retire(client, run, token, older, silent_s=0.0) == 2
    assert ledger.retire(client, run, token, older, silent_s=0.0) == 0  # sent twice
    audit = ledger.audit(client, run)
    assert (
        audit.is_balanced and set(audit.accounts) == {2, RETIRED} and audit.accounts[2] == before.accounts[2]
    )
    for name in ("appended", "consumed", "duplicates"):
        assert audit.total(name) == before.total(name)
    assert ledger.retired(client, run) == (3, {2})

    # One that went and repeats its last fragment, whose reply was lost, must not have it counted again.
    entry = stream.read(client, run, b"0-0", count=1000)[-1]
    fields = {name: value for name, value in entry.fields.items() if len(name) > 1 or name == b"h"}
    who = {
        name: entry.count(letter)
        for name, letter in [("producer", b"p"), ("incarnation", b"i"), ("seq", b"q")]
    }
    reply = stream.append(client, run, fields, num_transitions=1, **who)
    assert who["producer"] == 3 and reply.answer is Answer.STOPPED
    assert ledger.audit(client, run) == audit

    # The next learner begins at the checkpoint of before, which still has them.
    again = make_learner(client, run, token, server.url)
    again.restore()
    assert set(again.accounts.rows) == {2, RETIRED} and ledger.audit(client, run) == audit
    again.finish()
    play_steps(client, run, token, 100, players=players[2])  # as a new producer
    learned(client, server.url, run)
    audit = ledger.audit(client, run)
    assert audit.is_balanced and set(audit.accounts) == {2, 4, RETIRED} and audit.strangers == 0


def test_who_has_appended_since_the_checkpoint_stays(client: Redis, server) -> None:
    run = start(client, config())
    token = take(client, run)
    players = play_steps(client, run, token, 100)
    learner = learned(client, server.url, run)
    token, counters = take(client, run), learner.service.retention.checkpoint
    assert counters is not None
    play_steps(client, run, token, 100, players=players)
    assert ledger.retire(client, run, token, counters.ledger, silent_s=0.0) == 0  # some wait to be read
    learner = learned(client, server.url, run)
    token = take(client, run)
    assert ledger.retire(client, run, token, counters.ledger, silent_s=0.0) == 0  # and were, after it
    counters = learner.service.retention.checkpoint
    assert counters is not None and ledger.retire(client, run, token, counters.ledger, silent_s=0.0) == 1
    learner.accounts.retire(*ledger.retired(client, run))

    meta = asdict(counters) | learner.accounts.state(b"0-0")
    seed = seeds.Seed(run, token, seeds.known(client, run), meta, b"tensors")
    client.flushall()  # planted again, the one account for them is there too
    assert seeds.plant(client, seed)
    audit = ledger.audit(client, run)
    assert audit.is_balanced and audit.strangers == 0 and set(audit.accounts) == {RETIRED}
    assert audit.total("appended") == counters.admitted


def test_what_a_worker_may_write_hinders_no_learner(client: Redis, server) -> None:
    run = start(client, config())
    token = take(client, run)
    for _ in range(2):
        play_steps(client, run, token, 100)
    counters = learned(client, server.url, run).service.retention.checkpoint
    token, digits = take(client, run), "9" * 5000
    assert counters is not None
    client.hset(keys.producers(run), digits, "no producer")
    client.hset(keys.producers(run), "2", f"7 0 0 {digits} h {digits} 0 n")
    client.hset(keys.state(run), mapping={"retired": digits, "version": digits, "config_version": "x"})
    assert lease.word(client, run).version == -1
    assert ledger.retired(client, run) == (0, {1, 2})
    client.hset(keys.state(run), "retired", "0")
    assert ledger.retire(client, run, token, counters.ledger, silent_s=0.0) == 1
    client.hset(keys.producers(run), str(RETIRED), "spoiled")
    assert ledger.retire(client, run, token, counters.ledger, silent_s=0.0) == 0
