"""`ddrl status`: the state of one run."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ddrl.cli.format import counted, duration, number, percent, picked, size
from ddrl.cli.output import Client, Json, Run, emit, pairs, server_of, table
from ddrl.cli.view import LEARNER, cells, learner_row, other_metrics
from ddrl.cli.watcher import Figures, Usage, Watcher, entitled
from ddrl.store import evaluations, segments, weights
from ddrl.store.evaluations import INFO

NUM_EVALUATIONS = 10  # the newest evaluations to show
NUM_REFUSALS = 20  # machines that cannot play to show


def status(run: Run = "last", json_output: Json = False) -> None:
    """Show the state of a run: its workers (until it ends), learner, counters, weights, evaluations, memory."""
    with server_of(run) as (client, run):
        figures = Watcher(client, run).poll()
        report = _report(client, figures)
    if json_output:
        emit(report)
    else:
        _show(figures, report)


def _report(client: Client, figures: Figures) -> dict[str, Any]:
    """Return the report of `ddrl status --json`.

    `*_s` values are seconds; `created_s`, `first_step_s` and `ended_s` are times by the server's clock. `sharing` holds
    the run's share of all process time, and how its processes spent theirs, over the runs' whole lives.
    """
    state, config, queue, loads = figures.state, figures.config, figures.state.queue, figures.loads
    index, shares = weights.index(client, state.run), Usage(state, loads).since(Usage())
    return {
        **picked(state, "run", "status", "reason", "error", "config_version", "created_s", "evaluation"),
        **picked(state, "queue", "allowance", "updates"),
        "hint": figures.hint,
        "env": config.env.id,
        "algorithm": config.algorithm["name"],
        "seed": config.seed,
        "from": state.warm or None,
        "first_step_s": state.first_step_s or None,
        "ended_s": state.ended_s or None,
        "train_s": state.train_s(figures.now_s),
        "time_limit_s": config.stop.time,
        "target_return": config.stop.return_,
        "learner": {**picked(state, "leased", "host", "folder"), "handover": state.handover or None},
        "learners": [asdict(learner) for learner in figures.learners],
        "sharing": {
            **picked(state, "weight", "priority", "process_s"),
            **picked(shares, "share", "played", "allowance_wait", "room_wait"),
            "active_runs": len(loads),
            "entitled": entitled(state, loads) if any(load.run == state.run for load in loads) else None,
            "playing": figures.num_playing,
        },
        "workers": [
            {
                **picked(worker, "node", "host", "pid", "processes", "draining"),
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
        "figures": dict(figures.row),
        "weights": {
            **picked(index, "latest", "best", "best_return"),
            "kept": sorted(index.sizes),
            "bytes": sum(index.sizes.values()),
        },
        "evaluations": figures.evaluated,
        "open_evaluations": sorted(evaluations.opened(client, state.run)),
        "stream": {
            "fragments": state.appended_fragments,
            **picked(state, "appended_bytes", "live_bytes", "duplicates", "dead", "full"),
            "max_bytes": int(config.replay.max_bytes),
        },
    }


def _show(figures: Figures, report: dict[str, Any]) -> None:
    state, shown, kept, sharing = figures.state, cells(figures), report["weights"], report["sharing"]
    # `hints.hint` repeats the reason; the line "status" shows it already.
    hint = report["hint"].removeprefix(f"{state.reason}; ")
    limit = "" if report["time_limit_s"] is None else f" of {duration(report['time_limit_s'])}"
    learner = "none" if not state.leased else state.host
    if state.handover:
        learner += f", requested by {state.handover}"
    weight_text = f"{state.weight:g}, priority {state.priority}"
    if sharing["active_runs"] > 1 and sharing["share"] is not None:
        weight_text += (
            f"; {percent(sharing['share'])} of the process time of {sharing['active_runs']} active runs, "
            f"entitled to {percent(sharing['entitled'])} among those of its priority"
        )
    process_time = (
        f"{duration(state.process_s)}: {percent(sharing['played'])} played, {percent(sharing['allowance_wait'])} "
        f"waited for the learner, {percent(sharing['room_wait'])} for room"
    )
    best = "none" if kept["best"] < 0 else f"v{kept['best']} ({number(kept['best_return'])})"
    versions = f"latest v{kept['latest']}, best {best}, {len(kept['kept'])} kept ({size(kept['bytes'])})"
    refusals = {f"{host} cannot play": why for host, why in list(figures.refusals.items())[:NUM_REFUSALS]}
    if more := len(figures.refusals) - len(refusals):
        refusals["cannot play"] = f"{counted(more, 'more machine')}; all with --json"
    fragments = f"{counted(state.appended_fragments, 'fragment')} appended ({size(state.appended_bytes)})"
    lines = {
        "run": state.run,
        "status": f"{state.status}: {state.reason}" if state.reason else state.status,
        "hint": None if hint in ("", state.reason) else hint,
        "last error": state.error or None,
        "task": f"{report['env']} with {report['algorithm']}, seed {report['seed']}",
        "created": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.created_s)),
        "train time": "not started" if report["train_s"] is None else duration(report["train_s"]) + limit,
        "initial weights": report["from"],
        "learner": learner,
        "folder": state.folder or "-",
        "weight": weight_text,
        "process time": process_time if state.process_s else None,
        **shown,
        "reads": state.reads or None,
        "workers": f"{shown['workers']} on {state.queue}, {report['waiting_messages']} rollout messages waiting",
        "env steps": f"{shown['env steps']}, {state.allowance:,} allowed",
        "stream": f"{shown['stream']} in use, {fragments}",
        "appends": f"{state.duplicates} repeated, {state.full} found no room; {state.dead} entries refused",
        **refusals,
        "weights": versions if kept["latest"] >= 0 else "none yet",
        "open evaluations": ", ".join(report["open_evaluations"]) or "none",
        "metrics": "  ".join(f"{n} {v}" for n, v in other_metrics(figures).items()) or None,
    }
    pairs(lines)
    if figures.evaluated:
        print()
        infos = [INFO + name for name in figures.config.env.metrics]
        header = ("evaluation", "mean", "std", *infos, "episodes", "env steps", "purpose")
        names = ("return_mean", "return_std", *infos, "num_episodes", "env_steps", "purpose")
        newest = figures.evaluated[-NUM_EVALUATIONS:]
        rows = [(f"v{row['version']}", *(row.get(name) for name in names)) for row in newest]
        table(header, rows, left=("evaluation", "purpose"))
    if report["learners"]:
        print()
        table(LEARNER, [*map(learner_row, report["learners"])], left=LEARNER[:4])
    if report["workers"]:
        print()
        counts = ("processes", "plays", "evaluates")
        header = ("worker", "host", "pid", *counts)
        workers = [
            (row["node"], row["host"], str(row["pid"]), *(row[name] for name in counts))
            for row in report["workers"]
        ]
        table(header, workers, left=("worker", "host"))
