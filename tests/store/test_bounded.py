"""Keys that a worker fills with more than fits: a part is read, and what ddrl writes next holds again."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from support.private_server import PrivateServer
from support.store import append, end, fold_now, heartbeat, make_run, take

from ddrl.runs import prune
from ddrl.store import (
    bounded,
    capped_streams,
    checkpoints,
    connection,
    evaluations,
    keys,
    ledger,
    logs,
    runs,
    segments,
    stream,
    workers,
)
from ddrl.types import EvaluationResult

ONE = evaluations.Evaluation(version=7, first_seed=100, num_episodes=2, purpose="request")
RESULT = EvaluationResult((1.0, 3.0), (4, 5))
SOME = 2_000
PART = 5_000  # written by one script


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller bounds, so that the tests are quick."""
    monkeypatch.setattr(bounded, "MOST", SOME)
    monkeypatch.setattr(bounded, "MOST_PARTS", 3 * SOME)
    monkeypatch.setattr(bounded, "MOST_BYTES", 20_000)
    monkeypatch.setattr(bounded, "LONGEST", 10_000)
    monkeypatch.setattr(bounded, "LONGEST_ENTRY", 10_000)


def flood(client: Redis, key: str, command: str, num: int = 60_000) -> None:
    """Let the server itself write `num` members or entries, in parts that take less than a second."""
    for first in range(1, num + 1, PART):
        last = min(num, first + PART - 1)
        client.eval(f"for i = {first}, {last} do redis.call({command}) end", 1, key)


def test_of_a_flood_of_entries_the_newest_are_read_and_one_more_trims_it(client: Redis, run: str) -> None:
    sent: list[str] = []
    opened = evaluations.OpenEvaluations(client, run, send=sent.append, timeout_s=60.0)
    opened.open([ONE])
    key = keys.evaluations(run, sent[0].partition("/")[0])
    for name in (key, keys.journal(run), keys.logs(run), keys.episodes(run)):
        flood(client, name, "'XADD', KEYS[1], '*', 'x', ''")
    entries, last = bounded.newest(client, key, b"0-0", b"+")
    assert len(entries) == SOME and last == entries[-1][0]
    assert bounded.newest(client, key, last, b"+") == ([], last)
    assert evaluations.finish(client, run, sent[0], ONE, RESULT)
    assert [row["return_mean"] for row in opened.poll()] == [2.0] and not opened.pending
    runs.set_status(client, run, "paused", "test")
    logs.add(client, run, "worker a", "ERROR", "a line")
    assert [line["event"] for line in runs.journal(client, run)[0]] == ["paused"]
    assert [line["text"] for line in logs.read(client, run)[0]] == ["a line"]
    assert max(client.xlen(name) for name in (key, keys.journal(run), keys.logs(run))) < 12_000
    assert stream.episodes(client, run)[0] == []


def test_scripts_have_bounds_of_their_own_and_no_command_of_the_callers(
    server: PrivateServer, run: str
) -> None:
    client = Redis(unix_socket_path=str(server.socket), socket_timeout=60.0)  # the bound is of many entries
    key = keys.refusals(run)
    client.hset(key, mapping={"0": "x", "x": "x", "COUNT": ""})
    with pytest.raises(ResponseError, match="WRONGTYPE"):  # HMGET would be a loop without an end
        connection.call(client, "read_all", [key], ["HMGET", 1000, 1000, 1000])
    flood(client, keys.episodes(run), "'XADD', KEYS[1], '*', 'x', ''", 120_000)
    for limits in (["inf"] * 3, ["nan"] * 3, [10**9] * 3, ["x"] * 3):
        _, entries = connection.call(client, "read_newest", [keys.episodes(run)], [b"0-0", b"+", *limits])
        assert len(entries) == 100_000
    client.close()


