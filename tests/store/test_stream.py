"""The experience stream: appends, answers, reads, trims."""

from __future__ import annotations

import time

import pytest
from redis import Redis
from support.store import append, make_run, take

from ddrl.store import keys, runs, stream
from ddrl.store.connection import call
from ddrl.store.stream import Answer


def test_append_counts_cumulatively_and_answers_by_the_allowance(client: Redis, run: str) -> None:
    assert append(client, run, 0, episode_returns=(1.5, -2.0)).answer is Answer.WAIT  # nothing is allowed yet
    stream.allow(client, run, take(client, run), 35, updates=0)
    second, third, fourth = (append(client, run, seq) for seq in (1, 2, 3))
    assert [second.answer, third.answer, fourth.answer] == [Answer.GO, Answer.GO, Answer.WAIT]
    assert (second.remaining_steps, fourth.remaining_steps) == (15, -5)
    entries = stream.read(client, run, b"0-0", count=10)
    counts = [(entry.count(b"f"), entry.count(b"n")) for entry in entries]
    assert counts == [(n, 10 * n) for n in (1, 2, 3, 4)]
    assert all(entry.num_bytes == entry.count(b"s") for entry in entries)
    state = runs.state(client, run)
    assert (state.appended_fragments, state.appended_steps) == (4, 40)
    assert [row["returns"] for row in stream.episodes(client, run)[0]] == [[1.5, -2.0]]


def test_a_repeated_append_writes_nothing_and_answers_the_same(client: Redis, run: str, token: int) -> None:
    stream.allow(client, run, token, 1000, updates=0)
    large = 2**63 - 1
    first, again = (append(client, run, 0, incarnation=large) for _ in range(2))
    assert first == again
    # New; known; before the newest, which nobody sends but in another's name; another process.
    later = [(1, large, "GO"), (1, large, "GO"), (0, large, "STOPPED"), (2, large - 1, "STOPPED")]
    for seq, incarnation, answer in later:
        assert append(client, run, seq, incarnation=incarnation).answer.value == answer
    state = runs.state(client, run)
    assert (state.appended_fragments, state.duplicates) == (2, 2)
    assert client.xlen(keys.experience(run)) == 2


def test_an_entry_with_more_fields_than_an_append_writes_is_looked_at_once(client: Redis, run: str) -> None:
    """A worker may write millions, for which a script takes longer than its caller waits."""
    key, many = keys.experience(run), {number: "" for number in range(101)}
    append(client, run, 0)
    appended = stream.read(client, run, b"0-0", count=1)[0].entry_id
    scripts = {
        "newest_id": [],
        "read_short": [b"0-0", b"+", 2**20, 19, "p"],
        "correct_counts": [0, appended, 1, 10, 100, 10],
        "drop_next": [0, 10, 10**9, appended],
        "trim": [0, stream.following(appended)],
    }
    places = {"correct_counts": [keys.state, keys.experience, keys.counts]}
    places["trim"], places["drop_next"] = places["correct_counts"], [keys.state, keys.dead, keys.experience]
    for name, args in scripts.items():
        client.xadd(key, many)
        call(client, name, [of_run(run) for of_run in places.get(name, [keys.experience])], args)
        assert client.xlen(key) == (name != "trim")


def test_what_makes_room_works_on_a_full_server(client: Redis, run: str) -> None:
    """Forged entries may be what fills it."""
    key = keys.experience(run)
    late, forged = client.xadd(key, {"h": ""}, id=b"9999999999999-0"), stream.Refusal
    client.config_set("maxmemory", 1)
    try:
        stream.lower_ids(client, run, 0, b"0-0", b"9000000000000-0")
        ((lowered, _),) = client.xrange(key)
        assert stream.order(lowered) < stream.order(late)
        stream.correct_counts(client, run, 0, stream.Counted(lowered, 1, 10, 100))
        stream.refuse(client, run, 0, [forged(lowered, b"", "no append wrote it", is_fragment=False)])
    finally:
        client.config_set("maxmemory", 0)
    assert client.xlen(key) == 0


def test_append_yields_when_paused_and_stops_when_ended_or_gone(client: Redis, run: str) -> None:
    assert runs.set_status(client, run, "paused", "by test")
    assert append(client, run, 0).answer is Answer.YIELD
    assert runs.state(client, run).appended_fragments == 1  # what is in flight is still accepted
    assert runs.set_status(client, run, "active", "") and runs.set_status(client, run, "stopped", "")
    assert append(client, run, 1).answer is Answer.STOPPED
    assert append(client, "gone-0101-000000-0000", 0).answer is Answer.STOPPED
    assert not client.exists(keys.experience("gone-0101-000000-0000"))
    assert runs.state(client, run).appended_fragments == 1


