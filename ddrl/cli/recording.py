"""`ddrl record`: a run's experience as a folder, while the run goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ddrl.cli.format import counted, size
from ddrl.cli.output import Json, Run, answer, note, progress, server_of
from ddrl.store import runs
from ddrl.store.recording import Recording

POLL_S = 0.5


def record(
    run: Run = "last",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder; one that is there goes on.")] = Path(
        "recording"
    ),
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
