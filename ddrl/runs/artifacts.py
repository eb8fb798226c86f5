"""Files of a run's folder that are made from the server's records.

Any machine can write them, at any time, for a run in any state.
"""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ddrl import policy
from ddrl.runs import prune
from ddrl.runs.curves import plot_run
from ddrl.runs.records import Records, read, shown, summary
from ddrl.store import connection, leases, runs, weights
from ddrl.store.connection import Redis, StoreError
from ddrl.store.evaluations import INFO

log = logging.getLogger(__name__)


CONFIG = "config.yaml"  # its first line names the run
_COUNTERS = ("time_s", "env_steps", "updates")
_FORMULA = re.compile(r"\s*(?:[=@]|[+-](?![\d.e]+$))")
_EVALUATIONS = (
    *("time_s", "version", "purpose", "env_steps", "updates", "num_episodes", "first_seed"),
    *("return_mean", "return_std"),
)
_JOURNAL = ("time_s", "event", "reason", "option", "from", "to", "env_steps")


def complete(client: Redis, run: str, token: int, folder: Path) -> None:
    """Write the folder of an ended run, and note that its results are complete.

    Args:
        token: of the caller, who holds the run: only the holder writes the folder.

    Raises:
        LeaseLostError: the run was taken.
        StoreError: the folder cannot be written, which the run does not wait for.
    """
    leases.renew(client, run, token)
    try:
        write(client, run, folder)
    except connection.OUTAGES:
        raise
    except Exception as error:  # whatever a worker has written: the run ends
        runs.complete(client, run, token, prune.size(client, run))
        raise StoreError(
            f"run {run}: the results cannot be written to {folder} ({str(error) or type(error).__name__})"
        ) from error
    runs.complete(client, run, token, prune.size(client, run))


def write(client: Redis, run: str, folder: Path) -> None:
    """Write policy, settings, CSV files, TensorBoard events, curves and summary; replace older versions of them.

    Args:
        client: connection to the server.
        run: its id.
        folder: made if absent. Other files in it stay.

    Raises:
        UnknownRunError: there is no such run.
    """
    records, totals = read(client, run), summary(client, run)
    folder.mkdir(parents=True, exist_ok=True)
    tree = records.config.model_dump(mode="json", by_alias=True)
    (folder / CONFIG).write_text(_first_line(run) + yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(totals, indent=2) + "\n", encoding="utf-8")
    if (version := totals["policy_version"]) in weights.index(client, run).sizes:  # else none is published
        policy.save(client, run, version, folder / "policy.safetensors")
    metric_names = dict.fromkeys([*_COUNTERS, *(name for row in records.figures for name in row)])
    infos = [INFO + name for name in records.config.env.metrics]
    tables: list[tuple[str, Iterable[str], list[dict[str, Any]]]] = [
        ("metrics", metric_names, records.figures),
        ("episodes", ("time_s", "env_steps", "return"), records.episodes),
        ("evaluations", [*_EVALUATIONS, *infos], records.evaluated),
        ("journal", _JOURNAL, records.journal),
    ]
    for name, columns, rows in tables:
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*columns], restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows({column: _literal(value) for column, value in row.items()} for row in rows)
    plot_run(records, folder / "curve.png")
    _write_events(folder / "tensorboard", records)


def _literal(value: Any) -> Any:
    """Return a value for a CSV file; a text that spreadsheets would compute begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def is_of(folder: Path, run: str) -> bool:
    """Return whether `write` wrote this folder for the run."""
    try:
        return (folder / CONFIG).read_text("utf-8", errors="replace").startswith(_first_line(run))
    except OSError:
        return False


def _first_line(run: str) -> str:
    return f"# run {run}\n"


def _write_events(folder: Path, records: Records) -> None:
    """Write TensorBoard events with env steps as the step axis, if `ddrl[tensorboard]` is installed.

    Uses the `tensorboard` package directly, because `torch.utils.tensorboard` would import torch.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto
    except ImportError:
        log.info("no TensorBoard events: pip install 'ddrl[tensorboard]'")
        return
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = EventFileWriter(str(folder))

    def add(row: Mapping[str, Any], *values: Any) -> None:
        when, step = records.state.start_s + row["time_s"], int(row.get("env_steps", 0))
        writer.add_event(Event(wall_time=when, step=step, summary=Summary(value=values)))

    def add_numbers(row: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        add(row, *(Summary.Value(tag=tag, simple_value=float(value)) for tag, value in numbers.items()))

    try:
        for row in records.figures:
            values = {f"learner/{name}": row[name] for name in row if name not in ("time_s", "env_steps")}
            add_numbers(row, {tag: value for tag, value in values.items() if isinstance(value, int | float)})
        for row in records.episodes:
            add_numbers(row, {"return/training": row["return"]})
        for row in records.evaluated:
            tag = "return/confirmation" if row["purpose"] == "confirm" else "return/evaluation"
            infos = {name: row[name] for name in row if name.startswith(INFO)}
            add_numbers(row, {tag: row["return_mean"], **infos})
        metadata = create_summary_metadata("settings", "changed during the run")
        for row in records.changes:
            text = f"{row['option']}: {shown(row['from'])} -> {shown(row['to'])}"
            add(row, Summary.Value(tag="settings", metadata=metadata, tensor=make_tensor_proto([text])))
    finally:
        writer.close()
