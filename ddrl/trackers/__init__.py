"""Tools in which people keep their results: each is told of a run while it goes on, by the machine that learns.

A tracker is a module of this folder with a class `Tracker`:

    Tracker(records, folder)        begins, or goes on with the run that has this id
    place                           where it keeps what it is told; "": in or beside the run's folder
    log(rows)                       tells it of rows: (env steps, server's time in seconds, figures by name)
    finish(records, folder)         gives it the curve, the policy and the end, if there is one

Each has a thread of its own. What fails is said once, and tried again; the learner never waits for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from ddrl.config import ConfigError, RunConfig
from ddrl.runs import artifacts, records
from ddrl.runs.records import Records, evaluation_name, learner_figures
from ddrl.store import connection, runs
from ddrl.store.connection import LeaseLostError
from ddrl.store.evaluations import INFO
from ddrl.store.local_checkpoints import write_whole

log = logging.getLogger(__name__)

MODULES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}  # tracker -> the package that it needs
PARTING_S = 60.0  # waited for the last report
MOST_PLACES = 20  # of a tracker; each folder of a run is one
Row = tuple[int, float, dict[str, float]]


class Tracker(Protocol):
    """A run in a tracking tool; see above."""

    place: str

    def log(self, rows: Iterable[Row]) -> None:
        """Tell it of rows, oldest first."""

    def finish(self, found: Records, folder: Path) -> None:
        """Give it what the folder holds, and end."""


def check(config: RunConfig) -> None:
    """Refuse a tracker that is not installed here.

    Raises:
        ConfigError: names it and the remedy.
    """
    for name in config.tracking:
        if importlib.util.find_spec(MODULES[name]) is None:
            remedy = f"pip install 'ddrl[{name}]', or leave it out"
            raise ConfigError(f"tracking: {name} is not installed here; {remedy}")


@contextlib.contextmanager
def following(config: RunConfig, run: str, token: int, folder: Path) -> Iterator[None]:
    """Tell a run's trackers of it while the context lasts, and of its end after it.

    Args:
        config: the run's.
        run: its id.
        token: fencing token of its lease.
        folder: the run's.
    """
    stop = Event()
    threads = [
        Thread(target=_follow, args=(name, run, token, folder, stop), name=name, daemon=True)
        for name in config.tracking
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PARTING_S)
            if thread.is_alive():
                late = "%s: %s takes longer than %.0f s for its last report"
                log.warning(late, run, thread.name, PARTING_S)


def _follow(name: str, run: str, token: int, folder: Path, stop: Event) -> None:
    """Tell one tracker of a run until `stop` is set, then of all that is left."""
    ends: dict[str, bytes] = {}
    place = ""  # where the tracker keeps what is reported
    reported: dict[str, dict[str, str]] = {}  # how far, by place
    tracker: list[Tracker] = []  # once it has begun

    def note() -> None:
        runs.note_reported(client, run, token, name, dict([*reported.items()][-MOST_PLACES:]))

    def tell() -> None:
        nonlocal ends, place, reported
        new = records.read(client, run, ends)
        if not new.state.first_step_s:  # from which times count
            return
        if not tracker:
            reported = runs.reported(client, run, name)
            folder.mkdir(parents=True, exist_ok=True)
            begun = importlib.import_module(f"ddrl.trackers.{name}").Tracker(new, folder)
            place = begun.place or _id_of(folder)
            ends = {table: end.encode() for table, end in reported.get(place, {}).items()}
            tracker.append(begun)
            new = records.read(client, run, ends)
        note()  # another learner may have taken over, which reports the rest
        tracker[0].log(rows(new))
        ends = new.ends
        reported.pop(place, None)
        reported[place] = {table: end.decode() for table, end in ends.items()}
        note()

    with contextlib.closing(connection.connect()) as client:
        said = artifacts.repeat([tell], stop, f"{run}: {name} cannot be told")
        try:
            with contextlib.suppress(LeaseLostError):
                tell()
            if tracker:
                tracker[0].finish(records.read(client, run), folder)
        except Exception as error:  # of a library, or an outage
            if str(error) != said:
                log.warning("%s: %s cannot be told of the end (%s)", run, name, error)


def _id_of(folder: Path) -> str:
    """Return a random name of a run's folder, which moves with it."""
    file = folder / ".place"
    if not file.exists():
        write_whole(file, secrets.token_hex(8).encode())
    return file.read_text()


def rows(new: Records) -> Iterator[Row]:
    """Yield the learner's figures and the evaluations, the latter with the 95 % interval of their mean."""
    for row in new.figures:
        yield _row(new, row, learner_figures(row))
    for row in new.evaluated:
        name, mean = evaluation_name(row), row["return_mean"]
        half = 1.96 * row["return_std"] / row["num_episodes"] ** 0.5
        infos = {info: row[info] for info in row if info.startswith(INFO)}
        yield _row(new, row, {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half, **infos})


def _row(new: Records, row: Mapping[str, Any], figures: dict[str, float]) -> Row:
    return int(row["env_steps"]), new.state.start_s + row["time_s"], figures


def results(folder: Path) -> list[Path]:
    """Return the files of a run's folder that a tracker keeps."""
    wanted = ("curve.png", "policy.safetensors", "config.yaml", "summary.json", "*.mp4")
    return [path for pattern in wanted for path in sorted(folder.glob(pattern))]
