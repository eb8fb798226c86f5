"""`ddrl evaluate`: score a policy, here or on the fleet, and film its first episode."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.output import Client, InputError, Json, emit, note, number, pairs
from ddrl.cli.policies import Version, opened

if TYPE_CHECKING:
    import numpy as np

    from ddrl.config import EnvConfig
    from ddrl.policy import LoadedPolicy
    from ddrl.runs.evaluation import OnFrame

POLL_S = 0.1  # between two looks for results
SURVEY_S = 2.0  # between two looks at the fleet
LOST_S = 60.0  # after which an evaluation that nobody seems to play is sent again
VIDEO_SUFFIX = ".mp4"
MIN_VIDEO_SIZE = 320  # pixels; smaller pictures are enlarged, each pixel to a square

Advance = Callable[[int], None]
Scores = dict[int, tuple[float, int]]
"""Return and length by seed."""


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="RUN, RUN@VERSION or an exported policy file.")
    ] = "last",
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
    """Play a policy and print its score; a run's fleet plays it, if there is one."""
    from ddrl.runs.evaluation import is_atari, with_noops

    if video is not None:
        check_video(video)
    with opened(target, version) as (loaded, client), ExitStack() as stack:
        if noop is not None and not is_atari(loaded.env):
            raise InputError(f"--noop {noop}: {loaded.env.id} is not an ALE game; leave the option out")
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
        recorder = None if video is None else stack.enter_context(VideoRecorder(video))
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


# --- playing, here and on the fleet ----------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Episodes to play.

    Attributes:
        loaded: the policy.
        env: its environment, with `noop_max` applied.
        seeds: one per episode.
        num_envs: episodes side by side in one process.
        epsilon: share of random actions.
        noop_max: as given on the command line; None: the run's.
    """

    loaded: LoadedPolicy
    env: EnvConfig
    seeds: range
    num_envs: int
    epsilon: float
    noop_max: int | None


@dataclass(frozen=True)
class Played:
    """The episodes' returns and lengths, in the order of the seeds, and how many of them the fleet has played."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    num_on_fleet: int
    num_processes: int


def play(job: Job, client: Client | None, *, advance: Advance, on_frame: OnFrame | None = None) -> Played:
    """Play all episodes; the result is the same wherever they are played.

    Args:
        job: the episodes.
        client: connection to the run's server; None: play here.
        advance: called with the number of episodes that were finished since.
        on_frame: called with pictures of the first episode, which is then played here.

    Raises:
        EnvError: the environment cannot be made or filmed here, and has to be.
    """
    scores: Scores = {}
    num_processes = num_on_fleet = 0
    if on_frame is not None:
        scores = _play_here(job, job.seeds[:1], advance, on_frame)
    if client is not None and (left := job.seeds[len(scores) :]):
        num_here = len(scores)
        num_processes = _play_on_fleet(job, client, left, scores, advance)
        num_on_fleet = len(scores) - num_here
    if rest := [seed for seed in job.seeds if seed not in scores]:
        scores |= _play_here(job, rest, advance)
    returns, lengths = zip(*(scores[seed] for seed in job.seeds), strict=True)
    return Played(returns, lengths, num_on_fleet, num_processes)


def _play_here(job: Job, seeds: Sequence[int], advance: Advance, on_frame: OnFrame | None = None) -> Scores:
    from ddrl.runs import evaluation

    result = evaluation.evaluate(
        job.loaded.policy,
        job.env,
        job.loaded.spaces,
        seeds,
        num_envs=min(job.num_envs, len(seeds)),
        policy_version=job.loaded.version,
        epsilon=job.epsilon,
        on_episode=lambda *_: advance(1),
        on_frame=on_frame,
    )
    return dict(zip(seeds, zip(result.returns, result.lengths, strict=True), strict=True))


