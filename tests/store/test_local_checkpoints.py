"""A run outside of its server: restoring it, what is refused, and the file."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from redis import Redis
from support.runs import play_steps, start, target_config

from ddrl.store import budget, checkpoints, keys, leases, ledger, local_checkpoints, runs, stream, weights
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import StoreError
from ddrl.store.local_checkpoints import BackgroundWriter, Snapshot


@pytest.fixture
def client(server) -> Redis:
    return server.client


def snapshot_of(client: Redis, *, updates: int = 7, unread: int = 1) -> Snapshot:
    """A run of which a learner has consumed all but the last fragment."""
    run = start(client, target_config())
    token = leases.acquire(client, run, host="here", folder="/tmp")
    assert token is not None
    play_steps(client, run, token, 300)
    entries = stream.read(client, run, b"0-0", count=10**6)
    read, cursor = entries[:-1], entries[-2].entry_id
    last = read[-1]
    rows = {last.producer: [len(read) - unread, 0, unread, last.count(b"i"), last.count(b"q")]}
    counters = Counters(
        updates=updates,
        env_steps=last.count(b"n"),
        elapsed_s=12.5,
        cursor=cursor.decode(),
        fragments=len(read),
        ledger={str(producer): row for producer, row in rows.items()},
        version=0,
    )
    return Snapshot(run, token, local_checkpoints.record(client, run), asdict(counters), b"tensors" * 1000)


def test_a_restored_run_continues_where_its_snapshot_ends(client: Redis) -> None:
    snapshot = snapshot_of(client)
    before = runs.state(client, snapshot.run)
    producer = next(iter(snapshot.record.producers))
    client.flushall()
    assert local_checkpoints.restore(client, snapshot)
    now = runs.state(client, snapshot.run)
    assert runs.names(client) == [snapshot.run] and now.status == "active" and not now.leased
    assert (now.created_s, now.first_step_s) == (before.created_s, before.first_step_s)
    assert (now.versions, now.queue, now.weight) == (before.versions, before.queue, before.weight)
    assert now.appended_steps == snapshot.meta["env_steps"] < before.appended_steps
    assert now.appended_fragments == before.appended_fragments - 1 and now.live_bytes == 0
    assert now.version == 0 and now.updates == 7 and runs.elapsed_s(client, snapshot.run) == 12.5
    assert runs.config(client, snapshot.run) == target_config()
    blob, meta = checkpoints.load(client, snapshot.run) or (b"", {})
    assert blob == snapshot.blob and meta["version"] == -1  # the next learner publishes it
    assert weights.index(client, snapshot.run).latest == 0 and not weights.index(client, snapshot.run).sizes
    audit = ledger.audit(client, snapshot.run)
    assert audit.is_balanced and audit.total("trimmed") == 1 and audit.cursor == snapshot.meta["cursor"]
    assert stream.new_producer(client) > int(producer) + 100
    journal = runs.journal(client, snapshot.run)
    assert [row["event"] for row in journal] == ["restored"] and "of update 7" in journal[0]["reason"]


def test_what_is_appended_then_comes_after_the_cursor_and_is_counted_on(client: Redis) -> None:
    snapshot = snapshot_of(client)
    late = replace(
        snapshot, meta={**snapshot.meta, "cursor": "99999999999999-3"}
    )  # its server's clock was far ahead
    client.flushall()
    assert local_checkpoints.restore(client, late)
    token = leases.acquire(client, snapshot.run, host="there", folder="/tmp")
    assert token is not None and token > snapshot.token + 1
    for seq in range(2):
        stream.append(
            client, snapshot.run, {b"h": b"{}"}, producer=10**6, incarnation=1, seq=seq, num_transitions=4
        )
    entries = stream.read(client, snapshot.run, b"99999999999999-3", count=10**6)
    assert entries[0].count(b"f") == snapshot.meta["fragments"] + 1
    assert entries[0].count(b"n") > snapshot.meta["env_steps"]
    audit = ledger.audit(client, snapshot.run)
    assert audit.is_balanced and audit.total("waiting") == len(entries) == 2


def test_repetitions_of_what_the_snapshot_holds_are_still_known(client: Redis) -> None:
    snapshot = snapshot_of(client)
    (producer,) = snapshot.meta["ledger"]
    _, _, _, incarnation, last_seq = snapshot.meta["ledger"][producer]
    client.flushall()
    local_checkpoints.restore(client, snapshot)

    def append(seq: int) -> int:
        who = {"producer": int(producer), "incarnation": incarnation, "seq": seq}
        stream.append(client, snapshot.run, {b"h": b"{}"}, num_transitions=4, **who)
        return runs.state(client, snapshot.run).duplicates

    assert append(last_seq) == 1 and append(last_seq + 1) == 1
    assert runs.state(client, snapshot.run).appended_fragments == snapshot.meta["fragments"] + 1


def test_a_run_that_is_there_is_not_overwritten(client: Redis) -> None:
    snapshot = snapshot_of(client)
    known = {key: client.dump(key) for key in client.keys("*")}
    assert not local_checkpoints.restore(client, snapshot)
    assert {key: client.dump(key) for key in client.keys("*")} == known
    client.flushall()
    assert local_checkpoints.restore(client, snapshot) and not local_checkpoints.restore(client, snapshot)


def test_a_deleted_run_is_restored_on_purpose_only(client: Redis, tmp_path: Path) -> None:
    snapshot = snapshot_of(client)
    run = snapshot.run
    local_checkpoints.write(tmp_path / run, snapshot)
    leases.release(client, run, snapshot.token)
    runs.set_status(client, run, "stopped", "by the test")
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
    client: Redis, tmp_path: Path, token: int, updates: int, version: int, is_newer: bool
) -> None:
    """By fencing token, then updates, then published version: relative to the server's checkpoint."""
    stored = snapshot_of(client)
    checkpoints.save(client, stored.run, stored.token, b"server", {**stored.meta, "version": -1})
    found = replace(
        stored, token=stored.token + token, meta={**stored.meta, "updates": updates, "version": version}
    )
    local_checkpoints.write(tmp_path, found)
    lease_token = leases.acquire(
        client,
        stored.run,
        host="h",
        folder="f",
        force=True,
        after=local_checkpoints.token(tmp_path, stored.run),
    )
    assert lease_token is not None and lease_token > found.token
    assert local_checkpoints.restore_newer(client, stored.run, lease_token, tmp_path) == is_newer
    blob, meta = checkpoints.load(client, stored.run) or (b"", {})
    assert blob == (found.blob if is_newer else b"server")
    assert meta["version"] == (version if is_newer and version > 0 else -1)  # no version is given twice
    assert ("restored" in [row["event"] for row in runs.journal(client, stored.run)]) == is_newer
    assert not local_checkpoints.restore_newer(client, stored.run, lease_token, tmp_path)


