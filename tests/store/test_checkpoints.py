"""Checkpoints: in parts on the server, complete or refused; outside of it, and a run that is restored from there."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis
from support.private_server import until
from support.runs import play_steps, start, target_config
from support.store import append, end, events, take

from ddrl.store import (
    bounded,
    checkpoints,
    connection,
    keys,
    leases,
    ledger,
    local_checkpoints,
    runs,
    stream,
    weights,
)
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import StoreError
from ddrl.store.local_checkpoints import BackgroundWriter, Snapshot


def test_checkpoints_come_back_whole_and_replace_each_other(client: Redis, run: str, token: int) -> None:
    large = np.random.default_rng(0).bytes(checkpoints.PART_BYTES * 2 + 5)
    checkpoints.save(client, run, token, large, {"updates": 1})
    assert checkpoints.load(client, run) == (large, {"updates": 1})
    parts = [client.strlen(key) for key in client.scan_iter(match=keys.checkpoint_pattern(run))]
    assert sorted(parts) == [5, checkpoints.PART_BYTES, checkpoints.PART_BYTES]
    checkpoints.save(client, run, token, b"small", {"updates": 2})
    assert checkpoints.load(client, run) == (b"small", {"updates": 2})
    assert len(list(client.scan_iter(match=keys.checkpoint_pattern(run)))) == 1
    client.set(keys.checkpoint_part(run, token, 1, 0), b"smal1")
    with pytest.raises(StoreError, match="checkpoint 1 is damaged"):
        checkpoints.load(client, run)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_called_damaged(
    client: Redis, run: str, token: int, monkeypatch
) -> None:
    checkpoints.save(client, run, token, b"old", {})
    part_keys, replacing = checkpoints.part_keys, iter([True])

    def looked_up(*args: Any) -> list[str]:
        found = part_keys(*args)
        if next(replacing, False):  # only the first time
            checkpoints.save(client, run, token, b"newer", {})
        return found

    monkeypatch.setattr(checkpoints, "part_keys", looked_up)
    assert checkpoints.load(client, run) == (b"newer", {})


def test_a_replaced_learners_save_leaves_no_part(client: Redis, run: str, token: int, monkeypatch) -> None:
    good, call, calls = (b"whole", {"updates": 1}), checkpoints.call, []
    checkpoints.save(client, run, token, *good)
    parts = set(client.scan_iter(match=keys.checkpoint_pattern(run)))

    def replaced(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            take(client, run)
        return call(*arguments)

    monkeypatch.setattr(checkpoints, "PART_BYTES", 4)
    monkeypatch.setattr(checkpoints, "call", replaced)
    with pytest.raises(connection.LeaseLostError):
        checkpoints.save(client, run, token, bytes(5 * 4 + 1), {"updates": 2})
    assert set(client.scan_iter(match=keys.checkpoint_pattern(run))) == parts
    assert checkpoints.load(client, run) == good


def test_a_sweep_removes_unfinished_parts_alone(client: Redis, run: str, token: int, monkeypatch) -> None:
    """Also one that stalls while the next learner saves."""
    client.set(keys.checkpoint_part(run, token - 1, 7, 0), b"half")
    for name in (b"zz}:counts", b"\xff}:counts", b"1:2:3}:counts"):  # which a worker may write
        client.hset(keys.checkpoint_pattern(run).encode()[:-1] + name, "x", "y")
    names, successor = bounded.names, []

    def stalled(*arguments: Any) -> object:
        monkeypatch.undo()
        successor.append(leases.acquire(client, run, host="there", folder="/tmp", force=True))
        checkpoints.save(client, run, successor[0], b"whole", {"updates": 1})
        return names(*arguments)

    monkeypatch.setattr(bounded, "names", stalled)
    with pytest.raises(connection.LeaseLostError):
        checkpoints.sweep(client, run, token)
    assert [checkpoints.sweep(client, run, successor[0]) for _ in range(2)] == [1, 0]
    assert checkpoints.load(client, run) == (b"whole", {"updates": 1})


# --- outside of the server -----------------------------------------------------------------------------


Log, Patch = pytest.LogCaptureFixture, pytest.MonkeyPatch


@pytest.fixture
def snapshot(client: Redis) -> Snapshot:
    """The snapshot of a run with one fragment that its learner has not read; it has consumed the others."""
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 300)
    *read, _ = stream.read(client, run, b"0-0", count=10**6)
    last = read[-1]
    counters = Counters(
        updates=7, env_steps=last.count(b"n"), elapsed_s=12.5, cursor=last.entry_id.decode(), fragments=len(read),
        ledger={str(last.producer): [len(read) - 1, 0, 1, last.count(b"i"), last.count(b"q")]}, version=0,
    )  # fmt: skip
    return Snapshot(run, token, local_checkpoints.record(client, run), asdict(counters), b"tensors" * 1000)


def later(snapshot: Snapshot, **meta: Any) -> Snapshot:
    """The snapshot with some of its counters changed."""
    return replace(snapshot, meta={**snapshot.meta, **meta})


def test_a_restored_run_continues_where_its_snapshot_ends(client: Redis, snapshot: Snapshot) -> None:
    run, before = snapshot.run, runs.state(client, snapshot.run)
    (producer,) = snapshot.record.producers
    client.flushall()
    client.hset(keys.counts(run), "error", "noted by a worker of the lost run")  # which is no run
    with pytest.raises(runs.UnknownRunError):
        runs.state(client, run)
    assert leases.acquire(client, run, host="here", folder="/tmp") is None
    with pytest.raises(connection.RunGoneError):
        leases.renew(client, run, snapshot.token)
    assert local_checkpoints.restore(client, snapshot)
    now = runs.state(client, run)
    assert runs.names(client) == [run] and now.status == "active" and not now.leased and now.error == ""
    for name in ("created_s", "first_step_s", "versions", "queue", "weight"):
        assert getattr(now, name) == getattr(before, name)
    assert now.appended_steps == snapshot.meta["env_steps"] < before.appended_steps
    assert now.appended_fragments == before.appended_fragments - 1 and now.live_bytes == 0
    assert now.version == 0 and now.updates == 7 and runs.elapsed_s(client, run) == 12.5
    assert runs.config(client, run) == target_config()
    blob, meta = checkpoints.load(client, run) or (b"", {})
    assert blob == snapshot.blob and meta["version"] == -1  # the next learner publishes it
    assert weights.index(client, run).latest == 0 and not weights.index(client, run).sizes
    audit = ledger.audit(client, run)
    assert audit.is_balanced and audit.total("trimmed") == 1 and audit.cursor == snapshot.meta["cursor"]
    assert stream.new_producer(client, run) > int(producer) + 100
    assert events(client, run) == ["restored"]
    assert "of update 7" in runs.journal(client, run)[0][0]["reason"]


def test_appends_to_a_restored_run_are_counted_on(client: Redis, snapshot: Snapshot) -> None:
    run, fragments = snapshot.run, snapshot.meta["fragments"]
    ((producer, (_, _, _, incarnation, last_seq)),) = snapshot.meta["ledger"].items()
    cursor = b"99999999999999-3"  # its server's clock was far ahead
    client.flushall()
    assert local_checkpoints.restore(client, later(snapshot, cursor=cursor.decode()))
    token = leases.acquire(client, run, host="there", folder="/tmp")
    assert token is not None and token > snapshot.token + 1
    for seq in (last_seq, last_seq + 1):
        append(client, run, seq, producer=int(producer), incarnation=incarnation)
        assert runs.state(client, run).duplicates == 1
    assert runs.state(client, run).appended_fragments == fragments + 1
    append(client, run, 0, producer=10**6)
    entries = stream.read(client, run, cursor, count=10**6)
    assert [entry.count(b"f") for entry in entries] == [fragments + 1, fragments + 2]
    assert entries[0].count(b"n") > snapshot.meta["env_steps"]
    audit = ledger.audit(client, run)
    assert audit.is_balanced and audit.total("waiting") == 2


def test_a_run_that_is_there_is_left_alone(client: Redis, snapshot: Snapshot, monkeypatch: Patch) -> None:
    known = {key: client.dump(key) for key in client.keys("*")}
    assert not local_checkpoints.restore(client, snapshot)
    assert {key: client.dump(key) for key in client.keys("*")} == known
    client.flushall()
    call = local_checkpoints.call  # the first reply is lost, and the script is sent twice
    monkeypatch.setattr(local_checkpoints, "call", lambda *arguments: call(*arguments) and call(*arguments))
    assert local_checkpoints.restore(client, snapshot)
    monkeypatch.undo()
    assert not local_checkpoints.restore(client, snapshot)
    assert (checkpoints.load(client, snapshot.run) or ())[0] == snapshot.blob
    assert len(client.keys(keys.checkpoint_pattern(snapshot.run))) == 1


def test_a_checkpoint_lost_meanwhile_is_not_restored(client: Redis, snapshot: Snapshot, monkeypatch) -> None:
    store_parts = checkpoints.store_parts

    def emptied(*arguments: Any) -> dict[str, Any]:
        pointer = store_parts(*arguments)
        client.flushall()
        return pointer

    monkeypatch.setattr(checkpoints, "store_parts", emptied)
    assert not local_checkpoints.restore(client, snapshot) and not client.keys("*")


def test_a_deleted_run_is_restored_on_purpose_only(client: Redis, snapshot: Snapshot, tmp_path: Path) -> None:
    run = snapshot.run
    local_checkpoints.write(tmp_path / run, snapshot)
    leases.release(client, run, snapshot.token)
    end(client, run)
    runs.delete(client, run)
    with pytest.raises(StoreError, match=f"{run}: was deleted"):
        local_checkpoints.restore_from(client, run, tmp_path / run)
    assert runs.names(client) == [] and not client.keys(keys.run_pattern(run))
    assert local_checkpoints.find_or_restore(client, run[:8], tmp_path) == run
    assert runs.names(client) == [run]


@pytest.mark.parametrize(
    ("token", "updates", "version", "is_newer"),
    [(0, 7, 0, False), (0, 8, 0, True), (0, 7, 1, True), (1, 3, 0, True), (-1, 9, 9, False)],
)
def test_the_newest_of_server_and_folder_is_restored(
    client: Redis, snapshot: Snapshot, tmp_path: Path, token: int, updates: int, version: int, is_newer: bool
) -> None:
    """By fencing token, then updates, then published version: relative to the server's checkpoint."""
    run = snapshot.run
    checkpoints.save(client, run, snapshot.token, b"server", {**snapshot.meta, "version": -1})
    found = replace(later(snapshot, updates=updates, version=version), token=snapshot.token + token)
    local_checkpoints.write(tmp_path, found)
    after = local_checkpoints.token(tmp_path, run)
    newest = leases.acquire(client, run, host="h", folder="f", force=True, after=after)
    assert newest is not None and newest > found.token
    assert local_checkpoints.restore_newer(client, run, newest, tmp_path) == is_newer
    blob, meta = checkpoints.load(client, run) or (b"", {})
    assert blob == (found.blob if is_newer else b"server")
    assert meta["version"] == (version if is_newer and version > 0 else -1)  # no version is given twice
    assert ("restored" in events(client, run)) == is_newer
    assert not local_checkpoints.restore_newer(client, run, newest, tmp_path)


