"""`ddrl status`: the state of one run."""

from __future__ import annotations

import time
from typing import Any

from ddrl.cli.output import Client, Json, Run, duration, emit, number, pairs, server, size, table
from ddrl.cli.watcher import Figures, Watcher
from ddrl.store import evaluations, runs, segments, weights


def status(run: Run = "last", json_output: Json = False) -> None:
    """Show the state of a run: its workers and learner, counters, rates, weights, evaluations and memory."""
    with server() as client:
        report = collect(client, runs.resolve(client, run))
    if json_output:
        emit(report)
    else:
        _show(report)


def collect(client: Client, run: str) -> dict[str, Any]:
    """Return the report of `ddrl status --json`; times are seconds of the server's clock."""
    figures = Watcher(client, run).poll()
    state, config, queue = figures.state, figures.config, figures.state.queue
    index = weights.index(client, run)
    return {
        "run": run,
        "status": state.status,
        "reason": state.reason,
        "error": state.error,
        "hint": figures.hint,
        "env": config.env.id,
        "algorithm": config.algorithm["name"],
        "seed": config.seed,
        "from": state.warm or None,
        "config_version": state.config_version,
        "created_s": state.created_s,
        "first_step_s": state.first_step_s or None,
        "ended_s": state.ended_s or None,
        "train_s": (state.ended_s or figures.now_s) - state.first_step_s if state.first_step_s else None,
        "time_limit_s": config.stop.time,
        "target_return": config.stop.return_,
        "learner": {
            "leased": state.leased,
            "host": state.host,
            "folder": state.folder,
            "handover": state.handover or None,
        },
        "queue": queue,
        "sharing": _sharing(figures),
        "workers": [
            {
                "node": worker.node,
                "host": worker.host,
                "pid": worker.pid,
                "processes": worker.processes,
                "draining": worker.draining,
                "plays": queue in worker.queues,
                "evaluates": state.evaluation_queue in worker.queues,
            }
            for worker in figures.present
        ],
        "refusals": figures.refusals,
        "crashes": {
            "since_last_fragment": state.crashes,
            "total": state.crashes_total,
            "lost_producers": state.lost_producers,
        },
        "waiting_messages": segments.waiting(client, queue),
        "env_steps": state.appended_steps,
        "allowance": state.allowance,
        "updates": state.updates,
        "figures": dict(figures.row),
        "weights": {
            "latest": index.latest,
            "best": index.best,
            "best_return": index.best_return,
            "kept": sorted(index.sizes),
            "bytes": sum(index.sizes.values()),
        },
        "evaluation": state.evaluation,
        "evaluations": figures.evaluated,
        "open_evaluations": sorted(evaluations.opened(client, run)),
        "stream": {
            "fragments": state.appended_fragments,
            "appended_bytes": state.appended_bytes,
            "live_bytes": state.live_bytes,
            "max_bytes": int(config.replay.max_bytes),
            "duplicates": state.duplicates,
            "dead": state.dead,
            "full": state.full,
        },
    }


def _sharing(figures: Figures) -> dict[str, Any]:
    """Return the run's share of the fleet and the waits of its processes, since the run began.

    The share is of the process time of all active runs.
    """
    state = figures.state
    spent_s = state.process_s
    everybody_s = sum(load.process_ms for load in figures.loads) / 1e3
    active = any(load.run == state.run for load in figures.loads)
    return {
        "weight": state.weight,
        "priority": state.priority,
        "active_runs": len(figures.loads),
        "entitled": figures.entitled if active else None,
        "share": spent_s / everybody_s if active and everybody_s > 0 else None,
        "playing": figures.num_playing,
        "process_s": spent_s,
        "played": state.played_s / spent_s if spent_s else None,
        "allowance_wait": state.allowance_wait_s / spent_s if spent_s else None,
        "room_wait": state.room_wait_s / spent_s if spent_s else None,
    }


