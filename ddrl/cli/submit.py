"""`ddrl submit` and `ddrl resume`: start runs and the processes they lack, and follow them to their end."""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl import config as configs
from ddrl.cli import live, policies
from ddrl.cli.format import counted, score
from ddrl.cli.output import (
    Client,
    InputError,
    Json,
    answer,
    emit,
    note,
    progress,
    say,
    seconds,
    server,
    server_of,
    table,
)
from ddrl.runs import processes as local
from ddrl.runs.prune import prune_embedded
from ddrl.runs.records import summary
from ddrl.store import connection, machine
from ddrl.store import runs as store

if TYPE_CHECKING:
    from ddrl.runs.initial_weights import LearnerState

LEARNER_EXIT_S = 60.0  # for writing the run's folder after the run has ended

Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="Override, such as algorithm.gamma=0.98."),
]
Time = Annotated[str | None, typer.Option("--time", help="Stop after this long, such as 15m.")]
WORKERS_HELP = (
    "Rollout processes to start. Default: with the embedded server all cores but one, at most 8, or one for each run "
    "if that is more, as far as there are cores; else none."
)
Workers = Annotated[int | None, typer.Option("--workers", min=0, max=1024, help=WORKERS_HELP)]
LEARNER_HELP = "Start a learner. Default: yes with the embedded server, else no."
WithLearner = Annotated[bool | None, typer.Option("--learner/--no-learner", help=LEARNER_HELP)]
Detach = Annotated[bool, typer.Option("--detach", help="Return at once; `ddrl watch` follows the run later.")]


def submit(
    config: Annotated[str, typer.Argument(help="YAML file, or name of a preset.", show_default=False)],
    set_: Set = None,
    time_: Time = None,
    workers: Workers = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs to start, with consecutive seeds.")] = 1,
    weight: Annotated[float | None, typer.Option(help="Share of the fleet, relative to others.")] = None,
    priority: Annotated[str | None, typer.Option(help="low, normal or high; high plays first.")] = None,
    track: Annotated[
        list[str] | None,
        typer.Option("--track", help="Tell wandb, mlflow or trackio of the run; repeatable."),
    ] = None,
    initial: Annotated[
        str | None, typer.Option("--from", metavar="POLICY|RUN@VERSION", help="Initial weights.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--from-data", metavar="FOLDER", help="Learn from a recording of `ddrl record`; nobody plays."
        ),
    ] = None,
    with_learner: WithLearner = None,
    detach: Detach = False,
    json_output: Json = False,
) -> None:
    """Start a run, and the server and processes that it lacks; follow it to its end."""
    started = time.monotonic()
    given = {"stop.time": seconds(time_, "--time"), "seed": seed, "weight": weight, "priority": priority}
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    options += [f"tracking={json.dumps(track)}"] if track else []
    if data is not None and (seeds > 1 or initial is not None):
        raise InputError(f"--from-data {data}: goes with neither --seeds nor --from; leave them out")
    path, preset = configs.find(config), configs.presets().get(config.removesuffix(".yaml"))
    resolved = configs.load(path, [*(set_ or []), *options])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    with_learner = starts_learner(with_learner, [resolved])
    with server() as client:
        num_workers = num_workers_here(workers, seeds)
        check_here(num_workers, [resolved] if with_learner else [])
        if data is not None:
            runs = [_from_data(client, data, resolved)]
        else:
            runs = create_all(client, resolved, seeds, initial, num_workers)
        if preset is not None and path.resolve() != preset.resolve():
            note(f"{path}: the file in this folder, not the preset {preset.stem} that ddrl ships")
        prune(client)
        if detach:
            return _detach(runs, num_workers, with_learner, json_output, "submitted")
        _attend(client, runs, num_workers, with_learner, json_output, started)


