"""Real Celery workers: their heartbeat, how they end, and what they do while the server is full."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.events.state import State
from kombu import Connection
from kombu.asynchronous import Hub
from redis import Redis
from support.private_server import PrivateServer
from support.processes import READY, Process, Processes, bound, is_alive
from support.runs import stream_steps
from support.worker_runs import ALLOWED, bad, dispatching, playable, send

from ddrl import celery, envs
from ddrl.store import connection, keys, runs, segments, workers
from ddrl.store.workers import Heartbeat
from ddrl.worker import lifecycle

LONG = {"segment_s": 600}


def test_a_process_uses_one_core() -> None:
    """The others are for the machine's other processes."""
    code = "import ddrl.celery, torch, os; print(torch.get_num_threads(), os.environ['OPENBLAS_NUM_THREADS'])"
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "1 1\n", done.stderr


def the_worker(client: Redis) -> Heartbeat:
    (heartbeat,) = workers.alive(client)
    return heartbeat


def until_ready(processes: Processes, worker: Process) -> Process:
    processes.until(lambda: READY in worker.text())
    return worker


@pytest.fixture
def worker(server: PrivateServer, client: Redis, processes: Processes) -> Process:
    """A worker of two processes, which a message awaited."""
    run = playable(client, rollout=LONG)
    send(server, run, 2)
    worker = until_ready(processes, processes.celery(server.url, "-c", "2"))
    assert processes.until(lambda: stream_steps(client, run) > 0) < bound(1.5)
    # No bookkeeping of unacknowledged messages: a full server can neither lose nor repeat one.
    assert not client.keys(f"{keys.BROKER_PREFIX}unacked*")
    runs.set_status(client, run, "stopped", "")
    processes.until(lambda: not segments.playing(client, run))
    return worker


def test_a_worker_says_once_what_it_is_ready_for_whatever_the_log_level(
    server: PrivateServer, worker: Process
) -> None:
    (line,) = [line for line in worker.text().splitlines() if " ready" in line]
    able = ", ".join(["Gymnasium's own", *envs.capabilities()])
    what = f"processes: 2; roles: evaluate, rollout; environments: {able}"
    assert line.endswith(f" ready: server {connection.mask(server.url)}; {what}")
    assert "SecurityWarning" not in worker.text()


def test_a_heartbeat_describes_the_worker_also_after_a_process_was_replaced(
    client: Redis, processes: Processes, worker: Process
) -> None:
    processes.until(lambda: len(workers.alive(client)) == 1)
    sent = the_worker(client)
    assert (sent.host, sent.pid, sent.processes) == (socket.gethostname(), worker.pid, 2)
    assert set(sent.pids) == set(worker.pool())
    assert sent.cores == len(os.sched_getaffinity(0)) and sent.memory_bytes > 10**8
    assert sent.capabilities == tuple(envs.capabilities())
    assert set(sent.queues) == {*envs.queues("ddrl.rollout"), *envs.queues("ddrl.evaluate")}
    assert sent.versions["ddrl"] and sent.versions["gymnasium"] and not sent.draining
    os.kill(worker.pool()[0], signal.SIGKILL)
    processes.until(lambda: set(the_worker(client).pids) == set(worker.pool()) and len(worker.pool()) == 2)


def test_flower_shows_the_run_that_was_chosen(server: PrivateServer, processes: Processes) -> None:
    worker = until_ready(processes, processes.celery(server.url, "-l", "info"))
    assert "mingle" not in worker.text()  # it and gossip delay what a worker does after a lost connection
    run, state = playable(server.client, rollout={"segment_s": 0.3}), State()
    heard: list[str] = []

    def whole() -> list[Any]:
        """Return the run's tasks seen from their message to their result; of tasks before, only the end is seen."""
        return [task for task in state.tasks.values() if run in (task.args or "") and task.state == "SUCCESS"]

    def note(event: dict[str, Any]) -> None:
        state.event(event)
        heard.append(event["type"])
        receiver.should_stop = bool(whole())

    def ready(wire: Connection, *_: object, **__: object) -> None:
        with suppress(TimeoutError):
            wire.drain_events(timeout=0.1)  # subscribes, so that no event is missed
        send(server, run, 3)

    with celery.app.connection_for_read(connection.broker_url(server.url)) as wire:
        receiver = celery.app.events.Receiver(wire, handlers={"*": note})
        receiver.on_consume_ready = ready
        for _ in range(6):  # a busy machine may subscribe after the events
            if not whole():
                with suppress(TimeoutError):
                    receiver.capture(limit=60, timeout=10.0, wakeup=False)
    assert whole(), (heard, worker.text()[-2000:])
    task = whole()[0]
    assert (task.name, task.args) == (celery.ROLLOUT, repr((run,)))
    assert task.result.startswith("{'run': '" + run)


@pytest.mark.faults
def test_a_worker_that_is_stopped_as_a_message_arrives_leaves_soon(
    server: PrivateServer, processes: Processes
) -> None:
    playable(server.client, rollout={"segment_s": 0.2})
    with dispatching(server):
        for worker in [processes.worker(server.url) for _ in range(3)]:
            processes.until(lambda worker=worker: "succeeded" in worker.text())
            received = worker.text().count("received")
            while worker.text().count("received") == received:
                time.sleep(0.001)
            worker.send_signal(signal.SIGTERM)
            processes.until(lambda worker=worker: not worker.running, bound(2.9))


