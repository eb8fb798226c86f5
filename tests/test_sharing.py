"""Several runs share the processes of a real Celery worker, each with a real dispatcher (tests/dispatching.py)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, SLOW_S, Processes, bound
from redis import Redis
from runs_for_tests import start, target_config

from ddrl import tensors
from ddrl.algorithms import base
from ddrl.store import runs, segments, workers

PROCESSES = 2
pytestmark = pytest.mark.faults


def config(**sections: Any) -> Any:
    """A run whose processes sleep, and hardly use the machine."""
    sections = {"replay": {"capacity": 10**7, "warmup_steps": 10**7}, **sections}
    return target_config(
        env={"id": "ddrl/Sleep-v0", "kwargs": {"step_s": 0.01}, "num_envs": 1},
        algorithm={"name": "dqn", "hidden_sizes": [8]},
        rollout={"segment_s": 0.25, "fragment_s": 0.05, "random_until_learned": True},
        stop={},
        **sections,
    )


@pytest.fixture
def client(server, processes: Processes, tmp_path: Path) -> Redis:
    """Of a server with a worker of two processes and stand-ins for learners."""
    some = start(server.client, config())
    learner = base.resolve(config(), runs.spaces(server.client, some)).learner(
        device=torch.device("cpu"), seed=1
    )
    blob = tensors.encode_weights({name: value.numpy() for name, value in learner.weights().items()})
    (tmp_path / "weights").write_bytes(blob)
    runs.set_status(server.client, some, "stopped", "")
    processes.worker(server.url, concurrency=PROCESSES)
    processes.start("stand-in", server.url, *(["/tmp/w/i5/sim/patch.py"] if __import__("os").environ.get("PATCH") else []), str(ROOT / "tests" / "dispatching.py"), str(tmp_path / "weights"))
    processes.until(lambda: workers.alive(server.client))
    return server.client


def process_s(client: Redis, *names: str) -> list[float]:
    return [runs.state(client, run).process_s for run in names]


def shares_since(before: list[float], client: Redis, *names: str) -> list[float]:
    got = [after - then for then, after in zip(before, process_s(client, *names), strict=True)]
    return [one / sum(got) for one in got]


def settle(
    client: Redis, processes: Processes, wanted: dict[str, float], least_s: float = 8.0, within: float = 0.1
) -> float:
    """Wait until runs have shared a time of at least `least_s` within 10 % as wanted; the largest deviation."""
    processes.until(lambda: all(segments.players(client, run) or True for run in wanted))
    before, began = process_s(client, *wanted), time.monotonic()

    def error() -> float:
        shares = shares_since(before, client, *wanted)
        return max(abs(share / want - 1) for share, want in zip(shares, wanted.values(), strict=True))

    time.sleep(least_s)
    processes.until(lambda: error() <= within, SLOW_S)
    print(f"{time.monotonic() - began:.1f} s", shares_since(before, client, *wanted), wanted)
    return error()


def test_three_runs_share_two_processes_by_weight_until_one_pauses_or_changes(
    client: Redis, processes: Processes
) -> None:
    light, middle, heavy = (start(client, config(weight=weight)) for weight in (1.0, 2.0, 4.0))
    processes.until(lambda: min(process_s(client, light, middle, heavy)) > 0)
    settle(client, processes, {light: 1 / 7, middle: 2 / 7, heavy: 4 / 7}, least_s=12.0)
    runs.set_status(client, heavy, "paused", "")
    processes.until(lambda: not segments.players(client, heavy))
    (before,) = process_s(client, heavy)
    settle(client, processes, {light: 1 / 3, middle: 2 / 3}, least_s=5.0)
    assert process_s(client, heavy) == [before]
    state, now = runs.state(client, light), runs.config(client, light)
    changed = now.model_copy(update={"weight": 6.0})
    runs.change(client, light, changed, {"weight": (1.0, 6.0)}, version=state.config_version)
    settle(client, processes, {light: 3 / 4, middle: 1 / 4}, least_s=5.0)


def test_a_run_of_high_priority_gets_a_process_at_once_and_then_all(
    client: Redis, processes: Processes
) -> None:
    low = [start(client, config(priority=priority)) for priority in ("low", "normal")]
    processes.until(lambda: sum(process_s(client, *low)) > 2)
    began = time.monotonic()
    high = start(client, config(priority="high"))
    processes.until(lambda: segments.players(client, high), bound(2.0))
    print(f"first process after {time.monotonic() - began:.2f} s")
    processes.until(lambda: len(segments.players(client, high)) == PROCESSES)
    before = process_s(client, *low)
    time.sleep(2.0)
    assert sum(process_s(client, *low)) - sum(before) < 0.5
