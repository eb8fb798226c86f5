"""The store against a real server: the single-call append, the fence, publication, checkpoints, evaluations."""

from __future__ import annotations

import numpy as np
import pytest
from redis import Redis
from support.store import SPACES, append, make_config, make_run, take

from ddrl.store import checkpoints, keys, metrics, runs, stream, weights, workers
from ddrl.store import leases as lease
from ddrl.store.connection import StoreError
from ddrl.store.stream import Answer


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return make_run(client)


def test_a_run_is_created_active_and_found_by_prefix(client: Redis, run: str) -> None:
    assert runs.resolve(client, run[:6]) == run == runs.resolve(client, "last")
    assert runs.state(client, run).status == "active"
    assert runs.config(client, run) == make_config()
    assert runs.spaces(client, run) == SPACES
    with pytest.raises(runs.UnknownRunError, match=f"run nope: not on this server; the newest is {run}"):
        runs.resolve(client, "nope")


def test_a_holder_whom_an_older_server_has_forgotten_is_no_holder_and_its_token_is_nobodys(
    client: Redis, run: str
) -> None:
    before = client.hgetall(keys.state(run))
    token = take(client, run)
    client.delete(keys.state(run), keys.lease(run))
    client.hset(keys.state(run), mapping=before)
    for write in (
        lambda: lease.renew(client, run, token),
        lambda: runs.set_status(client, run, "failed", "", token=token),
    ):
        with pytest.raises(lease.RunGoneError, match="or older"):
            write()
    again = take(client, run)
    assert again != token and again >> 16 == token >> 16
    with pytest.raises((lease.RunGoneError, lease.LeaseLostError)):
        lease.renew(client, run, token)
    assert runs.status(client, run) == "active"


def test_append_counts_cumulatively_and_answers_by_the_allowance(client: Redis, run: str) -> None:
    assert append(client, run, 0).answer is Answer.WAIT  # nothing is allowed yet
    token = take(client, run)
    stream.allow(client, run, token, 35, updates=0)
    second, third, fourth = (append(client, run, seq) for seq in (1, 2, 3))
    assert [second.answer, third.answer, fourth.answer] == [Answer.GO, Answer.GO, Answer.WAIT]
    assert (second.remaining_steps, fourth.remaining_steps) == (15, -5)
    entries = stream.read(client, run, b"0-0", count=10)
    assert [(entry.count(b"f"), entry.count(b"n")) for entry in entries] == [
        (1, 10),
        (2, 20),
        (3, 30),
        (4, 40),
    ]
    state = runs.state(client, run)
    assert (state.appended_fragments, state.appended_steps) == (4, 40)


def test_an_append_stores_the_returns_of_finished_episodes(client: Redis, run: str) -> None:
    append(client, run, 0, episode_returns=(1.5, -2.0))
    append(client, run, 1)
    rows, _ = stream.episodes(client, run)
    assert [row["returns"] for row in rows] == [[1.5, -2.0]]


def test_a_repeated_append_writes_nothing_and_answers_the_same(client: Redis, run: str) -> None:
    stream.allow(client, run, take(client, run), 1000, updates=0)
    first, again = append(client, run, 0), append(client, run, 0)
    assert first == again
    assert append(client, run, 1).answer is Answer.GO
    assert append(client, run, 0).answer is Answer.GO  # older ones are known too
    assert append(client, run, 0, incarnation=8).answer is Answer.GO  # another process: not a repetition
    state = runs.state(client, run)
    assert (state.appended_fragments, state.duplicates) == (3, 2)
    assert client.xlen(keys.experience(run)) == 3


def test_append_yields_when_paused_and_is_refused_when_ended_or_gone(client: Redis, run: str) -> None:
    assert runs.set_status(client, run, "paused", "by test")
    assert append(client, run, 0).answer is Answer.YIELD
    assert runs.state(client, run).appended_fragments == 1  # what is in flight is still accepted
    assert runs.set_status(client, run, "active", "by test") and runs.set_status(
        client, run, "stopped", "by test"
    )
    assert append(client, run, 1).answer is Answer.STOPPED
    assert append(client, "gone-0101-000000-0000", 0).answer is Answer.STOPPED
    assert not client.exists(keys.experience("gone-0101-000000-0000"))
    assert runs.state(client, run).appended_fragments == 1


def test_append_is_refused_at_the_byte_budget_until_a_trim(client: Redis) -> None:
    run = runs.create(client, make_config(max_bytes=65536), SPACES)
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


def test_trimming_everything_leaves_no_live_bytes(client: Redis, run: str) -> None:
    token = take(client, run)
    append(client, run, 0)
    stream.trim(client, run, token, b"99999999999999-0")
    assert runs.state(client, run).live_bytes == 0


