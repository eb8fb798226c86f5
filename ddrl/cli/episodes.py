"""`ddrl episodes` and `ddrl replay`: the training episodes that the stream still holds, and playing them again."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.evaluate import check_video, video_writer
from ddrl.cli.format import counted, duration, number
from ddrl.cli.output import InputError, Json, Run, answer, emit, note, progress, say, server_of, table
from ddrl.store import runs

if TYPE_CHECKING:
    from ddrl.runs.episodes import Episode

NAMED = ("best", "worst", "last")
MOST_DIFFERENCES = 10  # that are printed


def episodes(
    run: Run = "last",
    best: Annotated[bool, typer.Option("--best", help="Those with the highest return.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest return.")] = False,
    host: Annotated[str | None, typer.Option(help="Those of this machine.")] = None,
    num: Annotated[int, typer.Option("-n", min=1, max=100_000, help="How many.")] = 20,
    json_output: Json = False,
) -> None:
    """List training episodes that the stream holds whole; the newest, if not told otherwise."""
    if best and worst:
        raise InputError("--best: not together with --worst; give one of them")
    from ddrl.runs.episodes import read

    with server_of(run) as (client, run):
        now_s, can_replay = runs.server_ms(client) / 1e3, not runs.spaces(client, run).is_two_player
        found = _chosen((one for one in read(client, run) if host in (None, one.host)), num, best, worst)
    rows: list[dict[str, Any]] = [
        {
            "episode": one.name,
            "age_s": now_s - one.at_s,
            "host": one.host,
            "versions": [one.first_version, one.last_version],
            "length": one.length,
            "return": one.episode_return,
        }
        for one in found
    ]
    if json_output:
        emit(rows)
    elif not rows:
        say(f"{run}: the stream holds no whole episode" + (f" of {host}" if host else ""))
    else:
        cells = []
        for row in rows:
            versions = " to ".join(map(str, dict.fromkeys(row["versions"])))
            figures = (row["length"], number(row["return"]))
            cells.append((row["episode"], duration(row["age_s"]), row["host"], versions, *figures))
        table(("episode", "age", "host", "version", "steps", "return"), cells, left=("host",))
        if can_replay:
            note(f"`ddrl replay {run}/{rows[0 if best or worst else -1]['episode']}` plays one again")


def _chosen(found: Iterable[Episode], num: int, best: bool, worst: bool) -> list[Episode]:
    """Return the best first, the worst first, or the newest last."""
    if best or worst:
        choose = heapq.nlargest if best else heapq.nsmallest
        return choose(num, found, key=lambda one: one.episode_return)
    return list(found)[-num:]


def replay(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN[/EPISODE]",
            help="An episode of `ddrl episodes`, best, worst or last; without one all.",
        ),
    ] = "last",
    video: Annotated[
        Path | None, typer.Option(help="File (.mp4 or .gif) for a video of one episode.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Play training episodes again, from their recorded seeds and actions, and compare them bit for bit."""
    name, slash, wanted = target.partition("/")
    if video is not None:
        if not slash:
            raise InputError(f"--video {video}: is for one episode; name it, such as {target}/best")
        check_video(video)
    from ddrl.runs import episodes as module

    with server_of(name) as (client, run), ExitStack() as stack:
        found = module.read(client, run)
        if wanted in NAMED:
            known = _chosen(found, 1, wanted == "best", wanted == "worst")
        else:
            known = module.in_order(one for one in found if not slash or one.name == wanted)
        if not known:
            what = f"{run}/{wanted}: this episode is not in the stream any more, or never was" if slash else (
                f"{run}: the stream holds no whole episode"
            )  # fmt: skip
            raise InputError(f"{what}; `ddrl episodes {run}` lists those that are")
        on_frame = None if video is None else stack.enter_context(video_writer(video))
        show = stack.enter_context(progress("played {:,} of {:,} episodes", quiet=json_output))
        replayer = stack.enter_context(module.Replayer(client, run, on_frame))
        differences, num_steps, without_seed = {}, 0, 0
        for done, episode in enumerate(known, 1):
            if episode.seeded is None and not slash:
                without_seed += 1
                continue
            played = replayer.play(episode)
            num_steps += played.steps
            if played.difference:
                differences[episode.name] = played.difference
            show(done, len(known))
        versions = module.other_versions(client, run) if differences else {}
    num = len(known) - without_seed
    report = {"run": run, "episodes": num, "steps": num_steps, "equal": num - len(differences)}
    report |= {"without_seed": without_seed, "differences": differences, "versions": versions}
    lines = [
        f"{run}: {counted(num, 'episode')}, {counted(num_steps, 'step')}: {num - len(differences)} equal bit for bit"
    ]
    if without_seed:
        lines.append(
            f"{counted(without_seed, 'episode')} began after others that have left the stream; left out"
        )
    lines += [f"{episode} differs: {text}" for episode, text in [*differences.items()][:MOST_DIFFERENCES]]
    lines += [f"{package} is {here} here, {was} there" for package, (was, here) in versions.items()]
    lines += [f"wrote {video}"] if video else []
    answer(report, "\n".join(lines), json_output=json_output)
    if differences:
        raise typer.Exit(1)
