"""`ddrl logs` and `ddrl journal`: what the processes of a run wrote, and every change of its state."""

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
SAME_S = 5.0  # a line of a file and one of the server with the same words are one line within this time
MAX_SINGLE = 20_000  # lines remembered for that
# "2030-01-31 12:00:00,123 INFO text" of a learner, "[2030-01-31 12:00:00,123: INFO/MainProcess] text" of Celery.
_ROUTINE = re.compile(r"Task ddrl\.\w+\[[^\]]*\] (received|succeeded)")  # Celery's, two a segment
_STAMPED = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}):? ([A-Z]+)(?:/[^\]]*\])? (.*)")


def journal(run: Run = "last", json_output: Json = False) -> None:
    """Show every change of a run's state and settings."""
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
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    last: Annotated[
        int, typer.Option("--last", "-n", min=0, help="Begin with the newest so many lines.")
    ] = 100,
    all_: Annotated[
        bool, typer.Option("--all", help="Celery's lines on every task taken and done too.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Print what learner and workers of a run wrote, on whatever machine, and its journal, by time."""
    if follow and json_output:
        raise InputError("--json: prints one value and ends, so it cannot go with --follow; leave one out")
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
            ended = store.state(client, run).ended  # before the read, so that the last lines are seen
            lines = tail.more()
            if ended and not lines:
                return
            time.sleep(0 if ended else POLL_S)


@dataclass(frozen=True)
class Line:
    """One line of a log.

    Attributes:
        time_s: server's clock.
        source: who wrote it, and on which machine.
        level: as `logging` names it; empty where it is not known.
        line: what it says.
    """

    time_s: float
    source: str
    level: str
    line: str

    def text(self, width: int) -> str:
        """As it is printed, the source in a column of `width`."""
        level = f"{self.level}: " if self.level in ("WARNING", "ERROR", "CRITICAL") else ""
        return f"{_clock(self.time_s)} {self.source:<{width}} | {level}{self.line}".rstrip()


class _Tail:
    """Reads what is new: lines that the server gathered, log files of this machine, the journal."""

    def __init__(self, client: Client, run: str, *, routine: bool) -> None:
        self._client, self._run, self._routine = client, run, routine
        folder = store.state(client, run).folder
        self._folder = Path(folder) if folder and Path(folder).is_dir() else Path("runs") / run
        self._files: dict[Path, _File] = {}
        self._logs_cursor = self._journal_cursor = b"0-0"
        self._single: dict[tuple[bool, str], deque[float]] = {}  # lines that only server or file had so far

    def more(self) -> list[Line]:
        """Lines that came since, by time."""
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
        told = [line for line in lines if self._routine or not _ROUTINE.match(line.line)]
        return sorted(told, key=lambda line: line.time_s)

    def _is_twin(self, line: Line, *, in_file: bool) -> bool:
        """Whether the line has been seen already: in the server if it is a file's, in a file if the server's."""
        words = line.line.strip()
        twins = self._single.get((not in_file, words), deque())
        for when in twins:
            if line.level and abs(when - line.time_s) < SAME_S:
                twins.remove(when)
                return True
        if len(self._single) > MAX_SINGLE:
            self._single.clear()
        self._single.setdefault((in_file, words), deque(maxlen=100)).append(line.time_s)
        return False


class _File:
    """A log file of this machine, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._time_s = 0.0
        self._source = f"{path.stem} {socket.gethostname()}"

    def more(self, ahead_s: float) -> list[Line]:
        """Whole lines after the last ones read; a file that shrank is read from its beginning.

        Args:
            ahead_s: how much the server's clock is ahead of this machine's.
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
        # What has no time of its own goes with the line before it; at the beginning, with the next one that has.
        when_s = self._time_s or next((_stamp_s(match[1]) for match in found if match is not None), changed_s)
        for text, match in zip(texts, found, strict=True):
            if match is not None:
                when_s = self._time_s = _stamp_s(match[1])
            level, said = (match[2], match[3]) if match is not None else ("", text)
            lines.append(Line(round(when_s + ahead_s, 3), self._source, level, said))
        return lines


def _stamp_s(text: str) -> float:
    """Seconds since the epoch, of this machine's clock, from a log's stamp."""
    return datetime.datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _details(row: dict[str, Any]) -> str:
    """The reason, and whatever else an entry holds; of a setting, what it was and is."""
    if row.get("event") == "set":
        return f"{row['option']}: {row['from']} -> {row['to']} at {int(row['env_steps']):,} env steps"
    rest = [f"{name}={value}" for name, value in row.items() if name not in ("time_s", "event", "reason")]
    return " ".join([part for part in (row.get("reason", ""), *rest) if part])
