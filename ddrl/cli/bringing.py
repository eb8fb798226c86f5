"""The processes that `ddrl submit` and `ddrl resume` bring along: brought, kept up, stopped, or left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddrl.cli.output import Client
    from ddrl.runs.crew import Crew, CrewError


def processes(workers: int | None) -> int:
    """Rollout processes to bring along."""
    from ddrl.store import connection

    if workers is not None:
        return workers
    return max(1, min(8, (os.cpu_count() or 2) - 1)) if connection.is_embedded() else 0


def crew_of(runs: Sequence[str]) -> Crew:
    """Nobody yet; the workers' logs go to the first run's folder."""
    from ddrl.runs.crew import Crew

    return Crew(Path("runs") / runs[0])


def bring(brought: Crew, runs: Sequence[str], workers: int, with_learner: bool) -> None:
    """Start workers that all share, and a learner for each."""
    if workers:
        brought.start_workers(workers)
    if with_learner:
        for run in runs:
            brought.start_learner(run, Path("runs") / run)


def keep_up(client: Client, brought: Crew, runs: Sequence[str]) -> None:
    """Start again what has died; a run whose learner cannot be kept alive has failed, unless another holds it.

    Raises:
        CrewError: workers, or the learner of the only run, cannot be kept alive.
    """
    from ddrl.cli import output
    from ddrl.runs.crew import CrewError

    try:
        brought.check()
    except CrewError as error:
        concerned = [error.run] if error.run is not None else list(runs)
        for run in concerned:
            _fail(client, run, error)
        if error.run is None or len(runs) == 1:
            raise
        output.note(f"{error.run}: {error}")


def _fail(client: Client, run: str, error: CrewError) -> None:
    from ddrl.store import connection, runs

    with contextlib.suppress(*connection.UNREACHABLE):  # it is the error that is worth telling
        now = runs.state(client, run)
        if not now.leased and not now.ended:
            runs.set_status(client, run, "failed", str(error))


def stop(client: Client, names: Sequence[str]) -> None:
    """End the runs as Ctrl-C does; where the server does not answer, their learners leave them for the next."""
    from ddrl.cli import output
    from ddrl.store import connection, runs

    for run in names:
        try:
            runs.set_status(client, run, "stopped", "interrupted")
        except connection.OUTAGES as error:
            text = connection.outage(error)
            if text is None:
                raise
            output.note(f"{run}: not marked as stopped: {text}")


def any_goes_on(client: Client, names: Sequence[str]) -> bool:
    """Whether a run has not ended, as far as is known."""
    from ddrl.store import connection, runs

    with contextlib.suppress(*connection.UNREACHABLE):  # the children ride it out, and so does this
        return any(runs.status(client, run) not in runs.ENDED for run in names)
    return True


def leave_behind(runs: Sequence[str], workers: int, with_learner: bool) -> None:
    """Start `crew` as a process that outlives this one."""
    command = [sys.executable, "-m", "ddrl", "crew", *runs, "--workers", str(workers)]
    command.append("--learner" if with_learner else "--no-learner")
    folder = Path("runs") / runs[0]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "crew.log").open("ab") as log:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