def _show(report: dict[str, Any]) -> None:
    figures, stream, kept = report["figures"], report["stream"], report["weights"]
    learner, hint = report["learner"], report["hint"].removeprefix(f"paused: {report['reason']}; ")
    waited_s = figures.get("server_wait_s", 0.0)  # of the learner, since its previous row of metrics
    limit = "" if report["time_limit_s"] is None else f" of {duration(report['time_limit_s'])}"
    rates = [f" ({figures[name]:.0f}/s)" if name in figures else "" for name in _RATES]
    best = "none" if kept["best"] < 0 else f"v{kept['best']} ({number(kept['best_return'])})"
    versions = f"latest v{kept['latest']}, best {best}, {len(kept['kept'])} kept ({size(kept['bytes'])})"
    others = {n: v for n, v in figures.items() if n not in _SHOWN and isinstance(v, (int, float))}
    pairs(
        {
            "run": report["run"],
            "status": f"{report['status']}: {report['reason']}" if report["reason"] else report["status"],
            **({"hint": hint} if hint not in ("", report["reason"]) else {}),
            **({"last error": report["error"]} if report["error"] else {}),
            "task": f"{report['env']} with {report['algorithm']}, seed {report['seed']}",
            "created": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["created_s"])),
            "train time": "not started" if report["train_s"] is None else duration(report["train_s"]) + limit,
            **({"initial weights": report["from"]} if report["from"] else {}),
            "learner": _learner(learner),
            "folder": learner["folder"] or "-",
            "workers": _players(report),
            **_share_lines(report["sharing"]),
            **_trouble(report),
            **({"server waits": f"{waited_s:.1f} s recently"} if waited_s >= 0.05 else {}),
            "env steps": f"{report['env_steps']:,}{rates[0]}, {report['allowance']:,} allowed",
            "updates": f"{report['updates']:,}{rates[1]}",
            **_experience(figures),
            "training return": number(figures.get("return_mean")),
            "weights": versions if kept["latest"] >= 0 else "none yet",
            "stream": f"{size(stream['live_bytes'])} of {size(stream['max_bytes'])} in use, "
            f"{stream['fragments']:,} fragments appended ({size(stream['appended_bytes'])})",
            "refused": "{duplicates} repeated, {dead} invalid, {full} for lack of room".format_map(stream),
            "open evaluations": ", ".join(report["open_evaluations"]) or "none",
            **({"figures": "  ".join(f"{n} {v:.4g}" for n, v in others.items())} if others else {}),
        }
    )
    if report["evaluations"]:
        print()
        _show_evaluations(report["evaluations"][-10:])
    if report["workers"]:
        print()
        rows = [
            (w["node"], w["host"], str(w["pid"]), str(w["processes"]), _yes(w["plays"]), _yes(w["evaluates"]))
            for w in report["workers"]
        ]
        table(("worker", "host", "pid", "processes", "plays", "evaluates"), rows, left=("worker", "host"))


def _players(report: dict[str, Any]) -> str:
    """Return the number of workers that serve the run's queue and of processes that play it now."""
    players = [worker for worker in report["workers"] if worker["plays"]]
    processes, playing = sum(worker["processes"] for worker in players), report["sharing"]["playing"]
    there = f"{len(players)} ({playing} of {processes} processes play it)" if players else "none"
    return f"{there} on {report['queue']}, {report['waiting_messages']} messages waiting"


def _learner(learner: dict[str, Any]) -> str:
    if not learner["leased"]:
        return "none"
    asked = f", asked to hand over to {learner['handover']}" if learner["handover"] else ""
    return f"{learner['host']}{asked}"


def _share_lines(sharing: dict[str, Any]) -> dict[str, str]:
    """Return the lines about the run's share and about the waits of its processes."""
    lines = {"weight": f"{sharing['weight']:g}, priority {sharing['priority']}"}
    if sharing["active_runs"] > 1 and sharing["share"] is not None:
        lines["weight"] += (
            f"; {100 * sharing['share']:.0f} % of the process time of {sharing['active_runs']} active runs, "
            f"{100 * sharing['entitled']:.0f} % by its weight"
        )
    if sharing["process_s"]:
        played, learner, room = (
            100 * part for part in (sharing["played"], sharing["allowance_wait"], sharing["room_wait"])
        )
        lines["process time"] = (
            f"{duration(sharing['process_s'])}: {played:.0f} % played, {learner:.0f} % waited for the learner, "
            f"{room:.0f} % for room"
        )
    return lines


def _trouble(report: dict[str, Any]) -> dict[str, str]:
    """Return the lines about crashes and about hosts that refuse the run; {} if there are none."""
    crashes, lines = report["crashes"], {}
    if crashes["total"] or crashes["lost_producers"]:
        lines["crashes"] = (
            f"{crashes['total']} processes failed to play it ({crashes['since_last_fragment']} since the last "
            f"fragment), {crashes['lost_producers']} disappeared"
        )
    for host, reason in report["refusals"].items():
        lines[f"refused by {host}"] = reason
    return lines


_RATES = ("env_steps_per_s", "updates_per_s")
_SHOWN = (
    *(*_RATES, "env_steps", "updates", "samples_per_insert", "staleness", "max_staleness", "return_mean"),
    *("queued_steps", "dropped", "elapsed_s", "admitted", "dead", "version", "server_wait_s"),
)


def _experience(figures: dict[str, Any]) -> dict[str, str]:
    """Return the lines about the learner's experience: of the replay (off-policy) or of the queue (on-policy)."""
    mean = number(figures.get("staleness"))
    if "queued_steps" not in figures:
        return {
            "samples per insert": number(figures.get("samples_per_insert")),
            "staleness": f"{mean} versions",
        }
    dropped = f"{figures['dropped']:.0f} fragments dropped as too stale"
    return {
        "queued": f"{figures['queued_steps']:.0f} steps",
        "staleness": f"{mean} versions, at most {number(figures.get('max_staleness'))}; {dropped}",
    }


def _show_evaluations(rows: list[dict[str, Any]]) -> None:
    table(
        ("evaluation", "mean", "std", "episodes", "env steps", "purpose"),
        [
            (
                f"v{row['version']}",
                number(row["return_mean"]),
                number(row["return_std"]),
                str(row["num_episodes"]),
                f"{row['env_steps']:,}",
                row["purpose"],
            )
            for row in rows
        ],
        left=("evaluation", "purpose"),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
