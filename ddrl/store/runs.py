"""Runs: created once, read by everybody, changed only through here.

Status: `active` (wants players and a learner), `paused`, or an end: `solved`, `time`, `stopped`, `failed`.
A run waits for a learner exactly when it is active and its lease is free; there is no queue of runs.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from redis import Redis

from ddrl.config import RunConfig, validate
from ddrl.store import keys
from ddrl.store.connection import StoreError, call
from ddrl.store.leases import fenced
from ddrl.store.run_state import ENDED as ENDED
from ddrl.store.run_state import STATE_FIELDS, Rival, ask_rivals, parse, rivals
from ddrl.store.run_state import RunState as RunState
from ddrl.types import EnvSpec

JOURNAL_LENGTH = 10_000
DELETED_MS = 30 * 86_400_000  # for which a deleted run is remembered


class UnknownRunError(StoreError):
    """There is no such run on this server."""


def create(
    client: Redis,
    config: RunConfig,
    spaces: EnvSpec,
    *,
    queues: tuple[str, str] = ("ddrl.rollout", "ddrl.evaluate"),
    versions: Mapping[str, str] | None = None,
    initial: tuple[str, bytes] | None = None,
) -> str:
    """Store a new active run and return its id: name, date and four random hex digits.

    Args:
        client: connection to the server.
        config: resolved.
        spaces: of its environment.
        queues: where its rollouts and its evaluations wait.
        versions: of the packages that its environment runs with here.
        initial: where the weights to begin with come from, and they, safetensors.
    """
    run = f"{config.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    fields = {
        **_mirrored(config),
        "status": "active",
        "reason": "waiting for a learner",
        "spaces": json.dumps(asdict(spaces)),
        "created_ms": server_ms(client),
        "queue": queues[0],
        "evaluation_queue": queues[1],
        "versions": json.dumps(dict(versions or {})),
        "warm": initial[0] if initial is not None else "",
        "allowance": 0,
        "version": -1,
        "waiting": 0,
    }
    script_keys = [
        keys.spec(run),
        keys.state(run),
        keys.journal(run),
        keys.initial(run),
        keys.RUNS,
        keys.OPEN,
    ]
    spec, weights = config.model_dump_json(by_alias=True), initial[1] if initial is not None else b""
    pairs = [part for pair in fields.items() for part in pair]
    call(client, "create_run", script_keys, [run, spec, weights, fields["created_ms"], *pairs])
    return run


def _mirrored(config: RunConfig) -> dict[Any, Any]:
    """Settings that scripts and other runs' dispatchers read."""
    return {
        "max_bytes": int(config.replay.max_bytes),
        "weight": config.weight,
        "priority": config.priority,
    }


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
        pipe.hmget(keys.state(run), STATE_FIELDS)
        pipe.exists(keys.lease(run))
        values, leased = pipe.execute()
    raw = {name: value for name, value in zip(STATE_FIELDS, values, strict=True) if value is not None}
    if "status" not in raw:
        raise UnknownRunError(f"run {run}: not on this server; `ddrl runs` lists those that are")
    return parse(run, raw, leased=bool(leased))


def open_names(client: Redis) -> list[str]:
    """Runs that have not ended, oldest first."""
    return [run.decode() for run in cast("list[bytes]", client.zrange(keys.OPEN, 0, -1))]


def active_names(client: Redis) -> list[str]:
    """Runs that want players, oldest first."""
    known = open_names(client)
    with client.pipeline(transaction=False) as pipe:
        for run in known:
            pipe.hget(keys.state(run), "status")
        return [run for run, value in zip(known, pipe.execute(), strict=True) if value == b"active"]


def active(client: Redis) -> list[Rival]:
    """The active runs, oldest first."""
    known = open_names(client)
    with client.pipeline(transaction=False) as pipe:
        ask_rivals(pipe, known)
        return rivals(known, pipe.execute())


def status(client: Redis, run: str) -> str | None:
    """The status alone, or None where the run is gone: one cheap read."""
    value = cast("bytes | None", client.hget(keys.state(run), "status"))
    return value.decode() if value is not None else None


def set_status(client: Redis, run: str, new: str, reason: str, *, token: int | None = None) -> bool:
    """Change the status if the present one allows it; False if it does not (already ended, say).

    Args:
        token: of the learner that says so; None is the operator, whose word needs no lease.

    Raises:
        LeaseLostError, RunGoneError: another learner took over; the run is not there.
    """
    allowed = {
        "active": ("paused", "time", "stopped", "failed"),
        "paused": ("active",),
    }.get(new, ("active", "paused"))
    ended = "1" if new in ENDED else "0"
    keys_ = [keys.state(run), keys.journal(run), keys.OPEN]
    args = (new, reason, ended, run, JOURNAL_LENGTH, *allowed)
    return bool(fenced(client, "set_status", keys_, token or 0, *args))


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
        before = config(client, run)
        limit = before.stop.model_copy(update={"time": elapsed_s(client, run) + more_time_s})
        changes = {"stop.time": (before.stop.time, limit.time)}
        change(client, run, before.model_copy(update={"stop": limit}), changes, version=now.config_version)
    if now.status != "active":
        set_status(client, run, "active", "waiting for a learner")


