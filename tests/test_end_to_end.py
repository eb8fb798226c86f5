"""The whole product on real processes: server, Celery workers, learner, commands; and what survives kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from conftest import wait_until
from redis import Redis
from runs_for_tests import target_tree

from ddrl import keys
from ddrl.store import metrics, runs, stream, weights, workers

SLOW_S = 120.0  # generous: the machine may be busy


class Site:
    """A folder with a config, and the processes that a test starts in it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.processes: list[subprocess.Popen[str]] = []

    def config(self, **sections) -> Path:
        path = self.folder / "target.yaml"
        path.write_text(yaml.safe_dump(target_tree(**sections)))
        return path

    def ddrl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ddrl", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=SLOW_S
        )
        assert not check or done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done

    def start(self, *arguments: str, module: str = "ddrl") -> subprocess.Popen[str]:
        with (self.folder / f"{len(self.processes)}-{arguments[0].strip('-')}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=self.folder, env=self.environment, stdout=log, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a script's `&` ignores it
            )  # fmt: skip
        self.processes.append(process)
        return process

    def worker(self) -> subprocess.Popen[str]:
        return self.start("-A", "ddrl", "worker", "-c", "1", "-l", "info", module="celery")

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("**/*.log")
        )

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def fleet(server, tmp_path: Path) -> Iterator[Site]:
    """A site with an ordinary server, as DDRL_REDIS_URL names one."""
    site = Site(tmp_path, {**os.environ, "DDRL_REDIS_URL": server.url, "PYTHONPATH": str(Path.cwd())})
    yield site
    site.close()


@pytest.fixture
def laptop(home: Path, tmp_path: Path) -> Iterator[Site]:
    """A site with nothing configured: the embedded server."""
    environment = {name: value for name, value in os.environ.items() if name != "DDRL_REDIS_URL"}
    site = Site(tmp_path, {**environment, "PYTHONPATH": str(Path.cwd())})
    yield site
    site.close()


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs, from /proc."""
    children = []
    for task in Path("/proc", str(pid), "task").glob("*/children"):
        for child in task.read_text().split():
            children += [int(child), *descendants(int(child))]
    return children


def pool_children(worker: subprocess.Popen[str]) -> list[int]:
    """The processes of a worker that play: its children but for the resource tracker of spawn."""
    command = lambda pid: Path("/proc", str(pid), "cmdline").read_text()  # noqa: E731
    return [pid for pid in descendants(worker.pid) if "resource_tracker" not in command(pid)]


def until(condition: Callable[[], object], site: Site, timeout_s: float = SLOW_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, site.logs()
        time.sleep(0.05)


def ledger(client: Redis, run: str) -> dict[str, int]:
    """The counts that must agree, from the entries' own cumulative counters."""
    row, state = metrics.last(client, run), runs.state(client, run)
    pointer = json.loads(client.hget(keys.state(run), "checkpoint"))["meta"]
    after = stream.read(client, run, pointer["cursor"].encode(), count=10**6)
    assert row, "the learner told nothing"
    return {
        "admitted": pointer["admitted"],
        "dead": pointer["dead"],
        "after_cursor": len(after),
        "appended": state.appended_fragments,
    }


