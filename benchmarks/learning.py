"""Learning beside Stable-Baselines3 with the settings of rl-baselines3-zoo: after equal steps, and after ten minutes.

    python benchmarks/learning.py steps --jobs 2 --seeds 5        # go on with what --results lacks
    python benchmarks/learning.py minutes --seeds 5               # alone on the machine: each run has all cores
    python benchmarks/learning.py defaults --jobs 2 --seeds 5     # with nothing but env.id and algorithm.name
    python benchmarks/learning.py algorithms --jobs 2 --seeds 5   # the other algorithms, each on one task
    python benchmarks/learning.py report > docs/learning.md       # tables and plot of what is there

ddrl is the whole product, `ddrl submit`: server, workers, evaluations, learner. Of both, the version with the best of
the evaluations on the way plays 100 episodes on seeds of its own: that is the score. Evaluations of ddrl are those of
the product, 20 episodes every 5 s, and count in its ten minutes; Stable-Baselines3 has 20, of 10 episodes each, which
do not count. Needs the extras box2d and mujoco, and stable-baselines3. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import submitted
from machine import ROOT, facts

Settings = dict[str, Any]
Row = dict[str, Any]
"""table, task, system, seed, score, curve: [seconds, env steps, mean return] each, updates, facts."""

RESULTS = ROOT / "benchmarks" / "results" / "learning.jsonl"
PLOT = ROOT / "docs" / "learning.png"
SCORE_EPISODES, SCORE_SEED = 100, 2_000_000
WATCH_EPISODES, WATCH_SEED, WATCHES = 10, 1_000_000, 20
SECONDS = 600.0


@dataclass(frozen=True)
class Task:
    """A task of a table.

    Attributes:
        preset: config of ddrl; of defaults, the algorithm.
        zoo: algorithm of Stable-Baselines3 and its options; `envs`, `normalize`, `layers` and `sde` are the zoo's
            number of environments, VecNormalize, layers of both networks, and policy options.
        published: score in the zoo's benchmark.md, on the version of the environment that it has.
        steps: env steps; 0: as many as ten minutes give.
        repeat: env steps of each action of the preset.
    """

    preset: str
    zoo: Settings
    published: float
    steps: int = 0
    repeat: int = 1


def sac(**options: Any) -> Settings:
    """Return the zoo's SAC."""
    return {"algorithm": "SAC", **options}


def ppo(**options: Any) -> Settings:
    """Return the zoo's PPO."""
    return {"algorithm": "PPO", **options}


_PENDULUM = sac(learning_rate=1e-3)
_LANDER = sac(
    batch_size=256, learning_rate="lin_7.3e-4", tau=0.01, learning_starts=10_000, layers=[400, 300]
)  # fmt: skip
_CAR = sac(
    learning_rate=3e-4, buffer_size=50_000, batch_size=512, ent_coef=0.1, train_freq=32, gradient_steps=32,
    gamma=0.9999, tau=0.01, learning_starts=0, layers=[64, 64], sde=-3.67,
)  # fmt: skip
_WALKER = sac(
    batch_size=256, learning_rate=7.3e-4, buffer_size=300_000, gamma=0.98, tau=0.02, train_freq=64, gradient_steps=64,
    learning_starts=10_000, layers=[400, 300], sde=-3.0,
)  # fmt: skip
_MUJOCO = sac(learning_starts=10_000)
_PPO_LANDER = ppo(
    envs=16, n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01
)  # fmt: skip

