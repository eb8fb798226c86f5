"""What all commands share: the connection, JSON, tables, and how figures are written."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

Client = Any  # a redis.Redis: only store/ imports redis

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout and nothing else.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, the start of one, or: last.")]


class InputError(ValueError):
    """A command that cannot be carried out as given; the message is one line with the remedy."""


class ServerError(RuntimeError):
    """The server cannot be reached or will not do; the message is one line with the remedy."""


@contextmanager
def server() -> Iterator[Client]:
    """A checked connection to DDRL_REDIS_URL, or else to the embedded server, held while the context lasts.

    Raises:
        ServerError: not reachable, or not fit.
    """
    from ddrl import embedded
    from ddrl.store import connection

    with ExitStack() as stack:
        try:
            url = stack.enter_context(embedded.use())
            client = connection.connect(url)
            stack.callback(client.close)
            connection.check(client)
        except connection.StoreError as error:
            raise ServerError(str(error)) from error
        yield client


def emit(value: Any) -> None:
    """Print a value as JSON; what JSON cannot say (NaN, infinity) becomes null."""
    print(json.dumps(_plain(value), indent=2 if sys.stdout.isatty() else None), flush=True)


def note(text: str) -> None:
    """Say something on stderr that is no part of the answer."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> None:
    """Print rows below a header: a rich table on a terminal, aligned plain text otherwise.

    Args:
        left: columns that hold text; all others are aligned to the right.
    """
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        rich_table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in header:
            # Identifiers stay whole; running text in the last column may wrap.
            last = name == header[-1]
            rich_table.add_column(name, justify="left" if name in left else "right", no_wrap=not last)
        for row in rows:
            rich_table.add_row(*(Text(cell) for cell in row))
        Console().print(rich_table)
        return
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    for line in (header, *rows):
        cells = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def pairs(values: Mapping[str, str]) -> None:
    """Print names and values, one a line, the values aligned."""
    width = max(map(len, values), default=0)
    for name, value in values.items():
        print(f"{name.ljust(width)}  {value}".rstrip())


def duration(seconds: float) -> str:
    """Seconds as "9s", "3m05s", "2h10m" or "3d04h"."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def size(num_bytes: float) -> str:
    """Bytes as "512 B", "3.1 MB": powers of 1024."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def number(value: float | None, digits: int = 1) -> str:
    """A figure, or "-" where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.{digits}f}"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
