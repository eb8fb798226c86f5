"""Following runs until they end: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import typer
from rich.console import Console
from rich.live import Live

from ddrl.cli import view
from ddrl.cli.format import duration, score
from ddrl.cli.hints import ROOM_WAIT, STARTING_S
from ddrl.cli.output import AS_IT_IS, Client, Json, Run, answer, server_of
from ddrl.cli.watcher import Figures, Watcher, polls
from ddrl.runs.records import summary
from ddrl.store.evaluations import INFO
from ddrl.store.runs import RunState

POLL_S = 0.5
TICK_S = 0.2
LINE_S = 5.0
ECHO = 2  # columns left free: "^C", as the terminal echoes it, must not wrap a line


def watch(run: Run = "last", json_output: Json = False) -> None:
    """Follow a run until it ends; exit code 1 if it failed."""
    with server_of(run) as (client, run):
        (state,) = follow(client, [run], json_output=json_output)
        end = summary(client, run)
    answer(end, closing_lines(end, state), json_output=json_output)
    if state.status == "failed":
        raise typer.Exit(1)


def follow(
    client: Client, runs: Sequence[str], *, json_output: bool, on_tick: Callable[[], None] | None = None
) -> list[RunState]:
    """Show runs until all have ended: on a terminal a live curve or table, else plain lines.

    Args:
        client: connection to the server.
        runs: their ids.
        json_output: keep stdout free for the caller's JSON; plain lines go to stderr.
        on_tick: called about every 0.2 s, by a command that started processes; its exceptions pass through.

    Raises:
        UnknownRunError: a run does not exist.
        redis.RedisError, UnknownRunError: as `watcher.polls`.
    """
    polled = polls([Watcher(client, run, starting_s=STARTING_S if on_tick else 0.0) for run in runs])
    console = Console(stderr=json_output, **AS_IT_IS)
    next_poll = 0.0
    with ExitStack() as stack:
        if json_output or not console.is_terminal:
            show = Lines(console.file, show_seed=len(runs) > 1).show
        else:
            live = Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop")
            show = functools.partial(_show_live, stack.enter_context(live))
        while True:
            if on_tick is not None:
                on_tick()
            if time.monotonic() >= next_poll:
                show(figures := next(polled))
                states = [each.state for each in figures]
                if all(state.ended for state in states):
                    return states
                next_poll = time.monotonic() + POLL_S
            time.sleep(TICK_S)


def _show_live(live: Live, runs: Sequence[Figures]) -> None:
    console, width = live.console, live.console.width - ECHO
    if len(runs) == 1:
        shown = view.one_run(runs[0], width=width, height=console.height)
    else:
        shown = view.several_runs(runs, width=min(width, 120))
    live.update(shown, refresh=True)


# --- plain lines -------------------------------------------------------------------------------------


class Lines:
    """Print a line per run now, then every max(LINE_S, 2 s per run), and at its end; notices immediately.

    Args:
        file: output.
        show_seed: begin each line with the run's seed.
    """

    def __init__(self, file: Any, *, show_seed: bool = False) -> None:
        self._file, self._show_seed = file, show_seed
        self._next = 0.0
        self._noticed: dict[str, set[str]] = {}  # by run; each text is there once
        self._ended: set[str] = set()

    def show(self, runs: Sequence[Figures]) -> None:
        """Print the lines that are due."""
        now = time.monotonic()
        if is_time := now >= self._next:
            self._next = now + max(LINE_S, 2.0 * len(runs))
        for figures in runs:
            run = figures.state.run
            prefix = f"seed {figures.config.seed}  " if self._show_seed else ""
            new = [notice for notice in figures.notices if notice not in self._noticed.get(run, ())]
            lines = [f"{duration(figures.elapsed_s or None)}  {notice}" for notice in new]
            self._noticed[run] = set(figures.notices)
            if run not in self._ended and (is_time or figures.state.ended):
                lines.append(plain_line(figures))
            if figures.state.ended:
                self._ended.add(run)
            for line in lines:
                print(prefix + line, file=self._file, flush=True)


def plain_line(figures: Figures) -> str:
    """Return one line on the state of a run."""
    state, row, recent = figures.state, figures.row, figures.recent
    parts = [duration(figures.elapsed_s or None)]  # "-" before the first step
    if state.ended:
        parts.append(f"{state.status}: {state.reason}" if state.reason else state.status)
    if state.appended_steps or figures.updates:
        parts.append(f"env_steps {state.appended_steps}{figures.rate('env_steps_per_s')}")
        parts.append(f"updates {figures.updates}{figures.rate('updates_per_s')}")
        if "return_mean" in row:
            parts.append(f"return {row['return_mean']:.1f}")
        parts += [f"{name} {value:.4g}" for name, value in row.items() if name.startswith(INFO)]
        if figures.evaluated:
            last = figures.evaluated[-1]
            parts.append(f"eval {last['return_mean']:.1f}@v{last['version']}")
        if "staleness" in row:
            parts.append(f"staleness {row['staleness']:.1f}")
        if row.get("dropped"):
            parts.append(f"dropped {row['dropped']:.0f}")
        if not state.ended and len(figures.loads) > 1 and recent.share is not None:
            parts.append(f"share {100 * recent.share:.0f}%")
        if not state.ended and recent.room_wait is not None and recent.room_wait >= ROOM_WAIT:
            parts.append(f"{100 * recent.room_wait:.0f}% of the time waiting for room")
    if figures.hint:
        parts.append(f"({figures.hint})" if len(parts) > 1 else figures.hint)
    return "  ".join(parts)


def closing_lines(end: Mapping[str, Any], state: RunState) -> str:
    """Return the closing text for a terminal; `end` is the run's summary (`records.summary`)."""
    evaluated, run, status = end["evaluation"], end["run"], end["status"]
    lines = [
        f"{run}: {status} after {duration(end['train_s'])} of training, "
        f"{end['env_steps']:,} env steps, {end['updates']:,} updates"
    ]
    if evaluated:
        episodes = f"{evaluated['episodes']} episodes"
        lines.append(f"policy version {end['policy_version']}: return {score(evaluated)} over {episodes}")
    if end["artifacts"]:
        host = "" if state.host in ("", socket.gethostname()) else f"{state.host}:"
        lines.append(f"artifacts in {host}{end['artifacts']}")
    # `ddrl resume` can raise the limit of time only, not that of env steps or updates.
    if status in ("failed", "stopped") or state.reason.startswith("time limit"):
        more = " --time 10m" if status == "time" else ""
        lines.append(f"continue it with `ddrl resume {run}{more}`, look into it with `ddrl logs {run}`")
    return "\n".join(lines)