def test_sigterm_ends_segments_at_their_next_append(
    server: PrivateServer, client: Redis, processes: Processes, worker: Process
) -> None:
    run = playable(client, rollout=LONG)
    send(server, run)
    processes.until(lambda: segments.playing(client, run))
    late = playable(client, rollout=LONG)
    send(server, late)
    processes.until(lambda: stream_steps(client, late) > 0)
    playing = [*segments.playing(client, run).values(), *segments.playing(client, late).values()]
    assert {one.pid for one in playing} == set(worker.pool())
    worker.send_signal(signal.SIGTERM)
    ended = processes.until(lambda: not segments.playing(client, run), 60)
    ended += processes.until(lambda: not segments.playing(client, late), 60)
    assert ended < bound(2.0)
    assert worker.wait(60) == 0 and not workers.alive(client)
    for one in (run, late):
        state = runs.state(client, one)
        assert state.status == "active" and state.lost_producers == state.crashes_total == 0
    assert "Traceback" not in worker.text()


def test_a_second_signal_ends_a_worker_at_once_in_order(
    server: PrivateServer, client: Redis, processes: Processes
) -> None:
    """Signals of both kinds: tests/faults/test_faults_signals.py."""
    run = playable(client, rollout=LONG)
    send(server, run, 2)
    worker = processes.celery(server.url)
    processes.until(lambda: stream_steps(client, run) > 0 and workers.alive(client))
    children = worker.pool()
    os.kill(children[0], signal.SIGSTOP)  # so it cannot end in order
    worker.send_signal(signal.SIGINT)
    processes.until(lambda: the_worker(client).draining, 30)
    assert worker.running
    worker.send_signal(signal.SIGINT)
    os.kill(children[0], signal.SIGCONT)
    began = time.monotonic()
    assert worker.wait(60) == 1 and time.monotonic() - began < bound(2.0)
    assert not workers.alive(client) and "Traceback" not in worker.text()
    processes.until(lambda: not any(map(is_alive, children)), 20)


def test_nothing_is_repeated_for_a_connection_that_is_gone(server: PrivateServer) -> None:
    app = Celery(broker=connection.broker_url(server.url))
    worker: dict[str, Any] = {
        "pool": SimpleNamespace(is_green=False),
        "controller": SimpleNamespace(use_eventloop=True),
    }
    consumer = lifecycle.Consumer(lambda *_: None, app=app, hub=Hub(), **worker)
    for _ in range(3):
        consumer.connect().close()
    repeated = [one for one in consumer.hub.timer.queue if not one.entry.canceled]
    assert len(consumer.hub.on_tick) == 1 and 3 <= len(repeated) <= 6
    consumer.hub.close()


def test_workers_wait_for_a_full_server_and_log_that_once(
    server: PrivateServer, client: Redis, processes: Processes
) -> None:
    run, sentence = playable(client, rollout=LONG), "the server's memory is full"
    send(server, run)
    worker = processes.celery(server.url, "--pool", "solo")
    processes.until(lambda: stream_steps(client, run) > 0)
    try:
        client.config_set("maxmemory", 1)
        processes.until(lambda: sentence in worker.text())
        starting = processes.celery(server.url, "--pool", "solo")  # waits before it is ready
        processes.until(lambda: sentence in starting.text())
    finally:
        client.config_set("maxmemory", 0)
    until_ready(processes, starting)
    assert "processes: 1;" in starting.text()
    before = stream_steps(client, run)
    with dispatching(server):
        processes.until(lambda: stream_steps(client, run) > before)
    assert worker.running and "Traceback" not in worker.text() + starting.text()
    assert worker.text().count(sentence) == 1
    state = runs.state(client, run)
    assert state.crashes_total == 0 and state.duplicates == 0


def test_a_pool_of_threads_plays_and_drains(
    server: PrivateServer, client: Redis, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bad(client, "sleep", monkeypatch, rollout=LONG)
    send(server, run, 20)
    worker = processes.celery(server.url, "--pool", "threads", "-c", "20", env=ALLOWED)
    processes.until(lambda: len(segments.playing(client, run)) == client.hlen(keys.producers(run)) == 20)
    assert {playing.pid for playing in segments.playing(client, run).values()} == {worker.pid}
    processes.until(lambda: (worker.pid,) in [one.pids for one in workers.alive(client)])
    worker.send_signal(signal.SIGTERM)
    assert processes.until(lambda: not segments.playing(client, run), 60) < bound(2.0)
    assert worker.wait(60) == 0 and "Traceback" not in worker.text()


def test_a_process_above_its_memory_limit_is_replaced_between_two_segments(
    server: PrivateServer, client: Redis, processes: Processes
) -> None:
    """A process that plays the toy holds about 90 MiB: more than the limit, less than twice as much."""
    run = playable(client, rollout={"segment_s": 0.5})
    with dispatching(server):
        processes.celery(server.url, env={"DDRL_PROCESS_MEMORY": "60MiB"})
        processes.until(lambda: client.hlen(keys.producers(run)) >= 2)
    assert runs.state(client, run).crashes_total == 0