def test_long_heartbeats_and_lines_of_logs_are_cut(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_PAGE", 2)
    monkeypatch.setattr(workers, "_MOST_BYTES", 1_000)
    for number in range(9):
        workers.beat(client, workers.Heartbeat(f"{number}", "h", 1, 1, (), {}, pids=(0,) * 200))
    assert [one.node for one in workers.alive(client)] == ["0", "1"]
    capped_streams.add(
        client, run, keys.logs(run), length=9, source="s" * 3_000, level="x" * 3_000, text="t" * 3_000
    )
    [line] = logs.read(client, run)[0]
    assert [len(line[name]) for name in ("source", "level", "text")] == [100, 100, 2_000]


def test_a_flood_of_fields_is_deleted_and_of_long_ones_a_part_is_read(client: Redis, run: str) -> None:
    """Else it would delay all that looks at it until as many looks have cleared it."""
    for key in (keys.playing(run), keys.refusals(run), keys.producers(run)):
        flood(client, key, "'HSET', KEYS[1], i, '{}'", num=SOME)
        assert len(bounded.fields(client, key)) == SOME
        flood(client, key, "'HSET', KEYS[1], i, '{}'")
        assert bounded.fields(client, key) == {} and not client.exists(key)
    flood(client, keys.playing(run), "'HSET', KEYS[1], i, '{}'", num=SOME)
    assert segments.playing(client, run) == {} and not client.exists(keys.playing(run)), "none can be read"
    flood(client, keys.WORKERS, "'SADD', KEYS[1], i")
    worker = heartbeat("a@h", 1)
    workers.beat(client, worker)
    assert workers.alive(client) == []
    workers.beat(client, worker)
    assert [one.node for one in workers.alive(client)] == ["a@h"]
    client.hset("long", mapping={"a": "x" * 9_000, "b": "x" * 10_000, "c": "x" * 9_000, "d": "x" * 9_000})
    assert len(bounded.fields(client, "long")) == 2 and not client.hexists("long", "b")
    for size in (9_000, 10_000, 9_000, 9_000):
        client.xadd("entries", {"x": "y" * size})
    client.xadd("entries", {str(n): "" for n in range(101)})
    entries, last = bounded.newest(client, "entries", b"0-0", b"+")
    assert [len(fields[b"x"]) for _, fields in entries] == [9_000] * 2 and last > entries[-1][0]
    client.delete("long", "entries")


def test_keys_with_longer_names_than_ddrls_are_deleted_where_names_are_read(
    client: Redis, run: str, token: int
) -> None:
    """Else one reply would hold as much as a worker likes."""
    names = [
        keys.of_run(run, f"{part}:" + "x" * 1025) for part in ("checkpoint:1}:players", "players", "counts")
    ]
    for name in names:
        client.hset(name, "x", "")
    assert checkpoints.sweep(client, run, token) == 0
    assert [client.exists(name) for name in names] == [0, 1, 1]
    client.delete(keys.lease(run))
    end(client, run)
    client.hset(keys.of_run(run, "players:" + "x" * 900), "x", "")
    assert runs.delete(client, run) > 2 and {*client.scan_iter("ddrl:{*")} == set()
    client.hset(names[1], "x", "")
    assert prune.delete_strays(client) == (0, 0) and not client.exists(names[1])


def test_of_the_journal_the_beginning_of_each_text_is_read(client: Redis, run: str) -> None:
    client.xadd(keys.journal(run), {"event": "noted", "reason": "\n" * 5_000})
    assert len(runs.journal(client, run)[0][-1]["reason"]) == runs.LONGEST_FIELD


def test_a_command_gets_its_results_though_its_stream_has_no_ids_left(client: Redis, run: str) -> None:
    sent: list[str] = []
    opened = evaluations.OpenEvaluations(client, run, send=sent.append, timeout_s=60.0)
    opened.open([ONE])
    late = f"{2**64 - 1}-{2**64 - 1}"
    client.xadd(keys.evaluations(run, sent[0].partition("/")[0]), {"x": ""}, id=late)
    assert evaluations.take(client, run, sent[0], "a") is not None
    assert not evaluations.finish(client, run, sent[0], ONE, RESULT)
    assert opened.poll() == []
    assert evaluations.finish(client, run, sent[0], ONE, RESULT)
    assert len(opened.poll()) == 1


def test_a_value_that_is_too_long_is_as_if_it_were_missing(client: Redis, run: str) -> None:
    client.hset(
        keys.counts(run), mapping={"error": "e" * 10_001, "crashes": 3, "appended_steps": "1" * 10_001}
    )
    state = runs.state(client, run)
    assert (state.error, state.crashes, state.appended_steps) == ("", 3, 0)


def test_all_forged_producers_are_folded_at_once(client: Redis, run: str, token: int) -> None:
    flood(client, keys.producers(run), "'HSET', KEYS[1], i, '{}'", num=SOME - 1)
    assert fold_now(client, run, token, {}) == SOME - 1
    assert client.hkeys(keys.producers(run)) == [b"%d" % ledger.ENDED]


def test_streams_with_late_ids_keep_the_newest_entries(client: Redis, run: str, token: int) -> None:
    flood(client, keys.journal(run), "'XADD', KEYS[1], '*', 'x', i", num=150_000)
    client.xadd(keys.journal(run), {"event": "late"}, id="9999999999999-1")
    stream.lower_ids(client, run, token, b"0-0", b"9000000000000-0")
    assert client.xlen(keys.journal(run)) == stream.EPISODES_LENGTH
    assert [line["event"] for line in runs.journal(client, run)[0]] == ["late"]


def test_a_call_looks_at_few_entries_however_short_they_are(client: Redis, run: str) -> None:
    """Else the server stands still, and Lua holds forty times what the stream takes."""
    flood(client, keys.experience(run), "'XADD', KEYS[1], '*', '', ''")
    args = [b"0-0", b"+", "1e300", "1e300", *stream.APPENDED]  # whoever calls a script may give any bound
    assert len(connection.call(client, "read_short", [keys.experience(run)], args)) < 2 * 12_000
    assert ledger.audit(client, run).unknown == 60_000


def calls_of(client: Redis, command: str) -> int:
    info: Any = client.info("commandstats")
    return int(info.get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_a_stream_that_takes_seconds_to_read_is_cut_before_and_looked_at_no_more(
    client: Redis, run: str, token: int
) -> None:
    """An entry of a worker's may have millions of fields; older lines are lost with it, later ones are not."""
    key = keys.journal(run)
    runs.note(client, run, "before", "junk")
    many = "local all = {} for i = 1, 7000 do all[i] = 'a' end "
    many += "for i = 1, 60 do redis.call('XADD', KEYS[1], '*', unpack(all)) end"

    def write_junk() -> None:
        for _ in range(15):
            client.eval(many, 1, key)

    write_junk()
    assert client.memory_usage(key, samples=0) > 2**24
    stream.lower_ids(client, run, token, b"0-0", capped_streams.latest(client))
    assert client.memory_usage(key, samples=0) <= 2**24
    write_junk()
    runs.note(client, run, "after", "junk")
    assert [line["event"] for line in runs.journal(client, run)[0]] == ["after"]
    assert client.memory_usage(key, samples=0) <= 2**24
    before = calls_of(client, "xinfo|stream")
    stream.lower_ids(client, run, token, b"0-0", capped_streams.latest(client))
    _, last = capped_streams.read(client, key)
    assert capped_streams.read(client, key, last) == ([], last)
    assert calls_of(client, "xinfo|stream") - before <= 1, "only of the empty stream of experience, if any"


def test_of_many_long_lines_the_newer_half_stays(client: Redis, run: str) -> None:
    key = keys.logs(run)
    flood(client, key, "'XADD', KEYS[1], '*', 'text', string.rep('x', 20000) .. i", num=900)
    assert client.memory_usage(key, samples=0) > 2**24
    bounded.newest(client, key, b"0-0", b"+")
    assert client.xlen(key) == 450 and client.xrevrange(key, count=1)[0][1][b"text"].endswith(b"x900")


def test_all_results_of_many_episodes_with_metrics_stay(client: Redis, run: str, token: int) -> None:
    opened = evaluations.OpenEvaluations(client, run, send=lambda _: None, timeout_s=60.0, token=token)
    draw = random.Random(1)
    columns = [tuple(draw.gauss(200, 40) for _ in range(100)) for _ in range(6)]
    result = EvaluationResult(columns[0], (1000,) * 100, dict(zip("abcde", columns[1:], strict=True)))
    for version in range(1_500):
        one = evaluations.Evaluation(version=version, first_seed=1, num_episodes=100, purpose="watch")
        opened.store(one, result)
    stream.lower_ids(client, run, token, b"0-0", capped_streams.latest(client))
    assert client.xlen(keys.evaluations(run)) == 1_500


def test_readers_go_on_after_a_late_id_was_taken_away(client: Redis, run: str, token: int) -> None:
    """They had followed an entry of this evening; then one of next year's trimmed the stream."""
    seconds, _ = client.time()
    sent: list[str] = []
    opened = evaluations.OpenEvaluations(client, run, token=token, send=sent.append, timeout_s=60.0)
    client.xadd(keys.evaluations(run), {"x": "y"}, id=f"{seconds + 80_000}000-0")
    assert opened.poll() == []
    client.xadd(keys.evaluations(run), {"x": "y"}, id="9999999999999-1", maxlen=0)
    stream.lower_ids(client, run, token, b"0-0", b"%d000-0" % (seconds + 86_400))
    assert opened.poll() == []
    opened.open([ONE])
    assert evaluations.finish(client, run, sent[0], ONE, RESULT)
    assert [row["version"] for row in opened.poll()] == [ONE.version] and not opened.pending


MANY = ", ".join(f"'{number}', ''" for number in range(101))  # fields and values that no append writes


def test_of_many_entries_with_many_fields_a_call_deletes_as_many_as_it_has_time_for(
    client: Redis, run: str, token: int
) -> None:
    """Else one call would delete all, for minutes, in which the server answers nobody."""
    key, counted = keys.experience(run), stream.Counted(b"0-0", 1, 1, 100)
    calls: list[Callable[[], object]] = [
        lambda: connection.call(client, "newest_id", [key]),
        lambda: stream.correct_counts(client, run, token, counted),
        lambda: connection.call(client, "read_short", [key], [b"0-0", b"+", 10**9, 19, "f"]),
        lambda: stream.drop_next(client, run, token, 10**6, b"0-0"),
        lambda: stream.trim(client, run, token, b"0-1"),
    ]
    for look in calls:
        client.delete(key)
        flood(client, key, f"'XADD', KEYS[1], '*', {MANY}", num=4_000)
        look()
        assert 1_000 < client.xlen(key) < 4_000
    stream.lower_ids(client, run, token, b"0-0", capped_streams.latest(client))
    for _ in range(4):
        first = connection.call(client, "newest_id", [key])
    assert first is None and client.xlen(key) == 0


def test_an_entry_that_takes_seconds_to_look_at_is_looked_at_once(client: Redis, run: str) -> None:
    key, seconds = keys.evaluations(run), client.time()[0]
    late = b"%d-0" % (1000 * (seconds + 40_000))
    client.xadd(key, {str(number): "" for number in range(50_000)}, id=late)
    client.config_set("slowlog-log-slower-than", 0)
    assert bounded.newest(client, key, b"0-0", b"+") == ([], late) and client.xlen(key) == 0
    client.slowlog_reset()
    assert bounded.newest(client, key, late, b"+") == ([], late)
    assert not any(b"XINFO" in row["command"].upper() for row in client.slowlog_get(100))


@pytest.fixture
def peak(make_server: Callable[..., PrivateServer]) -> Iterator[tuple[Redis, Callable[[], int]]]:
    """A client, and what measures by how many bytes the server's memory has grown at most since the last call."""
    server = make_server()
    assert server.process is not None
    folder, before = Path("/proc") / str(server.process.pid), 0

    def grown() -> int:
        nonlocal before
        peak = re.search(r"VmHWM:\s*(\d+)", (folder / "status").read_text())
        (folder / "clear_refs").write_text("5")
        now = re.search(r"VmRSS:\s*(\d+)", (folder / "status").read_text())
        assert peak is not None and now is not None
        before, most = int(now[1]) << 10, (int(peak[1]) << 10) - before
        return most

    yield server.client, grown


LONG = 32 * 1024**2  # a script may hold some copies of one entry, and never all eight


def test_a_script_holds_one_long_entry_or_member_at_a_time(peak: tuple[Redis, Callable[[], int]]) -> None:
    """No setting of the server bounds what its scripts hold; it would end, and again after each start."""
    client, grown = peak
    run = make_run(client)
    token = take(client, run)
    for number in range(8):
        client.xadd(keys.experience(run), {"x": bytes(LONG)}, id=f"{9_000_000_000_000 + number}-0")
    grown()
    assert runs.state(client, run).status == "active" and not ledger.audit(client, run).accounts
    assert grown() < 5 * LONG
    stream.lower_ids(client, run, token, b"0-0", capped_streams.latest(client))
    assert grown() < 5 * LONG
    entries = client.xrange(keys.experience(run))
    assert [len(fields[b"x"]) for _, fields in entries] == [LONG] * 8
    assert entries[-1][0] < capped_streams.latest(client)
    client.delete(keys.experience(run))
    for number in range(256):
        client.hset(keys.producers(run), f"{number}", bytes(LONG // 32))
    grown()
    assert bounded.fields(client, keys.producers(run)) == {} and not client.exists(keys.producers(run))
    assert grown() < 5 * LONG


def test_a_count_that_is_too_long_is_read_once(client: Redis, run: str) -> None:
    token = take(client, run)
    long = dict.fromkeys(("appended_steps", "claim", "away_ms", "first_step_ms"), "1" * 1_000_000)
    client.hset(keys.counts(run), mapping=long)
    readers: list[tuple[str, Callable[[], object]]] = [
        ("away_ms", lambda: segments.choose(client, segments.Process("n", 1), ["ddrl.rollout"])),
        ("claim", lambda: append(client, run, 0)),
        (
            "first_step_ms",
            lambda: stream.correct_counts(client, run, token, stream.Counted(b"0-0", 1, 1, 100)),
        ),
    ]
    for name, read in readers:
        assert client.hstrlen(keys.counts(run), name) == 1_000_000
        read()
        assert client.hstrlen(keys.counts(run), name) < 64
