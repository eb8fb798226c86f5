"""Seconds to a landed lander: `ddrl submit configs/lunar.yaml`, one run a seed, each with an empty server.

    python benchmarks/lunar.py --seeds 5

Every run is the whole product: embedded server, Celery worker, evaluation worker, learner. Times are the
command's own (`train_s` from the first environment step to the confirmation on 100 other seeds). A run that
does not solve counts as infinite. Prints a Markdown table.
"""

from __future__ import annotations

import math
import statistics

from machine import heading
from submitted import parser, run


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__, seeds=5).parse_args()
    print(heading("LunarLanderContinuous-v3 to a confirmed mean return of 200 (SAC)"))
    print(f"config configs/lunar.yaml {' '.join(arguments.overrides)}\n")
    print("| seed | status | train_s | wall_s | start-up s | env steps | updates | return, 100 episodes |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    times, starts = [], []
    for seed in range(1, arguments.seeds + 1):
        outcome = run("lunar", seed, arguments.overrides)
        row = outcome.summary
        times.append(outcome.train_s)
        starts.append(outcome.start_up_s)
        score = row["evaluation"] or {"return_mean": math.nan, "return_std": math.nan}
        print(
            f"| {seed} | {row['status']} | {row['train_s']:.1f} | {row['wall_s']:.1f} | {outcome.start_up_s:.1f} "
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
