"""Commands on policies: evaluate one, export one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddrl.cli.evaluate import evaluate
from ddrl.cli.output import InputError, Json, emit, server
from ddrl.cli.targets import SUFFIX, Version, choose, split
from ddrl.store import runs

__all__ = ["choose", "evaluate", "export"]


def export(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="RUN or RUN@VERSION.")] = "last",
    version: Version = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default=f"RUN-vVERSION{SUFFIX}"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    json_output: Json = False,
) -> None:
    """Write a policy to one file that plays anywhere, without server or run folder."""
    from ddrl import policy

    name, version = split(target, version)
    with server() as client:
        run = runs.resolve(client, name)
        number_ = choose(client, run, version)
        path = output or Path(f"{run}-v{number_}{SUFFIX}")
        if path.is_dir():
            path = path / f"{run}-v{number_}{SUFFIX}"
        if path.exists() and not force:
            raise InputError(f"{path}: exists already; name another file with --output, or add --force")
        try:
            path = policy.save(client, run, number_, path)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written ({error.strerror}); name another with --output"
            ) from None
    if json_output:
        emit({"run": run, "version": number_, "path": str(path), "bytes": path.stat().st_size})
    else:
        print(f"wrote version {number_} of {run} to {path}; score it with `ddrl evaluate {path}`")
