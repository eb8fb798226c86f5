"""Run `ddrl` commands in this process."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any, NamedTuple

from ddrl.cli import main


class Printed(NamedTuple):
    code: int
    out: str
    err: str


def run(*arguments: str) -> Printed:
    """Run a command; return its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Printed(code, out.getvalue(), err.getvalue())


def call(*arguments: str) -> str:
    """Run a command that must succeed; return its stdout."""
    printed = run(*arguments)
    assert printed.code == 0, printed
    return printed.out


def call_json(*arguments: str) -> Any:
    """Run a command with --json; return the one value on stdout."""
    return json.loads(call(*arguments, "--json"))


def refused(*arguments: str, code: int = 2) -> str:
    """Run a command that must fail with one line on stderr and nothing on stdout; return that line."""
    printed = run(*arguments)
    assert (printed.code, printed.out) == (code, "") and printed.err.count("\n") == 1, printed
    assert printed.err.startswith("ddrl: error: ")
    return printed.err.removeprefix("ddrl: error: ").strip()
