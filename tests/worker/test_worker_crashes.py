"""Real Celery workers whose processes fail: each failure is reported to its run, with host and remedy."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from support.private_server import PrivateServer
from support.processes import READY, Process, Processes
from support.runs import stream_steps
from support.worker_runs import ALLOWED, bad, dispatching, open_evaluation, playable, send

from ddrl.store import keys, runs, segments

HOST = f"host {socket.gethostname()}: "
ENDS: dict[str, tuple[dict[str, Any], str]] = {  # kind of environment -> the run's rollout section, what is reported
    "segfault": ({}, "native code crashed"),
    "exhaust": ({}, "had no memory left"),
    "hang": ({"step_timeout_s": 6}, "bad_envs:make took longer than 6 s for a step (rollout.step_timeout_s)"),
    "hold": ({"step_timeout_s": 6}, "held the interpreter for longer than rollout.step_timeout_s"),
    "eat": ({"segment_s": 600}, "more than 2 times DDRL_PROCESS_MEMORY"),
}  # fmt: skip


# A worker that also takes messages with short time limits, which it would put aside as forged.
PATIENT = """
import sys
from ddrl import celery
celery.LIMIT_MARGIN_S = 1.0
celery.app.worker_main(["worker", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def worker(module_server: PrivateServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One worker for all tests whose environments fail; its pool replaces the processes that end."""
    with Processes(tmp_path_factory.mktemp("worker")) as processes:
        environment = {**ALLOWED, "DDRL_PROCESS_MEMORY": "400MiB"}
        worker = processes.start(
            "celery", module_server.url, "-c", PATIENT, "-c", str(len(ENDS)), env=environment
        )
        processes.until(lambda: READY in worker.text())
        yield worker


def test_a_process_that_its_environment_ends_or_stops_is_reported_and_replaced(
    server: PrivateServer, processes: Processes, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, before, played = server.client, set(worker.pool()), {}
    for kind, (rollout, _) in ENDS.items():
        marker = "" if kind == "eat" else str(processes.folder / kind)  # fails once; "eat" fails always
        played[kind] = bad(client, kind, monkeypatch, rollout=rollout, kwargs={"marker": marker})
        send(server, played[kind])
    for kind, (_, reason) in ENDS.items():
        run = played[kind]
        processes.until(lambda run=run: runs.state(client, run).crashes_total >= 1)
        state = runs.state(client, run)
        assert state.error.startswith(HOST) and reason in state.error and ";" in state.error
        assert state.crashes >= 1
    runs.set_status(client, played.pop("eat"), "stopped", "would end every process that plays it")
    steps = {run: stream_steps(client, run) for run in played.values()}
    with dispatching(server):
        processes.until(lambda: all(stream_steps(client, run) > steps[run] for run in steps))
    processes.until(lambda: len(worker.pool()) == len(ENDS))
    assert set(worker.pool()) != before
    states = [runs.state(client, run) for run in steps]
    assert {(state.crashes, state.crashes_total) for state in states} == {(0, 1)}
    assert worker.running and "Traceback" not in worker.text()


def test_a_process_killed_in_a_rollout_or_an_evaluation_or_beyond_its_time_is_reported(
    server: PrivateServer, processes: Processes, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client
    run = playable(client, rollout={"segment_s": 600})
    send(server, run)
    processes.until(lambda: segments.playing(client, run))
    (playing,) = segments.playing(client, run).values()
    os.kill(playing.pid, signal.SIGKILL)
    processes.until(lambda: runs.state(client, run).crashes_total == 1)
    assert "was killed (signal 9)" in runs.state(client, run).error

    client.hset(keys.state(run), "limit_ms", 0)  # else the process does not play it with so short a limit
    sent = itertools.count()

    def is_reported() -> bool:
        if next(sent) % 200 == 0:  # once in 10 s, as a message that no process takes in time is lost
            send(server, run, limit_s=2)
        return runs.state(client, run).crashes_total >= 2

    processes.until(is_reported)
    assert runs.state(client, run).error.startswith(f"{HOST}a task took longer than 2 s")

    evaluated = bad(client, "segfault", monkeypatch, kwargs={"steps": 3})
    open_evaluation(server, evaluated)
    processes.until(lambda: runs.state(client, evaluated).crashes_total == 1)
    assert "native code crashed" in runs.state(client, evaluated).error