def test_one_command_does_everything_and_leaves_a_folder_and_no_process(laptop: Site) -> None:
    done = laptop.ddrl("submit", str(laptop.config()), "--json", "--seed", "3")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert len(done.stdout.splitlines()) == 1 and "env_steps" in done.stderr  # progress goes elsewhere
    assert set(summary) == {
        *("run", "status", "wall_s", "train_s", "env_steps", "updates", "policy_version", "evaluation", "artifacts"),
    }  # fmt: skip
    assert summary["status"] == "solved", laptop.logs()
    assert summary["evaluation"]["return_mean"] >= -0.5 and summary["evaluation"]["episodes"] == 100
    assert 0 < summary["train_s"] < summary["wall_s"]
    folder = Path(summary["artifacts"])
    assert folder == laptop.folder / "runs" / summary["run"]
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml",
        "metrics.csv",
        "evaluations.csv",
        "episodes.csv",
        "curve.png",
        "policy.safetensors",
    } <= names
    assert json.loads((folder / "summary.json").read_text())["status"] == "solved"
    # Finished runs stay readable: the server comes back for each command.
    listed = json.loads(laptop.ddrl("runs", "--json").stdout)
    assert [row["run"] for row in listed] == [summary["run"]]
    again = json.loads(laptop.ddrl("evaluate", "last", "--json").stdout)
    assert again["return_mean"] == pytest.approx(summary["evaluation"]["return_mean"])
    # The exported file alone scores the same on the same seeds, also in plain Python without server.
    laptop.ddrl("export", "last", "--output", "policy.safetensors")
    exported = json.loads(laptop.ddrl("evaluate", "policy.safetensors", "--json").stdout)
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
    environment = {**laptop.environment, "DDRL_REDIS_URL": "redis://127.0.0.1:1"}
    plain = subprocess.run(
        [sys.executable, "-c", script],
        cwd=laptop.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(plain.stdout) == pytest.approx(exported["return_mean"])
    assert not leftovers(laptop)


def leftovers(site: Site) -> list[str]:
    """Command lines of processes that still belong to the site's embedded server or its runs."""
    marks = (site.environment["XDG_STATE_HOME"], str(site.folder))
    found: list[str] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environ = (process / "environ").read_bytes().decode(errors="replace")
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if (
                int(process.name) != os.getpid()
                and marks[0] in environ
                and any(word in command for word in ("ddrl", "valkey", "redis", "celery"))
            ):
                found.append(command)
        if not found:
            return []
        time.sleep(0.2)
    return found


def test_ctrl_c_stops_cleanly_says_how_to_go_on_and_resume_goes_on(laptop: Site) -> None:
    config = laptop.config(stop={"return": 10.0, "time": 600})  # out of reach
    process = laptop.start("submit", str(config), "--workers", "1")
    log = laptop.folder / "0-submit.log"
    until(lambda: "updates" in log.read_text(), laptop)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "ddrl resume" in log.read_text() and "Traceback" not in log.read_text()
    assert not leftovers(laptop)
    before = json.loads(laptop.ddrl("status", "last", "--json").stdout)
    assert before["status"] == "stopped" and before["updates"] > 0
    resumed = laptop.ddrl("resume", "last", "--time", "3s", "--json")
    summary = json.loads(resumed.stdout.splitlines()[-1])
    assert summary["status"] == "time" and summary["updates"] > before["updates"]
    assert summary["evaluation"] is not None  # what the limit left behind was evaluated


def test_kill_9_of_the_command_leaves_no_orphan(laptop: Site) -> None:
    process = laptop.start("submit", str(laptop.config(stop={"return": 10.0})))
    log = laptop.folder / "0-submit.log"
    until(lambda: "updates" in log.read_text(), laptop)
    process.kill()
    process.wait()
    assert not leftovers(laptop)


def test_a_fleet_solves_and_survives_kill_9_of_child_worker_and_learner(fleet: Site, server) -> None:
    client = server.client
    first, second = fleet.worker(), fleet.worker()
    learner = fleet.start("learner")
    # Not solvable before all the killing is done: the target is lowered at the end by a second learner's config.
    config = fleet.config(stop={"return": -0.5}, evaluation={"num_episodes": 20, "every_s": 3600, "near": 0})
    submitted = fleet.ddrl("submit", str(config), "-s", "evaluation.near_every_s=3600", "--detach", "--json")
    run = json.loads(submitted.stdout)["run"]

    def progress(num_updates: int) -> bool:
        return runs.state(client, run).updates >= num_updates

    until(lambda: progress(50), fleet)
    assert len(workers.alive(client)) == 2
    nodes = {heartbeat.node for heartbeat in workers.alive(client)}
    assert len(nodes) == 2  # unique names on one host

    os.kill(pool_children(first)[0], signal.SIGKILL)  # a pool child
    now = runs.state(client, run).updates
    until(lambda: progress(now + 50), fleet)

    for pid in (second.pid, *pool_children(second)):  # a whole machine
        os.kill(pid, signal.SIGKILL)
    now = runs.state(client, run).updates
    until(lambda: progress(now + 50), fleet)

    until(lambda: client.hexists(keys.state(run), "checkpoint"), fleet)
    learner.kill()  # restarted below, in another folder: the replay comes from the stream
    learner.wait()
    assert runs.state(client, run).status == "active"
    spec = json.loads(client.get(keys.spec(run)))
    spec["evaluation"] |= {"every_s": 1.0, "near_every_s": 0.2, "near": 5.0}
    client.set(keys.spec(run), json.dumps(spec))
    (fleet.folder / "elsewhere").mkdir()
    fleet.start("learner", "--folder", "elsewhere")
    third = fleet.worker()
    until(lambda: runs.state(client, run).ended, fleet)
    state = runs.state(client, run)
    assert state.status == "solved", fleet.logs()
    until(lambda: (fleet.folder / "elsewhere" / run / "summary.json").exists(), fleet)
    assert third.poll() is None and first.poll() is None

    counts = ledger(client, run)
    assert counts["admitted"] == counts["appended"] - counts["after_cursor"] - counts["dead"], counts
    assert counts["admitted"] > 0 and counts["dead"] == 0
    assert weights.index(client, run).latest > 2


def test_on_policy_a_stopped_process_that_goes_on_is_not_learned_from_and_the_run_is_solved(
    fleet: Site, server
) -> None:
    client = server.client
    fleet.worker()
    stopped = fleet.worker()
    until(lambda: len(workers.alive(client)) == 2, fleet)
    learner = fleet.start("learner")
    config = fleet.config(
        env={"id": "ddrl/Pick-v0"},
        algorithm={"name": "ppo", "batch_size": 512, "num_epochs": 1, "learning_rate": 3e-3},  # busy players
        stop={"return": 9.5},
        evaluation={"every_s": 3600, "near_every_s": 3600},  # not before the second learner
    )
    tree = yaml.safe_load(config.read_text())
    tree["replay"] = {}
    del tree["learner"]["publish_every_s"]
    config.write_text(yaml.safe_dump(tree))
    run = json.loads(fleet.ddrl("submit", str(config), "--detach", "--json").stdout)["run"]
    until(lambda: client.hlen(keys.producers(run)) == 2, fleet)
    children = pool_children(stopped)

    def dropped() -> bool:
        return metrics.last(client, run).get("dropped", 0) >= 1

    for _ in range(20):  # it may be stopped while it waits: then nothing of it is stale
        for child in children:
            os.kill(child, signal.SIGSTOP)
        version = runs.state(client, run).version
        until(
            lambda version=version: runs.state(client, run).version >= version + 10, fleet
        )  # nobody waits for it
        for child in children:
            os.kill(child, signal.SIGCONT)
        now = metrics.last(client, run)["env_steps"]
        until(lambda now=now: metrics.last(client, run)["env_steps"] > now, fleet)
        if dropped():
            break
    assert dropped()
    learner.terminate()
    learner.wait()
    spec = json.loads(client.get(keys.spec(run)))
    spec["evaluation"] |= {"every_s": 1.0, "near_every_s": 0.2, "near": 5.0}
    client.set(keys.spec(run), json.dumps(spec))
    fleet.start("learner")
    until(lambda: runs.state(client, run).ended, fleet)
    assert runs.state(client, run).status == "solved", fleet.logs()
    seen = [row["max_staleness"] for row in metrics.read(client, run)[0] if "max_staleness" in row]
    assert seen and max(seen) <= 1


def test_a_worker_that_joins_in_mid_run_plays_soon(fleet: Site, server) -> None:
    client = server.client
    fleet.worker(), fleet.start("learner")
    config = fleet.config(stop={"return": 10.0}, replay={"samples_per_insert": 0.5, "slack_steps": 100_000})
    run = json.loads(fleet.ddrl("submit", str(config), "--detach", "--json").stdout)["run"]
    until(lambda: client.hlen(keys.producers(run)) == 1, fleet)
    fleet.worker()
    until(lambda: len(workers.alive(client)) == 2, fleet)  # says ready
    until(lambda: client.hlen(keys.producers(run)) == 2, fleet)
    fleet.ddrl("stop", run)
    wait_until(lambda: not runs.state(client, run).leased, 60)
    assert json.loads(fleet.ddrl("status", run, "--json").stdout)["status"] == "stopped"


def test_pause_uses_no_process_and_resume_goes_on(fleet: Site, server) -> None:
    client = server.client
    fleet.worker(), fleet.start("learner")
    run = json.loads(
        fleet.ddrl("submit", str(fleet.config(stop={"return": 10.0})), "--detach", "--json").stdout
    )["run"]
    until(lambda: runs.state(client, run).updates > 20, fleet)
    fleet.ddrl("pause", run)
    time.sleep(1.5)
    steps = runs.state(client, run).appended_steps
    time.sleep(1.0)
    assert runs.state(client, run).appended_steps == steps
    fleet.ddrl("resume", run, "--detach")
    until(lambda: runs.state(client, run).appended_steps > steps, fleet)
    fleet.ddrl("stop", run)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.gama=1"], "algorithm.gama: unknown option; did you mean gamma?"),
        (["env.id=LunarLadner-v3"], "LunarLander"),
        (["env.id=CartPole-v1"], "action_kind is 'discrete'"),
        (["env.id=Ant-v5"], "pip install 'ddrl[mujoco]'"),
        (["env.id=ALE/Asterx-v5"], "did you mean ALE/Asterix-v5"),
        (["env.id=ALE/Pong-v5"], "sac needs continuous actions"),
        (["algorithm.name=sacc"], "algorithm.name: 'sacc' is unknown; known are dqn, impala, ppo, r2d2, sac"),
        (["on_policy.max_staleness=2"], "on_policy.max_staleness: 2 has no effect on algorithm sac"),
        (["replay.warmup_steps=30000"], "replay.warmup_steps: 30000 is more than replay.capacity 20000"),
        (["replay.slack_steps=1", "replay.samples_per_insert=1"], "replay.slack_steps"),
        (["nonsense"], "-s nonsense: expected NAME.NAME=VALUE"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    fleet: Site, server, overrides: list[str], message: str
) -> None:
    options = [part for override in overrides for part in ("-s", override)]
    done = fleet.ddrl("submit", str(fleet.config()), *options, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("ddrl: error: ") and len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr
    assert server.client.dbsize() == 0 and not (fleet.folder / "runs").exists()


def test_a_restart_of_the_server_ends_neither_run_nor_learner_nor_worker_nor_command(
    make_server, tmp_path: Path
) -> None:
    server = make_server("--appendonly", "yes", "--appendfsync", "always")
    site = Site(tmp_path, {**os.environ, "DDRL_REDIS_URL": server.url, "PYTHONPATH": str(Path.cwd())})
    try:
        worker, learner = site.worker(), site.start("learner")
        config = site.config(
            stop={"return": -0.5}, evaluation={"every_s": 3600, "near_every_s": 3600, "near": 0}
        )
        command = site.start("submit", str(config))
        until(lambda: runs.names(server.client), site)
        run = runs.names(server.client)[-1]
        until(lambda: runs.state(server.client, run).updates > 20, site)
        server.kill()
        time.sleep(5.0)  # longer than any client retries by itself
        server.start()
        before = runs.state(server.client, run)
        assert before.status == "active"
        until(lambda: runs.state(server.client, run).appended_steps > before.appended_steps, site)
        until(lambda: runs.state(server.client, run).updates > before.updates, site)
        assert [process.poll() for process in (worker, learner, command)] == [None] * 3, site.logs()
        site.ddrl("stop", run)
        assert command.wait(60) == 0
        assert runs.state(server.client, run).status == "stopped"
    finally:
        site.close()
