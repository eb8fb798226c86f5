"""Runs: created once, read by everybody, changed only through here.

Status: `active` (wants players and a learner), `paused`, or an end: `solved`, `time`, `stopped`, `failed`. An ended run
is shown as `ending` while it is still in the set of open runs: until its last evaluation and its folder are complete.
A run waits for a learner exactly when it is active or ending and its lease is free; there is no queue of runs.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import from_json
from redis import Redis

from ddrl.store import bounded, capped_streams, checkpoints, keys
from ddrl.store.connection import StoreError, call, digest, execute
from ddrl.store.untrusted import number, short_text
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from ddrl.config import RunConfig

WIRE_FORMAT = 1  # what docs/wire.md describes
JOURNAL_LENGTH = 10_000
LONGEST_FIELD = 1_000  # characters of a journal's entry that are read
DELETED_AT_ONCE = 500  # keys
DELETED_MS = 30 * 86_400_000  # for which a deleted run is remembered
NOBODY = "ddrl.nobody"  # a queue that no worker serves
ENDED = ("solved", "time", "stopped", "failed")
CHANGES = ("set", "rollback")  # events of the journal with option, from, to and env_steps


class UnknownRunError(StoreError):
    """The run is not on this server."""


@dataclass(frozen=True)
class RunState:
    """The fields of a run's hashes `state` and `counts`; times by the server's clock in seconds, 0 for events to come.

    Attributes:
        status: see the module's docstring.
        outcome: the end that the run has, or will have when it is complete; "" before.
        reason: why it has this status, in one line; of an active run, that it waits for a learner if it does.
        created_s, first_step_s, ended_s: creation, first environment step, end.
        idle_since_s: when it was paused or ended, if it is and had a step before.
        idle_s: time after the first step in which it was paused or ended, up to the last time that it went on.
        updates: of the learner, as last reported.
        version: latest published, -1 before the first.
        allowance: env steps that may have been appended in all.
        appended_fragments, appended_steps, appended_bytes: cumulative, without those that found no room.
        trimmed_bytes: of these, not in the stream any more.
        duplicates: repeated appends that were not counted.
        dead: entries that the learner refused.
        full: appends that found no room.
        error: the last one that a worker met in playing it, if any.
        leased: a learner holds the run.
        host, folder: of the learner, and its artifacts there.
        handover: the host that asks the learner for the run; "" if none does.
        weight, priority: its share of the fleet.
        queue, evaluation_queue: where its messages wait.
        versions: of the packages that its environment runs with, as submitted.
        config_version: grows with every setting changed.
        revision: grows with every change after which the learner goes on from its checkpoint (`revise.lua`).
        process_s: time that processes spent on it; of these
        played_s: in which environments were stepped,
        allowance_wait_s, room_wait_s: in which they waited for the learner, and for room in the stream.
        crashes, crashes_total: processes that could not play it, since the last fragment and in all.
        lost_producers: that ended without saying so.
        warm: source of the initial weights; "" if they were random.
        goes_on_from: run and update whose networks and optimizers it began with; "": it began with fresh ones.
        reads: the run whose experience it learns from, as its shadow; "" for its own.
        evaluation: the one that describes the run, if any: version, return_mean, return_std, episodes.
        bytes: that its keys took when its results were complete; 0: unknown.
    """

    run: str
    status: str
    leased: bool
    outcome: str = ""
    reason: str = ""
    created_s: float = 0.0
    first_step_s: float = 0.0
    ended_s: float = 0.0
    idle_since_s: float = 0.0
    idle_s: float = 0.0
    updates: int = 0
    version: int = -1
    allowance: int = 0
    appended_fragments: int = 0
    appended_steps: int = 0
    appended_bytes: int = 0
    trimmed_bytes: int = 0
    duplicates: int = 0
    dead: int = 0
    full: int = 0
    error: str = ""
    host: str = ""
    folder: str = ""
    handover: str = ""
    weight: float = 1.0
    priority: str = "normal"
    queue: str = ""
    evaluation_queue: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    config_version: int = 0
    revision: int = 0
    process_s: float = 0.0
    played_s: float = 0.0
    allowance_wait_s: float = 0.0
    room_wait_s: float = 0.0
    crashes: int = 0
    crashes_total: int = 0
    lost_producers: int = 0
    warm: str = ""
    goes_on_from: str = ""
    reads: str = ""
    evaluation: dict[str, Any] | None = None
    bytes: int = 0

    @property
    def ended(self) -> bool:
        """No more play or learning, and the results are complete."""
        return self.status in ENDED

    @property
    def start_s(self) -> float:
        """Time of the first environment step, or of the creation before it."""
        return self.first_step_s or self.created_s

    @property
    def live_bytes(self) -> int:
        """Size of the experience stream."""
        return self.appended_bytes - self.trimmed_bytes

    def train_s(self, now_s: float) -> float | None:
        """Return the time from the first environment step to the end or to now, less that in which the run was paused
        or had ended before it went on; None before the first step.
        """
        if not self.first_step_s:
            return None
        return (self.idle_since_s or self.ended_s or now_s) - self.first_step_s - self.idle_s


_STATE_FIELDS = {  # attribute -> field of the hash, where times are in ms
    name: f"{name[:-1]}ms" if name.endswith("_s") else name
    for name in RunState.__annotations__
    if name not in ("run", "leased", "outcome")
}


def create(
    client: Redis,
    config: RunConfig,
    spaces: EnvSpec,
    *,
    queues: tuple[str, str] = ("ddrl.rollout", "ddrl.evaluate"),
    versions: Mapping[str, str] | None = None,
    initial: tuple[str, bytes] | None = None,
    state: tuple[str, bytes] | None = None,
    reads: str = "",
    run: str | None = None,
) -> str:
    """Store a new active run and return its id: by default its name, time and seed, and four random hex digits.

    Args:
        client: connection to the server.
        config: resolved.
        spaces: of its environment.
        queues: where its rollouts and its evaluations wait.
        versions: of the packages that its environment runs with here.
        initial: source of the initial weights, and the weights as safetensors.
        state: source of the first checkpoint, and its tensors; initial weights replace those that it has.
        reads: the run whose experience it learns from; nobody plays it then.
        run: its id.
    """
    run = run or f"{config.name}-{time.strftime('%m%d-%H%M%S')}-s{config.seed}-{secrets.token_hex(2)}"
    fields = {
        **_mirrored(config),
        "status": "active",
        "spaces": json.dumps(asdict(spaces)),
        "created_ms": server_ms(client),
        "queue": queues[0],
        "evaluation_queue": queues[1],
        "versions": json.dumps(dict(versions or {})),
        "warm": (initial or state or ("",))[0],
        "goes_on_from": (state or ("",))[0],
        "reads": reads,
        "allowance": 0,
        "version": -1,
    }
    of_run = [key(run) for key in (keys.spec, keys.state, keys.journal, keys.initial)]
    spec, weights = config.model_dump_json(by_alias=True), initial[1] if initial is not None else b""
    parts: list[str] = []
    try:
        is_created = False
        while not is_created:  # until then `prune.delete_strays` deletes the parts, as they are of no run
            if state is not None:
                counters = asdict(checkpoints.Counters())
                parts = checkpoints.part_keys(run, checkpoints.parts_of(state[1], token=0, number=0))
                pointer = checkpoints.store_parts(client, run, 0, 0, state[1], counters)
                fields["checkpoint"] = json.dumps(pointer)
            args = [run, spec, weights, fields["created_ms"], fields]
            is_created = call(client, "create_run", [*of_run, keys.RUNS, keys.OPEN, *parts], args) >= 0
    except BaseException:
        if parts and not client.hexists(keys.state(run), "status"):  # only the reply may have been lost
            client.unlink(*parts)
        raise
    return run


def _mirrored(config: RunConfig) -> dict[Any, Any]:
    """Return what scripts, other runs' dispatchers and clients in other languages read from the state."""
    return {
        "wire": json.dumps({"format": WIRE_FORMAT, "append": digest("append")}),
        "max_bytes": int(config.replay.max_bytes),
        "weight": config.weight,
        "priority": config.priority,
        "segment_ms": round(1e3 * config.rollout.segment_s),
        "limit_ms": round(1e3 * (config.rollout.segment_s + 2 * config.rollout.step_timeout_s)),
    }


