"""Seconds to the target on five tasks by PPO: one run a task and seed, each with an empty server.

    python benchmarks/on_policy.py --seeds 5 | tee benchmarks/results/on_policy.txt
    python benchmarks/on_policy.py --only cartpole acrobot

Every run is the whole product, and its times are the command's own: `train_s` from the first environment step
to the target's confirmation by 100 episodes on other seeds than the 20 that reached it. A run that does not
solve counts as infinite, in seconds and in steps. Prints a Markdown table of the runs and one of the tasks.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from machine import heading
from submitted import Outcome, count, evaluated, parser, run


@dataclass(frozen=True)
class Task:
    """A task and its target; `figure`: the time of other projects, on their machines."""

    config: str
    env: str
    target: float
    floor_s: float
    goal_s: float
    figure: str


TASKS = (
    Task("lunar-ppo", "LunarLanderContinuous-v3", 200, 45, 20, "360 s with a GPU"),
    Task("lunar-discrete", "LunarLander-v3", 200, 120, 45, "about 1745 s"),
    Task("cartpole", "CartPole-v1", 475, 45, 15, "about 240 s"),
    Task("acrobot", "Acrobot-v1", -82, 60, 25, "about 162 s"),
    Task("mountaincar", "MountainCar-v0", -125, 150, 60, "about 336 s"),
)


def main() -> None:
    """Print both tables."""
    options = parser(__doc__, seeds=5)
    options.add_argument(
        "--only", nargs="+", choices=[task.config for task in TASKS], metavar="NAME", help="these tasks"
    )
    arguments = options.parse_args()
    tasks = [task for task in TASKS if arguments.only is None or task.config in arguments.only]
    print(heading("Five tasks by PPO, to a confirmed mean return"))
    print(f"configs {', '.join(task.config for task in tasks)} {' '.join(arguments.overrides)}\n")
    print(
        "| task | seed | status | train_s | wall_s | env steps | updates | return +- std (episodes) "
        "| best evaluation of 20 |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    outcomes: dict[str, list[Outcome]] = {task.config: [] for task in tasks}
    try:
        for task in tasks:
            for seed in range(1, arguments.seeds + 1):
                outcomes[task.config].append(measure(task, seed, arguments.overrides))
    finally:  # a table of finished runs, even if a run failed
        print(
            "\n| task | target | floor s | goal s | median train_s | spread | solved | median env steps "
            "| the seed projects |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for task in tasks:
            if outcomes[task.config]:
                print(total(task, outcomes[task.config]))


def measure(task: Task, seed: int, overrides: list[str]) -> Outcome:
    """Run one seed and print its row."""
    outcome = run(task.config, seed, overrides)
    asked, played = (task.env, task.target), (outcome.status["env"], outcome.status["target_return"])
    if asked != played and not any(text.startswith(("env.", "stop.")) for text in overrides):
        raise SystemExit(f"configs/{task.config}.yaml: plays {played}, the table expects {asked}")
    row = outcome.summary
    best = max((found["return_mean"] for found in outcome.watched), default=None)
    print(
        f"| {task.config} | {seed} | {row['status']} | {row['train_s']:.1f} | {row['wall_s']:.1f} "
        f"| {row['env_steps']} | {row['updates']} | {evaluated(outcome)} "
        f"| {'none' if best is None else f'{best:.1f}'} |",
        flush=True,
    )
    return outcome


def total(task: Task, outcomes: list[Outcome]) -> str:
    """Return the row of a task."""
    times = [outcome.train_s for outcome in outcomes]
    steps = statistics.median(outcome.env_steps for outcome in outcomes)
    return (
        f"| {task.env} | {task.target:g} | {task.floor_s:g} | {task.goal_s:g} "
        f"| {statistics.median(times):.1f} | {min(times):.1f} to {max(times):.1f} "
        f"| {sum(outcome.solved for outcome in outcomes)} of {len(outcomes)} | {count(steps)} | {task.figure} |"
    )


if __name__ == "__main__":
    main()
