"""The live view of one run: curve, figures, evaluations, and what is amiss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddrl.cli.live import rate
from ddrl.cli.output import duration, number, size
from ddrl.cli.watcher import Figures
from ddrl.config import RunConfig

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COLORS = {"active": "cyan", "solved": "bold green", "failed": "bold red", "paused": "yellow"}
NOTICES = 2  # the newest ones

# Figures of the learner with a place of their own in the view; all others are the algorithm's.
_NAMED = (
    "env_steps",
    "updates",
    "env_steps_per_s",
    "updates_per_s",
    "samples_per_insert",
    "staleness",
    "max_staleness",
    "dropped",
    "queued_steps",
    "return_mean",
    "replay_size",
    "replay_bytes",
    "learner_wait",
    "server_wait_s",
    "admitted",
    "dead",
    "version",
    "elapsed_s",
)


def view(figures: Figures, *, width: int, height: int) -> RenderableType:
    """The live view: curve, figures, last evaluations."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from ddrl.cli import curve

    state, config = figures.state, figures.config
    inner = max(40, min(width, 140) - 4)
    marks = [
        (max(0.0, e["time_s"] - figures.start_s), float(e["return_mean"]), e["purpose"] == "confirm")
        for e in figures.evaluated
    ]
    roomy = height >= 32
    table = _figures_table(figures, columns=3 if inner >= 100 else 2, others=roomy)
    last = figures.evaluated[-3 if roomy else -1 :]
    said = _words(figures)
    said_lines = sum(1 + len(text) // inner for text, _ in said)
    # Besides: borders, legend, blank lines, the last line, the prompt.
    free = height - 7 - table.row_count - len(last) - max(1, said_lines)
    drawing = curve.draw(
        figures.returns, marks, width=inner, height=max(4, min(14, free)), target=config.stop.return_
    )
    legend = Text("return: ", style="dim", no_wrap=True)
    legend.append("⠤ ", style="cyan").append(f"training, mean of {curve.WINDOW}  ", style="dim")
    legend.append("● ", style="bold yellow").append("evaluation  ", style="dim")
    legend.append("◆ ", style="bold green").append("confirmed  ", style="dim")
    if config.stop.return_ is not None:
        legend.append("╌ ", style="green").append(f"target {config.stop.return_:g}", style="dim")
    parts: list[RenderableType] = [legend, drawing, Text(), table]
    if last:
        parts += [Text(), _evaluations_table(last)]
    if said:
        parts += [Text(), *(Text(text, style=style) for text, style in said)]
    title = Text.assemble(
        (state.run, "bold"),
        "  ",
        (state.status, COLORS.get(state.status, "")),
        "  ",
        duration(figures.elapsed_s),
    )
    if figures.left_s is not None and not state.ended:
        title.append(f", {duration(figures.left_s)} left")
    subtitle = f"{config.env.id}, {config.algorithm.get('name')}, seed {config.seed}"
    return Panel(Group(*parts), title=title, subtitle=subtitle, width=inner + 4, border_style="dim")


def _words(figures: Figures) -> list[tuple[str, str]]:
    """What is said below the figures, and in which style: the newest notices, then the hint or the reason."""
    said = [(text, "dim") for text in figures.notices[-NOTICES:]]
    if figures.hint:
        return [*said, (figures.hint, "yellow")]
    return [*said, (figures.state.reason, "dim")] if figures.state.reason else said


def _figures_table(figures: Figures, *, columns: int, others: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    state, row, config = figures.state, figures.row, figures.config
    wait = row.get("learner_wait")
    cells = [
        ("env steps", f"{figures.env_steps:,}{rate(row, 'env_steps_per_s', state.ended)}"),
        ("updates", f"{figures.updates:,}{rate(row, 'updates_per_s', state.ended)}"),
        ("return", number(row.get("return_mean"))),
        ("version", f"{state.version}" if state.version >= 0 else "-"),
        *_experience_cells(row, config),
        ("stream", f"{size(state.live_bytes)} of {size(config.replay.max_bytes)}"),
        ("learner waits", "-" if wait is None else f"{100 * wait:.0f} %"),
        ("play waits", play_waits(figures.allowance_wait, figures.room_wait)),
        ("workers", f"{len(figures.serving)} ({_processes(figures)})"),
        *_unusual_cells(figures),
    ]
    if others:
        cells += [(name, f"{value:.4g}") for name, value in row.items() if _is_other(name, value)]
    grid = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True)
    for start in range(0, len(cells), columns):
        grid.add_row(*(Text(part) for cell in cells[start : start + columns] for part in cell))
    return grid


def _processes(figures: Figures) -> str:
    """How many there are, and how many of them play this run where that is not all."""
    there = sum(worker.num_players for worker in figures.serving)
    words = f"{there} process{'es' if there != 1 else ''}"
    return (
        words if figures.state.ended or figures.num_playing >= there else f"{figures.num_playing} of {words}"
    )


def play_waits(allowance: float | None, room: float | None) -> str:
    """Such as 12 % for the learner, 3 % for room: parts of the processes' time; a dash while nothing is known."""
    if allowance is None:
        return "-"
    return f"{100 * allowance:.0f} %" + (f", {100 * room:.0f} % for room" if room else "")


def _unusual_cells(figures: Figures) -> list[tuple[str, str]]:
    """What is shown only where it says something: rivals, crashes, waits for the server."""
    state, cells = figures.state, []
    if len(figures.rivals) > 1 and not state.ended:
        now = "-" if figures.share is None else f"{100 * figures.share:.0f} %"
        cells.append(("share", f"{now} of {100 * figures.entitled:.0f} %, {state.priority}"))
    elif state.weight != 1.0 or state.priority != "normal":
        cells.append(("weight", f"{state.weight:g}, {state.priority}"))
    if state.crashes_total or state.lost_producers:
        cells.append(("ended badly", f"{state.crashes_total} crashed, {state.lost_producers} lost"))
    waited_s = figures.row.get("server_wait_s", 0.0)  # since the row before
    if waited_s >= 0.05:
        cells.append(("server waits", f"{waited_s:.1f} s"))
    return cells


def _experience_cells(row: Mapping[str, Any], config: RunConfig) -> list[tuple[str, str]]:
    """How fresh and how much the experience is: off-policy a replay, on-policy a queue."""
    if "queued_steps" not in row:
        return [
            (
                "samples/insert",
                f"{number(row.get('samples_per_insert'))} of {config.replay.samples_per_insert:g}",
            ),
            ("staleness", f"{number(row.get('staleness'))} versions"),
            ("replay", f"{int(row.get('replay_size', 0)):,} of {config.replay.capacity:,}"),
            ("replay memory", size(row.get("replay_bytes", 0))),
        ]
    bound = config.on_policy.max_staleness
    return [
        ("queued", f"{int(row['queued_steps']):,} steps"),
        (
            "staleness",
            f"{number(row.get('staleness'))}, at most {number(row.get('max_staleness'))} of {bound} versions",
        ),
        ("too stale", f"{int(row['dropped']):,} fragments dropped"),
    ]


def _evaluations_table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 3, 0, 0))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    for row in reversed(rows):
        grid.add_row(
            f"{'confirmation' if row['purpose'] == 'confirm' else 'evaluation'} v{row['version']}",
            f"{row['return_mean']:.1f} ± {row['return_std']:.1f}",
            f"{row['num_episodes']} episodes",
            f"at {row['env_steps']:,} steps",
        )
    return grid


def _is_other(name: str, value: Any) -> bool:
    return name not in _NAMED and isinstance(value, (int, float))
