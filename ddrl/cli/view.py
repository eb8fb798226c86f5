"""The live views: one run with its curve, figures and evaluations; several runs as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddrl.cli.output import counted, duration, number, rate, size
from ddrl.cli.watcher import Figures
from ddrl.config import RunConfig

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COLORS = {"active": "cyan", "solved": "bold green", "failed": "bold red", "paused": "yellow"}
NOTICES = 2  # number shown, the newest

# Metrics of the learner with a cell of their own; all others are the algorithm's.
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


def one_run(figures: Figures, *, width: int, height: int) -> RenderableType:
    """Return the view of one run: curve, figures, last evaluations, notices and hint."""
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
    messages = _messages(figures)
    message_lines = sum(1 + len(text) // inner for text, _ in messages)
    # The rest of the height: borders, legend, blank lines, the last line, the prompt.
    free = height - 7 - table.row_count - len(last) - max(1, message_lines)
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
    if messages:
        parts += [Text(), *(Text(text, style=style) for text, style in messages)]
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


def _messages(figures: Figures) -> list[tuple[str, str]]:
    """Return (text, style) of the newest notices, then of the hint or the reason."""
    shown = [(text, "dim") for text in figures.notices[-NOTICES:]]
    if figures.hint:
        return [*shown, (figures.hint, "yellow")]
    return [*shown, (figures.state.reason, "dim")] if figures.state.reason else shown


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
    """Return the number of processes, and of those that play this run if not all do."""
    there = sum(worker.num_players for worker in figures.serving)
    text = counted(there, "process", "es")
    all_play = figures.state.ended or figures.num_playing >= there
    return text if all_play else f"{figures.num_playing} of {text}"


def play_waits(allowance: float | None, room: float | None) -> str:
    """Return the parts of the processes' time spent waiting, such as "12 %, 3 % for room"; "-" if unknown."""
    if allowance is None:
        return "-"
    return f"{100 * allowance:.0f} %" + (f", {100 * room:.0f} % for room" if room else "")


def _unusual_cells(figures: Figures) -> list[tuple[str, str]]:
    """Return cells that are shown only if there is something to show: share, crashes, waits for the server."""
    state, cells = figures.state, []
    if len(figures.loads) > 1 and not state.ended:
        now = "-" if figures.share is None else f"{100 * figures.share:.0f} %"
        cells.append(("share", f"{now} of {100 * figures.entitled:.0f} %, {state.priority}"))
    elif state.weight != 1.0 or state.priority != "normal":
        cells.append(("weight", f"{state.weight:g}, {state.priority}"))
    if state.crashes_total or state.lost_producers:
        cells.append(("crashed", f"{state.crashes_total} processes, {state.lost_producers} lost"))
    waited_s = figures.row.get("server_wait_s", 0.0)  # since the previous row
    if waited_s >= 0.05:
        cells.append(("server waits", f"{waited_s:.1f} s"))
    return cells


def _experience_cells(row: Mapping[str, Any], config: RunConfig) -> list[tuple[str, str]]:
    """Return the cells of the experience: of the replay (off-policy) or of the queue (on-policy)."""
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


def several_runs(runs: Sequence[Figures], *, width: int) -> RenderableType:
    """Return a table with a row for each run."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("seed", "status", "time", "env steps", "/s", "updates", "return", "evaluation"):
        grid.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    messages: list[Text] = []
    for figures in runs:
        state, row, seed = figures.state, figures.row, figures.config.seed
        last = figures.evaluated[-1] if figures.evaluated else None
        grid.add_row(
            f"{seed}",
            Text(state.status, style=COLORS.get(state.status, "")),
            duration(figures.elapsed_s),
            f"{figures.env_steps:,}",
            f"{row['env_steps_per_s']:.0f}" if "env_steps_per_s" in row and not state.ended else "",
            f"{figures.updates:,}",
            number(row.get("return_mean")),
            "-" if last is None else f"{last['return_mean']:.1f} v{last['version']}",
        )
        if figures.hint:
            messages.append(Text(f"seed {seed}: {figures.hint}", style="yellow"))
        elif figures.notices or (state.ended and state.reason):
            messages.append(
                Text(f"seed {seed}: {state.reason if state.ended else figures.notices[-1]}", style="dim")
            )
    config = runs[0].config
    subtitle = f"{config.env.id}, {config.algorithm.get('name')}, {len(runs)} seeds"
    title = f"{runs[0].state.run} and {len(runs) - 1} more"
    parts = Group(grid, *([Text(), *messages] if messages else []))
    return Panel(parts, title=title, subtitle=subtitle, width=width, border_style="dim")
