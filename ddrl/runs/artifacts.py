"""What a run leaves behind in its folder: settings, figures as CSV and TensorBoard events, curves, a summary.

Everything is read from the server, so any machine can write it, at any time, for a run in any state.
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
from ddrl.runs.curves import plot
from ddrl.runs.records import Records, read, shown, summary
from ddrl.store import weights

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
    records = read(client, run)
    folder.mkdir(parents=True, exist_ok=True)
    evaluated = records.state.evaluation
    version = evaluated["version"] if evaluated else weights.index(client, run).latest
    written = [folder / "config.yaml"]
    if version >= 0:
        written.append(policy.save(client, run, version, folder / "policy.safetensors"))
    tree = records.config.model_dump(mode="json", by_alias=True)
    written[0].write_text(f"# run {run}\n" + yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    written.append(_write_csv(folder / "metrics.csv", _figure_names(records.figures), records.figures))
    written.append(_write_csv(folder / "episodes.csv", ("time_s", "env_steps", "return"), records.episodes))
    written.append(_write_csv(folder / "evaluations.csv", _EVALUATION_COLUMNS, records.evaluated))
    written.append(_write_csv(folder / "journal.csv", _JOURNAL_COLUMNS, records.journal))
    events = _write_events(folder / "tensorboard", records)
    if events is not None:
        written.append(events)
    written.append(plot(records, folder / "curve.png"))
    written.append(folder / "summary.json")
    written[-1].write_text(json.dumps(summary(client, run), indent=2) + "\n", encoding="utf-8")
    return written


_EVALUATION_COLUMNS = (
    *("time_s", "version", "purpose", "env_steps", "updates", "num_episodes", "first_seed"),
    *("return_mean", "return_std"),
)
_JOURNAL_COLUMNS = ("time_s", "event", "reason", "option", "from", "to", "env_steps")
_FIRST_COLUMNS = ("time_s", "env_steps", "updates")


def _figure_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names in the rows: time and counters first, the others as they first appear."""
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
    """TensorBoard events, over env steps; None where the extra is missing.

    The writer of the `tensorboard` package itself: `torch.utils.tensorboard` needs torch for the same bytes.
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
                metadata=create_summary_metadata("settings", "changed while the run went on"),
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
    for row in records.figures:
        named = {
            n: v for n, v in row.items() if n not in ("time_s", "env_steps") and isinstance(v, (int, float))
        }
        yield (
            row["time_s"],
            int(row.get("env_steps", 0)),
            {f"learner/{name}": value for name, value in named.items()},
        )
    for row in records.episodes:
        yield row["time_s"], row["env_steps"], {"return/training": row["return"]}
    for row in records.evaluated:
        tag = "confirmation" if row["purpose"] == "confirm" else "evaluation"
        yield row["time_s"], row["env_steps"], {f"return/{tag}": row["return_mean"]}
