"""Sweep of CartPole: trials side by side against one after the other, on this machine's cores.

    python benchmarks/sweep.py --trials 16

Both sweeps try the same values (random, one seed) until the target is confirmed, as `ddrl sweep` starts them: on two
cores a rollout process, or two for two trials at a time, an evaluation process, and a learner for each trial. Each of
the learning rates learns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from machine import fresh_home, heading

SEARCH = {"algorithm.learning_rate": {"low": 5e-4, "high": 2e-3, "log": True}}


def seconds(parallel: int, trials: int) -> tuple[float, int]:
    """Return how long a sweep takes, and how many of its trials were solved."""
    with fresh_home() as environment:
        study = Path(environment["DDRL_BENCH_FOLDER"], "study.yaml")
        wanted = {"config": "cartpole", "search": SEARCH, "sampler": "random", "prune": False}
        study.write_text(json.dumps(wanted | {"trials": trials, "parallel": parallel}))
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "ddrl", "sweep", str(study), "--json"],
            env=environment, cwd=environment["DDRL_BENCH_FOLDER"], stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        taken = time.monotonic() - began
        return taken, sum(row["status"] == "complete" for row in json.loads(done.stdout)["trials"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="pairs of sweeps, by turns")
    arguments = parser.parse_args()
    print(heading(f"A sweep of {arguments.trials} CartPole trials") + "\n")
    print("| trials at a time | seconds | with a result |\n|---|---|---|")
    taken: dict[int, list[float]] = {1: [], arguments.parallel: []}
    for _ in range(arguments.rounds):
        for parallel, found in taken.items():
            one, num = seconds(parallel, arguments.trials)
            found.append(one)
            print(f"| {parallel} | {one:.0f} | {num} |", flush=True)
    print(f"\n{sum(taken[1]) / sum(taken[arguments.parallel]):.2f} times as fast")


if __name__ == "__main__":
    main()
