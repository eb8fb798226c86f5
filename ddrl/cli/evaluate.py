"""The command that scores a policy, here or on all processes of the fleet."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.output import InputError, Json, emit, note, number, pairs
from ddrl.cli.targets import Version, opened

if TYPE_CHECKING:
    from ddrl.cli.spread import Job, Played


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
    noop: Annotated[
        int | None,
        typer.Option(
            min=0, max=1000, help="ALE games begin with up to so many idle frames.", show_default="the run's"
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of random actions.", show_default="the algorithm's, usually 0"
        ),
    ] = None,
    video: Annotated[
        Path | None, typer.Option(help="File (.mp4) for a video of the first episode.", show_default="none")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Play here, even if there is a fleet.")] = False,
    json_output: Json = False,
) -> None:
    """Play a policy and print its score; a run's is played by its fleet, if there is one."""
    from ddrl.cli.spread import Job, play
    from ddrl.cli.video import Recorder, check
    from ddrl.runs.evaluation import is_atari, with_noops

    if video is not None:
        check(video)
    with opened(target, version) as (loaded, client), ExitStack() as stack:
        if noop is not None and not is_atari(loaded.env):
            raise InputError(f"--noop {noop}: {loaded.env.id} is no ALE game; leave the option out")
        wanted = loaded.config.evaluation
        first = wanted.seed + wanted.num_episodes if seed is None else seed
        job = Job(
            loaded=loaded,
            env=with_noops(loaded.env, noop),
            seeds=range(first, first + episodes),
            num_envs=num_envs,
            epsilon=loaded.policy.evaluation_epsilon if epsilon is None else epsilon,
            noop_max=noop,
        )
        recorder = None if video is None else stack.enter_context(Recorder(video))
        advance = stack.enter_context(_progress(episodes, quiet=json_output))
        played = play(
            job,
            None if local else client,
            advance=advance,
            on_frame=None if recorder is None else recorder.add,
        )
    report = _report(job, played)
    if json_output:
        emit({**report, "video": video and str(video), "returns": played.returns, "lengths": played.lengths})
        return
    idle = {"no-ops": f"up to {report['noop']} frames"} if report["noop"] else {}
    pairs(
        {
            "policy": f"{loaded.run}@{loaded.version} on {loaded.env.id}",
            "return": f"{number(report['return_mean'])} ± {number(report['return_std'])}",
            "median": number(report["return_median"]),
            "min, max": f"{number(report['return_min'])}, {number(report['return_max'])}",
            "episodes": f"{episodes}, seeds {first} to {first + episodes - 1}",
            "length": f"{number(report['length_mean'])} steps (mean)",
            "epsilon": f"{job.epsilon:g}",
            **idle,
            "played": _where(played),
            **({} if video is None else {"video": str(video)}),
        }
    )


def _where(played: Played) -> str:
    there, here = played.num_on_fleet, len(played.returns) - played.num_on_fleet
    if not there:
        return "here"
    fleet = f"{there} by the fleet ({played.num_processes} processes)"
    return f"{fleet}, {here} here" if here else fleet


def _report(job: Job, played: Played) -> dict[str, Any]:
    from ddrl.runs.evaluation import is_atari

    returns = played.returns
    return {
        "run": job.loaded.run,
        "policy_version": job.loaded.version,
        "env": job.env.id,
        "episodes": len(returns),
        "episodes_on_fleet": played.num_on_fleet,
        "first_seed": job.seeds[0],
        "last_seed": job.seeds[-1],
        "epsilon": job.epsilon,
        "noop": job.env.atari.noop_max if is_atari(job.env) else None,
        "return_mean": statistics.fmean(returns),
        "return_std": statistics.pstdev(returns),
        "return_median": statistics.median(returns),
        "return_min": min(returns),
        "return_max": max(returns),
        "length_mean": statistics.fmean(played.lengths),
    }


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere one line on stderr, or none. Called with the number of episodes played."""
    if quiet or not sys.stderr.isatty():
        if not quiet:
            note(f"playing {total} episodes")
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("playing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("playing", total=total)
        yield lambda num: progress.advance(bar, num)
