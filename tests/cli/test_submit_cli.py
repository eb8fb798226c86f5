"""`ddrl submit --seeds`: one run a seed side by side, one table; and Ctrl-C and `ddrl resume`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import call_json
from support.processes import Processes
from support.runs import target_config, target_tree

from ddrl import config as configs
from ddrl.cli.submit import create_all, report
from ddrl.runs import submit as submission
from ddrl.store import connection, ledger, runs
from ddrl.store import server as embedded

ENDLESS = {"stop": {"return": None, "time": 120}}


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
    report(rows, json_output=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["seed", "status", "train", "env", "steps", "updates", "return", "run"]
    assert lines[1].split() == ["1", "solved", "10.0", "s", "1,000", "10", "201.0", "±", "1.0", "x-1"]
    assert lines[4] == "median train time 35.0 s; 1 of 3 solved"
    assert lines[5] == "continue with `ddrl resume x-2`"
    report(rows, json_output=True)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and json.loads(printed) == {"runs": rows, "median_train_s": 35.0}
    report([summary(1, "failed", 1.0, None)], json_output=True)
    assert json.loads(capsys.readouterr().out)["median_train_s"] is None


def test_options_reach_every_run(client: Any, tmp_path: Path) -> None:
    (tmp_path / "target.yaml").write_text(yaml.safe_dump(target_tree()), encoding="utf-8")
    before = signal.getsignal(signal.SIGTERM)
    options = ("--seeds", "3", "--seed", "7", "--weight", "2.5", "--priority", "high", "--detach")
    try:
        names = [row["run"] for row in call_json("submit", "target.yaml", *options)["runs"]]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sorted(names) == sorted(runs.names(client)) and len(names) == 3
    for seed, run in enumerate(names, 7):
        config, state = runs.config(client, run), runs.state(client, run)
        assert (config.seed, config.weight, config.priority) == (seed, 2.5, "high")
        assert (state.weight, state.priority, state.status) == (2.5, "high", "active")


def test_a_failed_submission_leaves_nothing_that_goes_on(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, calls = submission.create, []

    def second_fails(*arguments: Any, **options: Any) -> str:
        calls.append(arguments)
        if len(calls) == 2:
            raise configs.ConfigError("no more room")
        return create(*arguments, **options)

    monkeypatch.setattr(submission, "create", second_fails)
    with pytest.raises(configs.ConfigError, match="no more room"):
        create_all(client, target_config(), 2, None, 0)
    assert [runs.status(client, run) for run in runs.names(client)] == ["stopped"]


def test_ctrl_c_stops_all_and_resume_continues_them(home: Path, processes: Processes) -> None:
    command = processes.submit(None, processes.config(**ENDLESS), "--seeds", "2", "--workers", "1")
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
    assert [(row["run"], row["seed"], row["status"]) for row in answer["runs"]] == [
        (names[0], 1, "time"),
        (names[1], 2, "time"),
    ]
    times = [row["train_s"] for row in answer["runs"]]
    assert answer["median_train_s"] == pytest.approx(sum(times) / 2, abs=1e-2)
    assert all((Path(row["artifacts"]) / "curve.png").exists() for row in answer["runs"])
    with embedded.use() as url, connection.connect(url) as client:
        assert all(ledger.audit(client, run).is_balanced for run in names)
        events = [row["event"] for run in names for row in runs.journal(client, run)]
        assert events.count("stopped") == 2, "by Ctrl-C"
