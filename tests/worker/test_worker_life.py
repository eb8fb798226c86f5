"""Real Celery workers: their heartbeat, how they end, and what they do while the server is full."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest
from support.private_server import PrivateServer
from support.processes import Process, Processes, bound
from support.runs import stream_steps
from support.worker_runs import ALLOWED, bad, dispatching, playable, send

from ddrl import envs
from ddrl.store import keys, runs, segments, workers
from ddrl.store.workers import Heartbeat

HOST = f"host {socket.gethostname()}: "


def the_worker(server: PrivateServer) -> Heartbeat:
    (heartbeat,) = workers.alive(server.client)
    return heartbeat


def ready(processes: Processes, worker: Process) -> None:
    processes.until(lambda: " ready." in worker.text())


def test_a_worker_plays_soon_after_it_is_ready_and_its_heartbeat_describes_it(
    server: PrivateServer, processes: Processes
) -> None:
    run = playable(server.client)
    send(server, run, 2)
    worker = processes.celery(server.url, concurrency=2)
    ready(processes, worker)
    assert processes.until(lambda: stream_steps(server.client, run) > 0) < bound(1.5)
    processes.until(lambda: len(workers.alive(server.client)) == 1)
    sent = the_worker(server)
    assert (sent.host, sent.pid, sent.processes) == (socket.gethostname(), worker.pid, 2)
    assert set(sent.pids) == set(worker.pool())
    assert sent.cores == len(os.sched_getaffinity(0)) and sent.memory_bytes > 10**8
    assert sent.capabilities == tuple(envs.capabilities())
    assert set(sent.queues) == {*envs.queues("ddrl.rollout"), *envs.queues("ddrl.evaluate")}
    assert sent.versions["ddrl"] and sent.versions["gymnasium"] and not sent.draining
    playing = segments.playing(server.client, run)
    assert all(one.node == sent.node and one.pid in sent.pids for one in playing.values())
    # No bookkeeping of unacknowledged messages: a full server can neither lose nor repeat one.
    assert not server.client.keys(f"{keys.BROKER_PREFIX}unacked*")

    os.kill(worker.pool()[0], signal.SIGKILL)
    processes.until(lambda: set(the_worker(server).pids) == set(worker.pool()) and len(worker.pool()) == 2)


def test_sigterm_ends_segments_at_their_next_append(server: PrivateServer, processes: Processes) -> None:
    run = playable(server.client, rollout={"segment_s": 600})
    late = playable(server.client, rollout={"segment_s": 600})
    send(server, run)
    worker = processes.celery(server.url, concurrency=2)
    processes.until(lambda: segments.playing(server.client, run))
    send(server, late)
    processes.until(lambda: stream_steps(server.client, late) > 0)
    worker.send(signal.SIGTERM)
    ended = processes.until(lambda: not segments.playing(server.client, run), 60)
    ended += processes.until(lambda: not segments.playing(server.client, late), 60)
    assert ended < bound(2.0)
    assert worker.wait(60) == 0
    assert not workers.alive(server.client)
    for one in (run, late):
        state = runs.state(server.client, one)
        assert state.status == "active" and state.lost_producers == state.crashes_total == 0
    assert "Traceback" not in worker.text()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_worker_at_once_in_order(
    server: PrivateServer, processes: Processes, signum: signal.Signals
) -> None:
    run = playable(server.client, rollout={"segment_s": 600})
    send(server, run, 2)
    worker = processes.celery(server.url)
    processes.until(lambda: stream_steps(server.client, run) > 0)
    children = worker.pool()
    processes.until(lambda: workers.alive(server.client))
    os.kill(children[0], signal.SIGSTOP)  # so it cannot end in order
    worker.send(signum)
    processes.until(lambda: the_worker(server).draining, 30)
    assert worker.running
    worker.send(signum)
    os.kill(children[0], signal.SIGCONT)
    began = time.monotonic()
    assert worker.wait(60) == 1
    assert time.monotonic() - began < bound(2.0)
    assert not workers.alive(server.client) and "Traceback" not in worker.text()
    processes.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), 20)


def test_workers_wait_for_a_full_server_and_log_that_once(
    server: PrivateServer, processes: Processes
) -> None:
    run = playable(server.client, rollout={"segment_s": 600})
    worker = processes.celery(server.url)
    ready(processes, worker)
    send(server, run)
    processes.until(lambda: stream_steps(server.client, run) > 0)
    sentence = "the server's memory is full"
    try:
        server.client.config_set("maxmemory", 1)
        processes.until(lambda: sentence in worker.text())
        starting = processes.celery(server.url)  # waits before it is ready
        processes.until(lambda: sentence in starting.text())
    finally:
        server.client.config_set("maxmemory", 0)
    ready(processes, starting)
    before = stream_steps(server.client, run)
    with dispatching(server, run):
        processes.until(lambda: stream_steps(server.client, run) > before)
    assert worker.running and "Traceback" not in worker.text() + starting.text()
    assert worker.text().count(sentence) == 1
    state = runs.state(server.client, run)
    assert state.crashes_total == 0 and state.duplicates == 0


def test_a_pool_of_threads_plays_and_drains(
    server: PrivateServer, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bad(server.client, "sleep", monkeypatch, rollout={"segment_s": 600})
    worker = processes.celery(server.url, "--pool", "threads", concurrency=20, env=ALLOWED)
    ready(processes, worker)
    send(server, run, 20)
    processes.until(lambda: len(segments.playing(server.client, run)) == 20)
    processes.until(lambda: server.client.hlen(keys.producers(run)) == 20)
    assert {playing.pid for playing in segments.playing(server.client, run).values()} == {worker.pid}
    processes.until(lambda: workers.alive(server.client))
    assert the_worker(server).pids == (worker.pid,)
    worker.send(signal.SIGTERM)
    assert processes.until(lambda: not segments.playing(server.client, run), 60) < bound(2.0)
    assert worker.wait(60) == 0 and "Traceback" not in worker.text()


def test_runs_of_high_priority_come_first(server: PrivateServer, processes: Processes) -> None:
    low, normal, high = (playable(server.client, rollout={"segment_s": 0.5}) for _ in range(3))
    for run, priority in ((low, "low"), (normal, "normal"), (high, "high")):
        server.client.hset(keys.state(run), "priority", priority)
        send(server, run)
    processes.celery(server.url)
    processes.until(lambda: all(stream_steps(server.client, run) for run in (low, normal, high)))
    first_ms = {run: server.client.hget(keys.state(run), "first_step_ms") for run in (high, normal, low)}
    assert list(first_ms) == sorted(first_ms, key=lambda run: int(first_ms[run]))


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
