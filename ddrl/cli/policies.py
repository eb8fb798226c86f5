"""Commands on policies: evaluate one, export one. A target is a run, a run@version, or an exported file."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.output import Client, InputError, Json, emit, note, number, pairs, server
from ddrl.store import runs, weights

if TYPE_CHECKING:
    from ddrl.policy import LoadedPolicy
    from ddrl.types import EvaluationResult

SUFFIX = ".safetensors"

Version = Annotated[
    str | None,
    typer.Option("--version", help="A number, best or latest.", show_default="best, else latest"),
]


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="RUN, RUN@VERSION or an exported policy file.")
    ] = ("last"),
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Episodes to play.")] = 100,
    version: Version = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Seed of the first episode.", show_default="that of the run's confirmations"
        ),
    ] = None,
    num_envs: Annotated[int, typer.Option(min=1, max=4096, help="Episodes side by side.")] = 20,
    json_output: Json = False,
) -> None:
    """Play a policy with deterministic actions and print its score."""
    from ddrl.evaluation import evaluate as play

    loaded = _load(target, version)
    wanted = loaded.config.evaluation
    first = wanted.seed + wanted.num_episodes if seed is None else seed
    seeds = range(first, first + episodes)
    with _progress(episodes, quiet=json_output) as advance:
        result = play(
            loaded.policy,
            loaded.env,
            loaded.spaces,
            seeds,
            num_envs=min(num_envs, episodes),
            policy_version=loaded.version,
            on_episode=lambda *_: advance(),
        )
    report = _report(loaded, result)
    if json_output:
        emit({**report, "returns": result.returns, "lengths": result.lengths})
        return
    pairs(
        {
            "policy": f"{loaded.run}@{loaded.version} on {loaded.env.id}",
            "return": f"{number(report['return_mean'])} ± {number(report['return_std'])}",
            "median": number(report["return_median"]),
            "min, max": f"{number(report['return_min'])}, {number(report['return_max'])}",
            "episodes": f"{episodes}, seeds {seeds[0]} to {seeds[-1]}",
            "length": f"{number(report['length_mean'])} steps (mean)",
        }
    )


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

    name, version = _split(target, version)
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


def choose(client: Client, run: str, version: str | None) -> int:
    """The number of a version that the server keeps; None is the best, else the latest.

    Raises:
        InputError: it is no number, best or latest, or not kept.
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


def _load(target: str, version: str | None) -> LoadedPolicy:
    from ddrl import policy

    path = Path(target)
    if path.is_file() or target.endswith(SUFFIX) or "/" in target:
        if version is not None:
            raise InputError(
                f"--version {version}: {target} is a file and holds one version; leave the option out"
            )
        return policy.load(path)
    name, version = _split(target, version)
    with server() as client:
        run = runs.resolve(client, name)
        return policy.from_run(client, run, choose(client, run, version))


def _split(target: str, version: str | None) -> tuple[str, str | None]:
    """RUN@VERSION apart."""
    name, at, given = target.partition("@")
    if at and version is not None and version != given:
        raise InputError(f"{target}: names version {given}, and --version names {version}; give one of them")
    return name or "last", given if at else version


def _report(loaded: LoadedPolicy, result: EvaluationResult) -> dict[str, Any]:
    return {
        "run": loaded.run,
        "policy_version": loaded.version,
        "env": loaded.env.id,
        "episodes": len(result.returns),
        "first_seed": result.seeds[0],
        "last_seed": result.seeds[-1],
        "return_mean": result.return_mean,
        "return_std": result.return_std,
        "return_median": statistics.median(result.returns),
        "return_min": min(result.returns),
        "return_max": max(result.returns),
        "length_mean": statistics.fmean(result.lengths),
    }


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; elsewhere one line on stderr, or none."""
    if quiet or not sys.stderr.isatty():
        if not quiet:
            note(f"playing {total} episodes")
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("playing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("playing", total=total)
        yield lambda: progress.advance(bar)
