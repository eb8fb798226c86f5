"""Env steps to a target from a given policy, and how far the policy falls: with and without care for it.

    ddrl submit cartpole -s stop.return=300; ddrl export last --output half.safetensors
    python benchmarks/initial_weights.py cartpole half.safetensors --target 475 --most 80000 --every 4000

`warm` is what `ddrl submit --from` does: critics warm up before the policy moves, SAC goes on with the temperature, DQN
with the final epsilon. `plain` takes the policy only, `scratch` nothing. Play and learning take turns in one process,
so that a seed decides all and the load of the machine nothing. Evaluations have 20 episodes; the target counts as
reached by one, without a confirmation, and as infinitely far if not within `--most` steps. A policy that reaches the
target needs no step: `ddrl submit` evaluates it first.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from machine import ROOT, heading
from submitted import count, parser

from ddrl import codec, envs
from ddrl import config as configs
from ddrl.algorithms import base
from ddrl.networks.device import to_device, to_host
from ddrl.policy import LoadedPolicy, load
from ddrl.replay.experience import make_experience
from ddrl.runs.evaluation import score
from ddrl.worker.collector import Collector

CPU = torch.device("cpu")
PUBLISH_EVERY = 20  # updates between two versions off-policy
VARIANTS = ("scratch", "plain", "warm")


@dataclass(frozen=True)
class Task:
    """The config's name, the exported policy, the mean return to reach, and env steps: at most, between evaluations."""

    config: str
    policy: str
    target: float
    most_steps: int
    every_steps: int
    overrides: tuple[str, ...]


def train(task: Task, variant: str, seed: int) -> list[tuple[int, float]]:
    """Play and learn in turns to the target or `most_steps`; return the steps and mean return of each evaluation."""
    torch.set_num_threads(1)
    run = configs.load(ROOT / "configs" / f"{task.config}.yaml", [f"seed={seed}", *task.overrides])
    spec = envs.describe(run.env)
    resolved = base.resolve(run, spec)
    learner: Any = resolved.learner(device=CPU, seed=seed)
    learner.from_policy = variant == "warm"
    if variant != "scratch":
        given = {name: torch.from_numpy(value) for name, value in load(task.policy).weights.items()}
        if variant == "plain":
            given.pop("log_temperature", None)
        learner.load_initial_weights(given)
    held: Any = make_experience(run, resolved.config, spec)
    is_random = resolved.can_start_at_random and variant == "scratch"
    identity = {"run": "warm", "producer": 1, "incarnation": seed}
    collector = Collector(**identity, config=run, resolved=resolved, random_until_learned=is_random)  # type: ignore[arg-type]
    player = LoadedPolicy(resolved.policy(), run, spec, "warm", 0)
    steps = version = fragments = published = 0
    evaluations: list[tuple[int, float]] = []
    collector.load(version, learner.weights())
    while True:
        if not evaluations or steps >= evaluations[-1][0] + task.every_steps:
            player.policy.load(learner.weights())
            value = score(player, range(9_000, 9_020), num_envs=20).return_mean
            evaluations.append((steps, value))
            if (value >= task.target and steps) or steps >= task.most_steps:
                held.close()
                collector.close()
                return evaluations
        budget = held.step_budget(num_steps=steps, num_updates=learner.num_updates, version=version)
        while steps < budget:
            wanted = -(-(budget - steps) // run.env.num_envs)
            fragment = codec.decode(codec.encode(collector.collect(max_steps=wanted)))
            steps, fragments = steps + fragment.num_transitions, fragments + 1
            held.admit(held.pack(fragment), b"%d-0" % fragments, version=version)
        while True:
            batch = held.draw(num_steps=steps, num_updates=learner.num_updates, version=version)
            if batch is None:
                break
            priority = dict(learner.update(to_device(batch, CPU))).pop("priority", None)
            if priority is not None:
                held.update_priorities(batch, to_host(priority))
            if resolved.on_policy or learner.num_updates >= published + PUBLISH_EVERY:
                version, published = version + 1, learner.num_updates
                collector.load(version, learner.weights())
                break


def main() -> None:
    """Print both tables."""
    options = parser(__doc__, seeds=5)
    options.add_argument("config", help="a name of configs/")
    options.add_argument("policy", help="exported file")
    options.add_argument("--target", type=float, required=True, help="mean return")
    options.add_argument("--most", type=int, required=True, help="env steps of a training at most")
    options.add_argument("--every", type=int, required=True, help="env steps between two evaluations")
    options.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all")
    options.add_argument("--processes", type=int, default=2, help="trainings at a time (default 2)")
    given = options.parse_args()
    task = Task(given.config, given.policy, given.target, given.most, given.every, tuple(given.overrides))
    print(heading(f"{task.config}: from a given policy to {task.target:g}"))
    print("\n| config | variant | seed | given | env steps to the target | lowest evaluation | evaluations |")
    print("|---|---|---|---|---|---|---|", flush=True)
    found: dict[str, list[tuple[float, float]]] = {variant: [] for variant in given.variants}
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        cases = [(variant, seed) for seed in range(1, given.seeds + 1) for variant in given.variants]
        begun = {pool.submit(train, task, *case): case for case in cases}
        for one in as_completed(begun):
            found[begun[one][0]].append(row(task, *begun[one], one.result()))
    print("\n| config | target | variant | median env steps | lowest evaluation: median (least) |")
    print("|---|---|---|---|---|")
    for variant, rows in found.items():
        steps, lowest = zip(*rows, strict=True)
        print(
            f"| {task.config} | {task.target:g} | {variant} | {count(statistics.median(steps))} "
            f"| {statistics.median(lowest):.0f} ({min(lowest):.0f}) |"
        )


def row(task: Task, variant: str, seed: int, evaluations: list[tuple[int, float]]) -> tuple[float, float]:
    """Print the row of a training; return its steps to the target, and the lowest evaluation after the first."""
    (_, level), *later = evaluations
    lowest = min(value for _, value in later)
    steps = float(later[-1][0]) if later[-1][1] >= task.target else math.inf
    curve = " ".join(f"{value:.0f}" for _, value in later)
    print(
        f"| {task.config} | {variant} | {seed} | {level:.0f} | {count(steps)} | {lowest:.0f} | {curve} |",
        flush=True,
    )
    return steps, lowest


if __name__ == "__main__":
    main()
