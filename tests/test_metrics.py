"""`env.metrics`: numbers of an episode's last info, from the environment to wherever its return is shown."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from support.collectors import RandomPolicy, make_collector
from support.commands import call_json
from support.commands import run as command
from support.learners import Run, finished, until
from support.private_server import PrivateServer
from support.runs import target_config

from ddrl import codec, policy
from ddrl.cli.evaluate import Scoring
from ddrl.config import EnvConfig
from ddrl.envs import EnvError, describe
from ddrl.runs import artifacts
from ddrl.runs.evaluation import score
from ddrl.store import connection
from ddrl.store.evaluations import Evaluation, OpenEvaluations

NAMES = ("length", "even", "text", "huge", "missing")
TOLD = {"id": "support.odd_envs:Told", "num_envs": 3, "metrics": NAMES}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")


def test_a_fragment_has_the_numbers_of_the_episodes_that_ended_in_it() -> None:
    collector, found = make_collector(EnvConfig(**TOLD), policy=RandomPolicy(), context=2), 0
    for _ in range(20):
        fragment = codec.decode(codec.encode(collector.collect(max_steps=4)))
        told = fragment.extras["episode_metrics"]
        assert told.shape == (len(fragment.episode_length), 5) and told.dtype == np.float32
        np.testing.assert_array_equal(told[:, 0], fragment.episode_length)
        expected = np.where(fragment.episode_length % 2 == 0, fragment.episode_length, np.nan)
        np.testing.assert_array_equal(told[:, 1], expected)
        assert np.isnan(told[:, 2:]).all()
        found += len(told)
    assert found > 20


def test_they_are_shown_wherever_a_return_is(
    server: PrivateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    replay = {"capacity": 400, "warmup_steps": 50, "slack_steps": 10_000}
    config = target_config(
        env=TOLD,
        algorithm={"name": "dqn"},
        replay=replay,
        learner={"metrics_every_s": 0.1},
        stop={"return": None},
    )
    run = Run(server, config)
    with finished(run) as learner:
        run.play(300)
        until(lambda: "no metric" in run.journal and "info/even" in (run.rows or [{}])[-1])
        fragment = codec.decode(run.entries[-1].fields)
        num = len(fragment.episode_return)
        lacking = [{}, *({"episode_metrics": np.zeros((num, width), np.float32)} for width in (0, 4))]
        for producer, extras in enumerate(lacking, 7):  # an actor of another kind may have none
            made = codec.encode(replace(fragment, extras=extras, producer=producer))
            run.append(made, producer=producer, seq=fragment.seq)
        until(lambda: len(run.dead) == 2)
        token = run.token
        loaded = policy.from_run(run.client, run.id, learner.shared.version)
        one = Evaluation(version=learner.shared.version, first_seed=5, num_episodes=8, purpose="watch")
        result = score(loaded, one.seeds)
        opened = OpenEvaluations(run.client, run.id, send=lambda _: None, timeout_s=60, token=token)
        opened.store(one, result)
    assert run.dead == [b"episode_metrics: %d, the run names 5" % width for width in (0, 4)]
    assert 3 <= run.rows[-1]["info/length"] <= 6 and 4 <= run.rows[-1]["info/even"] <= 6
    assert run.journal.count("no metric") == 3 and "info/text" not in run.rows[-1]
    assert list(result.metrics["length"]) == list(result.lengths) and result.metrics["missing"] == []
    assert result.metrics["even"] == [length for length in result.lengths if length % 2 == 0]
    mean = np.mean(result.lengths)
    [shown] = call_json("status", run.id)["evaluations"]
    assert shown["info/length"] == pytest.approx(mean) and "info/missing" not in shown
    text = command("status", run.id).out
    assert "info/length" in text
    report = call_json("evaluate", run.id, "-n", "8")
    assert report["info/length"] == pytest.approx(np.mean(report["lengths"]))
    assert "info/length" in command("evaluate", run.id, "-n", "2").out
    artifacts.write(run.client, run.id, tmp_path)
    with (tmp_path / "evaluations.csv").open() as file:
        [row] = csv.DictReader(file)
    assert float(row["info/length"]) == pytest.approx(mean) and row["info/missing"] == ""
    assert "info/even" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_names_that_a_worker_made_up_are_left_out_of_a_score() -> None:
    loaded: Any = SimpleNamespace(env=SimpleNamespace(metrics=("length",)))
    wanted = Evaluation(version=0, first_seed=1, num_episodes=1, purpose="request")
    scoring = Scoring(loaded, wanted, lambda done, total: None)
    scoring._add_metrics({"length": [3.0], "forged": [1.0]})
    scoring._add_metrics({})
    assert scoring._metrics == {"length": [3.0]}


@pytest.mark.parametrize("names", [["a b"], [""], ["x" * 61], ["x"] * 21])
def test_names_that_are_none_are_refused(names: list[str]) -> None:
    with pytest.raises(ValidationError):
        EnvConfig(id="x", metrics=names)


def test_games_have_none() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(
        EnvError, match=r"^ALE/Pong-v5: env.metrics is \('lives',\), which ALE games do not take"
    ):
        describe(EnvConfig(id="ALE/Pong-v5", metrics=["lives"]))
