"""`ddrl prune`: ended runs that are old, or too many for the server's memory, go."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ddrl.cli.output import InputError, Json, duration, emit, note, server, size, table


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_output: Json = False,
) -> None:
    """Delete ended runs from the server by age and by size; folders of artifacts stay."""
    from ddrl import config
    from ddrl.runs import prune as housekeeping
    from ddrl.store import runs

    if older_than is None and max_bytes is None:
        raise InputError("prune: says nothing of what is to go; add --older-than 30d or --max-bytes 10GB")
    older_s = None if older_than is None else config.duration(older_than, "--older-than")
    most = None if max_bytes is None else num_bytes(max_bytes, "--max-bytes")
    with server() as client:
        rows = housekeeping.prune(client, older_s, most, dry_run=True)
        now_s = runs.server_ms(client) / 1e3
        if not json_output:
            _show(rows, now_s)
        if rows and not dry_run:
            if not yes:
                if not sys.stdin.isatty():
                    raise InputError(
                        f"prune: {len(rows)} runs not deleted, as nobody can be asked; add --yes"
                    )
                typer.confirm(f"Delete {_runs(len(rows))} for good?", abort=True, err=True)
            rows = housekeeping.prune(client, older_s, most)
    freed = sum(row.num_bytes for row in rows)
    if json_output:
        emit(
            {
                "dry_run": dry_run,
                "bytes": freed,
                "runs": [
                    {
                        "run": row.run,
                        "status": row.status,
                        "ended_s": row.ended_s,
                        "bytes": row.num_bytes,
                        "reason": row.reason,
                    }
                    for row in rows
                ],
            }
        )
    elif rows:
        verb = "would free" if dry_run else "freed"
        print(f"{verb} {size(freed)} of {_runs(len(rows))}")
        note("their folders of artifacts stay; `ddrl delete RUN --files` removes a folder with its run")


def num_bytes(text: str, option: str) -> int:
    """Bytes from a command line's option.

    Raises:
        InputError: it is no size.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InputError(f"{option} {text}: is no size; use 500MB or 10GB") from None


def _show(rows: list, now_s: float) -> None:  # type: ignore[type-arg]
    if not rows:
        print("nothing to prune")
        return
    table(
        ("run", "status", "ended", "size", "why"),
        [
            (row.run, row.status, f"{duration(now_s - row.ended_s)} ago", size(row.num_bytes), row.reason)
            for row in rows
        ],
        left=("run", "status", "why"),
    )


def _runs(num: int) -> str:
    return f"{num} run{'s' if num != 1 else ''}"
