"""`ddrl compare`: what runs reached, in what they differ, and their curves in one drawing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.commands import call, call_json, run
from support.store import add_history, end, make_run

from ddrl.cli.compare import differences
from ddrl.runs import curves
from ddrl.runs.records import read
from ddrl.store import keys

PNG = b"\x89PNG\r\n\x1a\n"


def test_table_and_drawing(client: Any, lander: str, tmp_path: Path) -> None:
    changed = {"algorithm": {"name": "sac", "gamma": 0.98}, "replay": {"capacity": 5_000}, "stop": {}}
    second = make_run(client, name="second", seed=2, **changed)
    end(client, lander, "solved", "return 200 confirmed")
    printed = run("compare", "lunar", second, lander)
    lines = printed.out.splitlines()
    assert lines[0] == "env LunarLanderContinuous-v3, algorithm sac"
    assert lines[2].split() == ["run", "seed", "status", "train", "env", "steps", "updates", "best", "return"]
    cells = lines[3].split()
    assert cells[:4] == ["1", lander, "1", "solved"] and "30,000" in cells
    assert lines[3].endswith("205.0 ± 7.0")
    assert lines[4].split() == ["2", second, "2", "active", "-", "0", "0", "-"]
    table = {line.split()[0]: line.split()[1:] for line in lines[7:]}
    assert table == {
        "algorithm.gamma": ["0.99", "0.98"],
        "replay.capacity": ["1000000", "5000"],
        "stop.return": ["200.0", "null"],
        "stop.time": ["900.0", "null"],
    }
    assert printed.err == "curves in compare.png\n" and (tmp_path / "compare.png").read_bytes()[:8] == PNG
    report = call_json("compare", lander, second, "-o", "of.png")
    assert report["plot"] == str(tmp_path / "of.png") and (tmp_path / "of.png").read_bytes()[:8] == PNG
    one, two = report["runs"]
    assert (one["run"], one["best_return"], one["best_return_std"]) == (lander, 205.0, 7.0)
    both_none = {"stop.return": None, "stop.time": None}
    assert two["differs"] == {"algorithm.gamma": 0.98, "replay.capacity": 5_000} | both_none
    assert one["differs"]["algorithm.gamma"] == 0.99


def test_the_same_settings_and_other_environments(client: Any) -> None:
    first, second = make_run(client, seed=1), make_run(client, seed=2)
    assert "the same except for the seed" in call("compare", first, second)
    assert "their settings are the same\n" in call("compare", first, make_run(client, seed=1))
    client.hset(keys.state(second), "warm", f"{first}@3")
    cells = [line.split() for line in call("compare", first, second).splitlines()]
    assert ["from", "-", f"{first}@3"] in cells
    third = make_run(
        client, env={"id": "Pendulum-v1", "kwargs": {"g": 9.8}}, algorithm={"name": "ppo", "clip": 0.3}
    )
    printed = run("compare", first, third)
    cells = [line.split() for line in printed.out.splitlines()]
    assert ["algorithm.clip", "-", "0.3"] in cells and ["env.kwargs.g", "-", "9.8"] in cells
    assert ["algorithm.learning_rate", "0.001", "0.0003"] in cells
    assert "algorithm.target_rate" not in printed.out, "only one of them has it, at its default"
    assert printed.out.splitlines()[0].split()[:4] == ["run", "env", "algorithm", "seed"]
    assert "Pendulum-v1" in printed.out and "cannot be compared" in printed.err


def test_differences_leave_out_what_has_a_column_of_its_own() -> None:
    one = {"seed": 1, "env.id": "A", "algorithm.gamma": 0.9, "stop.time": None}
    two = {"seed": 2, "env.id": "B", "algorithm.gamma": 0.9, "stop.time": 60.0, "algorithm.x": 3}
    assert differences([one, two], ["algorithm.x"]) == {"algorithm.x": ["-", 3], "stop.time": [None, 60.0]}


def test_a_trailing_mean_is_of_the_last_values() -> None:
    assert curves.trailing_mean([1.0, 2.0, 3.0, 4.0], window=2) == [1.0, 1.5, 2.5, 3.5]
    assert curves.trailing_mean([]) == []


def test_plots_of_much_and_of_nothing(client: Any, tmp_path: Path) -> None:
    empty = read(client, make_run(client))
    lander = make_run(client, stop={"return": 20.0})
    add_history(client, lander)
    much = read(client, lander)
    point = replace(empty, episodes=much.episodes[:1])
    evaluated = replace(empty, evaluated=much.evaluated[:1])
    for records in ([much, *[evaluated] * 15], [empty] * 2, [point, evaluated]):
        labels = {f"{number}": each for number, each in enumerate(records)}
        curves.plot_runs(labels, tmp_path / "of.png")
        assert (tmp_path / "of.png").read_bytes()[:8] == PNG
