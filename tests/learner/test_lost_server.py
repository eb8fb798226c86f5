"""A server comes back empty, or another one takes its place: learners restore their runs, and play goes on."""

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
from support.learners import Learning
from support.private_server import PrivateServer, require_program
from support.processes import Process, Processes, bound
from support.runs import start, target_config

from ddrl.learner import run as run_module
from ddrl.store import connection, keys, leases, ledger, runs, weights

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
        """Seconds until there are more updates and fragments than there were, by default than now."""
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
        """(update, transitions held) with which a learner's attempts began."""
        found = re.findall(r"starts at update (\d+), env step \d+, holding (\d+) transitions", learner.text())
        return [(int(update), int(held)) for update, held in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require_program()
    with contextlib.closing(PrivateServer()) as server, Processes(tmp_path_factory.mktemp("site")) as shared:
        yield Site(server, shared)


@pytest.mark.parametrize("how", ["restarted", "flushed"])
def test_a_running_learner_restores_its_run_on_an_empty_server(site: Site, how: str) -> None:
    site.goes_on()
    before, restored = site.state(), site.learner.text().count("restored from")
    assert before is not None
    if how == "restarted":
        site.server.kill()
        site.server.start()
    else:
        site.client.flushall()
    took_s = site.goes_on(after=before)
    print(f"{how}: server empty -> play and updates beyond those of before: {took_s:.1f} s")
    assert took_s < bound(10.0)
    now = site.state()
    assert now is not None and (now.created_s, now.first_step_s) == (before.created_s, before.first_step_s)
    assert now.version > before.version and runs.names(site.client) == [site.run]
    assert runs.config(site.client, site.run) == target_config(**ENDLESS)
    assert [row["event"] for row in runs.journal(site.client, site.run)].count("restored") == 1
    assert site.learner.text().count("restored from") == restored + 1 and site.learner.running
    update, held = site.beginnings(site.learner)[-1]
    assert update >= before.updates and held == 0  # it continues with what it had learned; the replay is lost
    site.until(lambda: ledger.audit(site.client, site.run).is_balanced)
    audit = ledger.audit(site.client, site.run)
    assert audit.total("consumed") > 0 and audit.total("refused") == 0


def test_resume_restores_a_run_from_its_folder(site: Site) -> None:
    site.goes_on()
    site.learner.send(signal.SIGTERM)
    assert site.learner.wait() == 0
    before = site.state()
    site.client.flushall()
    done = site.processes.ddrl(site.server.url, "resume", site.run, "--detach", "--json")
    assert json.loads(done.stdout)["run"] == site.run
    assert f"{site.run}: the server does not know it; restored from" in done.stderr
    site.learner = site.start_learner()
    site.goes_on(after=before)
    assert site.beginnings(site.learner) == [(before.updates, 0)]
    warmup = target_config().replay.warmup_steps
    assert f"updates go on after {warmup} more steps" in site.learner.text()
    assert weights.index(site.client, site.run).latest > before.version


def test_a_new_learner_restores_the_run_and_a_standby_leaves_that_to_the_holder(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    site.goes_on()
    site.learner.kill()
    site.client.flushall()
    site.learner = site.start_learner()
    site.goes_on()
    assert site.learner.text().count("restored from") == 1
    standby = Learning(site.client, site.server.url, site.run, tmp_path, monkeypatch)
    site.until(lambda: "waits for it" in caplog.text)
    site.client.flushall()
    site.goes_on()
    assert site.learner.text().count("restored from") == 2 and "restored" not in caplog.text
    standby.end()


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
        run_module.learn(site.client, site.run, site.processes.folder / "runs", run_module.Interrupt())
    assert leases.acquire(site.client, site.run, host="here", folder="/tmp") is None
