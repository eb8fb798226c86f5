"""The actors in C and in JavaScript join a run, and what they append is CartPole as gymnasium has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.learners import Run, training, until
from support.processes import SLOW_S, Processes
from support.runs import start

from ddrl import codec, config
from ddrl.store import keys, runs

ROOT = Path(__file__).parents[2]
OPTIONS = {"evaluation.every_s": 5, "evaluation.confirm_episodes": 20, "weights.onnx": True}


@pytest.fixture(scope="module", params=["c", pytest.param("js", marks=pytest.mark.long)])
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def actor(language: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the program; the tests are skipped where it cannot be made."""
    folder = tmp_path_factory.mktemp(language)
    return in_c(folder) if language == "c" else in_javascript(folder)


def in_c(folder: Path) -> list[str]:
    compiler, program = shutil.which("cc"), folder / "actor"
    if compiler is None or not Path("/usr/include/hiredis/hiredis.h").exists():
        pytest.skip("needs a C compiler and hiredis: apt-get install gcc libhiredis-dev")
    source = ROOT / "clients" / "c" / "actor.c"
    command = [compiler, "-O3", "-Wall", "-Wextra", "-Werror", "-o", program, source, "-lhiredis", "-lm"]
    subprocess.run(command, check=True)
    return [str(program)]


def in_javascript(folder: Path) -> list[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    for name in ("actor.js", "package.json"):
        shutil.copy(ROOT / "clients" / "js" / name, folder)
    done = subprocess.run([npm, "install", "--ignore-scripts"], cwd=folder, capture_output=True, timeout=200)
    if done.returncode:
        pytest.skip(f"npm cannot install its packages: {done.stderr.decode(errors='replace')[-200:]}")
    return [node, str(folder / "actor.js")]


Play = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def play(actor: list[str], language: str, server) -> Iterator[Play]:
    """Starts an actor on the test's server; ends it with the test."""
    begun: list[subprocess.Popen[str]] = []

    def play(run: str, **environment: str) -> subprocess.Popen[str]:
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        at = [str(server.socket), "0"] if language == "c" else [f"unix://{server.socket}"]
        command = [*actor, *at, run]
        begun.append(subprocess.Popen(command, env={**os.environ, **environment}, **output))
        return begun[-1]

    yield play
    for each in begun:
        each.kill()
        each.communicate()


def made(server, **options: Any) -> Run:
    settings = config.load(ROOT / "configs" / "cartpole-dqn.yaml", OPTIONS | options)
    return Run(server, run=start(server.client, settings))


def test_it_plays_cartpole_under_the_newest_weights(server, play: Play, language: str) -> None:
    run = made(server, **{"replay.samples_per_insert": 0.5})
    learner = run.learner()
    with training(learner):
        playing = play(run.id)
        until(lambda: run.state.appended_steps > 8_000 and run.state.version > 3)
        runs.set_status(run.client, run.id, "paused", "for a test")
        time.sleep(0.5)
        before = run.state.appended_steps
        time.sleep(0.5)
        assert run.state.appended_steps == before  # it waits
        runs.set_status(run.client, run.id, "active", "resumed")
        until(lambda: run.state.appended_steps > before)
        runs.set_status(run.client, run.id, "stopped", "enough")
        out, err = playing.communicate(timeout=SLOW_S)
    learner.finish()
    assert playing.returncode == 0 and err == "" and "steps/s" in out
    audit = run.audit()
    assert run.dead == [] and audit.total("consumed") + audit.total("waiting") == len(run.entries)
    fragments = [codec.decode(entry.fields) for entry in run.entries]
    assert {one.host for one in fragments} == {language} and len(
        {one.policy_version for one in fragments}
    ) > 2
    check_dynamics(fragments)


def check_dynamics(fragments: list[Any]) -> None:
    """Step gymnasium's environment from each observation, and compare what follows."""
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    lengths = np.zeros(8, np.int64)
    finals, ends = 0, 0
    for one in fragments:
        index = {tuple(at): place for place, at in enumerate(one.final_index.tolist())}
        for t, lane in np.ndindex(one.num_steps, one.num_envs):
            env.reset()
            env.state = one.observation[t, lane].astype(np.float64)
            after, reward, terminated, _, _ = env.step(int(one.action[t, lane]))
            lengths[lane] += 1
            is_near_the_edge = min(abs(abs(after[0]) - 2.4), abs(abs(after[2]) - 0.2095)) < 1e-5
            assert terminated == one.terminated[t, lane] or is_near_the_edge
            assert one.truncated[t, lane] == (lengths[lane] == 500 and not one.terminated[t, lane])
            follows = one.observation[t + 1, lane]
            if one.truncated[t, lane]:
                follows, finals = one.final_observation[index[t, lane]], finals + 1
            if not one.terminated[t, lane]:
                np.testing.assert_allclose(follows, after, atol=1e-5)
            if one.ended[t, lane]:
                ends += 1
                lengths[lane] = 0
                assert np.abs(one.observation[t + 1, lane]).max() <= 0.05
        assert one.episode_length.sum() == one.episode_return.sum() and (one.reward == 1).all()
    assert ends > 20 and finals == sum(len(one.final_index) for one in fragments)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"wire": '{"format": 2, "append": ""}'}, "speaks format 2, this actor 1; use a newer actor"),
        ({"spaces": '{"env_id": "Pong"}'}, "does not play CartPole-v1"),
        ({}, "not on this server"),
    ],
)
def test_it_refuses_what_it_cannot_play(server, play: Play, change: dict[str, str], line: str) -> None:
    run = made(server)
    if change:
        run.client.hset(keys.state(run.id), mapping=change)
    playing = play(run.id if change else "nobody")
    out, err = playing.communicate(timeout=SLOW_S)
    assert (playing.returncode, out, err) == (
        1,
        "",
        f"actor: error: run {run.id if change else 'nobody'}: {line}\n",
    )


