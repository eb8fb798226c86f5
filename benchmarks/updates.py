"""Updates a second of each algorithm, in memory: batches are drawn, sent to the device and learned from.

    python benchmarks/updates.py | tee benchmarks/results/updates.txt
    python benchmarks/updates.py --tasks sac --profile
    python benchmarks/updates.py --against FOLDER --tasks sac dqn r2d2 ppo impala    # a checkout of another version

Play goes first: a collector fills the replay from an environment whose observations are noise. Then the loop draws,
sends and learns as a learner's training thread does, without a server. "Update alone" learns from one batch that is on
the device already; its share of the peak is that of its matrix products and convolutions, in operations a second, of a
product of large matrices. On-policy, all batches of a fixed play are learned from again and again. With `--against`
both versions learn from the same batch in turns, in processes of their own, for so many seconds of their thread; the
share is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from machine import ROOT, facts
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT))
os.environ["DDRL_ALLOW_MODULES"] = "noise"

from ddrl.algorithms import base
from ddrl.algorithms.base import Resolved
from ddrl.config import RunConfig, parse
from ddrl.networks.device import choose_device, to_device, to_host
from ddrl.replay.experience import make_experience
from ddrl.runs import submit
from ddrl.worker.collector import Collector

HUGE = 2**40  # steps, so that the rate limiter never waits


def task(algorithm: str, env: dict[str, Any], capacity: int, num_envs: int = 16, **options: Any) -> RunConfig:
    """Return the config of a task."""
    tree = {
        "env": {"id": "noise:Noise", "num_envs": num_envs, **env},
        "algorithm": {"name": algorithm, **options},
        "rollout": {"fragment_s": 5.0, "max_fragment_steps": 128},
        "replay": {}
        if algorithm in ("ppo", "impala", "pqn")
        else {"capacity": capacity, "warmup_steps": 1000},
    }
    return parse(RunConfig, tree)


BOX = {"kwargs": {"shape": [17]}}
DISCRETE = {"kwargs": {"shape": [8], "num_actions": 4}}
IMAGES = {"kwargs": {"shape": [84, 84], "num_actions": 6}, "frame_stack": 4}
BIG: dict[str, Any] = {"hidden_sizes": [256, 256], "batch_size": 256}
NATURE: dict[str, Any] = {"network": "nature", "hidden_sizes": [512]}
PLAIN = {"normalize_observations": False, "normalize_returns": False}
TASKS: dict[str, Callable[[], RunConfig]] = {  # made when chosen
    "sac": lambda: task("sac", BOX, 100_000, layer_norm=False, **BIG),
    "sac, layer norm": lambda: task("sac", BOX, 100_000, layer_norm=True, **BIG),
    "td3": lambda: task("td3", BOX, 100_000, **BIG),
    "tqc": lambda: task("sac", BOX, 100_000, num_quantiles=25, num_critics=5, layer_norm=False, **BIG),
    "crossq": lambda: task("sac", BOX, 100_000, batch_norm=True, **BIG),
    "discrete_sac": lambda: task("discrete_sac", DISCRETE, 100_000, **BIG),
    "bc": lambda: task("bc", BOX, 100_000, **BIG),
    "iql": lambda: task("iql", BOX, 100_000, **BIG),
    "dqn": lambda: task("dqn", DISCRETE, 100_000, prioritized=True, double=True),
    "r2d2": lambda: task(
        "r2d2", DISCRETE, 20_000, hidden_sizes=[64], recurrent_size=64, sequence_length=20, overlap=10
    ),
    "dqn, nature, 256": lambda: task(
        "dqn", IMAGES, 20_000, batch_size=256, prioritized=True, double=True, dueling=True, **NATURE
    ),
    "r2d2, nature, 64 x (40+80)": lambda: task("r2d2", IMAGES, 20_000, batch_size=64, **NATURE),
    "ppo": lambda: task("ppo", BOX, 0, **PLAIN),
    "ppo, nature, 8 x 128 x 4": lambda: task(
        "ppo", IMAGES, 0, num_envs=8, batch_size=1024, minibatch_size=256, num_epochs=4, **NATURE, **PLAIN
    ),
    "impala": lambda: task("impala", DISCRETE, 0),
    "pqn": lambda: task("pqn", DISCRETE, 0),
}


class Loop:
    """A learner, and what its training thread does between two updates.

    Args:
        config: of a task.
        device: the learner's.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        spec = submit.prepare(config)
        resolved = base.resolve(config, spec)
        self.device = device
        self.algorithm = resolved.learner(device=device, seed=1)
        self._batches = (batches_of_iterations if resolved.on_policy else batches_of_a_replay)(
            config, resolved, self.algorithm, device
        )

    def step(self) -> None:
        """Draw, send, learn."""
        batch, done = next(self._batches)
        metrics = dict(self.algorithm.update(to_device(batch, self.device)))
        done(batch, metrics.pop("priority", None))

    def batch(self) -> Any:
        """Return a batch on the device."""
        return to_device(next(self._batches)[0], self.device)

    def alone(self) -> Callable[[], Any]:
        """Return an update by itself."""
        batch = self.batch()
        return lambda: self.algorithm.update(batch)

    def flops(self) -> float:
        """Return the operations in matrix products and convolutions of an update."""
        alone, first = self.alone(), self.algorithm.num_updates
        with self.eager(), FlopCounterMode(display=False) as found:
            alone()
        gc.collect()  # the counter's hooks keep parts of the autograd graph, which break a capture
        return float(found.get_total_flops()) / (self.algorithm.num_updates - first)

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Capture no CUDA graphs while the context lasts."""
        captured = getattr(self.algorithm, "_captured", SimpleNamespace(_captures=False))
        before, captured._captures = captured._captures, False
        yield
        captured._captures = before

    def rate(self, step: Callable[[], Any], seconds: float) -> float:
        """Return updates a second of calls of a function."""
        self.synchronize()
        first, started = self.algorithm.num_updates, time.perf_counter()
        while time.perf_counter() - started < seconds:
            step()
        self.synchronize()
        return (self.algorithm.num_updates - first) / (time.perf_counter() - started)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def batches_of_a_replay(
    config: RunConfig, resolved: Resolved, algorithm: Any, device: torch.device
) -> Iterator[tuple[Any, Any]]:
    """Yield batches of a full replay, each with a function that takes it and its new priorities."""
    replay: Any = make_experience(config, resolved.config, resolved.spec, device=device)
    collector = make_collector(config, resolved, algorithm)
    for number in itertools.count():
        replay.admit(replay.pack(collector.collect()), b"%d-0" % number, version=0)
        if len(replay) > 0.9 * config.replay.capacity:
            break

    def done(batch: Any, priority: Any) -> None:
        if priority is not None:
            replay.update_priorities(batch, to_host(priority))

    while True:
        yield replay.draw(num_steps=HUGE, num_updates=algorithm.num_updates, version=0), done


def batches_of_iterations(
    config: RunConfig, resolved: Resolved, algorithm: Any, device: torch.device
) -> Iterator[tuple[Any, Any]]:
    """Yield on-policy batches, the same four again and again."""
    queue: Any = make_experience(config, resolved.config, resolved.spec)
    collector, batches = make_collector(config, resolved, algorithm), []
    for number in itertools.count():
        queue.admit(queue.pack(collector.collect()), b"%d-0" % number, version=0)
        if (batch := queue.draw(num_steps=HUGE, num_updates=0, version=0)) is not None:
            batches.append(batch)
            if len(batches) == 4:
                break
    for batch in itertools.cycle(batches):
        yield batch, lambda batch, priority: None


def peak(device: torch.device) -> float:
    """Return the operations a second of a product of large matrices, the best of ten."""
    size = 8192 if device.type == "cuda" else 1024
    matrix, seconds = torch.randn(size, size, device=device), []
    for _ in range(10):
        started = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def make_collector(config: RunConfig, resolved: Resolved, algorithm: Any) -> Collector:
    """Return a collector that plays the learner's first weights."""
    can = resolved.can_start_at_random
    collector = Collector(
        run="r", producer=1, incarnation=1, config=config, resolved=resolved, random_until_learned=can
    )
    collector.load(0, {name: value.numpy() for name, value in algorithm.weights().items()})
    return collector


