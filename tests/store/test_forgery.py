"""What someone who has the workers' password can write: no learner, no worker and no run ends of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.learners import Learning, Run, endless_config, playing, until
from support.roles import Roles
from support.runs import target_config

from ddrl import celery
from ddrl.store import connection, evaluations, keys, ledger, logs, runs, stream, workers
from ddrl.store.checkpoints import newest_pointer
from ddrl.store.evaluations import Evaluation
from ddrl.store.segments import Process

LARGEST = f"{2**64 - 1}-{2**64 - 1}"
JUNK = ("", "x", "nan", "-inf", "1e999", "-5", "9" * 5_000, "[]", "{}", "null", "[" * 5_000, b"\xff\xfe")
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
    for key in (keys.producers, keys.playing, keys.refusals, keys.evaluating):
        for number, value in enumerate(JUNK):
            for name in (number + 900, "-1", "-2x", "cursor", "0:0:9", b"\xff", "9" * 18):
                worker.hset(key(run.id), name, value)
    for row in (
        {"node": [], "pid": 1, "since_ms": 1},
        {"node": "n", "pid": 1, "since_ms": 1e999},
        {"node": {}},
    ):
        worker.hset(keys.playing(run.id), "p", json.dumps(row))
        worker.hset(keys.playing(run.id), str(Process("-", 1)), json.dumps(row))


def write_streams(worker: redis.Redis, run: Run) -> None:
    """Junk in the streams."""
    for key in (keys.experience, keys.episodes, keys.evaluations, keys.journal, keys.logs):
        for value in JUNK:
            for name in ("h", "result", "returns", "event", "row", b"\xff", "p", "f", "time_s"):
                worker.xadd(key(run.id), {name: value})
            worker.xadd(key(run.id), {"returns": value, "env_steps": value, "event": "set", "from": value})
            counts = dict.fromkeys(("f", "n", "b", "s", "p", "i", "q"), value)
            worker.xadd(key(run.id), {**counts, "h": "x"})


def write_late_ids(*ids: str, **options: Any) -> Attack:
    def attack(worker: redis.Redis, run: Run) -> None:
        for key in (keys.experience, keys.episodes, keys.evaluations, keys.journal, keys.logs):
            for entry_id in ids:
                worker.xadd(key(run.id), {"h": "x"}, id=entry_id, **options)

    return attack


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


ATTACKS: dict[str, Attack] = {
    "counts are junk": lambda worker, run: [write_counts(value)(worker, run) for value in JUNK],
    "counts are huge": write_counts(10**15),
    "counts are zero": write_counts(0),
    "hashes hold junk": write_hashes,
    "streams hold junk": write_streams,
    "the largest id": write_late_ids(LARGEST),
    "the largest id, trimmed": write_late_ids(LARGEST, maxlen=0),
    "late ids": write_late_ids("7258118400000-0", f"9999999999998-{2**64 - 1}", f"{2**64 - 2}-0"),
    "heartbeats": write_heartbeats,
    "stolen numbers": steal_numbers,
    "claims and crashes": claim,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
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
        until(lambda: run.state.updates > 20, 60.0)
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
