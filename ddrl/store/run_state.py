"""What the server knows of a run: the fields of its state hash, read as one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.client import Pipeline

from ddrl.store import keys

ENDED = ("solved", "time", "stopped", "failed")


@dataclass(frozen=True)
class RunState:
    """What the server knows of a run; times are the server's clock in seconds, 0 where not yet.

    Attributes:
        status: see the module's docstring.
        reason: one line on why it has this status.
        created_s, first_step_s, ended_s: creation, first environment step, end.
        updates: of the learner, as last told.
        version: latest published, -1 before the first.
        allowance: env steps that may have been appended in all.
        appended_fragments, appended_steps, appended_bytes: cumulative, refused ones not counted.
        live_bytes: of the experience stream, entries trimmed not counted.
        duplicates: repeated appends refused.
        dead: entries that the learner refused.
        full: appends that found no room.
        waiting: rollout messages sent and not yet taken.
        error: the last one that a worker met in playing it, if any.
        leased: a learner holds the run.
        host: of the learner, and `folder` its artifacts there.
        handover: who asks the learner for the run; "" if nobody does.
        weight, priority: its share of the fleet, as of now.
        queue, evaluation_queue: where its messages wait.
        versions: of the packages that its environment runs with, as submitted.
        config_version: grows with every setting changed.
        process_s: time that processes spent on it; of these
        played_s: in which environments were stepped,
        allowance_wait_s, room_wait_s: in which they waited for the learner, and for room in the stream.
        crashes, crashes_total: processes that could not play it, since the last fragment and in all.
        lost_producers: that ended without a word.
        warm: where its first weights come from; "" if from nowhere.
        evaluation: the evaluation that describes the run, if any: version, return_mean, return_std, episodes.
    """

    run: str
    status: str
    reason: str
    created_s: float
    first_step_s: float
    ended_s: float
    updates: int
    version: int
    allowance: int
    appended_fragments: int
    appended_steps: int
    appended_bytes: int
    live_bytes: int
    duplicates: int
    dead: int
    full: int
    waiting: int
    error: str
    leased: bool
    host: str
    folder: str
    handover: str
    weight: float
    priority: str
    queue: str
    evaluation_queue: str
    versions: dict[str, str]
    config_version: int
    process_s: float
    played_s: float
    allowance_wait_s: float
    room_wait_s: float
    crashes: int
    crashes_total: int
    lost_producers: int
    warm: str
    evaluation: dict[str, Any] | None

    @property
    def ended(self) -> bool:
        """No more play or learning."""
        return self.status in ENDED

    @property
    def train_s(self) -> float | None:
        """From the first environment step to the end (None before the first, or while running)."""
        return self.ended_s - self.first_step_s if self.first_step_s and self.ended_s else None


STATE_FIELDS = (
    *("reason", "created_ms", "first_step_ms", "ended_ms", "updates", "version", "allowance"),
    *("appended_fragments", "appended_steps", "appended_bytes", "trimmed_bytes", "duplicates", "dead"),
    *("full", "waiting", "error", "host", "folder", "handover", "weight", "priority", "queue"),
    *("evaluation_queue", "versions", "config_version", "process_ms", "played_ms", "allowance_wait_ms"),
    *("room_wait_ms", "crashes", "crashes_total", "lost_producers", "warm", "status", "evaluation"),
)
"""All but what is large, such as the checkpoint's pointer."""


def parse(run: str, raw: Mapping[str, bytes], *, leased: bool) -> RunState:
    """A run's state from those of STATE_FIELDS that its hash has."""
    text = {name: value.decode() for name, value in raw.items()}

    def number(name: str) -> int:
        return int(text.get(name, 0))

    return RunState(
        run=run,
        status=text["status"],
        reason=text.get("reason", ""),
        created_s=number("created_ms") / 1e3,
        first_step_s=number("first_step_ms") / 1e3,
        ended_s=number("ended_ms") / 1e3,
        updates=number("updates"),
        version=number("version"),
        allowance=number("allowance"),
        appended_fragments=number("appended_fragments"),
        appended_steps=number("appended_steps"),
        appended_bytes=number("appended_bytes"),
        live_bytes=number("appended_bytes") - number("trimmed_bytes"),
        duplicates=number("duplicates"),
        dead=number("dead"),
        full=number("full"),
        waiting=number("waiting"),
        error=text.get("error", ""),
        leased=leased,
        host=text.get("host", ""),
        folder=text.get("folder", ""),
        handover=text.get("handover", ""),
        weight=float(text.get("weight", 1.0)),
        priority=text.get("priority", "normal"),
        queue=text.get("queue", ""),
        evaluation_queue=text.get("evaluation_queue", ""),
        versions=json.loads(text.get("versions", "{}")),
        config_version=number("config_version"),
        process_s=number("process_ms") / 1e3,
        played_s=number("played_ms") / 1e3,
        allowance_wait_s=number("allowance_wait_ms") / 1e3,
        room_wait_s=number("room_wait_ms") / 1e3,
        crashes=number("crashes"),
        crashes_total=number("crashes_total"),
        lost_producers=number("lost_producers"),
        warm=text.get("warm", ""),
        evaluation=json.loads(text["evaluation"]) if "evaluation" in text else None,
    )


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