def test_it_refuses_runs_that_take_no_such_fragments(server, play: Play) -> None:
    run = made(server, **{"env.num_envs": 4})
    out, err = play(run.id).communicate(timeout=SLOW_S)
    assert (out, err) == (
        "",
        f"actor: error: run {run.id}: takes fragments of 4 environments, this actor's have 8\n",
    )


def test_fragments_are_no_longer_than_the_run_takes(server, play: Play) -> None:
    run = made(server, **{"rollout.max_fragment_steps": 20})
    with training(run.learner()):
        play(run.id)
        until(lambda: len(run.entries) > 3)
    assert run.dead == []


@pytest.mark.parametrize("option", [{"activation": "tanh"}, {"norm": "layer"}])
def test_an_actor_with_a_network_of_its_own_refuses_others(server, play: Play, language, option) -> None:
    if language == "js":
        pytest.skip("it runs ONNX files, which hold any network")
    run = made(server, **{f"algorithm.{name}": value for name, value in option.items()})
    out, err = play(run.id).communicate(timeout=SLOW_S)
    line = "its policy is not a DQN of plain layers with ReLU"
    assert (out, err) == ("", f"actor: error: run {run.id}: {line}\n")


def test_a_network_that_is_too_wide_is_refused(server, play: Play, language: str) -> None:
    if language == "js":
        pytest.skip("it runs ONNX files, which hold any network")
    run = made(server, **{"algorithm.hidden_sizes": [5000, 8]})
    with training(run.learner()):
        out, err = play(run.id).communicate(timeout=SLOW_S)
    line = "its network is not a DQN's of 4 inputs, 2 actions and layers of up to 4096"
    assert out == "" and line in err and err.count("\n") == 1


@pytest.mark.long
def test_a_run_is_solved_by_such_actors_alone(
    server, play: Play, language: str, processes: Processes
) -> None:
    """Also after the server did not answer, and after it has lost the scripts."""
    run = made(server)
    processes.learner(server.url)
    processes.worker(server.url, "--role", "evaluate")
    playing = [play(run.id) for _ in range(2)]
    until(lambda: run.state.updates > 500)
    with server.frozen():
        time.sleep(12.0)  # longer than an actor waits for an answer
    run.client.script_flush()
    processes.until(lambda: runs.state(server.client, run.id).ended)
    assert run.state.outcome == "solved"
    num_steps = 0
    for each in playing:
        out, err = each.communicate(timeout=SLOW_S)
        num_steps += int(out.split()[0])
        assert each.returncode == 0 and "does not answer; asks again" in err and err.count("\n") == 1, err
    assert num_steps <= run.state.allowance + 2 * 64 * 8  # the last fragment of each
    hosts = {codec.decode(entry.fields).host for entry in run.entries}
    assert hosts == {language} and run.dead == []
