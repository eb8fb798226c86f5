"""Shared by all commands: the connection, confirmation, JSON, tables and progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ddrl.cli.format import cell, counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MIN_TEXT = 24  # columns of a cell of text that wraps
MOST_CELL, MOST_TEXT, MOST_NAME = 255, 1_000, 60  # characters of a cell, of one that wraps, of a value's name
MOST_CHARACTERS = 5_000_000  # of a table
UNBOUNDED = 10_000  # columns of an output that is not a terminal
AS_IT_IS: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # options of a rich console
PROGRESS_S = 5.0  # between two lines of progress where there is no terminal

Client = Any  # a redis.Redis: only store/ imports redis

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout and nothing else.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, the start of one, or: last.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


class InputError(ValueError):
    """Arguments that a command cannot use; the message is one line with the remedy."""


class ServerError(RuntimeError):
    """The server cannot be reached or is not fit for use; the message is one line with the remedy."""


# --- the server --------------------------------------------------------------------------------------


@contextmanager
def server() -> Iterator[Client]:
    """Connect to DDRL_REDIS_URL or the embedded server, check it, and keep it running while the context lasts.

    Raises:
        ServerError: not reachable, or not fit.
    """
    from ddrl.store import connection
    from ddrl.store import server as embedded

    with ExitStack() as stack:
        try:
            client = connection.connect(stack.enter_context(embedded.use()))
            stack.callback(client.close)
            connection.check(client)
        except connection.StoreError as error:
            raise ServerError(str(error)) from error
        yield client


@contextmanager
def server_of(name: str) -> Iterator[tuple[Client, str]]:
    """Connect to the server, and yield the id of the run that `name` stands for too.

    Raises:
        ServerError: not reachable, or not fit.
        UnknownRunError: there is no such run.
    """
    with server() as client:
        yield client, resolve(client, name)


def resolve(client: Client, name: str) -> str:
    """Return the id of the run that `name` stands for.

    Raises:
        UnknownRunError: there is no such run; the message says if its folder is here.
    """
    from ddrl.store import runs

    try:
        return runs.resolve(client, name)
    except runs.UnknownRunError as error:
        # A Path raises where the name is too long for a file.
        if not os.path.isfile(policy := Path("runs", name, "policy.safetensors")):
            raise
        remedy = f"play {policy}, or continue the run with `ddrl resume {name}`"
        raise runs.UnknownRunError(f"{error}; {remedy}") from None


# --- input -------------------------------------------------------------------------------------------


def seconds(text: str | None, option: str) -> float | None:
    """Return the duration given to an option, such as 15m, if it is given.

    Raises:
        ConfigError: it is not a duration.
    """
    from ddrl import config

    return None if text is None else config.duration(text, option)


def num_bytes(text: str | None, option: str) -> int | None:
    """Return the size given to an option, such as 10GB, if it is given.

    Raises:
        InputError: it is not a size.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return None if text is None else int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InputError(f"{option} {text}: not a size; use 500MB or 10GB") from None


def confirm(what: str, question: str, yes: bool) -> None:
    """Ask on the terminal before something is deleted; `yes` answers in advance.

    Raises:
        InputError: no terminal to ask on; the message begins with `what`.
        typer.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{what} not deleted: no terminal to confirm on; add --yes")
    typer.confirm(question, abort=True, err=True)


# --- text and JSON -----------------------------------------------------------------------------------


def answer(value: Any, text: str, *, json_output: bool) -> None:
    """Print the result of a command: a value as JSON, or a text."""
    if json_output:
        emit(value)
    else:
        print(text, flush=True)


def emit(value: Any) -> None:
    """Print a value as JSON; NaN and infinity become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=2 if sys.stdout.isatty() else None), flush=True)


def note(text: str) -> None:
    """Print a message on stderr, beside the command's output."""
    _console(sys.stderr).print(text)


def say(text: str) -> None:
    """Print a sentence on stdout."""
    _console(sys.stdout).print(text)


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how much is done, of how much: a bar on a terminal, else a line now and then.

    Args:
        what: the line, such as "read {:,} of {:,} entries".
        quiet: show nothing.
    """
    if quiet or not sys.stderr.isatty():
        next_at = time.monotonic() + PROGRESS_S

        def show(done: int, total: int) -> None:
            nonlocal next_at
            if not quiet and time.monotonic() >= next_at:
                next_at = time.monotonic() + PROGRESS_S
                note(what.format(done, total))

        yield show
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(sys.stderr), transient=True) as bars:
        bar = bars.add_task("", total=None)
        yield lambda done, total: bars.update(
            bar, completed=done, total=total, description=what.format(done, total)
        )


# --- tables ------------------------------------------------------------------------------------------


def table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], *, left: Sequence[str], optional: Sequence[str] = ()
) -> None:
    """Print rows below a header, and of more than a terminal can use the last ones; no usual cell is cut off.

    Args:
        header: names of the columns.
        rows: their cells, formatted by `cell`.
        left: columns of text; all others are aligned to the right. If the last column is text, it wraps.
        optional: columns that are left out, the first of them first, where the terminal is too narrow.
    """
    from rich.cells import cell_len
    from rich.table import Table

    console, wrapped = _console(sys.stdout), len(header) - 1 if header[-1] in left else None
    longest = [MOST_TEXT if column == wrapped else MOST_CELL for column in range(len(header))]
    texts = [[_cut(cell(value), most) for value, most in zip(row, longest, strict=True)] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(header, *texts, strict=True)]
    left_out = texts[: max(0, len(texts) - MOST_CHARACTERS // sum(widths))]
    if wrapped is not None:
        widths[wrapped] = MIN_TEXT
    shown = list(range(len(header)))
    for name in optional:
        if name in header and sum(widths[column] + 2 for column in shown) - 2 > console.width:
            shown.remove(header.index(name))
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in shown:
        justify: Any = "left" if header[column] in left else "right"
        grid.add_column(header[column], justify, no_wrap=column != wrapped, min_width=widths[column])
    for row in texts[len(left_out) :]:
        grid.add_row(*(row[column] for column in shown))
    _print(console, grid)
    if left_out:
        note(f"{counted(len(left_out), 'row')} before these not shown: too many for a table; use --json")


def _cut(text: str, most: int) -> str:
    """Return a text, its end left out where it is too long."""
    return text if len(text) <= most else text[: most - 1] + "…"


def pairs(values: Mapping[str, Any]) -> None:
    """Print names and values, one pair a line, the values aligned; a value of None is left out."""
    aligned([(_cut(name, MOST_NAME), cell(value)) for name, value in values.items() if value is not None])


def aligned(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of texts in columns, of which the last one wraps."""
    from rich.table import Column, Table

    columns = [*(Column(no_wrap=True) for _ in rows[0][1:]), Column(min_width=MIN_TEXT)]
    grid = Table.grid(*columns, padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*row)
    _print(_console(sys.stdout), grid)


def _console(file: TextIO) -> Console:
    """Return a console that prints text as it is; it wraps lines only on a terminal."""
    from rich.console import Console

    width = None if file.isatty() else UNBOUNDED
    return Console(file=file, width=width, **AS_IT_IS)


def _print(console: Console, grid: Table) -> None:
    """Print a table without spaces at the ends of lines, on as many columns as its cells need."""
    unbounded = console.options.update(max_width=UNBOUNDED)
    console.width = max(console.width, console.measure(grid, options=unbounded).minimum)
    with console.capture() as captured:
        console.print(grid, crop=False)
    for line in captured.get().splitlines():
        print(line.rstrip())
