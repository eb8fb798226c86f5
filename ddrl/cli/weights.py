"""`ddrl weights`: the versions of a run's weights that the server keeps."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Annotated, Any, Literal

import typer

from ddrl.cli.format import duration, score, size
from ddrl.cli.output import Client, InputError, Json, emit, server_of, table
from ddrl.cli.policies import Force, Output, choose, export
from ddrl.store import evaluations, runs
from ddrl.store import weights as store


def weights(
    action: Annotated[
        Literal["list", "get", "best"], typer.Argument(help="get does what `ddrl export` does.")
    ],
    target: Annotated[str, typer.Argument(metavar="RUN", help="A run; for get also RUN@VERSION.")] = "last",
    output: Output = None,
    force: Force = False,
    json_output: Json = False,
) -> None:
    """List the versions that a run keeps, show the best one, or write one to a file."""
    if action == "get":
        export(target, output=output, force=force, json_output=json_output)
        return
    if output or force:
        raise InputError(f"--output and --force: are for `ddrl weights get`; remove them from {action}")
    with server_of(target) as (client, run):
        best = choose(client, run, action) if action == "best" else None
        rows = [row for row in _rows(client, run) if best in (None, row["version"])]
        if best is not None and not rows:
            raise InputError(f"run {run}: its best version {best} is no longer kept; use {run}@latest")
    if json_output:
        emit(rows if action == "list" else rows[0])
        return
    cells = []
    for row in rows:
        figures = (duration(row["age_s"]), row["updates"], size(row["bytes"]), score(row), row["episodes"])
        cells.append((str(row["version"]), *figures, ", ".join(row["kept_as"])))
    table(("version", "age", "updates", "size", "return", "episodes", "kept as"), cells, left=("kept as",))


def _rows(client: Client, run: str) -> list[dict[str, Any]]:
    """Return the versions that are kept, oldest first, each with its score over all episodes evaluated."""
    stored, config = store.index(client, run), runs.config(client, run).weights
    now_ms, evaluated = runs.server_ms(client), evaluations.results(client, run)[0]
    rows = []
    for place, version in enumerate(sorted(stored.sizes, reverse=True)):
        scores = [score for row in evaluated if row["version"] == version for score in row["returns"]]
        mean, std = (fmean(scores), pstdev(scores)) if scores else (None, None)
        published_ms, updates = stored.published[version]
        row = {"version": version, "published_s": published_ms and published_ms / 1e3, "updates": updates}
        row |= {"age_s": published_ms and (now_ms - published_ms) / 1e3, "bytes": stored.sizes[version]}
        row |= {"return_mean": mean, "return_std": std, "episodes": len(scores)}
        reasons = {"best": version == stored.best, f"newest {config.keep_last}": place < config.keep_last}
        reasons[f"every {config.keep_every}"] = version % config.keep_every == 0
        kept_as = [reason for reason, holds in reasons.items() if holds] or ["until the next version"]
        rows.append({**row, "kept_as": kept_as})
    return rows[::-1]
