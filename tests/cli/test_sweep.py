"""`ddrl sweep`: trials are runs, the best is kept, an interrupted sweep goes on; what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from support import commands
from support.processes import Processes, command_of, descendants
from support.runs import target_tree

from ddrl import config
from ddrl.store import runs

pytest.importorskip("optuna")

SEARCH = {"algorithm.gamma": {"low": 0.3, "high": 0.6}, "algorithm.hidden_sizes": [[16], [32, 32]]}


def study(folder: Path, **changes: Any) -> Path:
    """Write a study of the toy; return its path."""
    path = folder / "toy.yaml"
    tree = {"config": target_tree(), "search": SEARCH, "trials": 2, "options": {"stop.time": "60s"}} | changes
    path.write_text(yaml.safe_dump({name: value for name, value in tree.items() if value is not None}))
    return path


def sweep(processes: Processes, url: str, path: Path) -> Any:
    done = processes.ddrl(url, "sweep", str(path), "--learner", "--workers", "1", "--json")
    return json.loads(done.stdout)


def test_the_best_of_some_trials(server: Any, tmp_path: Path) -> None:
    """More trials later go on from those before."""
    with Processes(tmp_path) as processes:
        report = sweep(processes, server.url, study(tmp_path, trials=1))
        assert [row["status"] for row in report["trials"]] == ["complete"]
        first = {row["trial"]: row["run"] for row in report["trials"]}
        report = sweep(processes, server.url, study(tmp_path))
    rows = report["trials"]
    assert len(rows) == 2 and first.items() <= {row["trial"]: row["run"] for row in rows}.items()
    assert [row["value"] for row in rows] == sorted((row["value"] for row in rows), reverse=True)
    assert report["best"] == rows[0] and rows[0]["value"] > -0.6
    for row in rows:
        stored = runs.config(server.client, row["run"])
        assert stored.algorithm["gamma"] == row["options"]["algorithm.gamma"]
        assert list(stored.algorithm["hidden_sizes"]) == row["options"]["algorithm.hidden_sizes"]
        assert runs.status(server.client, row["run"]) == "solved"
    folder = tmp_path / "sweeps" / "toy"
    assert config.load(folder / "best.yaml").algorithm["gamma"] == rows[0]["options"]["algorithm.gamma"]
    assert (folder / "sweep.png").stat().st_size > 5_000


def test_a_trial_that_fails_leaves_the_others(server: Any, tmp_path: Path) -> None:
    """One whose networks become NaN, again and again."""
    path = study(tmp_path, search={"algorithm.learning_rate": [1e-3, 1e6]}, trials=2, parallel=2, seed=0)
    with Processes(tmp_path) as processes:
        report = sweep(processes, server.url, path)
    found = sorted((row["status"], row["options"]["algorithm.learning_rate"]) for row in report["trials"])
    assert {*found} == {("complete", 1e-3), ("fail", 1e6)}
    assert report["best"]["value"] > -0.6


LIVE = {"algorithm.learning_rate": {"low": 1e-6, "high": 1e-2, "log": True}}


@pytest.mark.long
def test_the_worst_of_a_population_go_on_from_the_best(server: Any, tmp_path: Path) -> None:
    options = {"stop.return": None, "stop.time": "20s", "evaluation.every_s": 0.5, "evaluation.near": 0}
    path = study(
        tmp_path,
        search=LIVE,
        options=options,
        method="population",
        compare_every=2,
        trials=5,
        parallel=3,
        seed=4,
    )
    with Processes(tmp_path) as processes:
        report = sweep(processes, server.url, path)
    rows = {row["run"]: row for row in report["trials"]}
    followers = [row for row in rows.values() if row["from"]]
    assert len(rows) == 5 and len(followers) == 2
    assert [row["status"] for row in rows.values()].count("pruned") == 2
    for row in followers:
        rate, parent = row["options"]["algorithm.learning_rate"], rows[row["from"]]
        before = parent["options"]["algorithm.learning_rate"]
        assert rate == pytest.approx(min(max(before * 0.8, 1e-6), 1e-2)) or rate == pytest.approx(
            min(before * 1.25, 1e-2)
        )
        assert runs.state(server.client, row["run"]).warm.startswith(f"{row['from']}, update ")
        stored = runs.config(server.client, row["run"])
        assert stored.stop.time < 20 and stored.algorithm["critic_warmup_updates"] == 0
    assert report["best"]["value"] == max(row["value"] for row in rows.values() if row["value"] is not None)


@pytest.mark.parametrize(
    ("values", "value"),
    [
        ({"low": 1, "high": 3}, 1), ({"low": 1, "high": 30}, 20),
        ({"low": 1e-5, "high": 1e-2, "log": True}, 1e-2),
        ([[16], [32], [64]], "[32]"), ([[16], [32]], "[16]"),
    ],
)  # fmt: skip
def test_perturbed_values_are_near_and_allowed(values: Any, value: Any) -> None:
    from ddrl.cli import sweep as command

    searched = values if isinstance(values, list) else command.Range(**values)
    found = {command._perturbed(value, searched, random.Random(seed)) for seed in range(40)}
    assert found - {value}, "it never moves"
    if isinstance(values, list):
        assert found <= {json.dumps(one) for one in values}
        return
    for one in found:
        assert values["low"] <= one <= values["high"] and type(one) is type(value)
        if isinstance(value, float):
            assert one == value or one / value == pytest.approx(0.8) or one / value == pytest.approx(1.25)


@pytest.mark.long
def test_a_killed_sweep_goes_on_with_its_runs(server: Any, tmp_path: Path) -> None:
    endless = {"stop.return": None, "stop.time": None, "stop.env_steps": 10**9}
    path = study(tmp_path, trials=1, parallel=1, options=endless)
    with Processes(tmp_path) as processes:
        killed = processes.start(
            "sweep", server.url, "-m", "ddrl", "sweep", str(path), "--learner", "--workers", "1"
        )
        processes.until(
            lambda: any(runs.state(server.client, run).updates > 50 for run in runs.names(server.client))
        )
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        [run] = runs.names(server.client)
        processes.until(lambda: not runs.state(server.client, run).leased)  # its learner has ended with it
        before = runs.state(server.client, run).updates
        again = processes.start(
            "sweep", server.url, "-m", "ddrl", "sweep", str(path), "--learner", "--workers", "1"
        )
        processes.until(lambda: runs.state(server.client, run).updates > before)
        [learner] = [pid for pid in descendants(again.pid) if f"learner {run}" in command_of(pid)]
        os.kill(learner, signal.SIGKILL)  # another one is started, though no trial begins or ends
        before = runs.state(server.client, run).updates
        processes.until(lambda: runs.state(server.client, run).updates > before + 50)
        runs.set_status(server.client, run, "stopped", "enough")
        assert again.wait() == 0
    assert runs.names(server.client) == [run] and "goes on" in again.text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"search": {"algorithm.gama": [0.9]}}, "did you mean"),
        ({"search": {"algorithm.gamma": [0.9, 7]}}, "algorithm.gamma"),
        ({"search": {"algorithm.gamma": {"low": 2, "high": 1}}}, "low is below high"),
        ({"search": {"algorithm.learning_rate": {"low": 0, "high": 1, "log": True}}}, "log above 0"),
        ({"search": {}}, "search"),
        ({"search": None}, "search"),
        ({"trails": 3}, "trails"),
        ({"config": "nowhere.yaml"}, "nowhere.yaml"),
        ({"metric": "time", "options": {"stop.return": None}}, "stop.return"),
        ({"storage": "nosuch://x"}, "cannot be used"),
        ({"compare_every": 2}, "set method to population"),
        ({"method": "population", "trials": 3}, "algorithm.gamma: cannot change"),
        ({"method": "population", "prune": True}, "no prune"),
        ({"method": "population", "parallel": 1}, "2 or more in parallel"),
        ({"method": "population", "parallel": 4, "trials": 4}, "more trials than that"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in commands.refused("sweep", str(study(tmp_path, **changes)))
    assert runs.names(client) == []


def test_another_study_of_the_name_is_refused(
    client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    from ddrl.cli import sweep as command

    wanted = command.read(study(tmp_path))
    folder = tmp_path / "sweeps" / "toy"
    folder.mkdir(parents=True)
    command._open(wanted, folder)
    other = study(tmp_path, search={"algorithm.gamma": [0.5]})
    assert "another study named toy" in commands.refused(
        "sweep", str(other), "--workers", "0", "--no-learner"
    )
    assert "cannot be read" in commands.refused(
        "sweep", "nowhere.yaml"
    ) or "No such file" in commands.refused("sweep", "nowhere.yaml")
