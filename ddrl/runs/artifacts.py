"""A run's folder: policy, settings, CSV files, TensorBoard events, curves, summary.

All of it is read from the server, so any machine can write it, at any time, for a run in any state.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ddrl import policy
from ddrl.runs.curves import plot_run
from ddrl.runs.records import Records, read, shown, summary

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)


def write(client: Redis, run: str, folder: Path) -> list[Path]:
    """Write a run's folder: policy, settings, CSV files, TensorBoard events, curves, summary; replace what is there.

    Args:
        client: connection to the server.
        run: its id.
        folder: made if absent.

    Returns:
        The files and folders written.

    Raises:
        UnknownRunError: there is no such run.
    """
    records, end = read(client, run), summary(client, run)
    folder.mkdir(parents=True, exist_ok=True)
    config, summary_ = folder / "config.yaml", folder / "summary.json"
    tree = records.config.model_dump(mode="json", by_alias=True)
    config.write_text(f"# run {run}\n" + yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    summary_.write_text(json.dumps(end, indent=2) + "\n", encoding="utf-8")
    tables: list[tuple[str, Sequence[str], list[dict[str, Any]]]] = [
        ("metrics", _figure_names(records.figures), records.figures),
        ("episodes", ("time_s", "env_steps", "return"), records.episodes),
        ("evaluations", _EVALUATION_COLUMNS, records.evaluated),
        ("journal", _JOURNAL_COLUMNS, records.journal),
    ]
    written = [config, *(_write_csv(folder / f"{name}.csv", columns, rows) for name, columns, rows in tables)]
    if (version := end["policy_version"]) >= 0:
        written.append(policy.save(client, run, version, folder / "policy.safetensors"))
    if (events := _write_events(folder / "tensorboard", records)) is not None:
        written.append(events)
    return [*written, plot_run(records, folder / "curve.png"), summary_]


_EVALUATION_COLUMNS = (
    *("time_s", "version", "purpose", "env_steps", "updates", "num_episodes", "first_seed"),
    *("return_mean", "return_std"),
)
_JOURNAL_COLUMNS = ("time_s", "event", "reason", "option", "from", "to", "env_steps")
_FIRST_COLUMNS = ("time_s", "env_steps", "updates")


def _figure_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return all names in the rows: time and counters first, then in order of appearance."""
    seen = dict.fromkeys(_FIRST_COLUMNS)
    for row in rows:
        seen.update(dict.fromkeys(row))
    return list(seen)


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _write_events(folder: Path, records: Records) -> Path | None:
    """Write TensorBoard events over env steps; None if the extra is not installed.

    Uses the writer of the `tensorboard` package itself: `torch.utils.tensorboard` needs torch for the same bytes.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto
    except ImportError:
        log.info("no TensorBoard events: pip install 'ddrl[tensorboard]'")
        return None
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    start_s = records.state.first_step_s or records.state.created_s
    writer = EventFileWriter(str(folder))
    try:
        for time_s, env_steps, values in _event_rows(records):
            scalars = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
            writer.add_event(
                Event(wall_time=start_s + time_s, step=env_steps, summary=Summary(value=scalars))
            )
        for row in records.changes:
            text = Summary.Value(
                tag="settings",
                metadata=create_summary_metadata("settings", "changed during the run"),
                tensor=make_tensor_proto([f"{row['option']}: {shown(row['from'])} -> {shown(row['to'])}"]),
            )
            event = Event(
                wall_time=start_s + row["time_s"], step=row["env_steps"], summary=Summary(value=[text])
            )
            writer.add_event(event)
    finally:
        writer.close()
    return folder


def _event_rows(records: Records) -> Iterable[tuple[float, int, dict[str, float]]]:
    """Yield time_s, env_steps and values by tag."""
    for row in records.figures:
        values = {
            f"learner/{name}": value
            for name, value in row.items()
            if name not in ("time_s", "env_steps") and isinstance(value, (int, float))
        }
        yield row["time_s"], int(row.get("env_steps", 0)), values
    for row in records.episodes:
        yield row["time_s"], row["env_steps"], {"return/training": row["return"]}
    for row in records.evaluated:
        tag = "confirmation" if row["purpose"] == "confirm" else "evaluation"
        yield row["time_s"], row["env_steps"], {f"return/{tag}": row["return_mean"]}
