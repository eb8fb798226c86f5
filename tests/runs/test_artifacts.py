"""The folder of a run and its summary."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from redis import Redis
from support.store import add_history, make_run

from ddrl import config
from ddrl.runs import artifacts, records
from ddrl.store import keys, runs

SUMMARY = "run status reason wall_s train_s env_steps updates policy_version evaluation artifacts"
TABLES = {f"{name}.csv" for name in ("metrics", "episodes", "evaluations", "journal")}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_summary_has_exactly_the_promised_keys(client: Redis) -> None:
    run = make_run(client)
    add_history(client, run, folder="/somewhere/x")
    runs.set_status(client, run, "solved", "return 200 confirmed")
    summary = records.summary(client, run, wall_s=12.5)
    state = runs.state(client, run)
    assert list(summary) == SUMMARY.split()
    assert summary | {"run": run, "train_s": 0} == {
        "run": run, "status": "solved", "reason": "return 200 confirmed", "wall_s": 12.5, "train_s": 0,
        "env_steps": 30_000, "updates": 7_600,
        "policy_version": 31, "evaluation": {"return_mean": 205.0, "return_std": 7.0, "episodes": 100},
        "artifacts": "/somewhere/x",
    }  # fmt: skip
    assert state.first_step_s
    assert summary["train_s"] == pytest.approx(state.ended_s - state.first_step_s, abs=1e-3)
    assert records.summary(client, run)["wall_s"] == pytest.approx(state.ended_s - state.created_s, abs=1e-3)


def test_the_curve_names_how_the_run_ends(
    client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda _, text, **__: titles.append(text))
    run = make_run(client)
    runs.set_status(client, run, "solved", "return 200 confirmed")
    artifacts.write(client, run, tmp_path)  # before the run's end is complete
    assert titles[0].endswith(f"{run}: solved")


def test_everything_is_written(client: Redis, tmp_path: Path) -> None:
    run, folder = make_run(client), tmp_path / "run"
    add_history(client, run)
    artifacts.write(client, run, folder)
    assert {path.name for path in folder.iterdir()} == TABLES | {
        *("config.yaml", "policy.safetensors", "tensorboard", "curve.png", "summary.json")
    }  # fmt: skip
    assert config.load(folder / "config.yaml") == runs.config(client, run)
    figures, episodes = rows(folder / "metrics.csv"), rows(folder / "episodes.csv")
    assert [row["env_steps"] for row in figures] == ["15000", "30000"]
    assert figures[0]["staleness"] == "" and float(figures[1]["critic_loss"]) == 0.0123
    assert 30.0 <= float(figures[0]["time_s"]) <= float(figures[1]["time_s"]) < 60.0
    assert len(episodes) == 120 and episodes[-1]["env_steps"] == "30000"
    assert [row["purpose"] for row in rows(folder / "evaluations.csv")] == ["watch", "confirm"]
    assert json.loads((folder / "summary.json").read_text())["run"] == run
    png = (folder / "curve.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 10_000


def test_a_change_far_beyond_the_curve_is_not_drawn(client: Redis, tmp_path: Path) -> None:
    """The text would be too far away for a picture, and nothing be written."""
    run = make_run(client)
    add_history(client, run)
    forged = {"event": "set", "option": "weight", "from": "1", "to": "2", "env_steps": "9" * 16}
    client.xadd(keys.journal(run), forged)
    artifacts.write(client, run, tmp_path)
    assert {"curve.png", "tensorboard"} <= {path.name for path in tmp_path.iterdir()}


def test_no_text_is_a_formula(client: Redis, tmp_path: Path) -> None:
    """A worker may write to the journal; numbers stay numbers."""
    run, texts = make_run(client), ["=1+1", "@SUM(A1)", "+x", "-x", " =A1", "-1.5e3", "a=1"]
    for text in texts:
        runs.note(client, run, "odd", text)
    artifacts.write(client, run, tmp_path)
    found = [row["reason"] for row in rows(tmp_path / "journal.csv")][-len(texts) :]
    assert found == [*(f"'{text}" for text in texts[:5]), *texts[5:]]


def test_tensorboard_can_read_the_events(client: Redis, tmp_path: Path) -> None:
    run = make_run(client)
    add_history(client, run)
    for _ in range(2):  # the second one replaces the first
        artifacts.write(client, run, tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    assert found["learner/updates"] == [(15_000, 3_000.0), (30_000, 7_600.0)]
    assert len(found["return/training"]) == 120 and "return/confirmation" in found


def test_a_run_without_history_is_written(client: Redis, tmp_path: Path, monkeypatch, caplog) -> None:
    """Here without tensorboard, which a line says how to install."""
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    run, folder = make_run(client, stop={}), tmp_path / "deep" / "run"
    with caplog.at_level("INFO"):
        artifacts.write(client, run, folder)
    assert {path.name for path in folder.iterdir()} == TABLES | {"config.yaml", "curve.png", "summary.json"}
    assert "pip install 'ddrl[tensorboard]'" in caplog.text
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["evaluation"] is None and summary["train_s"] == 0 and summary["policy_version"] == -1
    assert rows(folder / "metrics.csv") == [] and (folder / "curve.png").stat().st_size > 1_000
