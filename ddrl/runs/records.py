"""A run's history as the server keeps it (metrics, episodes, evaluations, journal), and its summary."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ddrl.config import RunConfig
from ddrl.store import evaluations, history, metrics, runs, stream
from ddrl.store.connection import Redis
from ddrl.store.runs import RunState

TABLES = ("metrics", "episodes", "evaluations", "journal")


@dataclass(frozen=True)
class Records:
    """A run's history, or what was added after some of it; every row has `time_s` since the first environment step.

    Attributes:
        figures: one row per report of the learner.
        episodes: one row per finished training episode: time_s, env_steps, return.
        evaluated: one row per evaluation.
        journal: one row per change of state or setting.
        ends: id of the last entry read of each of TABLES.
    """

    config: RunConfig
    state: RunState
    figures: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]
    journal: list[dict[str, Any]]
    ends: dict[str, bytes]

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Settings changed during the run, and weights gone back to: time_s, env_steps, option, from, to."""
        return [row for row in self.journal if row["event"] in runs.CHANGES]


def summary(client: Redis, run: str, *, wall_s: float | None = None) -> dict[str, Any]:
    """Return the last line of `ddrl submit --json`, which is in the run's folder, too.

    Args:
        wall_s: since the start of the command; None: since the run's creation.

    Raises:
        UnknownRunError: there is no such run.
    """
    state = runs.state(client, run)
    now_s = runs.server_ms(client) / 1e3
    best = state.evaluation
    return {
        "run": run,
        "status": state.outcome or state.status,
        "reason": state.reason,
        "wall_s": round((state.ended_s or now_s) - state.created_s if wall_s is None else wall_s, 3),
        "train_s": round(state.train_s(now_s) or 0.0, 3),
        "env_steps": state.appended_steps,
        "updates": state.updates,
        "policy_version": best["version"] if best else state.version,
        "evaluation": best and {name: best[name] for name in ("return_mean", "return_std", "episodes")},
        "artifacts": state.folder,
    }


def read(client: Redis, run: str, after: Mapping[str, bytes] = MappingProxyType({})) -> Records:
    """Read a run's history from the server.

    Args:
        client: connection to the server.
        run: its id.
        after: `Records.ends` of an earlier call: only what was added since. Else all that the server has; of metrics
            and episodes that have left their streams, those that `store/history.py` has kept.

    Raises:
        UnknownRunError: there is no such run.
    """
    state = runs.state(client, run)
    cursors = {name: after.get(name, b"0-0") for name in TABLES}

    def since(time_s: float) -> float:
        return round(max(0.0, time_s - state.start_s), 3)

    def since_start(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**row, "time_s": since(row["time_s"])}

    reports, reports_end = metrics.read(client, run, cursors["metrics"])
    ended, episodes_end = stream.episodes(client, run, cursors["episodes"])
    results, evaluations_end = evaluations.results(client, run, cursors["evaluations"])
    changes, journal_end = runs.journal(client, run, cursors["journal"])
    figures = [since_start(row) for row in reports]
    episodes = [
        {"time_s": seconds, "env_steps": row["env_steps"], "return": value}
        for row in ended
        for seconds in (since(row["time_s"]),)
        for value in row["returns"]
    ]
    if not after:
        older = history.read(client, run)
        figures = _preceded(older["metrics"], figures)
        episodes = _preceded(older["episodes"], episodes)
    journal = [since_start(row) for row in changes]
    for row in journal:
        if row["event"] in runs.CHANGES:
            values = {name: json.loads(row[name]) for name in ("from", "to")}
            row |= {**values, "env_steps": int(row["env_steps"])}
    return Records(
        config=runs.config(client, run),
        state=state,
        figures=figures,
        episodes=episodes,
        evaluated=[since_start(row) | evaluations.means(row["metrics"]) for row in results],
        journal=journal,
        ends=dict(zip(TABLES, (reports_end, episodes_end, evaluations_end, journal_end), strict=True)),
    )


def _preceded(older: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with those of the history that come before them."""
    begin = rows[0]["time_s"] if rows else math.inf
    return [row for row in older if row["time_s"] < begin] + rows


def learner_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one of `Records.figures`, by the names that they have in tools for curves."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {
        f"learner/{name}": float(numbers[name]) for name in numbers if name not in ("time_s", "env_steps")
    }


def evaluation_name(row: Mapping[str, Any]) -> str:
    """Return the name of the mean return of one of `Records.evaluated` there."""
    return "return/confirmation" if row["purpose"] == "confirm" else "return/evaluation"


def shown(value: Any) -> str:
    """Return a setting's value as short text."""
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)
