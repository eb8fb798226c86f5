"""What someone who has the workers' password can write: no learner, no worker and no run ends of it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.commands import call, call_json
from support.learners import Learning, Run, fields_of, pick_config, playing, training, until
from support.processes import Processes
from support.roles import Roles
from support.runs import target_config
from support.store import fold_now

from ddrl import celery
from ddrl.store import checkpoints, connection, keys, leases, ledger, local_checkpoints, stream
from ddrl.store.checkpoints import Counters
from ddrl.store.ledger import Producer
from ddrl.store.local_checkpoints import Snapshot
from ddrl.store.segments import Process

LARGEST = f"{2**64 - 1}-{2**64 - 1}"
JUNK = ("", "x", "nan", "-inf", "1e999", "-5", "9" * 5_000, "[]", "{}", "null", "[" * 5_000, b"\xff\xfe")
HUGE = 10**400
STEPS = 4_000

Attack = Callable[[redis.Redis, Run], object]


@pytest.fixture
def worker(roles: Roles) -> Iterator[redis.Redis]:
    with connection.connect(roles.url("worker")) as client:
        yield client


@pytest.fixture
def run(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that ends after STEPS; a test looks at it as the administrator, and its learner is the ACL's user."""
    monkeypatch.setattr(celery, "send_evaluation", lambda *_: None)
    config = target_config(
        stop={"return": None, "env_steps": STEPS},
        replay={"samples_per_insert": 2, "warmup_steps": 100, "slack_steps": 100},
        evaluation={"every_s": 3600, "near": 0},
    )
    server: Any = SimpleNamespace(client=roles.admin, url=roles.url("learner"))
    return Run(server, config)


def write_counts(value: Any) -> Attack:
    def attack(worker: redis.Redis, run: Run) -> None:
        for field in keys.COUNTS:
            worker.hset(keys.counts(run.id), field, value)

    return attack


def write_hashes(worker: redis.Redis, run: Run) -> None:
    """Junk in the hashes, under names of all kinds."""
    for key in (keys.producers, keys.playing, keys.refusals, keys.players):
        for number, value in enumerate(JUNK):
            for name in (number + 900, "-1", "-2x", "cursor", "0:0:9", b"\xff", "9" * 18):
                worker.hset(key(run.id), name, value)
    for row in (
        {"node": [], "pid": 1, "since_ms": 1},
        {"node": "n", "pid": 1, "since_ms": 1e999},
        {"node": {}},
        {"node": "\ud800", "pid": 1, "since_ms": 1},
    ):
        worker.hset(keys.playing(run.id), "p", json.dumps(row))
        worker.hset(keys.playing(run.id), str(Process("-", 1)), json.dumps(row))
    for number, value in enumerate((-HUGE, HUGE, -1)):
        fields = {"last_ms": value, "fragments": value}
        worker.hset(keys.producers(run.id), str(7_000_000 + number), json.dumps(fields))


