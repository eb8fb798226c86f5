"""`ddrl logs` and `ddrl journal`: what the processes of a run wrote, and every change of its state."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer

from ddrl.cli.output import Client, InputError, Json, Run, emit, server, table
from ddrl.store import runs as store

POLL_S = 0.3


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
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Newest lines of each log.")] = 50,
    json_output: Json = False,
) -> None:
    """Print a run's logs of this machine, each line after its log's name, and the run's journal."""
    if follow and json_output:
        raise InputError("--json: prints one value and ends, so it cannot go with --follow; leave one out")
    with server() as client:
        run = store.resolve(client, run)
        tail = _Tail(client, run, lines)
        rows = tail.first()
        if json_output:
            emit([{"source": source, "line": line} for source, line in rows])
            return
        _print(rows)
        while follow:
            ended = store.state(client, run).ended  # before the read, so that the last lines are seen
            _print(tail.more())
            if ended:
                return
            time.sleep(POLL_S)


class _Tail:
    """Reads what is new in the log files of a run's folder and in its journal."""

    def __init__(self, client: Client, run: str, lines: int) -> None:
        self._client, self._run, self._lines = client, run, lines
        folder = store.state(client, run).folder
        self._folder = Path(folder) if folder and Path(folder).is_dir() else Path("runs") / run
        self._offsets: dict[Path, int] = {}
        self._journal_seen = 0

    def first(self) -> list[tuple[str, str]]:
        """The newest lines of each source."""
        rows: list[tuple[str, str]] = []
        for source, new in self._read().items():
            rows.extend((source, line) for line in deque(new, self._lines))
        return rows

    def more(self) -> list[tuple[str, str]]:
        """Lines that came since."""
        return [(source, line) for source, new in self._read().items() for line in new]

    def _read(self) -> dict[str, list[str]]:
        found = {path.stem: self._read_file(path) for path in sorted(self._folder.glob("*.log"))}
        rows = store.journal(self._client, self._run)
        new, self._journal_seen = rows[self._journal_seen :], len(rows)
        return {
            **found,
            "journal": [f"{_clock(r['time_s'])} {r.get('event', '')} {_details(r)}".rstrip() for r in new],
        }

    def _read_file(self, path: Path) -> list[str]:
        """Whole lines after the last ones read; a file that shrank is read from its beginning."""
        try:
            with path.open("rb") as file:
                start = self._offsets.get(path, 0)
                if file.seek(0, 2) < start:
                    start = 0
                file.seek(start)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = start + len(whole)
        return whole.decode(errors="replace").splitlines()


def _print(rows: list[tuple[str, str]]) -> None:
    for source, line in rows:
        print(f"{source:>10} | {line}", flush=True)


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _details(row: dict[str, Any]) -> str:
    """The reason, and whatever else an entry holds."""
    rest = [f"{name}={value}" for name, value in row.items() if name not in ("time_s", "event", "reason")]
    return " ".join([part for part in (row.get("reason", ""), *rest) if part])
