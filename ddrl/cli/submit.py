"""`ddrl submit` and `ddrl resume`: start runs, bring what is missing, watch them to their end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli import bringing

if TYPE_CHECKING:
    from ddrl.cli.output import Client
    from ddrl.config import RunConfig
    from ddrl.types import EnvSpec

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
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds", min=1, max=100, help="So many runs side by side, with the seeds from --seed on."
        ),
    ] = 1,
    weight: Annotated[
        float | None, typer.Option("--weight", help="Share of the fleet, relative to other runs' weights.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", help="low, normal or high: the higher one plays first.")
    ] = None,
    initial: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="POLICY|RUN@VERSION", help="Begin with the weights of another policy."
        ),
    ] = None,
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
    given = {"seed": seed, "weight": weight, "priority": priority}
    overrides += [f"{name}={value}" for name, value in given.items() if value is not None]
    resolved = configs.load(config, overrides)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's word is as good as Ctrl-C
    with output.server() as client:
        from ddrl.runs import submit as submission

        processes = bringing.processes(workers) + _serving(client, resolved)
        spaces = submission.prepare(resolved, processes=max(1, processes))
        runs = _create(client, [*_with_seeds(resolved, seeds)], spaces, initial)
        _attend(
            client,
            runs,
            workers=workers,
            with_learner=with_learner,
            detach=detach,
            json_=json_,
            started=started,
        )


def resume(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...", help="Runs to continue: ids, their beginnings, or last.", show_default="last"
        ),
    ] = None,
    time_: Time = None,
    workers: Workers = None,
    with_learner: WithLearner = None,
    detach: Detach = False,
    json_: Json = False,
) -> None:
    """Continue paused, stopped or interrupted runs from their newest checkpoints and their replay."""
    started = time.monotonic()
    from ddrl import config as configs
    from ddrl.cli import output
    from ddrl.store import copies
    from ddrl.store import runs as store

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    more_time_s = configs.duration(time_, "--time") if time_ else None
    with output.server() as client:
        found = (copies.bring_back(client, name, Path("runs")) for name in runs or ["last"])
        names = list(dict.fromkeys(found))
        before = [store.state(client, run) for run in names]
        if all(state.leased and not state.ended for state in before):  # their learners wait: only watch
            with_learner, workers = with_learner or False, workers or 0
        for run in names:
            store.reactivate(client, run, more_time_s=more_time_s)
        _attend(
            client,
            names,
            workers=workers,
            with_learner=with_learner,
            detach=detach,
            json_=json_,
            started=started,
        )


def crew(
    runs: list[str],
    workers: Annotated[int, typer.Option()],
    with_learner: Annotated[bool, typer.Option("--learner/--no-learner")],
) -> None:
    """What `--detach` leaves behind: the processes of runs, until they end."""
    from ddrl.cli import output

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with output.server() as client, bringing.crew_of(runs) as brought:
        try:
            bringing.bring(brought, runs, workers, with_learner)
            while bringing.any_goes_on(client, runs):
                time.sleep(0.5)
                bringing.keep_up(client, brought, runs)
        except KeyboardInterrupt:
            bringing.stop(client, runs)
        brought.wait_for_learners(LEARNER_EXIT_S)


def _attend(
    client: Client,
    runs: Sequence[str],
    *,
    workers: int | None,
    with_learner: bool | None,
    detach: bool,
    json_: bool,
    started: float,
) -> None:
    """Bring what is missing, watch the runs to their end, report."""
    from ddrl.cli import live, output, sweep
    from ddrl.store import connection

    num_workers = bringing.processes(workers)
    bring_learner = with_learner if with_learner is not None else connection.is_embedded()
    if detach:
        if num_workers or bring_learner:
            bringing.leave_behind(runs, num_workers, bring_learner)
        _tell_detached(runs, json_)
        return
    output.note("\n".join(f"run {run}" for run in runs))
    interrupted = False
    try:
        with bringing.crew_of(runs) as brought:
            try:
                bringing.bring(brought, runs, num_workers, bring_learner)
                follow = live.follow if len(runs) == 1 else sweep.follow
                target: Any = runs[0] if len(runs) == 1 else runs
                follow(
                    client, target, json_output=json_, on_tick=lambda: bringing.keep_up(client, brought, runs)
                )
            except KeyboardInterrupt:
                interrupted = True
                if not bring_learner:
                    output.note(_goes_on(runs))
                    raise typer.Exit(130) from None
                output.note(f"stopping {', '.join(runs)}; once more ends everything at once")
                bringing.stop(client, runs)
            brought.wait_for_learners(LEARNER_EXIT_S)
    except KeyboardInterrupt:  # the second one: the crew was killed on the way here
        output.note(f"ended at once; `ddrl resume {' '.join(runs)}` goes on from the newest checkpoint")
        raise
    wall_s = time.monotonic() - started
    summaries = sweep.summaries(client, runs, wall_s=wall_s)
    if len(runs) == 1:
        print(json.dumps(summaries[0]) if json_ else live.closing_lines(summaries[0]), flush=True)
    else:
        sweep.report(summaries, json_output=json_)
    failed = any(summary["status"] == "failed" for summary in summaries)
    raise typer.Exit(130 if interrupted else 1 if failed else 0)


def _create(client: Client, configs: Sequence[RunConfig], spaces: EnvSpec, target: str | None) -> list[str]:
    """Store the runs: all, or none that goes on."""
    from ddrl.runs import submit as submission
    from ddrl.store import runs

    weights = _initial(target, configs[0], spaces) if target is not None else None
    created: list[str] = []
    try:
        for config in configs:
            created.append(submission.create(client, config, spaces, initial=weights))
    except BaseException:
        for run in created:
            runs.set_status(client, run, "stopped", "those submitted with it could not be")
        raise
    return created


def _initial(target: str, config: RunConfig, spaces: EnvSpec) -> tuple[str, bytes]:
    """Where the first weights come from, and they."""
    from ddrl.cli import targets
    from ddrl.runs import initial_weights as warmstart

    with targets.opened(target, None) as (source, _):
        return warmstart.initial(source, config, spaces)


def _with_seeds(config: RunConfig, seeds: int) -> Sequence[RunConfig]:
    """One config a seed, from the config's own seed on."""
    return [config.model_copy(update={"seed": config.seed + i}) for i in range(seeds)]


def _serving(client: Client, config: RunConfig) -> int:
    """Processes of the fleet that can play a run now."""
    from ddrl import envs
    from ddrl.envs import versions
    from ddrl.store import workers

    queue = envs.queue_for("ddrl.rollout", config.env.id, versions.custom_network(config))
    return sum(worker.num_players for worker in workers.alive(client) if queue in worker.queues)


def _goes_on(runs: Sequence[str]) -> str:
    """What is said on leaving runs to a fleet."""
    verb = "goes on" if len(runs) == 1 else "go on"
    stops = "; ".join(f"`ddrl stop {run}`" for run in runs)
    return f"{', '.join(runs)} {verb} without being watched; stop with {stops}"


def _tell_detached(runs: Sequence[str], json_: bool) -> None:
    if json_:
        rows = [{"run": run, "status": "active"} for run in runs]
        print(json.dumps(rows[0] if len(rows) == 1 else {"runs": rows}), flush=True)
        return
    for run in runs:
        print(f"{run}: submitted; watch it with `ddrl watch {run}`", flush=True)
