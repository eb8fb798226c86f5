"""`ddrl fleet`: the machines, what they play, and how the runs share them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ddrl.cli import hints
from ddrl.cli.format import counted, duration, percent, picked, size
from ddrl.cli.output import Client, InputError, Json, emit, say, server, table
from ddrl.cli.view import LEARNER, learner_row
from ddrl.cli.watcher import Figures, entitled
from ddrl.store import learners, runs, segments, workers
from ddrl.store.connection import StoreError

REFRESH_S = 1.0
_WORKER_FIELDS = ("node", "host", "pid", "processes", "queues", "capabilities", "versions", "draining")
CLEAR = "\033[2J\033[H"  # what a terminal shows


def fleet(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh it, on a terminal.")] = False,
    json_output: Json = False,
) -> None:
    """List the workers and what they play, and the runs, their shares of process time and what they wait for."""
    if watch and (json_output or not sys.stdout.isatty()):
        raise InputError("--watch: needs a terminal and goes without --json; leave it out to print once")
    with server() as client:
        report = collect(client)
        while watch:
            print(CLEAR, end="")
            _show(report)
            time.sleep(REFRESH_S)
            report = collect(client)
    if json_output:
        emit(report)
    else:
        _show(report)


def collect(client: Client) -> dict[str, Any]:
    """Return what `ddrl fleet --json` prints."""
    present, names = workers.alive(client), runs.open_names(client)
    loads = {load.run: load for load in segments.active(client)}
    playing = {run: Counter(p.node for p in segments.playing(client, run).values()) for run in names}
    report: dict[str, Any] = {"workers": [], "versions_differ": differences(present), "runs": []}
    for worker in present:
        played = {run: nodes[worker.node] for run, nodes in playing.items() if worker.node in nodes}
        up_s = max(0.0, time.time() - worker.started_s) if worker.started_s else None
        fields = picked(worker, *_WORKER_FIELDS, "cores", "gpus", "memory_bytes")
        report["workers"].append({**fields, "playing": played, "up_s": up_s})
    total, trouble = sum(load.mean_processes for load in loads.values()) or 1.0, hints.server_trouble(client)
    seen = {"present": present, "loads": [*loads.values()], "now_s": runs.server_ms(client) / 1e3}
    for run, nodes in playing.items():
        state, load = runs.state(client, run), loads.get(run)  # only active runs have a load
        row = {
            **picked(state, "run", "status", "priority", "weight", "queue"),
            "wants": load is not None and load.wants,
            "learner": state.host if state.leased else None,
            "entitled": load and entitled(load, loads.values()),
            "share": load.mean_processes / total if load and state.leased else 0.0,
            "playing": nodes.total(),
            "waiting_messages": segments.waiting(client, state.queue),
            "process_s": state.process_s,
            "learners": [asdict(one) for one in learners.by_rank(client, run)] if state.leased else [],
            "note": _note(client, state, load, trouble, **seen, num_playing=nodes.total()),
        }
        report["runs"].append(row)
    return report


def _note(
    client: Client, state: runs.RunState, load: segments.RunLoad | None, trouble: str, **seen: Any
) -> str:
    """Return why the run does not play or learn; empty while all is well."""
    try:
        config = runs.config(client, state.run)
    except StoreError as error:  # stored by another version of ddrl; the other runs are shown as ever
        return str(error)
    figures = Figures(state, config, refusals=segments.refusals(client, state.run), **seen)
    hint = hints.hint(figures, server=trouble, starting=False)
    return hint or ("" if figures.num_playing or load is None else _why_not_played(load, figures.loads))


def _why_not_played(load: segments.RunLoad, loads: Sequence[segments.RunLoad]) -> str:
    """Return why no process plays a run that workers serve."""
    if not load.wants:
        return "its allowance is used up: waits for its learner"
    peers = [other for other in loads if other.wants and other.priority == load.priority]
    had_share = load.virtual_ms > min(other.virtual_ms for other in peers)
    return "has had its share: waits for its turn" if had_share else "waits for a process"


def differences(present: Sequence[workers.Heartbeat]) -> dict[str, dict[str, list[str]]]:
    """Return package -> version -> hosts of the packages whose versions differ between workers."""
    found: dict[str, dict[str, list[str]]] = {}
    installed = ((worker.host, *item) for worker in present for item in worker.versions.items())
    for host, package, version in dict.fromkeys(installed):
        found.setdefault(package, {}).setdefault(version, []).append(host)
    return {package: versions for package, versions in found.items() if len(versions) > 1}


def _show(report: Mapping[str, Any]) -> None:
    machines, rows = [], []
    for worker in report["workers"]:
        up = f"up {duration(worker['up_s'])}" if worker["up_s"] else ""
        row = (
            *(worker[name] for name in ("node", "host", "processes")),
            ", ".join(f"{run} {num}" for run, num in worker["playing"].items()) or "-",
            ", ".join(worker["capabilities"]) or "-",
            worker["cores"] or "-",
            size(worker["memory_bytes"]) if worker["memory_bytes"] else "-",
            ", ".join(worker["gpus"]) or "-",
            worker["versions"].get("ddrl", "-"),
            "leaves" if worker["draining"] else up,
        )
        machines.append(row)
    for run in report["runs"]:
        shares = (f"{run['weight']:g}", percent(run["entitled"]), percent(run["share"]))
        rest = (run["playing"], run["waiting_messages"], run["note"])
        rows.append((run["run"], run["priority"], *shares, *rest))
    if machines:
        header = ("worker", "host", "processes", "playing", "plays", "cores", "memory", "GPU", "ddrl", "note")
        texts = ("worker", "host", "playing", "plays", "GPU", "ddrl", "note")
        table(header, machines, left=texts, optional=("GPU", "memory", "cores", "host", "plays", "ddrl"))
        print()
    if rows:
        names = ("run", "priority", "weight", "entitled", "share", "processes", "waiting", "note")
        table(names, rows, left=("run", "priority", "note"), optional=("entitled", "waiting", "processes"))
        print()
    learning = [(run["run"], *learner_row(row)) for run in report["runs"] for row in run["learners"]]
    if learning:
        table(("run", *LEARNER), learning, left=("run", *LEARNER[:4]), optional=("device", "pid"))
        print()
    say(_summary(report))


def _summary(report: Mapping[str, Any]) -> str:
    """Return the fleet in a line, and the packages whose versions differ."""
    if not (present := report["workers"]):
        return "no workers; start `celery -A ddrl worker` on every machine that is to play"
    processes, hosts = sum(worker["processes"] for worker in present), {worker["host"] for worker in present}
    active = sum(run["status"] == "active" for run in report["runs"])
    playing = sum(sum(worker["playing"].values()) for worker in present)
    lines = [
        f"{counted(len(hosts), 'machine')}, {counted(len(present), 'worker')}, {counted(processes, 'process', 'es')}, "
        f"{playing} of them playing; {counted(active, 'active run')}"
    ]
    for package, versions in report["versions_differ"].items():
        parts = (f"{version} on {', '.join(hosts_of)}" for version, hosts_of in versions.items())
        lines.append(f"versions of {package} differ: {'; '.join(parts)}")
    return "\n".join(lines)
