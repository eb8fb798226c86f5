"""`ddrl set`: what can change while a run goes on, what is refused, and where each change is shown."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from support import commands
from support.algorithms import CONTINUOUS, DISCRETE
from support.commands import call, call_json, refused
from support.store import events, make_run

from ddrl import config
from ddrl.algorithms import base
from ddrl.cli import settings
from ddrl.runs import artifacts, curves
from ddrl.runs.records import Records, read
from ddrl.store import runs
from ddrl.store.connection import StoreError


@pytest.mark.parametrize(
    ("name", "texts", "changes"),
    [
        ("sac", ["algorithm.learning_rate=1e-4"], {"algorithm.learning_rate": (1e-3, 1e-4)}),
        ("sac", ["algorithm.temperature=1e-2"], {"algorithm.temperature": ("auto", 0.01)}),
        ("sac", ["stop.time=15m", "stop.return=9"], {"stop.return": (None, 9.0), "stop.time": (None, 900.0)}),
        ("sac", ["weight=2", "priority=high"], {"weight": (1.0, 2.0), "priority": ("normal", "high")}),
        ("sac", ["evaluation.every_s=10s"], {"evaluation.every_s": (60.0, 10.0)}),
        ("sac", ["replay.max_bytes=1GB"], {"replay.max_bytes": (512 * 1024**2, 10**9)}),
        ("sac", ["algorithm.learning_rate=0.001", "stop.return=null"], {}),
        ("ppo", ["algorithm.lambda=0.9"], {"algorithm.lambda": (0.95, 0.9)}),
        (
            "ppo",
            ["algorithm.final_clip=0.1", "algorithm.anneal_steps=100"],
            {"algorithm.anneal_steps": (None, 100), "algorithm.final_clip": (None, 0.1)},
        ),
        (  # one gives way to the other, and that is a change too
            "dqn",
            ["algorithm.target_rate=0.01"],
            {"algorithm.target_period": (500, None), "algorithm.target_rate": (None, 0.01)},
        ),
    ],
)
def test_what_changes(name: str, texts: list[str], changes: dict[str, Any]) -> None:
    before = config.validate({"env": {"id": "Toy-v0"}, "algorithm": {"name": name}})
    spaces = CONTINUOUS if name == "sac" else DISCRETE
    assert settings.change(before, spaces, settings.parse(texts))[1] == changes


def test_a_change_is_stored_printed_and_kept_in_the_journal(client: Any, lander: str) -> None:
    run, learning_rate = lander, "algorithm.learning_rate: 0.001 -> 0.0001"
    lines = call("set", run, "algorithm.learning_rate=1e-4", "weight=2", "priority=normal").splitlines()
    assert lines == ['priority: already "normal"', "weight: 1.0 -> 2.0", learning_rate]
    after, state = runs.config(client, run), runs.state(client, run)
    assert after.algorithm == {"name": "sac", "learning_rate": 1e-4} and after.weight == 2.0
    assert state.weight == 2.0 and state.config_version == 1
    assert f"{learning_rate} at 30,000 env steps" in call("journal", run)
    printed = call_json("set", "last", "weight=2", "stop.time=20m")
    rows = [{"option": "stop.time", "from": 900.0, "to": 1200.0}]
    assert printed == {"run": run, "config_version": 2, "changes": rows, "unchanged": {"weight": 2.0}}
    assert call_json("set", run, "weight=2.0")["config_version"] == 2  # nothing changed, nothing written
    changed = [row["option"] for row in runs.journal(client, run)[0] if row["event"] == "set"]
    assert changed == ["weight", "algorithm.learning_rate", "stop.time"]


def test_without_settings_those_that_can_change_are_listed(client: Any, lander: str) -> None:
    call("set", lander, "algorithm.learning_rate=1e-4")
    report = call_json("set", lander)
    options = {row["option"]: row for row in report["options"]}
    assert report["run"] == lander and list(options) == sorted(options) and "env.id" not in options
    known = json.loads(call("schema"))["algorithms"]["sac"]["properties"]
    assert {name for name in options if name.startswith("algorithm.")} == {
        f"algorithm.{name}" for name, option in known.items() if option.get("live")
    }
    row = options["algorithm.learning_rate"]
    assert (row["value"], row["default"], row["allowed"]) == (1e-4, 1e-3, "number > 0")
    assert row["effect"].startswith(
        "Step size of the optimizers. Larger learns faster until values or policy"
    )
    assert options["stop.return"]["value"] == 200.0 and options["stop.return"]["default"] is None
    ranges = {
        name: options[name]["allowed"] for name in ("weight", "priority", "replay.max_bytes", "stop.time")
    }
    assert ranges == {
        "weight": "number > 0, <= 100",
        "priority": "low or normal or high",
        "replay.max_bytes": "size >= 65536",
        "stop.time": "duration > 0 or null",
    }
    printed = commands.run("set", lander)
    cells = [line.split() for line in printed.out.splitlines()]
    assert ["weight", "1.0", "1.0", "number", ">", "0,", "<=", "100."] in [row[:8] for row in cells]
    assert len(cells) == 1 + len(options) and f"`ddrl set {lander} NAME=VALUE`" in printed.err
    assert events(client, lander) == ["created", "set"]


@pytest.mark.parametrize("name", base.names())
def test_every_live_option_has_allowed_values(name: str) -> None:
    own = base.config_class(name)
    for option, field in (config.options(config.RunConfig) | config.options(own)).items():
        if option in {*config.live_options(config.RunConfig), *config.live_options(own)}:
            assert config.allowed(field.annotation, field.metadata), option


def test_what_the_server_has_no_room_for_is_refused_as_a_whole(client: Any) -> None:
    run = make_run(client)
    before = runs.config(client, run)
    client.config_set("maxmemory", "300mb")
    try:
        assert "maxmemory" in refused("set", run, "weight=2", "replay.max_bytes=400MB")
    finally:
        client.config_set("maxmemory", "0")
    assert runs.config(client, run) == before and events(client, run) == ["created"]


def test_a_paused_run_can_change(client: Any) -> None:
    run = make_run(client)
    runs.set_status(client, run, "paused", "paused by the operator")
    assert "the next one uses the new settings" in commands.run("set", run, "weight=3").err
    assert runs.config(client, run).weight == 3.0


def test_two_operators_do_not_undo_each_other(client: Any) -> None:
    run = make_run(client)
    before, version = runs.config(client, run), runs.state(client, run).config_version
    call("set", run, "weight=2")
    after, changes = settings.change(before, runs.spaces(client, run), {"stop.time": 60})
    with pytest.raises(StoreError, match="changed meanwhile"):
        runs.change(client, run, after, changes, version=version)
    assert runs.config(client, run).weight == 2.0


def test_changes_are_in_the_folder(client: Any, lander: str, tmp_path: Path) -> None:
    call("set", lander, "algorithm.temperature=0.1", "stop.return=null")
    runs.set_status(client, lander, "stopped", "enough")
    artifacts.write(client, lander, tmp_path)
    with (tmp_path / "journal.csv").open(encoding="utf-8") as file:
        created, *changes, ended = csv.DictReader(file)
    assert (created["event"], created["option"]) == ("created", "") and ended["reason"] == "enough"
    assert [[row[name] for name in ("event", "option", "from", "to", "env_steps")] for row in changes] == [
        ["set", "algorithm.temperature", "auto", "0.1", "30000"],
        ["set", "stop.return", "200.0", "", "30000"],
    ]
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (events_file,) = (tmp_path / "tensorboard").iterdir()
    values = (value for event in EventFileLoader(str(events_file)).Load() for value in event.summary.value)
    texts = [value.tensor.string_val[0].decode() for value in values if value.tag == "settings"]
    assert texts == ["algorithm.temperature: auto -> 0.1", "stop.return: 200 -> none"]
    assert "algorithm:\n  name: sac\n  temperature: 0.1\n" in (tmp_path / "config.yaml").read_text()


def test_changes_are_drawn_on_both_panels(client: Any, tmp_path: Path) -> None:
    """Returns rise over thirty seconds: labels are above them at first, below them in the end."""
    rising = [{"time_s": n / 10, "env_steps": n * 100, "return": float(n)} for n in range(300)]
    records = replace(read(client, make_run(client)), episodes=rising)
    assert _drawn(records) == ([], [])
    created = {"time_s": 0.0, "event": "created"}
    changes = (_change(3.0, "algorithm.learning_rate", 1e-4), _change(3.1, "stop.time", None))
    last = _change(29.9, "algorithm.temperature", "auto")
    records = replace(records, journal=[created, *changes, last])
    labels = [("learning_rate 0.0001\nstop.time none", "top"), ("temperature auto", "bottom")]
    assert _drawn(records) == ([3.0, 3.1, 29.9], labels)
    assert _drawn(records, "env_steps") == ([3000, 3100, 29900], labels)
    many = replace(records, journal=[_change(3.0, "weight", number) for number in range(9)])
    assert _drawn(many)[1] == [("weight 0\nweight 1\nweight 2\nand 6 more", "top")]
    many = replace(records, journal=[_change(1.5 * number, "weight", number) for number in range(20)])
    long = replace(records, journal=[_change(3.0, "weight", "W" * 500)])  # as a worker may write it
    assert _drawn(long)[1] == [("weight " + "W" * 33, "top")]
    lines, labels = _drawn(many)
    assert len(lines) == 20 and labels == []
    assert len(curves.plot_run(many)) > 10_000


def test_metrics_of_the_environment_have_panels_of_their_own(client: Any) -> None:
    records = read(client, make_run(client))
    figures = [{"time_s": float(n), "env_steps": 100 * n, "info/won": 0.1 * n} for n in range(3)]
    evaluated = [{"time_s": 2.5, "env_steps": 250, "info/won": 0.5}, {"time_s": 3.0, "env_steps": 300}]
    axes = Figure().subplots()
    curves.draw_metric(axes, replace(records, figures=figures, evaluated=evaluated), "env_steps", "won")
    trained, scored = (line.get_xydata() for line in axes.lines)
    np.testing.assert_allclose(trained, [(0, 0), (100, 0.1), (200, 0.2)])
    np.testing.assert_allclose(scored, [(250, 0.5)])
    env = records.config.env.model_copy(update={"metrics": ("won", "never")})
    shown = replace(records, config=records.config.model_copy(update={"env": env}))
    heights = [int.from_bytes(curves.plot_run(one)[20:24], "big") for one in (records, shown)]  # of the PNG
    assert heights[1] == heights[0] + 2 * 286


def _change(seconds: float, option: str, to: Any) -> dict[str, Any]:
    """Return an entry of the journal."""
    row = {"time_s": seconds, "env_steps": int(1000 * seconds), "event": "set", "option": option}
    return row | {"from": None, "to": to}


def _drawn(records: Records, over: str = "time_s") -> tuple[list[float], list[tuple[str, str]]]:
    """Return where a panel has lines of changes, and the labels with the side they are on."""
    axes = Figure().subplots()
    curves.draw_run(axes, records, over)
    drawn = [lines for lines in axes.collections if lines.get_label() == "setting changed"]
    texts = [text for text in axes.texts if text.get_rotation() == 90]
    labels = [(text.get_text(), str(text.get_verticalalignment())) for text in texts]
    return [float(path.vertices[0, 0]) for lines in drawn for path in lines.get_paths()], labels