def _from_data(client: Client, folder: Path, config: configs.RunConfig) -> str:
    """Put recorded experience on the server, unless it is there; return the id of a run that learns from it."""
    from ddrl.runs import submit as submission
    from ddrl.store import recording

    with progress("put {:,} of {:,} bytes on the server", quiet=False) as show:
        source = recording.restore(client, folder, show)
    note(f"{folder}: the experience of {source}")
    return submission.create_shadow(client, source, submission.config_of_data(client, source, config))


def check_here(num_workers: int, learned: Sequence[configs.RunConfig]) -> None:
    """Refuse runs whose processes could not do here what they should.

    Args:
        num_workers: rollout processes to start.
        learned: configs of the runs for which learners are started.

    Raises:
        ConfigError, StoreError: names what is lacking.
    """
    if num_workers or learned:
        local.check_folder()
    for config in learned:
        if config.tracking:
            from ddrl import trackers  # takes a second

            trackers.check(config)


def branch(
    target: Annotated[str, typer.Argument(metavar="RUN@VERSION", help="A number, best or latest.")],
    set_: Set = None,
    time_: Time = None,
    workers: Workers = None,
    with_learner: WithLearner = None,
    detach: Detach = False,
    json_output: Json = False,
) -> None:
    """Start a run that goes on from a version of another, with its settings, networks and optimizers."""
    started = time.monotonic()
    name, _, version = target.partition("@")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server_of(name) as (client, parent):
        number = policies.choose(client, parent, version or None)
        tree = store.config(client, parent).model_dump(mode="json", by_alias=True)
        options = [f"stop.time={time_}"] if time_ else []
        config = configs.load(tree, [*(set_ or []), *options])
        with_learner = starts_learner(with_learner, [config])
        num_workers = num_workers_here(workers)
        check_here(num_workers, [config] if with_learner else [])
        from ddrl.runs.initial_weights import learner_state

        state = learner_state(client, parent, begins_anew=True)
        runs = create_all(client, config, 1, f"{parent}@{number}", num_workers, state=state)
        prune(client)
        if detach:
            return _detach(runs, num_workers, with_learner, json_output, "branched")
        _attend(client, runs, num_workers, with_learner, json_output, started)


def resume(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Runs to continue: ids, their beginnings, or last (default)."),
    ] = None,
    time_: Time = None,
    workers: Workers = None,
    with_learner: WithLearner = None,
    detach: Detach = False,
    json_output: Json = False,
) -> None:
    """Continue paused, stopped or interrupted runs from their newest checkpoints and their replay."""
    started = time.monotonic()
    from ddrl.store import local_checkpoints

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    more_time_s = seconds(time_, "--time")
    with server() as client:
        found = (local_checkpoints.find_or_restore(client, name, Path("runs")) for name in runs or ["last"])
        names = list(dict.fromkeys(found))
        num_workers, with_learner = reactivate(client, names, workers, with_learner, more_time_s)
        if detach:
            return _detach(names, num_workers, with_learner, json_output, "resumed")
        _attend(client, names, num_workers, with_learner, json_output, started)


