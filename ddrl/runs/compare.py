"""A plot of several runs: return over seconds and over environment steps, one color per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 20  # episodes of the trailing mean, or a fortieth of the run if that is more
MAX_POINTS = 2_000  # per line
LEGEND_ROWS = 12  # more runs take another column of the legend
# Safe for color-blind readers (Okabe and Ito 2008), without the yellow, which is too pale on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4b5563")
_GREY, _GRID = "#6b7280", "#e5e7eb"
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_PANELS = ((0, "seconds since the first environment step"), (1, "environment steps"))


@dataclass(frozen=True)
class Curve:
    """The data of one run.

    Attributes:
        label: in the legend.
        episodes: (seconds, env steps, return) of finished training episodes, in order.
        evaluated: (seconds, env steps, mean return, standard deviation) of evaluations.
        target: return at which the run is solved, if any.
    """

    label: str
    episodes: Sequence[tuple[float, float, float]]
    evaluated: Sequence[tuple[float, float, float, float]]
    target: float | None = None


def plot(curves: Sequence[Curve], path: Path, *, title: str) -> Path:
    """Plot runs as PNG: lines are smoothed training returns, marks are evaluations.

    Args:
        path: its folder must exist.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = -(-len(curves) // LEGEND_ROWS)
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(12, 4.6 + 0.21 * rows), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (over, label) in zip(panels, _PANELS, strict=True):
        _prepare(axes, curves)
        axes.set_xlabel(label)
        for number, curve in enumerate(curves):
            _draw(axes, curve, over, number)
        axes.set_xlim(left=0)
    panels[1].xaxis.set_major_formatter(lambda value, _: _steps(value))
    panels[0].set_ylabel("episode return")
    figure.suptitle(title, fontsize=12)
    handles = [Line2D([], [], **_style(number), linewidth=2.2) for number in range(len(curves))]
    labels = [curve.label for curve in curves]
    marks: dict[str, dict[str, Any]] = {
        "training, smoothed": {"linewidth": 2.2},
        "evaluation (± std)": {"marker": "o", "linewidth": 0},
    }
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    panels[1].legend(
        [Line2D([], [], color=_GREY, **mark) for mark in marks.values()],
        list(marks),
        loc="lower right",
        fontsize=8,
        framealpha=0.85,
        edgecolor="none",
    )
    figure.savefig(path, dpi=130)
    return path


def _prepare(axes: Axes, curves: Sequence[Curve]) -> None:
    """Set up grid, range and targets of a panel."""
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    targets = sorted({curve.target for curve in curves if curve.target is not None})
    for target in targets:
        axes.axhline(target, color=_GREY, linestyle=(0, (5, 3)), linewidth=1.1, zorder=1)
    if not any(curve.episodes or curve.evaluated for curve in curves):
        axes.text(0.5, 0.6, "no episode has ended", transform=axes.transAxes, ha="center", color=_GREY)
        return
    levels = [*targets]
    for curve in curves:
        levels += list(_line(curve)[1])
        levels += [mean for _, _, mean, _ in curve.evaluated]
        levels += [mean + std for _, _, mean, std in curve.evaluated]
    low, high = min(levels), max(levels)
    margin = 0.06 * (high - low) or max(1.0, 0.1 * abs(high))
    axes.set_ylim(low - margin, high + margin)


def _draw(axes: Axes, curve: Curve, over: int, number: int) -> None:
    """Draw one run in one panel; `over` is the index of its x values: 0 seconds, 1 env steps."""
    style = _style(number)
    rows, means = _line(curve)
    if rows:
        axes.plot([row[over] for row in rows], means, **style, linewidth=1.7, alpha=0.9, zorder=3)
    if curve.evaluated:
        axes.errorbar(
            [row[over] for row in curve.evaluated],
            [row[2] for row in curve.evaluated],
            [row[3] for row in curve.evaluated],
            fmt="o",
            color=style["color"],
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.7,
            elinewidth=1.0,
            capsize=2.0,
            alpha=0.85,
            zorder=4,
        )


def _line(curve: Curve) -> tuple[Sequence[tuple[float, float, float]], np.ndarray]:
    """Return episodes and smoothed returns to draw: at most MAX_POINTS, one for each fragment."""
    rows, means = curve.episodes, smoothed([value for *_, value in curve.episodes])
    begin = WINDOW // 4 if len(means) > WINDOW else 0  # the mean of few episodes is noise
    ends = [i for i in range(begin, len(rows)) if i + 1 == len(rows) or rows[i][:2] != rows[i + 1][:2]]
    kept = ends[:: max(1, len(ends) // MAX_POINTS)]
    return [rows[i] for i in kept], means[kept]


def smoothed(returns: Sequence[float]) -> np.ndarray:
    """Return [N] trailing means over WINDOW returns, or over a fortieth of all if that is more."""
    if not len(returns):
        return np.zeros(0)
    window = max(WINDOW, len(returns) // 40)
    total = np.concatenate(([0.0], np.cumsum(returns)))
    end = np.arange(1, len(returns) + 1)
    begin = np.maximum(0, end - window)
    means: np.ndarray = (total[end] - total[begin]) / (end - begin)
    return means


def _style(number: int) -> dict[str, Any]:
    """Return the color of a run, and a dash pattern once the colors are used up."""
    return {
        "color": COLORS[number % len(COLORS)],
        "linestyle": _DASHES[number // len(COLORS) % len(_DASHES)],
    }


def _steps(value: float) -> str:
    """Return steps as 500, 20k or 1.5M."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