def test_append_is_refused_at_the_byte_budget_until_a_trim(client: Redis) -> None:
    run = make_run(client, replay={"max_bytes": 65536})
    token = take(client, run)
    stream.allow(client, run, token, 10**6, updates=0)
    sent = 0
    while append(client, run, sent, size=4000).answer is Answer.GO:
        sent += 1
    assert 14 <= sent <= 16 and runs.state(client, run).live_bytes <= 65536
    assert append(client, run, sent, size=4000).answer is Answer.FULL
    entries = stream.read(client, run, b"0-0", count=100)
    assert stream.trim(client, run, token, entries[4].entry_id) == 4
    assert append(client, run, sent, size=4000).answer is Answer.GO  # the same fragment, now written
    state = runs.state(client, run)
    assert state.appended_fragments == sent + 1 and state.duplicates == 0
    stored = stream.read(client, run, b"0-0", count=100)
    assert state.live_bytes == sum(int(entry.fields[b"s"]) for entry in stored)
    stream.trim(client, run, token, b"99999999999999-0")
    assert runs.state(client, run).live_bytes == 0


@pytest.mark.parametrize("counts", [{}, {"b": "9" * 15, "s": "1"}, {"b": "0", "s": "9" * 15}, {"b": "x"}])
def test_a_forged_entry_does_not_change_the_live_bytes(client: Redis, run: str, token: int, counts) -> None:
    append(client, run, 0)
    forged = client.xadd(keys.experience(run), {"h": "{}", **counts})
    append(client, run, 1)
    before = runs.state(client, run).live_bytes
    stream.trim(client, run, token, forged)
    assert runs.state(client, run).live_bytes == before
    assert append(client, run, 2).answer is not Answer.FULL


def test_forged_bytes_do_not_become_those_that_were_trimmed(client: Redis, run: str, token: int) -> None:
    """They would stay, and the budget of the stream with them."""
    append(client, run, 0)
    most = 2**53 - 1
    fields = {"f": 1, "n": 1, "b": most, "s": 0, "p": 1, "i": 7, "q": 0}
    forged = client.xadd(keys.experience(run), fields)
    client.hset(keys.counts(run), "appended_bytes", most)
    stream.trim(client, run, token, forged)
    assert runs.state(client, run).trimmed_bytes == 0
    client.xdel(keys.experience(run), forged)


@pytest.mark.parametrize("forged", [3, 10**6])
def test_forged_counts_are_set_right_while_entries_wait(
    client: Redis, run: str, token: int, forged: int
) -> None:
    """Fast players never let a learner read all; what appends counted tells the difference."""
    names = ("appended_fragments", "appended_steps", "appended_bytes")

    def counts() -> tuple[int, ...]:
        state = runs.state(client, run)
        return state.appended_fragments, state.appended_steps, state.appended_bytes

    def correct(number: int) -> bool:
        """Whether a learner that has read so many entries changes the counts."""
        taken = entries[:number]
        sizes = sum(entry.count(b"s") for entry in taken)
        counted = stream.Counted(taken[-1].entry_id, number, 10 * number, sizes, taken[-1].counted)
        return stream.correct_counts(client, run, token, counted)

    for seq in range(3):
        append(client, run, seq)
    client.hset(keys.counts(run), mapping=dict.fromkeys(names, forged))
    for seq in range(3, 6):
        append(client, run, seq)
    entries = stream.read(client, run, b"0-0", count=10)
    right = (6, 60, sum(entry.count(b"s") for entry in entries))
    assert not correct(3), "what was appended before says nothing of the counts"
    assert correct(4) and counts() == right
    assert not correct(4) and not correct(5) and counts() == right, "the same difference counts once"
    append(client, run, 6)
    entries += stream.read(client, run, entries[-1].entry_id, count=10)
    assert not correct(7) and counts()[:2] == (7, 70)
    client.hset(keys.counts(run), mapping=dict.fromkeys(names, forged))
    assert correct(7) and counts()[:2] == (7, 70)


