"""The active runs as they compete for the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.client import Pipeline

from ddrl.store import keys


@dataclass(frozen=True)
class Rival:
    """An active run as its rivals for the fleet see it.

    Attributes:
        run: its id.
        weight, priority, queue: see `RunState`.
        process_ms: time that processes have spent on it.
        wants: it has a learner and its allowance is not used up, so that more play is of use now.
        waiting: messages sent and not yet taken.
        begun: segments begun, all in all.
        ahead_ms: process time that it got beyond its share, as its dispatcher says; and
        recent: its part of all process time of the last half minute, likewise.
    """

    run: str
    weight: float
    priority: str
    queue: str
    process_ms: int
    wants: bool
    waiting: int
    begun: int
    ahead_ms: int = 0
    recent: float = 0.0


RIVAL_FIELDS = (
    *("status", "weight", "priority", "queue", "process_ms", "allowance", "appended_steps", "waiting"),
    *("begun", "version", "ahead_ms", "recent"),
)


def parse_rival(run: str, values: Sequence[bytes | None], *, leased: bool) -> Rival | None:
    """What RIVAL_FIELDS of a run's hash say; None where the run is not active."""
    field = dict(zip(RIVAL_FIELDS, values, strict=True))
    if field["status"] != b"active":
        return None
    has_left = int(field["allowance"] or 0) > int(field["appended_steps"] or 0)
    return Rival(
        run=run,
        weight=float(field["weight"] or 1.0),
        priority=(field["priority"] or b"normal").decode(),
        queue=(field["queue"] or b"").decode(),
        process_ms=int(field["process_ms"] or 0),
        wants=leased and has_left and int(field["version"] or -1) >= 0,
        waiting=int(field["waiting"] or 0),
        begun=int(field["begun"] or 0),
        ahead_ms=int(field["ahead_ms"] or 0),
        recent=float(field["recent"] or 0.0),
    )


def ask_rivals(pipe: Pipeline, among: Sequence[str]) -> None:
    """Ask for what `rivals` reads."""
    for run in among:
        pipe.hmget(keys.state(run), RIVAL_FIELDS)
        pipe.exists(keys.lease(run))


def rivals(among: Sequence[str], replies: Sequence[Any]) -> list[Rival]:
    """The active ones among some runs, from the replies to what `ask_rivals` asked."""
    found = zip(among, replies[::2], replies[1::2], strict=True)
    parsed = (parse_rival(run, values, leased=bool(leased)) for run, values, leased in found)
    return [rival for rival in parsed if rival is not None]
