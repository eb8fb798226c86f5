"""The Python API: a run from its submission to its policy, in a script; and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis
from support.private_server import PrivateServer
from support.runs import target_tree

import ddrl
from ddrl import ConfigError, InputError, ServerError, StoreError
from ddrl.store import connection, runs
from ddrl.store.runs import UnknownRunError

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def waiting(**options: Any) -> ddrl.Run:
    """Submit a run for which nothing is started."""
    return ddrl.submit(target_tree(), options, workers=0, learner=False)


def test_a_run_is_learned_watched_and_played(client: Redis, folder: Path) -> None:
    run = ddrl.submit(target_tree(), {"stop.time": 100}, seed=7, workers=1, learner=True)
    assert runs.config(client, run.id).seed == 7 and runs.config(client, run.id).stop.time == 100
    seen = [(figures.state.ended, figures.state.updates) for figures in run.watch(every_s=0.2)]
    assert [ended for ended, _ in seen].count(True) == 1 and seen[-1][0] and seen[-1][1] > seen[0][1]
    end = run.wait()
    assert end == {**run.summary(), "wall_s": end["wall_s"]} and run.status == "solved"
    evaluated = [row for row in run.records().evaluated if row["purpose"] == "confirm"]
    assert evaluated[-1]["return_mean"] >= -0.5
    counted: list[tuple[int, int]] = []
    report = run.evaluate(6, local=True, on_progress=lambda *now: counted.append(now))
    assert len(report["returns"]) == 6 and report["return_mean"] >= -1.0 and counted[-1] == (6, 6)
    assert report["policy_version"] == end["policy_version"]
    assert run.export(folder / "a.safetensors", "latest").is_file()
    with pytest.raises(InputError, match="a.safetensors: exists already"):
        run.export(folder / "a.safetensors", "latest")
    assert run.export(folder, force=True).name == f"{run.id}-v{end['policy_version']}.safetensors"
    with pytest.raises(InputError, match="cannot be written"):
        run.export("no/such.safetensors")
    with pytest.raises(InputError, match="is neither a number, nor best, nor latest"):
        run.policy("newest")
    loaded, policy = ddrl.policy.load(folder / "a.safetensors"), run.policy("latest")
    env = policy.make_env()
    observation, _ = env.reset(seed=1)
    assert (policy.action(observation) == loaded.action(np.asarray(observation))).all()
    assert ddrl.run(run.id[:-2]) == run == ddrl.all_runs()[-1]
    for thread in threading.enumerate():  # the processes that were started have ended
        if thread.name == "detached":
            thread.join(60.0)
            assert not thread.is_alive()
    runs.delete(client, run.id)
    with pytest.raises(UnknownRunError, match=f"play runs/{run.id}/policy.safetensors, or continue"):
        ddrl.run(run.id)
    with pytest.raises(UnknownRunError):
        run.policy()
    run.resume(workers=0, learner=False, time=60)  # from its folder
    assert run.status == "active"


@pytest.mark.long
def test_the_script_of_the_guide(home: Path, folder: Path) -> None:
    """It starts all that it needs, and leaves nothing behind but the run."""
    [script] = re.findall(r"```python\n(import ddrl\n.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("active 0 None") and float(last.split()[-1]) > 400
    assert len(list(folder.glob("runs/cartpole-*/policy.safetensors"))) == 1


def test_a_run_is_changed_while_it_waits(client: Redis) -> None:
    run = waiting(weight=np.float32(2), **{"algorithm.batch_size": np.int64(64)})
    assert runs.config(client, run.id).algorithm["batch_size"] == 64
    assert run.set({"weight": 3.5})["changes"] == [{"option": "weight", "from": 2.0, "to": 3.5}]
    run.pause()
    assert run.status == "paused"
    with pytest.raises(InputError, match="already paused"):
        run.pause()
    with pytest.raises(TimeoutError, match="has not ended within 0.1 s"):
        run.wait(timeout_s=0.1)
    run.resume(workers=0, learner=False, time="15m")
    assert run.status == "active" and runs.config(client, run.id).stop.time == 900
    assert run.stop()["status"] == "stopped" and next(run.watch()).state.ended
    with pytest.raises(InputError, match="has already ended"):
        run.stop()
    with pytest.raises(InputError, match=r"has ended \(stopped\), its settings cannot change"):
        run.set({"weight": 1})


def test_what_cannot_be_is_refused_as_on_the_command_line(client: Redis) -> None:
    tree = target_tree()
    with pytest.raises(ConfigError, match="did you mean gamma"):
        waiting(**{"algorithm.gama": 0.9})
    with pytest.raises(ConfigError, match="seed is a value, not a section"):
        ddrl.submit({**tree, "seed": 1}, {"seed.a": 1})
    with pytest.raises(ConfigError, match="no such file or preset"):
        ddrl.submit("lunarr")
    with pytest.raises(UnknownRunError, match="there are none yet"):
        ddrl.run()
    assert ddrl.all_runs() == [] and tree == target_tree()  # the settings given are not changed
    run = waiting()
    with pytest.raises(InputError, match="has published no weights yet"):
        run.policy()
    with pytest.raises(ConfigError, match="time: '1 week' is not a duration"):
        run.resume(time="1 week")
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        ddrl.sumbit  # type: ignore[attr-defined]  # noqa: B018
    assert {"run", "submit", "Run", "InputError"} < {*dir(ddrl)}


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda run: ddrl.submit(target_tree(), workers=-1), "submit: workers: -1 cannot be used; input"),
        (lambda run: ddrl.submit(target_tree(), ["a=1"]), r"submit: options: \['a=1'\] cannot be used"),  # type: ignore[arg-type]
        (lambda run: ddrl.submit(None), "submit: config"),  # type: ignore[arg-type]
        (lambda run: ddrl.run(5), "run: name: 5 cannot be used"),  # type: ignore[arg-type]
        (lambda run: run.evaluate(0), "evaluate: episodes: 0 cannot be used; input should be greater"),
        (lambda run: run.evaluate(1, seed=-1), "evaluate: seed: -1 cannot be used"),
        (lambda run: run.evaluate(1, num_envs=0), "evaluate: num_envs: 0 cannot be used"),
        (lambda run: run.policy(3.5), "policy: version"),
        (lambda run: run.watch(0), "watch: every_s: 0"),
        (lambda run: run.resume(workers="two"), "resume: workers: 'two'"),
        (lambda run: run.set([1]), r"set: options: \[1\]"),
    ],
)
def test_arguments_outside_their_limits_are_refused(
    call: Callable[[Any], Any], line: str, client: Redis
) -> None:
    with pytest.raises(InputError, match=f"^{line}") as caught:
        call(ddrl.Run("a-run"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"env.kwargs": {"a": object()}}, "env.kwargs: {'a': <object"),
        ({"": 1}, "'': expected NAME.NAME=VALUE"),
        ({"algorithm..gamma": 1}, "'algorithm..gamma': expected"),
    ],
)
def test_options_that_no_file_could_give_are_refused(options: Any, line: str, client: Redis) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        waiting(**options)


def test_no_run_is_left_where_its_processes_cannot_be_started(client: Redis, folder: Path) -> None:
    (folder / "runs").touch()
    with pytest.raises(StoreError, match=r"runs: cannot be made \(File exists\)"):
        ddrl.submit(target_tree(), workers=1)
    assert ddrl.all_runs() == []
    run = waiting()
    run.pause()
    with pytest.raises(StoreError, match=r"runs: cannot be made \(File exists\)"):
        run.resume(workers=1)
    assert run.status == "paused"


def test_a_server_that_goes_away_is_a_server_error(
    client: Redis, server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waiting()
    watched = run.watch(every_s=0.1)
    assert next(watched).hint.startswith("waiting for a learner")
    monkeypatch.setattr("ddrl.cli.watcher.OUTAGE_S", 0.5)
    server.kill()
    for call in (lambda: run.status, run.pause, ddrl.all_runs):
        with pytest.raises(ServerError):
            call()
    with pytest.raises(ServerError):
        assert all("waiting for it" in figures.hint for figures in watched)


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, "redis://127.0.0.1:1")
    monkeypatch.setattr(connection, "RETRIES", 0)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:1"):
        ddrl.all_runs()
