"""Learning curves as PNG: returns over seconds and over environment steps, of one run or of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.runs.records import Records, shown
from ddrl.store.evaluations import INFO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOW = 20  # episodes of the trailing mean
MAX_POINTS = 2_000  # of the line of a run
LEGEND_ROWS = 12  # more runs take another column of the legend
PANELS = {"time_s": "seconds since the first environment step", "env_steps": "environment steps"}
_BLUE, _ORANGE, _GREEN, _GREY, CHANGE_COLOR = "#2f6fb0", "#d9822b", "#2a9d5c", "#6b7280", "#7a3e9d"
# Safe for color-blind readers (Okabe and Ito 2008), without the yellow, which is too pale on white.
_RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4b5563")
_RUN_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
LABEL_WIDTH = 0.026  # of one line of a changed setting's label, in widths of a panel
LABEL_LINES = 4  # at most
LABEL_LENGTH = 40  # characters of one
MAX_LABELS = 12


def trailing_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return the mean of the last `window` values at each index."""
    means, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        means.append(total / min(i + 1, window))
    return means


def plot_run(records: Records) -> bytes:
    """Return a plot of one run as PNG: training returns, their mean, evaluations, the target and changed settings.

    Below that each of `env.metrics`.
    """
    state, config = records.state, records.config
    task = f"{config.env.id}, {str(config.algorithm['name']).upper()}, seed {config.seed}"
    rows = {name: partial(draw_metric, name=name) for name in config.env.metrics}
    title = f"{task}    {state.run}: {state.outcome or state.status}"
    figure = _panels((11, 4.4 + 2.2 * len(rows)), title, records, {"episode return": draw_run, **rows})
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        _legend_below(figure, handles, labels, columns=len(handles))
    picture = BytesIO()
    figure.savefig(picture, dpi=130)
    return picture.getvalue()


def plot_runs(runs: Mapping[str, Records], path: Path) -> None:
    """Plot several runs, each in its color: lines are smoothed training returns, marks are evaluations.

    Args:
        runs: label in the legend -> history.
        path: its folder must exist.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.lines import Line2D

    columns = -(-len(runs) // LEGEND_ROWS)
    height = 4.6 + 0.21 * -(-len(runs) // columns)
    envs = dict.fromkeys(each.config.env.id for each in runs.values())
    figure = _panels((12, height), ", ".join(envs), [*runs.values()], {"episode return": draw_runs})
    handles = [Line2D([], [], **_style(number), linewidth=2.2) for number in range(len(runs))]
    _legend_below(figure, handles, list(runs), columns=columns)
    marks = [Line2D([], [], color=_GREY, linewidth=2.2), Line2D([], [], color=_GREY, marker="o", linewidth=0)]
    labels = ["training, smoothed", "evaluation (± std)"]
    # Above the panel, where it hides no points.
    figure.axes[1].legend(
        marks, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=130)


def draw_run(axes: Axes, records: Records, over: str) -> None:
    """Draw one run on one panel; `over` is a key of PANELS."""
    returns, evaluated = [row["return"] for row in records.episodes], records.evaluated
    if returns:
        xs, label = [row[over] for row in records.episodes], "training episode"
        axes.scatter(xs, returns, s=7, color=_BLUE, alpha=0.22, linewidths=0, label=label, rasterized=True)
    _draw_mean(axes, records, over, WINDOW, color=_BLUE, label=f"training, mean of {WINDOW}")
    confirmed = [row for row in evaluated if row["purpose"] == "confirm"]
    others = [row for row in evaluated if row["purpose"] != "confirm"]
    _draw_evaluations(axes, others, over, color=_ORANGE, label="evaluation (± std)")
    _draw_evaluations(axes, confirmed, over, color=_GREEN, fmt="D", label="confirmation (± std)")
    cut = len(returns) // 100  # the lowest and highest 1 % may lie outside
    _finish(axes, [records], sorted(returns)[cut : len(returns) - cut])
    _draw_changes(axes, records, over)


def draw_runs(axes: Axes, runs: Sequence[Records], over: str) -> None:
    """Draw several runs on one panel; `over` is a key of PANELS."""
    levels: list[float] = []
    for number, records in enumerate(runs):
        style, window = _style(number), max(WINDOW, len(records.episodes) // 40)
        levels += _draw_mean(axes, records, over, window, alpha=0.9, **style)
        _draw_evaluations(axes, records.evaluated, over, color=style["color"], alpha=0.85)
    _finish(axes, runs, levels)


def draw_metric(axes: Axes, records: Records, over: str, name: str) -> None:
    """Draw the means of one of `env.metrics` in training and evaluations on one panel; `over` is a key of PANELS."""
    for rows, form, color in ((records.figures, "-", _BLUE), (records.evaluated, "o", _ORANGE)):
        points = [(row[over], row[INFO + name]) for row in rows if INFO + name in row]
        axes.plot(*np.array(points).reshape(-1, 2).T, form, color=color, linewidth=1.8)
    axes.set_xlim(left=0)


def _panels(
    size: tuple[float, float], title: str, data: Any, rows: Mapping[str, Callable[[Axes, Any, str], None]]
) -> Figure:
    """Return a figure with a row for each label, of a panel for each of PANELS, drawn by `draw(axes, data, over)`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    ratios = [2] + [1] * (len(rows) - 1)
    panels = figure.subplots(len(rows), 2, sharex="col", sharey="row", height_ratios=ratios, squeeze=False)
    for row, (name, draw) in zip(panels, rows.items(), strict=True):
        row[0].set_ylabel(name)
        for axes, over in zip(row, PANELS, strict=True):
            axes.grid(True, color="#e5e7eb", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.02)
            draw(axes, data, over)
    for axes, label in zip(panels[-1], PANELS.values(), strict=True):
        axes.set_xlabel(label)
    panels[-1, 1].xaxis.set_major_formatter(lambda value, _: _steps(value))
    figure.suptitle(title, fontsize=11)
    return figure


