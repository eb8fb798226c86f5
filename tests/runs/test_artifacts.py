"""The folder that a run leaves behind, and its summary."""

from __future__ import annotations

import csv
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from ddrl import config
from ddrl.runs import artifacts, records
from ddrl.store import evaluations, metrics, runs, stream, weights
from ddrl.store import leases as lease
from ddrl.types import EnvSpec, EvaluationResult

SPACES = EnvSpec(
    "LunarLanderContinuous-v3", (8,), "float32", "continuous", (2,), (), (-1.0, -1.0), (1.0, 1.0)
)


def make_run(client: Redis, **sections: dict[str, Any]) -> str:
    """An active run without any history."""
    tree = {
        "name": "lunar",
        "env": {"id": "LunarLanderContinuous-v3"},
        "algorithm": {"name": "sac"},
        "stop": {"return": 200, "time": 900},
        **sections,
    }
    queues = ("ddrl.rollout.box2d", "ddrl.evaluate.box2d")
    return runs.create(client, config.validate(tree), SPACES, queues=queues)


def evaluate(
    client: Redis, run: str, token: int, version: int, mean: float, *, purpose: str = "watch"
) -> None:
    """Store one evaluation: 20 episodes around `mean`."""
    opened = evaluations.OpenEvaluation(version, 1000, 20, purpose, 0, 31_024, 7_600)
    evaluations.open_(client, run, token, opened)
    returns = tuple(mean + 10.0 * math.sin(seed) for seed in range(20))
    evaluations.finish(client, run, opened, EvaluationResult(version, opened.seeds, returns, (200,) * 20))


def learn_something(client: Redis, run: str, *, folder: str = "") -> int:
    """Give a run a history: 30 fragments with rising returns, figures, weights, evaluations; the token."""
    token = lease.acquire(client, run, host="here", folder=folder)
    assert token is not None
    weights.publish(client, run, token, version=0, blob=b"w", allowance=10**6, updates=0)
    draw = random.Random(1)
    for seq in range(30):
        returns = [-200 + 13 * seq + draw.gauss(0, 40) for _ in range(4)]
        stream.append(
            client,
            run,
            {b"h": b"{}"},
            producer=1,
            incarnation=7,
            seq=seq,
            num_transitions=1000,
            episode_returns=returns,
            played_ms=30_000 if seq == 0 else 0,
        )
    metrics.add(client, run, token, {"env_steps": 15_000, "updates": 3_000, "env_steps_per_s": 2_000.0})
    row = {"env_steps": 30_000, "updates": 7_600, "env_steps_per_s": 2_930.0, "updates_per_s": 310.0}
    row |= {"samples_per_insert": 31.9, "staleness": 0.8, "return_mean": 143.2, "replay_size": 30_000}
    metrics.add(client, run, token, row | {"learner_wait": 0.12, "critic_loss": 0.0123, "temperature": 0.05})
    weights.publish(client, run, token, version=31, blob=b"weights", allowance=10**6, updates=7_600)
    evaluate(client, run, token, 31, 201.3)
    evaluate(client, run, token, 31, 205.0, purpose="confirm")
    weights.mark_best(client, run, token, 31, 205.0)
    figures = {"version": 31, "return_mean": 205.0, "return_std": 7.0, "episodes": 100}
    runs.note_evaluation(client, run, token, figures)
    return token


def test_summary_has_exactly_the_promised_keys(server: Any) -> None:
    client = server.client
    run = make_run(client)
    learn_something(client, run, folder="/somewhere/x")
    runs.set_status(client, run, "solved", "return 200 confirmed")
    summary = records.summary(client, run, wall_s=12.5)
    assert list(summary) == [
        *(
            "run",
            "status",
            "wall_s",
            "train_s",
            "env_steps",
            "updates",
            "policy_version",
            "evaluation",
            "artifacts",
        )
    ]
    assert summary["status"] == "solved" and summary["wall_s"] == 12.5
    assert summary["env_steps"] == 30_000 and summary["updates"] == 7_600 and summary["policy_version"] == 31
    assert summary["evaluation"] == {"return_mean": 205.0, "return_std": 7.0, "episodes": 100}
    assert summary["artifacts"] == "/somewhere/x"
    state = runs.state(client, run)
    assert state.train_s is not None and summary["train_s"] == pytest.approx(state.train_s, abs=1e-3)
    assert records.summary(client, run)["wall_s"] == pytest.approx(state.ended_s - state.created_s, abs=1e-3)


def test_summary_of_a_run_that_did_nothing(server: Any) -> None:
    run = make_run(server.client)
    summary = records.summary(server.client, run)
    assert summary["evaluation"] is None and summary["train_s"] == 0.0 and summary["policy_version"] == -1


def test_everything_is_written(server: Any, tmp_path: Path) -> None:
    client = server.client
    run = make_run(client)
    learn_something(client, run)
    folder = tmp_path / run
    written = artifacts.write(client, run, folder)
    assert {path.name for path in written} == {
        *(
            "config.yaml",
            "metrics.csv",
            "episodes.csv",
            "evaluations.csv",
            "journal.csv",
            "tensorboard",
            "curve.png",
            "summary.json",
        )
    }
    assert config.load(folder / "config.yaml") == runs.config(client, run)
    figures = read_csv(folder / "metrics.csv")
    assert [row["env_steps"] for row in figures] == ["15000", "30000"]
    assert figures[0]["staleness"] == "" and float(figures[1]["critic_loss"]) == 0.0123
    assert 30.0 <= float(figures[0]["time_s"]) <= float(figures[1]["time_s"]) < 60.0
    episodes = read_csv(folder / "episodes.csv")
    assert len(episodes) == 120 and episodes[-1]["env_steps"] == "30000"
    assert [row["purpose"] for row in read_csv(folder / "evaluations.csv")] == ["watch", "confirm"]
    assert json.loads((folder / "summary.json").read_text())["run"] == run
    png = (folder / "curve.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 10_000


def test_tensorboard_can_read_the_events(server: Any, tmp_path: Path) -> None:
    run = make_run(server.client)
    learn_something(server.client, run)
    artifacts.write(server.client, run, tmp_path)
    artifacts.write(server.client, run, tmp_path)  # replaced, not added to
    (file,) = (tmp_path / "tensorboard").iterdir()
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    assert found["learner/updates"] == [(15_000, 3_000.0), (30_000, 7_600.0)]
    assert len(found["return/training"]) == 120 and "return/confirmation" in found


def test_without_tensorboard_one_line_says_what_to_install(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("event_file_writer",):
        monkeypatch.setitem(sys.modules, f"tensorboard.summary.writer.{name}", None)
    run = make_run(server.client)
    with caplog.at_level("INFO"):
        written = artifacts.write(server.client, run, tmp_path)
    assert not any(path.name == "tensorboard" for path in written)
    assert "pip install 'ddrl[tensorboard]'" in caplog.text


def test_a_run_without_history_is_written_too(server: Any, tmp_path: Path) -> None:
    run = make_run(server.client, stop={})
    artifacts.write(server.client, run, tmp_path / "deep" / run)
    assert read_csv(tmp_path / "deep" / run / "metrics.csv") == []
    assert (tmp_path / "deep" / run / "curve.png").stat().st_size > 1_000


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