def test_the_first_append_dates_the_first_step_before_its_play(client: Redis, run: str) -> None:
    before_ms = runs.server_ms(client)
    append(client, run, 0, played_ms=250)
    first_ms = runs.state(client, run).first_step_s * 1e3
    assert -251 <= first_ms - before_ms <= -249 + 1000
    append(client, run, 1)
    assert runs.state(client, run).first_step_s * 1e3 == first_ms


def test_waiting_ends_with_the_next_word_of_the_learner(client: Redis, run: str) -> None:
    token = take(client, run)
    word = append(client, run, 0)
    assert not stream.await_allowance(client, run, word.allowance_id, block_ms=20)
    stream.allow(client, run, token, 50, updates=3)
    assert stream.await_allowance(client, run, word.allowance_id, block_ms=20)
    assert stream.remaining(client, run).remaining_steps == 40
    assert client.xlen(keys.allowance(run)) == 1


@pytest.mark.parametrize("entry_id", [b"5-3", b"5-0", b"1-0", b"0-1"])
def test_before_makes_the_entry_the_next_one_read(client: Redis, run: str, entry_id: bytes) -> None:
    client.xadd(keys.experience(run), {"h": "x"}, id=entry_id)
    assert [entry.entry_id for entry in stream.read(client, run, stream.before(entry_id), count=5)] == [
        entry_id
    ]
    assert stream.read(client, run, entry_id, count=5) == []


def test_only_one_learner_holds_a_run_and_a_replaced_one_writes_nothing(client: Redis, run: str) -> None:
    old = take(client, run)
    assert lease.acquire(client, run, host="there", folder="/") is None
    client.delete(keys.lease(run))  # expired
    lease.renew(client, run, old)  # nobody took it: goes on
    client.delete(keys.lease(run))
    new = take(client, run)
    assert new > old
    attempts = [
        lambda: lease.renew(client, run, old),
        lambda: stream.allow(client, run, old, 10, updates=0),
        lambda: stream.trim(client, run, old, b"0-1"),
        lambda: stream.refuse(client, run, old, b"1-0", b"", "why"),
        lambda: weights.publish(client, run, old, version=0, blob=b"x", allowance=1, updates=0),
        lambda: weights.mark_best(client, run, old, 0, 1.0),
        lambda: checkpoints.save(client, run, old, b"x", {}),
        lambda: runs.note_evaluation(client, run, old, {}),
    ]
    for attempt in attempts:
        with pytest.raises(lease.LeaseLostError):
            attempt()
    assert weights.index(client, run).latest == -1 and checkpoints.load(client, run) is None
    lease.release(client, run, old)  # must not free the other's
    assert client.exists(keys.lease(run))
    lease.release(client, run, new)
    assert not client.exists(keys.lease(run))


def test_publication_moves_pointer_allowance_and_drops_in_one_call(client: Redis, run: str) -> None:
    token = take(client, run)
    for version in range(4):
        drop = (0,) if version == 3 else ()
        weights.publish(
            client,
            run,
            token,
            version=version,
            blob=b"w%d" % version,
            allowance=version,
            updates=9,
            drop=drop,
        )
    index = weights.index(client, run)
    assert index.latest == 3 and sorted(index.sizes) == [1, 2, 3]
    assert weights.get(client, run, 0) is None and weights.get(client, run, 3) == b"w3"
    assert append(client, run, 0).version == 3
    assert runs.state(client, run).updates == 9


def test_superseded_spares_newest_spaced_best_and_pinned() -> None:
    stored = weights.WeightsIndex(latest=30, best=7, best_return=1.0, sizes={v: 10 for v in range(31)})
    drop = weights.superseded(stored, keep_last=3, keep_every=10, max_bytes=1000, pinned=frozenset({13}))
    kept = set(stored.sizes) - set(drop)
    assert kept == {30, 29, 28, 20, 10, 0, 7, 13}
    tight = weights.superseded(stored, keep_last=3, keep_every=10, max_bytes=20, pinned=frozenset({13}))
    assert set(stored.sizes) - set(tight) == {30, 29, 28, 20, 10, 7, 13}  # the oldest of the spaced ones goes


def test_checkpoints_come_back_whole_in_parts_and_replace_each_other(client: Redis, run: str) -> None:
    token = take(client, run)
    large = np.random.default_rng(0).bytes(checkpoints.PART_BYTES * 2 + 5)
    checkpoints.save(client, run, token, large, {"updates": 1})
    assert checkpoints.load(client, run) == (large, {"updates": 1})
    parts = [client.strlen(key) for key in client.scan_iter(match=keys.of_run(run, "checkpoint:*"))]
    assert sorted(parts) == [5, checkpoints.PART_BYTES, checkpoints.PART_BYTES]
    checkpoints.save(client, run, token, b"small", {"updates": 2})
    assert checkpoints.load(client, run) == (b"small", {"updates": 2})
    assert len(list(client.scan_iter(match=keys.of_run(run, "checkpoint:*")))) == 1
    client.set(keys.checkpoint_part(run, token, 1, 0), b"smal1")
    with pytest.raises(StoreError, match="checkpoint 1 is damaged"):
        checkpoints.load(client, run)


