"""Failovers under a live fleet: what was acknowledged is there afterwards, and how long nobody plays.

make ha FAILOVERS=50      PYTHONPATH=tests python benchmarks/failover.py --failovers 50 --report docs/failover.md

One primary, two replicas and three sentinels. The primary is killed, frozen, or parted from its replicas and the
sentinels, again and again, while a learner and two workers train a run with `durability: replica`, and four more
clients append to a run of their own and publish versions of it, and write down each acknowledgement. Exit code 1 if
one of these is not in the server that took over, if a ledger does not balance, or if the run did not go on.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from machine import heading
from support.clients import Clients
from support.failover import FAULTS, Failover
from support.fault_fleet import ENDLESS
from support.processes import Processes
from support.runs import start, target_config

from ddrl.store import connection, ledger, runs

LIMIT_S = 120.0


def play(url: str, run: str, stop: threading.Event, gaps: list[tuple[float, float]]) -> None:
    """Note when new steps of a run appear, as (time, seconds since the ones before)."""
    seen, at = -1, time.monotonic()
    with connection.connect(url) as client:
        while not stop.wait(0.05):
            with contextlib.suppress(*connection.OUTAGES):
                steps = runs.state(client, run).appended_steps
                now = time.monotonic()
                if steps > seen:
                    gaps.append((now, now - at))
                    seen, at = steps, now


def has_played_since(gaps: list[tuple[float, float]], since: float) -> bool:
    """Return whether new steps have appeared."""
    return bool(gaps) and gaps[-1][0] > since


def main() -> int:
    """Parse the options, fail over again and again, report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--failovers", type=int, default=50)
    parser.add_argument("--durability", choices=("process", "replica"), default="replica")
    parser.add_argument("--report", type=Path, help="also write it there, as Markdown")
    arguments = parser.parse_args()
    findings: list[str] = []
    pauses: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(Failover())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddrl-failover-")))
        processes = stack.enter_context(Processes(folder))
        client = stack.enter_context(connection.connect(servers.url))
        for _ in range(2):
            processes.worker(servers.url)
        processes.learner(servers.url)
        run = start(client, target_config(**ENDLESS, durability=arguments.durability))
        clients = Clients(servers.url, arguments.durability)
        stop, gaps = threading.Event(), list[tuple[float, float]]()
        watch = threading.Thread(target=play, args=(servers.url, run, stop, gaps), daemon=True)
        watch.start()
        processes.until(lambda: runs.state(client, run).updates > 0)
        lost = (0, 0)
        for number in range(arguments.failovers):
            fault, began = FAULTS[number % len(FAULTS)], time.monotonic()
            servers.fail_over(fault, for_s=random.uniform(0.0, 6.0))
            servers.settle()
            try:
                processes.until(partial(has_played_since, gaps, time.monotonic()), LIMIT_S)
            except AssertionError as error:
                findings.append(f"failover {number} ({fault}): nobody played within {LIMIT_S:.0f} s: {error}")
                break
            pause_s = max(length for at, length in gaps if at > began)
            pauses[fault].append(pause_s)
            lost = clients.lost()
            told = len(clients.acknowledged.fragments)
            print(
                f"{number + 1:3d}  {fault:8s} {pause_s:5.1f} s without steps; of {told:,} fragments and"
                f" {len(clients.acknowledged.versions)} versions acknowledged, {lost[0]} and {lost[1]} lost",
                flush=True,
            )
        clients.stop()
        lost = clients.lost()
        if any(lost):
            findings.append(f"{lost[0]} acknowledged fragments and {lost[1]} versions were lost")
        deadline = time.monotonic() + 60.0
        while not (audit := ledger.audit(client, run)).is_balanced and time.monotonic() < deadline:
            time.sleep(0.5)
        if not audit.is_balanced:
            findings.append(f"the ledger does not balance: {audit}")
        stop.set()
        watch.join()
        traces = sum(process.text().count("Traceback (most") for process in processes.started)
        if traces:
            findings.append(f"{traces} tracebacks in the logs:\n{processes.logs()}")
        state = runs.state(client, run)
    final = clients.acknowledged
    every = [pause for of_fault in pauses.values() for pause in of_fault]
    lines = [
        heading(f"{len(every)} failovers with durability: {arguments.durability}"),
        "",
        "One primary, two replicas, three sentinels (`down-after-milliseconds 1000`), `min-replicas-to-write 1`; a"
        " learner and two workers; four more clients that write down what is acknowledged. `make ha` runs it.",
        "",
        f"Acknowledged to the clients: {len(final.fragments):,} fragments, {len(final.versions):,} versions. "
        f"**Lost: {lost[0]} and {lost[1]}.**",
        f"The run played {state.appended_steps:,} steps in {state.appended_fragments:,} fragments;"
        f" {audit.total('duplicates')} appends were repeated; not accounted for: {audit.total('difference')}.",
        "",
        "| the primary was | times | seconds without steps: median | longest |",
        "|---|---|---|---|",
        *(
            f"| {fault} | {len(seconds)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |"
            for fault, seconds in pauses.items()
            if seconds
        ),
        "",
        *(f"- finding: {words}" for words in findings),
    ]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
