"""Commands on this machine: keep the embedded server up, look whether all is well, print the schema."""

from __future__ import annotations

import json
import signal
import threading
from typing import Annotated, Any

import typer

from ddrl.cli.doctor import FAIL, WARN, examine
from ddrl.cli.output import InputError, Json, ServerError, emit, note

_MARKS = {"ok": "ok  ", WARN: "warn", FAIL: "FAIL"}


def up(
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Let other machines in too; they need the password printed."),
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
    stop = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: stop.set())
    try:
        hold = embedded.acquire()
        try:
            print(f"server: {connection.mask(connection.url())}", flush=True)
            if address is not None:
                _, join = hold.listen(*address)
                print(f"on other machines: {join}", flush=True)
            else:
                print("in other terminals: celery -A ddrl worker", flush=True)
            note("Ctrl-C ends it; the data stay")
            while not stop.wait(0.5):
                pass
        finally:
            hold.release()
    except connection.StoreError as error:
        raise ServerError(str(error)) from None


def doctor(json_output: Json = False) -> None:
    """Look whether this machine can train: packages, server, devices, environments, with remedies."""
    findings = examine()
    if json_output:
        emit([{k: getattr(f, k) for k in ("name", "level", "detail", "remedy")} for f in findings])
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            print(f"{_MARKS[finding.level]}  {finding.name.ljust(width)}  {finding.detail}{remedy}")
    if any(finding.level == FAIL for finding in findings):
        raise typer.Exit(3 if any(f.name == "server" and f.level == FAIL for f in findings) else 1)


def schema() -> None:
    """Print the JSON schema of a run's configuration, and of each algorithm's options."""
    from ddrl.algorithms import base
    from ddrl.config import RunConfig

    document: dict[str, Any] = RunConfig.model_json_schema(by_alias=True)
    document["algorithms"] = {
        name: base.config_class(name).model_json_schema(by_alias=True) for name in base.names()
    }
    print(json.dumps(document, indent=2))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--listen {text}: expected HOST:PORT, such as 0.0.0.0:6379")
    return host.strip("[]"), int(port)