# --- reading ------------------------------------------------------------------------------------------


def names(client: Redis) -> list[str]:
    """Return all run ids, oldest first."""
    return [run.decode() for run in cast("list[bytes]", client.zrange(keys.RUNS, 0, -1))]


def open_names(client: Redis) -> list[str]:
    """Return the runs that have not ended, or whose results are not complete, oldest first."""
    return [run.decode() for run in cast("list[bytes]", client.zrange(keys.OPEN, 0, -1))]


def active_names(client: Redis, *others: str) -> list[str]:
    """Return the active runs, oldest first; also the open ones with other statuses."""
    statuses, known = {status.encode() for status in ("active", *others)}, open_names(client)
    with client.pipeline(transaction=False) as pipe:
        for run in known:
            pipe.hget(keys.state(run), "status")
        return [run for run, value in zip(known, pipe.execute(), strict=True) if value in statuses]


def resolve(client: Redis, name: str) -> str:
    """Return the run of that id, or the only one whose id starts with `name`; "last" is the newest of all.

    Raises:
        UnknownRunError: there is none.
        StoreError: `name` is the start of several.
    """
    known = names(client)
    if name in known:
        return name
    matches = known[-1:] if name == "last" else [run for run in known if name and run.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        hint = f"the newest is {known[-1]}" if known else "there are none yet; start one with `ddrl submit`"
        shown = name if name.isprintable() and name else repr(name)
        raise UnknownRunError(f"run {shown}: not on this server; {hint}")
    newest = ", ".join(matches[:-4:-1]) + (", ..." if len(matches) > 3 else "")
    raise StoreError(f"run {name}: {len(matches)} begin so ({newest}); give more of the id, or: last")


def state(client: Redis, run: str) -> RunState:
    """Return the state of a run.

    Raises:
        UnknownRunError: there is no such run.
    """
    if not (found := states(client, [run])):
        raise UnknownRunError(f"run {run}: not on this server; `ddrl runs` lists those that are")
    return found[0]


def states(client: Redis, runs: Sequence[str]) -> list[RunState]:
    """Return the states of those runs that are on the server, with one request."""
    names = list(_STATE_FIELDS.values())
    with client.pipeline(transaction=False) as pipe:
        for run in runs:
            pipe.hmget(keys.state(run), names)
            bounded.values(pipe, keys.counts(run), keys.COUNTS)
            pipe.exists(keys.lease(run))
            pipe.zscore(keys.OPEN, run)
        replies = iter(execute(pipe))
    states = []
    for run, values, counts, leased, opened in zip(runs, replies, replies, replies, replies, strict=True):
        texts = {name: value.decode() for name, value in zip(names, values, strict=True) if value is not None}
        found = decode_state(texts | readable(dict(zip(keys.COUNTS, counts, strict=True))))
        if "status" not in found:
            continue
        if found["status"] == "active":
            found["reason"] = "" if leased else "waiting for a learner"
        elif found["status"] in ENDED:
            found["outcome"] = found["status"]
            found["status"] = found["status"] if opened is None else "ending"
        states.append(RunState(run=run, leased=bool(leased), **found))
    return states


def decode_state(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return attributes of `RunState` from those fields of the hash that are there.

    Raises:
        ValueError, TypeError: a field has another type.
    """
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    found: dict[str, Any] = {}
    for name, field_name in _STATE_FIELDS.items():
        if (text := fields.get(field_name)) is not None:
            kind = kinds.get(RunState.__annotations__[name])
            if name.endswith("_s"):
                found[name] = int(text or 0) / 1e3
            else:
                found[name] = kind(text) if kind else dict(json.loads(text))
    return found


def readable(counts: Mapping[str, bytes | None]) -> dict[str, str]:
    """Return those fields of `counts` that are there, as text; numbers as whole ones, at least 0."""
    return {
        name: short_text(value) if name == "error" else str(max(0, int(number(value))))
        for name, value in counts.items()
        if value is not None and name in keys.COUNTS
    }


def status(client: Redis, run: str) -> str | None:
    """Return the status alone, or None if the run is gone: one cheap read."""
    value = cast("bytes | None", client.hget(keys.state(run), "status"))
    return value.decode() if value is not None else None


def spec(client: Redis, run: str) -> dict[str, Any]:
    """Return the resolved config of a run as it is stored, unchecked.

    Raises:
        UnknownRunError: there is no such run.
    """
    if (stored := client.get(keys.spec(run))) is None:
        raise UnknownRunError(f"run {run}: not on this server; `ddrl runs` lists those that are")
    return cast("dict[str, Any]", json.loads(cast(bytes, stored)))


def config(client: Redis, run: str) -> RunConfig:
    """Return the resolved config of a run.

    Raises:
        UnknownRunError: there is no such run.
        StoreError: this version of ddrl cannot read it.
    """
    from ddrl.config import ConfigError, validate_stored  # takes longer than a listing that needs no config

    try:
        return validate_stored(spec(client, run))
    except ConfigError as error:
        raise StoreError(
            f"run {run}: was stored by another version of ddrl ({error}); finish it with that version, or end it with "
            f"`ddrl stop {run}` and `ddrl delete {run}`"
        ) from None


def spaces(client: Redis, run: str) -> EnvSpec:
    """Return the spaces of the run's environment as of submit; a learner need not have the environment.

    Raises:
        UnknownRunError: there is no such run.
    """
    if (raw := client.hget(keys.state(run), "spaces")) is None:
        raise UnknownRunError(f"run {run}: not on this server; `ddrl runs` lists those that are")
    try:
        return EnvSpec.from_json(json.loads(cast(bytes, raw)))
    except ValueError:
        raise StoreError(f"run {run}: was stored by another version of ddrl; submit it again") from None


def parent(source: str | None) -> str:
    """Return the run that a run's source names, such as "lunar-1@7" or "lunar-1, update 9"; "" for none."""
    return re.split("[@,]", source or "")[0]


def initial(client: Redis, run: str) -> bytes | None:
    """Return the initial weights as safetensors; None if the run starts from random ones."""
    return cast("bytes | None", client.get(keys.initial(run)))


def rollback(client: Redis, run: str) -> tuple[bytes | None, int]:
    """Return the weights to which the run's learner should go back, as safetensors, if any; and the revision."""
    revision = int(cast("bytes | None", client.hget(keys.state(run), "revision")) or 0)
    return cast("bytes | None", client.get(keys.rollback(run))), revision


def end_rollback(client: Redis, run: str, token: int, revision: int) -> None:
    """Note that the learner has gone back to what there was at that revision, and stored a checkpoint since.

    Raises:
        LeaseLostError: another learner took over.
    """
    call(client, "end_rollback", [keys.state(run), keys.rollback(run)], [token, revision])


def source(client: Redis, run: str) -> str:
    """Return the run from whose stream a run learns: itself, or the one that it shadows."""
    return (cast("bytes | None", client.hget(keys.state(run), "reads")) or run.encode()).decode()


def num_processes(client: Redis, run: str) -> int:
    """Return the processes that may play a run, as its learner's dispatcher has counted them last."""
    return int(cast("bytes | None", client.hget(keys.state(run), "processes")) or 0)


def sources(client: Redis) -> dict[str, str]:
    """Return the runs whose experience others learn from that have not ended, each with one of these."""
    names = open_names(client)
    with client.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.hget(keys.state(run), "reads")
        return {read.decode(): run for run, read in zip(names, pipe.execute(), strict=True) if read}


def elapsed_s(client: Redis, run: str) -> float:
    """Return the learning time up to the newest checkpoint."""
    from ddrl.store.checkpoints import Counters, newest_pointer  # loads pydantic

    pointer = newest_pointer(client, run)
    return Counters.decode(pointer["meta"]).elapsed_s if pointer else 0.0


def reserved_bytes(client: Redis, *, but: str | None = None) -> int:
    """Return the sum of the stream budgets of all runs that have not ended, except one."""
    return _sum_bytes(client, [run for run in open_names(client) if run != but], "max_bytes")


def go_back(client: Redis, run: str, token: int, largest: float, until: bytes) -> None:
    """Note that a run goes back to its newest checkpoint, and never learns from some of its entries again.

    Args:
        largest: entries up to `until` with a larger value are refused from now on, as they may be the reason.
        until: the last entry that was learned from.

    Raises:
        LeaseLostError: another learner took over.
    """
    fields = {"went_back": 1, "largest": min(largest, value_limit(client, run)[0]), "largest_until": until}
    call(client, "set_fields", [keys.state(run)] * 2, [token, fields])


def has_gone_back(client: Redis, run: str) -> bool:
    """Return whether a run went back since it began or was resumed."""
    return client.hexists(keys.state(run), "went_back")


def value_limit(client: Redis, run: str) -> tuple[float, bytes]:
    """Return the largest value and the last entry that `go_back` noted; infinity and 0-0 if it did not."""
    largest, until = cast("list[bytes | None]", client.hmget(keys.state(run), "largest", "largest_until"))
    return float(largest or "inf"), until or b"0-0"


def reserve(client: Redis, run: str, token: int, needed_bytes: int) -> int:
    """Store how many bytes of the server's memory a run may need, and return what other active runs may need.

    Raises:
        LeaseLostError: another learner took over.
    """
    call(client, "set_fields", [keys.state(run)] * 2, [token, "needed_bytes", needed_bytes])
    return budget(client, [name for name in active_names(client) if name != run])


def budget(client: Redis, names: list[str]) -> int:
    """Return how many bytes these runs may need together.

    A run whose learner has not stored its need counts with the budget of its stream.
    """
    return _sum_bytes(client, names, "needed_bytes", "max_bytes")


def _sum_bytes(client: Redis, names: list[str], *fields: str) -> int:
    """Return the sum over some runs of the first of these fields of the state that is there."""
    with client.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.hmget(keys.state(run), fields)
        return sum(int(next(filter(None, values), 0)) for values in pipe.execute())


def journal(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """Return the changes of state or setting after an entry, oldest first, and the last entry's id.

    Each has `time_s` and the entry's fields; entries that cannot be read are left out.
    """
    rows, last_id = capped_streams.read(client, keys.journal(run), after, "event")
    most = LONGEST_FIELD
    rows = [
        {name[:most]: value if name == "time_s" else value[:most] for name, value in row.items()}
        for row in rows[-JOURNAL_LENGTH:]
    ]
    return [row for row in rows if row["event"] not in CHANGES or _is_change(row)], last_id


def _is_change(row: Mapping[str, str]) -> bool:
    """Return whether an entry tells of a setting that was changed."""
    with contextlib.suppress(KeyError, ValueError):
        from_json(row["from"]), from_json(row["to"])
        is_short = len(row["from"]) + len(row["to"]) <= 1_000
        is_named = re.fullmatch(r"[\w.]{1,100}", row["option"]) is not None
        return is_short and is_named and re.fullmatch(r"\d{1,16}", row["env_steps"]) is not None
    return False


def server_ms(client: Redis) -> int:
    """Return the server's clock in milliseconds; clocks of two machines are never compared."""
    seconds, micros = client.time()
    return seconds * 1000 + micros // 1000


# --- changing -----------------------------------------------------------------------------------------


def set_status(client: Redis, run: str, new: str, reason: str, *, token: int | None = None) -> bool:
    """Change the status if the present one allows it; return False otherwise.

    Args:
        token: of the learner; None is the operator, who needs no lease.

    An end stops play at once; whoever holds the run's lease then writes its results and calls `complete`.

    Raises:
        LeaseLostError, RunGoneError: another learner took over; the run is gone.
    """
    allowed = {"active": ("paused", "time", "stopped", "failed"), "paused": ("active",)}
    keys_ = [keys.state(run), keys.journal(run), keys.OPEN, keys.counts(run)]
    args = (new, reason, int(new in ENDED), run, JOURNAL_LENGTH, *allowed.get(new, ("active", "paused")))
    return bool(call(client, "set_status", keys_, [token or 0, *args]))


def complete(client: Redis, run: str, token: int, num_bytes: int = 0) -> None:
    """Note that the results of an ended run are complete; without effect on one that goes on again.

    Args:
        num_bytes: that its keys take; 0: unknown. A worker may write more later.

    Raises:
        LeaseLostError, RunGoneError: another learner took over; the run is gone.
    """
    call(client, "complete", [keys.state(run), keys.OPEN], [token, run, num_bytes, *ENDED])


def reactivate(client: Redis, run: str, *, more_time_s: float | None = None) -> None:
    """Let a paused or ended run continue.

    Args:
        more_time_s: new `stop.time`, counted from what has been learned so far; None leaves the limit alone.

    Raises:
        StoreError: the run is solved, or has reached a limit that is not raised.
        UnknownRunError: there is no such run.
    """
    now = state(client, run)
    if now.outcome == "solved":
        raise StoreError(f"run {run}: is solved; start another one with `ddrl submit`")
    if now.outcome == "time" and not now.reason.startswith("time limit"):
        raise StoreError(f"run {run}: reached its {now.reason}; start another one with a larger limit")
    if now.outcome == "time" and more_time_s is None:
        raise StoreError(f"run {run}: reached its {now.reason}; give it more, such as --time 10m")
    if more_time_s is not None:
        before = config(client, run)
        limit = before.stop.model_copy(update={"time": round(elapsed_s(client, run) + more_time_s, 1)})
        changes = {"stop.time": (before.stop.time, limit.time)}
        change(client, run, before.model_copy(update={"stop": limit}), changes, version=now.config_version)
    if now.status != "active":
        set_status(client, run, "active", "resumed")


def change(
    client: Redis, run: str, new: RunConfig, changes: Mapping[str, tuple[Any, Any]], *, version: int
) -> int:
    """Store a changed config, which learner, dispatcher and scripts then use.

    Args:
        client: connection to the server.
        run: its id.
        new: the whole config.
        changes: option -> (from, to), for the journal.
        version: `config_version` of the config that was changed.

    Returns:
        The new `config_version`.

    Raises:
        StoreError: the config was changed since it was read.
    """
    fields = _mirrored(new)
    rows = [part for name, values in changes.items() for part in (name, *map(json.dumps, values))]
    script_keys = [keys.spec(run), keys.state(run), keys.journal(run), keys.counts(run)]
    args = [version, new.model_dump_json(by_alias=True), JOURNAL_LENGTH, len(fields), fields, *rows]
    if not (reply := call(client, "change_config", script_keys, args)):
        raise StoreError(f"run {run}: its settings were changed meanwhile; look at them and try again")
    return cast(int, reply)


def mirror(client: Redis, run: str, token: int, config: RunConfig) -> None:
    """Repeat in the state the settings that scripts read: an earlier version of ddrl may have left some out.

    Raises:
        LeaseLostError: another learner took over.
    """
    call(client, "set_fields", [keys.state(run)] * 2, [token, _mirrored(config)])


def note(client: Redis, run: str, event: str, reason: str) -> None:
    """Add to the run's journal."""
    capped_streams.add(client, run, keys.journal(run), length=JOURNAL_LENGTH, event=event, reason=reason)


def note_evaluation(client: Redis, run: str, token: int, evaluation: Mapping[str, Any]) -> None:
    """Store the evaluation that describes the run: version, return_mean, return_std, episodes.

    Raises:
        LeaseLostError: another learner took over.
    """
    call(client, "set_fields", [keys.state(run)] * 2, [token, "evaluation", json.dumps(dict(evaluation))])


def reported(client: Redis, run: str, tracker: str) -> dict[str, dict[str, str]]:
    """Return how far a run has been reported to a tracker: by place, as of `note_reported`."""
    found = cast("bytes | None", client.hget(keys.state(run), f"reported_{tracker}"))
    return cast("dict[str, dict[str, str]]", json.loads(found or b"{}"))


def note_reported(client: Redis, run: str, token: int, tracker: str, ends: Mapping[str, Any]) -> None:
    """Store how far a run has been reported to a tracker, by the place where that keeps it.

    Raises:
        LeaseLostError: another learner took over.
    """
    call(client, "set_fields", [keys.state(run)] * 2, [token, f"reported_{tracker}", json.dumps(ends)])


def request_handover(client: Redis, run: str, host: str) -> None:
    """Ask the run's learner to hand it over; the next learner that takes the lease ends the request."""
    call(client, "request_handover", [keys.state(run), keys.journal(run)], [host, JOURNAL_LENGTH])


def delete(client: Redis, run: str) -> int:
    """Remove an ended run with all its keys; return the number of keys removed.

    Raises:
        StoreError: the run has not ended, its learner is still at work, or another run learns from it.
        UnknownRunError: there is no such run.
    """
    now = state(client, run)
    if not now.ended:
        raise StoreError(f"run {run}: is {now.status}; stop it first with `ddrl stop {run}`")
    if now.leased:
        raise StoreError(f"run {run}: its learner on {now.host} still writes its results; try again soon")
    if reader := sources(client).get(run):
        raise StoreError(f"run {run}: {reader} learns from it; stop that first with `ddrl stop {reader}`")
    script_keys = [keys.state(run), keys.lease(run), keys.RUNS, keys.OPEN, keys.DELETED]
    if not call(client, "delete_run", script_keys, [run, DELETED_MS, *ENDED]):
        raise StoreError(f"run {run}: goes on again; stop it first with `ddrl stop {run}`")
    rest, num = bounded.names(client, keys.run_pattern(run)), 1
    while batch := list(islice(rest, DELETED_AT_ONCE)):
        num += client.unlink(*batch)
    return num