def write_streams(worker: redis.Redis, run: Run) -> None:
    """Junk in the streams."""
    for key in (keys.experience, keys.episodes, keys.evaluations, keys.journal, keys.logs):
        for value in JUNK:
            for name in ("h", "result", "returns", "event", "row", b"\xff", "p", "f", "time_s"):
                worker.xadd(key(run.id), {name: value})
            worker.xadd(key(run.id), {"returns": value, "env_steps": value, "event": "set", "from": value})
            counts = dict.fromkeys(("f", "n", "b", "s", "p", "i", "q"), value)
            worker.xadd(key(run.id), {**counts, "h": "x"})
    for large in (10**400, 1e308, -1e15):
        row = {"version": 0, "first_seed": 0, "num_episodes": 1, "purpose": "watch", "env_steps": large}
        figures = {"returns": [large], "lengths": [1], "return_mean": large, "return_std": 0.0, "updates": 1}
        worker.xadd(keys.evaluations(run.id), {"result": json.dumps(row | figures)})
        worker.xadd(keys.evaluations(run.id), {"result": json.dumps(row | figures | {"env_steps": 1})})
        worker.xadd(keys.episodes(run.id), {"returns": json.dumps([large, -large]), "env_steps": 5})
    for value in ([math.inf], [math.nan], [HUGE], ["x"], [[1]], 1, {"a": 1}):
        for metrics in ({"length": value}, {"\x1b[2J[/a]": value}, value):
            odd = row | figures | {"returns": [1.0], "return_mean": 1.0, "env_steps": 1, "metrics": metrics}
            worker.xadd(keys.evaluations(run.id), {"result": json.dumps(odd)})
    result = row | figures | {"returns": [1.0], "return_mean": 1.0, "return_std": -1.0, "env_steps": 1}
    worker.xadd(keys.evaluations(run.id), {"result": json.dumps(result)})
    worker.xadd(keys.episodes(run.id), {"returns": json.dumps([1.0] * 10**6), "env_steps": 5})
    change = {"event": "set", "option": "algorithm.gamma", "from": "1", "to": "2", "env_steps": 5}
    long = json.dumps("W" * 400_000)  # a label that takes minutes to draw
    for odd in ({"to": '"\\ud800"'}, {"option": "$\\nope{$"}, {"to": '"$\\\\nope{$"'}, {"to": long}):
        worker.xadd(keys.journal(run.id), change | odd)


def write_late_ids(*ids: str, **options: Any) -> Attack:
    def attack(worker: redis.Redis, run: Run) -> None:
        for key in (keys.experience, keys.episodes, keys.evaluations, keys.journal, keys.logs):
            for entry_id in ids:
                worker.xadd(key(run.id), {"h": "x"}, id=entry_id, **options)

    return attack


def write_wide_entries(worker: redis.Redis, run: Run) -> None:
    """Late entries with more fields than a script can pass on."""
    for key in (keys.experience, keys.journal):
        worker.xadd(key(run.id), dict.fromkeys(range(9_000), "x"), id="9223372036854775808-0")


def drain(worker: redis.Redis, run: Run) -> None:
    """All nodes leave, for longer than they may."""
    worker.sadd(keys.draining(run.id), "-", "-")
    worker.expire(keys.draining(run.id), 10**9)


def write_heartbeats(worker: redis.Redis, run: Run) -> None:
    """A fleet of any size, and nodes that leave."""
    for number in range(20):
        name = f"n{number}:h:1"
        row = {
            "node": f"n{number}",
            "host": "h",
            "pid": 1,
            "processes": 10**15 * (-1) ** number,
            "versions": {},
        }
        worker.set(keys.worker(name), json.dumps({**row, "queues": ["ddrl.rollout"], "started_s": 1e300}))
        worker.sadd(keys.WORKERS, name, JUNK[number % len(JUNK)])
    odd = {"queues": ["ddrl.rollout"], "node": "o", "host": "h", "pid": 1, "processes": 1, "versions": {}}
    changes = (
        {"processes": -HUGE},
        {"processes": -(10**9)},
        {"started_s": -math.inf},
        {"memory_bytes": HUGE},
    )
    for number, change in enumerate(changes):
        worker.set(keys.worker(f"odd{number}"), json.dumps(odd | change))
        worker.sadd(keys.WORKERS, f"odd{number}")
    worker.sadd(keys.WORKERS, b"\xff", "")


def copy_entry(worker: redis.Redis, run: Run, **changes: Any) -> None:
    """Append a copy of the newest entry without the script."""
    [(_, fields)] = worker.xrevrange(keys.experience(run.id), count=1)
    worker.xadd(keys.experience(run.id), {**fields, **changes})


def steal_numbers(worker: redis.Redis, run: Run) -> None:
    """Entries with a producer's later numbers, and with any counts."""
    for count in (0, 1, 10**15):
        copy_entry(worker, run, q=10**6, f=count, n=count, b=count)


