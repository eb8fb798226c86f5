"""Curves of runs as columns for the page: few enough points that a run of any length is drawn at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ddrl.runs.curves import WINDOW, trailing_mean
from ddrl.runs.records import Records

POINTS = 1_000  # of a line
AXES = {"time_s": "seconds", "env_steps": "env steps", "updates": "updates"}
Line = tuple[np.ndarray, np.ndarray]  # [N] x, never falling, and [N] y


def thin(line: Line, num: int = POINTS) -> Line:
    """Return a line with at most `num` of its points, chosen so that it looks the same: peaks stay.

    Source: Steinarsson 2013, "Downsampling Time Series for Visual Representation", largest triangle three buckets.
    """
    x, y = line
    if len(x) <= num:
        return line
    # Buckets between the first point and the last, which is a bucket of its own.
    bounds = np.linspace(1, len(x) - 1, num - 1).astype(int)
    sizes = np.diff(np.append(bounds, len(x)))
    mean_x, mean_y = (np.add.reduceat(values, bounds) / sizes for values in (x, y))
    kept = [0]
    for place, (begin, end) in enumerate(pairwise(bounds.tolist()), start=1):
        last_x, last_y = x[kept[-1]], y[kept[-1]]
        width, height = last_x - mean_x[place], mean_y[place] - last_y
        area = np.abs(width * (y[begin:end] - last_y) - (last_x - x[begin:end]) * height)
        kept.append(begin + int(area.argmax()))
    kept.append(len(x) - 1)
    return x[kept], y[kept]


def returns(records: Records, over: str) -> Line:
    """Return the trailing mean of the training returns, over one of AXES."""
    values = [row["return"] for row in records.episodes]
    mean = np.array(trailing_mean(values, max(WINDOW, len(values) // 40)))
    skipped = WINDOW // 4 if len(values) > WINDOW else 0  # the mean of few episodes is noise
    return _positions(records, records.episodes, over)[skipped:], mean[skipped:]


def figure(records: Records, over: str, name: str) -> Line:
    """Return one of the learner's figures, where it is a finite number."""
    rows = [
        row for row in records.figures if isinstance(row.get(name), int | float) and np.isfinite(row[name])
    ]
    return _positions(records, rows, over), np.array([row[name] for row in rows], dtype=float)


def evaluations(records: Records, over: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, mean and standard deviation of the evaluations, in order of x."""
    rows = records.evaluated
    x = _positions(records, rows, over)
    order = np.argsort(x, kind="stable")
    mean, std = (np.array([row[name] for row in rows], dtype=float) for name in ("return_mean", "return_std"))
    return x[order], mean[order], std[order]


def changes(records: Records, over: str) -> list[tuple[float, str]]:
    """Return x and text of each changed setting."""
    rows = records.changes
    texts = (f"{row['option'].removeprefix('algorithm.')} {row['to']}"[:60] for row in rows)
    return [*zip(_positions(records, rows, over).tolist(), texts, strict=True)]


def _positions(records: Records, rows: Sequence[Mapping[str, Any]], over: str) -> np.ndarray:
    """Return x of rows; updates of those that lack them are those of the learner's at their env steps."""
    if over != "updates" or all("updates" in row for row in rows):
        return np.array([row[over] for row in rows], dtype=float)
    known = [(0.0, 0.0), *((row["env_steps"], row["updates"]) for row in records.figures)]
    steps, updates = np.array(known, dtype=float).T
    found: np.ndarray = np.interp([row["env_steps"] for row in rows], steps, updates)
    return found


def columns(*lines: Line) -> list[list[float | None]]:
    """Return [x, y of each line] with all their x in one column; a line has None at those of others."""
    every = np.unique(np.concatenate([x for x, _ in lines])) if lines else np.array([])
    found: list[list[float | None]] = [every.tolist()]
    for x, y in lines:
        column: list[float | None] = [None] * len(every)
        for place, value in zip(np.searchsorted(every, x).tolist(), y.tolist(), strict=True):
            column[place] = round(value, 6)
        found.append(column)
    return found


def of_run(records: Records, over: str) -> dict[str, Any]:
    """Return the chart of one run: training returns, evaluations with their deviation, target and changed settings."""
    x, mean, std = evaluations(records, over)
    lines = (thin(returns(records, over)), (x, mean), (x, mean - std), (x, mean + std))
    target = records.config.stop.return_
    return {"data": columns(*lines), "axis": AXES[over], "target": target, "marks": changes(records, over)}


def of_runs(runs: Sequence[Records], over: str) -> dict[str, Any]:
    """Return the chart of several runs: their training returns."""
    lines = [thin(returns(records, over)) for records in runs]
    return {"data": columns(*lines), "axis": AXES[over], "labels": [records.state.run for records in runs]}


def of_figure(records: Records, over: str, name: str) -> dict[str, Any]:
    """Return the chart of one of the learner's figures."""
    return {"data": columns(thin(figure(records, over, name))), "axis": AXES[over], "labels": [name]}


def sparkline(values: Sequence[float], width: int = 120, height: int = 28) -> str:
    """Return the points of an SVG polyline; empty for fewer than two values."""
    finite = [value for value in values if np.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    step = width / (len(finite) - 1)
    return " ".join(
        f"{place * step:.1f},{height - 2 - (height - 4) * (value - low) / span:.1f}"
        for place, value in enumerate(finite)
    )
