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
from ddrl.store.run_state import Rival
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
    """What `ddrl fleet --json` prints."""
    present, rivals = workers.alive(client), runs.active(client)
    playing = {worker.node: Counter[str]() for worker in present}
    players: Counter[str] = Counter()
    for rival in rivals:
        for player in segments.players(client, rival.run).values():
            players[rival.run] += 1
            if player.node in playing:
                playing[player.node][rival.run] += 1
    trouble = hints.server_trouble(client)
    return {
        "workers": [_worker(worker, playing[worker.node]) for worker in present],
        "versions_differ": differences(present),
        "runs": [_run(client, rival, players[rival.run], rivals, present, trouble) for rival in rivals],
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
    rival: Rival,
    num_playing: int,
    rivals: list[Rival],
    present: list[Heartbeat],
    trouble: str,
) -> dict[str, Any]:
    state = runs.state(client, rival.run)
    figures = Figures(
        state,
        runs.config(client, rival.run),
        present=present,
        rivals=rivals,
        refusals=segments.refusals(client, rival.run),
        num_playing=num_playing,
        quiet_s=0.0 if num_playing else UNPLAYED_S,
    )
    note = hints.hint(figures, server=trouble, starting=False)
    if not (note or num_playing):
        if not rival.wants:
            note = "its allowance is used up: waits for its learner"
        else:
            note = "has had its share: waits for its turn" if rival.ahead_ms > 0 else "waits for a process"
    return {
        "run": rival.run,
        "priority": rival.priority,
        "weight": rival.weight,
        "queue": rival.queue,
        "learner": state.host if state.leased else None,
        "wants": rival.wants,
        "entitled": figures.entitled,
        "share": rival.recent if state.leased else 0.0,
        "playing": num_playing,
        "waiting_messages": rival.waiting,
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