def _play_on_fleet(job: Job, client: Client, seeds: range, scores: Scores, advance: Advance) -> int:
    """Add the scores of what the fleet plays; return the number of its processes.

    The seeds are sent in chunks. What the fleet cannot play, or has not when it goes away, is left out.
    """
    from ddrl import celery, envs  # here: a policy file is played without a broker
    from ddrl.envs import requirements
    from ddrl.store import connection, workers
    from ddrl.store.evaluations import Evaluation, OpenEvaluations

    run, num_processes = job.loaded.run, 0
    queue = envs.queue_for(celery.EVALUATE, job.env.id, requirements.custom_network(job.loaded.config))

    def count_processes() -> int:
        return sum(worker.processes for worker in workers.alive(client) if queue in worker.queues)

    def send(message: str) -> None:
        celery.send_evaluation(run, message, queue)

    def chunk(part: range) -> Evaluation:
        return Evaluation(
            version=job.loaded.version,
            first_seed=part[0],
            num_episodes=len(part),
            purpose="request",
            num_envs=len(part),
            epsilon=job.epsilon,
            noop_max=job.noop_max,
        )

    try:
        num_processes = count_processes()
        if not num_processes:
            return 0
        size = max(1, min(job.num_envs, -(-len(seeds) // num_processes)))
        evaluations = OpenEvaluations(client, run, send=send, timeout_s=LOST_S)
        try:
            evaluations.open([chunk(seeds[begin : begin + size]) for begin in range(0, len(seeds), size)])
            survey_at = time.monotonic() + SURVEY_S
            while evaluations.pending:
                for row in evaluations.poll():
                    played = range(row["first_seed"], row["first_seed"] + row["num_episodes"])
                    scores.update(zip(played, zip(row["returns"], row["lengths"], strict=True), strict=True))
                    advance(len(played))
                for reason in evaluations.given_up.values():
                    note(f"a worker cannot play these episodes ({reason}); playing them here")
                evaluations.given_up.clear()
                if time.monotonic() >= survey_at:
                    if not count_processes():
                        note("the fleet has gone; playing the rest here")
                        break
                    survey_at = time.monotonic() + SURVEY_S
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(*connection.UNREACHABLE):
                evaluations.withdraw()
    except connection.UNREACHABLE:
        note("the server does not answer any more; playing the rest here")
    return num_processes


# --- video -----------------------------------------------------------------------------------------------


def check_video(path: Path) -> None:
    """Refuse a video that could not be written, before anything is played.

    Raises:
        InputError: another kind of file, a folder that is not there, or imageio is not installed.
    """
    if path.suffix.lower() != VIDEO_SUFFIX:
        raise InputError(f"--video {path}: is not named as a video; use a name that ends in {VIDEO_SUFFIX}")
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"--video {path}: cannot be written; name a file in an existing folder of yours")
    if any(importlib.util.find_spec(name) is None for name in ("imageio", "imageio_ffmpeg")):
        raise InputError(f"--video {path}: needs imageio with ffmpeg; run pip install 'ddrl[video]'")


class VideoRecorder:
    """Writes pictures to a video, whole or not at all: the file appears as the context ends without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.stem}.partial{VIDEO_SUFFIX}")
        self._writer: Any = None

    def __enter__(self) -> VideoRecorder:
        return self

    def add(self, picture: np.ndarray, hz: float) -> None:
        """Append a picture.

        Args:
            picture: uint8 [H, W] or [H, W, 3], all of one size.
            hz: pictures of a second; that of the first one counts.
        """
        if self._writer is None:
            import imageio

            self._writer = imageio.get_writer(
                self._partial, format="FFMPEG", mode="I", fps=hz, codec="libx264", macro_block_size=2
            )
        self._writer.append_data(enlarge(picture))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            with contextlib.suppress(OSError):
                self._partial.unlink()


def enlarge(picture: np.ndarray) -> np.ndarray:
    """[H, W] or [H, W, 3] -> [H', W', 3], large enough to be looked at, both sides even as the codec wants them."""
    import numpy as np

    if picture.ndim == 2:
        picture = np.repeat(picture[:, :, None], 3, axis=2)
    factor = max(1, -(-MIN_VIDEO_SIZE // min(picture.shape[:2])))
    picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)))
