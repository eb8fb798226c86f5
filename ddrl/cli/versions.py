"""`ddrl versions`: the versions of a run's weights that the server keeps, and what they score."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddrl.cli.format import duration, number, size
from ddrl.cli.output import Client, Json, Run, emit, server_of, table
from ddrl.store import evaluations, runs, weights

RESAMPLES = 2_000


def versions(run: Run = "last", json_output: Json = False) -> None:
    """List the versions that a run keeps, each with its score over all episodes that it was evaluated on."""
    with server_of(run) as (client, run):
        rows = _rows(client, run)
    if json_output:
        emit(rows)
        return
    cells = []
    for row in rows:
        low, high = row["interval"] or (None, None)
        between = "" if low is None else f"{number(low)} to {number(high)}"
        figures = (duration(row["age_s"]), row["updates"], size(row["bytes"]), row["return_mean"], between)
        cells.append((str(row["version"]), *figures, row["episodes"], ", ".join(row["kept_as"])))
    header = ("version", "age", "updates", "size", "return", "95 % interval", "episodes", "kept as")
    table(header, cells, left=("kept as",), optional=("size", "age"))


def interval(returns: list[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean, by the percentile bootstrap (Efron 1979); None for fewer than two."""
    if len(returns) < 2:
        return None
    drawn = np.random.default_rng(0).choice(returns, (RESAMPLES, len(returns)))
    low, high = np.quantile(drawn.mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _rows(client: Client, run: str) -> list[dict[str, Any]]:
    """Return the versions that are kept, oldest first."""
    stored, config = weights.index(client, run), runs.config(client, run).weights
    now_ms, evaluated = runs.server_ms(client), evaluations.results(client, run)[0]
    rows = []
    for place, version in enumerate(sorted(stored.sizes, reverse=True)):
        returns = [one for row in evaluated if row["version"] == version for one in row["returns"]]
        published_ms, updates = stored.published[version]
        row: dict[str, Any] = {
            "version": version,
            "published_s": published_ms and published_ms / 1e3,
            "updates": updates,
        }
        row |= {"age_s": published_ms and (now_ms - published_ms) / 1e3, "bytes": stored.sizes[version]}
        mean = float(np.mean(returns)) if returns else None
        row |= {"return_mean": mean, "interval": interval(returns), "episodes": len(returns)}
        reasons = {"best": version == stored.best, f"newest {config.keep_last}": place < config.keep_last}
        reasons[f"every {config.keep_every}"] = version % config.keep_every == 0
        kept_as = [reason for reason, holds in reasons.items() if holds] or ["until the next version"]
        rows.append({**row, "kept_as": kept_as})
    return rows[::-1]
