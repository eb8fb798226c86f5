"""The folder of a run and its summary."""

from __future__ import annotations

import csv
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from redis import Redis
from support.store import add_history, append, make_run

from ddrl import config
from ddrl.runs import artifacts, records
from ddrl.store import keys, metrics, runs

SUMMARY = "run status reason wall_s train_s env_steps updates policy_version evaluation artifacts"
TABLES = {f"{name}.csv" for name in ("metrics", "episodes", "evaluations", "journal")} | {".written.json"}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value by tag, of all event files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return found


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
    for _ in range(2):  # the second one adds nothing
        artifacts.write(client, run, tmp_path)
    found = events(tmp_path)
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


# --- while the run goes on ----------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "EVERY_S", 0.02)
    monkeypatch.setattr(artifacts, "SHARE", 1e6)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_rows(folder: Path, name: str = "episodes") -> int:
    path = folder / f"{name}.csv"
    return len(rows(path)) if path.exists() else 0


@pytest.mark.usefixtures("at_once")
def test_the_folder_grows_while_the_run_goes_on(client: Redis, tmp_path: Path) -> None:
    run = make_run(client)
    token = add_history(client, run)
    with artifacts.following(run, token, tmp_path):
        wait_until((tmp_path / "curve.png").exists)
        assert num_rows(tmp_path) == 120 and (tmp_path / "policy.safetensors").exists()
        append(client, run, 30, episode_returns=[7.0, 8.0])
        metrics.add(client, run, token, {"env_steps": 31_000, "updates": 8_000, "new_loss": 2.5})
        wait_until(lambda: num_rows(tmp_path) == 122 and num_rows(tmp_path, "metrics") == 3)
    figures = rows(tmp_path / "metrics.csv")
    assert [row["new_loss"] for row in figures] == ["", "", "2.5"]
    assert [row["staleness"] for row in figures] == ["", "0.8", ""]
    assert len(events(tmp_path)["return/training"]) == 122
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "active"


@pytest.mark.usefixtures("at_once")
def test_what_a_killed_learner_left_half_written_is_cut_off(client: Redis, tmp_path: Path) -> None:
    """Each row is there once, also where another process goes on."""
    run = make_run(client)
    token = add_history(client, run)
    for seq in (30, 31):
        with artifacts.following(run, token, tmp_path):
            append(client, run, seq, episode_returns=[float(seq)])
            wait_until(lambda num=seq + 91: num_rows(tmp_path) == num)  # type: ignore[misc]
        for path in [tmp_path / "episodes.csv", *(tmp_path / "tensorboard").iterdir()]:
            with path.open("ab") as file:  # rows that are whole, and half of one
                file.write(path.read_bytes() + b"12.5,400")
        (tmp_path / "tensorboard" / "events.out.tfevents.9.unknown").write_bytes(b"x")
    artifacts.write(client, run, tmp_path)
    found = rows(tmp_path / "episodes.csv")
    assert [float(row["return"]) for row in found[-2:]] == [30.0, 31.0] and len(found) == 122
    assert len(events(tmp_path)["return/training"]) == 122


@pytest.mark.parametrize("harm", ["gone", "of another run", "shorter", "unreadable"])
def test_tables_that_are_not_as_they_were_left_begin_anew(client: Redis, tmp_path: Path, harm: str) -> None:
    run = make_run(client)
    add_history(client, run)
    artifacts.write(client, run, tmp_path)
    written = tmp_path / ".written.json"
    if harm == "gone":
        (tmp_path / "metrics.csv").unlink()
    elif harm == "shorter":
        (tmp_path / "episodes.csv").write_text("time_s\n")
    elif harm == "unreadable":
        written.write_text("{")
    else:
        written.write_text(json.dumps(json.loads(written.read_text()) | {"run": "other"}))
    artifacts.write(client, run, tmp_path)
    assert (num_rows(tmp_path), num_rows(tmp_path, "metrics")) == (120, 2)
    assert len(events(tmp_path)["return/training"]) == 120


@pytest.mark.usefixtures("at_once")
def test_a_folder_that_cannot_be_written_is_said_once_and_tried_again(
    client: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, folder = make_run(client), tmp_path / "run"
    token = add_history(client, run)
    folder.write_text("in the way")
    with artifacts.following(run, token, folder):
        wait_until(lambda: bool(caplog.records))
        time.sleep(0.2)
        folder.unlink()
        wait_until((folder / "curve.png").exists)
    assert len([row for row in caplog.records if "cannot be brought up to date" in row.message]) == 1


@pytest.mark.usefixtures("at_once")
def test_rows_whose_writing_fails_half_way_are_there_once(
    client: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, written = make_run(client), tmp_path / ".written.json"
    token = add_history(client, run)
    with artifacts.following(run, token, tmp_path):
        wait_until(written.exists)
        in_the_way = tmp_path / "in the way"
        in_the_way.mkdir()
        (in_the_way / "x").touch()
        written.unlink()
        in_the_way.rename(written)  # the tables are written, and how far they go is not
        append(client, run, 30, episode_returns=[7.0])
        wait_until(lambda: any("tries again" in record.message for record in caplog.records))
        wait_until(lambda: num_rows(tmp_path) == 121)
        written.rename(in_the_way)
        wait_until(written.is_file)
    assert num_rows(tmp_path) == 121


@pytest.mark.usefixtures("at_once")
def test_history_keeps_the_beginning(client: Redis, tmp_path: Path) -> None:
    """What has left the capped streams is in the curve, and in the folder; of rows of one millisecond the first."""
    run = make_run(client)
    token = add_history(client, run)
    time.sleep(0.01)
    metrics.add(client, run, token, {"env_steps": 31_000, "updates": 8_000})
    append(client, run, 30, episode_returns=[7.0])
    before = records.read(client, run)
    with artifacts.following(run, token, tmp_path):
        wait_until((tmp_path / "curve.png").exists)
    for key in (keys.metrics(run), keys.episodes(run)):
        client.xtrim(key, maxlen=1, approximate=False)
    found = records.read(client, run)
    for rows_found, all_rows in ((found.figures, before.figures), (found.episodes, before.episodes)):
        assert (rows_found[0], rows_found[-1]) == (all_rows[0], all_rows[-1])
        assert all(row in all_rows for row in rows_found)
        times = [row["time_s"] for row in rows_found]
        assert times == sorted({*times}), "each once"
    append(client, run, 31, episode_returns=[9.0])
    artifacts.write(client, run, tmp_path)
    assert num_rows(tmp_path) == 122
    artifacts.write(client, run, tmp_path / "elsewhere")
    assert num_rows(tmp_path / "elsewhere") == len(found.episodes) + 1


def test_the_share_of_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update has its part; the first call, which imports, is free."""
    monkeypatch.setattr(artifacts, "EVERY_S", 0.01)
    monkeypatch.setattr(artifacts, "SHARE", 0.1)
    calls: Counter[str] = Counter()

    def dear() -> None:
        calls["dear"] += 1
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass

    def cheap() -> None:
        calls["cheap"] += 1
        if calls["cheap"] == 8:
            stop.set()

    stop, began = threading.Event(), time.monotonic()
    artifacts.repeat([dear, cheap], stop, "it fails")
    assert 2 <= calls["dear"] <= 2 + 0.1 * (time.monotonic() - began) / 0.1