def _legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[Any], *, columns: int) -> None:
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _draw_mean(axes: Axes, records: Records, over: str, window: int, **style: Any) -> list[float]:
    """Draw the trailing mean of the training returns, one point a fragment; return its values."""
    means = trailing_mean([row["return"] for row in records.episodes], window)
    begin = WINDOW // 4 if len(means) > WINDOW else 0  # the mean of few episodes is noise
    xs = [row[over] for row in records.episodes]
    line = dict(zip(xs[begin:], means[begin:], strict=True))  # the last of a fragment's means
    every = max(1, len(line) // MAX_POINTS)
    xs, means = [*line][::every], [*line.values()][::every]
    if means:
        axes.plot(xs, means, linewidth=1.8, **style)
    return means


def _draw_evaluations(axes: Axes, rows: Sequence[Mapping[str, Any]], over: str, **style: Any) -> None:
    """Draw means with their standard deviations."""
    marks: dict[str, Any] = {"fmt": "o", "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 0.8}
    bars = {"elinewidth": 1.1, "capsize": 2.5, "zorder": 4}
    if rows:
        xs, means, stds = ([row[name] for row in rows] for name in (over, "return_mean", "return_std"))
        axes.errorbar(xs, means, stds, **(marks | bars | style))


def _finish(axes: Axes, runs: Sequence[Records], levels: Iterable[float]) -> None:
    """Draw the targets, and set the range of the axis: levels, targets and evaluations with their deviation."""
    targets = sorted({each.config.stop.return_ for each in runs if each.config.stop.return_ is not None})
    for target in targets:
        label = f"target {target:g}"
        axes.axhline(target, color=_GREY, linestyle=(0, (5, 3)), linewidth=1.2, label=label, zorder=1)
    evaluated = [row for each in runs for row in each.evaluated]
    levels = [*levels, *targets, *(row["return_mean"] for row in evaluated)]
    levels += [row["return_mean"] + row["return_std"] for row in evaluated]
    low, high = min(levels, default=0.0), max(levels, default=1.0)
    margin = 0.06 * (high - low) or max(1.0, 0.1 * abs(high))
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(left=0)
    if not any(each.episodes or each.evaluated for each in runs):
        axes.text(0.5, 0.6, "no episode has ended", transform=axes.transAxes, ha="center", color=_GREY)


def _draw_changes(axes: Axes, records: Records, over: str) -> None:
    """Draw a line for each changed setting, with its new value where the curve is not."""
    left, right = axes.get_xlim()  # a worker may write others, at which no text can be drawn
    changes = sorted((row for row in records.changes if left <= row[over] <= right), key=itemgetter(over))
    if changes:
        style: dict[str, Any] = {"color": CHANGE_COLOR, "linewidth": 0.9, "alpha": 0.7, "zorder": 1.5}
        xs, height = [row[over] for row in changes], axes.get_xaxis_transform()
        axes.vlines(xs, 0, 1, transform=height, label="setting changed", **style)
    column = LABEL_WIDTH * (right - left)
    labels = _labels(changes, over, column)
    middle = sum(axes.get_ylim()) / 2
    for x, texts in labels if len(labels) <= MAX_LABELS else []:  # journal.csv has them all
        near = [row["return"] for row in records.episodes if abs(row[over] - x) < 0.1 * (right - left)]
        is_low = bool(near) and sum(near) / len(near) > middle
        fits = x + len(texts) * column < right
        axes.annotate(
            "\n".join(texts if fits else reversed(texts)),
            (x, 0.015 if is_low else 0.985),
            (3 if fits else -3, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            rotation=90,
            ha="left" if fits else "right",
            va="bottom" if is_low else "top",
            fontsize=7.5,
            parse_math=False,
            color=CHANGE_COLOR,
            linespacing=1.1,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.6},
            zorder=5,
        )


def _labels(changes: Sequence[Mapping[str, Any]], over: str, column: float) -> list[tuple[float, list[str]]]:
    """Return each label's position and lines, each `column` wide; changes close together share a label."""
    labels: list[tuple[float, list[str]]] = []
    for row in changes:
        text = f"{row['option'].removeprefix('algorithm.')} {shown(row['to'])}"[:LABEL_LENGTH]
        if labels and row[over] < labels[-1][0] + min(len(labels[-1][1]), LABEL_LINES) * column:
            labels[-1][1].append(text)
        else:
            labels.append((row[over], [text]))
    most = LABEL_LINES - 1
    for _, texts in labels:
        if len(texts) > LABEL_LINES:
            texts[most:] = [f"and {len(texts) - most} more"]
    return labels


def _style(number: int) -> dict[str, Any]:
    """Return the color of a run, and a dash pattern once the colors are used up."""
    dashes = _RUN_DASHES[number // len(_RUN_COLORS) % len(_RUN_DASHES)]
    return {"color": _RUN_COLORS[number % len(_RUN_COLORS)], "linestyle": dashes}


def _steps(value: float) -> str:
    """Return steps as 500, 20k or 1.5M."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
