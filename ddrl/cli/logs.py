"""`ddrl logs` and `ddrl journal`: log lines of a run from all machines, and its changes of state."""

from __future__ import annotations

import datetime
import re
import socket
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ddrl.cli.output import Client, InputError, Json, Run, emit, server, table
from ddrl.store import logs as stored
from ddrl.store import runs as store

POLL_S = 0.3
SAME_S = 5.0  # a line in a file and the same text on the server are one line if they are this close in time
MAX_SINGLE = 20_000  # lines remembered for that comparison
# "2030-01-31 12:00:00,123 INFO text" of a learner, "[2030-01-31 12:00:00,123: INFO/MainProcess] text" of Celery.
_ROUTINE = re.compile(r"Task ddrl\.\w+\[[^\]]*\] (received|succeeded)")  # logged by Celery twice a segment
_STAMPED = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}):? ([A-Z]+)(?:/[^\]]*\])? (.*)")


def journal(run: Run = "last", json_output: Json = False) -> None:
    """Show the changes of a run's state and settings."""
    with server() as client:
        rows = store.journal(client, store.resolve(client, run))
    if json_output:
        emit(rows)
        return
    table(
        ("time", "event", "reason"),
        [(_clock(row["time_s"]), row.get("event", ""), _details(row)) for row in rows],
        left=("time", "event", "reason"),
    )


def logs(
    run: Run = "last",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")] = False,
    last: Annotated[
        int, typer.Option("--last", "-n", min=0, help="Start with this many lines, the newest.")
    ] = 100,
    all_: Annotated[
        bool, typer.Option("--all", help="Include Celery's lines about each task received and done.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Print the log lines of a run's learner and workers on all machines, and its journal, by time."""
    if follow and json_output:
        raise InputError(
            "--json: prints one value and ends, so it cannot be used with --follow; leave one out"
        )
    with server() as client:
        run = store.resolve(client, run)
        tail = _Tail(client, run, routine=all_)
        lines = tail.more()
        lines = lines[len(lines) - min(last, len(lines)) :]
        if json_output:
            emit([asdict(line) for line in lines])
            return
        width = max([len(line.source) for line in lines], default=0)
        while True:
            for line in lines:
                width = max(width, len(line.source))
                print(line.text(width), flush=True)
            if not follow:
                return
            ended = store.state(client, run).ended  # before the read, so that no line is missed
            lines = tail.more()
            if ended and not lines:
                return
            time.sleep(0 if ended else POLL_S)


@dataclass(frozen=True)
class Line:
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

    def text(self, width: int) -> str:
        """Return the printed line, with the source in a column of `width`."""
        level = f"{self.level}: " if self.level in ("WARNING", "ERROR", "CRITICAL") else ""
        return f"{_clock(self.time_s)} {self.source:<{width}} | {level}{self.line}".rstrip()


class _Tail:
    """Reads new lines from the server's log stream, this machine's log files and the journal."""

    def __init__(self, client: Client, run: str, *, routine: bool) -> None:
        self._client, self._run, self._routine = client, run, routine
        folder = store.state(client, run).folder
        self._folder = Path(folder) if folder and Path(folder).is_dir() else Path("runs") / run
        self._files: dict[Path, _File] = {}
        self._logs_cursor = self._journal_cursor = b"0-0"
        self._single: dict[
            tuple[bool, str], deque[float]
        ] = {}  # lines seen only on the server or only in a file

    def more(self) -> list[Line]:
        """Return the new lines, by time."""
        entries, self._journal_cursor = store.journal_after(self._client, self._run, self._journal_cursor)
        lines = [
            Line(row["time_s"], "journal", "", f"{row.get('event', '')} {_details(row)}".rstrip())
            for row in entries
        ]
        rows, self._logs_cursor = stored.read(self._client, self._run, self._logs_cursor)
        gathered = [
            Line(row["time_s"], row.get("source", ""), row.get("level", ""), part)
            for row in rows
            for part in row.get("text", "").splitlines() or [""]
        ]
        lines += [line for line in gathered if not self._is_twin(line, in_file=False)]
        ahead_s = store.server_ms(self._client) / 1e3 - time.time()
        for path in sorted(self._folder.glob("*.log")):
            file = self._files.setdefault(path, _File(path))
            lines += [line for line in file.more(ahead_s) if not self._is_twin(line, in_file=True)]
        shown = [line for line in lines if self._routine or not _ROUTINE.match(line.line)]
        return sorted(shown, key=lambda line: line.time_s)

    def _is_twin(self, line: Line, *, in_file: bool) -> bool:
        """Return True if the other source, file or server, has already given the line."""
        text = line.line.strip()
        twins = self._single.get((not in_file, text), deque())
        for when in twins:
            if line.level and abs(when - line.time_s) < SAME_S:
                twins.remove(when)
                return True
        if len(self._single) > MAX_SINGLE:
            self._single.clear()
        self._single.setdefault((in_file, text), deque(maxlen=100)).append(line.time_s)
        return False


class _File:
    """Reads a growing log file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._time_s = 0.0
        self._source = f"{path.stem} {socket.gethostname()}"

    def more(self, ahead_s: float) -> list[Line]:
        """Return the complete lines since the last call; read a file that shrank from its beginning.

        Args:
            ahead_s: the server's clock minus this machine's.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
                changed_s = self._path.stat().st_mtime
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines: list[Line] = []
        texts = [text for text in whole.decode(errors="replace").splitlines() if text.strip()]
        found = [_STAMPED.match(text) for text in texts]
        # A line without a time stamp takes that of the line before it, or of the next stamped line at the beginning.
        when_s = self._time_s or next((_stamp_s(match[1]) for match in found if match is not None), changed_s)
        for text, match in zip(texts, found, strict=True):
            if match is not None:
                when_s = self._time_s = _stamp_s(match[1])
            level, said = (match[2], match[3]) if match is not None else ("", text)
            lines.append(Line(round(when_s + ahead_s, 3), self._source, level, said))
        return lines


def _stamp_s(text: str) -> float:
    """Return the seconds since the epoch of a log's time stamp, this machine's clock."""
    return datetime.datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _details(row: dict[str, Any]) -> str:
    """Return the reason and the other fields of a journal entry."""
    if row.get("event") == "set":
        return f"{row['option']}: {row['from']} -> {row['to']} at {int(row['env_steps']):,} env steps"
    rest = [f"{name}={value}" for name, value in row.items() if name not in ("time_s", "event", "reason")]
    return " ".join([part for part in (row.get("reason", ""), *rest) if part])
