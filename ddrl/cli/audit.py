"""`ddrl audit`: check that every acknowledged fragment is accounted for exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ddrl.cli.format import counted, picked
from ddrl.cli.output import Json, Run, emit, note, progress, say, server_of, table
from ddrl.store import ledger, quarantine, runs

MAX_ROWS = 40  # of balanced producers
COUNTS = ("appended", "consumed", "waiting", "trimmed", "refused", "duplicates", "difference")


def audit(
    run: Run = "last",
    all_: Annotated[bool, typer.Option("--all", help="List balanced producers too.")] = False,
    json_output: Json = False,
) -> None:
    """Check for each producer that appended = consumed + waiting + trimmed + refused; exit code 1 if not."""
    with server_of(run) as (client, run):
        state = runs.state(client, run)
        with progress("read {:,} of at most {:,} entries", quiet=json_output) as show_progress:
            found = ledger.audit(client, run, on_entries=show_progress)
        from ddrl.runs.fragments import covered

        rules, _ = quarantine.read(client, run)
        left_out = covered(client, run, rules).under_any if rules else 0
    report = _report(run, state.status, found) | {"quarantined": left_out}
    if json_output:
        emit(report)
    elif state.reads:
        print(f"{run}: learns from the stream of {state.reads}; `ddrl audit {state.reads}` accounts for that")
    elif report["producers"]:
        _show(report, goes_on=state.leased, everyone=all_)
    else:
        print(f"{run}: nothing was appended yet")
    if not found.is_balanced:
        raise typer.Exit(1)


def _report(run: str, status: str, found: ledger.Audit) -> dict[str, Any]:
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


def _show(report: Mapping[str, Any], *, goes_on: bool, everyone: bool) -> None:
    run, total, known = report["run"], report["totals"], report["producers"]
    odd = [row for row in known if row["difference"]]
    shown = known if everyone or len(known) <= MAX_ROWS else (odd or known)[-MAX_ROWS:]
    rows = [*map(_cells, shown), ("total", counted(len(known), "producer"), *total.values())]
    table(("producer", "host", *COUNTS[:-2], "repeated", "missing"), rows, left=("producer", "host"))
    if len(shown) < len(known):
        note(f"{len(known) - len(shown)} other producers not shown; show all with --all")
    print()
    if odd:
        named = ", ".join(f"{row['producer']} on {row['host']} ({_missing(row)})" for row in odd[:8])
        more = f", and {len(odd) - 8} more" if len(odd) > 8 else ""
        say(f"{run}: not balanced: producer{'s' if len(odd) > 1 else ''} {named}{more}")
    else:
        parts = (f"{total[name]:,} {name}" for name in ("consumed", "waiting", "trimmed", "refused"))
        say(f"{run}: balanced: {total['appended']:,} appended = {' + '.join(parts)}")
    if report["unknown"]:
        say(f"{report['unknown']:,} entries that no append wrote; they are in no producer's account")
    if report["quarantined"]:
        say(
            f"{counted(report['quarantined'], 'fragment')} in the stream in quarantine (`ddrl quarantine {run}`)"
        )
    if goes_on and total["waiting"]:
        say("waiting: appended after the learner's last report, which is less than a second old")
    elif total["waiting"]:
        say("waiting: in the stream, not read yet; the next learner reads them")


def _cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    name = "ended" if row["producer"] == ledger.ENDED else str(row["producer"])
    return (name, row["host"], *(row[count] for count in COUNTS))


def _missing(row: Mapping[str, Any]) -> str:
    missing = row["difference"]
    return f"{missing:,} not accounted for" if missing > 0 else f"{-missing:,} counted twice"
