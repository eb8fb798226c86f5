"""Random faults on a live fleet, from a printed seed: does the run go on, is everything learned once, is it flat?

make soak MINUTES=15      PYTHONPATH=tests python benchmarks/soak.py --minutes 15 --report docs/soak.md

Prints each fault with its time, and the seconds until all runs played and learned again. In the end all processes are
stopped, and tests/checker judges the history: what clients were told, what is stored, what was learned. Exit code 1 if
it finds anything, a run did not go on, a process ended by itself for a reason that is not listed, a log holds a
traceback, or memory or open files grow: each is a finding, which the report names. --calm injects nothing.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import facts
from soak_faults import FAULTS, Fault, calm
from soak_fleet import NUM_LEARNERS, NUM_WORKERS, RUNS, SoakFleet

from ddrl.store import ledger

LIMIT_S = 180.0  # for all runs to go on
QUIET_S = (0.5, 4.0)  # between going on and the next fault
MOST_EVENTS = 20  # listed in the report
AT_ONCE = 0.2  # probability that the next fault does not wait for recovery
_COLUMNS = ("appended", "consumed", "waiting", "trimmed", "refused", "difference", "duplicates")
TRACE = "Traceback (most recent call last)"
CHAINED = re.compile(
    "During handling of the above exception, another|was the direct cause of the following exception"
)
# What Python itself prints in a worker.
OF_PYTHON = (
    # The fault "worker without memory" has taken it; its loader cannot list folders then.
    "MemoryError",
    "RuntimeError: can't start new thread",
    "SystemError: error return without exception set",
    "ModuleNotFoundError: No module named 'ddrl.",
    "OSError: [Errno 12] Cannot allocate memory",
    "failed to map segment from shared object",
    "billiard.exceptions.RestartFreqExceeded",  # as each of its processes ends at its start
    "KeyboardInterrupt",  # while Celery itself is imported
    # Threads that import at the same time: python/cpython#106905.
    "SystemError: AST constructor recursion depth mismatch",
)


@dataclass(frozen=True)
class Event:
    """One fault; `recovery_s` is None where the next fault came at once."""

    at_s: float
    name: str
    words: str
    recovery_s: float | None


def soak(fleet: SoakFleet, seed: int, until_s: float, faults: Sequence[Fault]) -> list[Event]:
    """Inject faults until the time is up, each kind once before any comes again; return them."""
    draw = random.Random(seed)
    events: list[Event] = []
    deck: list[Fault] = []
    if fleet.recover(LIMIT_S) is None:
        fleet.findings.add("the fleet did not begin to play")
    while fleet.elapsed_s < until_s and not too_much(fleet):
        deck = deck or draw.sample(faults, len(faults))
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
                fleet.findings.add(f"{name}: not every run went on within {LIMIT_S:.0f} s ({fleet.status()})")
            time.sleep(draw.uniform(*QUIET_S))
        events.append(Event(at_s, name, words, recovery_s))
    if fleet.recover(LIMIT_S) is None:
        fleet.findings.add(f"at the end: not every run went on within {LIMIT_S:.0f} s ({fleet.status()})")
    return events


def too_much(fleet: SoakFleet) -> bool:
    """Return whether there are so many findings that more would not help."""
    return len(fleet.findings.words) >= 20


def tracebacks(log: str) -> Counter[str]:
    """Return how often each exception, the line at the end of its traceback, stands in a log; of a chain the last."""
    return Counter(
        next((line for line in text.splitlines()[1:] if line[:1].strip()), "cut off")[:200]
        for text in log.split(TRACE)[1:]
        if not CHAINED.search(text)
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
        f"{len(RUNS)} runs, {NUM_LEARNERS} learners (one on standby), {NUM_WORKERS} workers or one more"
        f"{f' with {fleet.num_players} slow players' if fleet.num_players else ''}, one server with an append-only"
        " file; all processes reach it through proxies that record, every second one through one that breaks."
        " `make soak` runs it.",
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
        "Growth within each process after its first five minutes, with its interval of 95 %. An interval wholly above"
        " 5 % of the mean an hour is a finding.",
        "",
        "| role | memory, MiB | per hour | open files | per hour |",
        "|---|---|---|---|---|",
    ]
    for role, growths in fleet.growth().items():
        cells = (f"{one.mean:.0f} | {one.per_hour:+.1f} +- {one.error:.1f}" for one in growths)
        lines.append(f"| {role} | {' | '.join(cells)} |")
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
    parser.add_argument("--calm", action="store_true", help="no faults")
    parser.add_argument(
        "--players", type=int, default=0, help="that play slowly; 0: a fast one for each worker"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="ddrl-soak-") as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with SoakFleet(folder, num_players=arguments.players) as fleet:
            faults = [calm] if arguments.calm else FAULTS
            events = soak(fleet, arguments.seed, 60.0 * arguments.minutes, faults)
            fleet.settle()
            audits = {run: fleet.judge(run) for run in fleet.runs}
            for role, growths in fleet.growth().items():
                for what, one in zip(("memory in MiB", "open files"), growths, strict=True):
                    if one.is_leak:
                        fleet.findings.add(f"{role}: {what} grow: {one}")
            for process in fleet.processes.started:
                for line, num in tracebacks(process.text()).items():
                    if process.name == "learner" or not any(said in line for said in OF_PYTHON):
                        fleet.findings.add(f"{process.log.name}: {num} x a traceback: {line}")
            text = report(fleet, arguments.seed, events, audits)
        print(text)
        if arguments.report is not None:
            arguments.report.write_text(text)
    return 1 if fleet.findings.words else 0


if __name__ == "__main__":
    sys.exit(main())
