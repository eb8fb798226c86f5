"""Policies named on the command line: a run, a run@version, or an exported file; `ddrl export` writes one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddrl.cli.output import Client, InputError, Json, answer, progress, server_of
from ddrl.store import weights

if TYPE_CHECKING:
    from ddrl.policy import LoadedPolicy

SUFFIX = ".safetensors"

Version = Annotated[
    str | None, typer.Option("--version", help="A number, best or latest.", show_default="best, else latest")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help=f"File to write. Default: RUN-vVERSION{SUFFIX}.")
]
Folder = Annotated[
    Path | None,
    typer.Option(help="Folder to write: policy, config, curve, video, and a card with the scores."),
]
Onnx = Annotated[bool, typer.Option("--onnx", help="Write ONNX, for onnxruntime in any language.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def choose(client: Client, run: str, version: str | None) -> int:
    """Return the number of a version; None is the best, else the latest. A number may be of one that is not kept.

    Raises:
        InputError: `version` is not a number, best or latest, or there is none yet.
    """
    index = weights.index(client, run)
    if index.latest < 0:
        raise InputError(f"run {run}: has published no weights yet; wait for its first version")
    best = index.best if index.best in index.sizes else index.latest
    named = {None: best, "latest": index.latest, "best": index.best}
    if named.get(version, 0) < 0:
        raise InputError(f"run {run}: no version has been evaluated yet; use {run}@latest")
    if version is None or version in named:
        return named[version]
    if not ((text := version.removeprefix("v")).isdecimal() and len(text) < 20):
        raise InputError(f"version {version}: is neither a number, nor best, nor latest")
    return int(text)


@contextmanager
def _chosen(target: str, version: str | None) -> Iterator[tuple[Client, str, int]]:
    """Connect to the server; yield the run and the number of the version that RUN or RUN@VERSION names."""
    name, at, given = target.partition("@")
    if at and version is not None and version != given:
        raise InputError(f"{target}: names version {given}, and --version names {version}; give one of them")
    with server_of(name) as (client, run):
        yield client, run, choose(client, run, given if at else version)


@contextmanager
def opened(target: str, version: str | None) -> Iterator[tuple[LoadedPolicy, Client | None]]:
    """Open the policy that a target names, and the connection to its server if it is a run's.

    Raises:
        InputError, ServerError, StoreError, PolicyFileError: there is no such policy.
    """
    from ddrl import policy

    path = Path(target)
    # A Path raises where the name is too long for a file.
    if os.path.isfile(path) or target.endswith(SUFFIX) or "/" in target:
        if version is not None:
            reason = f"{target} is a file and holds one version; leave the option out"
            raise InputError(f"--version {version}: {reason}")
        yield policy.load(path), None
        return
    with _chosen(target, version) as (client, run, number):
        yield policy.from_run(client, run, number), client


def export(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="RUN or RUN@VERSION; of ONNX also a file.")
    ] = "last",
    version: Version = None,
    output: Output = None,
    folder: Folder = None,
    onnx: Onnx = False,
    minari: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write the episodes of the stream as a Minari dataset.")
    ] = None,
    force: Force = False,
    json_output: Json = False,
) -> None:
    """Write a policy to one file that plays anywhere, without server or run folder; or a folder to share."""
    if minari is not None:
        if output is not None or folder is not None or onnx or version is not None or "@" in target:
            raise InputError(
                f"--minari {minari}: is of a run's episodes, and goes with none of the other options"
            )
        return _export_minari(target, minari, json_output)
    if folder is not None and (output is not None or onnx):
        other = "--onnx" if onnx else f"--output {output}"
        raise InputError(f"--folder {folder}: not together with {other}; give one of them")
    if onnx:
        with opened(target, version) as (loaded, _):
            run, number = loaded.run, loaded.version
            path = write_onnx(loaded, output or Path(), force)
    else:
        with _chosen(target, version) as (client, run, number):
            if folder is None:
                path = write(client, run, number, output or Path(), force)
            else:
                from ddrl.cli import model_card

                model_card.write(client, run, number, folder, force=force)
                path = folder / model_card.POLICY
    report = {"run": run, "version": number, "path": str(path), "bytes": path.stat().st_size}
    then = "" if onnx else f"; score it with `ddrl evaluate {path}`"
    answer(report, f"wrote version {number} of {run} to {path}{then}", json_output=json_output)


def _export_minari(name: str, dataset: str, json_output: bool) -> None:
    """Write a dataset."""
    if importlib.util.find_spec("minari") is None or importlib.util.find_spec("h5py") is None:
        raise InputError(f"--minari {dataset}: minari is not installed; pip install 'ddrl[minari]'")
    from ddrl.runs.datasets import write_minari

    with server_of(name) as (client, run):
        with progress("wrote {:,} of {:,} episodes", quiet=json_output) as show:
            num, steps, left_out = write_minari(client, run, dataset, show)
        report = {"run": run, "dataset": dataset, "episodes": num, "steps": steps, "without_seed": left_out}
        text = (
            f"wrote {num:,} episodes of {run}, {steps:,} steps; minari.load_dataset({dataset!r}) opens them"
        )
        if left_out:
            text += f"; left out {left_out:,} that began after others that have left the stream"
        answer(report, text, json_output=json_output)


def write(client: Client, run: str, version: int, path: Path, force: bool) -> Path:
    """Write a version of a run's weights to a file, or into a folder; return the file.

    Raises:
        InputError: it exists and `force` does not replace it, or it cannot be written.
        NoWeightsError: the version is not kept.
    """
    from ddrl import policy

    return _write(path, f"{run}-v{version}{SUFFIX}", force, partial(policy.save, client, run, version))


def write_onnx(loaded: LoadedPolicy, path: Path, force: bool) -> Path:
    """Write a policy as ONNX to a file, or into a folder; return the file.

    Raises:
        InputError: as of `write`.
        OnnxError: it cannot be exported.
    """
    from ddrl import onnx

    name = f"{Path(loaded.run).name}-v{loaded.version}.onnx"  # a file may name any run
    return _write(path, name, force, partial(onnx.save, loaded))


def _write(path: Path, name: str, force: bool, save: Callable[[Path], None]) -> Path:
    if os.path.isdir(path):
        path = path / name
    if os.path.exists(path) and not force:
        raise InputError(f"{path}: exists already; name another file with --output, or add --force")
    try:
        save(path)
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); name another with --output"
        raise InputError(f"{path}: {reason}") from None
    return path