# --- the file ------------------------------------------------------------------------------------


def read(folder: Path) -> Snapshot:
    found = local_checkpoints.read(folder)
    assert found is not None and len(list((folder / "checkpoint").iterdir())) == 2
    return found


def test_a_checkpoint_is_read_as_written_until_a_newer_one_is(snapshot: Snapshot, tmp_path: Path) -> None:
    assert local_checkpoints.read(tmp_path) is None
    local_checkpoints.write(tmp_path, snapshot)
    found, meta = read(tmp_path), json.loads(json.dumps(snapshot.meta))
    assert found == replace(snapshot, meta=meta)
    local_checkpoints.write(tmp_path, replace(later(snapshot, updates=9), blob=b"more"))
    assert read(tmp_path).blob == b"more"
    successor = replace(snapshot, token=snapshot.token + 1, blob=b"successor")
    local_checkpoints.write(tmp_path, successor)
    local_checkpoints.write(tmp_path, snapshot)  # of a learner that was replaced
    assert read(tmp_path).blob == b"successor"


def test_a_damaged_checkpoint_is_named_and_the_servers_is_used(
    client: Redis, snapshot: Snapshot, tmp_path: Path, caplog: Log
) -> None:
    local_checkpoints.write(tmp_path, snapshot)
    (file,) = (tmp_path / "checkpoint").glob("*.safetensors")
    file.write_bytes(b"half")
    with pytest.raises(StoreError, match="damaged, 4 bytes; remove"):
        local_checkpoints.read(tmp_path)
    assert not local_checkpoints.restore_newer(client, snapshot.run, snapshot.token, tmp_path)
    assert "damaged, 4 bytes" in caplog.text
    file.unlink()
    with pytest.raises(StoreError, match=r"safetensors: cannot be read \(No such file"):
        local_checkpoints.read(tmp_path)
    (tmp_path / "checkpoint" / "checkpoint.json").write_text("[]")
    with pytest.raises(StoreError, match="not a checkpoint that this version of ddrl reads"):
        local_checkpoints.read(tmp_path)


