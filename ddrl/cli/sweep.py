"""`ddrl submit --seeds`: several runs watched side by side, and one table of what they came to."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddrl.cli import live
from ddrl.cli.output import Client, duration, number, say, table
from ddrl.cli.view import COLORS
from ddrl.cli.watcher import Figures, Watcher

if TYPE_CHECKING:
    from rich.console import RenderableType


def follow(client: Client, runs: Sequence[str], *, json_output: bool, on_tick: Callable[[], None]) -> None:
    """Show runs until all have ended: a table on a terminal, plain lines elsewhere.

    Args:
        json_output: leave stdout to the caller's JSON; plain lines go to stderr.
        on_tick: called about every 0.2 s; what it raises passes through.
    """
    from rich.console import Console

    watchers = [Watcher(client, run, starting_s=live.STARTING_S) for run in runs]
    console = Console(stderr=json_output)
    if json_output or not console.is_terminal:
        file = sys.stderr if json_output else console.file
        lines = live.Lines(file, prefix=lambda figures: f"seed {figures.config.seed}  ")
        live.keep_looking(watchers, lines.show, on_tick=on_tick)
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as view:

        def show(figures: Sequence[Figures]) -> None:
            view.update(_view(figures, width=min(console.width - live.ECHO, 120)), refresh=True)

        live.keep_looking(watchers, show, on_tick=on_tick)


def summaries(client: Client, runs: Sequence[str], *, wall_s: float) -> list[dict[str, Any]]:
    """What each run came to, as `ddrl.runs.records` tells it; with its seed where there are several."""
    from ddrl.runs.records import summary
    from ddrl.store import runs as store

    found = []
    for run in runs:
        seed = {"seed": store.config(client, run).seed} if len(runs) > 1 else {}
        found.append(seed | summary(client, run, wall_s=wall_s))
    return found


def report(rows: Sequence[Mapping[str, Any]], *, json_output: bool) -> None:
    """Print the table and the median, or all of it as one JSON object."""
    median_s = median_train_s(rows)
    if json_output:
        print(json.dumps({"runs": list(rows), "median_train_s": median_s}), flush=True)
        return
    table(
        ("seed", "status", "train", "env steps", "updates", "return", "run"),
        [
            (
                f"{row['seed']}",
                row["status"],
                f"{row['train_s']:,.1f} s",
                f"{row['env_steps']:,}",
                f"{row['updates']:,}",
                _mean_and_std(row["evaluation"]),
                row["run"],
            )
            for row in rows
        ],
        left=("status", "run"),
    )
    solved = sum(row["status"] == "solved" for row in rows)
    median = "" if median_s is None else f"median train time {median_s:.1f} s; "
    say(f"{median}{solved} of {len(rows)} solved")
    stopped = [row["run"] for row in rows if row["status"] == "stopped"]
    if stopped:
        say(f"continue with `ddrl resume {' '.join(stopped)}`")


def median_train_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Over the runs that were solved or reached a limit; None if there are none."""
    times = [row["train_s"] for row in rows if row["status"] in ("solved", "time")]
    return round(statistics.median(times), 3) if times else None


def _mean_and_std(evaluation: Mapping[str, float] | None) -> str:
    if evaluation is None:
        return "-"
    return f"{number(evaluation['return_mean'])} ± {number(evaluation['return_std'])}"


def _view(runs: Sequence[Figures], *, width: int) -> RenderableType:
    """A table with a row for each run."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("seed", "status", "time", "env steps", "/s", "updates", "return", "evaluation"):
        grid.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    said: list[Text] = []
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
            said.append(Text(f"seed {seed}: {figures.hint}", style="yellow"))
        elif figures.notices or (state.ended and state.reason):
            said.append(
                Text(f"seed {seed}: {state.reason if state.ended else figures.notices[-1]}", style="dim")
            )
    config = runs[0].config
    subtitle = f"{config.env.id}, {config.algorithm.get('name')}, {len(runs)} seeds"
    title = f"{runs[0].state.run} and {len(runs) - 1} more"
    parts = Group(grid, *([Text(), *said] if said else []))
    return Panel(parts, title=title, subtitle=subtitle, width=width, border_style="dim")
