"""`ddrl backfill`, `rollback` and `quarantine`: what they do to a run's records, and what they refuse."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.commands import call, call_json, refused
from support.processes import Processes
from support.runs import play_steps, publish_initial, start, target_config
from support.store import add_history, end, events, make_run, take

from ddrl.runs import records
from ddrl.store import evaluations, keys, quarantine, runs, weights
from ddrl.store.quarantine import Rule


@pytest.fixture
def played(server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A run of the toy with five versions, the first of which has played."""
    monkeypatch.setenv("DDRL_REDIS_URL", server.url)
    monkeypatch.chdir(tmp_path)
    client = server.client
    run = start(client, target_config(evaluation={"num_episodes": 6}))
    token = take(client, run)
    publish_initial(client, run, token)
    play_steps(client, run, token, 200)
    blob = weights.get(client, run, 0)
    assert blob is not None
    for version in range(1, 5):
        weights.publish(client, run, token, version=version, blob=blob, allowance=0, updates=100 * version)
    return run


def test_versions_are_evaluated_on_processes_of_this_command(
    server, played: str, processes: Processes
) -> None:
    """Each once, on the seeds of the run's evaluations; they stand where their version was new."""
    client, run = server.client, played
    end(client, run)

    def backfill(*options: str) -> Any:
        return json.loads(
            processes.ddrl(server.url, "backfill", run, "--workers", "1", *options, "--json").stdout
        )

    rows = backfill("--every", "2")
    assert [(row["version"], row["episodes"]) for row in rows] == [(0, 6), (1, 0), (2, 6), (3, 0), (4, 6)]
    means = {row["return_mean"] for row in rows if row["episodes"]}
    assert len(means) == 1 and rows[0]["interval"][0] <= means.pop() <= rows[0]["interval"][1]
    known, _ = evaluations.results(client, run)
    assert {(row["purpose"], row["first_seed"], row["num_envs"]) for row in known} == {
        ("backfill", 1_000_000, 10)
    }
    assert [row["updates"] for row in sorted(known, key=lambda row: row["version"])] == [0, 200, 400]
    index = weights.index(client, run)
    assert all(row["time_s"] == index.published[row["version"]][0] / 1e3 for row in known)
    first = min(row["time_s"] for row in records.read(client, run).evaluated)
    assert first == 0.0  # published before the first step
    before = client.xlen(keys.evaluations(run))
    rows = backfill("-n", "6")
    assert [row["episodes"] for row in rows] == [6] * 5 and client.xlen(keys.evaluations(run)) == before + 2
    assert "all of these versions have such an evaluation" in commands.run("backfill", run).err
    assert not [key for key in client.keys("*") if b"evaluating:" in key or b"players:" in key]


def test_backfill_needs_somebody_who_plays(played: str) -> None:
    assert refused("backfill", played) == (
        "backfill: nobody plays this run's evaluations; start workers, or add --workers 2"
    )


def test_a_rollback_is_noted_with_what_it_leaves_out(server, played: str) -> None:
    client, run = server.client, played
    line = refused("rollback", f"{run}@4")
    assert line == f"{run}@4: is the newest version; name an earlier one of `ddrl versions {run}`"
    assert "no weights of version 17; kept are 0, 1, 2, 3, 4" in refused("rollback", f"{run}@17")
    assert call_json("rollback", f"{run}@1") == {"run": run, "version": 1, "from": 4}
    assert client.get(keys.rollback(run)) == weights.get(client, run, 1)
    assert quarantine.read(client, run) == ((Rule(first_version=2, last_version=4),), 1)
    assert "its learner goes on from there" in call("rollback", f"{run}@2", "--keep-experience")
    assert len(quarantine.read(client, run)[0]) == 1 and runs.state(client, run).revision == 2
    [first, second] = records.read(client, run).changes
    assert (first["option"], first["from"], first["to"], second["to"]) == ("version", 4, 1, 2)
    assert "rollback" in call("journal", run)
    client.delete(keys.lease(run))
    end(client, run)
    assert f"`ddrl resume {run}` goes on from there" in call("rollback", f"{run}@2")
    other = start(client, target_config())
    publish_initial(client, other, take(client, other))
    end(client, other, "solved")
    assert (
        refused("rollback", f"{other}@0")
        == f"{other}: is solved; `ddrl branch {other}@0` starts another run from there"
    )


def test_quarantine_lists_adds_and_lifts(server, played: str) -> None:
    client, run = server.client, played
    host = socket.gethostname()
    producer = next(iter(client.hgetall(keys.producers(run)))).decode()
    assert f"{run}: nothing is in quarantine" in call("quarantine", run)
    for option in (("--host", host), ("--producer", producer), ("--versions", "0"), ("--since", "1h")):
        assert f"would leave {run} nothing of its" in refused("quarantine", run, *option)
    assert "no fragment in the stream" in refused("quarantine", run, "--versions", "7-9")
    assert "is no range of versions; write it like 40-57" in refused("quarantine", run, "--versions", "x")
    assert "write it like 7-9" in refused("quarantine", run, "--versions", "9-7")
    assert quarantine.read(client, run) == ((), 0)
    play_steps(client, run, 0, 100)  # by version 4
    report = call_json("quarantine", run, "--versions", "4")
    [rule] = report["rules"]
    assert (rule["rule"], rule["what"]) == (1, "versions 4 to 4") and 100 <= rule["env_steps"] < 200
    assert report["fragments"] == rule["fragments"] < report["of"]
    assert call_json("audit", run)["quarantined"] == rule["fragments"] and "in quarantine" in call(
        "audit", run
    )
    call("quarantine", run, "--host", "elsewhere")
    assert [row["fragments"] for row in call_json("quarantine", run)["rules"]] == [rule["fragments"], 0]
    assert "versions 4 to 4" in call("quarantine", run)
    assert "not together with a new rule" in refused("quarantine", run, "--lift", "1", "--host", "h")
    assert refused("quarantine", run, "--lift", "3") == f"--lift 3: {run} has 2 rules of quarantine"
    assert [row["what"] for row in call_json("quarantine", run, "--lift", "1")["rules"]] == ["host elsewhere"]
    assert events(client, run).count("quarantine") == 3


def test_a_run_without_play_has_nothing_to_list(client: Any) -> None:
    run = make_run(client)
    assert call_json("episodes", run) == [] and call_json("quarantine", run)["of"] == 0
    add_history(client, run)  # fragments that nobody can read
    assert call_json("episodes", run) == []
