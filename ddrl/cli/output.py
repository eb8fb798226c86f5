"""What all commands share: the connection, JSON, tables, and how figures are written."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, TextIO

import typer

TEXT_WIDTH = 24  # that running text gets at least, before the terminal breaks the lines

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
    from ddrl.store import connection
    from ddrl.store import server as embedded

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
    print(_wrapped(text, sys.stderr), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a sentence; on a terminal no word is broken."""
    print(_wrapped(text, sys.stdout), flush=True)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print rows below a header, aligned; nothing is cut off.

    Args:
        header: names of the columns.
        rows: their cells.
        left: columns that hold text; all others are aligned to the right. A last one of them may break into lines.
        optional: columns that are left out where the terminal is too narrow, the first of them first.
    """
    room = _columns(sys.stdout)
    shown = list(range(len(header)))
    widths = [max(len(line[column]) for line in (header, *rows)) for column in shown]
    flows = header[-1] in left  # running text in the last column

    def needed(gap: int) -> int:
        last = shown[-1]
        text = min(widths[last], TEXT_WIDTH) if flows and last == len(header) - 1 else widths[last]
        return sum(widths[column] + gap for column in shown[:-1]) + text

    for name in optional:
        if needed(1) > room and name in header:
            shown.remove(header.index(name))
    gap = " " * (2 if needed(2) <= room else 1)
    flows = flows and shown[-1] == len(header) - 1
    for number, line in enumerate((header, *rows)):
        *cells, last = (
            line[column].ljust(widths[column])
            if header[column] in left
            else line[column].rjust(widths[column])
            for column in shown
        )
        begin = "".join(cell + gap for cell in cells)
        text = textwrap.wrap(last, max(room - len(begin), TEXT_WIDTH)) or [""] if flows else [last]
        whole = ("\n" + " " * len(begin)).join([begin + text[0], *text[1:]]).rstrip()
        print(f"\033[1m{whole}\033[0m" if number == 0 and _styles(sys.stdout) else whole)


def pairs(values: Mapping[str, str]) -> None:
    """Print names and values, one a line, the values aligned, also where a terminal is too narrow for them."""
    width, room = max(map(len, values), default=0), _columns(sys.stdout)
    for name, value in values.items():
        begin = f"{name.ljust(width)}  "
        lines = textwrap.wrap(value, max(room - len(begin), TEXT_WIDTH), break_on_hyphens=False) or [""]
        print(("\n" + " " * len(begin)).join([begin + lines[0], *lines[1:]]).rstrip())


def _columns(file: TextIO) -> int:
    """Width of a terminal; no bound where the text goes elsewhere."""
    return shutil.get_terminal_size().columns if file.isatty() else 10**6


def _styles(file: TextIO) -> bool:
    return file.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _wrapped(text: str, file: TextIO) -> str:
    options: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    return "\n".join(textwrap.fill(line, _columns(file), **options) for line in text.splitlines())


def counted(num: int, noun: str, ending: str = "s") -> str:
    """A number of things: "1 machine", "2 machines"."""
    return f"{num:,} {noun}{ending * (num != 1)}"


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
