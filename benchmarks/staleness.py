"""Effect of V-trace's correction on old data: learning curves under a forced lag of some versions.

    python benchmarks/staleness.py --seeds 10 --lag 8 | tee benchmarks/results/staleness.txt
    python benchmarks/staleness.py --redraw          # report and plot again, from the curves that were kept

CartPole by PPO, every fragment learned from the same number of versions late: with V-trace's importance weights,
and with GAE, which treats old data as its own. All runs have the same number of environment steps and no target.
A run's curve is the mean of its last 20 training episodes (of the policy that explores), against environment
steps. Curves are interpolated on a common grid, averaged over seeds, and given a 95 % band by resampling seeds
(percentile bootstrap, which is somewhat narrow for few seeds: of ten normal draws it covers the mean nine times in
ten). Differences resample both sides independently: runs of equal seed share only the seed.
Progress goes to stderr, the Markdown report to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, facts
from submitted import Outcome, parser, run

CONFIG_NAME = "cartpole"
LAG = ("on_policy.forced_lag={lag}", "on_policy.max_staleness={lag}")  # forces the lag
ESTIMATOR = "algorithm.estimator={estimator}"
LENGTH = ("stop.env_steps={env_steps}", "stop.return=null", "stop.time=1h", "rollout.max_fragment_steps=8")
# Short fragments, because a batch holds whole ones: those beyond its size shorten the lag.
STALENESS = (
    "staleness",
    "max_staleness",
    "dropped",
)  # in metrics.csv: mean, maximum, fragments too stale so far

CORRECTED, UNCORRECTED = "vtrace", "gae"
WINDOW = 20  # episodes of the trailing mean
POINTS = 200  # of the grid
TAIL = 0.1  # part of the grid whose mean is the final return
RESAMPLES = 2_000
RESULTS = ROOT / "benchmarks" / "results" / "staleness.jsonl"
PLOT = ROOT / "docs" / "staleness.png"

Record = dict[str, Any]


def main() -> None:
    """Run, or read the results of former runs; report and draw."""
    options = parser(__doc__, seeds=10)
    options.add_argument("--lag", type=int, default=8, help="versions (default 8)")
    options.add_argument("--env-steps", type=int, default=100_000, help="of each run (default 100000)")
    options.add_argument("--reference", action="store_true", help=f"also {UNCORRECTED} without a lag")
    options.add_argument("--config", default=CONFIG_NAME, metavar="NAME", help=f"default {CONFIG_NAME}")
    options.add_argument("--redraw", action="store_true", help="run nothing: use the curves in --results")
    options.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, one a run")
    options.add_argument("--plot", type=Path, default=PLOT, help="PNG")
    arguments = options.parse_args()
    if not arguments.redraw:
        measure(arguments)
    records = [json.loads(line) for line in arguments.results.read_text(encoding="utf-8").splitlines()]
    arms = summarize(records)
    print(report(records, arms))
    draw(records, arms, arguments.plot)


# --- the runs --------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> None:
    """Run all seeds of all arms, one after the other; each leaves a line in the file of results."""
    measured = facts()
    arms = [(CORRECTED, arguments.lag), (UNCORRECTED, arguments.lag)]
    arms += [(UNCORRECTED, 0)] if arguments.reference else []
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with arguments.results.open("w", encoding="utf-8") as file:
        for seed in range(1, arguments.seeds + 1):  # in turn, so that a busy hour of the machine affects all
            for estimator, lag in arms:
                settings = [ESTIMATOR, *(LAG if lag else ()), *LENGTH]
                overrides = list(arguments.overrides)
                overrides += [
                    text.format(estimator=estimator, lag=lag, env_steps=arguments.env_steps)
                    for text in settings
                ]
                outcome = run(arguments.config, seed, overrides)
                row = record(outcome)
                row |= {"estimator": estimator, "lag": lag, "seed": seed, "env_steps": arguments.env_steps}
                row |= {"config": arguments.config, "overrides": overrides, "measured": measured}
                if row["played_steps"] < arguments.env_steps:
                    raise SystemExit(
                        f"{name(row)}, seed {seed}: {row['status']} after {row['played_steps']} env steps"
                    )
                print(json.dumps(row, separators=(",", ":")), file=file, flush=True)
                print(
                    f"{name(row)}, seed {seed}: {row['train_s']:.1f} s, staleness {row['staleness']}, "
                    f"last version {row['last_evaluation']}",
                    file=sys.stderr,
                    flush=True,
                )


def record(outcome: Outcome) -> Record:
    """Return the line of results of a run: its settings and its curve."""
    mean, most, dropped = ([row[column] for row in outcome.figures if column in row] for column in STALENESS)
    episodes: dict[int, list[float]] = {}
    for row in outcome.episodes:
        value = round(row["return"], 3)
        episodes.setdefault(int(row["env_steps"]), []).append(int(value) if value == int(value) else value)
    return {
        "env": outcome.status["env"],
        "algorithm": outcome.status["algorithm"],
        "status": outcome.summary["status"],
        "train_s": outcome.summary["train_s"],
        "updates": outcome.summary["updates"],
        "played_steps": outcome.summary["env_steps"],
        "staleness": round(float(np.mean(mean)), 3) if mean else None,
        "staleness_max": max(most or mean, default=None),
        "dropped": max(dropped, default=None),
        "last_evaluation": round(outcome.watched[-1]["return_mean"], 3) if outcome.watched else None,
        "episodes": list(episodes.items()),  # (env steps, returns of the episodes that ended there)
    }


def name(row: Record) -> str:
    """Return the name of an arm."""
    return f"{row['estimator']}, lag {row['lag']}"


# --- the statistics --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """All seeds of one setting.

    Attributes:
        records: [S].
        grid: [G] env steps.
        curves: [S, G] training return of each seed.
        resampled: [RESAMPLES, G] mean curves of resampled seeds.
    """

    records: list[Record]
    grid: np.ndarray
    curves: np.ndarray
    resampled: np.ndarray

    @property
    def area(self) -> tuple[float, np.ndarray]:
        """Area under the mean curve per env step: the mean return over the run; and that of each resample."""
        return float(self.curves.mean()), self.resampled.mean(axis=1)

    @property
    def final(self) -> tuple[float, np.ndarray]:
        """Mean of the mean curve over the last part of the run, and that of each resample."""
        tail = max(1, round(TAIL * len(self.grid)))
        return float(self.curves[:, -tail:].mean()), self.resampled[:, -tail:].mean(axis=1)


def summarize(records: list[Record]) -> dict[str, Arm]:
    """Return the arms by name, in the order of the records; resampling starts from a fixed seed."""
    grouped: dict[str, list[Record]] = {}
    for row in records:
        grouped.setdefault(name(row), []).append(row)
    end = min(row["env_steps"] for row in records)
    grid = np.linspace(end / POINTS, end, POINTS)
    generator = np.random.default_rng(0)
    arms = {}
    for label, rows in grouped.items():
        curves = np.stack([curve(row["episodes"], grid) for row in rows])
        index = generator.integers(len(rows), size=(RESAMPLES, len(rows)))
        arms[label] = Arm(rows, grid, curves, curves[index].mean(axis=1))
    return arms


def curve(episodes: list[tuple[int, list[float]]], grid: np.ndarray) -> np.ndarray:
    """Return the mean return of the last WINDOW episodes at each point of the grid, linear in between.

    Args:
        episodes: env steps, ascending, and the returns of the episodes that ended there.
        grid: [G] env steps; before the first episode has ended the curve is level.

    Returns:
        [G].
    """
    ended = np.cumsum([len(returns) for _, returns in episodes])
    sums = np.concatenate([[0.0], np.cumsum([value for _, returns in episodes for value in returns])])
    begun = np.maximum(ended - WINDOW, 0)
    means = (sums[ended] - sums[begun]) / (ended - begun)
    return np.asarray(np.interp(grid, [steps for steps, _ in episodes], means))


def interval(resampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % percentile interval along the first axis."""
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return low, high


