"""`ddrl prune` and `ddrl schema`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ddrl.cli.format import counted, duration, size
from ddrl.cli.output import InputError, Json, Yes, confirm, emit, note, server, table


def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Delete runs that ended longer ago, such as 30d.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes", help="Delete the oldest until all ended runs together take less, such as 10GB."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Delete ended runs from the server by age and by size; their folders stay."""
    from ddrl import config
    from ddrl.runs import prune as pruning
    from ddrl.store import runs

    if older_than is None and max_bytes is None:
        raise InputError("prune: give --older-than or --max-bytes, such as --older-than 30d")
    older_than_s = None if older_than is None else config.duration(older_than, "--older-than")
    limit = None if max_bytes is None else num_bytes(max_bytes, "--max-bytes")
    with server() as client:
        rows = pruning.prune(client, older_than_s, limit, dry_run=True)
        if rows and not json_output:
            now_s = runs.server_ms(client) / 1e3
            ages = [f"{duration(now_s - row.ended_s)} ago" for row in rows]
            table(
                ("run", "status", "ended", "size", "why"),
                [
                    (row.run, row.status, age, size(row.bytes), row.reason)
                    for row, age in zip(rows, ages, strict=True)
                ],
                left=("run", "status", "why"),
            )
        if rows and not dry_run:
            confirm(
                f"prune: {counted(len(rows), 'run')}", f"Delete {counted(len(rows), 'run')} for good?", yes
            )
            rows = pruning.prune(client, older_than_s, limit)
    freed = sum(row.bytes for row in rows)
    if json_output:
        emit({"dry_run": dry_run, "bytes": freed, "runs": [asdict(row) for row in rows]})
    elif rows:
        print(f"{'would free' if dry_run else 'freed'} {size(freed)} of {counted(len(rows), 'run')}")
        note("their folders stay; `ddrl delete RUN --files` deletes a folder with its run")
    else:
        print("nothing to prune")


def num_bytes(text: str, option: str) -> int:
    """Return the bytes of a size given to an option.

    Raises:
        InputError: it is not a size.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InputError(f"{option} {text}: not a size; use 500MB or 10GB") from None


def schema() -> None:
    """Print the JSON schema of a run's configuration, and of each algorithm's options."""
    from ddrl.algorithms import base
    from ddrl.config import RunConfig

    document: dict[str, Any] = RunConfig.model_json_schema(by_alias=True)
    document["algorithms"] = {
        name: base.config_class(name).model_json_schema(by_alias=True) for name in base.names()
    }
    print(json.dumps(document, indent=2))
