"""Runs: created once, read by everybody, changed only through here.

Status: `active` (wants players and a learner), `paused`, or an end: `solved`, `time`, `stopped`, `failed`.
A run waits for a learner exactly when it is active and its lease is free; there is no queue of runs.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from redis import Redis

from ddrl import keys
from ddrl.config import RunConfig, validate
from ddrl.store.connection import StoreError
from ddrl.store.lease import FENCE, fenced
from ddrl.types import EnvSpec

ENDED = ("solved", "time", "stopped", "failed")
JOURNAL_LENGTH = 10_000


class UnknownRunError(StoreError):
    """There is no such run on this server."""


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
        waiting: rollout messages sent and not yet taken.
        error: the last one that a worker met in playing it, if any.
        leased: a learner holds the run.
        host: of the learner, and `folder` its artifacts there.
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
    waiting: int
    error: str
    leased: bool
    host: str
    folder: str
    evaluation: dict[str, Any] | None

    @property
    def ended(self) -> bool:
        """No more play or learning."""
        return self.status in ENDED

    @property
    def train_s(self) -> float | None:
        """From the first environment step to the end (None before the first, or while running)."""
        return self.ended_s - self.first_step_s if self.first_step_s and self.ended_s else None


def create(client: Redis, config: RunConfig, spaces: EnvSpec) -> str:
    """Store a new active run and return its id: name, date and four random hex digits."""
    run = f"{config.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    now_ms = server_ms(client)
    spec = config.model_dump_json(by_alias=True)
    with client.pipeline(transaction=True) as pipe:
        pipe.set(keys.spec(run), spec)
        pipe.hset(
            keys.state(run),
            mapping={
                "status": "active",
                "reason": "waiting for a learner",
                "spaces": json.dumps(asdict(spaces)),
                "created_ms": now_ms,
                "max_bytes": int(config.replay.max_bytes),
                "allowance": 0,
                "version": -1,
                "waiting": 0,
            },
        )
        pipe.zadd(keys.RUNS, {run: now_ms})
        pipe.xadd(keys.journal(run), {"event": "created"}, maxlen=JOURNAL_LENGTH)
        pipe.execute()
    return run


def names(client: Redis) -> list[str]:
    """All run ids, oldest first."""
    return [run.decode() for run in cast("list[bytes]", client.zrange(keys.RUNS, 0, -1))]


def resolve(client: Redis, name: str) -> str:
    """The run of that id, or the newest whose id starts with `name`; "last" is the newest of all.

    Raises:
        UnknownRunError: there is none.
    """
    known = names(client)
    matches = [run for run in known if run == name or name == "last" or run.startswith(name)]
    if name in matches:
        return name
    if not matches:
        hint = f"the newest is {known[-1]}" if known else "there are none yet; start one with `ddrl submit`"
        raise UnknownRunError(f"run {name}: not on this server; {hint}")
    return matches[-1]


def config(client: Redis, run: str) -> RunConfig:
    """The resolved config of a run.

    Raises:
        UnknownRunError: there is no such run.
    """
    spec = client.get(keys.spec(run))
    if spec is None:
        raise UnknownRunError(f"run {run}: not on this server; `ddrl runs` lists those that are")
    return validate(json.loads(cast(bytes, spec)))


def spaces(client: Redis, run: str) -> EnvSpec:
    """Spaces of the run's environment, as seen at submit: a learner need not have the environment itself.

    Raises:
        UnknownRunError: there is no such run.
    """
    raw = client.hget(keys.state(run), "spaces")
    if raw is None:
        raise UnknownRunError(f"run {run}: not on this server; `ddrl runs` lists those that are")
    try:
        return EnvSpec.from_json(json.loads(cast(bytes, raw)))
    except TypeError:
        raise StoreError(f"run {run}: was stored by another version of ddrl; submit it again") from None


def state(client: Redis, run: str) -> RunState:
    """What is known of a run now.

    Raises:
        UnknownRunError: there is no such run.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.hgetall(keys.state(run))
        pipe.exists(keys.lease(run))
        raw, leased = pipe.execute()
    if not raw:
        raise UnknownRunError(f"run {run}: not on this server; `ddrl runs` lists those that are")
    field = {name.decode(): value.decode() for name, value in raw.items()}

    def number(name: str) -> int:
        return int(field.get(name, 0))

    return RunState(
        run=run,
        status=field["status"],
        reason=field.get("reason", ""),
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
        waiting=number("waiting"),
        error=field.get("error", ""),
        leased=bool(leased),
        host=field.get("host", ""),
        folder=field.get("folder", ""),
        evaluation=json.loads(field["evaluation"]) if "evaluation" in field else None,
    )


def status(client: Redis, run: str) -> str | None:
    """The status alone, or None where the run is gone: one cheap read."""
    value = cast("bytes | None", client.hget(keys.state(run), "status"))
    return value.decode() if value is not None else None