@pytest.mark.parametrize("forged", [-(2**52), 2**52])
@pytest.mark.parametrize("is_known", [False, True])
def test_counts_stay_within_what_can_be_while_entries_wait(
    client: Redis, run: str, token: int, forged: int, is_known: bool
) -> None:
    """Whether the counts are forged or, `is_known`, what an entry says that its append counted."""
    for seq in range(3):
        append(client, run, seq)
    first, *_ = stream.read(client, run, b"0-0", count=1)
    size, by_append = first.count(b"s"), first.counted
    if is_known:
        by_append = (-forged,) * 3
    else:
        names = ("appended_fragments", "appended_steps", "appended_bytes")
        client.hset(keys.counts(run), mapping=dict.fromkeys(names, forged))
    counted = stream.Counted(first.entry_id, 1, 10, size, by_append if is_known else ())
    assert stream.correct_counts(client, run, token, counted, most_steps=50)
    time.sleep(0.002)  # what is appended in the same millisecond counts as before
    state = runs.state(client, run)
    assert (state.appended_steps, state.appended_bytes) == (50 if forged > 0 else 10, size)
    assert state.appended_fragments >= 1 and append(client, run, 3).answer is not Answer.FULL
    assert not stream.correct_counts(client, run, token, counted, most_steps=60)
    if forged < 0:
        entries = stream.read(client, run, b"0-0", count=10)
        sizes = sum(entry.count(b"s") for entry in entries)
        counted = stream.Counted(entries[-1].entry_id, 4, 40, sizes, entries[-1].counted)
        append(client, run, 4)
        assert stream.correct_counts(client, run, token, counted)
        state = runs.state(client, run)
        assert (state.appended_fragments, state.appended_steps) == (5, 50)


def test_a_large_entry_behind_others_is_not_looked_at(client: Redis, run: str, token: int) -> None:
    for seq in range(2):
        append(client, run, seq)
    client.xadd(keys.experience(run), {str(number): "" for number in range(1_000_000)})
    first, *_ = stream.read(client, run, b"0-0", count=1)
    client.config_set("slowlog-log-slower-than", 50_000)

    def is_fast() -> bool:
        client.slowlog_reset()
        stream.correct_counts(client, run, token, stream.Counted(first.entry_id, 1, 10, first.count(b"s")))
        return client.slowlog_len() == 0

    assert any(is_fast() for _ in range(5))  # on a busy machine too


def test_a_first_step_without_a_time_gets_the_runs(client: Redis, run: str, token: int) -> None:
    """Whoever raised the count of fragments before it kept the append from noting one."""
    client.hset(keys.counts(run), "appended_fragments", 7)
    append(client, run, 0)
    assert runs.state(client, run).first_step_s == 0
    stream.correct_counts(client, run, token, stream.Counted(b"0-0", 0, 0, 0))
    assert runs.state(client, run).first_step_s == 0
    [entry] = stream.read(client, run, b"0-0", count=1)
    stream.correct_counts(client, run, token, stream.Counted(entry.entry_id, 1, 10, 100))
    state = runs.state(client, run)
    assert state.first_step_s == state.created_s > 0


def test_the_first_append_dates_the_first_step_before_its_play(client: Redis, run: str) -> None:
    before_ms = runs.server_ms(client)
    append(client, run, 0, played_ms=250)
    first_ms = runs.state(client, run).first_step_s * 1e3
    assert -251 <= first_ms - before_ms <= -249 + 1000
    append(client, run, 1)
    assert runs.state(client, run).first_step_s * 1e3 == first_ms


def test_waiting_ends_with_the_next_allowance(client: Redis, run: str, token: int) -> None:
    known = append(client, run, 0).allowance_id
    assert not stream.await_allowance(client, run, known, block_ms=20)
    stream.allow(client, run, token, 50, updates=3)
    assert stream.await_allowance(client, run, known, block_ms=20)
    assert stream.remaining(client, run).remaining_steps == 40
    assert client.xlen(keys.allowance(run)) == 1


@pytest.mark.parametrize("entry_id", [b"5-3", b"5-0", b"1-0", b"0-1"])
def test_before_makes_the_entry_the_next_one_read(client: Redis, run: str, entry_id: bytes) -> None:
    client.xadd(keys.experience(run), {"h": "x"}, id=entry_id)
    found = stream.read(client, run, stream.before(entry_id), count=5)
    assert [entry.entry_id for entry in found] == [entry_id]
    assert stream.read(client, run, entry_id, count=5) == []
