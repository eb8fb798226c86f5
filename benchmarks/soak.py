"""Random faults on a live fleet, from a printed seed: does the run go on, is everything counted once, is it flat?

make soak MINUTES=15      PYTHONPATH=tests python benchmarks/soak.py --minutes 15 --report docs/soak.md

Prints each fault with its time, and the seconds until all runs played and learned again. Ledgers are audited after
each fault and at the end. Exit code 1 if a fragment was lost or counted twice, a run did not go on, a process that had
begun ended by itself, a log holds a traceback, or memory or open files grew: each is a finding, which the report names.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import facts
from soak_faults import FAULTS, Fault
from soak_fleet import MIB, NUM_LEARNERS, NUM_WORKERS, RUNS, SoakFleet, is_flat

from ddrl.store import ledger

LIMIT_S = 180.0  # for all runs to go on
QUIET_S = (0.5, 4.0)  # between going on and the next fault
MOST_EVENTS = 20  # listed in the report
AT_ONCE = 0.2  # probability that the next fault does not wait for recovery
_COLUMNS = ("appended", "consumed", "waiting", "trimmed", "refused", "difference", "duplicates")
TRACE = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Event:
    """One fault; `recovery_s` is None where the next fault came at once."""

    at_s: float
    name: str
    words: str
    recovery_s: float | None


def soak(fleet: SoakFleet, seed: int, until_s: float) -> list[Event]:
    """Inject faults until the time is up, each kind once before any comes again; return them."""
    draw = random.Random(seed)
    events: list[Event] = []
    deck: list[Fault] = []
    if fleet.recover(LIMIT_S) is None:
        fleet.findings.add("the fleet did not begin to play")
    while fleet.elapsed_s < until_s and not too_much(fleet):
        deck = deck or draw.sample(FAULTS, len(FAULTS))
        fault = deck.pop()
        at_s, name = fleet.elapsed_s, fault.__name__.replace("_", " ")
        print(f"{at_s:7.1f} s  {name}", end="", flush=True)
        words = fault(fleet, draw)
        if draw.random() < AT_ONCE:
            recovery_s = None
            print(f" ({words}); the next at once", flush=True)
        else:
            recovery_s = fleet.recover(LIMIT_S)
            print(f" ({words}); went on after {recovery_s or LIMIT_S:.1f} s", flush=True)
            if recovery_s is None:
                fleet.findings.add(f"{name}: not every run went on within {LIMIT_S:.0f} s")
            for run in fleet.runs:
                fleet.audit(run)
            time.sleep(draw.uniform(*QUIET_S))
        events.append(Event(at_s, name, words, recovery_s))
    if fleet.recover(LIMIT_S) is None:
        fleet.findings.add(f"at the end: not every run went on within {LIMIT_S:.0f} s")
    return events


def too_much(fleet: SoakFleet) -> bool:
    """Return whether there are so many findings that more would not help."""
    return len(fleet.findings.words) >= 20


def tracebacks(logs: Iterable[str]) -> Counter[str]:
    """Return how often each exception, the line at the end of its traceback, stands in the logs."""
    return Counter(
        next((line for line in text.splitlines()[1:] if line[:1].strip()), "cut off")[:200]
        for log in logs
        for text in log.split(TRACE)[1:]
    )


def counted(findings: Sequence[str]) -> str:
    """Return their number in words, for the headline."""
    return {0: "no findings", 1: "1 finding"}.get(len(findings), f"{len(findings)} findings")


def report(fleet: SoakFleet, seed: int, events: list[Event], audits: dict[str, ledger.Audit]) -> str:
    """Return the soak as Markdown."""
    lines = [
        f"# Soak: {fleet.elapsed_s / 60:.0f} minutes of random faults, seed {seed}",
        "",
        f"{facts()}.",
        f"{len(RUNS)} runs, {NUM_LEARNERS} learners (one on standby), {NUM_WORKERS} workers or one more, one server"
        " with an append-only file; every other process reaches it through a proxy. `make soak` runs it.",
        "",
        f"**{len(events)} faults; {counted(fleet.findings.words)}.**",
        "",
        *(f"- {words}" for words in fleet.findings.words),
        *(f"- started again, as by a service manager: {words}" for words in fleet.restarted),
        *[""] * bool(fleet.findings.words or fleet.restarted),
        "## The ledger",
        "",
        f"| run | producers | {' | '.join(_COLUMNS)} | unknown |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run, audit in audits.items():
        totals = " | ".join(f"{audit.total(name):,}" for name in _COLUMNS)
        lines.append(f"| {run} | {len(audit.accounts)} | {totals} | {audit.unknown} |")
    lines += [
        "",
        "In fragments; `difference`: not accounted for; `duplicates`: repeated appends, refused; `unknown`: entries"
        " that no append wrote.",
        "",
        "## Recovery",
        "",
        "Seconds from the fault's end until every run had new play acknowledged and new updates made.",
        "",
        "| fault | times | median | longest |",
        "|---|---|---|---|",
    ]
    for name, times in sorted(Counter(event.name for event in events).items()):
        waits = [e.recovery_s for e in events if e.name == name and e.recovery_s is not None]
        figures = f"{statistics.median(waits):.1f} | {max(waits):.1f}" if waits else "- | -"
        lines.append(f"| {name} | {times} | {figures} |")
    lines += [
        "",
        "## Memory and open files",
        "",
        "Ninth deciles over all processes of a role, in the second and in the last quarter of the time.",
        "",
        "| role | memory, second quarter | last quarter | open files, second quarter | last quarter |",
        "|---|---|---|---|---|",
    ]
    for role, (early, late) in fleet.growth().items():
        memory = f"{early.memory_bytes / MIB:.0f} MiB | {late.memory_bytes / MIB:.0f} MiB"
        lines.append(f"| {role} | {memory} | {early.files} | {late.files} |")
    slowest = sorted((e for e in events if e.recovery_s is not None), key=lambda e: -(e.recovery_s or 0.0))
    lines += [
        "",
        f"## The {MOST_EVENTS} slowest",
        "",
        "| at | fault | | went on after |",
        "|---|---|---|---|",
    ]
    for event in slowest[:MOST_EVENTS]:
        lines.append(f"| {event.at_s:.0f} s | {event.name} | {event.words} | {event.recovery_s:.1f} s |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Parse the options, inject the faults, report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--report", type=Path, help="also write it there, as Markdown")
    parser.add_argument("--folder", type=Path, help="keep logs and artifacts there")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="ddrl-soak-") as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with SoakFleet(folder) as fleet:
            events = soak(fleet, arguments.seed, 60.0 * arguments.minutes)
            audits = {run: fleet.audit(run) for run in fleet.runs}
            for role, (early, late) in fleet.growth().items():
                if not is_flat(early, late):
                    fleet.findings.add(f"{role}: grew from {early} to {late}")
            for line, num in tracebacks(process.text() for process in fleet.processes.started).items():
                fleet.findings.add(f"{num} x a traceback in a log: {line}")
            text = report(fleet, arguments.seed, events, audits)
        print(text)
        if arguments.report is not None:
            arguments.report.write_text(text)
    return 1 if fleet.findings.words else 0


if __name__ == "__main__":
    sys.exit(main())
