"""Policies named on the command line: a run, a run@version, or an exported file; `ddrl export` writes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddrl.cli.output import Client, InputError, Json, emit, server
from ddrl.store import runs, weights

if TYPE_CHECKING:
    from ddrl.policy import LoadedPolicy

SUFFIX = ".safetensors"

Version = Annotated[
    str | None, typer.Option("--version", help="A number, best or latest.", show_default="best, else latest")
]


def choose(client: Client, run: str, version: str | None) -> int:
    """Return the number of a version that the server keeps; None is the best, else the latest.

    Raises:
        InputError: `version` is not a number, best or latest, or is not kept.
    """
    index = weights.index(client, run)
    if index.latest < 0:
        raise InputError(f"run {run}: has published no weights yet; wait for its first version")
    if version is None:
        return index.best if index.best in index.sizes else index.latest
    if version == "latest":
        return index.latest
    if version == "best":
        if index.best < 0:
            raise InputError(f"run {run}: no version has been evaluated yet; use --version latest")
        return index.best
    text = version.removeprefix("v")
    if not text.isdigit():
        raise InputError(f"--version {version}: is neither a number, nor best, nor latest")
    if int(text) not in index.sizes:
        kept = sorted(index.sizes)
        shown = ", ".join(map(str, kept[-12:]))
        more = f"the newest of {len(kept)} kept are" if len(kept) > 12 else "kept are"
        raise InputError(f"run {run}: version {text} is not kept; {more} {shown}")
    return int(text)


@contextmanager
def opened(target: str, version: str | None) -> Iterator[tuple[LoadedPolicy, Client | None]]:
    """Open the policy that a target names, and the connection to its server if it is a run's.

    Raises:
        InputError, ServerError, StoreError, PolicyFileError: there is no such policy.
    """
    from ddrl import policy

    path = Path(target)
    if path.is_file() or target.endswith(SUFFIX) or "/" in target:
        if version is not None:
            raise InputError(
                f"--version {version}: {target} is a file and holds one version; leave the option out"
            )
        yield policy.load(path), None
        return
    name, version = split(target, version)
    with server() as client:
        run = runs.resolve(client, name)
        yield policy.from_run(client, run, choose(client, run, version)), client


def split(target: str, version: str | None) -> tuple[str, str | None]:
    """Split RUN@VERSION."""
    name, at, given = target.partition("@")
    if at and version is not None and version != given:
        raise InputError(f"{target}: names version {given}, and --version names {version}; give one of them")
    return name or "last", given if at else version


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
