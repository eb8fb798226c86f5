"""Runs change hands: after a death, on request, by force; a learner that was replaced writes nothing."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.learners import Run, until
from support.private_server import PrivateServer, require_program
from support.processes import EXACT, Process, Processes, bound
from support.runs import target_config

from ddrl.store import checkpoints, keys, leases, local_checkpoints, runs, weights

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
        self.run = Run(server, target_config(**ENDLESS))
        self.client, self.processes, self.until = self.run.client, processes, processes.until

    def learner(self, *arguments: str, of: str | None) -> Process:
        return self.processes.learner(self.run.url, of, *arguments)

    @property
    def fence(self) -> int:
        """How often the run was taken."""
        return self.run.token >> 16

    @property
    def folder(self) -> Path:
        return Path(self.processes.folder, "runs", self.run.id)

    @property
    def saved_by(self) -> int:
        """How often the run had been taken when its local checkpoint was written; 0 where there is none."""
        return local_checkpoints.token(self.folder, self.run.id) >> 16

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

    def learns_by(self, fence: int) -> float:
        """Return the seconds until updates are made under a fencing token."""
        began = time.monotonic()
        self.until(lambda: self.fence == fence)
        before = self.run.state.updates
        self.until(lambda: self.run.state.updates > before)
        return time.monotonic() - began

    @contextlib.contextmanager
    def all_quiet(self, learner: Process) -> Iterator[None]:
        """Stall the worker and a learner."""
        groups = [self.processes.started[0].pid, learner.pid]
        for group in groups:
            os.killpg(group, signal.SIGSTOP)
        time.sleep(0.5)  # what they have sent arrives
        yield
        for group in groups:
            os.killpg(group, signal.SIGCONT)

    def has_logged(self, process: Process, text: str) -> None:
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


def test_a_standby_goes_on_in_seconds_after_a_death_and_hands_over_on_request(
    site: Site, learn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = site.run
    first = site.learner(of=run.id)
    site.until(lambda: site.fence == 1)
    second = site.learner(of=run.id)
    site.learns_by(1)
    site.has_logged(second, f"{run.id} is held by the learner on .*; waits for it")
    first.kill()
    took_s = site.learns_by(2)
    print(f"learner death -> next update with a standby waiting: {took_s:.1f} s")
    assert took_s < bound(5.0)

    third = learn(run, take_over=True)
    site.until(lambda: run.state.handover or site.fence == 3)
    took_s = site.learns_by(3)
    print(f"requested -> next update by the requester: {took_s:.1f} s")
    assert took_s < bound(5.0) and second.wait() == 0
    who = rf"\S+ \(process {os.getpid()}\)"
    assert re.search(rf"hands {run.id} over to the learner on {who}, which requested it", second.text())
    begun = re.search(r"starts at update (\d+)", caplog.text)
    assert begun is not None and int(begun[1]) > 0  # where the second ended
    assert run.state.handover == ""
    third.end()
    assert third.error is None and f"leaves {run.id} active for the next learner" in caplog.text
    assert run.journal == ["created", "handover"]
    audit = run.audit()
    assert audit.total("consumed") > 0 and audit.total("refused") == 0


def test_a_learner_that_does_not_hand_over_is_replaced_and_can_write_no_more(
    server, learn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = Run(server, target_config(**ENDLESS))
    token = leases.acquire(run.client, run.id, host="stalled", folder="/tmp")
    refused: list[leases.LeaseLostError] = []

    def hold() -> None:
        while not refused:
            try:
                leases.renew(run.client, run.id, token or 0)
            except leases.LeaseLostError as error:
                refused.append(error)
            time.sleep(0.2)

    holder = threading.Thread(target=hold)
    holder.start()
    second = learn(run, take_over=True)
    until(lambda: run.state.handover)
    began = time.monotonic()
    until(lambda: second.holds_after(token or 0))
    assert 4.0 < time.monotonic() - began < bound(6.0)  # it waited for a handover
    holder.join()
    until(lambda: run.state.version >= 0)  # it learns
    assert f"{run.id} is held by the learner on stalled; requests it" in caplog.text
    assert f"takes {run.id} from the learner on stalled, which did not hand it over" in caplog.text


def test_a_stalled_learner_wakes_to_find_its_run_taken_and_writes_nothing(site: Site, learn) -> None:
    run = site.run
    first = site.learner(of=run.id)
    site.until(lambda: site.fence == 1)
    service = site.learner(of=None)
    site.learns_by(1)
    site.has_logged(service, "waits for runs")
    site.stall(first)
    site.learns_by(2)
    site.until(lambda: site.saved_by == 2)

    def files() -> set[tuple[Path, int]]:
        return {(path, path.stat().st_mtime_ns) for path in site.folder.rglob("*") if path.is_file()}

    with site.all_quiet(service):  # so that whatever changes now is the work of the first
        before, files_before = run.keys(), files()
        first.send(signal.SIGCONT)
        assert first.wait() == 1
        assert run.keys() == before
        assert files() <= files_before  # it may remove what it had begun itself
    (error,) = (line for line in first.text().splitlines() if "error" in line.lower())
    assert re.search(rf"run {run.id}: the learner on \S+ took it over", error)
    site.learns_by(2)  # the other one was stalled itself, and nobody has replaced it

    second = learn(run)
    service.send(signal.SIGSTOP)
    site.until(lambda: site.fence == 3)
    service.send(signal.SIGCONT)
    site.has_logged(service, f"run {run.id}: the learner on .* took it over")
    other = Run(run.server, target_config(name="other", **ENDLESS))
    site.until(lambda: other.state.updates > 0)  # both are learned, side by side
    assert second.thread.is_alive() and site.fence == 3
    runs.set_status(site.client, other.id, "stopped", "by the test")
    site.has_logged(service, f"{other.id}: stopped")
    second.end()
    site.learns_by(4)  # a service takes back what it had lost
    run.audit()


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


def test_writers_killed_at_random_points_leave_whole_versions_and_checkpoints(
    server, processes: Processes
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw, run = random.Random(seed), Run(server)
    latest, strays = -1, 0
    for _ in range(20 if EXACT else 4):
        writer = processes.start("writer", run.url, "-c", WRITER, run.id, str(run.take()))
        processes.until(lambda one=writer: "writes" in one.text())
        time.sleep(draw.uniform(0.05, 0.4))
        writer.kill()
        index = run.index
        assert index.latest >= latest
        latest = index.latest
        assert latest < 0 or weights.get(run.client, run.id, latest) == bytes([latest % 256]) * (1 << 20)
        stored = run.client.keys(keys.of_run(run.id, "weights:*"))
        assert len(stored) == len(index.sizes) <= 2  # no blob without its pointer
        assert run.state.version == latest
        strays += checkpoints.sweep(run.client, run.id, run.take())
        found = checkpoints.load(run.client, run.id)
        assert found is None or (len(found[0]) == 9 << 20 and len(set(found[0])) == 1)
        parts = run.client.keys(keys.checkpoint_pattern(run.id))
        assert len(parts) == (0 if found is None else 3)
    print(f"{strays} stray parts of checkpoints were swept")
    assert latest > 0
