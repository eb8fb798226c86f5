"""`ddrl web`: start the page."""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
from typing import Annotated

import typer

from ddrl.cli.output import InputError, note, server

PASSWORD = "DDRL_WEB_PASSWORD"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
EXTRA = ("starlette", "uvicorn", "jinja2", "python_multipart")


def web(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8265,
    listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Listen there, such as 0.0.0.0; needs a password.")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Whoever logs in may change runs; needs a password.")
    ] = False,
) -> None:
    """Show runs and fleet in a browser, until Ctrl-C. DDRL_WEB_PASSWORD, if set, is asked for first."""
    if lacking := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        raise InputError(f"ddrl web: {lacking[0]} is not installed; pip install 'ddrl[web]'")
    password = os.environ.get(PASSWORD, "")
    if (listen or control) and not password:
        option = "--control" if control else f"--listen {listen}"
        raise InputError(f"{option}: needs a password; set {PASSWORD}")

    import uvicorn

    from ddrl.web.app import create

    host = listen or "127.0.0.1"
    bound = _bind(host, port)
    with server() as client:
        address = f"http://{'localhost' if not listen else socket.gethostname()}:{bound.getsockname()[1]}/"
        note(f"shows runs at {address}" + (", where whoever logs in may change them" if control else ""))
        app = create(client, hosts=["*"] if listen else LOOPBACK, password=password, controls=control)
        gc.freeze()  # else the collector goes through all that was imported, for a run's many episodes again and again
        settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, server_header=False)
        uvicorn.Server(settings).run(sockets=[bound])


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound there.

    Raises:
        InputError: it cannot be.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise InputError(f"{host}:{port}: {reason}; give another --listen or --port (0: any)") from None
