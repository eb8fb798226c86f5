"""CartPole by each advantage estimator: one YAML line apart, within three times gae's environment steps.

    python benchmarks/estimators.py --seeds 3 | tee benchmarks/results/estimators.txt

The settings are those tuned for gae. A run that does not solve counts as infinite, in seconds and in steps.
"""

from __future__ import annotations

import math
import statistics

from machine import heading
from submitted import Outcome, count, evaluated, parser, run

CONFIG_NAME = "cartpole"
ESTIMATOR = "algorithm.estimator={}"  # the line that changes
ESTIMATORS = ("gae", "td_lambda", "vtrace", "upgo", "monte_carlo")
MOST = 3.0  # times the environment steps of the first


def main() -> None:
    """Print a table of the runs and one of the estimators."""
    options = parser(__doc__, seeds=3)
    options.add_argument("--config", default=CONFIG_NAME, metavar="NAME", help=f"default {CONFIG_NAME}")
    arguments = options.parse_args()
    print(heading("Five advantage estimators, to a confirmed mean return"))
    print(f"config configs/{arguments.config}.yaml {' '.join(arguments.overrides)}\n")
    print("| estimator | seed | status | train_s | env steps | updates | return +- std (episodes) |")
    print("|---|---|---|---|---|---|---|", flush=True)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in ESTIMATORS}
    for seed in range(1, arguments.seeds + 1):  # in turn, so that a busy hour of the machine strikes all
        for name in ESTIMATORS:
            outcome = run(arguments.config, seed, [*arguments.overrides, ESTIMATOR.format(name)])
            outcomes[name].append(outcome)
            row = outcome.summary
            print(
                f"| {name} | {seed} | {row['status']} | {row['train_s']:.1f} | {row['env_steps']} "
                f"| {row['updates']} | {evaluated(outcome)} |",
                flush=True,
            )
    print(
        f"\n| estimator | solved | median train_s | median env steps | times {ESTIMATORS[0]}'s "
        f"| at most {MOST:g} |"
    )
    print("|---|---|---|---|---|---|")
    steps = {name: statistics.median(one.env_steps for one in outcomes[name]) for name in ESTIMATORS}
    for name in ESTIMATORS:
        seconds = statistics.median(one.train_s for one in outcomes[name])
        ratio = steps[name] / steps[ESTIMATORS[0]] if math.isfinite(steps[ESTIMATORS[0]]) else math.nan
        solved = sum(one.solved for one in outcomes[name])
        within = solved == arguments.seeds and ratio <= MOST
        print(
            f"| {name} | {solved} of {arguments.seeds} | {seconds:.1f} | {count(steps[name])} "
            f"| {ratio:.2f} | {'yes' if within else 'no'} |"
        )


if __name__ == "__main__":
    main()
