"""Runs change hands: after a death, on request, by force; and who was replaced writes nothing."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.learners import Learning
from support.private_server import PrivateServer, require_program
from support.processes import EXACT, Process, Processes, bound
from support.runs import start, target_config

from ddrl.store import checkpoints, keys, leases, ledger, local_checkpoints, runs, weights

pytestmark = pytest.mark.faults

ENDLESS: dict[str, Any] = {"stop": {"return": None, "time": 3600}, "evaluation": {"every_s": 3600, "near": 0}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PrivateServer, Processes]]:
    """A server and a worker that all tests share."""
    require_program()
    with contextlib.closing(PrivateServer()) as server, Processes(tmp_path_factory.mktemp("site")) as shared:
        shared.worker(server.url)
        yield server, shared


class Site:
    """A run that is played, and its learners."""

    def __init__(self, server: PrivateServer, processes: Processes) -> None:
        self.server, self.client, self.processes = server, server.client, processes
        self.run = self.submit("target")

    def submit(self, name: str) -> str:
        return start(self.client, target_config(name=name, **ENDLESS))

    def learner(self, *arguments: str, run: bool = True) -> Process:
        return self.processes.learner(self.server.url, self.run if run else None, *arguments)

    def until(self, condition: Callable[[], object], timeout_s: float = 120.0) -> float:
        return self.processes.until(condition, timeout_s)

    @property
    def fence(self) -> int:
        """How often the run was taken."""
        return int(self.client.hget(keys.state(self.run), "fence") or 0) >> 16

    @property
    def folder(self) -> Path:
        return Path(self.processes.folder, "runs", self.run)

    @property
    def saved_by(self) -> int:
        """How often the run had been taken when its local checkpoint was written; 0 where there is none."""
        return local_checkpoints.token(self.folder, self.run) >> 16

    def stall(self, learner: Process) -> None:
        """Stop a learner that has written a local checkpoint, and writes none at this moment."""
        self.until(lambda: self.saved_by)
        while True:
            learner.send(signal.SIGSTOP)
            time.sleep(0.1)
            if not list(self.folder.rglob("*.part")):
                return
            learner.send(signal.SIGCONT)
            time.sleep(0.05)

    @property
    def updates(self) -> int:
        return runs.state(self.client, self.run).updates

    def learns_by(self, fence: int) -> float:
        """Seconds until updates are made under a fencing token."""
        began = time.monotonic()
        self.until(lambda: self.fence == fence)
        before = self.updates
        self.until(lambda: self.updates > before)
        return time.monotonic() - began

    @contextlib.contextmanager
    def all_quiet(self, learner: Process) -> Iterator[None]:
        """The worker and a learner are stalled."""
        groups = [self.processes.started[0].pid, learner.pid]
        for group in groups:
            os.killpg(group, signal.SIGSTOP)
        time.sleep(0.5)  # what they have sent arrives
        yield
        for group in groups:
            os.killpg(group, signal.SIGCONT)

    def says(self, process: Process, text: str) -> None:
        self.until(lambda: re.search(text, process.text()))


@pytest.fixture
def site(fleet: tuple[PrivateServer, Processes]) -> Iterator[Site]:
    site = Site(*fleet)
    yield site
    for run in runs.active_names(site.client):
        runs.set_status(site.client, run, "stopped", "end of the test")
    for process in site.processes.started:
        if process.name == "learner" and process.running:
            process.send(signal.SIGCONT)
            process.kill()


def test_a_standby_goes_on_in_seconds_after_a_death_and_lets_go_when_asked(site: Site) -> None:
    first = site.learner()
    site.until(lambda: site.fence == 1)
    second = site.learner()
    site.learns_by(1)
    site.says(second, f"{site.run} is held by the learner on .*; waits for it")
    first.kill()
    took_s = site.learns_by(2)
    print(f"learner death -> next update with a standby waiting: {took_s:.1f} s")
    assert took_s < bound(5.0)

    third = site.learner("--take-over")
    site.until(lambda: runs.state(site.client, site.run).handover or site.fence == 3)
    took_s = site.learns_by(3)
    print(f"asked for -> next update by the one who asked: {took_s:.1f} s")
    assert took_s < bound(5.0) and second.wait() == 0
    who = rf"\S+ \(process {third.pid}\)"
    assert re.search(rf"hands {site.run} over to the learner on {who}, which asked for it", second.text())
    begun = re.search(r"starts at update (\d+)", third.text())
    assert begun is not None and int(begun[1]) > 0  # where the second ended
    assert runs.state(site.client, site.run).handover == ""
    third.send(signal.SIGTERM)
    assert third.wait() == 0 and f"leaves {site.run} active for the next learner" in third.text()
    assert [row["event"] for row in runs.journal(site.client, site.run)] == ["created", "handover"]
    audit = ledger.audit(site.client, site.run)
    assert audit.is_balanced and audit.total("consumed") > 0 and audit.total("refused") == 0


def test_a_learner_that_does_not_let_go_is_replaced_and_can_write_no_more(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    token = leases.acquire(site.client, site.run, host="deaf", folder="/tmp")
    refused: list[leases.LeaseLostError] = []

    def hold() -> None:
        while not refused:
            try:
                leases.renew(site.client, site.run, token or 0)
            except leases.LeaseLostError as error:
                refused.append(error)
            time.sleep(0.2)

    holder = threading.Thread(target=hold)
    holder.start()
    second = Learning(site.client, site.server.url, site.run, tmp_path, monkeypatch, take_over=True)
    site.until(lambda: runs.state(site.client, site.run).handover)
    waited_s = site.until(lambda: site.fence == 2)
    assert 4.0 < waited_s < bound(6.0)  # it was polite
    holder.join()
    site.until(lambda: runs.state(site.client, site.run).version >= 0)  # it learns
    second.end()
    assert f"{site.run} is held by the learner on deaf; asks it" in caplog.text
    assert f"takes {site.run} from the learner on deaf, which did not let go" in caplog.text


def snapshot(site: Site) -> tuple[dict[str, bytes], dict[str, int]]:
    """All that learners write: the run's keys, and when its files were written."""
    volatile = keys.lease(site.run).encode()
    found = {
        key.decode(): site.client.dump(key)
        for key in site.client.scan_iter(keys.run_pattern(site.run))
        if key != volatile
    }
    return found, {str(path): path.stat().st_mtime_ns for path in site.folder.rglob("*") if path.is_file()}