# In both: settings and scores of https://github.com/DLR-RM/rl-baselines3-zoo, hyperparams/ and benchmark.md.
EQUAL_STEPS = {
    "CartPole-v1": Task(
        "cartpole",
        ppo(
            envs=8, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0,
            learning_rate="lin_0.001", clip_range="lin_0.2",
        ),
        published=500.0, steps=100_000,
    ),
    "Acrobot-v1": Task(
        "acrobot",
        ppo(envs=16, normalize=True, n_steps=256, gae_lambda=0.94, gamma=0.99, n_epochs=4, ent_coef=0.0),
        published=-73.5, steps=1_000_000,
    ),
    "MountainCar-v0": Task(
        "mountaincar",
        ppo(envs=16, normalize=True, n_steps=16, gae_lambda=0.98, gamma=0.99, n_epochs=4, ent_coef=0.0),
        published=-110.4, steps=1_000_000, repeat=8,
    ),
    "LunarLander-v3": Task("lunar-discrete", _PPO_LANDER, published=242.1, steps=1_000_000),
    "LunarLanderContinuous-v3": Task("lunar-ppo", _PPO_LANDER, published=270.9, steps=1_000_000),
    "Pendulum-v1": Task("pendulum", _PENDULUM, published=-157.0, steps=20_000),
    "MountainCarContinuous-v0": Task("mountaincar-continuous", _CAR, published=94.7, steps=50_000),
    "BipedalWalker-v3": Task("bipedal", _WALKER, published=297.7, steps=500_000),
    "HalfCheetah-v5": Task("halfcheetah", _MUJOCO, published=9535.5, steps=300_000),
    "Hopper-v5": Task("hopper", _MUJOCO, published=2325.5, steps=300_000),
}  # fmt: skip
TEN_MINUTES = {
    "Pendulum-v1": Task("pendulum", _PENDULUM, published=-157.0),
    "LunarLanderContinuous-v3": Task("lunar", _LANDER, published=260.4),
    "BipedalWalker-v3": Task("bipedal", _WALKER, published=297.7),
    "HalfCheetah-v5": Task("halfcheetah", _MUJOCO, published=9535.5),
    "Hopper-v5": Task("hopper", _MUJOCO, published=2325.5),
    "Walker2d-v5": Task("walker2d", _MUJOCO, published=3863.2),
    "Humanoid-v5": Task("humanoid", _MUJOCO, published=math.nan),
}
TEN_MINUTES["BipedalWalker-v3 again"] = replace(TEN_MINUTES["BipedalWalker-v3"], preset="bipedal-ppo")
DEFAULTS = {
    name: replace(task, preset="sac" if task.zoo["algorithm"] == "SAC" else "ppo", steps=1_000_000, repeat=1)
    for name, task in EQUAL_STEPS.items()
}
# By one algorithm or the other: what PPO does not learn, the other one may.
DEFAULTS["LunarLanderContinuous-v3 again"] = replace(DEFAULTS["LunarLanderContinuous-v3"], preset="sac")
ALGORITHMS = {
    "CartPole-v1 by discrete SAC": Task("cartpole-sac", {}, published=500.0, steps=100_000),
    "CartPole-v1 by DQN": Task("cartpole-dqn", {}, published=500.0, steps=100_000),
    "CartPole-v1 by PQN": Task("cartpole-pqn", {}, published=500.0, steps=100_000),
    "CartPole-v1 by IMPALA": Task("cartpole-impala", {}, published=500.0, steps=100_000),
    "Pendulum-v1 by DroQ": Task("pendulum-droq", {}, published=-157.0, steps=2_000),
    "LunarLanderContinuous-v3 by TQC": Task("lunar-tqc", {}, published=270.9, steps=200_000),
    "LunarLanderContinuous-v3 by CrossQ": Task("lunar-crossq", {}, published=270.9, steps=200_000),
    "Taxi-v4 by DQN with masks": Task("taxi", {}, published=math.nan, steps=200_000),
    "ddrl/Flip-v0 by DQN with HER": Task("flip", {}, published=math.nan, steps=300_000),
    "ddrl/Recall-v0 by recurrent PPO": Task("recall-ppo", {}, published=math.nan, steps=100_000),
    "ddrl/Recall-v0 by recurrent IMPALA": Task("recall-impala", {}, published=math.nan, steps=300_000),
    "ddrl/Recall-v0 by R2D2": Task("recall", {}, published=math.nan, steps=30_000),
    "ddrl/Gauge-v0 by SAC, image and number": Task("gauge", {}, published=math.nan, steps=8_000),
}
TABLES = {"steps": EQUAL_STEPS, "minutes": TEN_MINUTES, "defaults": DEFAULTS, "algorithms": ALGORITHMS}
TITLES = {
    "steps": "After equal steps",
    "minutes": "After ten minutes, alone on both cores",
    "defaults": "With nothing but `env.id` and `algorithm.name`, after a million steps or half an hour",
    "algorithms": "Other algorithms, and observations that need more than a plain one",
}
SYSTEMS = ("ddrl", "Stable-Baselines3")


