"""`ddrl runs`, `stop`, `pause` and `delete`."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from ddrl.cli.format import duration, picked, train_s
from ddrl.cli.output import Client, InputError, Json, Run, Yes, confirm, emit, note, server, table
from ddrl.store import runs as store


def runs(
    number_of: Annotated[
        int, typer.Option("--last", "-n", min=1, help="Show only this many, the newest.")
    ] = 20,
    json_output: Json = False,
) -> None:
    """List the runs on the server, the newest last."""
    with server() as client:
        known = store.names(client)
        now_s = store.server_ms(client) / 1e3
        rows = [row for run in known[-number_of:] if (row := _describe(client, run, now_s)) is not None]
    if json_output:
        emit(rows)
        return
    if not rows:
        print("no runs yet; start one with `ddrl submit configs/lunar.yaml`")
        return
    plain = ("run", "status", "env", "env_steps", "updates", "return_mean")
    table(
        ("run", "status", "env", "env steps", "updates", "return", "train", "age", "reason"),
        [
            (
                *(row[name] for name in plain),
                duration(row["train_s"]),
                duration(now_s - row["created_s"]),
                row["reason"],
            )
            for row in rows
        ],
        left=("run", "status", "env", "reason"),
        optional=("reason", "updates", "age"),
    )
    if len(known) > len(rows):
        note(f"{len(known) - len(rows)} older runs not shown; show all with -n {len(known)}")


def stop(run: Run = "last", json_output: Json = False) -> None:
    """End a run: its learner saves everything, its workers play other runs."""
    _change(run, "stopped", "stopped by the operator", json_output)


def pause(run: Run = "last", json_output: Json = False) -> None:
    """Pause a run until `ddrl resume`; nothing is lost."""
    _change(run, "paused", "paused by the operator", json_output)


def delete(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id of an ended run, the start of one, or: last.")
    ],
    yes: Yes = False,
    files: Annotated[bool, typer.Option("--files", help="Delete its folder of artifacts too.")] = False,
    json_output: Json = False,
) -> None:
    """Delete an ended run from the server, with its experience, weights and evaluations."""
    with server() as client:
        run = store.resolve(client, run)
        state = store.state(client, run)
        if not state.ended:
            raise InputError(f"run {run}: is {state.status}; stop it first with `ddrl stop {run}`")
        folder = _own_folder(state) if files else None
        also = f" and {folder}" if folder else ""
        confirm(f"run {run}:", f"Delete run {run}{also} for good?", yes)
        removed = store.delete(client, run)
    if folder is not None:
        shutil.rmtree(folder)
    if json_output:
        emit({"run": run, "keys": removed, "folder": str(folder) if folder else None})
    else:
        print(f"deleted {run}: {removed} keys{also}")


def _describe(client: Client, run: str, now_s: float) -> dict[str, Any] | None:
    """Return a row of `ddrl runs`; None if the run was deleted meanwhile."""
    try:
        state, config = store.state(client, run), store.config(client, run)
    except store.UnknownRunError:
        return None
    return {
        **picked(state, "run", "status", "reason", "updates", "version", "weight", "priority", "created_s"),
        "env": config.env.id,
        "algorithm": config.algorithm["name"],
        "env_steps": state.appended_steps,
        "return_mean": (state.evaluation or {}).get("return_mean"),
        "train_s": train_s(state, now_s),
        "leased": state.leased,
        "artifacts": state.folder,
    }


def _change(run: str, new: str, reason: str, json_output: bool) -> None:
    with server() as client:
        run = store.resolve(client, run)
        old = store.state(client, run)
        if old.ended:
            remedy = "" if old.status == "solved" else f"; `ddrl resume {run}` continues it"
            raise InputError(f"run {run}: has already ended ({old.status}){remedy}")
        if old.status == new:
            raise InputError(f"run {run}: is already {new}; `ddrl resume {run}` continues it")
        if not store.set_status(client, run, new, reason):
            raise InputError(f"run {run}: has ended meanwhile ({store.status(client, run)})")
    if json_output:
        emit({"run": run, "status": new, "reason": reason})
    else:
        print(f"{new} {run}; continue it with `ddrl resume {run}`")


def _own_folder(state: store.RunState) -> Path | None:
    """Return the run's folder if it exists on this machine; refuse a folder of another name."""
    folder = Path(state.folder) if state.folder else Path("runs") / state.run
    if state.host and state.host != socket.gethostname():
        raise InputError(
            f"run {state.run}: its folder is on {state.host}; delete {folder} there, without --files here"
        )
    if not folder.is_dir():
        return None
    if folder.name != state.run:
        raise InputError(f"{folder}: not deleted: its name is not {state.run}; delete it by hand")
    return folder.resolve()
