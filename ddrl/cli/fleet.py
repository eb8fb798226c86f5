"""`ddrl fleet`: the machines, what they play, and how the runs share them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ddrl.cli import hints
from ddrl.cli.output import Client, InputError, Json, counted, duration, emit, say, server, size, table
from ddrl.cli.watcher import Figures
from ddrl.store import runs, segments, workers
from ddrl.store.segments import RunLoad
from ddrl.store.workers import Heartbeat

LOOK_S = 1.0  # between two looks
UNPLAYED_S = 1.0  # a run that nobody plays now has not been played for a while, at a guess
CLEAR = "\033[2J\033[H"  # what a terminal shows


def fleet(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again every second, on a terminal.")
    ] = False,
    json_output: Json = False,
) -> None:
    """List the workers and what they play, and the runs, their shares of process time and what they wait for."""
    if watch and (json_output or not sys.stdout.isatty()):
        raise InputError("--watch: needs a terminal and goes without --json; leave it out to look once")
    with server() as client:
        while watch:
            report = collect(client)
            print(CLEAR, end="")
            _show(report)
            time.sleep(LOOK_S)
        report = collect(client)
    if json_output:
        emit(report)
    else:
        _show(report)


def collect(client: Client) -> dict[str, Any]:
    """Return what `ddrl fleet --json` prints."""
    present, loads = workers.alive(client), segments.active(client)
    playing = {worker.node: Counter[str]() for worker in present}
    num_playing: Counter[str] = Counter()
    for load in loads:
        for process in segments.playing(client, load.run).values():
            num_playing[load.run] += 1
            if process.node in playing:
                playing[process.node][load.run] += 1
    trouble = hints.server_trouble(client)
    return {
        "workers": [_worker(worker, playing[worker.node]) for worker in present],
        "versions_differ": differences(present),
        "runs": [_run(client, load, num_playing[load.run], loads, present, trouble) for load in loads],
    }


def _worker(worker: Heartbeat, playing: Counter[str]) -> dict[str, Any]:
    return {
        "node": worker.node,
        "host": worker.host,
        "pid": worker.pid,
        "processes": worker.processes,
        "playing": dict(playing),
        "queues": list(worker.queues),
        "capabilities": list(worker.capabilities),
        "cores": worker.cores,
        "gpus": list(worker.gpus),
        "memory_bytes": worker.memory_bytes,
        "versions": worker.versions,
        "draining": worker.draining,
        "up_s": max(0.0, time.time() - worker.started_s) if worker.started_s else None,
    }


def _run(
    client: Client,
    load: RunLoad,
    num_playing: int,
    loads: list[RunLoad],
    present: list[Heartbeat],
    trouble: str,
) -> dict[str, Any]:
    state = runs.state(client, load.run)
    total = sum(other.mean_processes for other in loads) or 1.0
    figures = Figures(
        state,
        runs.config(client, load.run),
        present=present,
        loads=loads,
        refusals=segments.refusals(client, load.run),
        num_playing=num_playing,
        quiet_s=0.0 if num_playing else UNPLAYED_S,
    )
    note = hints.hint(figures, server=trouble, starting=False)
    if not (note or num_playing):
        if not load.wants:
            note = "its allowance is used up: waits for its learner"
        else:
            peers = [other for other in loads if other.wants and other.priority == load.priority]
            has_had_share = load.virtual_ms > min(other.virtual_ms for other in peers)
            note = "has had its share: waits for its turn" if has_had_share else "waits for a process"
    return {
        "run": load.run,
        "priority": load.priority,
        "weight": load.weight,
        "queue": load.queue,
        "learner": state.host if state.leased else None,
        "wants": load.wants,
        "entitled": figures.entitled,
        "share": load.mean_processes / total if state.leased else 0.0,
        "playing": num_playing,
        "waiting_messages": segments.waiting(client, load.queue),
        "process_s": state.process_s,
        "note": note,
    }


def differences(present: Sequence[Heartbeat]) -> dict[str, dict[str, list[str]]]:
    """Packages of which not all workers have the same version: package -> version -> hosts."""
    found: dict[str, dict[str, list[str]]] = {}
    for worker in present:
        for package, version in worker.versions.items():
            hosts = found.setdefault(package, {}).setdefault(version, [])
            if worker.host not in hosts:
                hosts.append(worker.host)
    return {package: versions for package, versions in found.items() if len(versions) > 1}


def _show(report: Mapping[str, Any]) -> None:
    machines = [
        (
            worker["node"],
            worker["host"],
            str(worker["processes"]),
            ", ".join(f"{run} {num}" for run, num in worker["playing"].items()) or "-",
            ", ".join(worker["capabilities"]) or "-",
            str(worker["cores"] or "-"),
            size(worker["memory_bytes"]) if worker["memory_bytes"] else "-",
            ", ".join(worker["gpus"]) or "-",
            worker["versions"].get("ddrl", "-"),
            "leaves" if worker["draining"] else f"up {duration(worker['up_s'])}" if worker["up_s"] else "",
        )
        for worker in report["workers"]
    ]
    rows = [
        (
            run["run"],
            run["priority"],
            f"{run['weight']:g}",
            _percent(run["entitled"]),
            _percent(run["share"]),
            str(run["playing"]),
            str(run["waiting_messages"]),
            run["note"],
        )
        for run in report["runs"]
    ]
    if machines:
        table(
            ("worker", "host", "processes", "playing", "plays", "cores", "memory", "GPU", "ddrl", "note"),
            machines,
            left=("worker", "host", "playing", "plays", "GPU", "ddrl", "note"),
            optional=("GPU", "memory", "cores", "host", "plays", "ddrl"),
        )
        print()
    if rows:
        table(
            ("run", "priority", "weight", "entitled", "share", "processes", "waiting", "note"),
            rows,
            left=("run", "priority", "note"),
            optional=("entitled", "waiting", "processes"),
        )
        print()
    say(_closing(report))


def _closing(report: Mapping[str, Any]) -> str:
    """The fleet in a line, and what is amiss with it as a whole."""
    present = report["workers"]
    processes, hosts = sum(worker["processes"] for worker in present), {worker["host"] for worker in present}
    if not present:
        return "no workers; start `celery -A ddrl worker` on every machine that is to play"
    playing = sum(sum(worker["playing"].values()) for worker in present)
    lines = [
        f"{counted(len(hosts), 'machine')}, {counted(len(present), 'worker')}, {counted(processes, 'process', 'es')}, "
        f"{playing} of them playing {counted(len(report['runs']), 'run')}"
    ]
    for package, versions in report["versions_differ"].items():
        parts = (f"{version} on {', '.join(hosts_of)}" for version, hosts_of in versions.items())
        lines.append(f"versions of {package} differ: {'; '.join(parts)}")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