BAD_FIELDS: tuple[dict[str, Any], ...] = (
    *({name: ...} for name in ("token", "bytes", "crc32", "meta")),
    *({"token": "x"}, {"bytes": None}, {"meta": []}, {"meta": {"updates": "many"}}),
    *({"meta": {"cursor": "a-b"}}, {"meta": {"ledger": {"x": []}}}, {"meta": {"ledger": {"1": "abc"}}}),
    {"meta": {"ledger": {"9" * 5000: [0]}}},
)
BAD_RECORDS: tuple[dict[str, Any], ...] = tuple(
    {"known": {"spec": "{}", "state": {"status": "active"}, "producers": {}} | odd}
    for odd in (
        *(
            {"spec": "x"},
            {"spec": "[]"},
            {"state": {"version": "new"}},
            {"state": {"versions": "2"}},
            {"state": {"folded": ""}},
        ),
        {"producers": {"": "{}"}},
    )
)


@pytest.mark.parametrize(
    "bad", [*BAD_FIELDS, {"tensors": "../../secret"}, {"known": {}}, *BAD_RECORDS], ids=str
)
def test_a_pointer_with_odd_fields_is_refused(
    snapshot: Snapshot, tmp_path: Path, bad: dict[str, Any]
) -> None:
    local_checkpoints.write(tmp_path, snapshot)
    file = tmp_path / "checkpoint" / "checkpoint.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), bad)))
    with pytest.raises(
        StoreError, match=r"not a checkpoint that this version of ddrl reads; remove .*checkpoint$"
    ):
        local_checkpoints.read(tmp_path)


