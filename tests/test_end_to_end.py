"""The whole product on real processes: server, Celery workers, learner, commands; and what survives kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis
from support.fault_fleet import PPO
from support.processes import Processes, command_of

from ddrl.store import keys, ledger, metrics, runs, weights, workers


def test_one_command_leaves_a_folder_and_no_process(home: Path, processes: Processes) -> None:
    done = processes.ddrl(None, "submit", str(processes.config()), "--json", "--seed", "3")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert len(done.stdout.splitlines()) == 1 and "env_steps" in done.stderr  # progress goes elsewhere
    assert summary["status"] == "solved", processes.logs()
    assert summary["evaluation"]["return_mean"] >= -0.5 and summary["evaluation"]["episodes"] == 100
    assert 0 < summary["train_s"] < summary["wall_s"]
    folder = Path(summary["artifacts"])
    assert folder == processes.folder / "runs" / summary["run"]
    assert json.loads((folder / "summary.json").read_text())["status"] == "solved"
    for role in ("rollout", "evaluation"):  # no banner
        first, *others = (folder / f"{role}.log").read_text().splitlines()
        assert "calling self.run()" in first
        assert sum(" ready" in line for line in others) == 1 and "[queues]" not in "".join(others)
    # Finished runs stay readable: the server comes back for each command.
    listed = json.loads(processes.ddrl(None, "runs", "--json").stdout)
    assert [row["run"] for row in listed] == [summary["run"]]
    again = json.loads(processes.ddrl(None, "evaluate", "last", "--json").stdout)
    assert again["return_mean"] == pytest.approx(summary["evaluation"]["return_mean"])
    # The exported file alone scores the same on the same seeds, also in plain Python without server.
    processes.ddrl(None, "export", "last", "--output", "policy.safetensors")
    exported = json.loads(processes.ddrl(None, "evaluate", "policy.safetensors", "--json").stdout)
    assert exported["return_mean"] == again["return_mean"]
    script = """
import gymnasium, ddrl.envs.toy
from ddrl.policy import load
ddrl.envs.toy.register_toys()
player = load("policy.safetensors")
env, total = gymnasium.make(player.env.id, max_episode_steps=None), 0.0
for seed in range(1_000_020, 1_000_120):
    observation, ended = env.reset(seed=seed)[0], False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(player.action(observation))
        total, ended = total + reward, terminated or truncated
print(total / 100)
"""
    environment = {**processes.environment(None), "DDRL_REDIS_URL": "redis://127.0.0.1:1"}
    command, folder = [sys.executable, "-c", script], processes.folder
    plain = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert float(plain.stdout) == pytest.approx(exported["return_mean"])
    assert not leftovers(home)


def leftovers(home: Path) -> list[str]:
    """Return the processes that still belong to the home's embedded server or its runs after 30 s."""

    def belongs(process: Path) -> bool:
        with contextlib.suppress(OSError):
            return str(home).encode() in (process / "environ").read_bytes()
        return False

    deadline = time.monotonic() + 30
    while True:
        pids = [int(process.name) for process in Path("/proc").glob("[0-9]*") if belongs(process)]
        texts = [command_of(pid) for pid in pids if pid != os.getpid()]
        found = [t for t in texts if any(word in t for word in ("ddrl", "valkey", "redis", "celery"))]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def test_kill_9_of_the_command_leaves_no_orphan(home: Path, processes: Processes) -> None:
    config = str(processes.config(stop={"return": 10.0}))
    process = processes.start("submit", None, "-m", "ddrl", "submit", config)
    processes.until(lambda: "updates" in process.text())
    process.kill()
    assert not leftovers(home)


OUT_OF_REACH = {"return": 100.0}  # until the run's next learner comes


def solve(client: Redis, run: str, target: float, processes: Processes, url: str, *options: str) -> None:
    """Wait until the run's next learner has solved it, with a target in reach."""
    spec = json.loads(client.get(keys.spec(run)))
    spec["stop"]["return"] = target
    client.set(keys.spec(run), json.dumps(spec))
    processes.learner(url, *options)
    processes.until(lambda: runs.state(client, run).ended)
    assert runs.state(client, run).status == "solved", processes.logs()


def test_a_run_is_solved_by_another_learner_after_kill_9_of_the_first(server, processes: Processes) -> None:
    """The kills of processes, workers and servers: tests/faults."""
    client, learner = server.client, processes.learner(server.url)
    worker = processes.celery(server.url)
    run = processes.detach(server.url, stop=OUT_OF_REACH)
    processes.until(lambda: client.hexists(keys.state(run), "checkpoint"))
    learner.kill()  # restarted below, in another folder: the replay comes from the stream
    assert runs.state(client, run).status == "active"
    folder = processes.folder / "elsewhere"
    folder.mkdir()
    solve(client, run, -0.5, processes, server.url, "--folder", str(folder))
    assert worker.running
    processes.until(lambda: (folder / run / "summary.json").exists())
    counts = ledger.audit(client, run)
    assert counts.is_balanced and counts.total("consumed") > 0, counts
    assert counts.total("refused") == counts.total("trimmed") == 0, counts
    assert weights.index(client, run).latest > 2


@pytest.mark.long
def test_on_policy_drops_what_a_suspended_process_played_and_is_solved(server, processes: Processes) -> None:
    client = server.client
    processes.celery(server.url)
    stopped = processes.celery(server.url)
    processes.until(lambda: len(workers.alive(client)) == 2)
    learner = processes.learner(server.url)
    run = processes.detach(
        server.url,
        env={"id": "ddrl/Pick-v0"},
        algorithm=PPO | {"batch_size": 512, "num_epochs": 1},  # busy players
        stop=OUT_OF_REACH,
    )
    processes.until(lambda: client.hlen(keys.producers(run)) == 2)
    children = stopped.pool()

    def dropped() -> bool:
        return metrics.last(client, run).get("dropped", 0) >= 1

    for _ in range(20):  # it may be stopped while it waits: then nothing of it is stale
        for child in children:
            os.kill(child, signal.SIGSTOP)
        version = runs.state(client, run).version
        # Nobody waits for it.
        processes.until(lambda version=version: runs.state(client, run).version >= version + 10)
        for child in children:
            os.kill(child, signal.SIGCONT)
        now = metrics.last(client, run)["env_steps"]
        processes.until(lambda now=now: metrics.last(client, run)["env_steps"] > now)
        if dropped():
            break
    assert dropped()
    learner.send_signal(signal.SIGTERM)
    learner.wait()
    solve(client, run, 9.5, processes, server.url)
    seen = [row["max_staleness"] for row in metrics.read(client, run)[0] if "max_staleness" in row]
    assert seen and max(seen) <= 1
