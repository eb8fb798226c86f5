"""Real Celery workers whose processes fail: each failure is reported to its run, with host and remedy."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from support.private_server import PrivateServer
from support.processes import Process, Processes
from support.runs import stream_steps
from support.worker_runs import ALLOWED, bad, dispatching, open_evaluation, playable, send

from ddrl.store import keys, runs, segments

HOST = f"host {socket.gethostname()}: "
ENDS: dict[str, tuple[dict[str, Any], str]] = {  # kind of environment -> the run's rollout section, what is reported
    "segfault": ({}, "native code crashed"),
    "hang": ({"step_timeout_s": 1.5}, "bad_envs:make took longer than 1.5 s for a step (rollout.step_timeout_s)"),
    "hold": ({"step_timeout_s": 0.5}, "held the interpreter for longer than rollout.step_timeout_s"),
    "eat": ({"segment_s": 600}, "more than 2 times DDRL_PROCESS_MEMORY"),
}  # fmt: skip


@pytest.fixture(scope="module")
def worker(module_server: PrivateServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One worker for all tests whose environments fail; its pool replaces the processes that end."""
    with Processes(tmp_path_factory.mktemp("worker")) as processes:
        environment = {**ALLOWED, "DDRL_PROCESS_MEMORY": "400MiB"}
        worker = processes.celery(module_server.url, concurrency=len(ENDS), env=environment)
        processes.until(lambda: " ready." in worker.text())
        yield worker
        assert worker.running and "Traceback" not in worker.text()


