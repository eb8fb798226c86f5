"""The command `ddrl`: what it prints, and how it refuses."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import add_history, make_run
from typer.testing import CliRunner

import ddrl.cli
from ddrl import config, policy
from ddrl.cli import app, main, policies
from ddrl.runs import evaluation
from ddrl.store import connection, logs, runs, weights, workers
from ddrl.types import EvaluationResult


@pytest.fixture
def client(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The private server as the one that commands find; and an empty current folder."""
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    monkeypatch.chdir(tmp_path)
    return server.client


def call(*arguments: str, input: str | None = None) -> str:
    """Run a command that must succeed; its stdout."""
    result = CliRunner().invoke(app, arguments, input=input, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def call_json(*arguments: str) -> Any:
    """Run a command with --json; the one value on stdout."""
    return json.loads(call(*arguments, "--json"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail with one line on stderr and nothing on stdout; that line."""

    def run(*arguments: str, code: int = 2) -> str:
        capsys.readouterr()
        assert main(arguments) == code
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert printed.err.startswith("ddrl: error: ")
        return printed.err.removeprefix("ddrl: error: ").strip()

    return run


def test_help_lists_every_command_and_the_exit_codes() -> None:
    text = call("--help")
    for name, (_, module, short) in ddrl.cli.COMMANDS.items():
        assert f" {name} " in text
        function = getattr(importlib.import_module(f"ddrl.cli.{module}"), "set_" if name == "set" else name)
        long = " ".join(function.__doc__.split())
        assert short.split()[:2] == long.split()[:2], "both say what it does"
        assert call(name, "--help")
    assert "Exit codes: 0 done, 1 the run failed, 2 bad input" in text
    assert call("--version") == f"ddrl {ddrl.__version__}\n"
    assert call() == text


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "gymnasium", "matplotlib", "celery", "blosc2", "tensorboard", "rich.live")
    code = f"import sys, ddrl.cli; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_bad_command_lines_are_refused_in_one_line(refused: Callable[..., str]) -> None:
    assert "No such command" in refused("statuss") and "--jsom" in refused("runs", "--jsom")
    assert "1" in refused("runs", "-n", "0")
    assert "nowhere.yaml: cannot be read" in refused("submit", "nowhere.yaml")


def test_errors_have_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from redis.exceptions import TimeoutError as RedisTimeoutError

    from ddrl.codec import CodecError
    from ddrl.envs import EnvError
    from ddrl.store.leases import LeaseLostError
    from ddrl.store.weights import WeightsError

    codes = {
        config.ConfigError("a"): 2,
        EnvError("b"): 2,
        CodecError("c"): 2,
        WeightsError("c"): 2,
        policy.PolicyFileError("d"): 2,
        runs.UnknownRunError("e"): 2,
        LeaseLostError("f"): 1,
        RedisTimeoutError("g"): 3,
        ValueError("a defect"): None,
    }
    for error, code in codes.items():
        assert ddrl.cli.exit_code(error) == code, error

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["ddrl.cli.doctor"], "examine", interrupt)
    assert main(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_no_server_is_code_3(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, "redis://:secret@localhost:1/0")
    line = refused("runs", code=3)
    assert "no server reachable" in line and "secret" not in line
    monkeypatch.setenv(connection.URL_VARIABLE, "http://localhost")
    assert "unknown scheme" in refused("status", code=3)


def test_runs(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no runs yet" in call("runs") and call_json("runs") == []
    first, second = make_run(client), make_run(client, name="other")
    add_history(client, second)
    rows = call_json("runs")
    assert [row["run"] for row in rows] == [first, second]
    assert rows[1]["env_steps"] == 30_000 and rows[1]["return_mean"] == 205.0
    lines = call("runs").splitlines()
    assert lines[0].split()[:2] == ["run", "status"] and lines[2].startswith(second) and "30,000" in lines[2]
    assert [row["run"] for row in call_json("runs", "-n", "1")] == [second]


def test_status(client: Any) -> None:
    run = make_run(client)
    assert call("status").splitlines()[0].split() == ["run", run]
    add_history(client, run)
    workers.beat(client, workers.Heartbeat("n@h", "h", 1, 3, ("ddrl.rollout.box2d",), {}))
    client.hset(f"ddrl:{{{run}}}:state", mapping={"dead": 2, "full": 5})
    report = call_json("status", run[:8])
    assert report["run"] == run and report["queue"] == "ddrl.rollout.box2d"
    assert report["weights"] == {"latest": 31, "best": 31, "best_return": 205.0, "kept": [0, 31], "bytes": 85}
    assert report["stream"]["dead"] == 2 and report["stream"]["full"] == 5
    assert report["stream"]["max_bytes"] == 512 * 1024**2 and report["stream"]["fragments"] == 30
    assert report["workers"][0]["plays"] and not report["workers"][0]["evaluates"]
    assert [row["purpose"] for row in report["evaluations"]] == ["watch", "confirm"]
    text = call("status")
    for shown in (
        "30,000 (2930/s)",
        "latest v31, best v31 (205.0), 2 kept",
        "1 (0 of 3 processes) on ddrl.rollout.box2d",
        "2 invalid",
        "512.0 MB",
    ):
        assert shown in text, shown


def test_an_unknown_run_is_refused_with_the_newest(client: Any, refused: Callable[..., str]) -> None:
    assert "none yet" in refused("status")
    run = make_run(client)
    assert run in refused("status", "nothing")


def test_stop_pause_and_what_they_refuse(client: Any, refused: Callable[..., str]) -> None:
    run = make_run(client)
    assert call_json("pause") == {"run": run, "status": "paused", "reason": "paused by the operator"}
    assert "already paused" in refused("pause")
    assert f"`ddrl resume {run}`" in call("stop", run)
    assert runs.state(client, run).status == "stopped"
    assert "already ended (stopped)" in refused("stop") and "already ended" in refused("pause", run)
    events = [row["event"] for row in call_json("journal")]
    assert events == ["created", "paused", "stopped"] and "stopped by the operator" in call("journal")


def test_delete_asks_and_keeps_files_unless_told(
    client: Any, refused: Callable[..., str], tmp_path: Path
) -> None:
    run = make_run(client)
    folder = tmp_path / "runs" / run
    folder.mkdir(parents=True)
    assert f"`ddrl stop {run}`" in refused("delete", run, "--yes")
    runs.set_status(client, run, "stopped", "")
    assert "add --yes" in refused("delete", run)
    assert call_json("delete", run, "--yes")["keys"] >= 2
    assert folder.is_dir() and runs.names(client) == []
    run = make_run(client)
    (tmp_path / "runs" / run).mkdir()
    runs.set_status(client, run, "stopped", "")
    call("delete", run, "--yes", "--files")
    assert not (tmp_path / "runs" / run).exists() and folder.is_dir()


def test_logs_merges_what_was_gathered_with_files_and_journal(
    client: Any, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ddrl.cli.logs"], "SAME_S", 60.0)  # the machine may be busy
    run = make_run(client)
    folder = tmp_path / "runs" / run
    folder.mkdir(parents=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - 1))
    (folder / "learner.log").write_text(
        f"{now},123 INFO learns {run}\n{now},200 WARNING slow\nTraceback\n  of it\nunfinished"
    )
    (folder / "rollout.log").write_text(f"[{now},250: ERROR/SpawnPoolWorker-1] played badly\n")
    logs.add(client, run, "learner gpu1", "INFO", f"learns {run}")
    logs.add(client, run, "worker far", "ERROR", "two\nlines")
    rows = call_json("logs")
    here = socket.gethostname()
    told = [(row["source"], row["level"], row["line"]) for row in rows]
    assert told.count(("learner gpu1", "INFO", f"learns {run}")) == 1, "the file's twin is left out"
    assert [row for row in told if row[0] == f"learner {here}"] == [
        (f"learner {here}", "WARNING", "slow"),
        (f"learner {here}", "", "Traceback"),
        (f"learner {here}", "", "  of it"),
    ]
    assert (f"rollout {here}", "ERROR", "played badly") in told and ("journal", "", "created") in told
    assert told[-2:] == [("worker far", "ERROR", "two"), ("worker far", "ERROR", "lines")]
    times = [row["time_s"] for row in rows]
    assert times == sorted(times)
    assert [row["line"] for row in call_json("logs", "--last", "1")] == ["lines"]
    assert call_json("logs", "-n", "0") == []
    runs.set_status(client, run, "stopped", "enough")
    text = call("logs", "--follow")
    assert "| ERROR: played badly\n" in text and " journal" in text and "stopped enough\n" in text
    assert "--follow" in refused("logs", "--follow", "--json")


def test_watch_ends_with_the_summary(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(client)
    add_history(client, run)
    runs.set_status(client, run, "solved", "return 200 confirmed")
    assert call_json("watch")["status"] == "solved"
    assert f"{run}: solved after" in call("watch")
    run = make_run(client)
    runs.set_status(client, run, "failed", "out of luck")
    assert main(["watch", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "failed"


def test_versions(client: Any) -> None:
    run = make_run(client)
    with pytest.raises(Exception, match="no weights yet"):
        policies.choose(client, run, None)
    token = add_history(client, run)
    assert policies.choose(client, run, None) == policies.choose(client, run, "best") == 31
    weights.publish(client, run, token, version=32, blob=b"w", allowance=1, updates=1)
    assert policies.choose(client, run, "latest") == policies.choose(client, run, "v32") == 32
    for version, words in (("17", "not kept; kept are 0, 31, 32"), ("newest", "neither a number")):
        with pytest.raises(ValueError, match=words):
            policies.choose(client, run, version)


def test_evaluate(client: Any, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(client)
    add_history(client, run)
    asked: list[Any] = []

    def from_run(_: Any, name: str, version: int) -> Any:
        resolved = runs.config(client, name)
        return SimpleNamespace(
            policy=SimpleNamespace(evaluation_epsilon=0.0),
            config=resolved,
            env=resolved.env,
            spaces=None,
            run=name,
            version=version,
        )

    def play(_: Any, env: Any, spaces: Any, seeds: range, **options: Any) -> EvaluationResult:
        asked.append(([*seeds], options["num_envs"]))
        options["on_episode"](0, 0.0, 1)
        returns = tuple(float(seed - seeds[0]) for seed in seeds)
        return EvaluationResult(options["policy_version"], tuple(seeds), returns, (10,) * len(seeds))

    monkeypatch.setattr(policy, "from_run", from_run)
    monkeypatch.setattr(evaluation, "evaluate", play)
    report = call_json("evaluate", f"{run}@31", "--episodes", "5")
    assert asked == [([*range(1_000_020, 1_000_025)], 5)], "the seeds of the confirmation"
    assert report["return_mean"] == 2.0 and report["return_median"] == 2.0 and report["return_max"] == 4.0
    assert report["policy_version"] == 31 and report["returns"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    text = call("evaluate", run, "-n", "3", "--seed", "7")
    assert "seeds 7 to 9" in text and f"{run}@31" in text
    assert "holds one version" in refused("evaluate", "policy.safetensors", "--version", "3")
    assert "cannot be read" in refused("evaluate", "nowhere/policy.safetensors")
    assert "give one of them" in refused("evaluate", f"{run}@31", "--version", "0")


def test_export_refuses_to_overwrite(
    client: Any, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make_run(client)
    add_history(client, run)

    def save(_: Any, name: str, version: int, path: Path) -> Path:
        path.write_text(f"{name} {version}")
        return path

    monkeypatch.setattr(policy, "save", save)
    written = call_json("export")
    assert written["version"] == 31 and Path(written["path"]).read_text() == f"{run} 31"
    assert "add --force" in refused("export", run)
    call("export", run, "--force")
    call("export", f"{run}@0", "--output", str(tmp_path / "first.safetensors"))
    assert (tmp_path / "first.safetensors").read_text() == f"{run} 0"
    assert "cannot be written" in refused("export", "--output", str(tmp_path / "no" / "such" / "folder"))


def test_schema_describes_run_and_algorithms() -> None:
    document = json.loads(call("schema"))
    assert "env" in document["required"] and "return" in document["$defs"]["StopConfig"]["properties"]
    assert "gamma" in document["algorithms"]["sac"]["properties"]


@pytest.mark.filterwarnings(
    "ignore:builtin type:DeprecationWarning"
)  # Box2D's SWIG crashes where it is an error
def test_doctor(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {row["name"]: row for row in call_json("doctor")}
    assert found["server"]["level"] == "ok" and "noeviction" in found["server"]["detail"]
    assert {"python", "packages", "torch", "cores", "memory", "environment", "extra atari"} <= set(found)
    monkeypatch.setenv(connection.URL_VARIABLE, "redis://localhost:1/0")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 3 and "FAIL  server" in result.stdout and "start the server" in result.stdout


def test_up_refuses_what_it_cannot_listen_on(
    client: Any, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "unset it" in refused("up")
    monkeypatch.delenv(connection.URL_VARIABLE)
    assert "expected HOST:PORT" in refused("up", "--listen", "6379")


def test_up_serves_until_interrupted(home: Path) -> None:
    import re
    import signal

    command = [sys.executable, "-m", "ddrl", "up"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert re.match(r"server: unix://:\*\*\*@\S+redis\.sock", first)
        assert "celery -A ddrl worker" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
