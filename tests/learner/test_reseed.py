"""A server comes back empty, or another one takes its place: learners plant their runs again, and play goes on."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.private_server import PrivateServer, require_program
from support.processes import Process, Processes, bound
from support.runs import start, target_config
from support.sessions import Learning

from ddrl.learner import run as runner
from ddrl.store import connection, keys, ledger, runs, weights
from ddrl.store import leases as lease

pytestmark = pytest.mark.faults

ENDLESS: dict[str, Any] = {
    "stop": {"return": None, "time": 3600},
    "evaluation": {"every_s": 3600, "near": 0},
    "replay": {"samples_per_insert": 4},
}


class Site:
    """A server without persistence, a worker, a learner, a run."""

    def __init__(self, server: PrivateServer, processes: Processes) -> None:
        self.server, self.client, self.processes = server, server.client, processes
        self.worker = processes.worker(server.url)
        self.run = start(self.client, target_config(**ENDLESS))
        self.learner = self.start_learner()
        self.goes_on()

    def start_learner(self) -> Process:
        return self.processes.learner(self.server.url, self.run)

    def state(self) -> runs.RunState | None:
        with contextlib.suppress(runs.UnknownRunError, *connection.UNREACHABLE):
            return runs.state(self.client, self.run)
        return None

    def until(self, condition: Callable[[], object], timeout_s: float = 120.0) -> float:
        return self.processes.until(condition, timeout_s)

    def goes_on(self, *, after: runs.RunState | None = None) -> float:
        """Seconds until there are more updates and steps than there were, by default than now."""
        began = time.monotonic()
        self.until(self.state)
        before = after or self.state()
        assert before is not None

        def has_gone_on() -> bool:
            now = self.state()
            return (
                now is not None
                and now.updates > before.updates
                and now.appended_fragments > before.appended_fragments
            )

        self.until(has_gone_on)
        return time.monotonic() - began

    def beginnings(self, learner: Process) -> list[tuple[int, int]]:
        """(update, transitions held) with which a learner's sessions began."""
        found = re.findall(r"starts at update (\d+), env step \d+, holding (\d+) transitions", learner.text())
        return [(int(update), int(held)) for update, held in found]

    def reason(self) -> str:
        """Of the journal's newest entry about a re-seeding."""
        return [row for row in runs.journal(self.client, self.run) if row["event"] == "re-seeded"][-1][
            "reason"
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require_program()
    with contextlib.closing(PrivateServer()) as server, Processes(tmp_path_factory.mktemp("site")) as shared:
        yield Site(server, shared)


@pytest.mark.parametrize("how", ["restarted", "flushed"])
def test_a_running_learner_gives_an_empty_server_its_run_again(site: Site, how: str) -> None:
    site.goes_on()
    time.sleep(0.5)  # the learner has looked at what the server knows
    before, said = site.state(), site.learner.text().count("re-seeded")
    assert before is not None
    if how == "restarted":
        site.server.kill()
        site.server.start()
    else:
        site.client.flushall()
    took_s = site.goes_on(after=before)
    site.goes_on()
    print(f"{how}: server empty -> play and updates beyond those of before: {took_s:.1f} s")
    assert took_s < bound(10.0)
    now = site.state()
    assert now is not None and (now.created_s, now.first_step_s) == (before.created_s, before.first_step_s)
    assert now.version > before.version and runs.names(site.client) == [site.run]
    assert runs.config(site.client, site.run) == target_config(**ENDLESS)
    assert "old server is lost" in site.reason()
    assert site.learner.text().count("re-seeded") == said + 1 and site.learner.running
    assert site.beginnings(site.learner)[-1][1] > 0  # the learner has kept its view
    site.until(lambda: ledger.audit(site.client, site.run).is_balanced)
    audit = ledger.audit(site.client, site.run)
    assert audit.total("consumed") > 0 and audit.total("refused") == 0


def test_resume_brings_a_run_back_from_its_folder(site: Site) -> None:
    site.goes_on()
    site.learner.send(signal.SIGTERM)
    assert site.learner.wait() == 0
    before = site.state()
    site.client.flushall()
    done = site.processes.ddrl(site.server.url, "resume", site.run, "--detach", "--json")
    assert json.loads(done.stdout)["run"] == site.run
    assert f"{site.run}: the server came without it; re-seeded from" in done.stderr
    site.learner = site.start_learner()
    site.goes_on(after=before)
    assert site.beginnings(site.learner) == [(before.updates, 0)]
    warmup = target_config().replay.warmup_steps
    assert f"updates go on after {warmup} more steps" in site.learner.text()
    assert weights.index(site.client, site.run).latest > before.version


def test_a_learner_brings_its_run_back_by_itself_and_one_that_waits_leaves_that_to_who_holds_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    site.goes_on()
    site.learner.kill()
    site.client.flushall()
    site.learner = site.start_learner()
    site.goes_on()
    assert "re-seeded from runs" in site.learner.text()
    second = Learning(site.client, site.server.url, site.run, tmp_path, monkeypatch)
    site.until(lambda: "waits for it" in caplog.text)
    site.client.flushall()
    site.goes_on()
    assert site.learner.text().count("re-seeded from the learner") == 1 and "re-seeded" not in caplog.text
    second.end()


def test_a_run_that_was_deleted_while_its_learner_was_stalled_stays_deleted(site: Site) -> None:
    site.goes_on()
    site.learner.send(signal.SIGSTOP)
    runs.set_status(site.client, site.run, "stopped", "by the test")
    site.until(lambda: not runs.state(site.client, site.run).leased)
    runs.delete(site.client, site.run)
    site.learner.send(signal.SIGCONT)
    assert site.learner.wait() != 0
    assert f"run {site.run}: was deleted" in site.learner.text().splitlines()[-1]
    assert runs.names(site.client) == [] and not site.client.keys(keys.run_pattern(site.run))
    with pytest.raises(connection.StoreError, match="was deleted"):
        runner.learn(site.client, site.run, site.processes.folder / "runs", runner.Interrupt())
    assert lease.acquire(site.client, site.run, host="here", folder="/tmp") is None
