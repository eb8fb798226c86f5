"""A run goes back, is parted and has fragments in quarantine, while its processes and its server are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.fault_fleet import ENDLESS, Fleet, fleet_of

from ddrl import codec
from ddrl.store import ledger, quarantine, runs, stream, weights

pytestmark = [pytest.mark.faults, pytest.mark.long]
SECTIONS = ENDLESS | {
    "learner": {"publish_every_s": 0.2, "checkpoint_every_s": 2},
    "weights": {"keep_last": 200},
}


def ddrl(fleet: Fleet, *words: str) -> dict[str, object]:
    return json.loads(fleet.processes.ddrl(fleet.server.url, *words, "--json").stdout)  # type: ignore[no-any-return]


def earlier(fleet: Fleet, draw: random.Random) -> int:
    """Return a version that is kept, and not among the newest, which may be gone in a moment."""
    return draw.choice(sorted(weights.index(fleet.client, fleet.run).sizes)[2:-2])


def go_back(fleet: Fleet, draw: random.Random) -> None:
    ddrl(fleet, "rollback", f"{fleet.run}@{earlier(fleet, draw)}", *["--keep-experience"] * draw.randrange(2))


def put_aside(fleet: Fleet, draw: random.Random) -> None:
    entry = draw.choice(stream.newest(fleet.client, fleet.run, 20))
    version = codec.decode(entry.fields).policy_version
    ddrl(fleet, "quarantine", fleet.run, "--versions", str(version))


def lift(fleet: Fleet, draw: random.Random) -> None:
    rules, _ = quarantine.read(fleet.client, fleet.run)
    if rules:
        ddrl(fleet, "quarantine", fleet.run, "--lift", str(draw.randint(1, len(rules))))


def part(fleet: Fleet, draw: random.Random) -> None:
    if len(runs.names(fleet.client)) < 3:
        source = f"{fleet.run}@{earlier(fleet, draw)}"
        fleet.processes.ddrl(fleet.server.url, "branch", source, "--detach", "--workers", "0", "--no-learner")


def kill_learner(fleet: Fleet) -> None:
    fleet.learner.kill()


def kill_players(fleet: Fleet) -> None:
    for pid in fleet.worker.pool():
        os.kill(pid, signal.SIGKILL)


def kill_server(fleet: Fleet) -> None:
    fleet.server.kill()
    fleet.server.start()


CHANGES = [go_back, put_aside, go_back, lift, part, put_aside]
KILLS = [kill_learner, kill_players, kill_server]


@pytest.mark.timeout(900)
def test_every_ledger_balances(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with fleet_of(tmp_path, SECTIONS, concurrency=2) as fleet:
        fleet.processes.until(lambda: fleet.state().version > 8)
        others = [fleet.start_learner() for _ in range(2)]  # of the branches
        for change in [*draw.sample(CHANGES, len(CHANGES)), *draw.sample(CHANGES, len(CHANGES))]:
            kill = draw.choice(KILLS)
            print(f"{change.__name__}, {kill.__name__}", flush=True)
            change(fleet, draw)
            time.sleep(draw.uniform(0.0, 1.5))  # the learner may have begun with it
            kill(fleet)
            fleet.ready()
        names = runs.names(fleet.client)
        assert len(names) > 1 and all(each.running for each in others)
        fleet.processes.until(lambda: all(runs.state(fleet.client, name).updates > 20 for name in names))
        for name in names:
            runs.set_status(fleet.client, name, "stopped", "by the test")
        fleet.processes.until(lambda: all(runs.state(fleet.client, name).ended for name in names))
        for name in names:
            audit = ledger.audit(fleet.client, name)
            assert audit.is_balanced and audit.total("refused") == audit.unknown == 0, (name, audit)
            assert audit.total("consumed") > 0
        rules, revision = quarantine.read(fleet.client, fleet.run)
        assert revision > len(rules) > 0
