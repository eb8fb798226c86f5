"""Following a run until it ends: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddrl.cli.output import Client, duration, number, size
from ddrl.cli.watcher import Figures, Watcher
from ddrl.config import RunConfig
from ddrl.store.connection import UNREACHABLE
from ddrl.store.runs import RunState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

POLL_S = 0.5
TICK_S = 0.2
LINE_S = 5.0
OUTAGE_S = 60.0  # how long a server may be away, restarting say, before following ends with its error
STARTING_S = 10.0  # what the caller starts itself may take so long before its absence is worth a word

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
    "admitted",
    "dead",
    "version",
    "elapsed_s",
)
_COLORS = {"active": "cyan", "solved": "bold green", "failed": "bold red", "paused": "yellow"}


def plain_line(figures: Figures) -> str:
    """One line on where a run stands."""
    state, row = figures.state, figures.row
    parts = [duration(figures.elapsed_s)]
    if state.ended:
        parts.append(f"{state.status}: {state.reason}" if state.reason else state.status)
    if figures.env_steps or figures.updates:
        parts.append(f"env_steps {figures.env_steps}{_rate(row, 'env_steps_per_s', state.ended)}")
        parts.append(f"updates {figures.updates}{_rate(row, 'updates_per_s', state.ended)}")
        if "return_mean" in row:
            parts.append(f"return {row['return_mean']:.1f}")
        if figures.evaluated:
            last = figures.evaluated[-1]
            parts.append(f"eval {last['return_mean']:.1f}@v{last['version']}")
        if "staleness" in row:
            parts.append(f"staleness {row['staleness']:.1f}")
        if row.get("dropped"):
            parts.append(f"dropped {row['dropped']:.0f}")
    if figures.hint:
        parts.append(f"({figures.hint})" if len(parts) > 1 else figures.hint)
    return "  ".join(parts)


def closing_lines(summary: Mapping[str, Any]) -> str:
    """What a run came to, for people.

    Args:
        summary: of `ddrl.artifacts`.
    """
    evaluated, run = summary["evaluation"], summary["run"]
    lines = [
        f"{run}: {summary['status']} after {duration(summary['train_s'])} of training, "
        f"{summary['env_steps']:,} env steps, {summary['updates']:,} updates"
    ]
    if evaluated:
        lines.append(
            f"policy version {summary['policy_version']}: return {evaluated['return_mean']:.1f} "
            f"± {evaluated['return_std']:.1f} over {evaluated['episodes']} episodes"
        )
    if summary["artifacts"]:
        lines.append(f"artifacts in {summary['artifacts']}")
    more = {"failed": "", "stopped": "", "time": " --time 10m"}.get(summary["status"])
    if more is not None:
        lines.append(f"continue it with `ddrl resume {run}{more}`, look into it with `ddrl logs {run}`")
    return "\n".join(lines)


def follow(
    client: Client,
    run: str,
    *,
    json_output: bool,
    console: Console | None = None,
    deadline: float | None = None,
    on_tick: Callable[[], None] | None = None,
) -> RunState:
    """Show a run until it has ended.

    Args:
        json_output: leave stdout to the caller's JSON; plain lines go to stderr.
        console: where to show it; stdout by default. A live view if it is a terminal.
        deadline: of `time.monotonic()`; the state is returned then, ended or not.
        on_tick: called about every 0.2 s; what it raises passes through.

    Raises:
        UnknownRunError: there is no such run, or it was deleted meanwhile.
    """
    from rich.console import Console

    watcher = Watcher(client, run, starting_s=STARTING_S if on_tick else 0.0)
    if console is None:
        console = Console(stderr=json_output)
    if json_output or not console.is_terminal:
        file = sys.stderr if json_output else console.file
        return _loop(watcher, _Lines(file).show, deadline, on_tick)
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:

        def show(figures: Figures) -> None:
            live.update(view(figures, width=console.width, height=console.height), refresh=True)

        return _loop(watcher, show, deadline, on_tick)


def _loop(
    watcher: Watcher,
    show: Callable[[Figures], None],
    deadline: float | None,
    on_tick: Callable[[], None] | None,
) -> RunState:
    next_poll, outage_at = 0.0, None
    while True:
        if on_tick is not None:
            on_tick()
        now = time.monotonic()
        if now >= next_poll:
            try:
                figures = watcher.poll()
                outage_at = None
            except UNREACHABLE:
                outage_at = outage_at or now
                if now - outage_at > OUTAGE_S:
                    raise
                next_poll = now + POLL_S
                continue
            show(figures)
            if figures.state.ended or (deadline is not None and now >= deadline):
                return figures.state
            next_poll = now + POLL_S
        time.sleep(TICK_S)


class _Lines:
    """Prints a line at once, then every LINE_S, and one at the end."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._next = 0.0

    def show(self, figures: Figures) -> None:
        now = time.monotonic()
        if now >= self._next or figures.state.ended:
            print(plain_line(figures), file=self._file, flush=True)
            self._next = now + LINE_S


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
    free = height - 8 - table.row_count - len(last)  # borders, legend, blank lines, the last line, the prompt
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
    if figures.hint:
        parts += [Text(), Text(figures.hint, style="yellow")]
    elif state.reason:
        parts += [Text(), Text(state.reason, style="dim")]
    title = Text.assemble(
        (state.run, "bold"),
        "  ",
        (state.status, _COLORS.get(state.status, "")),
        "  ",
        duration(figures.elapsed_s),
    )
    if figures.left_s is not None and not state.ended:
        title.append(f", {duration(figures.left_s)} left")
    subtitle = f"{config.env.id}, {config.algorithm.get('name')}, seed {config.seed}"
    return Panel(Group(*parts), title=title, subtitle=subtitle, width=inner + 4, border_style="dim")


def _figures_table(figures: Figures, *, columns: int, others: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    state, row, config = figures.state, figures.row, figures.config
    processes = sum(worker.num_players for worker in figures.serving)
    wait = row.get("learner_wait")
    cells = [
        ("env steps", f"{figures.env_steps:,}{_rate(row, 'env_steps_per_s', state.ended)}"),
        ("updates", f"{figures.updates:,}{_rate(row, 'updates_per_s', state.ended)}"),
        ("return", number(row.get("return_mean"))),
        ("version", f"{state.version}" if state.version >= 0 else "-"),
        *_experience_cells(row, config),
        ("stream", f"{size(state.live_bytes)} of {size(config.replay.max_bytes)}"),
        ("learner waits", "-" if wait is None else f"{100 * wait:.0f} %"),
        ("workers", f"{len(figures.serving)} ({processes} processes)"),
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


def _rate(row: Mapping[str, Any], name: str, ended: bool) -> str:
    return f" ({row[name]:.0f}/s)" if name in row and not ended else ""
