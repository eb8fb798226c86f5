"""The study behind SAC's defaults: returns on tasks that nobody tuned for, with one set of options for all.

    python benchmarks/defaults.py --jobs 2 --seeds 3              # go on with what --results lacks
    python benchmarks/defaults.py --redraw > docs/defaults.md     # report and plot what is there

A run plays and learns in one process, with ddrl's own collector, replay and learner and without a server, so that play
and updates keep their ratio exactly; weights go to play every 250 updates. Each run makes the number of updates of its
task; ten times meanwhile it is evaluated, on episodes of fixed seeds. An option that a variant does not name has the
value of BASE. Needs the extras box2d and mujoco. Progress goes to stderr, the Markdown report to stdout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, facts

TASKS = {  # updates of a run
    "Pendulum-v1": 5_000,
    "MountainCarContinuous-v0": 10_000,
    "LunarLanderContinuous-v3": 20_000,
    "Hopper-v5": 30_000,
    "HalfCheetah-v5": 30_000,
    "BipedalWalker-v3": 30_000,
}
BASE: dict[str, Any] = {
    "algorithm.hidden_sizes": [128, 128],
    "algorithm.learning_rate": 1e-3,
    "algorithm.batch_size": 256,
    "algorithm.layer_norm": False,
    "algorithm.n_step": 1,
    "algorithm.initial_temperature": 1.0,
    "algorithm.target_rate": 0.005,
    "replay.samples_per_insert": 32,
    "replay.warmup_steps": 1_000,
    "env.reward_scale": 1.0,
    "drifting": 0.0,  # share of the environments whose random actions drift
    "entropy": -1.0,  # target_entropy, in nats for each dimension of actions
}
LAYER_NORM = {"algorithm.layer_norm": True}
STEPS = {"algorithm.n_step": 3}
DRIFT = {"drifting": 1.0, "replay.warmup_steps": 10_000}
MIXED = {"drifting": 0.5, "replay.warmup_steps": 10_000}
QUICK = {"algorithm.target_rate": 0.01, "algorithm.initial_temperature": 0.2}
HOT = {"algorithm.target_rate": 0.01, "algorithm.initial_temperature": 2.0}
ENTROPY = {"entropy": -0.33}
SCALED = {"env.reward_scale": 0.1}
LONG = {"algorithm.n_step": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "former": {},
    "layer norm": LAYER_NORM,
    "3 steps": STEPS,
    "drift": DRIFT,
    "layer norm, 3 steps": LAYER_NORM | STEPS,
    "3 steps, drift": STEPS | DRIFT,
    "layer norm, 3 steps, drift": LAYER_NORM | STEPS | DRIFT,
    "3 steps, mixed": STEPS | MIXED,
    "3 steps, mixed, quick": STEPS | MIXED | QUICK,
    "layer norm, 3 steps, mixed": LAYER_NORM | STEPS | MIXED,
    "layer norm, 3 steps, mixed, quick": LAYER_NORM | STEPS | MIXED | QUICK,
    "layer norm, 3 steps, mixed, quick, entropy": LAYER_NORM | STEPS | MIXED | QUICK | ENTROPY,
    "layer norm, 3 steps, mixed, entropy": LAYER_NORM | STEPS | MIXED | ENTROPY,
    "layer norm, 8 steps, mixed, quick, entropy": LAYER_NORM | LONG | MIXED | QUICK | ENTROPY,
    "3 steps, mixed, entropy": STEPS | MIXED | ENTROPY,
    "layer norm, 3 steps, mixed, quick, scaled": LAYER_NORM | STEPS | MIXED | QUICK | SCALED,  # the defaults
    "layer norm, 3 steps, mixed, hot": LAYER_NORM | STEPS | MIXED | HOT,
    "layer norm, 8 steps, mixed, quick, scaled": LAYER_NORM | LONG | MIXED | QUICK | SCALED,
    "layer norm, 8 steps, mixed, quick": LAYER_NORM | LONG | MIXED | QUICK,
}
LOAD_UPDATES, POINTS, EPISODES, FINAL_EPISODES = 250, 10, 10, 20
FRAGMENT_STEPS = 32  # of each environment
RESULTS = ROOT / "benchmarks" / "results" / "defaults.jsonl"
PLOT = ROOT / "docs" / "defaults.png"

Row = dict[str, Any]
"""variant, task, seed, curve: [updates, steps, mean return] each, seconds, facts."""


def main() -> None:
    """Run what is missing, or report."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options.add_argument("--seeds", type=int, default=3, help="of each variant and task")
    options.add_argument("--variants", nargs="*", default=list(VARIANTS), help="default all")
    options.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, one a run")
    options.add_argument("--plot", type=Path, default=PLOT, help="PNG")
    options.add_argument("--redraw", action="store_true", help="run nothing")
    options.add_argument("--one", nargs=3, metavar=("VARIANT", "TASK", "SEED"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.one:
        variant, task, seed = arguments.one
        print(json.dumps(learn(variant, task, int(seed))))
        return
    if not arguments.redraw:
        run_missing(arguments.results, arguments.variants, arguments.seeds, arguments.jobs)
    rows = read(arguments.results)
    draw(rows, arguments.plot)
    print(report(rows))


def run_missing(results: Path, variants: list[str], seeds: int, jobs: int) -> None:
    """Run each variant, task and seed that has no result, the first seed of all first; append the results."""
    known = {(row["variant"], row["task"], row["seed"]) for row in read(results)}
    wanted = [(v, task, seed) for seed in range(1, seeds + 1) for v in variants for task in TASKS]
    missing = [one for one in wanted if one not in known]

    def run(one: tuple[str, str, int]) -> None:
        command = [sys.executable, __file__, "--one", *map(str, one)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        with results.open("a") as file:
            file.write(done.stdout.splitlines()[-1] + "\n")
        print(f"{one}: {json.loads(done.stdout)['curve'][-1][2]:.1f}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, missing))


def learn(variant: str, task: str, seed: int) -> Row:
    """Learn a task, and return its curve."""
    import torch

    from ddrl import config
    from ddrl.algorithms import base
    from ddrl.networks.device import to_device
    from ddrl.policy import LoadedPolicy
    from ddrl.replay.experience import make_experience
    from ddrl.runs import submit
    from ddrl.runs.evaluation import score
    from ddrl.worker.collector import Collector
    from ddrl.worker.noise import drifting_uniform

    wanted = BASE | VARIANTS[variant]
    drifting, entropy = wanted.pop("drifting"), wanted.pop("entropy")
    tree: dict[str, Any] = {"env": {"id": task}, "algorithm": {"name": "sac"}, "replay": {}, "seed": seed}
    for name, value in wanted.items():
        section, _, option = name.partition(".")
        tree[section][option] = value
    settings = config.validate(tree)
    torch.set_num_threads(1)
    device, spaces = torch.device("cpu"), submit.prepare(settings)
    tree["algorithm"]["target_entropy"] = entropy * spaces.action_shape[0]
    settings = config.validate(tree)
    resolved = base.resolve(settings, spaces)
    learner, policy = resolved.learner(device=device, seed=seed), resolved.policy()
    replay: Any = make_experience(settings, resolved.config, spaces)
    identity: dict[str, Any] = {"run": "study", "producer": 1, "incarnation": 1}
    collector = Collector(config=settings, resolved=resolved, random_until_learned=True, **identity)
    if drifting != 0.5:
        shape = (settings.env.num_envs, *spaces.action_shape)
        generator = np.random.default_rng(seed)
        both = drifting_uniform((2 * shape[0], *shape[1:]), generator)
        white = (generator.random(shape) for _ in itertools.count())
        collector._uniform = (drawn[::2] for drawn in both) if drifting else white
    collector.load(0, learner.weights())
    curve: list[tuple[int, int, float]] = []
    num_steps, num_updates, began = 0, TASKS[task], time.monotonic()
    while learner.num_updates < num_updates:
        pace = {"num_steps": num_steps, "num_updates": learner.num_updates}
        if (batch := replay.draw(**pace, version=0)) is None:
            fragment = collector.collect(max_steps=FRAGMENT_STEPS)
            replay.admit(replay.pack(fragment), b"0-0", version=0)
            num_steps += fragment.num_transitions
            continue
        learner.update(to_device(batch, device))
        if learner.num_updates % LOAD_UPDATES == 0:
            collector.load(learner.num_updates, learner.weights())
        if learner.num_updates % (num_updates // POINTS) == 0:
            policy.load(learner.weights())
            loaded = LoadedPolicy(policy, settings, spaces, "study", learner.num_updates)
            episodes = FINAL_EPISODES if learner.num_updates == num_updates else EPISODES
            seeds = range(settings.evaluation.seed, settings.evaluation.seed + episodes)
            mean = statistics.fmean(score(loaded, seeds).returns)
            curve.append((learner.num_updates, num_steps, round(mean, 2)))
    seconds = round(time.monotonic() - began, 1)
    identity = {"variant": variant, "task": task, "seed": seed}
    return {**identity, "curve": curve, "seconds": seconds, "facts": facts()}


def read(results: Path) -> list[Row]:
    """Return the results."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(rows: list[Row]) -> str:
    """Return the table: the last evaluation's mean return, its median over seeds and the lowest and highest."""
    lines = [
        "# The study behind SAC's defaults\n",
        f"`{Path(sys.argv[0]).name}`, {len(rows)} runs. {rows[-1]['facts']}\n",
        "Median of the seeds, lowest and highest in brackets, of the mean return after the updates of the task; 8 env",
        "steps an update. Below them the options that differ from the former defaults.\n",
        "| variant | " + " | ".join(f"{task}, {num // 1000}k" for task, num in TASKS.items()) + " |",
        "|---|" + "---|" * len(TASKS),
    ]
    for variant in VARIANTS:
        cells = []
        for task in TASKS:
            found = [one["curve"][-1][2] for one in rows if (one["variant"], one["task"]) == (variant, task)]
            cells.append(
                f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}, {len(found)})"
                if found
                else ""
            )
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- {name}: `{json.dumps(options)}`" for name, options in VARIANTS.items()]
    return "\n".join([*lines, "\n![Curves](defaults.png)"])


def draw(rows: list[Row], path: Path) -> None:
    """Draw a panel a task: the mean of the seeds of each variant, and their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    for place, task in enumerate(TASKS, start=1):
        axes = figure.add_subplot(2, 3, place)
        for number, variant in enumerate(VARIANTS):
            curves = [one["curve"] for one in rows if (one["variant"], one["task"]) == (variant, task)]
            if not curves:
                continue
            updates, returns = [point[0] for point in curves[0]], np.array(curves)[:, :, 2]
            axes.plot(updates, returns.mean(axis=0), color=f"C{number}", label=variant)
            axes.fill_between(
                updates, returns.min(axis=0), returns.max(axis=0), color=f"C{number}", alpha=0.1
            )
        axes.set_title(task)
        axes.set_xlabel("updates")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
