"""`ddrl record` and `ddrl rerun`: a run's experience as a folder, and learning from it again, bit for bit."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ddrl.cli.format import counted, size
from ddrl.cli.output import InputError, Json, Run, answer, note, progress, server_of
from ddrl.store import runs
from ddrl.store.recording import Recording

FOLDER = Path("recording")
POLL_S = 0.5


def record(
    run: Run = "last",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder; one that is there goes on.")
    ] = FOLDER,
    json_output: Json = False,
) -> None:
    """Write a run's experience to a folder, to learn from it elsewhere, until the run ends."""
    with server_of(run) as (client, run):
        recording = Recording(client, run, output)
        with progress("recorded {:,} of {:,} env steps", quiet=json_output) as show:
            try:
                while True:
                    state = runs.state(client, run)  # before the look that may be the last
                    is_news = recording.catch_up()
                    show(recording.num_steps, state.appended_steps)
                    if state.ended:
                        break
                    time.sleep(0.0 if is_news else POLL_S)
            except KeyboardInterrupt:
                note(f"{output}: {counted(recording.num_entries, 'fragment')}; the same command goes on")
                raise
    report = {"run": run, "folder": str(output), "fragments": recording.num_entries}
    report |= {"missed": recording.num_missed, "bytes": recording.num_bytes}
    text = f"{output}: {counted(recording.num_entries, 'fragment')} of {run}, {size(recording.num_bytes)}"
    missed = f"; {recording.num_missed:,} had left the stream before" if recording.num_missed else ""
    answer(report, text + missed, json_output=json_output)


def rerun(
    run: Run = "last",
    folder: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="A recording. Default: the server's stream."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Learn a run again from its recorded stream, and compare the weights of its versions bit for bit."""
    with server_of(run) as (client, run):
        from ddrl.learner.rerun import rerun as learn

        with progress("update {:,} of {:,}", quiet=json_output) as show:
            found = learn(client, run, folder, show)
    if not found.equal and found.differs is None:
        raise InputError(f"{run}: none of its versions that are kept was reached again")
    text = f"{run}: {counted(found.updates, 'update')} from {counted(found.env_steps, 'env step')}: "
    text += f"{counted(len(found.equal), 'version')} equal bit for bit"
    if found.differs is not None:
        last = f"version {found.equal[-1]} is equal" if found.equal else "none before it is equal"
        text += f"; version {found.differs}, of {counted(found.updates, 'update')}, differs, {last}"
    elif found.unreached:
        text += f"; {counted(found.unreached, 'kept version')} not reached"
    answer({"run": run, **asdict(found)}, text, json_output=json_output)
    if found.differs is not None:
        raise typer.Exit(1)
