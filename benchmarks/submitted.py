"""Whole runs as a user starts them: `ddrl submit configs/<name>.yaml`, each with an empty server of its own."""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import ROOT, fresh_home


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        summary: the last line of `ddrl submit --json`.
        status: the output of `ddrl status --json` afterwards.
        start_up_s: from the command to the first environment step; NaN if none was made.
        episodes: rows of `episodes.csv`.
        figures: rows of `metrics.csv`; a cell without value is absent.
        score: of the run's policy, the output of `ddrl evaluate --json`; empty where none was asked for.
    """

    summary: dict[str, Any]
    status: dict[str, Any]
    start_up_s: float
    episodes: list[dict[str, float]]
    figures: list[dict[str, float]]
    score: dict[str, Any]

    @property
    def solved(self) -> bool:
        """True if the target was confirmed."""
        return bool(self.summary["status"] == "solved")

    @property
    def train_s(self) -> float:
        """Seconds from the first environment step to the confirmation; infinite if there was none."""
        return self.summary["train_s"] if self.solved else math.inf

    @property
    def env_steps(self) -> float:
        """Agent steps appended until then; infinite if there was none."""
        return self.summary["env_steps"] if self.solved else math.inf

    @property
    def watched(self) -> list[dict[str, Any]]:
        """Evaluations that were no confirmations, oldest first."""
        return [row for row in self.status["evaluations"] if row["purpose"] == "watch"]


def run(name: str, seed: int, overrides: list[str], score: tuple[int, int] | None = None) -> Outcome:
    """Submit `configs/<name>.yaml` and wait for its end; return its results, and delete its folder.

    Args:
        name: of the config; or a config itself, as JSON.
        seed: of the run.
        overrides: NAME=VALUE each.
        score: episodes to play with the run's policy afterwards, and the first one's seed.
    """
    with fresh_home() as environment:
        command = [sys.executable, "-m", "ddrl"]
        started = time.time()
        options = [option for override in overrides for option in ("-s", override)]
        config = str(ROOT / "configs" / f"{name}.yaml")
        if name.startswith("{"):
            config = str(Path(environment["DDRL_BENCH_FOLDER"], "task.yaml"))
            Path(config).write_text(name)
        submitted = subprocess.run(
            [*command, "submit", config, "--seed", str(seed), "--json", *options],
            env=environment, cwd=environment["DDRL_BENCH_FOLDER"], capture_output=True, text=True,
        )  # fmt: skip
        if submitted.returncode:
            raise SystemExit(
                f"{name}, seed {seed}: exit code {submitted.returncode}: {submitted.stderr.strip()[-500:]}"
            )
        summary = json.loads(submitted.stdout.splitlines()[-1])

        def ask(*arguments: str) -> dict[str, Any]:
            asked = subprocess.run(
                [*command, *arguments, "--json"],
                env=environment, cwd=environment["DDRL_BENCH_FOLDER"], stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            answer: dict[str, Any] = json.loads(asked.stdout)
            return answer

        status = ask("status", "last")
        folder = Path(summary["artifacts"])
        return Outcome(
            summary=summary,
            status=status,
            start_up_s=(status["first_step_s"] or math.nan) - started,
            episodes=_rows(folder / "episodes.csv"),
            figures=_rows(folder / "metrics.csv"),
            score=ask(
                "evaluate",
                str(folder / "policy.safetensors"),
                "--episodes",
                str(score[0]),
                "--seed",
                str(score[1]),
            )
            if score
            else {},
        )


def _rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def parser(description: str | None, *, seeds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all share: `--seeds` and `-s`."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=seeds, help=f"seeds 1 to N (default {seeds})")
    options.add_argument(
        "-s", dest="overrides", action="append", default=[], metavar="NAME=VALUE", help="setting of all runs"
    )
    return options


def count(value: float) -> str:
    """Return a number of steps, which may be infinite, as text."""
    return f"{value:.0f}"


def evaluated(outcome: Outcome) -> str:
    """Return the evaluation that describes the run, with the number of its episodes."""
    score = outcome.summary["evaluation"]
    if score is None:
        return "none"
    return f"{score['return_mean']:.1f} +- {score['return_std']:.1f} ({score['episodes']})"
