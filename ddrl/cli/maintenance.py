"""`ddrl prune` and `ddrl schema`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ddrl.cli.format import counted, duration, size
from ddrl.cli.output import InputError, Json, Yes, confirm, emit, note, num_bytes, seconds, server, table


def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Delete runs that ended longer ago, such as 30d.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(help="Delete the oldest until all ended runs together take less, such as 10GB."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Delete ended runs from the server by age and by size, and keys that belong to no run; folders stay."""
    from ddrl.runs import prune as pruning
    from ddrl.store import runs

    if older_than is None and max_bytes is None:
        raise InputError("prune: give --older-than or --max-bytes, such as --older-than 30d")
    limits = seconds(older_than, "--older-than"), num_bytes(max_bytes, "--max-bytes")
    with server() as client:
        rows = pruning.prune(client, *limits, dry_run=True)
        number = counted(len(rows), "run")
        if rows and not json_output:
            now_s = runs.server_ms(client) / 1e3
            cells = []
            for row in rows:
                age = f"{duration(now_s - row.ended_s)} ago"
                cells.append((row.run, row.status, age, size(row.bytes), row.reason))
            table(("run", "status", "ended", "size", "why"), cells, left=("run", "status", "why"))
        if rows and not dry_run:
            confirm(f"prune: {number}", f"Delete {number} for good?", yes)
            rows = pruning.prune(client, *limits)
        num_strays, stray_bytes = pruning.delete_strays(client, dry_run)
    freed, verb = sum(row.bytes for row in rows), "would free" if dry_run else "freed"
    if json_output:
        strays = {"keys": num_strays, "bytes": stray_bytes}
        report = {"dry_run": dry_run, "bytes": freed, "runs": [asdict(row) for row in rows], "strays": strays}
        return emit(report)
    if num_strays:
        print(f"{verb} {size(stray_bytes)} of {counted(num_strays, 'key')} that belonged to no run")
    if rows:
        print(f"{verb} {size(freed)} of {counted(len(rows), 'run')}")
        note("their folders stay; `ddrl delete RUN --files` deletes a folder with its run")
    elif not num_strays:
        print("nothing to prune")


def schema() -> None:
    """Print the JSON schema of a run's configuration, and of each algorithm's options."""
    from ddrl.algorithms import base
    from ddrl.config import RunConfig

    document: dict[str, Any] = RunConfig.model_json_schema(by_alias=True)
    document["algorithms"] = {
        name: base.config_class(name).model_json_schema(by_alias=True) for name in base.names()
    }
    print(json.dumps(document, indent=2))
