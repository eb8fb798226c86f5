"""A run outside of its server: what is planted again, what is refused, and the copy on disk."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from redis import Redis
from support.runs import play_steps, start, target_config

from ddrl.store import budget, checkpoints, copies, keys, ledger, runs, seeds, stream, weights
from ddrl.store import leases as lease
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import StoreError


@pytest.fixture
def client(server) -> Redis:
    return server.client


def seed_of(client: Redis, *, updates: int = 7, unread: int = 1) -> seeds.Seed:
    """A run of which a learner has consumed all but the last fragment."""
    run = start(client, target_config())
    token = lease.acquire(client, run, host="here", folder="/tmp")
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
    return seeds.Seed(run, token, seeds.known(client, run), asdict(counters), b"tensors" * 1000)


def test_a_run_planted_again_goes_on_where_its_seed_ends(client: Redis) -> None:
    seed = seed_of(client)
    before = runs.state(client, seed.run)
    producer = next(iter(seed.known.producers))
    client.flushall()
    assert seeds.plant(client, seed)
    now = runs.state(client, seed.run)
    assert runs.names(client) == [seed.run] and now.status == "active" and not now.leased
    assert (now.created_s, now.first_step_s) == (before.created_s, before.first_step_s)
    assert (now.versions, now.queue, now.weight) == (before.versions, before.queue, before.weight)
    assert now.appended_steps == seed.meta["env_steps"] < before.appended_steps
    assert now.appended_fragments == before.appended_fragments - 1 and now.live_bytes == 0
    assert now.version == 0 and now.updates == 7 and runs.elapsed_s(client, seed.run) == 12.5
    assert runs.config(client, seed.run) == target_config()
    blob, meta = checkpoints.load(client, seed.run) or (b"", {})
    assert blob == seed.blob and meta["version"] == -1  # the next learner publishes it
    assert weights.index(client, seed.run).latest == 0 and not weights.index(client, seed.run).sizes
    audit = ledger.audit(client, seed.run)
    assert audit.is_balanced and audit.total("trimmed") == 1 and audit.cursor == seed.meta["cursor"]
    assert stream.new_producer(client) > int(producer) + 100
    journal = runs.journal(client, seed.run)
    assert [row["event"] for row in journal] == ["re-seeded"] and "after update 7" in journal[0]["reason"]


def test_what_is_appended_then_comes_after_the_cursor_and_is_counted_on(client: Redis) -> None:
    seed = seed_of(client)
    late = replace(seed, meta={**seed.meta, "cursor": "99999999999999-3"})  # its server's clock was far ahead
    client.flushall()
    assert seeds.plant(client, late)
    token = lease.acquire(client, seed.run, host="there", folder="/tmp")
    assert token is not None and token > seed.token + 1
    for seq in range(2):
        stream.append(
            client, seed.run, {b"h": b"{}"}, producer=10**6, incarnation=1, seq=seq, num_transitions=4
        )
    entries = stream.read(client, seed.run, b"99999999999999-3", count=10**6)
    assert entries[0].count(b"f") == seed.meta["fragments"] + 1
    assert entries[0].count(b"n") > seed.meta["env_steps"]
    audit = ledger.audit(client, seed.run)
    assert audit.is_balanced and audit.total("waiting") == len(entries) == 2


def test_repetitions_of_what_the_seed_holds_are_still_known(client: Redis) -> None:
    seed = seed_of(client)
    (producer,) = seed.meta["ledger"]
    _, _, _, incarnation, last_seq = seed.meta["ledger"][producer]
    client.flushall()
    seeds.plant(client, seed)

    def append(seq: int) -> int:
        stream.append(
            client, seed.run, {b"h": b"{}"}, producer=int(producer), incarnation=incarnation, seq=seq, num_transitions=4
        )  # fmt: skip
        return runs.state(client, seed.run).duplicates

    assert append(last_seq) == 1 and append(last_seq + 1) == 1
    assert runs.state(client, seed.run).appended_fragments == seed.meta["fragments"] + 1


def test_a_run_that_is_there_is_not_planted_over(client: Redis) -> None:
    seed = seed_of(client)
    known = {key: client.dump(key) for key in client.keys("*")}
    assert not seeds.plant(client, seed)
    assert {key: client.dump(key) for key in client.keys("*")} == known
    client.flushall()
    assert seeds.plant(client, seed) and not seeds.plant(client, seed)


def test_a_run_deleted_on_purpose_comes_back_only_on_purpose(client: Redis, tmp_path: Path) -> None:
    seed = seed_of(client)
    copies.write(tmp_path, seed)
    lease.release(client, seed.run, seed.token)
    runs.set_status(client, seed.run, "stopped", "by the test")
    runs.delete(client, seed.run)
    with pytest.raises(StoreError, match=f"{seed.run}: was deleted"):
        copies.plant(client, seed.run, tmp_path, seed)
    assert runs.names(client) == [] and not client.keys(keys.run_pattern(seed.run))
    assert copies.plant(client, seed.run, tmp_path, deleted_too=True)
    assert runs.names(client) == [seed.run]


def test_what_a_worker_notes_of_a_lost_run_is_no_run(client: Redis) -> None:
    seed = seed_of(client)
    client.flushall()
    client.hset(keys.state(seed.run), mapping={"waiting": 3, "error": "by somebody who did not look"})
    with pytest.raises(runs.UnknownRunError):
        runs.state(client, seed.run)
    assert lease.acquire(client, seed.run, host="here", folder="/tmp") is None
    with pytest.raises(lease.RunGoneError):
        lease.renew(client, seed.run, seed.token)
    assert seeds.plant(client, seed) and runs.state(client, seed.run).error == ""


# --- the copy on disk ------------------------------------------------------------------------------------


def test_a_copy_is_read_as_it_was_written_and_only_the_newest_stays(client: Redis, tmp_path: Path) -> None:
    assert copies.read(tmp_path) is None
    seed = seed_of(client)
    copies.write(tmp_path, seed)
    found = copies.read(tmp_path)
    assert found.blob == seed.blob and found.token == seed.token and found.known == seed.known
    assert found.meta == json.loads(json.dumps(seed.meta))
    newer = replace(seed, meta={**seed.meta, "updates": 9}, blob=b"more")
    copies.write(tmp_path, newer)
    assert copies.read(tmp_path).blob == b"more" and len(list((tmp_path / "checkpoint").iterdir())) == 2


def test_a_learner_that_was_replaced_does_not_write_over_the_copy_of_its_successor(
    client: Redis, tmp_path: Path
) -> None:
    seed = seed_of(client)
    successor = replace(seed, token=seed.token + 1, blob=b"successor")
    copies.write(tmp_path, successor)
    copies.write(tmp_path, seed)
    assert copies.read(tmp_path).blob == b"successor"
    client.flushall()
    assert copies.plant(client, seed.run, tmp_path, seed)  # nor does the server get what it holds
    assert checkpoints.load(client, seed.run)[0] == b"successor"


def test_a_copy_later_than_the_servers_data_is_set_aside(client: Redis, tmp_path: Path) -> None:
    seed = seed_of(client)
    copies.write(tmp_path, seed)
    copies.set_aside(tmp_path, seed.run, seed.token)  # its own
    assert copies.read(tmp_path) is not None
    copies.set_aside(tmp_path, seed.run, seed.token - 1)
    assert copies.read(tmp_path) is None
    assert (tmp_path / f"checkpoint-{seed.token}" / "checkpoint.json").exists()


def test_a_damaged_copy_is_named(client: Redis, tmp_path: Path) -> None:
    seed = seed_of(client)
    copies.write(tmp_path, seed)
    (file,) = (tmp_path / "checkpoint").glob("*.safetensors")
    file.write_bytes(b"half")
    with pytest.raises(StoreError, match="damaged, 4 bytes"):
        copies.read(tmp_path)
    file.unlink()
    with pytest.raises(StoreError, match=r"safetensors: cannot be read \(No such file"):
        copies.read(tmp_path)
    (tmp_path / "checkpoint" / "checkpoint.json").write_text("[]")
    with pytest.raises(StoreError, match="not a copy that this version of ddrl reads"):
        copies.read(tmp_path)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_warning_and_the_copy_of_before_stays(
    client: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed = seed_of(client)
    copier = copies.Copier(tmp_path)
    copier.put(seed)
    copier.close()
    for _ in range(2):  # the second time nothing new is said
        copier = copier if caplog.records else copies.Copier(tmp_path)
        with full_disk(4096):
            copier._write(replace(seed, meta={**seed.meta, "updates": 8}))
    (warning,) = caplog.records
    assert "no copy of the checkpoint (File too large); tried again at the next one" in warning.message
    assert copies.read(tmp_path).meta["updates"] == 7 and len(list((tmp_path / "checkpoint").iterdir())) == 2
    copier._write(replace(seed, meta={**seed.meta, "updates": 9}))
    assert copies.read(tmp_path).meta["updates"] == 9


def test_a_folder_that_cannot_be_made_is_one_warning(client: Redis, tmp_path: Path, caplog) -> None:
    (tmp_path / "checkpoint").write_text("a file is in the way")
    copier = copies.Copier(tmp_path)
    copier.put(seed_of(client))
    copier.close()
    (warning,) = caplog.records
    assert "no copy of the checkpoint (File exists)" in warning.message


# --- memory ----------------------------------------------------------------------------------------------


def test_the_needs_of_all_active_runs_must_fit_into_the_servers_memory(client: Redis) -> None:
    config = target_config(replay={"max_bytes": "100MB"}, weights={"max_bytes": "1MB"})
    first, second = start(client, config), start(client, config)
    needed = budget.needed_bytes(config, checkpoint_bytes=20_000_000, weights_bytes=1_000_000)
    assert needed == 100_000_000 + 2 * 20_000_000 + 13 * 1_000_000 + 1_000_000 + budget.OTHER_BYTES
    token = lease.acquire(client, first, host="here", folder="/tmp")
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


class Deaf(Redis):
    """A connection whose replies to scripts get lost on the way, so that each is sent again, as redis-py does."""

    def eval(self, *arguments):
        super().eval(*arguments)
        return super().eval(*arguments)


def test_a_run_whose_planting_is_sent_twice_is_whole(client: Redis) -> None:
    seed = seed_of(client)
    client.flushall()
    assert seeds.plant(Deaf(connection_pool=client.connection_pool), seed)
    assert checkpoints.load(client, seed.run)[0] == seed.blob
    assert not seeds.plant(client, seed)  # somebody else has
    assert checkpoints.load(client, seed.run)[0] == seed.blob
    assert len(client.keys(keys.checkpoint_pattern(seed.run))) == 1


def test_a_run_whose_checkpoint_goes_before_it_is_planted_is_not_planted(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = seed_of(client)
    store_parts = checkpoints.store_parts

    def emptied(*arguments):
        pointer = store_parts(*arguments)
        client.flushall()
        return pointer

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "store_parts", emptied)
        assert not seeds.plant(client, seed)
    assert not client.keys("*")
    assert seeds.plant(client, seed)
    assert checkpoints.load(client, seed.run)[0] == seed.blob


def test_a_learner_that_stalls_while_it_sweeps_leaves_its_successors_checkpoint(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, target_config())
    first = lease.acquire(client, run, host="here", folder="/tmp")
    assert first is not None
    client.set(keys.checkpoint_part(run, first - 1, 7, 0), b"half")
    scan = client.scan_iter

    second = 0

    def stalled(**options):
        nonlocal second
        monkeypatch.undo()
        second = lease.acquire(client, run, host="there", folder="/tmp", force=True)
        checkpoints.save(client, run, second, b"whole", {"updates": 1})
        return scan(**options)

    monkeypatch.setattr(client, "scan_iter", stalled)
    with pytest.raises(lease.LeaseLostError):
        checkpoints.sweep(client, run, first)
    assert checkpoints.load(client, run) == (b"whole", {"updates": 1})
    assert checkpoints.sweep(client, run, second) == 1
