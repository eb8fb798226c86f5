"""`ddrl learner` and `ddrl worker`: the two long-lived roles, each a thin start."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ddrl.runs.prune import Retention


def learner(
    run: Annotated[
        str | None, typer.Argument(help="Run to learn; without it, whatever waits for a learner.")
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Ask the learner that holds RUN for it, and take it after 5 s in any case."
        ),
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where the runs' folders go.")] = Path("runs"),
    keep_age: Annotated[
        str | None,
        typer.Option("--keep-age", help="Without RUN: delete runs that ended longer ago, such as 30d."),
    ] = None,
    keep_bytes: Annotated[
        str | None,
        typer.Option("--keep-bytes", help="Without RUN: delete the oldest ended runs beyond, such as 10GB."),
    ] = None,
) -> None:
    """Learn runs: one until it ends, waiting for it while another learner holds it; or every one that waits."""
    from ddrl.cli import output
    from ddrl.runs import parent

    if take_over and run is None:
        raise typer.BadParameter("needs the run that is to be taken over", param_hint="--take-over")
    if run is not None and (keep_age or keep_bytes):
        raise typer.BadParameter("goes without RUN; use `ddrl prune`", param_hint="--keep-age, --keep-bytes")
    retention = _retention(keep_age, keep_bytes)
    parent.follow(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    with output.server() as client:
        from ddrl.learner import run as runner
        from ddrl.store import copies

        interrupt = runner.Interrupt()
        interrupt.install()
        if run is None:
            runner.serve(client, folder, interrupt, retention=retention)
        else:
            run = copies.find(client, run, folder)
            runner.learn(client, run, folder, interrupt, take_over=take_over)


def _retention(keep_age: str | None, keep_bytes: str | None) -> Retention | None:
    """What the options say; None where they are not given."""
    from ddrl import config
    from ddrl.cli.prune import num_bytes
    from ddrl.runs import prune as housekeeping

    if keep_age is None and keep_bytes is None:
        return None
    return housekeeping.Retention(
        None if keep_age is None else config.duration(keep_age, "--keep-age"),
        None if keep_bytes is None else num_bytes(keep_bytes, "--keep-bytes"),
    )


def worker(
    role: Annotated[str, typer.Option(help="rollout, evaluate or all.")] = "all",
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, help="Processes.")
    ] = os.cpu_count() or 1,
    loglevel: Annotated[str, typer.Option("--loglevel", "-l", help="Celery's log level.")] = "info",
) -> None:
    """Play and evaluate: `celery -A ddrl worker` with the queues of a role."""
    if role not in ("rollout", "evaluate", "all"):
        raise typer.BadParameter(f"{role!r} is no role; use rollout, evaluate or all", param_hint="--role")
    from ddrl.celery import app, queues

    arguments = ["worker", "--queues", ",".join(queues(role)), "--concurrency", str(concurrency)]
    app.worker_main([*arguments, "--loglevel", loglevel, "--without-gossip", "--without-mingle"])