def detached(
    runs: list[str],
    workers: Annotated[int, typer.Option()],
    with_learner: Annotated[bool, typer.Option("--learner/--no-learner")],
) -> None:
    """Run the processes of detached runs until the runs end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server() as client, local.Processes(Path("runs") / runs[0]) as processes:
        try:
            local.start(client, processes, runs, workers, with_learner)
            while local.any_active(client, runs):
                time.sleep(0.5)
                local.keep_running(client, processes, runs, note)
        except KeyboardInterrupt:
            _stop(client, runs)
        _finish(client, processes, runs)


def create_all(
    client: Client,
    config: configs.RunConfig,
    seeds: int,
    initial: str | None,
    num_workers: int,
    *,
    state: LearnerState | None = None,
) -> list[str]:
    """Create a run per seed, starting at the config's own; or leave none active.

    Args:
        initial: policy that they begin with.
        state: networks and optimizers that they begin with; an initial policy replaces theirs.
        num_workers: rollout processes that this command starts, beside those of the fleet.
    """
    from ddrl import envs
    from ddrl.runs import submit as submission
    from ddrl.runs.evaluation import MAX_STEPS
    from ddrl.store import workers

    queue = envs.queue_for("ddrl.rollout", config)
    num_in_fleet = sum(worker.num_players for worker in workers.alive(client) if queue in worker.queues)
    spaces = submission.prepare(config, processes=max(1, num_workers + num_in_fleet))
    if config.evaluation.max_steps is None and spaces.max_episode_steps is None:
        limit = f"{MAX_STEPS:,} steps (evaluation.max_steps)"
        note(f"{config.env.id}: names no time limit; evaluations end episodes after {limit}")
    weights: tuple[str, bytes] | None = None  # and their source
    if initial is not None:
        from ddrl.runs.initial_weights import initial_weights  # loads torch

        with policies.opened(initial, None) as (source, _):
            weights = initial_weights(source, config, spaces)
    if state is not None:
        from ddrl.runs.initial_weights import check_state

        check_state(state, config, spaces)
    given = None if state is None else (state.source, state.blob)
    created: list[str] = []
    try:
        for seed in range(config.seed, config.seed + seeds):
            seeded = config.model_copy(update={"seed": seed})
            created.append(submission.create(client, seeded, spaces, initial=weights, state=given))
    except BaseException:
        for run in created:
            store.set_status(client, run, "stopped", "not started: another run of its submission was refused")
            local.finish(client, run)
        raise
    return created


def reactivate(
    client: Client,
    runs: Sequence[str],
    workers: int | None,
    with_learner: bool | None,
    more_time_s: float | None = None,
) -> tuple[int, bool]:
    """Continue runs; return the number of rollout processes to start here, and whether to start learners."""
    before = [store.state(client, run) for run in runs]
    if all(state.leased and not state.outcome for state in before):  # learners hold them: only follow
        with_learner, workers = with_learner or False, workers or 0
    with_learner = starts_learner(with_learner, (store.config(client, run) for run in runs))
    num_workers = num_workers_here(workers, len(runs))
    check_here(num_workers, [store.config(client, run) for run in runs if with_learner])
    for run in runs:
        store.reactivate(client, run, more_time_s=more_time_s)
    return num_workers, with_learner


def prune(client: Client) -> None:
    """Delete old runs from the embedded server, and say so."""
    if pruned := prune_embedded(client):
        count = counted(len(pruned), "run")
        note(f"deleted {count} from the server ({pruned[0].reason}); the folders stay")


def starts_learner(wanted: bool | None, runs: Iterable[configs.RunConfig]) -> bool:
    """Return whether to start learners here; the default is for the embedded server only.

    Raises:
        ConfigError: the device or precision of a run is missing here.
    """
    starts = connection.is_embedded() if wanted is None else wanted
    for learner in (run.learner for run in (runs if starts else ())):
        if learner.device not in ("auto", "cpu") or learner.precision != "float32":
            from ddrl.networks.device import set_up  # loads torch

            set_up(learner)
    return starts


def num_workers_here(wanted: int | None, num_runs: int = 1) -> int:
    """Return the number of rollout processes to start for so many runs; the default is for the embedded server only.

    A process plays one run at a time: of two on-policy runs that share it, one waits while the other is played.
    """
    if wanted is not None:
        return wanted
    cores = machine.processes()
    return max(1, min(8, cores - 1), min(num_runs, cores)) if connection.is_embedded() else 0


def _detach(runs: list[str], num_workers: int, with_learner: bool, json_output: bool, done: str) -> None:
    """Start the processes that are missing, and leave them to themselves; `done` says what was done to the runs."""
    local.start_detached(runs, num_workers, with_learner)
    rows = [{"run": run, "status": "active"} for run in runs]
    text = "\n".join(f"{run}: {done}; watch it with `ddrl watch {run}`" for run in runs)
    answer(rows[0] if len(rows) == 1 else {"runs": rows}, text, json_output=json_output)


def _attend(
    client: Client, runs: list[str], num_workers: int, with_learner: bool, json_output: bool, started: float
) -> None:
    """Start the processes that are missing, follow the runs to their end, print their results."""
    note("\n".join(f"run {run}" for run in runs))
    try:
        is_interrupted = _follow(client, runs, num_workers, with_learner, json_output)
    except KeyboardInterrupt:  # the second one: the processes have been killed
        note(f"ended at once; `ddrl resume {' '.join(runs)}` goes on from the newest checkpoint")
        raise
    rows = [summary(client, run, wall_s=time.monotonic() - started) for run in runs]
    if len(runs) > 1:
        report([{"seed": store.config(client, row["run"]).seed, **row} for row in rows], json_output)
    else:
        text = live.closing_lines(rows[0], store.state(client, runs[0]))
        answer(rows[0], text, json_output=json_output)
    raise typer.Exit(130 if is_interrupted else int(any(row["status"] == "failed" for row in rows)))


def _follow(
    client: Client, runs: Sequence[str], num_workers: int, with_learner: bool, json_output: bool
) -> bool:
    """Run the processes of runs and show the runs until they end; return whether Ctrl-C stopped them.

    Raises:
        typer.Exit: Ctrl-C ended only this command; learners elsewhere go on.
        KeyboardInterrupt: a second Ctrl-C has ended all processes.
    """
    with local.Processes(Path("runs") / runs[0]) as processes:
        is_interrupted = False
        try:
            local.start(client, processes, runs, num_workers, with_learner)
            keep_running = partial(local.keep_running, client, processes, runs, note)
            on_tick = keep_running if num_workers or with_learner else None
            live.follow(client, runs, json_output=json_output, on_tick=on_tick)
        except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or a pipe whose reader has ended
            is_interrupted = True
            if not with_learner:
                stops = "; ".join(f"`ddrl stop {run}`" for run in runs)
                verb = "goes on" if len(runs) == 1 else "go on"
                note(f"{', '.join(runs)} {verb} without this command; stop with {stops}")
                raise typer.Exit(130) from None
            note(f"stopping {', '.join(runs)}; press Ctrl-C again to end everything at once")
            _stop(client, runs)
        _finish(client, processes, runs)
    return is_interrupted


def _stop(client: Client, runs: Sequence[str]) -> None:
    """Stop the runs; if the server does not answer, they stay active for other learners."""
    for run in runs:
        try:
            store.set_status(client, run, "stopped", "interrupted")
        except connection.OUTAGES as error:
            if (text := connection.outage(error)) is None:
                raise
            note(f"{run}: not marked as stopped: {text}")


def _finish(client: Client, processes: local.Processes, runs: Sequence[str]) -> None:
    """Let the learners end; write the results of stopped runs that no learner holds."""
    processes.wait_for_learners(LEARNER_EXIT_S)
    for run in runs:
        local.finish(client, run)


def report(rows: Sequence[Mapping[str, Any]], json_output: bool) -> None:
    """Print several runs' results and their median time, as a table or as one JSON object."""
    times = [row["train_s"] for row in rows if row["status"] in ("solved", "time")]
    median_s = round(statistics.median(times), 3) if times else None
    if json_output:
        emit({"runs": rows, "median_train_s": median_s})
        return
    cells = []
    for row in rows:
        counters = (f"{row['train_s']:,.1f} s", row["env_steps"], row["updates"])
        cells.append((str(row["seed"]), row["status"], *counters, score(row["evaluation"]), row["run"]))
    header = ("seed", "status", "train", "env steps", "updates", "return", "run")
    table(header, cells, left=("status",), optional=("updates",))
    solved = sum(row["status"] == "solved" for row in rows)
    median = "" if median_s is None else f"median train time {median_s:.1f} s; "
    say(f"{median}{solved} of {len(rows)} solved")
    if stopped := [row["run"] for row in rows if row["status"] == "stopped"]:
        say(f"continue with `ddrl resume {' '.join(stopped)}`")