def stated(value: float, resampled: np.ndarray) -> str:
    """Return a figure with its interval as text."""
    low, high = interval(resampled)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


# --- the report and the plot -----------------------------------------------------------------------------


def report(records: list[Record], arms: dict[str, Arm]) -> str:
    """Return the report as Markdown."""
    first = records[0]
    own = [text for text in first["overrides"] if text != ESTIMATOR.format(**first)]
    lines = [
        f"# Learning from data of older versions: {first['env']} by {first['algorithm'].upper()}",
        *sorted({row["measured"] for row in records}),
        f"config configs/{first['config']}.yaml {' '.join(own)}",
        "",
        "| estimator | seeds | staleness learned from, mean (max) | fragments dropped | mean return over the run "
        f"| over its last {TAIL:.0%} | last version, 20 episodes |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, arm in arms.items():
        seen, most, dropped, last = (
            [row[column] for row in arm.records if row[column] is not None]
            for column in ("staleness", "staleness_max", "dropped", "last_evaluation")
        )
        stale = f"{np.mean(seen):.2f} ({max(most):g})" if seen else "unknown"
        lines.append(
            f"| {label} | {len(arm.records)} | {stale} | {f'{sum(dropped):g}' if dropped else 'unknown'} "
            f"| {stated(*arm.area)} | {stated(*arm.final)} | {f'{np.mean(last):.1f}' if last else 'none'} |"
        )
    lines += [
        "",
        "Means over seeds [95 % bootstrap interval, resampling seeds]. The first iterations after the start are less "
        "stale than the lag: versions so far back do not exist yet.",
    ]
    return "\n".join([*lines, *differences(arms)])


def differences(arms: dict[str, Arm]) -> list[str]:
    """Return sentences about the corrected arm less the uncorrected one of the same lag."""
    lines = []
    for label, arm in arms.items():
        lag = arm.records[0]["lag"]
        other = arms.get(f"{UNCORRECTED}, lag {lag}")
        if arm.records[0]["estimator"] != CORRECTED or other is None:
            continue
        for what, (value, samples), (base, base_samples) in (
            ("over the run (area under the curve per step)", arm.area, other.area),
            (f"over its last {TAIL:.0%}", arm.final, other.final),
        ):
            low, high = interval(samples - base_samples)
            verdict = "no difference shown" if low <= 0 <= high else "higher" if low > 0 else "lower"
            if min(len(arm.records), len(other.records)) == 1:
                verdict = "of one seed, which shows nothing"
            lines.append(
                f"Return {what}, {label} less {UNCORRECTED}: {stated(value - base, samples - base_samples)}: {verdict}."
            )
    return ["", *lines] if lines else []


COLORS = ("#2f6fb0", "#d9822b", "#6b7280")
STYLES = ("-", "--", ":")


def draw(records: list[Record], arms: dict[str, Arm], path: Path) -> None:
    """Draw mean curves with their bands, and the curves of single seeds behind them, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    for (label, arm), color, style in zip(arms.items(), COLORS, STYLES, strict=False):
        axes.plot(arm.grid, arm.curves.T, color=color, linewidth=0.5, alpha=0.25)
        axes.fill_between(arm.grid, *interval(arm.resampled), color=color, alpha=0.22, linewidth=0)
        axes.plot(arm.grid, arm.curves.mean(axis=0), style, color=color, linewidth=2.0, label=label)
    axes.set_xlim(0, next(iter(arms.values())).grid[-1])
    axes.set_xlabel("environment steps")
    axes.set_ylabel(f"return, mean of {WINDOW} training episodes")
    seeds = sorted({len(arm.records) for arm in arms.values()})
    axes.set_title(
        f"{records[0]['env']}, {records[0]['algorithm'].upper()}: mean of "
        f"{' to '.join(map(str, seeds))} seeds, 95 % bootstrap band",
        fontsize=11,
    )
    axes.legend(frameon=False, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