def test_a_process_that_its_environment_ends_or_stops_is_reported_and_replaced(
    server: PrivateServer, processes: Processes, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, before = server.client, set(worker.pool())
    played = {}
    for kind, (rollout, _) in ENDS.items():
        marker = "" if kind == "eat" else str(processes.folder / kind)  # fails once; "eat" fails always
        played[kind] = bad(client, kind, monkeypatch, rollout=rollout, kwargs={"marker": marker})
        send(server, played[kind])
    for kind, (_, reason) in ENDS.items():
        run = played[kind]
        processes.until(lambda run=run: runs.state(client, run).crashes_total == 1)
        state = runs.state(client, run)
        assert state.error.startswith(HOST) and reason in state.error and ";" in state.error
        assert state.crashes == 1
    del played["eat"]
    steps = {run: stream_steps(client, run) for run in played.values()}
    for run in steps:
        send(server, run)
    processes.until(lambda: all(stream_steps(client, run) > steps[run] for run in steps))
    processes.until(lambda: len(worker.pool()) == len(ENDS))
    assert set(worker.pool()) != before
    states = [runs.state(client, run) for run in steps]
    assert {(state.crashes, state.crashes_total) for state in states} == {(0, 1)}


def test_a_process_killed_in_a_rollout_or_an_evaluation_or_beyond_its_time_is_reported(
    server: PrivateServer, processes: Processes, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client
    run = playable(client, rollout={"segment_s": 600})
    send(server, run)
    processes.until(lambda: segments.players(client, run))
    (playing,) = segments.players(client, run).values()
    os.kill(playing.pid, signal.SIGKILL)
    processes.until(lambda: runs.state(client, run).crashes_total == 1)
    assert "was killed (signal 9)" in runs.state(client, run).error

    send(server, run, limit_s=2)
    processes.until(lambda: runs.state(client, run).crashes_total == 2)
    assert runs.state(client, run).error.startswith(f"{HOST}a task took longer than 2 s")

    evaluated = bad(client, "segfault", monkeypatch, kwargs={"steps": 3})
    open_evaluation(server, evaluated)
    processes.until(lambda: runs.state(client, evaluated).crashes_total == 1)
    assert "native code crashed" in runs.state(client, evaluated).error


def test_an_environment_that_raises_costs_a_player_and_no_process(
    server: PrivateServer, processes: Processes, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, marker = server.client, str(processes.folder / "marker")
    processes.until(lambda: len(worker.pool()) == len(ENDS))
    pool = worker.pool()
    run = bad(client, "raise", monkeypatch, kwargs={"marker": marker})
    with dispatching(server, run):
        processes.until(lambda: client.hlen(keys.producers(run)) >= 2)  # another player
    state = runs.state(client, run)
    assert state.error.startswith(f"{HOST}RuntimeError: the simulator is out of order; ")
    assert state.crashes == 0 and state.crashes_total == 1
    assert worker.pool() == pool


def test_a_process_above_its_memory_limit_is_replaced_between_two_segments(
    server: PrivateServer, processes: Processes
) -> None:
    """A process that plays the toy holds about 90 MiB: more than the limit, less than twice as much."""
    run = playable(server.client, rollout={"segment_s": 0.5})
    worker = processes.celery(server.url, env={"DDRL_PROCESS_MEMORY": "60MiB"})
    processes.until(lambda: " ready." in worker.text())
    with dispatching(server, run):
        processes.until(lambda: server.client.hlen(keys.producers(run)) >= 2)
    assert runs.state(server.client, run).crashes_total == 0


def test_a_memory_limit_that_is_no_size_is_refused_in_one_line(
    server: PrivateServer, processes: Processes
) -> None:
    worker = processes.celery(server.url, env={"DDRL_PROCESS_MEMORY": "lots"})
    assert worker.wait() == 1
    assert worker.text().splitlines()[-1] == (
        "ddrl: error: DDRL_PROCESS_MEMORY=lots: not a memory size; write it like 4GiB"
    )


def test_a_machine_refuses_runs_that_it_does_not_fit_by_name_and_plays_others(
    server: PrivateServer, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client
    older, fits = playable(client), playable(client)
    client.hset(keys.state(older), "versions", json.dumps({"gymnasium": "0.26.3"}))
    network = {"name": "ppo", "network": "bad_networks:make"}
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "bad_envs,bad_networks")
    foreign = bad(client, "none", monkeypatch)
    custom = playable(client, env={"id": "ddrl/Pick-v0"}, algorithm=network)
    queues = {run: runs.state(client, run).queue for run in (older, fits, foreign, custom)}
    assert queues == {
        older: "ddrl.rollout",
        fits: "ddrl.rollout",
        foreign: "ddrl.rollout.bad_envs",
        custom: "ddrl.rollout+bad_networks",
    }
    # A worker that takes messages of these queues, and then may not import the modules.
    names = ",".join(sorted(set(queues.values())))
    script = (
        "import os; os.environ['DDRL_ALLOW_MODULES'] = 'bad_envs,bad_networks'; from ddrl.celery import app; "
        "del os.environ['DDRL_ALLOW_MODULES']; "
        f"app.worker_main(['worker', '--pool', 'solo', '-l', 'info', '-Q', '{names}'])"
    )
    worker = processes.start("worker", server.url, "-c", script)
    with dispatching(server, *queues):
        processes.until(lambda: stream_steps(client, fits) > 0)
        processes.until(lambda: all(segments.refusals(client, run) for run in (older, foreign, custom)))
    refusals = {run: segments.refusals(client, run).get(socket.gethostname(), "") for run in queues}
    assert refusals[older].startswith(f"{HOST}gymnasium is ")
    assert "pip install 'gymnasium==0.26.3'" in refusals[older]
    for run, module in ((foreign, "bad_envs"), (custom, "bad_networks")):
        assert refusals[run].startswith(f"{HOST}{module}:make: ")
        assert f"set DDRL_ALLOW_MODULES={module} on every machine" in refusals[run]
    assert refusals[fits] == ""
    assert [stream_steps(client, run) for run in (older, foreign, custom)] == [0, 0, 0]
    assert "Traceback" not in worker.text()
    assert all(runs.state(client, run).crashes_total == 0 for run in queues)
