"""`ddrl logs` and `ddrl journal`: log lines of a run from all machines, and its changes of state."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ddrl.cli.output import Client, InputError, Json, Run, emit, server_of, table
from ddrl.store import logs as stored
from ddrl.store import runs as store
from ddrl.store import untrusted

POLL_S = 0.3
SAME_S = 5.0  # a line in a file and the same text on the server are one line if they are this close in time
MOST_PARTS = 100  # lines of an entry; a worker may write one of line feeds
MAX_SINGLE = 20_000  # lines remembered for that comparison
# Celery's routine lines: two for each task, and some when a worker starts or stops.
_ROUTINE = re.compile(
    r"Task ddrl\.\w+\[[^\]]*\] (received|succeeded)|Connected to redis|child process \d+ calling|mingle: "
    r"|worker: Warm shutdown"
)
# "2030-01-31 12:00:00,123 INFO text" of a learner, "[2030-01-31 12:00:00,123: INFO/MainProcess] text" of Celery.
_STAMPED = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}):? ([A-Z]+)(?:/[^\]]*\])? (.*)")


def journal(run: Run = "last", json_output: Json = False) -> None:
    """Show the changes of a run's state and settings."""
    with server_of(run) as (client, run):
        rows = store.journal(client, run)[0]
    if json_output:
        emit(rows)
        return
    header = ("time", "event", "reason")
    table(header, [(_clock(row["time_s"]), row["event"], _details(row)) for row in rows], left=header)


def logs(
    run: Run = "last",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="Start with the newest, so many.")] = 100,
    all_: Annotated[
        bool, typer.Option("--all", help="Include Celery's lines about tasks and connections.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Print the log lines of a run's learner and workers on all machines, and its journal, by time."""
    if follow and json_output:
        reason = "prints one value and ends, so it cannot be used with --follow; leave one out"
        raise InputError(f"--json: {reason}")
    with server_of(run) as (client, run):
        tail = _Tail(client, run, routine=all_)
        lines = tail.more()
        lines = lines[len(lines) - min(last, len(lines)) :]
        if json_output:
            emit([line._asdict() for line in lines])
            return
        width = 0
        while True:
            width = max([width, *(len(line.source) for line in lines)])
            for line in lines:
                level = f"{line.level}: " if line.level in ("WARNING", "ERROR", "CRITICAL") else ""
                text = f"{_clock(line.time_s)} {line.source:<{width}} | {level}{line.line}"
                print(text.rstrip(), flush=True)
            if not follow:
                return
            ended = store.state(client, run).ended  # before the read, so that no line is missed
            lines = tail.more()
            if ended and not lines:
                return
            time.sleep(0 if ended else POLL_S)


class Line(NamedTuple):
    """One line of a log.

    Attributes:
        time_s: server's clock.
        source: process and machine.
        level: name of the level in `logging`; empty if unknown.
        line: the text.
    """

    time_s: float
    source: str
    level: str
    line: str


class _Tail:
    """Reads new lines from the server's log stream, this machine's log files and the journal."""

    def __init__(self, client: Client, run: str, *, routine: bool) -> None:
        self._client, self._run, self._routine = client, run, routine
        folder = store.state(client, run).folder
        self._folder = Path(folder) if folder and Path(folder).is_dir() else Path("runs") / run
        self._files: dict[Path, _File] = {}
        self._logs_cursor = self._journal_cursor = b"0-0"
        # (in a file, text) -> times of the lines that only a file, or only the server, has given
        self._single: defaultdict[tuple[bool, str], deque[float]] = defaultdict(lambda: deque(maxlen=100))

    def more(self) -> list[Line]:
        """Return the new lines, by time."""
        entries, self._journal_cursor = store.journal(self._client, self._run, self._journal_cursor)
        lines = [
            Line(row["time_s"], "journal", "", f"{row['event']} {_details(row)}".rstrip()) for row in entries
        ]
        rows, self._logs_cursor = stored.read(self._client, self._run, self._logs_cursor)
        for row in rows:
            for part in row["text"].splitlines()[:MOST_PARTS] or [""]:
                line = Line(row["time_s"], row["source"], row["level"], part)
                lines += [] if self._is_twin(line, in_file=False) else [line]
        ahead_s = store.server_ms(self._client) / 1e3 - time.time()
        for path in sorted(self._folder.glob("*.log")):
            file = self._files.setdefault(path, _File(path))
            lines += [line for line in file.more(ahead_s) if not self._is_twin(line, in_file=True)]
        shown = [line for line in lines if self._routine or not _ROUTINE.match(line.line)]
        return sorted(shown, key=lambda line: line.time_s)

    def _is_twin(self, line: Line, *, in_file: bool) -> bool:
        """Return True if the other source, file or server, has already given the line."""
        if len(self._single) > MAX_SINGLE:
            self._single.clear()
        text = line.line.strip()
        twins = self._single[not in_file, text]
        near = [when for when in twins if abs(when - line.time_s) < SAME_S]
        if line.level and near:
            twins.remove(near[0])
            return True
        self._single[in_file, text].append(line.time_s)
        return False


class _File:
    """Reads a growing log file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._time_s: float | None = None  # of the newest stamped line
        self._source = f"{path.stem} {socket.gethostname()}"

    def more(self, ahead_s: float) -> list[Line]:
        """Return the complete lines since the last call; read a file that shrank from its beginning.

        Args:
            ahead_s: the server's clock minus this machine's.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
                changed_s = self._path.stat().st_mtime
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        parts = [_parse(line) for line in untrusted.text(complete).splitlines() if line.strip()]
        if self._time_s is None:  # lines before the first stamp take its time
            self._time_s = next((stamp_s for stamp_s, *_ in parts if stamp_s is not None), None)
        lines = []
        for stamp_s, level, text in parts:
            self._time_s = self._time_s if stamp_s is None else stamp_s
            when_s = changed_s if self._time_s is None else self._time_s
            lines.append(Line(round(when_s + ahead_s, 3), self._source, level, text))
        return lines


def _parse(line: str) -> tuple[float | None, str, str]:
    """Return the time by this machine's clock, the level and the text of a line; no time if it has no valid stamp."""
    if match := _STAMPED.match(line):
        with contextlib.suppress(ValueError, OverflowError):  # there is no such time
            time_s = datetime.datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            return time_s, match[2], match[3]
    return None, "", line


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _details(row: dict[str, Any]) -> str:
    """Return the reason and the other fields of a journal entry."""
    if row["event"] in store.CHANGES:
        return f"{row['option']}: {row['from']} -> {row['to']} at {int(row['env_steps']):,} env steps"
    rest = [f"{name}={value}" for name, value in row.items() if name not in ("time_s", "event", "reason")]
    return " ".join(" ".join((row.get("reason", ""), *rest)).split())
