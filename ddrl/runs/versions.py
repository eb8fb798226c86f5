"""The versions of a run's weights that the server keeps: their scores, and evaluations of those that have none."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddrl.runs import records
from ddrl.store import evaluations, runs, weights
from ddrl.store.connection import Redis
from ddrl.store.evaluations import Evaluation

RESAMPLES = 2_000


def rows(client: Redis, run: str) -> list[dict[str, Any]]:
    """Return the versions that are kept, oldest first."""
    stored, config = weights.index(client, run), runs.config(client, run).weights
    now_ms, evaluated = runs.server_ms(client), evaluations.results(client, run)[0]
    rows = []
    for place, version in enumerate(sorted(stored.sizes, reverse=True)):
        returns = [one for row in evaluated if row["version"] == version for one in row["returns"]]
        at_ms, updates = stored.published[version]
        row: dict[str, Any] = {"version": version, "published_s": at_ms and at_ms / 1e3, "updates": updates}
        row |= {"age_s": at_ms and (now_ms - at_ms) / 1e3, "bytes": stored.sizes[version]}
        mean = float(np.mean(returns)) if returns else None
        row |= {"return_mean": mean, "interval": interval(returns), "episodes": len(returns)}
        if (standing := stored.standings.get(version)) is not None:
            row |= {"elo": standing.rating, "games": standing.games, "beaten": standing.score}
        reasons = {"best": version == stored.best, f"newest {config.keep_last}": place < config.keep_last}
        reasons[f"every {config.keep_every}"] = version % config.keep_every == 0
        kept_as = [reason for reason, holds in reasons.items() if holds] or ["until the next version"]
        rows.append({**row, "kept_as": kept_as})
    return rows[::-1]


def interval(returns: list[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean, by the percentile bootstrap (Efron 1979); None for fewer than two."""
    if len(returns) < 2:
        return None
    drawn = np.random.default_rng(0).choice(returns, (RESAMPLES, len(returns)))
    low, high = np.quantile(drawn.mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def to_evaluate(client: Redis, run: str, *, every: int, num_episodes: int | None) -> list[Evaluation]:
    """Return evaluations of kept versions that have none of so many episodes, newest first.

    All are of the same seeds, those of the run's evaluations, and stand in its curves where their version was new.

    Args:
        client: connection to the server.
        run: its id.
        every: each so many of the versions, from the newest on.
        num_episodes: of each; None: as the run's evaluations have.
    """
    config, stored = runs.config(client, run).evaluation, weights.index(client, run)
    num = config.num_episodes if num_episodes is None else num_episodes
    known = {
        row["version"]
        for row in evaluations.results(client, run)[0]
        if row["first_seed"] == config.seed and row["num_episodes"] >= num
    }
    figures = records.read(client, run).figures or [{"updates": 0, "env_steps": 0}]
    updates, steps = ([row[name] for row in figures] for name in ("updates", "env_steps"))
    found = []
    for version in sorted(stored.sizes, reverse=True)[::every]:
        at_ms, at_update = stored.published[version]
        if version not in known:
            of_run: Any = {
                "env_steps": round(np.interp(at_update or 0, updates, steps)),
                "updates": at_update or 0,
            }
            episodes: Any = {"first_seed": config.seed, "num_episodes": num, "num_envs": config.num_envs}
            found.append(Evaluation(version=version, purpose="backfill", at_ms=at_ms, **episodes, **of_run))
    return found
