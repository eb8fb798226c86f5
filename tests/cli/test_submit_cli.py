"""`ddrl submit --seeds`: one run a seed side by side, one table; and Ctrl-C and `ddrl resume`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support import commands
from support.commands import call, call_json, refused
from support.processes import ROOT, Processes, descendants, is_alive
from support.runs import start, target_config
from support.store import end, ended

from ddrl import config as configs
from ddrl.cli.submit import create_all, num_workers_here, report
from ddrl.runs import submit as submission
from ddrl.store import connection, ledger, machine, metrics, runs
from ddrl.store import server as embedded


def summary(seed: int, status: str, train_s: float, mean: float | None) -> dict[str, Any]:
    row = {"seed": seed, "run": f"x-{seed}", "status": status, "train_s": train_s}
    score = None if mean is None else {"return_mean": mean, "return_std": 1.0, "episodes": 20}
    return row | {"env_steps": 1_000, "updates": 10, "evaluation": score}


@pytest.mark.parametrize(
    ("cores", "num_runs", "num"),
    [(1, 4, 1), (2, 1, 1), (2, 2, 2), (2, 4, 2), (6, 2, 5), (64, 2, 8), (64, 16, 16)],
)
def test_each_run_has_a_rollout_process_as_far_as_there_are_cores(
    cores: int, num_runs: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "processes", lambda: cores)
    for is_embedded in (True, False):
        monkeypatch.setattr(connection, "is_embedded", lambda is_embedded=is_embedded: is_embedded)
        assert num_workers_here(None, num_runs) == is_embedded * num
        assert num_workers_here(3, num_runs) == 3


def test_the_table_and_its_median(capsys: pytest.CaptureFixture[str]) -> None:
    given = ((1, "solved", 10.0, 201.0), (2, "stopped", 3.0, None), (3, "time", 60.0, -5.5))
    rows = [summary(*row) for row in given]
    report(rows, json_output=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["seed", "status", "train", "env", "steps", "updates", "return", "run"]
    assert lines[1].split() == ["1", "solved", "10.0", "s", "1,000", "10", "201.0", "±", "1.0", "x-1"]
    assert lines[4:] == ["median train time 35.0 s; 1 of 3 solved", "continue with `ddrl resume x-2`"]
    report(rows, json_output=True)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and json.loads(printed) == {"runs": rows, "median_train_s": 35.0}
    report([summary(1, "failed", 1.0, None)], json_output=True)
    assert json.loads(capsys.readouterr().out)["median_train_s"] is None


def test_a_narrow_terminal_breaks_no_run_id(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run = "lunar-discrete-1122-124749-7402"
    report(
        [summary(1, "time", 619.8, -5.5) | {"run": run, "env_steps": 1_234_567, "updates": 123_456}], False
    )
    row = capsys.readouterr().out.splitlines()[1]
    assert row.endswith(run) and len(row) <= 80


def test_a_run_is_submitted_without_torch(server, processes: Processes) -> None:
    folder = processes.folder
    (folder / "torch.py").write_text("raise ImportError('loading torch takes seconds')")
    without_torch = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    options = ("--detach", "--no-learner", "--workers", "0")
    processes.ddrl(server.url, "submit", str(processes.config()), *options, env=without_torch)


def test_options_reach_every_run(client: Any, target_file: str) -> None:
    options = ("--seeds", "3", "--seed", "7", "--weight", "2.5", "--priority", "high", "--detach")
    names = [row["run"] for row in call_json("submit", target_file, *options)["runs"]]
    assert sorted(names) == sorted(runs.names(client)) and len(names) == 3
    for seed, run in enumerate(names, 7):
        config, state = runs.config(client, run), runs.state(client, run)
        assert (config.seed, config.weight, config.priority) == (seed, 2.5, "high")
        assert re.fullmatch(rf"target-\d{{4}}-\d{{6}}-s{seed}-[0-9a-f]{{4}}", run)
        assert (state.weight, state.priority, state.status) == (2.5, "high", "active")


def test_an_environment_without_a_time_limit_is_named(
    client: Any, target_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    endless = "env={id: 'support.odd_envs:Endless', kwargs: {continuous: true}}"
    notice = "support.odd_envs:Endless: names no time limit; evaluations end episodes after 27,000 steps"
    for given, is_told in ((endless, True), ("evaluation.max_steps=9", False), ("seed=2", False)):
        options = ["-s", endless] if "max_steps" in given else []
        told = commands.run(
            "submit", target_file, *options, "-s", given, "--detach", "--workers", "0", "--no-learner"
        ).err
        assert (notice in told) == ("no time limit" in told) == is_told


@pytest.mark.parametrize("is_embedded", [True, False])
def test_a_submission_prunes_the_embedded_server_and_no_other(
    home: Path, client: Redis, target_file: str, is_embedded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        if is_embedded:
            monkeypatch.delenv(connection.URL_VARIABLE)
            client = stack.enter_context(connection.connect(stack.enter_context(embedded.use())))
            assert int(client.config_get("maxmemory")["maxmemory"]) == embedded.memory_limit() > 0
            assert connection.maxmemory(client) == 0, "no run is refused for it"
        old, young = ended(client, 31), ended(client, 29, num_bytes=20_000_000)
        printed = commands.run("submit", target_file, "--detach", "--no-learner", "--workers", "0")
        said = "deleted 1 run from the server (ended more than 30 days ago); the folders stay\n"
        assert (printed.code, printed.err) == (0, said if is_embedded else "")
        assert {old, young} - {*runs.names(client)} == ({old} if is_embedded else set())
        if is_embedded:
            (policy := Path("runs", old, "policy.safetensors")).parent.mkdir(parents=True)
            policy.touch()
            remedy = f"; play {policy}, or continue the run with `ddrl resume {old}`"
            assert commands.refused("status", old).endswith(remedy)


def test_a_submission_deletes_the_oldest_runs_of_too_large_an_embedded_server(
    home: Path, target_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(connection.URL_VARIABLE)
    monkeypatch.setattr("ddrl.runs.prune.EMBEDDED_BYTES", 30_000_000)
    with embedded.use() as url, connection.connect(url) as client:
        oldest, old = (ended(client, days, num_bytes=20_000_000) for days in (2, 1))
        commands.run("submit", target_file, "--detach", "--no-learner", "--workers", "0")
        assert {oldest, old} - {*runs.names(client)} == {oldest}


def test_a_submission_of_which_a_run_fails_ends_with_code_1(
    client: Any, target_file: str, monkeypatch
) -> None:
    def follow(client: Any, names: list[str], *_: Any) -> bool:
        for run, status in zip(names, ("failed", "stopped"), strict=False):
            end(client, run, status)
        return False

    monkeypatch.setattr("ddrl.cli.submit._follow", follow)
    for seeds, code in ((2, 1), (1, 1)):
        done = commands.run(
            "submit", target_file, "--seeds", f"{seeds}", "--workers", "0", "--no-learner", "--json"
        )
        assert done.code == code, done.err


def test_a_failed_submission_leaves_nothing_that_goes_on(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = submission.create

    def second_fails(*arguments: Any, **options: Any) -> str:
        if runs.names(client):
            raise configs.ConfigError("no more room")
        return create(*arguments, **options)

    monkeypatch.setattr(submission, "create", second_fails)
    with pytest.raises(configs.ConfigError, match="no more room"):
        create_all(client, target_config(), 2, None, 0)
    assert [runs.status(client, run) for run in runs.names(client)] == ["stopped"]


def test_a_device_that_this_machines_learner_lacks_is_refused_before_anything_is_created(
    client: Any, target_file: str
) -> None:
    bare, device = ("--detach", "--workers", "0"), ("-s", "learner.device=cuda:63")
    message = "learner.device: 'cuda:63' is not on this machine; use auto or cpu, or a learner on a machine that has it"
    assert refused("submit", target_file, *device, *bare, "--learner") == message
    assert runs.names(client) == []
    run = call_json("submit", target_file, *device, *bare)["run"]  # for another machine's learner
    call("stop", run)
    assert refused("resume", run, *bare, "--learner") == message
    assert runs.status(client, run) == "stopped"


def test_several_runs_are_resumed_at_once(client: Any) -> None:
    names = [start(client, target_config()) for _ in range(2)]
    for run in names:
        call("pause", run)
    rows = call_json("resume", *names, names[0], "--detach", "--no-learner", "--workers", "0")["runs"]
    assert [row["run"] for row in rows] == names
    assert [runs.status(client, run) for run in names] == ["active", "active"]
    call("pause", names[0])
    text = call("resume", names[0], "--detach", "--no-learner", "--workers", "0")
    assert text == f"{names[0]}: resumed; watch it with `ddrl watch {names[0]}`\n"


def test_ctrl_c_stops_all_runs_and_a_resumed_one_obeys_its_changed_settings(
    home: Path, processes: Processes
) -> None:
    config = processes.config(stop={"return": None}, evaluation={"every_s": 3600, "near_every_s": 3600})
    with embedded.use() as url, connection.connect(url) as client:
        submit = ("-m", "ddrl", "submit", str(config), "--seeds", "2", "--workers", "1")
        command = processes.start("submit", None, *submit)
        processes.until(lambda: sum(runs.state(client, run).updates > 0 for run in runs.names(client)) == 2)
        names = [line.split()[1] for line in command.text().splitlines() if line.startswith("run ")]
        children = descendants(command.pid)
        command.send_signal(signal.SIGINT)
        assert command.wait() == 130
        text = command.text()
        assert "0 of 2 solved" in text and "Traceback" not in text
        assert f"continue with `ddrl resume {' '.join(names)}`" in text
        processes.until(lambda: not any(map(is_alive, children)))
        assert [runs.status(client, run) for run in names] == ["stopped", "stopped"]
        assert all(ledger.audit(client, run).is_balanced for run in names)

        run, before = names[1], runs.state(client, names[1]).updates
        command = processes.start("resume", None, "-m", "ddrl", "resume", run, "--workers", "1", "--json")
        processes.until(lambda: runs.state(client, run).updates > before)
        call("set", run, "algorithm.temperature=0.125")
        processes.until(lambda: metrics.last(client, run).get("temperature") == pytest.approx(0.125))
        limit = runs.state(client, run).updates + 50
        call("set", run, f"stop.updates={limit}")
        assert command.wait() == 0
        assert ledger.audit(client, run).is_balanced
    summary = json.loads(command.text().splitlines()[-1])
    assert (summary["run"], summary["status"]) == (run, "time") and summary["updates"] >= limit
    assert summary["evaluation"] is not None, "what the limit left behind was evaluated"
    journal = (Path(summary["artifacts"]) / "journal.csv").read_text()
    assert "algorithm.temperature,auto,0.125," in journal
