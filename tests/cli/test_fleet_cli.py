"""`ddrl fleet`: what it says of workers, of runs, and of why a run is not played."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from support.commands import call, call_json
from support.runs import start, target_config
from support.store import heartbeat, note_playing, take, want_processes

from ddrl.store import keys, learners, segments, workers


def test_an_empty_fleet(client: Any) -> None:
    assert call("fleet") == "no workers; start `celery -A ddrl worker` on every machine that is to play\n"
    assert call_json("fleet") == {"workers": [], "versions_differ": {}, "runs": []}


def test_workers_what_they_play_and_the_shares_of_runs(client: Any) -> None:
    heavy, light = start(client, target_config()), start(client, target_config())
    want_processes(client, heavy), want_processes(client, light)
    client.hset(keys.state(heavy), "weight", 3)
    workers.beat(client, heartbeat("a@one", 3))
    workers.beat(client, replace(heartbeat("b@two", 1), host="two"))
    for pid, run in enumerate((heavy, heavy, light)):
        note_playing(client, run, node="a@one", pid=pid)
    client.hset(keys.state(heavy), "mean_processes", 1.5)
    client.hset(keys.state(light), "mean_processes", 0.5)
    report = call_json("fleet")
    assert [worker["playing"] for worker in report["workers"]] == [{heavy: 2, light: 1}, {}]
    shares = {run["run"]: (run["share"], run["entitled"], run["playing"]) for run in report["runs"]}
    assert shares == {heavy: (pytest.approx(0.75), 0.75, 2), light: (pytest.approx(0.25), 0.25, 1)}
    text = call("fleet")
    assert f"{heavy} 2, {light} 1" in text and "75 %" in text
    assert text.endswith("2 machines, 2 workers, 4 processes, 3 of them playing; 2 active runs\n")


def test_a_paused_run_is_listed_and_entitled_to_nothing(client: Any) -> None:
    paused, active = start(client, target_config()), start(client, target_config())
    for run in (paused, active):
        want_processes(client, run)
    workers.beat(client, heartbeat("a@one", 3))
    call("pause", paused)
    rows = {row["run"]: row for row in call_json("fleet")["runs"]}
    assert [rows[run]["status"] for run in (paused, active)] == ["paused", "active"]
    assert [rows[run]["entitled"] for run in (paused, active)] == [None, 1.0]
    assert not rows[paused]["wants"] and f"`ddrl resume {paused}`" in rows[paused]["note"]
    text = call("fleet")
    assert paused in text and text.endswith("0 of them playing; 1 active run\n")


def test_why_a_run_is_not_played(client: Any) -> None:
    run = start(client, target_config())

    def note() -> str:
        return str(call_json("fleet")["runs"][0]["note"])

    want_processes(client, run)
    assert "no worker plays ddrl.rollout: start" in note()
    workers.beat(client, heartbeat("a@one", 3))
    segments.note_refusal(client, run, "one", "host one: ddrl is 9, the run was submitted with 1")
    assert "host one: ddrl is 9" in note()
    client.delete(keys.refusals(run))
    client.hset(keys.counts(run), mapping={"appended_steps": 10**9, "appended_fragments": 1})
    assert note() == "its allowance is used up: waits for its learner"
    client.hset(keys.counts(run), "appended_steps", 1)
    assert note() == "waits for a process"
    want_processes(client, start(client, target_config()))
    client.hset(keys.counts(run), "virtual_ms", 10)
    assert note() == "has had its share: waits for its turn"


def test_versions_that_differ_and_machines_that_leave_are_shown(client: Any) -> None:
    for host, version in (("one", "2.3"), ("two", "2.4"), ("three", "2.3")):
        machine = {"cores": 8, "gpus": ("H100",), "memory_bytes": 2**34, "started_s": time.time() - 65}
        reports = {"host": host, "versions": {"numpy": version, "ddrl": "1"}, "draining": host == "two"}
        workers.beat(client, replace(heartbeat(f"a@{host}", 2), **machine, **reports))
    text = call("fleet")
    assert "versions of numpy differ: 2.3 on one, three; 2.4 on two" in text
    assert "H100" in text and "16.0 GB" in text and "leaves" in text and "up 1m0" in text


def test_every_rank_of_a_run_is_shown(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "TTL_S", 600.0)
    run = start(client, target_config(learner={"num_learners": 3}))
    take(client, run)
    member = learners.Member(host="one", pid=1, address="10.0.0.1", device="cpu", versions={})
    for rank, host in ((1, "two"), (0, "one"), (-1, "three")):
        busy = {"rank": rank, "updates_per_s": 120.0 + rank, "waiting": 0.25}
        learners.announce(client, run, host, replace(member, host=host, **busy))
    [row] = call_json("fleet")["runs"]
    expected = [(0, "one", 120.0), (1, "two", 121.0), (-1, "three", 119.0)]
    for found in (row["learners"], call_json("status", run)["learners"]):
        assert [(one["rank"], one["host"], one["updates_per_s"]) for one in found] == expected
        assert {one["device"] for one in found} == {"cpu"} and found[0]["waiting"] == 0.25
    for text in (call("fleet"), call("status", run)):
        lines = [
            " ".join(line.split()).removeprefix(f"{run} ") for line in text.splitlines() if " cpu " in line
        ]
        assert lines == ["rank 0 one 1 cpu 120 25 %", "rank 1 two 1 cpu 121 25 %", "waits three 1 cpu - -"]
