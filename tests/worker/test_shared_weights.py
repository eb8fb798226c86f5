"""The processes of a machine fetch a version of the weights once, and get what the server has."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from support.learners import in_threads
from support.private_server import PrivateServer
from support.store import make_run

from ddrl.store import connection, leases, weights
from ddrl.store.server import try_lock, unlock
from ddrl.worker import shared_weights


@pytest.fixture
def run(client: Redis, home: Path, server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    yield make_run(client)


def publish(client: Redis, run: str, version: int, blob: bytes) -> None:
    token = leases.acquire(client, run, host="here", folder="/tmp", force=True)
    assert token is not None
    weights.publish(client, run, token, version=version, blob=blob, allowance=0, updates=0)


def num_fetches(client: Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"])


def files() -> list[Path]:
    return [one for one in (connection.runtime_dir() / "weights").glob("[a-z]*") if one.suffix != ".lock"]


def test_a_version_is_fetched_once_by_many(client: Redis, server: PrivateServer, run: str) -> None:
    blobs = {version: os.urandom(1_000_000) for version in range(5)}
    for version, blob in blobs.items():
        publish(client, run, version, blob)
    before, wrong = num_fetches(client), []

    def play() -> None:
        own = connection.connect(server.url)
        wrong.extend(version for version in blobs if shared_weights.get(own, run, version) != blobs[version])

    with in_threads(*[play] * 8, stop=lambda: None):
        pass
    assert wrong == [] and num_fetches(client) - before == 5


def test_a_version_that_was_dropped_or_is_published_anew_is_not_read_from_a_file(
    client: Redis, run: str
) -> None:
    assert shared_weights.get(client, run, 3) is None
    publish(client, run, 3, b"old")
    assert shared_weights.get(client, run, 3) == b"old"
    time.sleep(0.002)
    publish(client, run, 3, b"new")  # as by a learner of a server that came back older
    assert shared_weights.get(client, run, 3) == b"new"


def test_damaged_and_unwritable_files_do_no_harm(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, run, 1, b"weights")
    assert shared_weights.get(client, run, 1) == b"weights"
    (file,) = files()
    for damaged in (b"", b"x", file.read_bytes()[:-1]):
        file.write_bytes(damaged)
        assert shared_weights.get(client, run, 1) == b"weights"
    folder = connection.runtime_dir() / "weights"
    for one in folder.iterdir():
        one.unlink()
    folder.rmdir()
    folder.touch()  # no folder can be made
    assert shared_weights.get(client, run, 1) == b"weights"


def test_a_folder_that_is_closed_to_this_user_or_open_to_others_does_no_harm(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(client, run, 1, b"weights")
    (tmp_path / "ddrl").mkdir(mode=0o755)
    (tmp_path / "ddrl").chmod(0o755)
    for folder in (tmp_path, "/proc/none"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        assert shared_weights.get(client, run, 1) == b"weights"


def test_on_a_full_disk_old_files_go_and_no_draft_stays(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, run, 1, b"weights")
    shared_weights.get(client, run, 1)
    (file,) = files()
    os.utime(file, (1.0, 1.0))
    publish(client, run, 2, b"newer")

    def replace(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    before = num_fetches(client)
    assert shared_weights.get(client, run, 2) == b"newer" and num_fetches(client) == before + 1
    assert files() == []
    assert [one.suffix for one in (connection.runtime_dir() / "weights").iterdir()] == [".lock"]


def test_a_process_that_is_stopped_while_it_fetches_stops_no_other(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "WAIT_S", 0.05)
    publish(client, run, 1, b"weights")
    shared_weights.get(client, run, 1)
    publish(client, run, 2, b"newer")
    lock = try_lock(connection.runtime_dir() / "weights" / f"{run}.lock")
    assert lock is not None
    assert shared_weights.get(client, run, 2) == b"newer" and len(files()) == 1
    unlock(lock)


def test_old_files_go(client: Redis, run: str) -> None:
    publish(client, run, 1, b"weights")
    shared_weights.get(client, run, 1)
    (file,) = files()
    os.utime(file, (1.0, 1.0))
    publish(client, run, 2, b"newer")
    shared_weights.get(client, run, 2)
    assert len(files()) == 1 and file not in files()
