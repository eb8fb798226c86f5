"""`ddrl runs`, `stop`, `pause` and `delete`."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import ddrl
from ddrl.cli import output
from ddrl.cli.format import duration, picked
from ddrl.cli.output import Client, InputError, Json, Run, Yes
from ddrl.store import runs as store
from ddrl.store.connection import StoreError

BY = " by the operator"  # the reason of a change of status


def runs(
    number_of: Annotated[int, typer.Option("--last", "-n", min=1, help="Show the newest, so many.")] = 20,
    tree: Annotated[bool, typer.Option("--tree", help="Show runs below those that they began from.")] = False,
    json_output: Json = False,
) -> None:
    """List the runs on the server, the newest last."""
    with output.server() as client:
        known = store.names(client)
        now_s = store.server_ms(client) / 1e3
        states = store.states(client, known[-number_of:])
        rows = [row for state in states if (row := describe(client, state, now_s))]
    if tree:
        rows = _as_tree(rows)
    if json_output:
        output.emit(rows)
        return
    if not rows:
        print("no runs yet; start one with `ddrl submit lunar`")
        return
    names = ("run", "status", "env", "env_steps", "updates", "return_mean")
    cells = []
    for row in rows:
        times = (duration(row["train_s"]), duration(now_s - row["created_s"]))
        shown = {**row, "run": "  " * row.get("depth", 0) + row["run"]}
        cells.append((*(shown[name] for name in names), *times, row["reason"]))
    header = ("run", "status", "env", "env steps", "updates", "return", "train", "age", "reason")
    texts = ("run", "status", "env", "reason")
    output.table(header, cells, left=texts, optional=("reason", "updates", "age"))
    if len(known) > len(rows):
        output.note(f"{len(known) - len(rows)} older runs not shown; show all with -n {len(known)}")


def _as_tree(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with their depth, each below the run that it began from."""
    below: dict[str, list[dict[str, Any]]] = {}
    known = {row["run"] for row in rows}
    for row in rows:
        parent = store.parent(row["from"])
        below.setdefault(parent if parent in known else "", []).append(row)

    def ordered(run: str, depth: int) -> Iterator[dict[str, Any]]:
        for row in below.get(run, []):
            yield {**row, "depth": depth}
            yield from ordered(row["run"], depth + 1)

    return list(ordered("", 0))


def stop(run: Run = "last", json_output: Json = False) -> None:
    """End a run: its learner saves everything, its workers play other runs."""
    _change(run, "stopped", json_output)


def pause(run: Run = "last", json_output: Json = False) -> None:
    """Pause a run until `ddrl resume`; nothing is lost."""
    _change(run, "paused", json_output)


def delete(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id of an ended run, the start of one, or: last.")
    ],
    yes: Yes = False,
    files: Annotated[bool, typer.Option("--files", help="Delete its folder of artifacts too.")] = False,
    json_output: Json = False,
) -> None:
    """Delete an ended run from the server, with its experience, weights and evaluations."""
    with output.server_of(run) as (client, run):
        state = store.state(client, run)
        if not state.ended:
            raise InputError(f"run {run}: is {state.status}; stop it first with `ddrl stop {run}`")
        folder = _own_folder(state) if files else None
        also = f" and {folder}" if folder else ""
        output.confirm(f"run {run}:", f"Delete run {run}{also} for good?", yes)
        removed = store.delete(client, run)
    if folder is not None:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            text = f"{folder}: cannot be deleted whole ({error.strerror}); the server has deleted {run}"
            raise InputError(text) from None
    report = {"run": run, "keys": removed, "folder": folder and str(folder)}
    output.answer(report, f"deleted {run}: {removed} keys{also}", json_output=json_output)


def describe(client: Client, state: store.RunState, now_s: float) -> dict[str, Any] | None:
    """Return a row of `ddrl runs`; None if the run was deleted meanwhile."""
    env = algorithm = None
    run, reason = state.run, state.reason
    try:
        if state.versions.get("ddrl") != ddrl.__version__:
            store.config(client, run)  # this version may not be able to read it
        spec = store.spec(client, run)
        env, algorithm = spec["env"]["id"], spec["algorithm"]["name"]
    except store.UnknownRunError:
        return None
    except StoreError as error:  # stored by another version of ddrl; the other runs are listed as ever
        reason = str(error).removeprefix(f"run {run}: ")
    return {
        **picked(state, "run", "status", "updates", "version", "weight", "priority", "created_s", "leased"),
        "reason": reason,
        "env": env,
        "algorithm": algorithm,
        "env_steps": state.appended_steps,
        "return_mean": (state.evaluation or {}).get("return_mean"),
        "from": state.warm or None,
        "train_s": state.train_s(now_s),
        "artifacts": state.folder,
    }


def change_status(client: Client, run: str, new: str) -> store.RunState:
    """Stop or pause a run; return its state before.

    Raises:
        InputError: it has ended, or is as wanted already.
    """
    old = store.state(client, run)
    if old.ended or (old.outcome and new == "paused"):
        remedy = "" if old.outcome in ("solved", "time") else f"; `ddrl resume {run}` continues it"
        raise InputError(f"run {run}: has already ended ({old.outcome}){remedy}")
    if old.status == new:
        raise InputError(f"run {run}: is already {new}; `ddrl resume {run}` continues it")
    if not old.outcome and not store.set_status(client, run, new, f"{new}{BY}"):
        raise InputError(f"run {run}: has ended meanwhile ({store.status(client, run)})")
    return old


def _change(run: str, new: str, json_output: bool) -> None:
    with output.server_of(run) as (client, run):
        old = change_status(client, run, new)
        if new == "paused":
            text = f"paused {run}; continue it with `ddrl resume {run}`"
            report = {"run": run, "status": new, "reason": f"{new}{BY}"}
            output.answer(report, text, json_output=json_output)
            return
        from ddrl.cli import live
        from ddrl.runs import processes
        from ddrl.runs.records import summary

        if old.leased:
            output.note(f"waiting for the learner on {old.host} to save the results")
        state = processes.finish(client, run)
        end = summary(client, run)
    output.answer(end, live.closing_lines(end, state), json_output=json_output)


def _own_folder(state: store.RunState) -> Path | None:
    """Return the run's folder in `runs`, if it is on this machine; refuse any other that the server may name."""
    from ddrl.runs import artifacts

    folder, known = Path("runs") / state.run, Path(state.folder or "runs")
    if state.host and state.host != socket.gethostname():
        remedy = f"delete {known} there, without --files here"
        raise InputError(f"run {state.run}: its folder is on {state.host}; {remedy}")
    if not folder.is_dir() and not artifacts.is_of(known, state.run):
        return None
    is_link = folder.parent.resolve() / state.run != folder.resolve()
    if not is_link and artifacts.is_of(folder, state.run):
        return folder.resolve()
    remedy = f"delete {known if state.folder else folder} by hand, and the run without --files"
    raise InputError(f"{folder}: is not a folder with the {artifacts.CONFIG} of run {state.run}; {remedy}")
