"""The learning curve of a run: returns over seconds and over environment steps, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddrl.runs.records import Records, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 20  # episodes of the trailing mean
_BLUE, _ORANGE, _GREEN, _GREY, CHANGE_COLOR = "#2f6fb0", "#d9822b", "#2a9d5c", "#6b7280", "#7a3e9d"
LABEL_WIDTH = 0.026  # of one line of a label, in widths of a panel
LABEL_LINES = 4  # at most
MAX_LABELS = 12


def plot(records: Records, path: Path) -> Path:
    """Draw return against seconds and against env steps, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    left, right = figure.subplots(1, 2, sharey=True)
    draw(left, records, "time_s")
    draw(right, records, "env_steps")
    left.set_xlabel("seconds since the first environment step")
    right.set_xlabel("environment steps")
    left.set_ylabel("episode return")
    state, config = records.state, records.config
    figure.suptitle(
        f"{config.env.id}, {str(config.algorithm.get('name')).upper()}, seed {config.seed}    "
        f"{state.run}: {state.status}",
        fontsize=11,
    )
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9
        )
    figure.savefig(path, dpi=130)
    return path


def draw(axes: Axes, records: Records, over: str) -> None:
    """Draw one panel: training returns, their trailing mean, evaluations with error bars, the target."""
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    if over == "env_steps":
        axes.xaxis.set_major_formatter(
            lambda value, _: f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"
        )
    returns = [row["return"] for row in records.episodes]
    if returns:
        xs = [row[over] for row in records.episodes]
        axes.scatter(
            xs, returns, s=7, color=_BLUE, alpha=0.22, linewidths=0, label="training episode", rasterized=True
        )
        means = _trailing_mean(returns)
        begin = WINDOW // 4 if len(returns) > WINDOW else 0  # the mean of few episodes is noise
        axes.plot(xs[begin:], means[begin:], color=_BLUE, linewidth=1.8, label=f"training, mean of {WINDOW}")
    watched = [row for row in records.evaluated if row["purpose"] != "confirm"]
    confirmed = [row for row in records.evaluated if row["purpose"] == "confirm"]
    for rows, color, marker, label in (
        (watched, _ORANGE, "o", "evaluation (± std)"),
        (confirmed, _GREEN, "D", "confirmation (± std)"),
    ):
        if rows:
            axes.errorbar(
                [row[over] for row in rows],
                [row["return_mean"] for row in rows],
                [row["return_std"] for row in rows],
                fmt=marker,
                color=color,
                markersize=6,
                markeredgecolor="white",
                markeredgewidth=0.8,
                elinewidth=1.2,
                capsize=2.5,
                label=label,
                zorder=4,
            )
    target = records.config.stop.return_
    if target is not None:
        axes.axhline(
            target, color=_GREY, linestyle=(0, (5, 3)), linewidth=1.2, label=f"target {target:g}", zorder=1
        )
    low, high = _visible(returns, records.evaluated, target)
    axes.set_ylim(low, high)
    axes.set_xlim(left=0)
    _draw_changes(axes, records, over)
    if not returns and not records.evaluated:
        axes.text(
            0.5, 0.6, "no episode has ended", transform=axes.transAxes, ha="center", va="center", color=_GREY
        )


def _draw_changes(axes: Axes, records: Records, over: str) -> None:
    """Draw a line for each changed setting, with its new value where the curve is not."""
    changes = sorted(records.changes, key=lambda row: row[over])
    lines = [
        axes.axvline(row[over], color=CHANGE_COLOR, linewidth=0.9, alpha=0.7, zorder=1.5) for row in changes
    ]
    if lines:
        lines[0].set_label("setting changed")
    left, right = axes.get_xlim()
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
            color=CHANGE_COLOR,
            linespacing=1.1,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.6},
            zorder=5,
        )


def _labels(changes: Sequence[Mapping[str, Any]], over: str, column: float) -> list[tuple[float, list[str]]]:
    """Return each label's position and lines, each `column` wide; changes close together share a label."""
    labels: list[tuple[float, list[str]]] = []
    for row in changes:
        text = f"{row['option'].removeprefix('algorithm.')} {shown(row['to'])}"
        if labels and row[over] < labels[-1][0] + min(len(labels[-1][1]), LABEL_LINES) * column:
            labels[-1][1].append(text)
        else:
            labels.append((row[over], [text]))
    most = LABEL_LINES - 1
    return [
        (x, texts if len(texts) <= LABEL_LINES else [*texts[:most], f"and {len(texts) - most} more"])
        for x, texts in labels
    ]


def _trailing_mean(values: Sequence[float]) -> list[float]:
    """Return for each i the mean of the last WINDOW values up to i."""
    return [
        sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - WINDOW) : i + 1])
    ]


def _visible(
    returns: Sequence[float], evaluated: Sequence[Mapping[str, Any]], target: float | None
) -> tuple[float, float]:
    """Return the range of the axis: every mean, the target, training returns without the lowest and highest 1 %."""
    ordered = sorted(returns)
    cut = len(ordered) // 100
    levels = [*ordered[cut : len(ordered) - cut], *(row["return_mean"] for row in evaluated)]
    levels += [row["return_mean"] + row["return_std"] for row in evaluated]
    levels += [] if target is None else [target]
    low, high = min(levels, default=0.0), max(levels, default=1.0)
    margin = 0.06 * (high - low) or max(1.0, 0.1 * abs(high))
    return low - margin, high + margin