def claim(worker: redis.Redis, run: Run) -> None:
    """Crashes that did not happen, and claims."""
    fields = {"crashes": 10**6, "claim": 10**9, "claim_until_ms": 10**15}
    for _ in range(200):
        worker.hset(keys.counts(run.id), mapping=fields)


def change_lua(_: redis.Redis, run: Run) -> None:
    """The settings of cjson belong to the server; another program of its user changes them."""
    depth = "cjson.encode_max_depth(1) cjson.decode_max_depth(1) cjson.decode_invalid_numbers(false)"
    run.client.eval(
        f"cjson.encode_number_precision(1) cjson.encode_sparse_array(true, 1, 1) {depth} return 1", 0
    )


ATTACKS: dict[str, Attack] = {
    "counts are junk": lambda worker, run: [write_counts(value)(worker, run) for value in JUNK],
    "counts are huge": write_counts(10**15),
    "counts are zero": write_counts(0),
    "hashes hold junk": write_hashes,
    "streams hold junk": write_streams,
    "the largest id": write_late_ids(LARGEST),
    "the largest id, trimmed": write_late_ids(LARGEST, maxlen=0),
    "late ids": write_late_ids("7258118400000-0", f"9999999999998-{2**64 - 1}", f"{2**64 - 2}-0"),
    "wide entries": write_wide_entries,
    "heartbeats": write_heartbeats,
    "stolen numbers": steal_numbers,
    "claims and crashes": claim,
    "settings of Lua": change_lua,
}


@pytest.mark.parametrize(
    "attack",
    [
        *(pytest.param(attack, id=name) for name, attack in ATTACKS.items()),
        pytest.param(drain, id="all nodes leave", marks=pytest.mark.long),  # they are believed for a minute
    ],
)
def test_a_run_goes_on_to_its_end(
    roles: Roles,
    worker: redis.Redis,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Attack,
) -> None:
    learning = Learning(run, tmp_path, monkeypatch)
    with playing(roles.url("worker"), run.id, num=2):
        until(lambda: run.state.updates > 20 or learning.error, 60.0)
        attack(worker, run)
        until(lambda: not learning.thread.is_alive() or learning.error, 120.0)
    if learning.error is not None:
        raise learning.error
    assert learning.status == "time"
    assert run.state.reason == f"limit of {STEPS} env steps", run.journal
    assert (tmp_path / run.id / "summary.json").exists()
    found = ledger.audit(roles.admin, run.id)
    assert found.total("consumed") > 0 and [one for one in found.accounts.values() if one.difference] == []
    assert [line for line in roles.denied() if "ddrl-worker" not in line] == []
    monkeypatch.setenv(connection.URL_VARIABLE, roles.url("operator"))
    of_run = ([word, run.id] for word in ("status", "watch", "logs", "journal"))
    for words in (*of_run, ["runs"], ["fleet"], ["doctor"]):
        call(*words)


def test_a_stolen_number_is_refused_and_no_honest_one(roles: Roles, worker: redis.Redis, run: Run) -> None:
    run.play(100)
    learner = run.learner()
    steal_numbers(worker, run)
    run.play(100)
    copy_entry(worker, run)  # a repetition
    run.play(100)
    with training(learner):
        run.catch_up(learner)
        until(lambda: len(run.dead) == 4)
    learner.finish()
    found = ledger.audit(roles.admin, run.id)
    assert found.is_balanced and found.unknown == 4 and found.total("refused") == found.total("trimmed") == 0
    assert (
        found.total("consumed")
        == run.state.appended_fragments
        == learner.shared.ledger.fragments
        == len(run.entries)
    )
    assert learner.shared.env_steps == run.state.appended_steps
    *stolen, repeated = run.dead
    assert stolen == [b"no append wrote it"] * 3 and b"is repeated" in repeated


