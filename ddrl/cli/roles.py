"""`ddrl learner`, `ddrl worker`, `ddrl up`: the processes that run until they are stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer

from ddrl.cli.output import InputError, ServerError, note, num_bytes, resolve, seconds, server
from ddrl.cli.submit import Set


def learner(
    run: Annotated[
        str | None, typer.Argument(help="Run to learn; without it, every run that waits for a learner.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Request RUN from its learner, and take it after 5 s anyway.")
    ] = False,
    shadow: Annotated[
        str | None,
        typer.Option("--shadow", metavar="RUN", help="Learn in a new run from the experience of this one."),
    ] = None,
    set_: Set = None,
    folder: Annotated[Path, typer.Option(help="Folder of the runs' folders.")] = Path("runs"),
    keep_age: Annotated[
        str | None, typer.Option(help="Without RUN: delete runs that ended longer ago, such as 30d.")
    ] = None,
    keep_bytes: Annotated[
        str | None, typer.Option(help="Without RUN: delete the oldest ended runs beyond, such as 10GB.")
    ] = None,
) -> None:
    """Learn one run until it ends, waiting while another learner holds it; or every run that waits."""
    if take_over and run is None:
        raise typer.BadParameter("needs RUN, the run to take over", param_hint="--take-over")
    if shadow is not None and (run is not None or take_over or keep_age or keep_bytes):
        raise typer.BadParameter("goes with -s only", param_hint="--shadow")
    if set_ and shadow is None:
        raise typer.BadParameter("is for --shadow; change a run's settings with `ddrl set`", param_hint="-s")
    if run is not None and (keep_age or keep_bytes):
        options = "--keep-age, --keep-bytes"
        raise typer.BadParameter("not together with RUN; use `ddrl prune`", param_hint=options)
    limits = seconds(keep_age, "--keep-age"), num_bytes(keep_bytes, "--keep-bytes")

    from ddrl.runs import monitoring, processes
    from ddrl.runs.prune import Retention

    processes.follow_parent(signal.SIGTERM)
    # Else torch prints where a lost learner was waited for.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    with server() as client:
        from ddrl.learner import run as runner
        from ddrl.store import local_checkpoints

        monitoring.serve(monitoring.LearnerMetrics())
        stop = runner.handle_signals()
        if shadow is not None:
            from ddrl.runs.submit import create_shadow, shadow_config

            source = resolve(client, shadow)
            run = create_shadow(client, source, shadow_config(client, source, set_ or []))
            note(f"run {run}")
        if run is None:
            retention = None if limits == (None, None) else Retention(*limits)
            runner.serve(client, folder, stop, retention=retention)
        else:
            run = run if shadow else local_checkpoints.find(client, run, folder)
            runner.learn(client, run, folder, stop, take_over=take_over)


def worker(
    role: Annotated[str, typer.Option(help="rollout, evaluate or all.")] = "all",
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, help="Processes; by default what cores and memory allow."),
    ] = None,
    loglevel: Annotated[str, typer.Option("--loglevel", "-l", help="Celery's log level.")] = "info",
) -> None:
    """Play and evaluate: `celery -A ddrl worker` with the queues of a role."""
    if role not in ("rollout", "evaluate", "all"):
        raise typer.BadParameter(f"{role!r} is unknown; use rollout, evaluate or all", param_hint="--role")
    from ddrl.celery import app, queues

    arguments = ["--quiet", "worker", "--queues", ",".join(queues(role))]
    arguments += ["--concurrency", str(concurrency)] if concurrency else []
    app.worker_main([*arguments, "--loglevel", loglevel, "--without-gossip", "--without-mingle"])


def up(
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Also serve other machines, by a printed password."),
    ] = None,
) -> None:
    """Keep the embedded server running until Ctrl-C."""
    from ddrl.store import connection
    from ddrl.store import server as embedded

    if not connection.is_embedded():
        raise InputError(
            f"{connection.URL_VARIABLE} names a server, so none is started here; unset it to use your own"
        )
    address = None if listen is None else _address(listen)
    # A signal that interrupts an Event's wait cannot set it: it may interrupt the wait while that holds the lock.
    ended: SimpleQueue[int] = SimpleQueue()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda signum, _: ended.put(signum))
    try:
        hold = embedded.acquire()
        try:
            print(f"server: {connection.mask(connection.url())}", flush=True)
            where, command = "in other terminals", "celery -A ddrl worker"
            if address is not None:
                where, (_, command) = "on other machines", hold.listen(*address)
            print(f"{where}: {command}", flush=True)
            note("Ctrl-C ends it; its data stay")
            ended.get()
        finally:
            hold.release()
    except connection.StoreError as error:
        raise ServerError(str(error)) from None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--listen {text}: expected HOST:PORT, such as 0.0.0.0:6379")
    return host.strip("[]"), int(port)
