"""Trackers are told of a run by its learner's machine: real libraries where they are installed, real failures."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from support import commands
from support.store import add_history, append, make_config, make_run

from ddrl import trackers
from ddrl.runs import artifacts, records
from ddrl.store import metrics, runs

TRACKIO = Path(tempfile.mkdtemp(prefix="ddrl-trackio-"))
os.environ["TRACKIO_DIR"] = str(TRACKIO)  # which it reads when it is imported
atexit.register(shutil.rmtree, TRACKIO, ignore_errors=True)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "EVERY_S", 0.05)
    monkeypatch.setattr(artifacts, "SHARE", 1e6)


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def tracked(client: Redis, folder: Path, name: str, *, num_learners: int = 2) -> str:
    """Tell a tracker of a run that goes on, and ends under the last of some learners; return the run."""
    run = make_run(client)
    token = add_history(client, run)
    config = make_config(tracking=[name])
    folder.mkdir()
    for learner in range(num_learners):
        with trackers.following(config, run, token, folder):
            wait_until(lambda: runs.reported(client, run, name))
            if learner == num_learners - 1:
                append(client, run, 30)
                metrics.add(client, run, token, {"env_steps": 31_000, "updates": 8_123})
                artifacts.write(client, run, folder)
                runs.set_status(client, run, "solved", "return 200 confirmed")
    return run


def test_figures_and_evaluations_are_rows(client: Redis) -> None:
    run = make_run(client)
    add_history(client, run)
    found = [*trackers.rows(records.read(client, run))]
    steps, at_s, figures = found[1]
    assert (steps, figures["learner/updates"], figures["learner/staleness"]) == (30_000, 7_600, 0.8)
    assert abs(at_s - time.time()) < 60
    last = found[-1][2]
    half = last["return/confirmation_high"] - last["return/confirmation"]
    std = records.read(client, run).evaluated[-1]["return_std"]
    assert half == pytest.approx(1.96 * std / 20**0.5)
    assert last["return/confirmation"] - last["return/confirmation_low"] == pytest.approx(half)


def test_one_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(trackers.MODULES, "wandb", "no_such_package")
    line = commands.refused("submit", "cartpole", "--track", "wandb", "--learner", "--workers", "0")
    assert "pip install 'ddrl[wandb]'" in line
    assert "tracking" in commands.refused("submit", "cartpole", "--track", "neptune")
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").iterdir()]


@pytest.mark.filterwarnings("ignore")  # of the libraries themselves
def test_wandb_offline(client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked(client, tmp_path / "run", "wandb", num_learners=1)  # each begins a file
    [file] = (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run}.wandb")
    data = file.read_bytes()  # records in protobuf, with names and values as JSON
    for text in (b"learner/updates", b"8123", b"return/confirmation_low", b"curve", b"LunarLanderContinuous"):
        assert text in data, text


@pytest.mark.filterwarnings("ignore")
def test_mlflow(client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where it keeps artifacts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run = tracked(client, tmp_path / "run", "mlflow")
    server = mlflow.MlflowClient()
    experiment = server.get_experiment_by_name("ddrl").experiment_id
    [found] = server.search_runs([experiment])
    assert found.data.tags["ddrl.run"] == run and found.data.params["env.id"] == "LunarLanderContinuous-v3"
    history = server.get_metric_history(found.info.run_id, "learner/updates")
    assert [(row.step, row.value) for row in history] == [(15_000, 3_000), (30_000, 7_600), (31_000, 8_123)]
    assert "curve.png" in {row.path for row in server.list_artifacts(found.info.run_id)}
    assert found.info.status == "FINISHED"


@pytest.mark.filterwarnings("ignore")
def test_trackio(client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_PROJECT", tmp_path.name)
    run = tracked(client, tmp_path / "run", "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(tmp_path.name, run)
    found = [(row["env_steps"], row["learner/updates"]) for row in rows if "learner/updates" in row]
    assert found == [(15_000, 3_000), (30_000, 7_600), (31_000, 8_123)]


@pytest.mark.filterwarnings("ignore")
def test_what_other_machines_have_told_a_far_place_is_not_told_again(
    client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    from ddrl.trackers import trackio

    monkeypatch.setenv("TRACKIO_PROJECT", tmp_path.name)
    monkeypatch.setattr(trackio.Tracker, "place", "far")
    run = make_run(client)
    token, config = add_history(client, run), make_config(tracking=["trackio"])
    for machine in ("one", "two"):
        with trackers.following(config, run, token, tmp_path / machine):
            wait_until(lambda: runs.reported(client, run, "trackio"))
    rows = SQLiteStorage.get_logs(tmp_path.name, run)
    assert [row["env_steps"] for row in rows if "learner/updates" in row] == [15_000, 30_000]
    assert [*runs.reported(client, run, "trackio")] == ["far"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("harm", ["not there", "silent"])
def test_one_that_cannot_be_told_is_said_once(
    client: Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: str,
) -> None:
    """Neither delays whoever trains."""
    pytest.importorskip("mlflow")
    monkeypatch.setattr(trackers, "PARTING_S", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    run = make_run(client)
    token = add_history(client, run)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if harm == "not there":
            listener.close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        began = time.monotonic()
        with trackers.following(make_config(tracking=["mlflow"]), run, token, tmp_path):
            assert (
                time.monotonic() - began < 10.0
            )  # one that is waited for takes longer, with its repetitions
            wait_until(lambda: caplog.records if harm == "not there" else True)
            time.sleep(0.5)
    assert (
        len(
            [
                row
                for row in caplog.records
                if "cannot be told" in row.message or "takes longer" in row.message
            ]
        )
        == 1
    )
