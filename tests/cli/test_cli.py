"""The command `ddrl`: what its commands print."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import commands
from support.commands import call, call_json, refused
from support.store import LANDER, SPACES, add_history, end, ended, make_config, make_run, take

import ddrl.cli
from ddrl import config, policy
from ddrl.cli import main, output, policies
from ddrl.codec import CodecError
from ddrl.envs import EnvError
from ddrl.learner import run as runner
from ddrl.runs import artifacts
from ddrl.runs.versions import interval
from ddrl.store import connection, keys, leases, logs, runs, weights, workers


def test_help_lists_every_command_and_the_exit_codes() -> None:
    text = call("--help")
    for name, (_, module, short) in ddrl.cli.COMMANDS.items():
        assert f" {name} " in text
        function = getattr(
            importlib.import_module(module if "." in module else f"ddrl.cli.{module}"),
            "set_" if name == "set" else name,
        )
        assert short.split()[:2] == function.__doc__.split()[:2], "both say what it does"
        assert call(name, "--help")
    assert "Exit codes: 0 done, 1 the run failed, 2 bad input" in text
    assert call("--version") == f"ddrl {ddrl.__version__}\n"
    assert call() == text


def test_a_user_without_the_rights_is_named_the_remedy(
    client: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.acl_setuser("limited", enabled=True, passwords=["+x"], keys=["elsewhere"], commands=["+@all"])
    monkeypatch.setenv(connection.URL_VARIABLE, f"unix://limited:x@{server.socket}")
    assert "permission" in (line := refused("runs", code=3)) and line.endswith("(workers/acl)")
    client.acl_deluser("limited")


def test_errors_have_exit_codes() -> None:
    bad_input = (config.ConfigError, EnvError, CodecError, weights.WeightsError, policy.PolicyFileError)
    codes: dict[int | None, tuple[type[Exception], ...]] = {
        1: (connection.LeaseLostError,),
        2: (*bad_input, runs.UnknownRunError),
        3: connection.UNREACHABLE[:1],
        None: (ValueError,),  # a defect
    }
    for code, errors in codes.items():
        assert {ddrl.cli.exit_code(error("what went wrong")) for error in errors} == {code}


def test_runs(client: Any) -> None:
    assert "no runs yet" in call("runs") and call_json("runs") == []
    assert "none yet" in refused("status")
    first, second = make_run(client), make_run(client, name="other")
    add_history(client, second)
    rows = call_json("runs")
    assert [row["run"] for row in rows] == [first, second]
    assert rows[1]["env_steps"] == 30_000 and rows[1]["return_mean"] == 205.0
    header, _, line = call("runs").splitlines()
    assert header.split()[:2] == ["run", "status"] and line.startswith(second) and "30,000" in line
    assert [row["run"] for row in call_json("runs", "-n", "1")] == [second]


def test_runs_of_this_version_are_listed_without_validating_them(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.create(client, make_config(), SPACES, versions={"ddrl": ddrl.__version__})
    monkeypatch.setattr(config, "validate", None)  # loading `config` would double the command's time
    assert [(row["run"], row["env"], row["algorithm"]) for row in call_json("runs")] == [(run, LANDER, "sac")]


def test_a_run_of_another_version_is_noted_and_the_others_are_listed(client: Any) -> None:
    for _ in range(3):
        make_run(client)
    first, foreign, last = runs.names(client)  # runs of one millisecond are listed by id
    spec = json.loads(client.get(keys.spec(foreign)))
    client.set(keys.spec(foreign), json.dumps({**spec, "replay": {"forgotten": 1}}))
    rows = call_json("runs")
    assert [row["run"] for row in rows] == [first, foreign, last]
    assert [row["algorithm"] for row in rows] == ["sac", None, "sac"] and rows[1]["env"] is None
    assert "another version of ddrl (replay.forgotten: unknown option" in rows[1]["reason"]
    lines = call("runs").splitlines()
    assert lines[2].split()[:3] == [foreign, "active", "-"] and f"`ddrl delete {foreign}`" in lines[2]
    assert lines[1].startswith(first) and lines[3].startswith(last) and "another" not in lines[1] + lines[3]
    assert f"run {foreign}: was stored by another version" in refused("status", foreign)
    notes = {row["run"]: row["note"] for row in call_json("fleet")["runs"]}
    assert "another version of ddrl" in notes[foreign] and "waiting for a learner" in notes[first]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("columns", "header", "width"), [(41, "run memory note", 41), (38, "run note", 38), (9, "run note", 32)]
)
def test_a_narrow_terminal_leaves_out_columns_and_cuts_no_cell(
    monkeypatch: pytest.MonkeyPatch, columns: int, header: str, width: int
) -> None:
    terminal, words = Terminal(), "waits for a learner: start `ddrl learner`"
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", terminal)
    output.table(
        ("run", "memory", "note"), [("x-1122", "16.0 GB", words)], left=("run", "note"), optional=("memory",)
    )
    first, *rest = [line.split() for line in re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).splitlines()]
    assert first == header.split() and max(map(len, terminal.getvalue().splitlines()[1:])) <= width
    cells = ["x-1122", *(["16.0", "GB"] if "memory" in header else []), *words.split()]
    assert [word for line in rest for word in line] == cells


def test_of_more_than_a_terminal_can_use_the_last_rows_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_CHARACTERS", 3 * 265)
    rows = [(number, "漢" * 5_000, "word " * 5_000) for number in range(5)]
    output.table(("row", "name", "note"), [(1, "n" * 200, "x" * 50), *rows[:1]], left=("name", "note"))
    shown, said = capsys.readouterr()
    assert [line.split()[0] for line in shown.splitlines()] == ["row"] and "2 rows before these" in said
    monkeypatch.setattr(output, "MOST_CHARACTERS", 4_000)
    output.table(("row", "name", "note"), rows, left=("name", "note"))
    shown, said = capsys.readouterr()
    assert [line.split()[0] for line in shown.splitlines()] == ["row", "3", "4"]
    assert max(map(len, shown.splitlines())) < 1_400 and "3 rows before these not shown" in said


def test_status(client: Any) -> None:
    run = make_run(client)
    assert call("status").splitlines()[0].split() == ["run", run]
    add_history(client, run)
    workers.beat(client, workers.Heartbeat("n@h", "h", 1, 3, ("ddrl.rollout.box2d",), {}))
    client.hset(keys.state(run), "dead", 2)
    client.hset(keys.counts(run), "full", 5)
    report = call_json("status", run[:8])
    assert report["run"] == run and report["queue"] == "ddrl.rollout.box2d"
    assert report["weights"] == {"latest": 31, "best": 31, "best_return": 205.0, "kept": [0, 31], "bytes": 85}
    assert report["stream"]["dead"] == 2 and report["stream"]["full"] == 5
    assert report["stream"]["max_bytes"] == 512 * 1024**2 and report["stream"]["fragments"] == 30
    assert report["workers"][0]["plays"] and not report["workers"][0]["evaluates"]
    assert [row["purpose"] for row in report["evaluations"]] == ["watch", "confirm"]
    text, budget = call("status"), "512.0 MB"
    for shown in ("30,000 (2930/s)", "latest v31, best v31 (205.0), 2 kept", "2 entries refused", budget):
        assert shown in text, shown
    assert "1 (0 of 3 processes) on ddrl.rollout.box2d" in text


def test_stop_and_pause(client: Any) -> None:
    run = make_run(client)
    assert call_json("pause") == {"run": run, "status": "paused", "reason": "paused by the operator"}
    assert "already paused" in refused("pause")
    assert f"`ddrl resume {run}`" in call("stop", run)
    assert runs.state(client, run).status == "stopped"
    events = [row["event"] for row in call_json("journal")]
    assert events == ["created", "paused", "stopped"] and "stopped by the operator" in call("journal")


def test_stop_writes_the_results_where_no_learner_does(client: Any, lander: str) -> None:
    client.pexpire(keys.lease(lander), 300)  # its learner has died
    summary, folder = call_json("stop", lander), Path("runs", lander)
    assert (summary["status"], summary["reason"]) == ("stopped", "stopped by the operator")
    assert summary["artifacts"] == str(folder.resolve()) and summary["evaluation"]["return_mean"] == 205.0
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (folder / "policy.safetensors").exists() and "already ended" in refused("stop", lander)


def test_an_ended_run_is_ending_until_its_results_are_complete(client: Any) -> None:
    run = make_run(client)
    token = take(client, run, host="there")
    runs.set_status(client, run, "time", "time limit of 9 s", token=token)
    assert call_json("runs")[0]["status"] == "ending" and "already ended" in refused("pause")
    text = "time limit of 9 s: the learner on there completes the results"
    assert call_json("status")["hint"] == text and "ending: time limit of 9 s" in call("status")
    assert "is ending; stop it first" in refused("delete", run, "--yes")
    leases.release(client, run, token)
    assert call_json("status")["hint"] == "waiting for a learner: start `ddrl learner`"
    assert f"{run}: time after" in call("stop") and call_json("runs")[0]["status"] == "time"


def test_delete_keeps_the_folder_without_files(client: Any, tmp_path: Path) -> None:
    kept, removed = make_run(client), make_run(client)
    for run in (kept, removed):
        end(client, run, "stopped", "")
        artifacts.write(client, run, tmp_path / "runs" / run)
    assert call_json("delete", kept, "--yes")["keys"] >= 2
    call("delete", removed, "--yes", "--files")
    assert runs.names(client) == [] and [path.name for path in (tmp_path / "runs").iterdir()] == [kept]


def test_a_folder_that_cannot_be_deleted_is_named(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(client)
    end(client, run, "stopped", "")
    artifacts.write(client, run, tmp_path / "runs" / run)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    text = f"{run}: cannot be deleted whole (Permission denied); the server has deleted {run}"
    assert text in refused("delete", run, "--yes", "--files") and runs.names(client) == []


@pytest.mark.parametrize("kind", ["link", "elsewhere", "unmarked"])
def test_delete_keeps_a_folder_that_only_the_server_calls_the_run_s(
    client: Any, tmp_path: Path, kind: str
) -> None:
    run, mine = make_run(client), tmp_path / "mine"
    folder, other = tmp_path / "runs" / run, mine / run
    end(client, run, "stopped", "")
    artifacts.write(client, run, other)
    if kind == "link":
        folder.parent.mkdir()
        folder.symlink_to(other)
    elif kind == "elsewhere":
        client.hset(keys.state(run), "folder", str(other))
    else:
        artifacts.write(client, run, folder)
        (folder / "config.yaml").write_text("# run of mine\n")
    assert "by hand, and the run without --files" in refused("delete", run, "--yes", "--files")
    assert runs.names(client) == [run] and (other / "config.yaml").exists()
    assert kind == "elsewhere" or (folder / "summary.json").exists()


def test_prune_confirms_and_reports(client: Any, tmp_path: Path) -> None:
    old, young = (ended(client, days, num_bytes=2_000_000) for days in (31, 1))
    (tmp_path / "runs" / old).mkdir(parents=True)
    assert call("prune", "--older-than", "60d", "--yes") == "nothing to prune\n"
    month = ("prune", "--older-than", "30d")
    text, report = call(*month, "--dry-run"), call_json(*month, "--dry-run")
    assert old in text and "would free 1.9 MB of 1 run" in text
    assert report["dry_run"] and [row["run"] for row in report["runs"]] == [old]
    assert report["bytes"] == report["runs"][0]["bytes"] > 2_000_000
    assert "add --yes" in commands.run(*month).err and {*runs.names(client)} == {old, young}
    assert "freed 1.9 MB of 1 run\n" in call(*month, "--yes")
    assert runs.names(client) == [young] and (tmp_path / "runs" / old).is_dir()
    assert call_json("prune", "--max-bytes", "0", "--yes")["runs"][0]["run"] == young
    client.hset(keys.counts("zz"), "x", "y" * 2_000_000)
    for option, begin in (("--dry-run", "would free"), ("--yes", "freed")):
        assert f"{begin} 1.9 MB of 1 key that belonged to no run" in call(*month, option)
    assert call(*month, "--yes") == "nothing to prune\n"


def test_a_learner_service_prunes_as_its_options_say(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(runner, "serve", lambda *_, retention: served.append(retention))
    monkeypatch.setattr(runner, "handle_signals", threading.Event)
    old = ended(client, 2)
    assert main(["learner", "--keep-age", "1d", "--keep-bytes", "1GB"]) == 0
    assert [row.run for row in served[0].apply(client)] == [old]
    assert main(["learner"]) == 0 and served[1] is None


def test_logs_merge_the_server_s_lines_with_files_and_journal(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddrl.cli.logs.SAME_S", 60.0)  # the machine may be busy
    run, here = make_run(client), socket.gethostname()
    folder = tmp_path / "runs" / run
    folder.mkdir(parents=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - 1))
    (folder / "learner.log").write_text(
        f"2026-13-45 {now[-8:]},000 INFO no time\n"
        f"{now},123 INFO learns {run}\n{now},200 WARNING slow\nTraceback\n  \x1b[2Jof it\nunfinished"
    )
    (folder / "rollout.log").write_text(
        f"[{now},240: INFO/SpawnPoolWorker-1] child process 7 calling self.run()\n"
        f"[{now},245: INFO/MainProcess] Connected to redis+socket://:**@/r.sock\n"
        f"[{now},250: ERROR/SpawnPoolWorker-1] played badly\n"
    )
    logs.add(client, run, "learner gpu1", "INFO", f"learns {run}")
    logs.add(client, run, "worker far", "ERROR", "two\nlines")
    rows = call_json("logs")
    lines = [(row["source"], row["level"], row["line"]) for row in rows]
    assert lines.count(("learner gpu1", "INFO", f"learns {run}")) == 1, "the file's twin is left out"
    file = [line for source, *line in lines if source == f"learner {here}"]
    unstamped = ["", f"2026-13-45 {now[-8:]},000 INFO no time"]
    assert file == [unstamped, ["WARNING", "slow"], ["", "Traceback"], ["", "   [2Jof it"]]
    assert [line for line in lines if line[0] == f"rollout {here}"] == [
        (f"rollout {here}", "ERROR", "played badly")
    ]
    assert len(call_json("logs", "--all")) == len(lines) + 2 and ("journal", "", "created") in lines
    assert lines[-2:] == [("worker far", "ERROR", "two"), ("worker far", "ERROR", "lines")]
    assert rows == sorted(rows, key=lambda row: row["time_s"])
    assert [row["line"] for row in call_json("logs", "--last", "1")] == ["lines"]
    assert call_json("logs", "-n", "0") == []
    end(client, run, "stopped", "enough")
    text = call("logs", "--follow")
    assert "| ERROR: played badly\n" in text and " journal" in text and "stopped enough\n" in text


def test_watch_ends_with_the_summary(client: Any, lander: str) -> None:
    end(client, lander, "solved", "return 200 confirmed")
    assert call_json("watch")["status"] == "solved"
    assert f"{lander}: solved after" in call("watch")
    end(client, make_run(client), "failed", "out of luck")
    printed = commands.run("watch", "--json")
    assert printed.code == 1 and json.loads(printed.out)["status"] == "failed"


def test_versions(client: Any) -> None:
    run = make_run(client)
    token = add_history(client, run)
    assert policies.choose(client, run, None) == policies.choose(client, run, "best") == 31
    weights.publish(client, run, token, version=32, blob=b"w", allowance=1, updates=1)
    assert policies.choose(client, run, "latest") == policies.choose(client, run, "v32") == 32
    for odd in ("\u00b2", "9" * 5000):
        assert "is neither a number, nor best, nor latest" in commands.refused("export", f"{run}@{odd}")
    for command in ("export", "evaluate", "branch"):
        line = commands.refused(command, f"{run}@17")
        assert line == f"run {run}: no weights of version 17; kept are 0, 31, 32, the nearest is 31"


def test_versions_are_listed_with_their_scores(client: Any) -> None:
    run = make_run(client)
    assert call_json("versions") == []
    line = commands.refused("export", run)
    assert line == f"run {run}: has published no weights yet; wait for its first version"
    token = add_history(client, run)
    weights.publish(client, run, token, version=32, blob=b"w", allowance=1, updates=7_700)
    first, best, latest = call_json("versions", run)
    assert [row["version"] for row in (first, best, latest)] == [0, 31, 32]
    assert (first["updates"], first["bytes"], first["episodes"], first["return_mean"]) == (0, 1, 0, None)
    assert first["kept_as"] == ["newest 10", "every 100"] and first["interval"] is None
    assert (best["updates"], best["episodes"], best["kept_as"]) == (7_600, 40, ["best", "newest 10"])
    low, high = best["interval"]
    assert (
        best["return_mean"] == pytest.approx(203.2, abs=0.1) and 200 < low < best["return_mean"] < high < 206
    )
    assert 0 <= latest["age_s"] < 60 and abs(latest["published_s"] - time.time()) < 60
    header, *rows = call("versions").splitlines()
    names = ["version", "age", "updates", "size", "return", "95", "%", "interval", "episodes", "kept", "as"]
    assert header.split() == names
    assert len(rows) == 3 and rows[1].split()[-3:] == ["best,", "newest", "10"] and " to " in rows[1]


def test_intervals_are_those_of_the_mean() -> None:
    draw = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        low, high = interval(list(draw.normal(5.0, 2.0, 30))) or (0.0, 0.0)
        covered += low <= 5.0 <= high
    assert 180 <= covered <= 198 and interval([1.0]) is None


def test_runs_are_shown_below_those_they_began_from(client: Any) -> None:
    first = make_run(client)
    time.sleep(0.01)  # of one millisecond they would be in the order of their names
    other = make_run(client)
    for source in (f"{first}@3", f"{first}, update 9", "elsewhere@1"):
        runs.create(client, runs.config(client, first), runs.spaces(client, first), initial=(source, b"w"))
        time.sleep(0.01)
    third, fourth, fifth = runs.names(client)[2:]
    client.hset(keys.state(fourth), "warm", f"{third}@7")
    rows = call_json("runs", "--tree")
    assert [(row["run"], row["depth"]) for row in rows] == [
        (first, 0), (third, 1), (fourth, 2), (other, 0), (fifth, 0)
    ]  # fmt: skip
    assert [line.index("lunar-") for line in call("runs", "--tree").splitlines()[1:]] == [0, 2, 4, 0, 0]


def test_export_does_not_overwrite(lander: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def save(_: Any, name: str, version: int, path: Path) -> Path:
        path.write_text(f"{name} {version}")
        return path

    monkeypatch.setattr(policy, "save", save)
    written = call_json("export")
    assert written["version"] == 31 and Path(written["path"]).read_text() == f"{lander} 31"
    assert "add --force" in refused("export", lander)
    call("export", lander, "--force")
    call("export", f"{lander}@0", "--output", str(tmp_path / "first.safetensors"))
    assert (tmp_path / "first.safetensors").read_text() == f"{lander} 0"
    assert "cannot be written" in refused("export", "--output", str(tmp_path / "no" / "such" / "folder"))


def test_schema_describes_run_and_algorithms() -> None:
    document = json.loads(call("schema"))
    assert "env" in document["required"] and "return" in document["$defs"]["StopConfig"]["properties"]
    assert "gamma" in document["algorithms"]["sac"]["properties"]


# Box2D's SWIG crashes where it is an error.
@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_doctor(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {row["name"]: row for row in call_json("doctor")}
    assert found["server"]["level"] == "ok" and "noeviction" in found["server"]["detail"]
    assert {"python", "packages", "torch", "cores", "memory", "environment", "extra atari"} <= set(found)
    assert found["durability"]["level"] == "warn" and "no append-only file" in found["durability"]["detail"]
    client.config_set("appendonly", "yes")
    client.config_set("appendfsync", "everysec")
    found = {row["name"]: row for row in call_json("doctor")}
    assert "may lose 2 s of what it has acknowledged" in found["durability"]["detail"]
    client.config_set("appendfsync", "no")
    found = {row["name"]: row for row in call_json("doctor")}
    assert (
        found["durability"]["level"] == "ok"
        and "a killed server loses nothing" in found["durability"]["detail"]
    )
    client.config_set("appendonly", "no")
    monkeypatch.setenv(connection.URL_VARIABLE, "redis://localhost:1/0")
    printed = commands.run("doctor")
    assert printed.code == 3 and "FAIL  server" in printed.out and "start the server" in printed.out


def test_doctor_reads_no_more_of_the_items_put_aside_than_the_server_holds(client: Any) -> None:
    client.config_set("maxmemory-clients", "64mb")
    for _ in range(2):
        client.xadd(keys.BROKEN, {"queue": b"x" * 40 * 1024**2})
    assert {row["name"] for row in call_json("doctor")} >= {"server", "memory"}
    assert client.xlen(keys.BROKEN) == 0


@pytest.mark.parametrize("argument", ["--version", "schema"])
def test_a_pipe_without_reader_ends_a_command_quietly(argument: str) -> None:
    """Little output is written when the command ends, much while it runs."""
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "ddrl", argument]
    with os.fdopen(writer) as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, env=buffered, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_up_serves_until_interrupted(home: Path) -> None:
    assert "expected HOST:PORT" in refused("up", "--listen", "6379")
    command = [sys.executable, "-m", "ddrl", "up"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert re.match(r"server: unix://:\*\*\*@\S+redis\.sock", process.stdout.readline())
            assert "celery -A ddrl worker" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_name_that_is_too_long_for_a_file_is_refused(client: Any) -> None:
    for command in ("status", "evaluate", "export"):
        assert "not on this server" in commands.refused(command, "x" * 300)


ENDED = """
import os, signal, sys, time
from ddrl import cli
def end():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
def in_a_model():  # pydantic makes an error of its own of an exit that comes while it builds one
    try:
        end()
    except SystemExit as error:
        raise ValueError("no schema") from error
def in_a_callback():  # Python ignores errors there
    class Freed:
        def __del__(self):
            end()
    Freed()
    time.sleep(60)
def in_a_library():  # compiled code drops an exit, as pydantic's does in its look-ups
    try:
        end()
    except SystemExit:
        pass
    time.sleep(60)
def in_a_block():  # whose end is not disturbed
    try:
        end()
    finally:
        time.sleep(0.5)
        print("ended")
cli.app = lambda *_, **__: {during}()
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("during", "said"),
    [("in_a_model", ""), ("in_a_callback", ""), ("in_a_library", ""), ("in_a_block", "ended\n")],
)
def test_a_command_that_is_ended_anywhere_ends_in_order(during: str, said: str) -> None:
    code = ENDED.format(during=during)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, said, "")