def test_status_changes_only_along_its_arrows(client: Redis, run: str) -> None:
    assert not runs.set_status(client, run, "active", "no change")
    assert runs.set_status(client, run, "paused", "")
    assert runs.set_status(client, run, "paused", "")  # the same word: a command that was sent again
    assert not runs.set_status(client, run, "paused", "again")
    assert runs.set_status(client, run, "active", "") and runs.set_status(client, run, "solved", "yes")
    assert not runs.set_status(client, run, "stopped", "too late") and not runs.set_status(
        client, run, "active", ""
    )
    with pytest.raises(StoreError, match="is solved"):
        runs.reactivate(client, run)
    assert runs.state(client, run).ended_s > 0
    assert [row["event"] for row in runs.journal(client, run)] == ["created", "paused", "active", "solved"]


def test_a_stopped_run_goes_on_with_more_time(client: Redis, run: str) -> None:
    checkpoints.save(client, run, take(client, run), b"", {"elapsed_s": 40.0})
    runs.set_status(client, run, "time", "time limit of 40 s")
    with pytest.raises(StoreError, match="give it more, such as --time 10m"):
        runs.reactivate(client, run)
    runs.reactivate(client, run, more_time_s=60.0)
    assert runs.state(client, run).status == "active" and runs.state(client, run).ended_s == 0
    assert runs.config(client, run).stop.time == 100.0


def test_a_run_that_reached_a_count_cannot_go_on(client: Redis, run: str) -> None:
    runs.set_status(client, run, "time", "limit of 500 updates")
    with pytest.raises(StoreError, match="reached its limit of 500 updates; start another one"):
        runs.reactivate(client, run, more_time_s=60.0)


def test_parts_of_a_checkpoint_that_was_never_finished_are_swept(client: Redis, run: str) -> None:
    token = take(client, run)
    checkpoints.save(client, run, token, b"whole", {"updates": 1})
    client.set(keys.checkpoint_part(run, token - 1, 7, 0), b"half")
    assert checkpoints.sweep(client, run, token) == 1 and checkpoints.sweep(client, run, token) == 0
    assert checkpoints.load(client, run) == (b"whole", {"updates": 1})


def test_a_replaced_learner_cannot_end_the_run_but_the_operator_can(client: Redis, run: str) -> None:
    old = take(client, run)
    client.delete(keys.lease(run))
    new = take(client, run)
    with pytest.raises(lease.LeaseLostError):
        runs.set_status(client, run, "time", "too late", token=old)
    assert runs.state(client, run).status == "active"
    assert runs.set_status(client, run, "time", "in time", token=new)
    assert runs.set_status(client, run, "active", "operator") and runs.set_status(
        client, run, "stopped", "operator"
    )


def test_delete_removes_every_key_of_an_ended_run_only(client: Redis, run: str) -> None:
    other = runs.create(client, make_config(), SPACES)
    append(client, run, 0)
    with pytest.raises(StoreError, match="is active; stop it first"):
        runs.delete(client, run)
    runs.set_status(client, run, "stopped", "")
    assert runs.delete(client, run) >= 5
    assert runs.names(client) == [other]
    assert not list(client.scan_iter(match=keys.run_pattern(run)))
    assert runs.state(client, other).status == "active"


def test_heartbeats_list_the_living(client: Redis) -> None:
    first = workers.Heartbeat("a@h", "h", 1, 4, ("ddrl.rollout", "ddrl.evaluate"), {"ddrl": "0"})
    second = workers.Heartbeat("b@h", "h", 2, 2, ("ddrl.evaluate",), {})
    workers.beat(client, first), workers.beat(client, second)
    assert workers.alive(client) == [first, second]
    assert [heartbeat.num_players for heartbeat in (first, second)] == [4, 0]
    assert 0 < client.ttl(keys.worker("a@h:h:1")) <= workers.TTL_S
    workers.leave(client, first)
    assert workers.alive(client) == [second]
    client.delete(keys.worker("b@h:h:2"))  # as the server does where no word comes
    assert workers.alive(client) == [] and not client.exists(keys.WORKERS)
    workers.beat(client, second)  # it was only late
    assert workers.alive(client) == [second]
    client.sadd(keys.WORKERS, b"\xff")
    assert workers.alive(client) == [second] and client.scard(keys.WORKERS) == 1


def test_metrics_rows_are_read_from_a_cursor(client: Redis, run: str) -> None:
    token = take(client, run)
    metrics.add(client, run, token, {"updates": 1.0}), metrics.add(client, run, token, {"updates": 2.0})
    rows, cursor = metrics.read(client, run)
    assert [row["updates"] for row in rows] == [1.0, 2.0] and metrics.last(client, run) == {"updates": 2.0}
    assert metrics.read(client, run, cursor)[0] == []
