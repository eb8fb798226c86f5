"""`ddrl audit`: check that every acknowledged fragment is accounted for exactly once."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.output import Json, Run, counted, emit, note, say, server, table
from ddrl.store import ledger, runs
from ddrl.store.ledger import ENDED

if TYPE_CHECKING:
    from ddrl.store.ledger import Account, Audit

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
        "cursor": found.cursor,
        "unknown": found.unknown,
        "totals": {name: found.total(name) for name in COUNTS},
        "producers": [
            {"producer": producer, "host": account.host, **{name: getattr(account, name) for name in COUNTS}}
            for producer, account in sorted(found.accounts.items())
        ],
    }


MOST_ROWS = 40


def _show(run: str, found: Audit, *, goes_on: bool, everyone: bool) -> None:
    accounts = sorted(found.accounts.items())
    if not accounts:
        print(f"{run}: nothing was appended yet")
        return
    odd = [(producer, account) for producer, account in accounts if account.difference]
    shown = accounts if everyone or len(accounts) <= MOST_ROWS else (odd or accounts[-MOST_ROWS:])
    rows = [
        _row("ended" if producer == ENDED else f"{producer}", account.host, account)
        for producer, account in shown
    ]
    totals = ("total", counted(len(accounts), "producer"), *(f"{found.total(name):,}" for name in COUNTS))
    table(_HEADER, [*rows, totals], left=("producer", "host"))
    if len(shown) < len(accounts):
        note(f"{len(accounts) - len(shown)} balanced producers not shown; show all with --all")
    print()
    say(_verdict(run, found, odd))
    if found.unknown:
        say(f"{found.unknown:,} entries that no append wrote; they are in no producer's account")
    if goes_on and found.total("waiting"):
        say("waiting: appended after the learner's last report, which is less than a second old")
    elif found.total("waiting"):
        say("waiting: in the stream, not read yet; the next learner reads them")


def _verdict(run: str, found: Audit, odd: list[tuple[int, Account]]) -> str:
    total = {name: found.total(name) for name in COUNTS}
    if not odd:
        return (
            f"{run}: balanced: {total['appended']:,} appended = {total['consumed']:,} consumed + "
            f"{total['waiting']:,} waiting + {total['trimmed']:,} trimmed + {total['refused']:,} refused"
        )
    named = ", ".join(
        f"{producer} on {account.host} ({_off(account.difference)})" for producer, account in odd[:8]
    )
    more = f", and {len(odd) - 8} more" if len(odd) > 8 else ""
    return f"{run}: not balanced: producer{'s' if len(odd) > 1 else ''} {named}{more}"


def _off(difference: int) -> str:
    return f"{difference:,} not accounted for" if difference > 0 else f"{-difference:,} counted twice"


def _row(name: str, host: str, account: Account) -> tuple[str, ...]:
    return (name, host, *(f"{getattr(account, count):,}" for count in COUNTS))


class _Progress:
    """Reports the progress of a long audit on stderr."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_S
        self._shown = False

    def report(self, num: int, total: int) -> None:
        """Report that `num` of at most `total` entries have been read."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_S
            self._shown = True
            end = "" if sys.stderr.isatty() else "\n"
            print(f"\rread {num:,} of at most {total:,} entries" if not end else f"read {num:,} entries",
                  end=end, file=sys.stderr, flush=True)  # fmt: skip

    def end(self) -> None:
        """Clear the progress line of a terminal."""
        if self._shown and sys.stderr.isatty():
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
