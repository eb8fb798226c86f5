"""`ddrl submit` and `ddrl resume`: start a run, bring what is missing, watch it to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ddrl.cli.output import Client
    from ddrl.crew import Crew, CrewError

LEARNER_EXIT_S = 60.0  # for the folder of the run, after it has ended

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="Override, such as algorithm.gamma=0.98."),
]
Time = Annotated[str | None, typer.Option("--time", help="Stop after this long, such as 15m.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        max=1024,
        help="Rollout processes to bring along. Default: one a core but one with the embedded server, else none.",
    ),
]
WithLearner = Annotated[
    bool | None,
    typer.Option("--learner/--no-learner", help="Bring a learner along. Default: with the embedded server."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Return at once; watch later with `ddrl watch`.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout as the last line.")]


def submit(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False)],
    set_: Overrides = None,
    time_: Time = None,
    workers: Workers = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the run.")] = None,
    with_learner: WithLearner = None,
    detach: Detach = False,
    json_: Json = False,
) -> None:
    """Start a run; with nothing configured, bring its own server, workers and learner."""
    started = time.monotonic()
    from ddrl import config as configs
    from ddrl.cli import output

    overrides = list(set_ or [])
    overrides += [f"stop.time={configs.duration(time_, '--time')}"] if time_ else []
    overrides += [f"seed={seed}"] if seed is not None else []
    resolved = configs.load(config, overrides)
    with output.server() as client:
        from ddrl import submit as submission

        processes = _processes(workers) + _serving(client, resolved.env.id)
        run = submission.create(client, resolved, submission.prepare(resolved, processes=max(1, processes)))
        _attend(
            client,
            run,
            workers=workers,
            with_learner=with_learner,
            detach=detach,
            json_=json_,
            started=started,
        )


def resume(
    run: Annotated[str, typer.Argument(help="Run to continue: an id, its beginning, or last.")] = "last",
    time_: Time = None,
    workers: Workers = None,
    with_learner: WithLearner = None,
    detach: Detach = False,
    json_: Json = False,
) -> None:
    """Continue a paused, stopped or interrupted run from its newest checkpoint and its replay."""
    started = time.monotonic()
    from ddrl import config as configs
    from ddrl.cli import output
    from ddrl.store import runs

    with output.server() as client:
        run = runs.resolve(client, run)
        before = runs.state(client, run)
        if before.leased and not before.ended:  # its learner waits: only watch
            with_learner, workers = with_learner or False, workers or 0
        runs.reactivate(client, run, more_time_s=configs.duration(time_, "--time") if time_ else None)
        _attend(
            client,
            run,
            workers=workers,
            with_learner=with_learner,
            detach=detach,
            json_=json_,
            started=started,
        )


def crew(
    run: str,
    workers: Annotated[int, typer.Option()],
    with_learner: Annotated[bool, typer.Option("--learner/--no-learner")],
) -> None:
    """What `--detach` leaves behind: the processes of a run, until it ends."""
    from ddrl.cli import output
    from ddrl.crew import CrewError
    from ddrl.store import connection, runs

    with output.server() as client, _crew(run, workers, with_learner) as brought:
        ended = False
        while not ended:
            time.sleep(0.5)
            with contextlib.suppress(*connection.UNREACHABLE):  # the children ride it out, and so does this
                ended = runs.state(client, run).ended
            try:
                brought.check()
            except CrewError as error:
                _fail(client, run, error)
                raise
        brought.wait("learner", LEARNER_EXIT_S)


def _attend(
    client: Client,
    run: str,
    *,
    workers: int | None,
    with_learner: bool | None,
    detach: bool,
    json_: bool,
    started: float,
) -> None:
    """Bring what is missing, watch the run to its end, report."""
    from ddrl import artifacts
    from ddrl.cli import live, output
    from ddrl.crew import CrewError
    from ddrl.store import connection, runs

    alone = connection.is_embedded()
    num_workers = _processes(workers)
    bring_learner = with_learner if with_learner is not None else alone
    if detach:
        if num_workers or bring_learner:
            _leave_behind(run, num_workers, bring_learner)
        if json_:
            print(json.dumps({"run": run, "status": "active"}), flush=True)
        else:
            print(f"{run}: submitted; watch it with `ddrl watch {run}`", flush=True)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's word is as good as Ctrl-C
    output.note(f"run {run}")
    interrupted = False
    with _crew(run, num_workers, bring_learner) as brought:
        try:
            live.follow(client, run, json_output=json_, on_tick=brought.check)
        except KeyboardInterrupt:
            interrupted = True
            if not bring_learner:
                output.note(f"{run} goes on without being watched; stop it with `ddrl stop {run}`")
                raise typer.Exit(130) from None
            output.note(f"stopping {run} ...")
            runs.set_status(client, run, "stopped", "interrupted")
        except CrewError as error:
            if not runs.state(client, run).ended:
                _fail(client, run, error)
                raise
        brought.wait("learner", LEARNER_EXIT_S)
    summary = artifacts.summary(client, run, wall_s=time.monotonic() - started)
    print(json.dumps(summary) if json_ else live.closing_lines(summary), flush=True)
    raise typer.Exit(130 if interrupted else 1 if summary["status"] == "failed" else 0)


def _processes(workers: int | None) -> int:
    """Rollout processes to bring along."""
    from ddrl.store import connection

    if workers is not None:
        return workers
    return max(1, min(8, (os.cpu_count() or 2) - 1)) if connection.is_embedded() else 0


def _serving(client: Client, env_id: str) -> int:
    """Processes of the fleet that play an environment now."""
    from ddrl.cli.watcher import rollout_queue
    from ddrl.store import workers

    queue = rollout_queue(env_id)
    return sum(worker.num_players for worker in workers.alive(client) if queue in worker.queues)


def _fail(client: Client, run: str, error: CrewError) -> None:
    """A run whose learner cannot be kept alive has failed, unless another learner holds it."""
    from ddrl.store import runs

    if not runs.state(client, run).leased:
        runs.set_status(client, run, "failed", str(error))


def _crew(run: str, workers: int, with_learner: bool) -> Crew:
    """The run's own processes, started."""
    from ddrl.crew import Crew

    brought = Crew(Path("runs") / run)
    if workers:
        brought.start_workers(workers)
    if with_learner:
        brought.start_learner(run)
    return brought


def _leave_behind(run: str, workers: int, with_learner: bool) -> None:
    """Start `crew` as a process that outlives this one."""
    command = [sys.executable, "-m", "ddrl", "crew", run, "--workers", str(workers)]
    command.append("--learner" if with_learner else "--no-learner")
    folder = Path("runs") / run
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "crew.log").open("ab") as log:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
