"""Several runs share the processes of a real Celery worker; each has a real dispatcher."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from support.private_server import PrivateServer
from support.processes import Processes, bound
from support.worker_runs import dispatching, playable

from ddrl.store import runs, segments

PROCESSES = 2
pytestmark = pytest.mark.faults


def begin(client: Redis, *, segment_s: float = 0.25, **options: Any) -> str:
    """Begin a run whose processes sleep, and hardly use the machine."""
    return playable(
        client,
        env={"id": "ddrl/Sleep-v0", "kwargs": {"step_s": 0.01}, "num_envs": 1},
        algorithm={"name": "dqn", "hidden_sizes": [8]},
        rollout={"segment_s": segment_s, "random_until_learned": True},
        **options,
    )


@pytest.fixture(scope="module")
def processes(module_server, tmp_path_factory) -> Iterator[Processes]:
    """A worker of two processes, both warm, and dispatchers."""
    client, folder = module_server.client, tmp_path_factory.mktemp("sharing")
    client.flushall()
    with Processes(folder) as processes, dispatching(module_server):
        warm_up = begin(client)
        processes.worker(module_server.url, "-c", str(PROCESSES))
        processes.until(lambda: len(segments.playing(client, warm_up)) == PROCESSES)
        yield processes


@pytest.fixture
def client(module_server: PrivateServer, processes: Processes) -> Redis:
    """A server whose processes are free: runs of earlier tests are stopped."""
    client = module_server.client
    for run in runs.active_names(client):
        runs.set_status(client, run, "stopped", "")
        processes.until(lambda run=run: not segments.playing(client, run))
    return client


def process_s(client: Redis, *names: str) -> list[float]:
    return [runs.state(client, run).process_s for run in names]


def settle(client: Redis, processes: Processes, weights: dict[str, float], *, least_s: float) -> None:
    """Wait until runs have shared a time of at least `least_s` within 10 % by weight."""
    before, began = process_s(client, *weights), time.monotonic()

    def shared() -> list[float]:
        """Shares so far, in what is deserved."""
        got = [after - then for then, after in zip(before, process_s(client, *weights), strict=True)]
        unit = sum(got) / sum(weights.values())
        return [one / unit / weight for one, weight in zip(got, weights.values(), strict=True)]

    time.sleep(least_s)
    processes.until(lambda: max(abs(share - 1) for share in shared()) <= 0.1)
    print(f"shared after {time.monotonic() - began:.1f} s: {shared()} of what is deserved")


def test_three_runs_share_two_processes_by_weight_until_one_pauses_or_changes(
    client: Redis, processes: Processes
) -> None:
    light, middle, heavy = (begin(client, weight=weight) for weight in (1.0, 2.0, 4.0))
    processes.until(lambda: min(process_s(client, light, middle, heavy)) > 0)
    settle(client, processes, {light: 1, middle: 2, heavy: 4}, least_s=10.0)
    runs.set_status(client, heavy, "paused", "")
    processes.until(lambda: not segments.playing(client, heavy))
    before = process_s(client, heavy)
    settle(client, processes, {light: 1, middle: 2}, least_s=4.0)
    assert process_s(client, heavy) == pytest.approx(before, abs=0.1), (
        "what waited was taken, and ended at once"
    )
    state, now = runs.state(client, light), runs.config(client, light)
    changed = now.model_copy(update={"weight": 6.0})
    runs.change(client, light, changed, {"weight": (1.0, 6.0)}, version=state.config_version)
    settle(client, processes, {light: 6, middle: 2}, least_s=4.0)


def test_a_run_of_high_priority_gets_a_process_at_once_and_then_all(
    client: Redis, processes: Processes
) -> None:
    others = [begin(client, priority=priority, segment_s=60.0) for priority in ("low", "normal")]
    processes.until(lambda: len(segments.playing(client, others[1])) == PROCESSES)  # normal before low
    high = begin(client, priority="high")
    took_s = processes.until(lambda: segments.playing(client, high), bound(2.0))
    print(f"first process after {took_s:.2f} s")
    processes.until(lambda: len(segments.playing(client, high)) == PROCESSES)
    before = sum(process_s(client, *others))
    time.sleep(2.0)
    assert sum(process_s(client, *others)) - before < 0.5  # between two segments at most


def test_processes_that_wait_for_an_allowance_serve_other_runs(client: Redis, processes: Processes) -> None:
    satisfied = begin(client, weight=10.0, allowance=200)
    processes.until(lambda: runs.state(client, satisfied).appended_steps >= 200)
    hungry = begin(client)
    processes.until(lambda: len(segments.playing(client, hungry)) == PROCESSES)
    # Twice: what it sent while it was alone is taken; a process that has just taken one begins within a second.
    for _ in range(2):
        processes.until(lambda: not segments.playing(client, satisfied))
        time.sleep(1.0)
    before = process_s(client, satisfied, hungry)
    time.sleep(3.0)
    after = process_s(client, satisfied, hungry)
    idle, busy = (now - then for then, now in zip(before, after, strict=True))
    assert idle == 0 and busy > 0.2 * PROCESSES * 3.0
