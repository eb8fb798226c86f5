"""Beside Stable-Baselines3 and RLlib: seconds to a confirmed return, and updates a second on equal work.

    python benchmarks/peers.py /tmp/peers --seeds 3 | tee benchmarks/results/peers.txt

The folder gets an environment of Python for each peer, with pinned versions, unless it has them. Systems take turns,
each alone on the machine.

- To a return: LunarLanderContinuous-v3 by PPO, until 20 episodes have a mean of 200 and 100 others too. ddrl is the
  whole `ddrl submit lunar-ppo`, its evaluations included; the peers are evaluated every 10,000 env steps, which counts
  in the second figure only. Stable-Baselines3 has the zoo's settings; RLlib the same where it has them, one process for
  play beside one that learns, and the batch of its documentation.
- Equal work: SAC on HalfCheetah-v5, networks of 256 x 256, batches of 256, an update an env step. Updates a second of
  a minute, once updates have begun.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import submitted
from machine import heading

PACKAGES = {
    "Stable-Baselines3": ["stable-baselines3==2.9.2"],
    "RLlib": ["ray[rllib]==2.60.0"],
}
COMMON = ["torch==2.13.0", "gymnasium[mujoco]", "pygame-ce", "Box2D", "mujoco==3.3.7"]
TARGET, WATCH_STEPS, MOST_S = 200.0, 10_000, 600.0
WORK_S, WARM_UP = 60.0, 1_000
Figures = dict[str, float]


def main() -> None:
    """Measure what is asked for, and print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("folder", type=Path, help="of the peers' environments")
    options.add_argument("--seeds", type=int, default=3, help="of the runs to a return")
    options.add_argument("--only", choices=["return", "work"], help="one of the tables")
    options.add_argument(
        "--as", dest="peer", nargs=3, metavar=("WHAT", "SEED", "THREADS"), help=argparse.SUPPRESS
    )
    given = options.parse_args()
    if given.peer:
        what, *numbers = given.peer
        print(json.dumps(PEERS[what](*map(int, numbers))))
        return
    print(heading("Beside the peers") + "\n")
    if given.only != "work":
        to_a_return(given.folder, given.seeds)
    if given.only != "return":
        equal_work(given.folder)