# Learns from a stored batch in whatever version of ddrl the path begins with; prints updates a second.
ALONE = """
import dataclasses, sys, time
import numpy as np
import torch
from ddrl import config, types
from ddrl.algorithms import base
try:
    from ddrl.runs import submit
except ImportError:  # before July 2026
    from ddrl import submit
path, seconds, threads = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
settings = config.load(path + ".yaml")
learner = base.resolve(settings, submit.prepare(settings)).learner(device=torch.device("cpu"), seed=1)
columns = dict(np.load(path))
kind = getattr(types, str(columns.pop("kind")))
names = {field.name for field in dataclasses.fields(kind)}
if "memory" in names:  # its former name
    columns["memory"] = columns.pop("recurrent_state")
batch = kind(**{name: torch.from_numpy(value) for name, value in columns.items() if name in names})
for spent in (0.5, seconds):
    first, started = learner.num_updates, time.thread_time()
    while (elapsed := time.thread_time() - started) < spent:
        learner.update(batch)
print((learner.num_updates - first) / elapsed)
"""


def compare(
    title: str, config: RunConfig, other: Path, seconds: float, threads: int, rounds: int = 11
) -> str:
    """Return a row of the table: updates a second of this version and of another, and the share kept."""
    spec = submit.prepare(config)
    resolved = base.resolve(config, spec)
    learner = resolved.learner(device=torch.device("cpu"), seed=1)
    make = batches_of_iterations if resolved.on_policy else batches_of_a_replay
    batch = next(make(config, resolved, learner, torch.device("cpu")))[0]
    columns: dict[str, Any] = {
        name: np.array(value) for name, value in vars(batch).items() if value is not None and name != "number"
    }
    figures: dict[Path, list[float]] = {ROOT: [], other: []}
    with tempfile.TemporaryDirectory(prefix="ddrl-bench-") as folder:
        path = Path(folder, "batch.npz")
        np.savez(path, kind=type(batch).__name__, **columns)
        Path(f"{path}.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
        for _ in range(rounds):
            for tree, found in figures.items():
                environment = os.environ | {"PYTHONPATH": f"{tree}:{Path(__file__).parent}"}
                command = [sys.executable, "-c", ALONE, str(path), str(seconds), str(threads)]
                done = subprocess.run(
                    command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
                )
                found.append(float(done.stdout))
    here, there = figures.values()
    share = statistics.median(one / two for one, two in zip(here, there, strict=True))
    return f"| {title} | {statistics.median(here):,.1f} | {statistics.median(there):,.1f} | {100 * share:.0f} % |"


def profile(loop: Loop, num: int = 50) -> None:
    """Print where the time of some updates goes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if loop.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(num):
            loop.step()
        loop.synchronize()
    order = "self_cuda_time_total" if loop.device.type == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=14, max_name_column_width=60))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of three measurements")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, for one update")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="checkout of another version, on the CPU"
    )
    parser.add_argument("--profile", action="store_true", help="print where the time of an update goes, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.against:
        print(
            f"# Updates a second, and there: {arguments.against.name}; {arguments.threads} threads\n{facts()}\n"
        )
        print("| task | here | there | share (median of 11 ratios) |\n|---|---|---|---|", flush=True)
        for title in arguments.tasks:
            print(
                compare(
                    title, TASKS[title](), arguments.against.resolve(), arguments.seconds, arguments.threads
                ),
                flush=True,
            )
        return
    device = choose_device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    most = peak(device)
    print(
        f"# Updates a second on {name}, {arguments.threads} CPU threads\n{facts()}; peak {most / 1e9:,.0f} GFLOP/s\n"
    )
    print(
        "| task | with draw and transfer (median of 3) | range | update alone | MFLOP | of the peak |\n"
        "|---|---|---|---|---|---|",
        flush=True,
    )
    for title in arguments.tasks:
        loop = Loop(TASKS[title](), device)
        flops = loop.flops()
        with loop.eager() if arguments.eager else contextlib.nullcontext():
            loop.rate(loop.step, 1.0)
            figures = [loop.rate(loop.step, arguments.seconds) for _ in range(3)]
            alone = loop.rate(loop.alone(), arguments.seconds)
        print(
            f"| {title} | {statistics.median(figures):,.1f} | {min(figures):,.1f} to {max(figures):,.1f} "
            f"| {alone:,.1f} | {flops / 1e6:,.1f} | {100 * alone * flops / most:.0f} % |",
            flush=True,
        )
        if arguments.profile:
            profile(loop)


if __name__ == "__main__":
    main()
