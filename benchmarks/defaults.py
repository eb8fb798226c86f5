"""The study behind the defaults of SAC and PPO: returns on tasks that nobody tuned for, one set of options for all.

    python benchmarks/defaults.py ppo --jobs 2 --seeds 3          # go on with what --results lacks
    python benchmarks/defaults.py report > docs/defaults.md       # report and plot what is there

A run plays and learns in one process, with ddrl's own collector, replay and learner and without a server, so that play
and updates keep their ratio; weights go to play every 250 updates of SAC, or after each iteration of PPO. Each
run is as long as its task says; ten times meanwhile it is evaluated, on episodes of fixed seeds. An option that a
variant does not name has the value of the study's base. Needs the extras box2d and mujoco. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, facts

Options = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The study of one algorithm.

    Attributes:
        tasks: by their names how long a run is, in updates of SAC or env steps of PPO.
        base: the defaults before, by their names in a config.
        variants: what differs from them, by name.
        fragment_steps: of each environment.
    """

    tasks: dict[str, int]
    fragment_steps: int
    base: Options
    variants: dict[str, Options]


_BASE: Options = {
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
_VARIANTS: dict[str, Options] = {
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
SAC = Study(
    fragment_steps=32,
    tasks={
        "Pendulum-v1": 5_000,
        "MountainCarContinuous-v0": 10_000,
        "LunarLanderContinuous-v3": 20_000,
        "Hopper-v5": 30_000,
        "HalfCheetah-v5": 30_000,
        "BipedalWalker-v3": 30_000,
    },
    base=_BASE,
    variants=_VARIANTS,
)
RETURNS = {"algorithm.normalize_returns": True}
OBSERVATIONS = {"algorithm.normalize_observations": True}
PPO = Study(
    fragment_steps=64,
    tasks={
        "CartPole-v1": 200_000,
        "Acrobot-v1": 200_000,
        "MountainCar-v0": 500_000,
        "LunarLander-v3": 400_000,
        "LunarLanderContinuous-v3": 400_000,
        "Taxi-v4": 300_000,
        "Hopper-v5": 400_000,
        "Walker2d-v5": 400_000,
        "HalfCheetah-v5": 400_000,
        "BipedalWalker-v3": 400_000,
    },
    base={
        "algorithm.learning_rate": 3e-4,
        "algorithm.normalize_observations": False,
        "algorithm.normalize_returns": False,
    },
    variants={
        "former": {},
        "returns": RETURNS,
        "observations": OBSERVATIONS,
        "returns, observations": RETURNS | OBSERVATIONS,
        "returns, observations, 6e-4": RETURNS | OBSERVATIONS | {"algorithm.learning_rate": 6e-4},
        "returns, observations, 1e-3": RETURNS
        | OBSERVATIONS
        | {"algorithm.learning_rate": 1e-3},  # the defaults
    },
)
STUDIES = {"sac": SAC, "ppo": PPO}
LOAD_UPDATES, POINTS, EPISODES, FINAL_EPISODES = 250, 10, 10, 20
RESULTS = ROOT / "benchmarks" / "results" / "defaults.jsonl"
DOCS = ROOT / "docs"

Row = dict[str, Any]
"""algorithm, variant, task, seed, curve: [updates, steps, mean return] each, seconds, facts."""


def main() -> None:
    """Run what is missing, or report."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("what", choices=[*STUDIES, "report"])
    options.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options.add_argument("--seeds", type=int, default=3, help="of each variant and task")
    options.add_argument("--variants", nargs="*", help="default all")
    options.add_argument("--tasks", nargs="*", help="default all")
    options.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, one a run")
    options.add_argument("--one", nargs=3, metavar=("VARIANT", "TASK", "SEED"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.what == "report":
        print(report(read(given.results)))
    elif given.one:
        variant, task, seed = given.one
        print(json.dumps(learn(given.what, variant, task, int(seed))))
    else:
        run_missing(given)


def run_missing(given: argparse.Namespace) -> None:
    """Run each variant, task and seed that has no result, the first seed of all first; append the results."""
    study = STUDIES[given.what]
    rows = [row for row in read(given.results) if row["algorithm"] == given.what]
    known = {(row["variant"], row["task"], row["seed"]) for row in rows}
    wanted = itertools.product(
        range(1, given.seeds + 1), given.variants or study.variants, given.tasks or study.tasks
    )
    missing = [(variant, task, seed) for seed, variant, task in wanted if (variant, task, seed) not in known]

    def run(one: tuple[str, str, int]) -> None:
        command = [sys.executable, __file__, given.what, "--one", *map(str, one)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        with given.results.open("a") as file:
            file.write(done.stdout.splitlines()[-1] + "\n")
        print(f"{one}: {json.loads(done.stdout)['curve'][-1][2]:.1f}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(run, missing))


def learn(algorithm: str, variant: str, task: str, seed: int) -> Row:
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

    study = STUDIES[algorithm]
    wanted = study.base | study.variants[variant]
    drifting, entropy = wanted.pop("drifting", 0.5), wanted.pop("entropy", None)
    tree: dict[str, Any] = {"env": {"id": task}, "algorithm": {"name": algorithm}, "replay": {}, "seed": seed}
    for name, value in wanted.items():
        section, _, option = name.partition(".")
        tree[section][option] = value
    settings = config.validate(tree)
    torch.set_num_threads(1)
    device, spaces = torch.device("cpu"), submit.prepare(settings)
    if entropy is not None:
        tree["algorithm"]["target_entropy"] = entropy * spaces.action_shape[0]
        settings = config.validate(tree)
    resolved = base.resolve(settings, spaces)
    learner, policy = resolved.learner(device=device, seed=seed), resolved.policy()
    replay: Any = make_experience(settings, resolved.config, spaces)
    identity: dict[str, Any] = {"run": "study", "producer": 1, "incarnation": 1}
    is_random = resolved.can_start_at_random
    collector = Collector(config=settings, resolved=resolved, random_until_learned=is_random, **identity)
    if drifting != 0.5:
        shape = (settings.env.num_envs, *spaces.action_shape)
        generator = np.random.default_rng(seed)
        both = drifting_uniform((2 * shape[0], *shape[1:]), generator)
        white = (generator.random(shape) for _ in itertools.count())
        collector._uniform = (drawn[::2] for drawn in both) if drifting else white
    collector.load(0, learner.weights())
    curve: list[tuple[int, int, float]] = []
    num_steps = version = 0
    began = time.monotonic()
    while len(curve) < POINTS:
        pace = {"num_steps": num_steps, "num_updates": learner.num_updates}
        if (batch := replay.draw(**pace, version=version)) is None:
            fragment = collector.collect(max_steps=study.fragment_steps)
            replay.admit(replay.pack(fragment), b"0-0", version=version)
            num_steps += fragment.num_transitions
            continue
        learner.update(to_device(batch, device))
        if resolved.on_policy or learner.num_updates % LOAD_UPDATES == 0:
            version += 1
            collector.load(version, learner.weights())
        done = num_steps if resolved.on_policy else learner.num_updates
        if done * POINTS >= study.tasks[task] * (len(curve) + 1):
            policy.load(learner.weights())
            loaded = LoadedPolicy(policy, settings, spaces, "study", version)
            episodes = FINAL_EPISODES if len(curve) == POINTS - 1 else EPISODES
            seeds = range(settings.evaluation.seed, settings.evaluation.seed + episodes)
            mean = statistics.fmean(score(loaded, seeds).returns)
            curve.append((learner.num_updates, num_steps, round(mean, 2)))
    seconds = round(time.monotonic() - began, 1)
    identity = {"algorithm": algorithm, "variant": variant, "task": task, "seed": seed}
    return {**identity, "curve": curve, "seconds": seconds, "facts": facts()}


def read(results: Path) -> list[Row]:
    """Return the results."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(rows: list[Row]) -> str:
    """Return the tables, of the last evaluation's mean return, and draw the curves."""
    lines = [
        "# The studies behind the defaults of SAC and PPO\n",
        f"`{Path(sys.argv[0]).name}`, {len(rows)} runs.\n",
        "Median of the seeds, lowest and highest in brackets, of the mean return at the end of the run, whose length",
        "stands beside the task: in updates of SAC (8 env steps each), in env steps of PPO. Below each table are the",
        "options that differ from the former defaults.",
    ]
    for name, study in STUDIES.items():
        own = [row for row in rows if row["algorithm"] == name]
        made = "; ".join(f"{num} on {known}" for known, num in Counter(row["facts"] for row in own).items())
        tasks = [f"{task}, {num // 1000}k" for task, num in study.tasks.items()]
        lines += [
            f"\n## {name.upper()}\n",
            f"Runs: {made}.\n",
            f"| variant | {' | '.join(tasks)} |",
            "|---|" + "---|" * len(tasks),
        ]
        for variant in study.variants:
            if any(cells := [_cell(own, variant, task) for task in study.tasks]):
                lines += [f"| {variant} | {' | '.join(cells)} |"]
        lines += ["", *(f"- {name}: `{json.dumps(options)}`" for name, options in study.variants.items())]
        plot = f"defaults-{name}.png"
        draw(study, own, DOCS / plot)
        lines += [f"\n![Curves]({plot})"]
    return "\n".join(lines)


def _cell(rows: list[Row], variant: str, task: str) -> str:
    found = [one["curve"][-1][2] for one in rows if (one["variant"], one["task"]) == (variant, task)]
    if not found:
        return ""
    if len(found) == 1:
        return f"{found[0]:,.0f} (1)"
    return f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}, {len(found)})"


def draw(study: Study, rows: list[Row], path: Path) -> None:
    """Draw a panel a task: the mean of the seeds of each variant, and their range."""
    from matplotlib.figure import Figure

    num_rows, place = -(-len(study.tasks) // 3), 0 if study is SAC else 1
    figure = Figure(figsize=(15, 4 * num_rows), layout="constrained")
    for panel, task in enumerate(study.tasks, start=1):
        axes = figure.add_subplot(num_rows, 3, panel)
        for number, variant in enumerate(study.variants):
            curves = [one["curve"] for one in rows if (one["variant"], one["task"]) == (variant, task)]
            if not curves:
                continue
            times, returns = np.array(curves)[:, :, place].mean(axis=0), np.array(curves)[:, :, 2]
            axes.plot(times, returns.mean(axis=0), color=f"C{number}", label=variant)
            axes.fill_between(times, returns.min(axis=0), returns.max(axis=0), color=f"C{number}", alpha=0.1)
        axes.set_title(task)
        axes.set_xlabel("env steps" if place else "updates")
    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