def test_what_a_worker_notes_of_a_lost_run_is_no_run(client: Redis) -> None:
    snapshot = snapshot_of(client)
    client.flushall()
    client.hset(keys.state(snapshot.run), mapping={"waiting": 3, "error": "by somebody who did not look"})
    with pytest.raises(runs.UnknownRunError):
        runs.state(client, snapshot.run)
    assert leases.acquire(client, snapshot.run, host="here", folder="/tmp") is None
    with pytest.raises(leases.RunGoneError):
        leases.renew(client, snapshot.run, snapshot.token)
    assert local_checkpoints.restore(client, snapshot) and runs.state(client, snapshot.run).error == ""


# --- the file ------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_as_it_was_written_and_only_the_newest_stays(
    client: Redis, tmp_path: Path
) -> None:
    assert local_checkpoints.read(tmp_path) is None
    snapshot = snapshot_of(client)
    local_checkpoints.write(tmp_path, snapshot)
    found = local_checkpoints.read(tmp_path)
    assert found.blob == snapshot.blob and found.token == snapshot.token and found.record == snapshot.record
    assert found.meta == json.loads(json.dumps(snapshot.meta))
    newer = replace(snapshot, meta={**snapshot.meta, "updates": 9}, blob=b"more")
    local_checkpoints.write(tmp_path, newer)
    assert (
        local_checkpoints.read(tmp_path).blob == b"more"
        and len(list((tmp_path / "checkpoint").iterdir())) == 2
    )


def test_a_replaced_learner_does_not_overwrite_the_checkpoint_of_its_successor(
    client: Redis, tmp_path: Path
) -> None:
    snapshot = snapshot_of(client)
    local_checkpoints.write(tmp_path, replace(snapshot, token=snapshot.token + 1, blob=b"successor"))
    local_checkpoints.write(tmp_path, snapshot)
    assert local_checkpoints.read(tmp_path).blob == b"successor"


