"""What a run leaves behind in its folder: settings, figures as CSV and TensorBoard events, curves, a summary.

Everything is read from the server, so any machine can write it, at any time, for a run in any state.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ddrl.config import RunConfig
from ddrl.store import evaluations, metrics, runs, stream
from ddrl.store.runs import RunState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from redis import Redis

log = logging.getLogger(__name__)

WINDOW = 20  # episodes of the trailing mean in the plot


@dataclass(frozen=True)
class Records:
    """All that is known of a run over time; every row has `time_s` since the first environment step.

    Attributes:
        figures: the learner's rows.
        episodes: one row per finished training episode: time_s, env_steps, return.
        evaluated: one row per evaluation.
        journal: one row per change of state or setting.
    """

    config: RunConfig
    state: RunState
    figures: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]
    journal: list[dict[str, Any]]

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Settings changed while the run went on: time_s, env_steps, option, from, to."""
        return [row for row in self.journal if row["event"] == "set"]


def summary(client: Redis, run: str, *, wall_s: float | None = None) -> dict[str, Any]:
    """The last line of `ddrl submit --json`.

    Args:
        wall_s: since the start of the command; None: since the run's creation.

    Raises:
        UnknownRunError: there is no such run.
    """
    state = runs.state(client, run)
    end_s = state.ended_s or runs.server_ms(client) / 1e3
    evaluated = state.evaluation
    return {
        "run": run,
        "status": state.status,
        "wall_s": round(end_s - state.created_s if wall_s is None else wall_s, 3),
        "train_s": round(end_s - state.first_step_s, 3) if state.first_step_s else 0.0,
        "env_steps": state.appended_steps,
        "updates": state.updates,
        "policy_version": evaluated["version"] if evaluated else state.version,
        "evaluation": {name: evaluated[name] for name in ("return_mean", "return_std", "episodes")}
        if evaluated
        else None,
        "artifacts": state.folder,
    }


def read(client: Redis, run: str) -> Records:
    """Read all that the server keeps of a run's course.

    Raises:
        UnknownRunError: there is no such run.
    """
    state = runs.state(client, run)
    start_s = state.first_step_s or state.created_s

    def since_start(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**row, "time_s": round(max(0.0, row["time_s"] - start_s), 3)}

    episodes = [
        {"time_s": row["time_s"], "env_steps": row["env_steps"], "return": value}
        for row in map(since_start, stream.episodes(client, run)[0])
        for value in row["returns"]
    ]
    return Records(
        config=runs.config(client, run),
        state=state,
        figures=[since_start(row) for row in metrics.read(client, run)[0]],
        episodes=episodes,
        evaluated=[since_start(row) for row in evaluations.results(client, run)[0]],
        journal=[_decoded(since_start(row)) for row in runs.journal(client, run)],
    )