def main() -> None:
    """Run what is missing, or report."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("what", choices=[*TABLES, "report"])
    options.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options.add_argument("--seeds", type=int, default=5, help="of each task and system")
    options.add_argument("--tasks", nargs="*", help="default all")
    options.add_argument("--systems", nargs="*", default=SYSTEMS, help="default both")
    options.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, one a run")
    options.add_argument("--plot", type=Path, default=PLOT, help="PNG")
    options.add_argument("--peer", nargs=2, metavar=("TASK", "SEED"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.what == "report":
        rows = read(given.results)
        draw(rows, given.plot)
        print(report(rows))
    elif given.peer:
        print(json.dumps(peer(given.what, given.peer[0], int(given.peer[1]))))
    else:
        run_missing(given.what, given)


def run_missing(table: str, given: argparse.Namespace) -> None:
    """Run what has no result, the first seed of all first; append the results."""
    known = {(row["table"], row["task"], row["system"], row["seed"]) for row in read(given.results)}
    wanted = [
        (table, task, system, seed)
        for seed in range(1, given.seeds + 1)
        for task in given.tasks or TABLES[table]
        for system in given.systems
        if system == "ddrl" or TABLES[table][task].zoo and table != "defaults" and " again" not in task
    ]

    def run(one: tuple[str, str, str, int]) -> None:
        _, task, system, seed = one
        row = ours(table, task, seed) if system == "ddrl" else _in_a_process(table, task, seed)
        row = {"table": table, "task": task, "system": system, "seed": seed, **row, "facts": facts()}
        with given.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{one}: {row['score']:.1f}, {row['updates']} updates", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(run, [one for one in wanted if one not in known]))


def read(results: Path) -> list[Row]:
    """Return the results."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


# --- runs -------------------------------------------------------------------------------------------------------------


def ours(table: str, name: str, seed: int) -> Row:
    """Submit the preset of a task, or its defaults, without a target; return score and curve."""
    task = TABLES[table][name]
    end = (
        [f"stop.env_steps={task.steps // task.repeat}", "stop.time=3h"]
        if task.steps
        else [f"stop.time={SECONDS:.0f}s"]
    )
    config = task.preset
    if table == "defaults":
        end[1] = "stop.time=30m"
        config = json.dumps({"env": {"id": name.removesuffix(" again")}, "algorithm": {"name": task.preset}})
    options = ["stop.return=null", "evaluation.every_s=5", *end]
    done = submitted.run(config, seed, options, score=(SCORE_EPISODES, SCORE_SEED))
    began = done.status["first_step_s"]
    return {
        "score": done.score["return_mean"],
        "curve": [
            [round(row["time_s"] - began, 1), row["env_steps"] * task.repeat, round(row["return_mean"], 2)]
            for row in done.watched
        ],
        "updates": done.summary["updates"],
        "steps": done.summary["env_steps"] * task.repeat,
    }


