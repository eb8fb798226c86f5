"""`ddrl submit --seeds`: one run a seed side by side, one table; and the other options of a submission."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.processes import Processes
from support.runs import add_history, make_run, target_config

from ddrl.cli import live, main, view
from ddrl.cli.submit import create_all, report
from ddrl.cli.watcher import Watcher
from ddrl.store import connection, ledger, runs
from ddrl.store import server as embedded

CALM = {"stop": {"return": None, "time": 120}}  # does not end by itself


def summary(seed: int, status: str, train_s: float, mean: float | None) -> dict[str, Any]:
    row = {"seed": seed, "run": f"x-{seed}", "status": status, "train_s": train_s}
    score = None if mean is None else {"return_mean": mean, "return_std": 1.0, "episodes": 20}
    return row | {"env_steps": 1_000, "updates": 10, "evaluation": score}


def test_the_table_and_its_median(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        summary(1, "solved", 10.0, 201.0),
        summary(2, "stopped", 3.0, None),
        summary(3, "time", 60.0, -5.5),
    ]
    report(rows, json_=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["seed", "status", "train", "env", "steps", "updates", "return", "run"]
    assert lines[1].split() == ["1", "solved", "10.0", "s", "1,000", "10", "201.0", "±", "1.0", "x-1"]
    assert lines[4] == "median train time 35.0 s; 1 of 3 solved"
    assert lines[5] == "continue with `ddrl resume x-2`"
    report(rows, json_=True)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and json.loads(printed) == {"runs": rows, "median_train_s": 35.0}
    report([summary(1, "failed", 1.0, None)], json_=True)
    assert json.loads(capsys.readouterr().out)["median_train_s"] is None


def test_plain_lines_and_view_name_each_seed(server: Any) -> None:
    first, second = make_run(server.client, seed=5), make_run(server.client, seed=6)
    add_history(server.client, first)
    runs.set_status(server.client, first, "solved", "return 200 confirmed")
    figures = [Watcher(server.client, run).poll() for run in (first, second)]
    file = io.StringIO()
    lines = live.Lines(file, show_seed=True)
    for _ in range(3):
        lines.show(figures)
    shown = file.getvalue().splitlines()
    assert len(shown) == 2 and shown[0].startswith(
        "seed 5  30s  solved: return 200 confirmed  env_steps 30000"
    )
    assert shown[1].startswith("seed 6  0s  waiting for a learner")
    console = Console(record=True, force_terminal=True, width=80, height=24, file=io.StringIO())
    console.print(view.several_runs(figures, width=78))
    text = console.export_text()
    for words in (
        "30,000",
        "205.0 v31",
        "seed 6: waiting for a learner",
        "sac, 2 seeds",
        f"{first} and 1 more",
    ):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 78


def test_following_waits_for_a_server_that_is_away_or_came_back_empty(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(server.client)
    kept = {key: server.client.dump(key) for key in server.client.scan_iter()}
    printed: list[str] = []

    def on_tick() -> None:
        printed.append(capsys.readouterr().err)
        if printed[-1]:
            server.client.flushall()
        if "came back without the run" in printed[-1]:
            for key, value in kept.items():
                server.client.restore(key, 0, value, replace=True)
            runs.set_status(server.client, run, "stopped", "enough")

    states = live.follow(server.client, [run], json_output=True, on_tick=on_tick)
    assert states[0].ended and states[0].reason == "enough"


def test_options_reach_every_run(
    server: Any, processes: Processes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    monkeypatch.chdir(processes.folder)
    config, before = str(processes.config(**CALM)), signal.getsignal(signal.SIGTERM)
    options = ("--seeds", "3", "--seed", "7", "--weight", "2.5", "--priority", "high", "--detach")
    try:
        assert main(["submit", config, *options, "--json"]) == 0
        names = [row["run"] for row in json.loads(capsys.readouterr().out)["runs"]]
        assert sorted(names) == sorted(runs.names(server.client)) and len(names) == 3
        for seed, run in enumerate(names, 7):
            resolved, state = runs.config(server.client, run), runs.state(server.client, run)
            assert (resolved.seed, resolved.weight, resolved.priority) == (seed, 2.5, "high")
            assert (state.weight, state.priority, state.status) == (2.5, "high", "active")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_failed_submission_leaves_nothing_that_goes_on(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ddrl import config as configs
    from ddrl.runs import submit as submission

    create, calls = submission.create, []

    def second_fails(*arguments: Any, **options: Any) -> str:
        calls.append(arguments)
        if len(calls) == 2:
            raise configs.ConfigError("no more room")
        return create(*arguments, **options)

    monkeypatch.setattr(submission, "create", second_fails)
    with pytest.raises(configs.ConfigError, match="no more room"):
        create_all(server.client, target_config(), 2, None, 0)
    assert [runs.status(server.client, run) for run in runs.names(server.client)] == ["stopped"]


def test_ctrl_c_stops_all_and_says_how_to_go_on(home: Path, processes: Processes) -> None:
    command = processes.submit(None, processes.config(**CALM), "--seeds", "2")
    for seed in (1, 2):
        processes.until(lambda seed=seed: f"seed {seed}  " in command.text() and "updates" in command.text())
    children = command.descendants()
    command.send(signal.SIGINT)
    assert command.wait() == 130
    text = command.text()
    names = [line.split()[1] for line in text.splitlines() if line.startswith("run ")]
    assert "0 of 2 solved" in text and "Traceback" not in text
    assert f"continue with `ddrl resume {' '.join(names)}`" in text
    processes.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 60)
    done = processes.ddrl(None, "resume", *names, "--time", "2s", "--json", check=False)
    assert done.returncode == 0, (done.stderr, processes.logs())
    answer = json.loads(done.stdout)
    assert [row["seed"] for row in answer["runs"]] == [1, 2]
    assert {row["status"] for row in answer["runs"]} == {"time"}
    times = [row["train_s"] for row in answer["runs"]]
    assert answer["median_train_s"] == pytest.approx(sum(times) / 2, abs=1e-2)
    for run, row in zip(names, answer["runs"], strict=True):
        assert row["run"] == run and (Path(row["artifacts"]) / "curve.png").exists()
    with embedded.use() as url:
        client = connection.connect(url)
        assert all(ledger.audit(client, run).is_balanced for run in names)
        events = [row["event"] for run in names for row in runs.journal(client, run)]
        assert events.count("stopped") == 2, "by Ctrl-C"
        client.close()