def test_a_stalled_learner_wakes_to_find_its_run_taken_and_writes_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.learner()
    site.until(lambda: site.fence == 1)
    service = site.learner(run=False)
    site.learns_by(1)
    site.says(service, "waits for runs")
    site.stall(first)
    site.learns_by(2)
    site.until(lambda: site.saved_by == 2)
    with site.all_quiet(service):  # so that whatever changes now is the work of the first
        server, files = snapshot(site)
        first.send(signal.SIGCONT)
        assert first.wait() == 1
        server_then, files_then = snapshot(site)
        assert server_then == server
        assert files_then.items() <= files.items()  # it may remove what it had begun itself
    errors = [line for line in first.text().splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and re.search(rf"run {site.run}: the learner on \S+ took it over", errors[0]), (
        errors
    )
    site.learns_by(2)  # the other one was stalled itself, and nobody has replaced it

    second = Learning(site.client, site.server.url, site.run, tmp_path, monkeypatch)
    service.send(signal.SIGSTOP)
    site.until(lambda: site.fence == 3)
    service.send(signal.SIGCONT)
    site.says(service, f"run {site.run}: the learner on .* took it over")
    other = site.submit("other")
    site.until(lambda: runs.state(site.client, other).updates > 0)  # both are learned, side by side
    assert second.thread.is_alive() and site.fence == 3
    runs.set_status(site.client, other, "stopped", "by the test")
    site.says(service, f"{other}: stopped")
    second.end()
    site.learns_by(4)  # a service takes back what it had lost
    assert ledger.audit(site.client, site.run).is_balanced


WRITER = """
import sys
from ddrl.store import checkpoints, connection, weights
run, token = sys.argv[1], int(sys.argv[2])
client = connection.connect()
number = 0
print("writes", flush=True)
while True:
    number += 1
    version = weights.index(client, run).latest + 1
    blob = bytes([version % 256]) * (1 << 20)
    weights.publish(
        client, run, token, version=version, blob=blob, allowance=version, updates=version, drop=(version - 2,)
    )
    checkpoints.save(client, run, token, blob * 9, {"number": number})
"""


def test_writers_killed_at_random_points_leave_whole_versions_and_checkpoints(site: Site) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    latest, strays = -1, 0
    for _ in range(20 if EXACT else 8):
        token = leases.acquire(site.client, site.run, host="here", folder="/tmp", force=True)
        writer = site.processes.start("writer", site.server.url, "-c", WRITER, site.run, str(token))
        site.says(writer, "writes")
        time.sleep(draw.uniform(0.05, 0.4))
        writer.kill()
        index = weights.index(site.client, site.run)
        assert index.latest >= latest
        latest = index.latest
        assert latest < 0 or weights.get(site.client, site.run, latest) == bytes([latest % 256]) * (1 << 20)
        stored = site.client.keys(keys.of_run(site.run, "weights:*"))
        assert len(stored) == len(index.sizes) <= 2  # no blob without its pointer
        assert runs.state(site.client, site.run).version == latest
        successor = leases.acquire(site.client, site.run, host="here", folder="/tmp", force=True)
        strays += checkpoints.sweep(site.client, site.run, successor or 0)
        found = checkpoints.load(site.client, site.run)
        assert found is None or (len(found[0]) == 9 << 20 and len(set(found[0])) == 1)
        parts = site.client.keys(keys.checkpoint_pattern(site.run))
        assert len(parts) == (0 if found is None else 3)
    print(f"{strays} stray parts of checkpoints were swept")
    assert latest > 0