def python(folder: Path, system: str) -> str:
    """Return the interpreter that has a peer; install it at the first call."""
    place = folder / system.lower()
    if not (place / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        install = [str(place / "bin" / "python"), "-m", "pip", "install", "-q"]
        subprocess.run([*install, *PACKAGES[system], *COMMON], check=True, stdout=sys.stderr)
        (place / "ready").touch()
    return str(place / "bin" / "python")


def peer(folder: Path, system: str, what: str, seed: int, threads: int) -> Figures:
    """Return the figures of a peer, from a process of its own."""
    command = [
        python(folder, system),
        "-W",
        "ignore",
        __file__,
        str(folder),
        "--as",
        what,
        str(seed),
        str(threads),
    ]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def to_a_return(folder: Path, seeds: int) -> None:
    """Print seconds and env steps to a confirmed return."""
    found: dict[str, list[Figures]] = {}
    for seed in range(1, seeds + 1):
        for system, what in (("ddrl", ""), ("Stable-Baselines3", "sb3-return"), ("RLlib", "rllib-return")):
            figures = peer(folder, system, what, seed, os.cpu_count() or 1) if what else our_return(seed)
            found.setdefault(system, []).append(figures)
            print(f"{system}, seed {seed}: {figures}", file=sys.stderr, flush=True)
    print(f"LunarLanderContinuous-v3 by PPO to a confirmed {TARGET:g}\n")
    print(
        "| system | seconds that it learned: median, each seed | times ddrl's "
        "| with its evaluations | times ddrl's | env steps, median |\n|---|---|---|---|---|---|"
    )
    first = statistics.median(row["seconds"] for row in found["ddrl"])
    for system, rows in found.items():
        cells = []
        for name in ("seconds", "watched_s"):
            seconds = [row[name] for row in rows]
            median, each = statistics.median(seconds), ", ".join(f"{one:.1f}" for one in seconds)
            cells += [f"{median:.1f}: {each}", f"{median / first:.1f}"]
        steps = statistics.median(row["steps"] for row in rows)
        print(f"| {system} | {' | '.join(cells)} | {submitted.count(steps)} |", flush=True)


def our_return(seed: int) -> Figures:
    """Return ddrl's seconds and env steps to a confirmed return."""
    ours = submitted.run("lunar-ppo", seed, [])
    return {"seconds": ours.train_s, "watched_s": ours.train_s, "steps": ours.env_steps}


def equal_work(folder: Path) -> None:
    """Print updates a second on equal work, in three rounds."""
    rates: dict[str, list[float]] = {}
    for _ in range(3):
        for threads in (1, 2):
            rates.setdefault(f"ddrl, learner.num_threads={threads}", []).append(our_rate(threads))
            found = peer(folder, "Stable-Baselines3", "sb3-work", 1, threads)
            rates.setdefault(f"Stable-Baselines3, {threads} threads", []).append(found["rate"])
    print("\nSAC on HalfCheetah-v5, 256 x 256, batch 256, an update an env step\n")
    print("| system | updates/s, median of 3 | each |\n|---|---|---|")
    for system, each in rates.items():
        print(f"| {system} | {statistics.median(each):.1f} | {', '.join(f'{rate:.1f}' for rate in each)} |")


def our_rate(threads: int) -> float:
    """Return ddrl's updates a second on the same work."""
    algorithm = {
        **{"name": "sac", "hidden_sizes": [256, 256], "batch_size": 256, "learning_rate": 3e-4},
        **{"layer_norm": False, "n_step": 1, "target_rate": 0.005, "initial_temperature": 1.0},
    }
    replay = {"samples_per_insert": 256, "warmup_steps": WARM_UP}
    config = {"env": {"id": "HalfCheetah-v5", "num_envs": 1}, "algorithm": algorithm, "replay": replay}
    settings = [f"stop.time={WORK_S + 15:.0f}s", "evaluation.every_s=10h", f"learner.num_threads={threads}"]
    done = submitted.run(json.dumps(config), 1, settings)
    rates = [row["updates_per_s"] for row in done.figures if row["elapsed_s"] > 15]
    return statistics.median(rates)


# --- in the peers' own processes --------------------------------------------------------------------------------------


def confirmed(act: Callable[[Any], Any], seed: int) -> bool:
    """Return whether 20 episodes of the lander have the target's mean, and then 100 others."""
    import gymnasium
    import numpy as np

    env = gymnasium.make("LunarLanderContinuous-v3")
    for num, first in ((20, 1_000_000 * seed), (100, 2_000_000 * seed)):
        total = 0.0
        for episode in range(num):
            observation, _ = env.reset(seed=first + episode)
            ended = False
            while not ended:
                action = np.clip(act(observation), -1.0, 1.0)
                observation, reward, terminated, truncated, _ = env.step(action)
                total += float(reward)
                ended = terminated or truncated
        if total / num < TARGET:
            return False
    return True


class Clock:
    """Seconds of learning, without evaluations and with them; says when to evaluate, and when it is over."""

    def __init__(self, seed: int, act: Callable[[Any], Any]) -> None:
        self._started = self._began = time.monotonic()
        self._seed, self._act = seed, act
        self._next, self.is_solved = WATCH_STEPS, False

    @property
    def seconds(self) -> float:
        """Of learning."""
        return time.monotonic() - self._began

    def goes_on(self, steps: int) -> bool:
        """Return whether to go on after so many env steps."""
        if steps >= self._next:
            self._next, spent = steps + WATCH_STEPS, self.seconds
            self.is_solved = confirmed(self._act, self._seed)
            self._began = time.monotonic() - spent
        return not self.is_solved and self.seconds < MOST_S

    def figures(self, steps: int) -> Figures:
        """Return the results."""
        figures = {
            "seconds": self.seconds,
            "watched_s": time.monotonic() - self._started,
            "steps": float(steps),
        }
        return figures if self.is_solved else dict.fromkeys(figures, math.inf)


def sb3_return(seed: int, threads: int) -> Figures:
    """Learn the lander by Stable-Baselines3's PPO with the zoo's settings."""
    library: Any = import_module("stable_baselines3")
    venv: Any = import_module("stable_baselines3.common.env_util")
    env = venv.make_vec_env("LunarLanderContinuous-v3", n_envs=16, seed=seed)
    model = library.PPO(
        "MlpPolicy", env, n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01,
        seed=seed, device="cpu",
    )  # fmt: skip
    clock = Clock(seed, lambda observation: model.predict(observation, deterministic=True)[0])
    model.learn(10**9, callback=lambda *_: clock.goes_on(model.num_timesteps))
    return clock.figures(model.num_timesteps)


def sb3_work(seed: int, threads: int) -> Figures:
    """Return updates a second of Stable-Baselines3's SAC."""
    import torch

    library: Any = import_module("stable_baselines3")
    torch.set_num_threads(threads)
    model = library.SAC(
        "MlpPolicy", "HalfCheetah-v5", batch_size=256, learning_starts=WARM_UP, seed=seed, device="cpu"
    )
    began, first = 0.0, 0

    def goes_on(*_: Any) -> bool:
        nonlocal began, first
        if not began and model._n_updates > 100:
            began, first = time.monotonic(), model._n_updates
        return not began or time.monotonic() - began < WORK_S

    model.learn(10**9, callback=goes_on)
    return {"rate": (model._n_updates - first) / (time.monotonic() - began)}


def rllib_return(seed: int, threads: int) -> Figures:
    """Learn the lander by RLlib's PPO: a process plays 16 environments, another learns."""
    import torch

    ray: Any = import_module("ray")
    ppo: Any = import_module("ray.rllib.algorithms.ppo")
    columns: Any = import_module("ray.rllib.core.columns").Columns
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    config = (
        ppo.PPOConfig()
        .environment("LunarLanderContinuous-v3")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=16)
        .training(
            gamma=0.999, lambda_=0.98, lr=3e-4, entropy_coeff=0.01, num_epochs=4, minibatch_size=128,
            train_batch_size_per_learner=4000, vf_clip_param=1e6, clip_param=0.2,
        )
        .debugging(seed=seed)
    )  # fmt: skip
    algorithm = config.build_algo()
    module = algorithm.get_module()

    def act(observation: Any) -> Any:
        seen = torch.from_numpy(observation[None])
        with torch.no_grad():
            inputs = module.forward_inference({columns.OBS: seen})[columns.ACTION_DIST_INPUTS][0]
        return inputs[: len(inputs) // 2].numpy()  # the mean of the Gaussian

    clock, steps = Clock(seed, act), 0
    while clock.goes_on(steps):
        steps = int(algorithm.train()["num_env_steps_sampled_lifetime"])
    found = clock.figures(steps)
    algorithm.stop()
    ray.shutdown()
    return found


PEERS: dict[str, Callable[[int, int], Figures]] = {
    "sb3-return": sb3_return,
    "sb3-work": sb3_work,
    "rllib-return": rllib_return,
}

if __name__ == "__main__":
    main()