@pytest.mark.parametrize("number", [{}, {"q": 10**6}], ids=["repeated", "stolen"])
def test_what_an_entry_claims_to_count_is_not_believed_if_no_append_wrote_it(
    roles: Roles, worker: redis.Redis, run: Run, number: dict[str, int]
) -> None:
    """The learner has read it last, while appends wait that it has not read."""
    learner = run.learner()
    run.play(100)
    with training(learner, serves=False):
        for _ in range(3):
            copy_entry(worker, run, f=1, n=1, b=1, **number)
        run.catch_up(learner)
    run.play(100)
    before = run.state
    stream.correct_counts(roles.admin, run.id, run.token, learner.shared.counted)
    assert run.state.appended_fragments == before.appended_fragments
    assert run.state.appended_steps == before.appended_steps


@pytest.mark.parametrize("value", JUNK)
def test_a_local_checkpoint_can_be_read_whatever_workers_wrote(
    roles: Roles, worker: redis.Redis, run: Run, tmp_path: Path, value: Any
) -> None:
    run.play(100)
    write_counts(value)(worker, run)
    write_hashes(worker, run)
    record = local_checkpoints.record(roles.admin, run.id)
    local_checkpoints.write(tmp_path, Snapshot(run.id, 7, record, asdict(Counters()), b"tensors"))
    roles.admin.flushall()
    assert local_checkpoints.restore_from(roles.admin, run.id, tmp_path)
    assert run.state.status == "active"
    assert stream.new_producer(worker, run.id) < 2**53


@pytest.mark.parametrize("server", ["emptied", "older"])
def test_an_id_that_nobody_was_given_does_not_become_the_next_one(
    roles: Roles, worker: redis.Redis, run: Run, tmp_path: Path, server: str
) -> None:
    forged = 10**15 - 1
    run.play(100)
    worker.hset(keys.producers(run.id), str(forged), Producer("5", 0, fragments=9).encode())
    copy_entry(worker, run, p=forged, i=5, q=0)
    learner = run.learner()
    with training(learner):
        run.catch_up(learner)
    learner.finish()
    found = checkpoints.load(roles.admin, run.id)
    assert found is not None and str(forged) in found[1]["ledger"]
    record = local_checkpoints.record(roles.admin, run.id)
    local_checkpoints.write(tmp_path, Snapshot(run.id, run.token, record, found[1], found[0]))
    if server == "emptied":
        roles.admin.flushall()
        assert local_checkpoints.restore_from(roles.admin, run.id, tmp_path)
    else:
        roles.admin.hdel(keys.state(run.id), "checkpoint")
        assert local_checkpoints.restore_newer(roles.admin, run.id, run.token, tmp_path)
    assert stream.new_producer(worker, run.id) < 10_000
    num_dead, learner = len(run.dead), run.learner()
    with training(learner):
        run.play(100, anew=True)
        run.catch_up(learner)
    learner.finish()
    assert len(run.dead) == num_dead, "honest fragments are taken"


@pytest.mark.parametrize("name", ["b", "i", "z"])
def test_numbers_that_no_append_writes_leave_the_stream(
    roles: Roles, worker: redis.Redis, run: Run, name: str
) -> None:
    run.play(100)
    worker.hset(keys.producers(run.id), "1000", Producer("1", 0, fragments=1).encode())
    copy_entry(worker, run, **{"p": 1000, "i": 1, "q": 0} | {name: "9" * 10**6})
    [*_, forged] = run.entries
    assert name != "z" or forged.num_bytes > 10**6, "the budget of the stream counts it"
    learner = run.learner()
    with training(learner):
        run.catch_up(learner)
        until(lambda: name == "z" or run.dead)
    learner.finish()
    assert run.dead == ([] if name == "z" else [b"no append wrote it"])
    assert (forged in run.entries) == (name == "z")


