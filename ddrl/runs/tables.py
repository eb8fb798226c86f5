"""The tables of a run's folder, to which rows are added while the run goes on: CSV files and TensorBoard events.

`.written.json` says how far they go: the last entry of each of the server's streams, and the bytes of each file. What a
process that was killed has written beyond is cut off, and written again.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddrl.runs.records import Records, evaluation_name, learner_figures, shown
from ddrl.store.evaluations import INFO
from ddrl.store.local_checkpoints import write_whole

log = logging.getLogger(__name__)

WRITTEN = ".written.json"
_FORMULA = re.compile(r"\s*(?:[=@]|[+-](?![\d.e]+$))")
_COUNTERS = ("time_s", "env_steps", "updates")
_EVALUATIONS = (
    *("time_s", "version", "purpose", "env_steps", "updates", "num_episodes", "first_seed"),
    *("return_mean", "return_std"),
)
_JOURNAL = ("time_s", "event", "reason", "option", "from", "to", "env_steps")


class Tables:
    """Adds rows to the tables in a run's folder.

    Args:
        run: its id; tables of another are replaced.
        folder: the run's.
    """

    def __init__(self, run: str, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._sizes: dict[str, int] = {}  # name of a file -> bytes
        self.ends: dict[str, bytes] = {}  # `Records.ends` of what they hold
        self._events: _Events | None = None
        self._lacks_tensorboard = False
        folder.mkdir(parents=True, exist_ok=True)
        try:
            written = json.loads((folder / WRITTEN).read_text())
            if written["run"] == run and all(
                (folder / name).stat().st_size >= size for name, size in written["bytes"].items()
            ):
                self._sizes = written["bytes"]
                self.ends = {name: end.encode() for name, end in written["ends"].items()}
        except (OSError, ValueError, KeyError):
            pass  # they begin anew
        for path in folder.glob("tensorboard/events.out.tfevents.*"):
            if (size := self._sizes.get(name := str(path.relative_to(folder)))) is None:
                path.unlink()
            else:
                os.truncate(folder / name, size)

    def add(self, new: Records) -> None:
        """Add what the server has got since `ends`."""
        infos = [INFO + name for name in new.config.env.metrics]
        tables: list[tuple[str, Iterable[str], list[dict[str, Any]]]] = [
            (
                "metrics",
                dict.fromkeys([*_COUNTERS, *(name for row in new.figures for name in row)]),
                new.figures,
            ),
            ("episodes", ("time_s", "env_steps", "return"), new.episodes),
            ("evaluations", (*_EVALUATIONS, *infos), new.evaluated),
            ("journal", _JOURNAL, new.journal),
        ]
        sizes = dict(self._sizes)  # kept once all is written: what fails half-way is written again
        for table, columns, rows in tables:
            name = f"{table}.csv"
            sizes[name] = _append(self._folder / name, columns, rows, sizes.get(name, 0))
        if any(rows for _, _, rows in tables) and (events := self._open_events()):
            events.add(new)
            sizes[str(events.path.relative_to(self._folder))] = events.path.stat().st_size
        ends = {name: end.decode() for name, end in new.ends.items()}
        written = {"run": self._run, "ends": ends, "bytes": sizes}
        write_whole(self._folder / WRITTEN, json.dumps(written).encode())
        self._sizes, self.ends = sizes, new.ends

    def _open_events(self) -> _Events | None:
        """Return the events file of this process; None without `ddrl[tensorboard]`."""
        if self._events is None and not self._lacks_tensorboard:
            try:
                self._events = _Events(self._folder / "tensorboard")
            except ImportError:
                log.info("no TensorBoard events: pip install 'ddrl[tensorboard]'")
                self._lacks_tensorboard = True
        return self._events

    def close(self) -> None:
        """Close the files."""
        if self._events is not None:
            self._events.close()


def _append(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]], size: int) -> int:
    """Add rows after the first `size` bytes of a CSV file, and columns where it lacks some; return its new size."""
    known: list[str] = []
    if size:
        with path.open(newline="", encoding="utf-8") as file:
            known = next(csv.reader(file))
    names = [*known, *(column for column in columns if column not in known)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
    if names != known:
        writer.writeheader()
        if size:
            before = io.StringIO(path.read_bytes()[:size].decode(), newline="")
            writer.writerows(csv.DictReader(before))
        size = 0
    writer.writerows({column: _literal(value) for column, value in row.items()} for row in rows)
    if size:
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(text.getvalue().encode())
            return file.tell()
    data = text.getvalue().encode()
    write_whole(path, data)
    return len(data)


def _literal(value: Any) -> Any:
    """Return a value for a CSV file; a text that spreadsheets would compute begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


class _Events:
    """A file of TensorBoard events with env steps as the step axis.

    Uses the `tensorboard` package directly, because `torch.utils.tensorboard` would import torch.

    Args:
        folder: of the file.

    Raises:
        ImportError: `ddrl[tensorboard]` is not installed.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        before = {*folder.glob("*")}
        self._writer = EventFileWriter(str(folder))
        [self.path] = {*folder.glob("*")} - before

    def add(self, new: Records) -> None:
        """Write rows, which are in the file when this returns."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        def add(row: Mapping[str, Any], *values: Any) -> None:
            when, step = new.state.start_s + row["time_s"], int(row.get("env_steps", 0))
            self._writer.add_event(Event(wall_time=when, step=step, summary=Summary(value=values)))

        def add_numbers(row: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
            add(row, *(Summary.Value(tag=tag, simple_value=float(value)) for tag, value in numbers.items()))

        for row in new.figures:
            add_numbers(row, learner_figures(row))
        for row in new.episodes:
            add_numbers(row, {"return/training": row["return"]})
        for row in new.evaluated:
            infos = {name: row[name] for name in row if name.startswith(INFO)}
            add_numbers(row, {evaluation_name(row): row["return_mean"], **infos})
        metadata = create_summary_metadata("settings", "changed during the run")
        for row in new.changes:
            text = f"{row['option']}: {shown(row['from'])} -> {shown(row['to'])}"
            add(row, Summary.Value(tag="settings", metadata=metadata, tensor=make_tensor_proto([text])))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
