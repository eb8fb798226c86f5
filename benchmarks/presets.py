"""Presets trained for a while, several seeds side by side, and their scores beside random play on the same seeds.

    python benchmarks/presets.py dqn ddqn --time 30m | tee -a benchmarks/results/presets.txt

Runs `ddrl submit PRESET --seeds N --time T`, so all seeds share the cores. Each run's best version plays `--episodes`
whole episodes on seeds that no evaluation of the run had; so do random actions. `above` is the difference of the means
in standard errors. The curves are left in PRESET.png, an episode of the best run in PRESET.gif, the runs in `runs/`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from machine import facts
from submitted import parser

HEADER = "| preset | seed | train_s | env steps | updates | score +- std (episodes) | random +- std | above |"


def ddrl(*arguments: str) -> Any:
    """Return the JSON value that a command of ddrl prints; its progress goes to stderr."""
    command = [sys.executable, "-m", "ddrl", *arguments, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def standard_errors(score: dict[str, Any], random: dict[str, Any]) -> float:
    """Return the difference of two means in standard errors."""
    error = math.hypot(*(each["return_std"] / math.sqrt(each["episodes"]) for each in (score, random)))
    return float((score["return_mean"] - random["return_mean"]) / error) if error else math.inf


def main() -> None:
    """Print a row a run."""
    options = parser(__doc__, seeds=3)
    options.add_argument("presets", nargs="+", help="names, or YAML files")
    options.add_argument("--time", default="30m", help="training time of each run (default 30m)")
    options.add_argument("--workers", type=int, help="of each submission (default as of `ddrl submit`)")
    options.add_argument("--episodes", type=int, default=30, help="of each score (default 30)")
    given = options.parse_args()
    print(f"{facts()}\n\n{HEADER}\n|---|---|---|---|---|---|---|---|", flush=True)
    settings = [part for override in given.overrides for part in ("-s", override)]
    settings += [] if given.workers is None else ["--workers", str(given.workers)]
    games = ["--episodes", str(given.episodes), "--seed", "2000000"]
    for preset in given.presets:
        name = Path(preset).stem
        done = ddrl("submit", preset, "--seeds", str(given.seeds), "--time", given.time, *settings)
        rows = done.get("runs", [done])
        if len(rows) > 1:
            ddrl("compare", *(row["run"] for row in rows), "--output", f"{name}.png")
        policies = [str(Path(row["artifacts"], "policy.safetensors")) for row in rows]
        calls = [("evaluate", policies[0], *games, "--epsilon", "1")]
        calls += [("evaluate", policy, *games) for policy in policies]
        with ThreadPool() as cores:
            random, *scores = cores.starmap(ddrl, calls)
        best = max(zip(scores, policies, strict=True), key=lambda pair: float(pair[0]["return_mean"]))[1]
        ddrl("evaluate", best, "--episodes", "1", "--video", f"{name}.gif")
        for row, score in zip(rows, scores, strict=True):
            print(
                f"| {name} | {row.get('seed', 1)} | {row['train_s']:.0f} | {row['env_steps']} | {row['updates']} "
                f"| {text(score)} ({score['episodes']}) | {text(random)} | {standard_errors(score, random):.1f} |",
                flush=True,
            )


def text(score: dict[str, Any]) -> str:
    """Return mean and standard deviation."""
    return f"{score['return_mean']:.1f} +- {score['return_std']:.1f}"


if __name__ == "__main__":
    main()
