"""`ddrl status`: everything the server knows of one run."""

from __future__ import annotations

import time
from typing import Any

from ddrl import keys
from ddrl.cli.output import Client, Json, Run, duration, emit, number, pairs, server, size, table
from ddrl.cli.watcher import rollout_queue
from ddrl.store import evaluations, metrics, runs, weights, workers


def status(run: Run = "last", json_output: Json = False) -> None:
    """Show all about one run: who plays and learns, counters, rates, weights, evaluations, memory."""
    with server() as client:
        report = collect(client, runs.resolve(client, run))
    if json_output:
        emit(report)
    else:
        _show(report)


def collect(client: Client, run: str) -> dict[str, Any]:
    """What `ddrl status --json` prints; times are the server's clock in seconds."""
    state, config = runs.state(client, run), runs.config(client, run)
    index = weights.index(client, run)
    queue = rollout_queue(config.env.id)
    refused, full = client.hmget(keys.state(run), ["dead", "full"])
    now_s = runs.server_ms(client) / 1e3
    return {
        "run": run,
        "status": state.status,
        "reason": state.reason,
        "error": state.error,
        "env": config.env.id,
        "algorithm": config.algorithm["name"],
        "seed": config.seed,
        "created_s": state.created_s,
        "first_step_s": state.first_step_s or None,
        "ended_s": state.ended_s or None,
        "train_s": (state.ended_s or now_s) - state.first_step_s if state.first_step_s else None,
        "time_limit_s": config.stop.time,
        "target_return": config.stop.return_,
        "learner": {"leased": state.leased, "host": state.host, "folder": state.folder},
        "queue": queue,
        "workers": [
            {
                "node": worker.node,
                "host": worker.host,
                "pid": worker.pid,
                "processes": worker.processes,
                "plays": queue in worker.queues,
                "evaluates": queue.replace("ddrl.rollout", "ddrl.evaluate", 1) in worker.queues,
            }
            for worker in workers.alive(client)
        ],
        "waiting_messages": state.waiting,
        "env_steps": state.appended_steps,
        "allowance": state.allowance,
        "updates": state.updates,
        "figures": metrics.last(client, run),
        "weights": {
            "latest": index.latest,
            "best": index.best,
            "best_return": index.best_return,
            "kept": sorted(index.sizes),
            "bytes": sum(index.sizes.values()),
        },
        "evaluation": state.evaluation,
        "evaluations": evaluations.results(client, run)[0],
        "open_evaluations": sorted(evaluations.opened(client, run)),
        "stream": {
            "fragments": state.appended_fragments,
            "appended_bytes": state.appended_bytes,
            "live_bytes": state.live_bytes,
            "max_bytes": int(config.replay.max_bytes),
            "duplicates": state.duplicates,
            "dead": int(refused or 0),
            "full": int(full or 0),
        },
    }


def _show(report: dict[str, Any]) -> None:
    figures, stream, kept = report["figures"], report["stream"], report["weights"]
    learner = report["learner"]
    players = [w for w in report["workers"] if w["plays"]]
    limit = "" if report["time_limit_s"] is None else f" of {duration(report['time_limit_s'])}"
    processes = sum(w["processes"] for w in players)
    rates = [f" ({figures[name]:.0f}/s)" if name in figures else "" for name in _RATES]
    best = "none" if kept["best"] < 0 else f"v{kept['best']} ({number(kept['best_return'])})"
    versions = f"latest v{kept['latest']}, best {best}, {len(kept['kept'])} kept ({size(kept['bytes'])})"
    others = {n: v for n, v in figures.items() if n not in _SHOWN and isinstance(v, (int, float))}
    pairs(
        {
            "run": report["run"],
            "status": f"{report['status']}: {report['reason']}" if report["reason"] else report["status"],
            **({"last error": report["error"]} if report["error"] else {}),
            "task": f"{report['env']} with {report['algorithm']}, seed {report['seed']}",
            "created": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["created_s"])),
            "train time": "not begun" if report["train_s"] is None else duration(report["train_s"]) + limit,
            "learner": learner["host"] if learner["leased"] else "none",
            "folder": learner["folder"] or "-",
            "workers": f"{len(players)} ({processes} processes) on {report['queue']}, "
            f"{report['waiting_messages']} messages waiting",
            "env steps": f"{report['env_steps']:,}{rates[0]}, {report['allowance']:,} allowed",
            "updates": f"{report['updates']:,}{rates[1]}",
            **_experience(figures),
            "training return": number(figures.get("return_mean")),
            "weights": versions if kept["latest"] >= 0 else "none yet",
            "stream": f"{size(stream['live_bytes'])} of {size(stream['max_bytes'])} in use, "
            f"{stream['fragments']:,} fragments appended ({size(stream['appended_bytes'])})",
            "refused": "{duplicates} repeated, {dead} dead, {full} for lack of room".format_map(stream),
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


_RATES = ("env_steps_per_s", "updates_per_s")
_SHOWN = (
    *(*_RATES, "env_steps", "updates", "samples_per_insert", "staleness", "max_staleness", "return_mean"),
    *("queued_steps", "dropped"),
)


def _experience(figures: dict[str, Any]) -> dict[str, str]:
    """How the learner's experience stands: sampled from a replay, or taken from a queue."""
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