@pytest.mark.parametrize("bad", [*BAD_FIELDS, {"parts": 0}, {"parts": 10**12}], ids=str)
def test_a_pointer_on_the_server_with_odd_fields_is_refused(
    client: Redis, run: str, token: int, bad: dict[str, Any]
) -> None:
    checkpoints.save(client, run, token, b"tensors", {"updates": 1})
    raw = json.loads(client.hget(keys.state(run), "checkpoint"))  # type: ignore[arg-type]
    client.hset(keys.state(run), "checkpoint", json.dumps(changed(raw, bad)))
    for read in (checkpoints.load, runs.elapsed_s):
        with pytest.raises(StoreError, match=f"run {run}: the pointer to its checkpoint is damaged"):
            read(client, run)


def changed(fields: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return fields with other values, or without those that are `...`."""
    return {name: value for name, value in (fields | other).items() if value is not ...}


def test_what_cannot_be_written_is_one_warning(snapshot: Snapshot, tmp_path: Path, caplog: Log) -> None:
    caplog.set_level("INFO")
    caplog.clear()
    writer, place = BackgroundWriter(tmp_path), tmp_path / "checkpoint"
    place.write_text("a file is in the way")
    writer.put(snapshot)
    until(lambda: caplog.records)
    assert "the checkpoint cannot be written (File exists); retrying at the next one" in caplog.text
    place.unlink()
    writer.put(later(snapshot, updates=7))
    until(lambda: len(caplog.records) == 2)
    assert "the checkpoint is written again" in caplog.records[1].message
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a full disk: no file may grow beyond that
    try:
        writer.put(later(snapshot, updates=8))
        until(lambda: len(caplog.records) == 3)
        writer.put(later(snapshot, updates=9))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written (File too large)" in caplog.records[2].message and len(caplog.records) == 3
    assert read(tmp_path).meta["updates"] == 7  # the one before stays