def _decoded(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the journal with a changed setting's values as they are."""
    if row["event"] != "set":
        return row
    values = {name: json.loads(row[name]) for name in ("from", "to")}
    return {**row, **values, "env_steps": int(row["env_steps"])}


def write(client: Redis, run: str, folder: Path) -> list[Path]:
    """Write a run's artifacts; what is there is replaced.

    Args:
        folder: made if absent; the weights are not written here.

    Returns:
        The files and folders written.

    Raises:
        UnknownRunError: there is no such run.
    """
    records = read(client, run)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "config.yaml"]
    tree = records.config.model_dump(mode="json", by_alias=True)
    written[0].write_text(f"# run {run}\n" + yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    written.append(_write_csv(folder / "metrics.csv", _figure_names(records.figures), records.figures))
    written.append(_write_csv(folder / "episodes.csv", ("time_s", "env_steps", "return"), records.episodes))
    written.append(_write_csv(folder / "evaluations.csv", _EVALUATION_COLUMNS, records.evaluated))
    written.append(_write_csv(folder / "journal.csv", _JOURNAL_COLUMNS, records.journal))
    events = _write_events(folder / "tensorboard", records)
    if events is not None:
        written.append(events)
    written.append(plot(records, folder / "curve.png"))
    written.append(folder / "summary.json")
    written[-1].write_text(json.dumps(summary(client, run), indent=2) + "\n", encoding="utf-8")
    return written


_EVALUATION_COLUMNS = (
    *("time_s", "version", "purpose", "env_steps", "updates", "num_episodes", "first_seed"),
    *("return_mean", "return_std"),
)
_JOURNAL_COLUMNS = ("time_s", "event", "reason", "option", "from", "to", "env_steps")
_FIRST_COLUMNS = ("time_s", "env_steps", "updates")


def _figure_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names in the rows: time and counters first, the others as they first appear."""
    seen = dict.fromkeys(_FIRST_COLUMNS)
    for row in rows:
        seen.update(dict.fromkeys(row))
    return list(seen)


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _write_events(folder: Path, records: Records) -> Path | None:
    """TensorBoard events, over env steps; None where the extra is missing.

    The writer of the `tensorboard` package itself: `torch.utils.tensorboard` needs torch for the same bytes.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto
    except ImportError:
        log.info("no TensorBoard events: pip install 'ddrl[tensorboard]'")
        return None
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    start_s = records.state.first_step_s or records.state.created_s
    writer = EventFileWriter(str(folder))
    try:
        for time_s, env_steps, values in _event_rows(records):
            scalars = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
            writer.add_event(
                Event(wall_time=start_s + time_s, step=env_steps, summary=Summary(value=scalars))
            )
        for row in records.changes:
            text = Summary.Value(
                tag="settings",
                metadata=create_summary_metadata("settings", "changed while the run went on"),
                tensor=make_tensor_proto([f"{row['option']}: {_shown(row['from'])} -> {_shown(row['to'])}"]),
            )
            event = Event(
                wall_time=start_s + row["time_s"], step=row["env_steps"], summary=Summary(value=[text])
            )
            writer.add_event(event)
    finally:
        writer.close()
    return folder


def _event_rows(records: Records) -> Iterable[tuple[float, int, dict[str, float]]]:
    for row in records.figures:
        named = {
            n: v for n, v in row.items() if n not in ("time_s", "env_steps") and isinstance(v, (int, float))
        }
        yield (
            row["time_s"],
            int(row.get("env_steps", 0)),
            {f"learner/{name}": value for name, value in named.items()},
        )
    for row in records.episodes:
        yield row["time_s"], row["env_steps"], {"return/training": row["return"]}
    for row in records.evaluated:
        tag = "confirmation" if row["purpose"] == "confirm" else "evaluation"
        yield row["time_s"], row["env_steps"], {f"return/{tag}": row["return_mean"]}


# --- the plot --------------------------------------------------------------------------------------------

_BLUE, _ORANGE, _GREEN, _GREY, _VIOLET = "#2f6fb0", "#d9822b", "#2a9d5c", "#6b7280", "#7a3e9d"
LABEL_WIDTH = 0.026  # of a line of a changed setting's label, in widths of a panel
LABEL_LINES = 4
MOST_LABELS = 12


def plot(records: Records, path: Path) -> Path:
    """Draw return against seconds and against env steps, side by side, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, records, "time_s")
    _draw(right, records, "env_steps")
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


def _draw(axes: Axes, records: Records, over: str) -> None:
    """One panel: training returns, their trailing mean, evaluations with error bars, the target."""
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
        begin = WINDOW // 4 if len(returns) > WINDOW else 0  # the mean of one or two episodes says little
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
    """A thin line for each setting that was changed, and what it became, away from the curve."""
    changes = sorted(records.changes, key=lambda row: row[over])
    lines = [axes.axvline(row[over], color=_VIOLET, linewidth=0.9, alpha=0.7, zorder=1.5) for row in changes]
    if lines:
        lines[0].set_label("setting changed")
    left, right = axes.get_xlim()
    column = LABEL_WIDTH * (right - left)
    labels = _labels(changes, over, column)
    middle = sum(axes.get_ylim()) / 2
    for x, texts in labels if len(labels) <= MOST_LABELS else []:  # journal.csv has them all
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
            color=_VIOLET,
            linespacing=1.1,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.6},
            zorder=5,
        )


def _labels(changes: Sequence[Mapping[str, Any]], over: str, column: float) -> list[tuple[float, list[str]]]:
    """Where a label begins and its lines, each `column` wide; changes too close for one of their own share one."""
    labels: list[tuple[float, list[str]]] = []
    for row in changes:
        text = f"{row['option'].removeprefix('algorithm.')} {_shown(row['to'])}"
        if labels and row[over] < labels[-1][0] + min(len(labels[-1][1]), LABEL_LINES) * column:
            labels[-1][1].append(text)
        else:
            labels.append((row[over], [text]))
    most = LABEL_LINES - 1
    return [
        (x, texts if len(texts) <= LABEL_LINES else [*texts[:most], f"and {len(texts) - most} more"])
        for x, texts in labels
    ]


def _shown(value: Any) -> str:
    """A setting in few letters."""
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _trailing_mean(values: Sequence[float]) -> list[float]:
    """[i] = mean of the last WINDOW values up to and with i."""
    return [
        sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - WINDOW) : i + 1])
    ]


def _visible(
    returns: Sequence[float], evaluated: Sequence[Mapping[str, Any]], target: float | None
) -> tuple[float, float]:
    """The range worth seeing: training returns but their worst and best hundredth, every mean, the target."""
    ordered = sorted(returns)
    cut = len(ordered) // 100
    levels = [*ordered[cut : len(ordered) - cut], *(row["return_mean"] for row in evaluated)]
    levels += [row["return_mean"] + row["return_std"] for row in evaluated]
    levels += [] if target is None else [target]
    low, high = min(levels, default=0.0), max(levels, default=1.0)
    margin = 0.06 * (high - low) or max(1.0, 0.1 * abs(high))
    return low - margin, high + margin
