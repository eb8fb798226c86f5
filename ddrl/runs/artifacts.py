"""A run's folder: files that are made from the server's records, while the run goes on and when it has ended.

Any machine can write them, at any time, for a run in any state.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread

import yaml

from ddrl import policy
from ddrl.runs import prune, records
from ddrl.runs.curves import plot_run
from ddrl.runs.tables import Tables
from ddrl.store import connection, leases, runs, weights
from ddrl.store.connection import LeaseLostError, Redis, RunGoneError, StoreError
from ddrl.store.history import History
from ddrl.store.local_checkpoints import write_whole
from ddrl.store.runs import UnknownRunError

log = logging.getLogger(__name__)

CONFIG = "config.yaml"  # its first line names the run
EVERY_S = 10.0  # between two updates of a running run, at least
SHARE = 0.005  # of all time, that the updates of a folder, or of a tracker, take at most
PARTING_S = 30.0  # waited for a write at the end


@contextlib.contextmanager
def following(run: str, token: int, folder: Path) -> Iterator[None]:
    """Keep a running run's folder up to date, and its history on the server, in a thread of its own.

    A disk that hangs does not stop the learner.

    Args:
        run: its id.
        token: of the learner, who holds the run.
        folder: the run's.
    """
    stop = Event()
    thread = Thread(target=_follow, args=(run, token, folder, stop), name="folder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PARTING_S)


def _follow(run: str, token: int, folder: Path, stop: Event) -> None:
    """Update the folder until `stop` is set."""
    with contextlib.ExitStack() as resources:
        client = resources.enter_context(contextlib.closing(connection.connect()))
        opened: list[tuple[History, Tables]] = []  # once it can be

        def add_rows() -> None:
            if not runs.state(client, run).first_step_s:  # from which times count
                return
            if not opened:
                tables = resources.enter_context(contextlib.closing(Tables(run, folder)))
                opened.append((History(client, run, token), tables))
            [(history, tables)] = opened
            new = records.read(client, run, tables.ends)
            history.add({"metrics": new.figures, "episodes": new.episodes})
            tables.add(new)

        updates = add_rows, partial(_write_state, client, run, folder)
        repeat(updates, stop, f"{folder}: cannot be brought up to date")


def repeat(updates: Sequence[Callable[[], None]], stop: Event, failed: str) -> str:
    """Make updates every EVERY_S until `stop` is set or the run is another's, in at most SHARE of this thread's time.

    Each has an equal part of it, and is due once it has taken no more, with its last cost. The first time, which
    imports and opens what it needs, does not count. An outage is left to the learner to log.

    Args:
        updates: what to call.
        stop: ends it.
        failed: begins the warning about an update that fails, which is given once.

    Returns:
        The reason of the last warning.
    """
    began, said = time.monotonic(), ""
    costs: dict[Callable[[], None], float] = {}  # of the last time, in seconds of the processor
    spent_s = dict.fromkeys(updates, 0.0)
    while not stop.wait(EVERY_S):
        for update in updates:
            due_s = SHARE / len(updates) * (time.monotonic() - began)
            if spent_s[update] + costs.get(update, 0.0) > due_s:
                continue
            at_s = time.thread_time()
            try:
                update()
            except (LeaseLostError, RunGoneError, UnknownRunError):
                return said
            except connection.OUTAGES:
                pass
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("%s (%s); tries again", failed, said)
            took_s = time.thread_time() - at_s if update in costs else 0.0
            costs[update] = took_s
            spent_s[update] += took_s
    return said


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
        reason = str(error) or type(error).__name__
        raise StoreError(f"run {run}: the results cannot be written to {folder} ({reason})") from error
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
    with contextlib.closing(Tables(run, folder)) as tables:
        tables.add(records.read(client, run, tables.ends))
    _write_state(client, run, folder)


def _write_state(client: Redis, run: str, folder: Path) -> None:
    """Write policy, settings, summary and curves, each whole or not at all."""
    found, totals = records.read(client, run), records.summary(client, run)
    tree = found.config.model_dump(mode="json", by_alias=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CONFIG, (_first_line(run) + yaml.safe_dump(tree, sort_keys=False)).encode())
    write_whole(folder / "summary.json", (json.dumps(totals, indent=2) + "\n").encode())
    if (version := totals["policy_version"]) in weights.index(client, run).sizes:  # else none is published
        policy.save(client, run, version, folder / "policy.safetensors")
    write_whole(folder / "curve.png", plot_run(found))


def is_of(folder: Path, run: str) -> bool:
    """Return whether `write` wrote this folder for the run."""
    try:
        return (folder / CONFIG).read_text("utf-8", errors="replace").startswith(_first_line(run))
    except OSError:
        return False


def _first_line(run: str) -> str:
    return f"# run {run}\n"
