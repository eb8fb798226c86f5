"""Each option of DQN by itself on CartPole and on pixels, and R2D2 on a task that needs memory: runs within a budget.

    python benchmarks/value_learning.py --seeds 1 | tee benchmarks/results/value_learning.txt

A run is `ddrl submit` of the config with one line changed; it fails if it is not solved within a budget of environment
steps. For Recall, DQN gets R2D2's budget and is meant to fail: no policy without memory can do better than
chance there (a return of 0.5).
"""

from __future__ import annotations

import statistics

from machine import heading
from submitted import Outcome, count, evaluated, parser, run

VARIANTS = {
    "dqn": [],
    "double": ["algorithm.double=true"],
    "dueling": ["algorithm.dueling=true"],
    "prioritized": ["algorithm.prioritized=true"],
    "n_step 3": ["algorithm.n_step=3"],
}
# Recall by DQN: the same environment and pace, without the options of R2D2.
WITHOUT_MEMORY = ["algorithm={name: dqn, hidden_sizes: [32, 32], learning_rate: 1.0e-3}", "evaluation.near=0"]
TASKS = {  # config -> (budget of env steps, variants)
    "cartpole-dqn": (300_000, VARIANTS),
    "catch": (50_000, VARIANTS),
    "recall": (60_000, {"r2d2": [], "dqn, meant to fail": WITHOUT_MEMORY}),
}


def main() -> None:
    """Print a line a run, then one a variant."""
    options = parser(__doc__, seeds=1)
    options.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    arguments = options.parse_args()
    print(heading("Value learning, to a confirmed mean return within a budget of env steps") + "\n")
    print(
        "| task | variant | seed | status | env steps | budget | train_s | updates | return +- std (episodes) |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    for seed in range(1, arguments.seeds + 1):
        for task in arguments.tasks:
            budget, variants = TASKS[task]
            for variant, overrides in variants.items():
                outcome = run(task, seed, [*arguments.overrides, *overrides, f"stop.env_steps={budget}"])
                outcomes.setdefault((task, variant), []).append(outcome)
                row = outcome.summary
                print(
                    f"| {task} | {variant} | {seed} | {row['status']} | {row['env_steps']} | {budget} "
                    f"| {row['train_s']:.1f} | {row['updates']} | {evaluated(outcome)} |",
                    flush=True,
                )
    print("\n| task | variant | solved | median env steps | median train_s |\n|---|---|---|---|---|")
    for (task, variant), found in outcomes.items():
        solved = sum(one.solved for one in found)
        seconds = statistics.median(one.train_s for one in found)
        print(
            f"| {task} | {variant} | {solved} of {len(found)} | {count(statistics.median(o.env_steps for o in found))} "
            f"| {seconds:.1f} |"
        )


if __name__ == "__main__":
    main()
