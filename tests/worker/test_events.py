"""The events of a real worker, as Flower reads them."""

from __future__ import annotations

from typing import Any

from celery.events.state import State
from support.private_server import PrivateServer
from support.processes import Processes
from support.worker_runs import playable, send

from ddrl import celery
from ddrl.store import connection


def test_flower_shows_the_run_that_was_chosen(server: PrivateServer, processes: Processes) -> None:
    run, state, types = playable(server.client, rollout={"segment_s": 0.3}), State(), list[str]()
    worker = processes.celery(server.url)
    processes.until(lambda: " ready." in worker.text())

    def note(event: dict[str, Any]) -> None:
        types.append(event["type"])
        state.event(event)
        receiver.should_stop = types.count("task-succeeded") == 3

    with celery.app.connection_for_read(connection.broker_url(server.url)) as wire:
        receiver = celery.app.events.Receiver(wire, handlers={"*": note})
        send(server, run, 3)
        receiver.capture(limit=30, timeout=30.0, wakeup=False)
    task = next(
        task for _, task in state.tasks_by_time() if task.state == "SUCCESS"
    )  # the last, seen as a whole
    assert (task.name, task.args) == (celery.ROLLOUT, repr((run,)))
    assert task.result.startswith("{'run': '" + run)
