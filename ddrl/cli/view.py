"""The live views: one run with its curve, figures and evaluations; several runs as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ddrl.algorithms import base
from ddrl.cli import curve
from ddrl.cli.format import counted, duration, number, percent, score, size
from ddrl.cli.watcher import Figures, entitled
from ddrl.store.evaluations import INFO

COLORS = {"active": "cyan", "solved": "bold green", "failed": "bold red", "paused": "yellow"}
NOTICES = 2  # number shown, the newest
ROOMY = 32  # lines of a terminal from which on the algorithm's own metrics are shown
MIN_SERVER_WAIT_S = 0.05

# Metrics of the learner that have a cell of their own, or none; all others are the algorithm's.
_NAMED = (
    *("env_steps", "updates", "env_steps_per_s", "updates_per_s", "samples_per_insert", "staleness"),
    *("max_staleness", "dropped", "queued_steps", "return_mean", "replay_size", "replay_bytes"),
    *("learner_wait", "server_wait_s", "admitted", "dead", "version", "elapsed_s"),
)


def cells(figures: Figures) -> dict[str, str]:
    """Return the figures of a run by name, for the live view and `ddrl status`."""
    state, row, config = figures.state, figures.row, figures.config
    shown = {
        "env steps": f"{state.appended_steps:,}{figures.rate('env_steps_per_s')}",
        "updates": f"{figures.updates:,}{figures.rate('updates_per_s')}",
        "return": number(row.get("return_mean")),
    }
    staleness = number(row.get("staleness"))
    name = config.algorithm["name"]
    # The user's algorithm need not be importable here.
    if "queued_steps" in row if base.is_custom(name) else base.config_class(name).on_policy:
        most, bound = number(row.get("max_staleness")), config.on_policy.max_staleness
        shown["queued"] = f"{int(row.get('queued_steps', 0)):,} steps"
        shown["staleness"] = f"{staleness} (max {most} of {bound})" if "staleness" in row else "-"
        shown["too stale"] = f"{int(row.get('dropped', 0)):,} dropped"
    else:
        samples, goal = number(row.get("samples_per_insert")), config.replay.samples_per_insert
        shown["samples/insert"] = f"{samples} of {goal:g}"
        shown["staleness"] = f"{staleness} versions"
        shown["replay"] = f"{int(row.get('replay_size', 0)):,} of {config.replay.capacity:,}"
        shown["replay memory"] = size(row.get("replay_bytes", 0))
    shown["stream"] = f"{size(state.live_bytes)} of {size(config.replay.max_bytes)}"
    shown["learner waits"] = percent(row.get("learner_wait"))
    if (wanted := config.learner.num_learners) > 1:
        num_learning = sum(learner.rank >= 0 for learner in figures.learners)
        shown["learners"] = f"{num_learning} of {wanted}"
    num_processes = sum(worker.num_players for worker in figures.serving)
    processes = counted(num_processes, "process", "es")
    if figures.num_playing < num_processes and not state.ended:
        processes = f"{figures.num_playing} of {processes}"
    shown["workers"] = f"{len(figures.serving)} ({processes})" if figures.serving else "none"
    if state.crashes_total or state.lost_producers:
        shown["crashed"] = f"{counted(state.crashes_total, 'process', 'es')}, {state.lost_producers} lost"
    if (waited_s := row.get("server_wait_s", 0.0)) >= MIN_SERVER_WAIT_S:  # since the previous row
        shown["server waits"] = f"{waited_s:.1f} s"
    return shown


LEARNER = ("learner", "host", "pid", "device", "updates/s", "waits for others")


def learner_row(learner: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the cells of a table below LEARNER, of a `Member` as JSON shows it."""
    where = learner["host"], str(learner["pid"]), learner["device"]
    if learner["rank"] < 0:
        return ("waits", *where, "-", "-")
    return (f"rank {learner['rank']}", *where, f"{learner['updates_per_s']:.0f}", percent(learner["waiting"]))


def other_metrics(figures: Figures) -> dict[str, str]:
    """Return the algorithm's own metrics by name."""
    rest = {name: value for name, value in figures.row.items() if name not in _NAMED}
    return {name: f"{value:.4g}" for name, value in rest.items() if isinstance(value, (int, float))}


