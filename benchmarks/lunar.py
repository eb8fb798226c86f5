"""Seconds to a landed lander: `ddrl submit configs/lunar.yaml`, one run a seed, each with an empty server.

    python benchmarks/lunar.py --seeds 5

Every run is the whole product: embedded server, Celery worker, evaluation worker, learner. Times are the
command's own (`train_s` from the first environment step to the confirmation on 100 other seeds). A run that
does not solve counts as infinite. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time

from machine import CONFIG, fresh_home, heading


def run(seed: int, overrides: list[str]) -> dict[str, float | str]:
    """One seed: the last line of the command and what `ddrl status` says of its start."""
    with fresh_home() as environment:
        command = [sys.executable, "-m", "ddrl"]
        started = time.time()
        options = [option for override in overrides for option in ("-s", override)]
        submitted = subprocess.run(
            [*command, "submit", str(CONFIG), "--seed", str(seed), "--json", *options],
            env=environment, cwd=environment["DDRL_BENCH_FOLDER"], capture_output=True, text=True,
        )  # fmt: skip
        if submitted.returncode:
            raise SystemExit(
                f"seed {seed}: exit code {submitted.returncode}: {submitted.stderr.strip()[-500:]}"
            )
        summary = json.loads(submitted.stdout.splitlines()[-1])
        status = subprocess.run(
            [*command, "status", "last", "--json"],
            env=environment, cwd=environment["DDRL_BENCH_FOLDER"], capture_output=True, text=True, check=True,
        )  # fmt: skip
        summary["start_up_s"] = json.loads(status.stdout)["first_step_s"] - started
    return summary


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to N")
    parser.add_argument("-s", dest="overrides", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    print(heading("LunarLanderContinuous-v3 to a confirmed mean return of 200 (SAC)"))
    print(f"config configs/lunar.yaml {' '.join(arguments.overrides)}\n")
    print("| seed | status | train_s | wall_s | start-up s | env steps | updates | return, 100 episodes |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    times, starts = [], []
    for seed in range(1, arguments.seeds + 1):
        row = run(seed, arguments.overrides)
        solved = row["status"] == "solved"
        times.append(row["train_s"] if solved else math.inf)
        starts.append(row["start_up_s"])
        score = row["evaluation"] or {"return_mean": math.nan, "return_std": math.nan}
        print(
            f"| {seed} | {row['status']} | {row['train_s']:.1f} | {row['wall_s']:.1f} | {row['start_up_s']:.1f} "
            f"| {row['env_steps']} | {row['updates']} | {score['return_mean']:.1f} +- {score['return_std']:.1f} |",
            flush=True,
        )
    print(
        f"\nmedian train_s {statistics.median(times):.1f} (floor 60, goal 30), "
        f"spread {min(times):.1f} to {max(times):.1f}; "
        f"start-up median {statistics.median(starts):.1f} s (floor 15, goal 8)"
    )


if __name__ == "__main__":
    main()
