"""Cost of feeding the learner through Redis: updates/s of `ddrl learner` against the same loop in memory.

    python benchmarks/learner.py

`configs/lunar.yaml`, without the target: learner on one core; server, rollout and evaluation worker on the other.
The fed learner admits, publishes, dispatches and checkpoints as usual. The other loop draws from a replay
that was filled once. Both run in turns; the table shows medians and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from machine import CONFIG, child, cores, figure, fresh_home, heading

IN_MEMORY = """
import sys, time
import numpy as np, torch
from ddrl import config
from ddrl.algorithms import base
from ddrl.networks.device import to_device
from ddrl.replay.experience import make_experience
from ddrl.replay.prioritized import uniform
from ddrl.runs import submit
from ddrl.worker.collector import Collector
settings = config.load(sys.argv[1])
torch.set_num_threads(settings.learner.num_threads)
spaces = submit.prepare(settings)
resolved = base.resolve(settings, spaces)
algorithm = resolved.learner(device=torch.device("cpu"), seed=1)
replay = make_experience(settings, resolved.config, spaces)
collector = Collector(run="r", producer=1, incarnation=1, config=settings, resolved=resolved,
                      random_until_learned=True)
collector.load(0, {name: value.numpy() for name, value in algorithm.weights().items()})
while len(replay) < int(sys.argv[3]):
    replay.admit(replay.pack(collector.collect()), b"0-0", version=0)
size, device, updates = resolved.config.batch_size, torch.device("cpu"), 0
for warm in (1.0, float(sys.argv[2])):
    first, started = updates, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < warm:
        algorithm.update(to_device(replay.plan(uniform(len(replay), size, seed=1, draw=updates))(), device))
        updates += 1
print((updates - first) / elapsed)
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    arguments = parser.parse_args()
    print(heading("Learner fed through Redis against the same loop in memory"))
    fed, waits, memory = [], [], []
    core, other = cores()
    for _ in range(arguments.rounds):
        with fresh_home() as environment:
            rate, wait, size = fed_rate(environment, core, other, arguments.seconds)
        fed.append(rate)
        waits.append(wait)
        loop = figure(IN_MEMORY, CONFIG, arguments.seconds, size, environment=environment, core=core)
        memory.append(loop)
    ratios = [one / two for one, two in zip(fed, memory, strict=True)]
    print("| what | updates/s (median) | range |\n|---|---|---|")
    for name, figures in (("fed through Redis", fed), ("in memory", memory)):
        print(f"| {name} | {statistics.median(figures):,.0f} | {min(figures):,.0f} to {max(figures):,.0f} |")
    print(
        f"\nshare kept: {100 * statistics.median(ratios):.0f} % (median of {len(ratios)} ratios, "
        f"{100 * min(ratios):.0f} to {100 * max(ratios):.0f} %; floor 85, goal 95); "
        f"the fed learner waited for play {100 * statistics.median(waits):.1f} % of the time"
    )


def fed_rate(environment: dict[str, str], core: int, other: int, seconds: float) -> tuple[float, float, int]:
    """Return updates/s of a real learner with real workers, its share of waiting, and the size of its replay."""
    os.environ.update({name: environment[name] for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR")})
    os.environ.pop("DDRL_REDIS_URL", None)
    os.sched_setaffinity(0, {other})  # the embedded server, too, is started from here
    from ddrl import config
    from ddrl.runs import submit
    from ddrl.store import connection, metrics, runs
    from ddrl.store import server as embedded

    settings = config.load(CONFIG, ["stop.return=1000000", "evaluation.near=0"])
    with embedded.use() as url:
        client = connection.connect(url)
        run = submit.create(client, settings, submit.prepare(settings))
        workers = ["-m", "ddrl", "worker", "--concurrency", "1", "--role"]
        with (
            child([*workers, "rollout"], environment, other),
            child([*workers, "evaluate"], environment, other),
            child(["-m", "ddrl", "learner", run], environment, core),
        ):
            while runs.state(client, run).updates < 500:
                time.sleep(0.1)
            time.sleep(2.0)
            _, cursor = metrics.read(client, run)
            time.sleep(seconds)
            rows, _ = metrics.read(client, run, cursor)
            runs.set_status(client, run, "stopped", "measured")
        client.close()
    elapsed = rows[-1]["time_s"] - rows[0]["time_s"]
    rate = (rows[-1]["updates"] - rows[0]["updates"]) / elapsed
    return rate, statistics.mean(row["learner_wait"] for row in rows[1:]), int(rows[0]["replay_size"])


if __name__ == "__main__":
    main()