def _live_cells(figures: Figures) -> dict[str, str]:
    """Return the figures that change too often for `ddrl status`."""
    state, recent = figures.state, figures.recent
    room = f", {percent(recent.room_wait)} for room" if recent.room_wait else ""
    shown = {
        "version": f"{state.version}" if state.version >= 0 else "-",
        "play waits": f"{percent(recent.allowance_wait)}{room}",
    }
    if len(figures.loads) > 1 and not state.ended:
        share, due = percent(recent.share), percent(entitled(state, figures.loads))
        shown["share"] = f"{share} of {due}, {state.priority}"
    elif state.weight != 1.0 or state.priority != "normal":
        shown["weight"] = f"{state.weight:g}, {state.priority}"
    return shown


def one_run(figures: Figures, *, width: int, height: int) -> RenderableType:
    """Return the view of one run: curve, figures, last evaluations, notices and hint."""
    state, config, roomy = figures.state, figures.config, height >= ROOMY
    inner = max(40, min(width, 140) - 4)
    items = [*(cells(figures) | _live_cells(figures) | (other_metrics(figures) if roomy else {})).items()]
    columns = 1 + (inner > 70) + (inner > 110)
    grid = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
    for start in range(0, len(items), columns):
        grid.add_row(*(Text(part) for item in items[start : start + columns] for part in item))

    last = figures.evaluated[-3 if roomy else -1 :]
    evaluations = Table.grid(padding=(0, 3, 0, 0))
    for row in reversed(last):
        name = "confirmation" if row["purpose"] == "confirm" else "evaluation"
        episodes, steps = f"{row['num_episodes']} episodes", f"at {row['env_steps']:,} steps"
        infos = (f"{one} {row[one]:.4g}" for one in row if one.startswith(INFO))
        evaluations.add_row(f"{name} v{row['version']}", score(row), episodes, steps, "  ".join(infos))

    messages = [Text(text, style="dim") for text in figures.notices[-NOTICES:]]
    if figures.hint or state.reason:
        messages.append(Text(figures.hint or state.reason, style="yellow" if figures.hint else "dim"))

    # The rest of the height: borders, legend, blank lines, the last line, the prompt.
    message_lines = max(1, sum(1 + len(text) // inner for text in messages))
    free = height - 7 - grid.row_count - len(last) - message_lines
    marks = [
        (max(0.0, row["time_s"] - state.start_s), float(row["return_mean"]), row["purpose"] == "confirm")
        for row in figures.evaluated
    ]
    target = config.stop.return_
    drawing = curve.draw(figures.returns, marks, width=inner, height=max(4, min(14, free)), target=target)
    parts: list[RenderableType] = [curve.legend(target), drawing, Text(), grid]
    parts += [Text(), evaluations] if last else []
    parts += [Text(), *messages] if messages else []
    status = (state.status, COLORS.get(state.status, ""))
    title = Text.assemble((state.run, "bold"), "  ", status, "  ", duration(figures.elapsed_s))
    if figures.left_s is not None and not state.outcome:
        title.append(f", {duration(figures.left_s)} left")
    subtitle = f"{config.env.id}, {config.algorithm['name']}, seed {config.seed}"
    return Panel(Group(*parts), title=title, subtitle=subtitle, width=inner + 4, border_style="dim")


def several_runs(runs: Sequence[Figures], *, width: int) -> RenderableType:
    """Return a table with a row for each run."""
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("seed", "status", "time", "env steps", "/s", "updates", "return", "evaluation"):
        grid.add_column(name, justify="left" if name == "status" else "right")
    messages: list[Text] = []
    for figures in runs:
        state, row, seed = figures.state, figures.row, figures.config.seed
        last = figures.evaluated[-1] if figures.evaluated else None
        grid.add_row(
            f"{seed}",
            Text(state.status, style=COLORS.get(state.status, "")),
            duration(figures.elapsed_s),
            f"{state.appended_steps:,}",
            f"{row['env_steps_per_s']:,.0f}" if "env_steps_per_s" in row and not state.outcome else "",
            f"{figures.updates:,}",
            number(row.get("return_mean")),
            "-" if last is None else f"{last['return_mean']:.1f} v{last['version']}",
        )
        newest = state.reason if state.ended else "".join(figures.notices[-1:])
        if figures.hint or newest:
            style = "yellow" if figures.hint else "dim"
            messages.append(Text(f"seed {seed}: {figures.hint or newest}", style=style))
    config = runs[0].config
    subtitle = f"{config.env.id}, {config.algorithm['name']}, {len(runs)} seeds"
    title = f"{runs[0].state.run} and {len(runs) - 1} more"
    parts = Group(grid, *([Text(), *messages] if messages else []))
    return Panel(parts, title=title, subtitle=subtitle, width=width, border_style="dim")