def elapsed_s(client: Redis, run: str) -> float:
    """Learning time up to the newest checkpoint."""
    raw = cast("bytes | None", client.hget(keys.state(run), "checkpoint"))
    return float(json.loads(raw)["meta"]["elapsed_s"]) if raw else 0.0


def note_evaluation(client: Redis, run: str, token: int, evaluation: Mapping[str, Any]) -> None:
    """Keep the evaluation that describes the run: version, return_mean, return_std, episodes.

    Raises:
        LeaseLostError: another learner took over.
    """
    fenced(client, "set_fields", [keys.state(run)] * 2, token, "evaluation", json.dumps(dict(evaluation)))


def reserved_bytes(client: Redis, *, but: str | None = None) -> int:
    """Of the server's memory: the budgets of the streams of runs that have not ended, but for one of them."""
    with client.pipeline(transaction=False) as pipe:
        for run in open_names(client):
            if run != but:
                pipe.hget(keys.state(run), "max_bytes")
        return sum(int(size or 0) for size in pipe.execute())


def change(
    client: Redis, run: str, new: RunConfig, changes: Mapping[str, tuple[Any, Any]], *, version: int
) -> int:
    """Store a changed config; learner, dispatcher and scripts go by it from now on.

    Args:
        client: connection to the server.
        run: its id.
        new: the whole config.
        changes: option -> (from, to), for the journal.
        version: `config_version` of the config that was changed.

    Returns:
        The new `config_version`.

    Raises:
        StoreError: somebody else has changed it meanwhile.
    """
    fields = [part for pair in _mirrored(new).items() for part in pair]
    rows = [part for name, values in changes.items() for part in (name, *map(json.dumps, values))]
    script_keys = [keys.spec(run), keys.state(run), keys.journal(run)]
    spec = new.model_dump_json(by_alias=True)
    args = [version, spec, JOURNAL_LENGTH, len(fields) // 2, *fields, *rows]
    reply = call(client, "change_config", script_keys, args)
    if not reply:
        raise StoreError(f"run {run}: its settings were changed meanwhile; look at them and try again")
    return cast(int, reply)


def config_version(client: Redis, run: str) -> int:
    """Grows with every setting changed: one cheap read."""
    return int(cast("bytes | None", client.hget(keys.state(run), "config_version")) or 0)


def delete(client: Redis, run: str) -> int:
    """Remove an ended run with all its keys; the number of keys removed.

    Raises:
        StoreError: the run has not ended, or its learner is still at work.
        UnknownRunError: there is no such run.
    """
    now = state(client, run)
    if not now.ended:
        raise StoreError(f"run {run}: is {now.status}; stop it first with `ddrl stop {run}`")
    if now.leased:
        raise StoreError(f"run {run}: its learner on {now.host} still writes its results; try again soon")
    script_keys = [keys.state(run), keys.lease(run), keys.RUNS, keys.OPEN, keys.DELETED]
    if not call(client, "delete_run", script_keys, [run, DELETED_MS, *ENDED]):
        raise StoreError(f"run {run}: goes on again; stop it first with `ddrl stop {run}`")
    removed = 1
    for key in client.scan_iter(match=keys.run_pattern(run), count=1000):
        removed += client.unlink(key)
    return removed


def request_handover(client: Redis, run: str, host: str) -> None:
    """Ask the run's learner to let go of it; whoever acquires the lease ends the request."""
    call(client, "request_handover", [keys.state(run), keys.journal(run)], [host, JOURNAL_LENGTH])


def initial(client: Redis, run: str) -> bytes | None:
    """Weights to begin with, safetensors; None where the run begins afresh."""
    return cast("bytes | None", client.get(keys.initial(run)))


def note(client: Redis, run: str, event: str, reason: str) -> None:
    """Add to the run's journal."""
    args = [JOURNAL_LENGTH, "event", event, "reason", reason]
    call(client, "add_line", [keys.state(run), keys.journal(run)], args)


def journal(client: Redis, run: str) -> list[dict[str, Any]]:
    """Every change of state or setting, oldest first: `time_s` and the entry's fields."""
    return journal_after(client, run)[0]


def journal_after(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """The journal after an entry; and the last entry's id."""
    raw = cast("list[Any]", client.xrange(keys.journal(run), min=b"(" + after))
    rows = [
        {"time_s": int(entry_id.split(b"-")[0]) / 1e3, **{k.decode(): v.decode() for k, v in fields.items()}}
        for entry_id, fields in raw
    ]
    return rows, raw[-1][0] if raw else after


def server_ms(client: Redis) -> int:
    """The server's clock in milliseconds; two machines' clocks are never compared."""
    seconds, micros = client.time()
    return seconds * 1000 + micros // 1000