def test_forged_steps_do_not_keep_honest_processes_waiting(
    roles: Roles, worker: redis.Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are learned from, but count only as far as some may have been allowed."""
    monkeypatch.setattr("ddrl.learner.publisher.MOST_OVERSHOOT", 0)
    run.play(100)
    learner = run.learner()
    with training(learner):
        run.catch_up(learner)
        with monkeypatch.context() as patch:
            patch.setattr(learner, "_update", lambda: False)  # so that no more is allowed meanwhile
            worker.hset(keys.producers(run.id), "1000", Producer("1", 1_000, fragments=1_001).encode())
            for number in range(200):
                copy_entry(worker, run, p=1000, i=1, q=number)
            run.catch_up(learner)
            consumed, shared = learner.shared.ledger.consumed, learner.shared
            assert consumed > 200 and shared.env_steps <= run.state.allowance + 100 < 8 * consumed
        until(lambda: run.state.allowance >= shared.env_steps)
    learner.finish()


def test_a_flood_of_junk_does_not_flood_the_log(
    roles: Roles,
    worker: redis.Redis,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ddrl.learner.loop.LOG_S", 3600.0)
    learner = run.learner()
    with training(learner):
        for _ in range(50):
            worker.xadd(keys.experience(run.id), {"h": "junk"})
        run.catch_up(learner)
        until(lambda: len(run.dead) == 50)
    learner.finish()
    assert sum(" refused: " in line for line in caplog.messages) == 1


def test_junk_behind_fragments_that_wait_does_not_fill_the_stream_for_good(
    roles: Roles, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On-policy: what waits needs more fragments, and the junk behind it leaves them no room."""
    monkeypatch.setattr("ddrl.learner.publisher.STUCK_S", 0.2)
    server: Any = SimpleNamespace(client=roles.admin, url=roles.url("learner"))
    run = Run(server, pick_config(replay={"max_bytes": "1MB"}, learner={"checkpoint_every_s": 1}))
    learner = run.learner()
    with training(learner):
        run.play(20)
        until(lambda: learner.replay.num_waiting)
        worker.hset(keys.producers(run.id), "1000", Producer("1", 9, fragments=10).encode())
        for number in range(10):
            copy_entry(worker, run, p=1000, i=1, q=number, h="{}", zz="x" * 200_000)
        until(lambda: run.state.live_bytes > 10**6 or learner.replay.num_dropped)
        before = learner.shared.updates
        play = threading.Thread(target=run.play, args=(2_000,))
        play.start()
        until(lambda: learner.shared.updates > before + 2)
        play.join()
    learner.finish()
    assert run.audit().is_balanced and learner.replay.num_dropped > 0


def test_a_count_that_a_worker_wrote_does_not_end_the_restored_run(
    roles: Roles, worker: redis.Redis, run: Run, tmp_path: Path
) -> None:
    run.play(100)
    worker.hset(keys.counts(run.id), "appended_bytes", "9999999999999000")
    record = local_checkpoints.record(roles.admin, run.id)
    local_checkpoints.write(tmp_path, Snapshot(run.id, 7, record, asdict(Counters()), b"tensors"))
    roles.admin.flushall()
    assert local_checkpoints.restore_from(roles.admin, run.id, tmp_path)
    assert run.state.appended_bytes == run.state.trimmed_bytes <= 2**50
    roles.admin.hset(keys.state(run.id), "trimmed_bytes", "9999999999999000")
    token = leases.acquire(roles.admin, run.id, host="-", folder="-")
    assert token is not None
    assert stream.correct_counts(roles.admin, run.id, token, stream.Counted(b"0-0", 3, 24, 100))
    assert run.state.appended_bytes == 100


def test_a_script_decodes_no_long_value(roles: Roles, worker: redis.Redis, run: Run) -> None:
    run.play(20)
    name = int(next(iter(roles.admin.hkeys(keys.producers(run.id)))))
    record = json.loads(roles.admin.hget(keys.producers(run.id), name))
    worker.hset(keys.producers(run.id), str(name), json.dumps(record | {"x": "y" * 20_000}))
    who = {"producer": name, "incarnation": 5, "seq": 0, "num_transitions": 8}
    stream.append(worker, run.id, fields_of(run.entries[-1]), **who)  # as of an unknown producer
    assert json.loads(roles.admin.hget(keys.producers(run.id), name))["incarnation"] == "5"


def test_a_claim_of_any_length_lapses(roles: Roles, worker: redis.Redis, run: Run) -> None:
    run.play(20)
    fields = fields_of(run.entries[-1])
    who = {"producer": stream.new_producer(worker, run.id), "incarnation": 1, "num_transitions": 8}
    stream.claim(worker, run.id, 5, for_ms=10_000)
    assert stream.append(worker, run.id, fields, seq=0, **who).answer is stream.Answer.YIELD
    worker.hset(keys.counts(run.id), mapping={"claim": 10**15, "claim_until_ms": 10**15})
    assert stream.append(worker, run.id, fields, seq=1, **who).answer is not stream.Answer.YIELD


def test_large_fragments_stay_when_ids_are_lowered(roles: Roles, worker: redis.Redis, run: Run) -> None:
    for _ in range(3):
        worker.xadd(keys.experience(run.id), {"h": "x" * 600_000})
    write_late_ids("7258118400000-0")(worker, run)
    token = leases.acquire(roles.admin, run.id, host="-", folder="-", force=True)
    assert token is not None
    stream.lower_ids(roles.admin, run.id, token, b"0-0", b"7258118000000-0")
    assert [len(entry.fields[b"h"]) for entry in run.entries] == [600_000] * 3 + [1]


def test_folding_reads_no_more_than_ddrl_writes(roles: Roles, worker: redis.Redis, run: Run) -> None:
    run.play(20)
    worker.hset(keys.producers(run.id), str(ledger.ENDED), " " * 10**6)
    with connection.connect(roles.url("learner")) as client:
        connection.bound_replies(client, 200_000)
        assert fold_now(client, run.id, run.token, {}) == 0


def test_what_is_appended_after_a_late_id_is_learned_from(
    roles: Roles, worker: redis.Redis, run: Run
) -> None:
    experience = keys.experience(run.id)
    run.play(100)
    write_late_ids("7258118400000-0")(worker, run)
    run.play(100)  # these ids are later still
    learner = run.learner()
    with training(learner):
        until(lambda: roles.admin.xinfo_stream(experience)["last-generated-id"] < b"7258118400000-0")
        run.catch_up(learner)
    learner.finish()
    audit = run.audit()
    assert audit.total("consumed") == audit.total("appended") and audit.total("trimmed") == 0, audit
    assert audit.unknown == 1 and learner.shared.ledger.fragments == run.state.appended_fragments


def test_a_number_that_was_noted_for_a_moment_stops_nothing(
    roles: Roles, worker: redis.Redis, run: Run
) -> None:
    run.play(100)
    learner = run.learner()
    with training(learner):
        run.catch_up(learner)
        for name, value in worker.hgetall(keys.producers(run.id)).items():
            record = json.loads(value)
            worker.hset(keys.producers(run.id), name, json.dumps(record | {"seq": 10**12}))
            copy_entry(worker, run, p=int(name), i=record["incarnation"], q=10**12)
            run.catch_up(learner)
            worker.hset(keys.producers(run.id), name, value)
        consumed = learner.shared.ledger.consumed
        run.play(100)
        run.catch_up(learner)
        assert learner.shared.ledger.consumed > consumed
    learner.finish()
    assert not run.dead


@pytest.mark.parametrize("count", [0, 1, 10**15])
def test_an_entry_with_another_count_changes_no_count(
    roles: Roles, worker: redis.Redis, run: Run, count: int
) -> None:
    run.play(100)
    for producer in (1000, 1001):  # as if they had appended
        worker.hset(keys.producers(run.id), str(producer), Producer("1", 0, fragments=1).encode())
        copy_entry(worker, run, p=producer, i=1, q=0, f=count, n=count, b=count)
        run.play(100 * (producer == 1000))
    learner = run.learner()
    with training(learner):
        run.catch_up(learner)
        until(lambda: run.state.appended_fragments == len(run.entries))
    learner.finish()
    assert not run.dead
    assert run.audit().total("consumed") == learner.shared.ledger.fragments == len(run.entries)


@pytest.mark.parametrize("appended", [False, True])
def test_a_flood_of_producers_leaves_room_and_a_small_checkpoint(
    roles: Roles, worker: redis.Redis, run: Run, monkeypatch: pytest.MonkeyPatch, appended: bool
) -> None:
    monkeypatch.setattr(ledger, "MIN_PRODUCERS", 200)
    run.play(200)
    roles.admin.hset(keys.state(run.id), "max_producers", 200)  # as a dispatcher does
    [*_, newest] = run.entries
    fields = fields_of(newest)
    for producer in range(1000, 1400):
        if appended:
            who = {"producer": producer, "incarnation": 1, "seq": 0, "num_transitions": 8}
            stream.append(worker, run.id, fields, **who)
        else:
            worker.xadd(keys.experience(run.id), {**fields, "p": producer, "i": 1, "q": 0, "f": producer})
    learner = run.learner()
    with training(learner):
        run.catch_up(learner)
    learner.finish()
    pointer = roles.admin.hget(keys.state(run.id), "checkpoint")
    assert len(pointer) < 20_000 and run.audit().unknown == (0 if appended else 400)
    assert roles.admin.hlen(keys.producers(run.id)) == (200 if appended else 1)
    now_ms = 1000 * roles.admin.time()[0]
    for name in ("x", *range(2000, 2200)):  # records without entries, of now and of the future
        record = {"last_ms": 10**15 if name == "x" else now_ms + 500, "fragments": 5}
        worker.hset(keys.producers(run.id), name, json.dumps(record))
    monkeypatch.setattr("ddrl.learner.publisher.FOLD_EVERY_S", 0.02)
    monkeypatch.setattr(ledger, "QUIET_S", 0.1)
    learner = run.learner()
    with training(learner):
        until(lambda: roles.admin.hlen(keys.producers(run.id)) <= 101)
        run.play(20, anew=True)
        run.catch_up(learner)
    learner.finish()
    assert int(roles.admin.hget(keys.state(run.id), "folded") or 0) < 1000  # of ids that the counter gave
    audit = run.audit()
    assert audit.is_balanced and audit.total("consumed") == run.state.appended_fragments


def test_processes_go_on_whatever_is_in_the_broker_and_the_hashes(
    roles: Roles, worker: redis.Redis, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, roles.url("operator"))
    config = processes.config(stop={"return": None, "time": 600}, rollout={"segment_s": 0.2})
    name = call_json("submit", str(config), "--detach")["run"]
    server: Any = SimpleNamespace(client=roles.admin, url=roles.url("learner"))
    run = Run(server, run=name)
    learner = processes.learner(roles.url("learner"), name)
    player = processes.worker(roles.url("worker"), "--role", "all")
    processes.until(lambda: run.state.updates > 20)
    for value in JUNK:
        worker.lpush(keys.queue("ddrl.rollout"), value)
        write_counts(value)(worker, run)
    worker.delete(keys.queue("ddrl.evaluate"))
    write_hashes(worker, run)
    write_streams(worker, run)
    write_heartbeats(worker, run)
    before = run.state.updates
    processes.until(lambda: run.state.updates > before + 200)
    again = processes.worker(roles.url("worker"), "--role", "rollout")
    processes.until(lambda: "ready" in again.text())
    assert learner.running and player.running and again.running
    assert "Traceback" not in learner.text() + player.text() + again.text()
    call("stop", name)
    assert learner.wait() == 0


def test_ids_that_a_worker_has_taken_do_not_hold_a_process_up(worker: redis.Redis, run: Run) -> None:
    first = stream.new_producer(worker, run.id) + 1
    worker.hset(keys.producers(run.id), mapping={str(first + i): "x" for i in range(stream.IDS_TRIED)})
    with pytest.raises(connection.StoreError, match=f"run {run.id}: a worker has taken the next ids"):
        stream.new_producer(worker, run.id)
    assert stream.new_producer(worker, run.id) == first + stream.IDS_TRIED