def _in_a_process(table: str, task: str, seed: int) -> Row:
    command = [sys.executable, "-W", "ignore", __file__, table, "--peer", task, str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def peer(table: str, name: str, seed: int) -> Row:
    """Learn a task with Stable-Baselines3; return score and curve."""
    import gymnasium

    library: Any = import_module("stable_baselines3")
    common: Any = import_module("stable_baselines3.common.env_util")
    normalizing: Any = import_module("stable_baselines3.common.vec_env").VecNormalize

    task = TABLES[table][name]
    options = dict(task.zoo)
    kind = getattr(library, options.pop("algorithm"))
    venv: Any = common.make_vec_env(name, n_envs=options.pop("envs", 1), seed=seed)
    if normalized := options.pop("normalize", False):
        venv = normalizing(venv, gamma=options["gamma"])
    policy: Settings = {}
    if layers := options.pop("layers", None):
        policy["net_arch"] = layers
    if log_std := options.pop("sde", None):
        policy["log_std_init"], options["use_sde"] = log_std, True
    for key, value in options.items():
        if isinstance(value, str) and value.startswith("lin_"):
            options[key] = _linear(float(value.removeprefix("lin_")))
    model = kind("MlpPolicy", venv, policy_kwargs=policy, seed=seed, device="cpu", **options)

    def returns(num_episodes: int, first_seed: int) -> float:
        env = gymnasium.make(name)
        total = 0.0
        for episode in range(num_episodes):
            observation, _ = env.reset(seed=first_seed + episode)
            ended = False
            while not ended:
                seen = venv.normalize_obs(observation) if normalized else observation
                action, _ = model.predict(seen, deterministic=True)
                observation, reward, terminated, truncated, _ = env.step(action)
                total += float(reward)
                ended = terminated or truncated
        return total / num_episodes

    began, watched_s, best = time.monotonic(), 0.0, -math.inf
    curve: list[list[float]] = []
    kept: Settings = {}

    def after_a_step(*_: Any) -> bool:
        """Evaluate now and then, with the clock stopped; keep the best version; return whether to go on."""
        nonlocal watched_s, best
        spent = time.monotonic() - began - watched_s
        share = model.num_timesteps / task.steps if task.steps else spent / SECONDS
        if share * WATCHES >= len(curve) + 1:
            mean = returns(WATCH_EPISODES, WATCH_SEED)
            curve.append([round(spent, 1), model.num_timesteps, round(mean, 2)])
            if mean >= best:
                best = mean
                kept.update(weights={key: value.clone() for key, value in model.policy.state_dict().items()})
                kept.update(statistics=deepcopy(venv.obs_rms) if normalized else None)
            watched_s = time.monotonic() - began - spent
        return share < 1

    model.learn(task.steps or 10**9, callback=after_a_step)
    updates = model._n_updates
    model.policy.load_state_dict(kept["weights"])
    if normalized:
        venv.obs_rms = kept["statistics"]
    score = returns(SCORE_EPISODES, SCORE_SEED)
    return {"score": score, "curve": curve, "updates": updates, "steps": model.num_timesteps}


def _linear(start: float) -> Callable[[float], float]:
    """Return the zoo's schedule, of the progress that remains."""
    return lambda remaining: remaining * start


# --- report -----------------------------------------------------------------------------------------------------------


def learned(rows: list[Row]) -> dict[str, dict[str, Task]]:
    """Return the tables with the tasks that have a result."""
    there = {(row["table"], row["task"]) for row in rows}
    kept = {
        table: {name: task for name, task in tasks.items() if (table, name) in there}
        for table, tasks in TABLES.items()
    }
    return {table: tasks for table, tasks in kept.items() if tasks}


def scores(rows: list[Row], table: str, task: str, system: str) -> list[float]:
    """Return the scores of the seeds."""
    wanted = (table, task, system)
    return sorted(row["score"] for row in rows if (row["table"], row["task"], row["system"]) == wanted)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by Student's t."""
    if len(values) < 2:
        return -math.inf, math.inf
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.57)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def report(rows: list[Row]) -> str:
    """Return the tables."""
    lines = [
        "# Learning beside Stable-Baselines3\n",
        f"`benchmarks/learning.py`, {len(rows)} runs; each line of its results names commit and machine, the newest",
        f"{rows[-1]['facts']}\n",
        "A score is the mean return of 100 episodes, on seeds of their own, by the version with the best of the",
        f"evaluations on the way: by the median {' and '.join(_num_watched(rows))}.",
        "Cells: median of the seeds, 95 % interval of their mean (Student's t), their number. Steps: those asked for;",
        "where time ends a run, those made by ddrl and by Stable-Baselines3, medians.",
    ]
    for table, tasks in learned(rows).items():
        lines += [
            f"\n## {TITLES[table]}\n",
            "| task | steps | ddrl, preset | Stable-Baselines3, zoo's settings | zoo, published |",
        ]
        lines.append("|---|---|---|---|---|")
        for name, task in tasks.items():
            cells = [_cell(scores(rows, table, name, system)) for system in SYSTEMS]
            by_time = table in ("minutes", "defaults")
            steps = _num_steps(rows, table, name) if by_time else f"{task.steps:,}"
            published = f"{task.published:,.1f}" if task.published == task.published else ""
            lines.append(f"| {name} | {steps} | {cells[0]} `{task.preset}` | {cells[1]} | {published} |")
    return "\n".join([*lines, "\n![Curves](learning.png)"])


