"""A run's history as the server keeps it (metrics, episodes, evaluations, journal), and its summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddrl.config import RunConfig
from ddrl.store import evaluations, metrics, runs, stream
from ddrl.store.connection import Redis
from ddrl.store.runs import RunState


@dataclass(frozen=True)
class Records:
    """A run's history; every row has `time_s` since the first environment step.

    Attributes:
        figures: one row per report of the learner.
        episodes: one row per finished training episode: time_s, env_steps, return.
        evaluated: one row per evaluation.
        journal: one row per change of state or setting.
    """

    config: RunConfig
    state: RunState
    figures: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]
    journal: list[dict[str, Any]]

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Settings changed during the run: time_s, env_steps, option, from, to."""
        return [row for row in self.journal if row["event"] == "set"]


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


def read(client: Redis, run: str) -> Records:
    """Read a run's history from the server.

    Raises:
        UnknownRunError: there is no such run.
    """
    state = runs.state(client, run)

    def since_start(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**row, "time_s": round(max(0.0, row["time_s"] - state.start_s), 3)}

    episodes = [
        {"time_s": row["time_s"], "env_steps": row["env_steps"], "return": value}
        for row in map(since_start, stream.episodes(client, run)[0])
        for value in row["returns"]
    ]
    journal = [since_start(row) for row in runs.journal(client, run)[0]]
    for row in journal:
        if row["event"] == "set":
            values = {name: json.loads(row[name]) for name in ("from", "to")}
            row |= {**values, "env_steps": int(row["env_steps"])}
    return Records(
        config=runs.config(client, run),
        state=state,
        figures=[since_start(row) for row in metrics.read(client, run)[0]],
        episodes=episodes,
        evaluated=[
            since_start(row) | evaluations.means(row["metrics"])
            for row in evaluations.results(client, run)[0]
        ],
        journal=journal,
    )


def shown(value: Any) -> str:
    """Return a setting's value as short text."""
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)