_SET_STATUS = """
-- KEYS: state hash, journal stream. ARGV: token (0: the operator), status, reason, ended (1|0), then the
-- statuses it may replace. An end is final but for `active`, which resumes.
if ARGV[1] ~= '0' and redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then
  return redis.error_reply('FENCED another learner took over')
end
local now = redis.call('HGET', KEYS[1], 'status')
for i = 5, #ARGV do
  if now == ARGV[i] then
    local time = redis.call('TIME')
    redis.call('HSET', KEYS[1], 'status', ARGV[2], 'reason', ARGV[3])
    if ARGV[4] == '1' then
      redis.call('HSET', KEYS[1], 'ended_ms', time[1] * 1000 + math.floor(time[2] / 1000))
    else
      redis.call('HDEL', KEYS[1], 'ended_ms')
    end
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', 10000, '*', 'event', ARGV[2], 'reason', ARGV[3])
    return 1
  end
end
return 0
"""


def set_status(client: Redis, run: str, new: str, reason: str, *, token: int | None = None) -> bool:
    """Change the status if the present one allows it; False if it does not (already ended, say).

    Args:
        token: of the learner that says so; None is the operator, whose word needs no lease.

    Raises:
        LeaseLostError: another learner took over.
    """
    allowed = {
        "active": ("paused", "time", "stopped", "failed"),
        "paused": ("active",),
    }.get(new, ("active", "paused"))
    ended = "1" if new in ENDED else "0"
    keys_ = [keys.state(run), keys.journal(run)]
    return bool(fenced(client, _SET_STATUS, keys_, token or 0, new, reason, ended, *allowed))


def reactivate(client: Redis, run: str, *, more_time_s: float | None = None) -> None:
    """Let a paused or ended run go on from where it was.

    Args:
        more_time_s: new `stop.time`, counted from what has been learned so far; None leaves the limit alone.

    Raises:
        StoreError: the run is solved, or has reached a limit that is not raised.
        UnknownRunError: there is no such run.
    """
    now = state(client, run)
    if now.status == "solved":
        raise StoreError(f"run {run}: is solved; start another one with `ddrl submit`")
    if now.status == "time" and not now.reason.startswith("time limit"):
        raise StoreError(f"run {run}: reached its {now.reason}; start another one with a larger limit")
    if now.status == "time" and more_time_s is None:
        raise StoreError(f"run {run}: reached its {now.reason}; give it more, such as --time 10m")
    if more_time_s is not None:
        changed = config(client, run)
        limit = changed.stop.model_copy(update={"time": elapsed_s(client, run) + more_time_s})
        spec = changed.model_copy(update={"stop": limit}).model_dump_json(by_alias=True)
        client.set(keys.spec(run), spec)
    if now.status != "active":
        set_status(client, run, "active", "waiting for a learner")


def elapsed_s(client: Redis, run: str) -> float:
    """Learning time up to the newest checkpoint."""
    raw = cast("bytes | None", client.hget(keys.state(run), "checkpoint"))
    return float(json.loads(raw)["meta"]["elapsed_s"]) if raw else 0.0


_NOTE_EVALUATION = FENCE + "redis.call('HSET', KEYS[1], 'evaluation', ARGV[2]) return 1"


def note_evaluation(client: Redis, run: str, token: int, evaluation: Mapping[str, Any]) -> None:
    """Keep the evaluation that describes the run: version, return_mean, return_std, episodes.

    Raises:
        LeaseLostError: another learner took over.
    """
    fenced(client, _NOTE_EVALUATION, [keys.state(run)], token, json.dumps(dict(evaluation)))


def note_error(client: Redis, run: str, message: str) -> None:
    """Show in the run's state why a worker could not play it."""
    client.hset(keys.state(run), mapping={"error": message[:500]})


def num_active(client: Redis) -> int:
    """Runs that want players now (among the newest hundred)."""
    with client.pipeline(transaction=False) as pipe:
        for run in names(client)[-100:]:
            pipe.hget(keys.state(run), "status")
        return sum(value == b"active" for value in pipe.execute())


def journal(client: Redis, run: str) -> list[dict[str, Any]]:
    """Every change of state or setting, oldest first: `time_s` and the entry's fields."""
    entries = cast("list[Any]", client.xrange(keys.journal(run)))
    return [
        {"time_s": int(entry_id.split(b"-")[0]) / 1e3, **{k.decode(): v.decode() for k, v in fields.items()}}
        for entry_id, fields in entries
    ]


def delete(client: Redis, run: str) -> int:
    """Remove an ended run with all its keys; the number of keys removed.

    Raises:
        StoreError: the run has not ended.
    """
    now = state(client, run)
    if not now.ended:
        raise StoreError(f"run {run}: is {now.status}; stop it first with `ddrl stop {run}`")
    client.zrem(keys.RUNS, run)
    removed = 0
    for key in client.scan_iter(match=keys.run_pattern(run), count=1000):
        removed += client.unlink(key)
    return removed


def server_ms(client: Redis) -> int:
    """The server's clock in milliseconds; two machines' clocks are never compared."""
    seconds, micros = client.time()
    return seconds * 1000 + micros // 1000
