"""Following runs until they end: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddrl.cli.hints import ROOM_WAIT
from ddrl.cli.output import Client, duration
from ddrl.cli.watcher import Figures, Watcher
from ddrl.store import connection
from ddrl.store.runs import RunState, UnknownRunError

if TYPE_CHECKING:
    from rich.console import Console

POLL_S = 0.5
TICK_S = 0.2
LINE_S = 5.0
OUTAGE_S = 300.0  # how long a server may be away, restarting say, before following ends with its error
ECHO = 2  # columns left free for the terminal's "^C", which would else push the view down a line
STARTING_S = 10.0  # what the caller starts itself may take so long before its absence is worth a word


def plain_line(figures: Figures) -> str:
    """One line on where a run stands."""
    state, row = figures.state, figures.row
    parts = [duration(figures.elapsed_s)]
    if state.ended:
        parts.append(f"{state.status}: {state.reason}" if state.reason else state.status)
    if figures.env_steps or figures.updates:
        parts.append(f"env_steps {figures.env_steps}{rate(row, 'env_steps_per_s', state.ended)}")
        parts.append(f"updates {figures.updates}{rate(row, 'updates_per_s', state.ended)}")
        if "return_mean" in row:
            parts.append(f"return {row['return_mean']:.1f}")
        if figures.evaluated:
            last = figures.evaluated[-1]
            parts.append(f"eval {last['return_mean']:.1f}@v{last['version']}")
        if "staleness" in row:
            parts.append(f"staleness {row['staleness']:.1f}")
        if row.get("dropped"):
            parts.append(f"dropped {row['dropped']:.0f}")
        if not state.ended:
            parts.extend(_sharing(figures))
    if figures.hint:
        parts.append(f"({figures.hint})" if len(parts) > 1 else figures.hint)
    return "  ".join(parts)


def _sharing(figures: Figures) -> list[str]:
    """Its share of the fleet, where there are others, and what its processes wait for, where that is much."""
    parts = []
    if len(figures.rivals) > 1 and figures.share is not None:
        parts.append(f"share {100 * figures.share:.0f}%")
    if (figures.room_wait or 0.0) >= ROOM_WAIT:
        parts.append(f"waits {100 * (figures.room_wait or 0.0):.0f}% for room")
    return parts


def rate(row: Mapping[str, Any], name: str, ended: bool) -> str:
    """Such as " (310/s)"; empty where it is not known, or the run has ended."""
    return f" ({row[name]:.0f}/s)" if name in row and not ended else ""


def closing_lines(summary: Mapping[str, Any]) -> str:
    """What a run came to, for people.

    Args:
        summary: of `ddrl.runs.artifacts`.
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
        client: connection to the server.
        run: its id.
        json_output: leave stdout to the caller's JSON; plain lines go to stderr.
        console: where to show it; stdout by default. A live view if it is a terminal.
        deadline: of `time.monotonic()`; the state is returned then, ended or not.
        on_tick: called about every 0.2 s; what it raises passes through.

    Raises:
        UnknownRunError: there is no such run, or it was deleted meanwhile.
    """
    from rich.console import Console

    watchers = [Watcher(client, run, starting_s=STARTING_S if on_tick else 0.0)]
    if console is None:
        console = Console(stderr=json_output)
    if json_output or not console.is_terminal:
        lines = Lines(sys.stderr if json_output else console.file)
        return keep_looking(watchers, lines.show, deadline=deadline, on_tick=on_tick)[0]
    from rich.live import Live

    from ddrl.cli.view import view

    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:

        def show(runs: Sequence[Figures]) -> None:
            live.update(view(runs[0], width=console.width - ECHO, height=console.height), refresh=True)

        return keep_looking(watchers, show, deadline=deadline, on_tick=on_tick)[0]


def keep_looking(
    watchers: Sequence[Watcher],
    show: Callable[[Sequence[Figures]], None],
    *,
    deadline: float | None = None,
    on_tick: Callable[[], None] | None = None,
) -> list[RunState]:
    """Poll and show runs until all have ended; a server that is away, or came back empty, is waited for.

    Raises:
        UnknownRunError: a run is gone for good.
        redis.RedisError: the server is.
    """
    next_poll, outage_at = 0.0, None
    while True:
        if on_tick is not None:
            on_tick()
        now = time.monotonic()
        if now >= next_poll:
            try:
                runs = [watcher.poll() for watcher in watchers]
                outage_at = None
            except (UnknownRunError, *connection.OUTAGES) as error:
                reason = _excuse(error)
                outage_at = outage_at or now
                if reason is None or now - outage_at > OUTAGE_S:
                    raise
                runs = [watcher.without_server(reason) for watcher in watchers]
            show(runs)
            states = [figures.state for figures in runs]
            if all(state.ended for state in states) or (deadline is not None and now >= deadline):
                return states
            next_poll = time.monotonic() + POLL_S
        time.sleep(TICK_S)


def _excuse(error: Exception) -> str | None:
    """What is said while the server cannot be asked; None where waiting will not help."""
    if isinstance(error, UnknownRunError):
        return "the server came back without the run: its learner stores it again from its copy"
    text = connection.outage(error)
    return f"{text}; waiting for it" if text else None


class Lines:
    """Prints a line a run at once, then every few seconds, and one when it ends; notices as they come.

    Args:
        file: where to.
        prefix: what a run's lines begin with.
    """

    def __init__(self, file: Any, *, prefix: Callable[[Figures], str] = lambda figures: "") -> None:
        self._file, self._prefix = file, prefix
        self._next = 0.0
        self._noticed: dict[str, int] = {}
        self._ended: set[str] = set()

    def show(self, runs: Sequence[Figures]) -> None:
        """Print what is due of runs."""
        now = time.monotonic()
        is_time = now >= self._next
        for figures in runs:
            run = figures.state.run
            for notice in figures.notices[self._noticed.get(run, 0) :]:
                self._print(figures, f"{duration(figures.elapsed_s)}  {notice}")
            self._noticed[run] = len(figures.notices)
            ends_now = figures.state.ended and run not in self._ended
            if ends_now or (is_time and not figures.state.ended):
                self._print(figures, plain_line(figures))
            if ends_now:
                self._ended.add(run)
        if is_time:
            self._next = now + max(LINE_S, 2.0 * len(runs))

    def _print(self, figures: Figures, text: str) -> None:
        print(self._prefix(figures) + text, file=self._file, flush=True)
