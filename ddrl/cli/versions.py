"""`ddrl versions`, `backfill` and `rollback`: the versions of a run's weights that the server keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ddrl.cli import evaluate, policies, submit
from ddrl.cli.format import duration, number, size
from ddrl.cli.output import Client, InputError, Json, Run, answer, emit, note, progress, server_of, table
from ddrl.runs import processes as local
from ddrl.store import connection, quarantine, runs, weights, workers
from ddrl.store.evaluations import OpenEvaluations
from ddrl.store.quarantine import Rule

READY_S = 60.0  # for workers that this command starts to be there


def versions(run: Run = "last", json_output: Json = False) -> None:
    """List the versions that a run keeps, each with its score over all episodes that it was evaluated on."""
    with server_of(run) as (client, run):
        _show(client, run, json_output)


def backfill(
    run: Run = "last",
    every: Annotated[int, typer.Option(min=1, help="Each so many of the kept versions.")] = 1,
    episodes: Annotated[
        int | None,
        typer.Option("--episodes", "-n", min=1, help="Of each. Default: as the run's evaluations."),
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=1024, help="Processes to start. Default: none if others play."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Evaluate versions that a run has kept, on its fleet, for its curves and for `ddrl versions`."""
    from ddrl import celery
    from ddrl.runs import artifacts
    from ddrl.runs.versions import to_evaluate

    with server_of(run) as (client, run):
        due = to_evaluate(client, run, every=every, num_episodes=episodes)
        queue = runs.state(client, run).evaluation_queue
        with local.Processes(Path("runs") / run) as processes:

            def count_processes() -> int:
                processes.check()
                return sum(worker.processes for worker in workers.alive(client) if queue in worker.queues)

            def send(message: str) -> None:
                connection.retry(
                    lambda: celery.send_evaluation(run, message, queue), timeout_s=evaluate.OUTAGE_S
                )

            if due:
                _start(processes, count_processes, num_workers)
            others = [name for name in runs.active_names(client) if runs.state(client, name).leased]
            # One more for each process waits, so that none idles; while others learn, a quarter of the fleet plays.
            most = 2 * count_processes() if not others else count_processes() // 4
            at_once = min(max(1, most), evaluate.REQUESTS_AT_ONCE)
            asked = OpenEvaluations(client, run, send=send, timeout_s=evaluate.LOST_S)
            with progress("evaluated {:,} of {:,} versions", quiet=json_output) as show:
                found = evaluate.results(asked, due, count_processes, at_once, "leaving out {}")
                for done, row in enumerate(found, 1):
                    asked.keep(row)
                    show(done, len(due))
        state = runs.state(client, run)
        if due and state.ended and artifacts.is_of(Path(state.folder), run):  # else its learner writes it
            artifacts.write(client, run, Path(state.folder))
        if not due and not json_output:
            note(f"{run}: all of these versions have such an evaluation")
        _show(client, run, json_output)


def rollback(
    target: Annotated[str, typer.Argument(metavar="RUN@VERSION", help="A number, or best.")],
    keep_experience: Annotated[
        bool, typer.Option("--keep-experience", help="Go on learning from what later versions played.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Have a run go on from an earlier version of its weights; what later versions played goes into quarantine."""
    name, _, version = target.partition("@")
    with server_of(name) as (client, run):
        number = policies.choose(client, run, version or "")
        state, latest = runs.state(client, run), weights.index(client, run).latest
        if state.outcome == "solved":
            raise InputError(f"{run}: is solved; `ddrl branch {run}@{number}` starts another run from there")
        from ddrl import policy
        from ddrl.algorithms import base

        blob = policy.weights_blob(client, run, number)
        if number == latest:
            raise InputError(
                f"{run}@{number}: is the newest version; name an earlier one of `ddrl versions {run}`"
            )
        rules, revision = quarantine.read(client, run)
        resolved = base.resolve(runs.config(client, run), runs.spaces(client, run))
        # A shadow reads what another run's versions played.
        if not (keep_experience or resolved.on_policy or state.reads):
            rules = (*rules, Rule(first_version=number + 1, last_version=latest))
        entry = {"event": "rollback", "option": "version", "from": latest, "to": number}
        entry |= {"env_steps": state.appended_steps}
        quarantine.change(client, run, revision, rules, entry, blob)
    goes_on = "its learner goes on from there" if state.leased else f"`ddrl resume {run}` goes on from there"
    answer({"run": run, "version": number, "from": latest}, f"{run}: back to version {number}; {goes_on}",
           json_output=json_output)  # fmt: skip


def _start(processes: local.Processes, count_processes: Callable[[], int], wanted: int | None) -> None:
    """Start the wanted processes, or where nobody evaluates those that this machine has; wait until they are there.

    Raises:
        InputError: nobody evaluates, and with a server that others run this command starts nothing by itself.
    """
    before = count_processes()
    if wanted is None and before:
        return
    if not (num := submit.num_workers_here(wanted)):
        raise InputError("backfill: nobody plays this run's evaluations; start workers, or add --workers 2")
    local.check_folder()
    processes.start_workers(0, num)
    until = time.monotonic() + READY_S
    while count_processes() < before + num:
        if time.monotonic() >= until:
            raise InputError(f"backfill: its workers did not start within {READY_S:.0f} s; see their log")
        time.sleep(evaluate.POLL_S)


def _show(client: Client, run: str, json_output: bool) -> None:
    """Print the versions that are kept."""
    from ddrl.runs.versions import rows

    found = rows(client, run)
    if json_output:
        emit(found)
        return
    cells = []
    for row in found:
        low, high = row["interval"] or (None, None)
        between = "" if low is None else f"{number(low)} to {number(high)}"
        figures = (duration(row["age_s"]), row["updates"], size(row["bytes"]), row["return_mean"], between)
        league = (number(row["elo"]), row["games"], f"{row['beaten']:.0%}") if "elo" in row else ()
        cells.append((str(row["version"]), *figures, row["episodes"], *league, ", ".join(row["kept_as"])))
    league = ("elo", "games", "beaten by later") if found and "elo" in found[-1] else ()
    header = ("version", "age", "updates", "size", "return", "95 % interval", "episodes", *league, "kept as")
    table(header, cells, left=("kept as",), optional=("size", "age"))
