"""`ddrl audit`: check that every acknowledged fragment is accounted for exactly once."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.format import counted, picked
from ddrl.cli.output import Json, Run, emit, note, say, server, table
from ddrl.store import ledger, runs
from ddrl.store.ledger import ENDED

if TYPE_CHECKING:
    from ddrl.store.ledger import Account, Audit

MAX_ROWS = 40  # of balanced producers
PROGRESS_S = 1.0  # between two progress reports
COUNTS = ("appended", "consumed", "waiting", "trimmed", "refused", "duplicates", "difference")
_HEADER = ("producer", "host", *COUNTS[:-2], "repeated", "missing")


def audit(
    run: Run = "last",
    all_: Annotated[bool, typer.Option("--all", help="List balanced producers too.")] = False,
    json_output: Json = False,
) -> None:
    """Check for each producer that appended = consumed + waiting + trimmed + refused; exit code 1 if not."""
    with server() as client:
        run = runs.resolve(client, run)
        state = runs.state(client, run)
        progress = _Progress()
        found = ledger.audit(client, run, on_entries=progress.report)
        progress.end()
    if json_output:
        emit(_report(run, state.status, found))
    else:
        _show(run, found, goes_on=state.leased, everyone=all_)
    if not found.is_balanced:
        raise typer.Exit(1)


def _report(run: str, status: str, found: Audit) -> dict[str, Any]:
    return {
        "run": run,
        "status": status,
        "balanced": found.is_balanced,
        **picked(found, "cursor", "unknown"),
        "totals": {name: found.total(name) for name in COUNTS},
        "producers": [
            {"producer": producer, **picked(account, "host", *COUNTS)}
            for producer, account in sorted(found.accounts.items())
        ],
    }


def _show(run: str, found: Audit, *, goes_on: bool, everyone: bool) -> None:
    accounts = sorted(found.accounts.items())
    if not accounts:
        print(f"{run}: nothing was appended yet")
        return
    odd = [(producer, account) for producer, account in accounts if account.difference]
    shown = accounts if everyone or len(accounts) <= MAX_ROWS else (odd or accounts[-MAX_ROWS:])
    rows: list[tuple[Any, ...]] = [
        ("ended" if producer == ENDED else str(producer), *picked(account, "host", *COUNTS).values())
        for producer, account in shown
    ]
    total = {name: found.total(name) for name in COUNTS}
    rows.append(("total", counted(len(accounts), "producer"), *total.values()))
    table(_HEADER, rows, left=("producer", "host"))
    if len(shown) < len(accounts):
        note(f"{len(accounts) - len(shown)} balanced producers not shown; show all with --all")
    print()
    if odd:
        named = ", ".join(f"{producer} on {account.host} ({_off(account)})" for producer, account in odd[:8])
        more = f", and {len(odd) - 8} more" if len(odd) > 8 else ""
        say(f"{run}: not balanced: producer{'s' if len(odd) > 1 else ''} {named}{more}")
    else:
        parts = (f"{total[name]:,} {name}" for name in ("consumed", "waiting", "trimmed", "refused"))
        say(f"{run}: balanced: {total['appended']:,} appended = {' + '.join(parts)}")
    if found.unknown:
        say(f"{found.unknown:,} entries that no append wrote; they are in no producer's account")
    if goes_on and total["waiting"]:
        say("waiting: appended after the learner's last report, which is less than a second old")
    elif total["waiting"]:
        say("waiting: in the stream, not read yet; the next learner reads them")


def _off(account: Account) -> str:
    difference = account.difference
    return f"{difference:,} not accounted for" if difference > 0 else f"{-difference:,} counted twice"


class _Progress:
    """Reports the progress of a long audit on stderr: in one line of a terminal, or a line a second."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_S
        self._is_shown = False

    def report(self, num: int, total: int) -> None:
        """Report that `num` of at most `total` entries have been read."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_S
            self._is_shown = sys.stderr.isatty()
            text = f"read {num:,} of at most {total:,} entries"
            print(
                f"\r{text}" if self._is_shown else text,
                end="" if self._is_shown else "\n",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        """Clear the progress line of a terminal."""
        if self._is_shown:
            print(f"\r{' ' * 60}\r", end="", file=sys.stderr, flush=True)
