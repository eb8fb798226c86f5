"""`ddrl evaluate`: score a policy, here or on the fleet, and film its first episode."""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.format import counted, number, picked, score
from ddrl.cli.output import Client, InputError, Json, emit, note, pairs, progress
from ddrl.cli.policies import Version, opened
from ddrl.store import connection
from ddrl.store.evaluations import INFO, Evaluation, OpenEvaluations, means

if TYPE_CHECKING:
    import numpy as np

    from ddrl.policy import LoadedPolicy
    from ddrl.runs.evaluation import OnFrame

POLL_S = 0.1  # between two looks for results
SURVEY_S = 2.0  # between two looks at the fleet
OUTAGE_S = 30.0  # of the server, after which the rest is played here
REQUESTS_AT_ONCE = 50  # evaluations that wait for the fleet, of up to `num_envs` episodes each
LOST_S = 60.0  # without a sign of life, after which an evaluation is sent again
GIF_S, GIF_HZ = 15.0, 15.0  # longest GIF, and about the most pictures a second in one: some hundred kB
MIN_VIDEO_SIZE = 320  # pixels; smaller pictures are enlarged, each pixel to a square


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="RUN, RUN@VERSION or an exported policy file.")
    ] = "last",
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Episodes to play.")] = 100,
    version: Version = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the first episode. Default: that of confirmations.")
    ] = None,
    num_envs: Annotated[int, typer.Option(min=1, max=4096, help="Episodes side by side; ALE games: 1.")] = 20,
    noop: Annotated[
        int | None,
        typer.Option(min=0, max=1000, help="No-ops before ALE games, at most. Default: the run's."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of random actions. Default: the algorithm's.")
    ] = None,
    opponent: Annotated[
        str | None,
        typer.Option(help="Other side of a game of two, as env.opponent. Default: the run's."),
    ] = None,
    video: Annotated[
        Path | None,
        typer.Option(help="File (.mp4, or .gif of 15 s at most) for a video of the first episode."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Play here, even if there is a fleet.")] = False,
    json_output: Json = False,
) -> None:
    """Play a policy, on the run's fleet if there is one, and print its score."""
    from ddrl.runs.evaluation import is_atari

    if video is not None:
        check_video(video)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in a worker: torch splits no small batch over threads
    with opened(target, version) as (loaded, client), ExitStack() as stack:
        if noop is not None and not is_atari(loaded.env):
            raise InputError(f"--noop {noop}: {loaded.env.id} is not an ALE game; leave the option out")
        if opponent is not None and not loaded.spaces.is_two_player:
            raise InputError(
                f"--opponent {opponent}: {loaded.env.id} is no game of two; leave the option out"
            )
        others: Any = {"epsilon": epsilon, "noop_max": noop, "opponent": opponent}
        wanted = episodes_of(loaded, episodes, seed, num_envs=num_envs, **others)
        on_frame = None if video is None else stack.enter_context(video_writer(video))
        if not json_output:
            note(f"playing {counted(episodes, 'episode')}")
        show_progress = stack.enter_context(progress("played {:,} of {:,} episodes", quiet=json_output))
        scoring = Scoring(loaded, wanted, show_progress)
        scoring.play(None if local else client, on_frame=on_frame)
    report = scoring.report()
    if json_output:
        emit({**report, "video": video and str(video), **scoring.each()})
        return
    shown = {
        "policy": f"{loaded.run}@{loaded.version} on {loaded.env.id}",
        "return": score(report),
        "median": report["return_median"],
        "min, max": f"{number(report['return_min'])}, {number(report['return_max'])}",
        "episodes": f"{episodes}, seeds {report['first_seed']} to {report['last_seed']}",
        "length": f"{number(report['length_mean'])} steps (mean)",
        **{name: f"{value:.4g} (mean)" for name, value in report.items() if name.startswith(INFO)},
        "epsilon": f"{report['epsilon']:g}",
        "opponent": report["opponent"],
        "no-ops": f"up to {report['noop']} frames" if report["noop"] else None,
        "played": scoring.where(),
        "video": video and str(video),
    }
    pairs(shown)


# --- playing, here and on the fleet ----------------------------------------------------------------------


def episodes_of(
    loaded: LoadedPolicy,
    num: int,
    seed: int | None,
    *,
    num_envs: int,
    epsilon: float | None = None,
    noop_max: int | None = None,
    opponent: str | None = None,
) -> Evaluation:
    """Return `num` episodes to play; the first seed is by default that of confirmations."""
    config = loaded.config.evaluation
    return Evaluation(
        version=loaded.version,
        first_seed=config.seed + config.num_episodes if seed is None else seed,
        num_episodes=num,
        purpose="request",
        num_envs=num_envs,
        epsilon=loaded.policy.evaluation_epsilon if epsilon is None else epsilon,
        noop_max=noop_max,
        opponent=opponent,
    )


class Scoring:
    """Episodes that are played, here and on the fleet; the scores are the same wherever they are.

    Args:
        loaded: the policy.
        wanted: the episodes.
        on_progress: called with the number of episodes that have ended, and of all.
    """

    def __init__(
        self, loaded: LoadedPolicy, wanted: Evaluation, on_progress: Callable[[int, int], None]
    ) -> None:
        self._loaded, self._wanted, self._on_progress = loaded, wanted, on_progress
        self._scores: dict[int, tuple[float, int]] = {}  # return and length, by seed
        self._metrics: dict[str, list[float]] = {name: [] for name in loaded.env.metrics}
        self._num_on_fleet = self._num_processes = 0

    def play(self, client: Client | None, *, on_frame: OnFrame | None = None) -> None:
        """Play all episodes.

        Args:
            client: connection to the run's server; None: play here.
            on_frame: called with pictures of the first episode, which is then played here.

        Raises:
            EnvError: the environment cannot be made or filmed here, and has to be.
        """
        seeds = self._wanted.seeds
        if on_frame is not None:
            self._play_here(seeds[:1], on_frame)
            seeds = seeds[1:]
        if client is not None and seeds:
            self._play_on_fleet(client, seeds)
        if left := [seed for seed in seeds if seed not in self._scores]:
            self._play_here(left)

    def each(self) -> dict[str, tuple[float, ...]]:
        """Return `returns` and `lengths` of the episodes, in the order of their seeds."""
        returns, lengths = zip(*(self._scores[seed] for seed in self._wanted.seeds), strict=True)
        return {"returns": returns, "lengths": lengths}

    def report(self) -> dict[str, Any]:
        """Return what `--json` prints of a score."""
        from ddrl.runs.evaluation import is_atari, with_options

        env = with_options(self._loaded.env, self._wanted.noop_max, self._wanted.opponent)
        returns, lengths = self.each().values()
        return {
            "run": self._loaded.run,
            "policy_version": self._loaded.version,
            "env": env.id,
            "episodes": len(returns),
            "episodes_on_fleet": self._num_on_fleet,
            "first_seed": self._wanted.seeds[0],
            "last_seed": self._wanted.seeds[-1],
            "epsilon": self._wanted.epsilon,
            "noop": env.atari.noop_max if is_atari(env) else None,
            "opponent": env.opponent if self._loaded.spaces.is_two_player else None,
            "return_mean": statistics.fmean(returns),
            "return_std": statistics.pstdev(returns),
            "return_median": statistics.median(returns),
            "return_min": min(returns),
            "return_max": max(returns),
            "length_mean": statistics.fmean(lengths),
            **means(self._metrics),
        }

    def where(self) -> str:
        """Return where the episodes were played."""
        num_here = len(self._scores) - self._num_on_fleet
        if not self._num_on_fleet:
            return "here"
        fleet = f"{self._num_on_fleet} by the fleet ({self._num_processes} processes)"
        return f"{fleet}, {num_here} here" if num_here else fleet

    def _add_metrics(self, found: Mapping[str, Sequence[float]]) -> None:
        """Add those of the run; a worker may write other names."""
        for name, values in self._metrics.items():
            values.extend(found.get(name, ()))

    def _add(self, seed: int, episode_return: float, length: int) -> None:
        self._scores[seed] = episode_return, length
        self._on_progress(len(self._scores), self._wanted.num_episodes)

    def _play_here(self, seeds: Sequence[int], on_frame: OnFrame | None = None) -> None:
        from ddrl.runs import evaluation

        options = picked(self._wanted, "epsilon", "noop_max", "opponent")
        options["num_envs"] = min(self._wanted.num_envs or 1, len(seeds))
        played = evaluation.score(self._loaded, seeds, on_episode=self._add, on_frame=on_frame, **options)
        self._add_metrics(played.metrics)

    def _play_on_fleet(self, client: Client, seeds: range) -> None:
        """Send the seeds in chunks; leave out what the fleet cannot play, or has not played when it goes away."""
        from ddrl import celery, envs  # here: a policy file is played without a broker
        from ddrl.store import workers

        run, wanted = self._loaded.run, self._wanted
        queue = envs.queue_for(celery.EVALUATE, self._loaded.config)

        def count_processes() -> int:
            return sum(worker.processes for worker in workers.alive(client) if queue in worker.queues)

        def send(message: str) -> None:
            connection.retry(lambda: celery.send_evaluation(run, message, queue), timeout_s=OUTAGE_S)

        try:
            self._num_processes = count_processes()
            if not self._num_processes:
                return
            size = max(1, min(wanted.num_envs or 1, -(-len(seeds) // self._num_processes)))
            parts = [
                replace(wanted, first_seed=chunk[0], num_episodes=len(chunk), num_envs=len(chunk))
                for chunk in (seeds[begin : begin + size] for begin in range(0, len(seeds), size))
            ]
            evaluations = OpenEvaluations(client, run, send=send, timeout_s=LOST_S)
            at_once = min(self._num_processes, REQUESTS_AT_ONCE)
            for row in results(evaluations, parts, count_processes, at_once, "playing {} here"):
                seeds = range(row["first_seed"], row["first_seed"] + row["num_episodes"])
                self._num_on_fleet += len(seeds)
                for episode in zip(seeds, row["returns"], row["lengths"], strict=True):
                    self._add(*episode)
                self._add_metrics(row["metrics"])
        except connection.OUTAGES as error:
            note(f"{connection.outage(error) or error}; playing the rest here")


def results(
    evaluations: OpenEvaluations,
    parts: Sequence[Evaluation],
    count_processes: Callable[[], int],
    at_once: int,
    instead: str,
) -> Iterator[dict[str, Any]]:
    """Open some evaluations at a time, and yield their results, until all have one or no worker is left.

    Args:
        evaluations: of this command; withdrawn at the end.
        parts: to open.
        count_processes: returns how many can play them.
        at_once: the most that are open.
        instead: what happens to those that have no result, for the notes.
    """
    result_at = time.monotonic()
    survey_at = result_at + SURVEY_S
    try:
        while parts or evaluations.pending:
            room = at_once - len(evaluations.pending)
            if some := parts[:room]:
                parts = parts[room:]
                connection.retry(partial(evaluations.open, some), timeout_s=OUTAGE_S)
            for row in connection.retry(evaluations.poll, timeout_s=OUTAGE_S):
                result_at = time.monotonic()
                yield row
            for reason in evaluations.given_up.values():
                note(f"a worker cannot play these episodes ({reason}); {instead.format('them')}")
            if evaluations.given_up and time.monotonic() >= result_at + LOST_S:
                return  # nobody plays
            evaluations.given_up.clear()
            if time.monotonic() >= survey_at:
                if not count_processes():
                    note(f"the fleet has gone; {instead.format('the rest')}")
                    return
                survey_at = time.monotonic() + SURVEY_S
            time.sleep(POLL_S)
    finally:
        with suppress(*connection.OUTAGES):
            evaluations.withdraw()


# --- video -----------------------------------------------------------------------------------------------


def check_video(path: Path) -> None:
    """Refuse a video that cannot be written, before anything is played.

    Raises:
        InputError: another kind of file, a folder that is not there, or imageio is not installed.
    """
    if path.suffix.lower() not in (".mp4", ".gif"):
        raise InputError(f"--video {path}: is not the name of a video; use one that ends in .mp4 or .gif")
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"--video {path}: cannot be written; name a file in an existing folder of yours")
    if any(importlib.util.find_spec(name) is None for name in ("imageio", "imageio_ffmpeg")):
        raise InputError(f"--video {path}: needs imageio with ffmpeg; run pip install 'ddrl[video]'")


@contextmanager
def video_writer(path: Path) -> Iterator[OnFrame]:
    """Write pictures to a video; the file appears only when the context ends without an error.

    A GIF holds the first GIF_S seconds, and leaves out pictures beyond about GIF_HZ a second.

    Yields:
        A function of a picture, uint8 [H, W] or [H, W, 3], all of one size, and of the pictures a second, of which
        only the value of the first call counts.
    """
    partial, is_gif = path.with_name(f"{path.stem}.partial{path.suffix}"), path.suffix.lower() == ".gif"
    writer: Any = None
    num_shown = 0

    def add(picture: np.ndarray, hz: float) -> None:
        nonlocal writer, num_shown
        every, longest_s = (max(1, round(hz / GIF_HZ)), GIF_S) if is_gif else (1, math.inf)
        if num_shown % every == 0 and num_shown < longest_s * hz:
            if writer is None:
                import imageio

                video = {"format": "FFMPEG", "fps": hz, "codec": "libx264", "macro_block_size": 2}
                gif = {"duration": 10 * round(100 * every / hz), "loop": 0}
                writer = imageio.get_writer(partial, mode="I", **(gif if is_gif else video))
                files.callback(writer.close)
            writer.append_data(enlarge(picture))
        num_shown += 1

    try:
        with ExitStack() as files:
            yield add
        if writer is not None:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def enlarge(picture: np.ndarray) -> np.ndarray:
    """Enlarge [H, W] or [H, W, 3] to [H', W', 3] of at least MIN_VIDEO_SIZE, with even sides for the codec."""
    import numpy as np

    if picture.ndim == 2:
        picture = np.repeat(picture[:, :, None], 3, axis=2)
    factor = max(1, -(-MIN_VIDEO_SIZE // min(picture.shape[:2])))
    picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)))