def test_a_damaged_checkpoint_is_named_and_the_servers_is_used(
    client: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = snapshot_of(client)
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


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_warning_and_the_checkpoint_before_stays(
    client: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    snapshot = snapshot_of(client)
    caplog.clear()
    writer = BackgroundWriter(tmp_path)

    def put(updates: int) -> None:
        writer.put(replace(snapshot, meta={**snapshot.meta, "updates": updates}))
        time.sleep(0.2)

    put(7)
    with full_disk(4096):
        put(8)
        put(8)
    (warning,) = caplog.records
    assert "the checkpoint cannot be written (File too large); retrying at the next one" in warning.message
    assert local_checkpoints.read(tmp_path).meta["updates"] == 7
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2
    put(9)
    writer.close()
    assert local_checkpoints.read(tmp_path).meta["updates"] == 9
    assert "the checkpoint is written again" in caplog.records[-1].message


def test_a_folder_that_cannot_be_made_is_one_warning(client: Redis, tmp_path: Path, caplog) -> None:
    (tmp_path / "checkpoint").write_text("a file is in the way")
    writer = BackgroundWriter(tmp_path)
    writer.put(snapshot_of(client))
    writer.close()
    (warning,) = caplog.records
    assert "the checkpoint cannot be written (File exists)" in warning.message


# --- memory ----------------------------------------------------------------------------------------------


def test_the_needs_of_all_active_runs_must_fit_into_the_servers_memory(client: Redis) -> None:
    config = target_config(replay={"max_bytes": "100MB"}, weights={"max_bytes": "1MB"})
    first, second = start(client, config), start(client, config)
    needed = budget.needed_bytes(config, checkpoint_bytes=20_000_000, weights_bytes=1_000_000)
    assert needed == 100_000_000 + 2 * 20_000_000 + 13 * 1_000_000 + 1_000_000 + budget.OTHER_BYTES
    token = leases.acquire(client, first, host="here", folder="/tmp")
    try:
        client.config_set("maxmemory", needed + 100_000_000)
        budget.check(client, first, token, needed)
        # The other has said nothing yet: its stream counts.
        client.config_set("maxmemory", needed + 100_000_000 - 1)
        with pytest.raises(
            ValueError, match=r"needs up to 226 MiB .* 1 other active run 95 MiB, but its maxmemory is 322"
        ):
            budget.check(client, first, token, needed)
        runs.set_status(client, second, "stopped", "by the test")
        budget.check(client, first, token, needed)
    finally:
        client.config_set("maxmemory", 0)


# --- what is sent twice, and who comes late -----------------------------------------------------------------


def test_a_run_whose_restore_is_sent_twice_is_whole(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, call = snapshot_of(client), local_checkpoints.call
    client.flushall()
    with monkeypatch.context() as patch:  # the first reply is lost
        patch.setattr(local_checkpoints, "call", lambda *arguments: call(*arguments) and call(*arguments))
        assert local_checkpoints.restore(client, snapshot)
    assert checkpoints.load(client, snapshot.run)[0] == snapshot.blob
    assert not local_checkpoints.restore(client, snapshot)  # it is there
    assert checkpoints.load(client, snapshot.run)[0] == snapshot.blob
    assert len(client.keys(keys.checkpoint_pattern(snapshot.run))) == 1


def test_a_run_whose_checkpoint_goes_before_it_is_restored_is_not_restored(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = snapshot_of(client)
    store_parts = checkpoints.store_parts

    def emptied(*arguments):
        pointer = store_parts(*arguments)
        client.flushall()
        return pointer

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "store_parts", emptied)
        assert not local_checkpoints.restore(client, snapshot)
    assert not client.keys("*")
    assert local_checkpoints.restore(client, snapshot)
    assert checkpoints.load(client, snapshot.run)[0] == snapshot.blob


def test_a_learner_that_stalls_while_it_sweeps_leaves_its_successors_checkpoint(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, target_config())
    first = leases.acquire(client, run, host="here", folder="/tmp")
    assert first is not None
    client.set(keys.checkpoint_part(run, first - 1, 7, 0), b"half")
    scan = client.scan_iter

    second = 0

    def stalled(**options):
        nonlocal second
        monkeypatch.undo()
        second = leases.acquire(client, run, host="there", folder="/tmp", force=True)
        checkpoints.save(client, run, second, b"whole", {"updates": 1})
        return scan(**options)

    monkeypatch.setattr(client, "scan_iter", stalled)
    with pytest.raises(leases.LeaseLostError):
        checkpoints.sweep(client, run, first)
    assert checkpoints.load(client, run) == (b"whole", {"updates": 1})
    assert checkpoints.sweep(client, run, second) == 1