def _num_watched(rows: list[Row]) -> list[str]:
    """Return how many evaluations on the way a run of each system has, by the median."""
    nums = {system: [len(row["curve"]) for row in rows if row["system"] == system] for system in SYSTEMS}
    return [f"{statistics.median(num):.0f} of {system}" for system, num in nums.items() if num]


def _num_steps(rows: list[Row], table: str, task: str) -> str:
    """Return the env steps that each system made, by the median."""
    cells = []
    for system in SYSTEMS:
        made = [
            row["steps"]
            for row in rows
            if (row["table"], row["task"], row["system"]) == (table, task, system)
        ]
        cells += [f"{statistics.median(made):,.0f}"] if made else []
    return ", ".join(cells)


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    low, high = interval(values)
    bounds = f" [{low:,.0f}, {high:,.0f}]" if len(values) > 1 else ""
    return f"{statistics.median(values):,.1f}{bounds} ({len(values)})"


def draw(rows: list[Row], path: Path) -> None:
    """Draw a panel a task: the seeds of each system on a common grid, their mean and 95 % interval."""
    import numpy as np
    from matplotlib.figure import Figure

    panels = [(table, task) for table, tasks in learned(rows).items() for task in tasks]
    figure = Figure(figsize=(18, 3.2 * math.ceil(len(panels) / 4)), layout="constrained")
    for place, (table, task) in enumerate(panels, start=1):
        axes = figure.add_subplot(math.ceil(len(panels) / 4), 4, place)
        end = TABLES[table][task].steps or SECONDS
        grid, seen = np.linspace(0, end, 60), []
        for color, system in enumerate(SYSTEMS):
            wanted = (table, task, system)
            curves = [
                np.interp(
                    grid,
                    [point[table != "minutes"] for point in row["curve"]],
                    [point[2] for point in row["curve"]],
                )
                for row in rows
                if (row["table"], row["task"], row["system"]) == wanted and row["curve"]
            ]
            if not curves:
                continue
            seen += curves
            mean = np.mean(curves, axis=0)
            axes.plot(grid, mean, color=f"C{color}", label=system)
            if len(curves) > 1:
                half = np.array([interval(list(values))[1] for values in np.transpose(curves)]) - mean
                axes.fill_between(grid, mean - half, mean + half, color=f"C{color}", alpha=0.15)
        margin = 0.05 * np.ptp(seen)
        axes.set_ylim(np.min(seen) - margin, np.max(seen) + margin)  # a band of few seeds may be much wider
        axes.locator_params(axis="x", nbins=5)
        axes.set_title(task)
        axes.set_xlabel("seconds" if table == "minutes" else "env steps")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=70)


if __name__ == "__main__":
    main()
