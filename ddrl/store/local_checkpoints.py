"""The local checkpoint: a snapshot of a run in the run's folder, from which a server gets the run again.

A snapshot is the newest checkpoint and the run's record: config, state and producers. The replay, evaluations, metrics
and the journal are not in it. `checkpoint/checkpoint.json` names the file of tensors and is renamed into place last, so
that a reader finds one whole snapshot, the new one or the one before.

Snapshots are compared by (fencing token, updates): a later learner's snapshot is newer, whatever its updates.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import socket
import threading
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from redis import Redis
from typing_extensions import TypedDict

from ddrl.store import bounded, checkpoints, keys, leases, ledger, runs, weights
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import RunGoneError, StoreError, call, execute
from ddrl.store.runs import JOURNAL_LENGTH, UnknownRunError
from ddrl.store.untrusted import number, text

log = logging.getLogger(__name__)

FORMAT: Literal[1] = 1
FOLDER = "checkpoint"  # in the run's folder
POINTER = "checkpoint.json"
SPARE_PRODUCERS = 1_000  # ids not given again: the lost server may have given them after the snapshot
MOST_BYTES = 2**50  # that a restored run takes for appended: a worker may have written any number
_NOT_RESTORED = {  # fields of the state that hold for one server only
    *("checkpoint", "fence", "allowance", "allowance_id", "players", "claim", "claim_until_ms"),
    *(
        "virtual_ms",
        "away_ms",
        "mean_processes",
        "useful_processes",
        "processes",
        "handover",
        "evaluation",
        "host",
        "folder",
    ),
}


@dataclass(frozen=True)
class Record:
    """The state of a run on its server, without experience, weights and checkpoint.

    Attributes:
        spec: the config as JSON.
        state: fields of the run's state and counts.
        producers: each producer's line, as the append keeps it.
    """

    spec: str
    state: Mapping[str, str]
    producers: Mapping[checkpoints.Producer, str]


@dataclass(frozen=True)
class Snapshot:
    """A run outside its server.

    Attributes:
        run: its id.
        token: fencing token of the learner that took the snapshot.
        record: what the server knew of the run.
        meta: of the checkpoint: `checkpoints.Counters` as plain data.
        blob: tensors of the checkpoint, safetensors.
    """

    run: str
    token: int
    record: Record
    meta: Mapping[str, Any]
    blob: bytes

    @property
    def counters(self) -> Counters:
        """The learner's progress in it."""
        return Counters.decode(self.meta)

    @property
    def version(self) -> int:
        """The latest version of the weights that was published before the snapshot; -1: none."""
        return max(int(self.record.state.get("version", -1)), self.counters.version)


def record(client: Redis, run: str) -> Record:
    """Read a run's record.

    Raises:
        RunGoneError: the server does not know the run.
    """
    with client.pipeline(transaction=True) as pipe:
        pipe.get(keys.spec(run))
        pipe.get(keys.PRODUCERS)
        pipe.hgetall(keys.state(run))
        bounded.values(pipe, keys.counts(run), keys.COUNTS)
        bounded.ask_fields(pipe, keys.producers(run))
        spec, last, raw, values, listed = execute(pipe)
    if spec is None or b"status" not in raw:
        raise RunGoneError(f"run {run}: the server does not know it any more")
    state = {name.decode(): value.decode() for name, value in raw.items()}
    state |= runs.readable(dict(zip(keys.COUNTS, values, strict=True)))
    kept = {name: value for name, value in state.items() if name not in _NOT_RESTORED}
    producers = {text(name): text(value) for name, value in bounded.paired(listed).items()}
    given = (name for name in producers if checkpoints.PRODUCER.fullmatch(name) and int(name) <= number(last))
    return Record(spec.decode(), kept, {name: producers[name] for name in given})


# --- the file --------------------------------------------------------------------------------------------


def write(folder: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot in a run's folder, unless a later learner's is there.

    Raises:
        OSError: it cannot be written; the one before is intact.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    if token(folder, snapshot.run) > snapshot.token:
        return
    checksum = zlib.crc32(snapshot.blob)
    tensors = place / f"{snapshot.token}-{snapshot.counters.updates}-{checksum:08x}.safetensors"
    pointer = {
        "format": FORMAT,
        "run": snapshot.run,
        "token": snapshot.token,
        "tensors": tensors.name,
        "bytes": len(snapshot.blob),
        "crc32": checksum,
        "meta": snapshot.meta,
        "known": asdict(snapshot.record),
    }
    is_new = not tensors.exists()
    try:
        write_whole(tensors, snapshot.blob)
        if token(folder, snapshot.run) > snapshot.token:  # this learner stalled meanwhile and was replaced
            tensors.unlink()
            return
        write_whole(place / POINTER, json.dumps(pointer).encode())
    except OSError:
        if is_new:
            tensors.unlink(missing_ok=True)
        raise
    for file in place.iterdir():
        if file.name not in (tensors.name, POINTER):
            file.unlink(missing_ok=True)


def read(folder: Path) -> Snapshot | None:
    """Read the snapshot in a run's folder; None if there is none.

    Raises:
        StoreError: it is damaged.
    """
    if (pointer := _pointer(folder)) is None:
        return None
    path = folder / FOLDER / pointer["tensors"]
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}); remove {folder / FOLDER}") from None
    if len(blob) != pointer["bytes"] or zlib.crc32(blob) != pointer["crc32"]:
        raise StoreError(f"{path}: damaged, {len(blob)} bytes; remove {folder / FOLDER}")
    return Snapshot(pointer["run"], pointer["token"], pointer["known"], pointer["meta"], blob)


def token(folder: Path, run: str) -> int:
    """Return the fencing token of the snapshot in a run's folder; 0 if there is none that can be read."""
    with contextlib.suppress(StoreError):
        if (pointer := _pointer(folder)) is not None and pointer["run"] == run:
            return int(pointer["token"])
    return 0


class _Pointer(TypedDict):
    """The content of `checkpoint.json`."""

    format: Literal[1]
    run: str
    token: int
    tensors: Annotated[str, Field(pattern=r"^[\w-]+\.safetensors$")]
    bytes: int
    crc32: int
    meta: dict[str, Any]
    known: Record


def _pointer(folder: Path) -> _Pointer | None:
    """Read `checkpoint.json`; None if there is none.

    Raises:
        StoreError: it is damaged, or of another version of ddrl.
    """
    path = folder / FOLDER / POINTER
    try:
        pointer = TypeAdapter(_Pointer).validate_json(path.read_bytes())
        Counters.decode(pointer["meta"])
        known = pointer["known"]
        TypeAdapter(dict[str, Any]).validate_json(known.spec)
        runs.decode_state(known.state)
        int(known.state.get("folded", 0)), int(known.state.get("retired", 0))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error}); remove the folder {path.parent}") from None
    except (ValueError, TypeError, RecursionError):
        raise StoreError(
            f"{path}: not a checkpoint that this version of ddrl reads; remove {path.parent}"
        ) from None
    return pointer


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def acquire(client: Redis, run: str, folder: Path, *, force: bool = False) -> int | None:
    """Take the lease of a run for its folder on this machine; see `leases.acquire`."""
    host, after = socket.gethostname(), token(folder, run)
    return leases.acquire(client, run, host=host, folder=str(folder.resolve()), force=force, after=after)


class BackgroundWriter:
    """Writes snapshots in a thread of its own, so that a disk that hangs does not stop the learner.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: queue.Queue[Snapshot | None] = queue.Queue(maxsize=1)
        self._logged = ""  # reason of the failure that was logged last
        self._thread = threading.Thread(target=self._run, name="local checkpoint", daemon=True)
        self._thread.start()

    def put(self, snapshot: Snapshot) -> None:
        """Have a snapshot written; one that still waits is replaced."""
        with contextlib.suppress(queue.Empty):
            self._waiting.get_nowait()
        self._waiting.put(snapshot)

    def close(self, timeout_s: float = 30.0) -> None:
        """Wait until the last snapshot is written, or cannot be."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (snapshot := self._waiting.get()) is not None:
            reason = ""
            try:
                write(self._folder, snapshot)
            except OSError as error:
                reason = error.strerror or str(error)
            if reason and reason != self._logged:
                text = "%s: the checkpoint cannot be written (%s); retrying at the next one"
                log.warning(text, self._folder / FOLDER, reason)
            elif self._logged and not reason:
                log.info("%s: the checkpoint is written again", self._folder / FOLDER)
            self._logged = reason


# --- restoring -------------------------------------------------------------------------------------------


def restore_newer(client: Redis, run: str, lease_token: int, folder: Path) -> bool:
    """Make the snapshot in a run's folder the run's checkpoint if the server's data are older; log and journal it.

    Args:
        client: connection to the server, which knows the run.
        run: its id.
        lease_token: of the caller, who holds the run.
        folder: the run's.

    Raises:
        LeaseLostError: another learner took over.
    """
    pointer, latest = checkpoints.newest_pointer(client, run), weights.index(client, run).latest
    stored = (pointer["token"], pointer["meta"].get("updates", 0), latest) if pointer else (-1, -1, -1)
    if token(folder, run) < max(stored[0], 1):
        return False
    try:
        snapshot = read(folder)
    except StoreError as error:
        log.warning("%s", error)
        return False
    if snapshot is None or (snapshot.token, snapshot.counters.updates, snapshot.version) <= stored:
        return False
    # A version that was published before must not be given to other weights.
    meta = {**snapshot.meta, "version": snapshot.version if snapshot.version > latest else -1}
    checkpoints.save(client, run, lease_token, snapshot.blob, meta)
    _recount(client, lease_token, snapshot)
    reason = f"from the local checkpoint of update {snapshot.counters.updates}: the server's data were older"
    log.warning("%s: restored %s", run, reason)
    runs.note(client, run, "restored", reason)
    return True


def _recount(client: Redis, lease_token: int, snapshot: Snapshot) -> None:
    """Raise the counts of an older server to those of the fragments that the snapshot's learner has read."""
    counters, producers = snapshot.counters, []
    for name, values in counters.ledger.items():
        row = ledger.Row(*values)
        if row.last_seq >= 0:
            line = _producer_line(row, snapshot.record.producers.get(name, ""))
            producers += [name, row.incarnation, row.last_seq, line]
    last, run = _last_producer(snapshot) + SPARE_PRODUCERS, snapshot.run
    script_keys = [keys.state(run), keys.producers(run), keys.PRODUCERS, keys.counts(run)]
    args = [lease_token, max(counters.fragments, 0), counters.env_steps, last, *producers]
    call(client, "recount", script_keys, args)


def find(client: Redis, name: str, folder: Path) -> str:
    """Return the id of a run: on the server as `runs.resolve` finds it, else of a local checkpoint.

    Args:
        client: connection to the server.
        name: of the run, or its beginning.
        folder: of the runs' folders.

    Raises:
        UnknownRunError: there is none, or several local checkpoints match.
    """
    try:
        return runs.resolve(client, name)
    except UnknownRunError as error:
        found = [path.parent.parent.name for path in folder.glob(f"*/{FOLDER}/{POINTER}")]
        matches = [name] if name in found else [run for run in found if name and run.startswith(name)]
        if len(matches) != 1:
            raise UnknownRunError(f"{error}; no checkpoint of it is in {folder} either") from None
        return matches[0]


def find_or_restore(client: Redis, name: str, folder: Path) -> str:
    """Return the id of a run; restore the run from its local checkpoint if the server does not know it.

    Args:
        client, name, folder: see `find`.

    Raises:
        UnknownRunError: the server does not know the run, and there is no local checkpoint.
    """
    run = find(client, name, folder)
    if runs.status(client, run) is None:
        restore_from(client, run, folder / run, even_deleted=True)
    return run


def restore_from(client: Redis, run: str, folder: Path, *, even_deleted: bool = False) -> bool:
    """Restore a run from the local checkpoint in its folder, and log it; see `restore`.

    Raises:
        UnknownRunError: there is no local checkpoint of it.
        StoreError: the run was deleted, or the local checkpoint is damaged.
    """
    snapshot, place = read(folder), folder / FOLDER
    if snapshot is None or snapshot.run != run:
        raise UnknownRunError(f"run {run}: not on this server, and there is no checkpoint of it in {place}")
    if is_restored := restore(client, snapshot, even_deleted=even_deleted):
        text = (
            "%s: the server does not know it; restored from %s at update %d; later experience, the replay, weights, "
            "evaluations, metrics and the journal are lost"
        )
        log.warning(text, run, place, snapshot.counters.updates)
    return is_restored


def restore(client: Redis, snapshot: Snapshot, *, even_deleted: bool = False) -> bool:
    """Give a run to a server that does not know it, whole or not at all; whoever leases it goes on from the snapshot.

    Args:
        client: connection to the server.
        snapshot: of the run.
        even_deleted: also where the run was deleted with `ddrl prune` or `ddrl delete`.

    Returns:
        False if the server knows the run, or was emptied meanwhile; look at the run again then.

    Raises:
        StoreError: the run was deleted.
    """
    run, state, counters = snapshot.run, snapshot.record.state, snapshot.counters
    # A token that neither a learner of the lost server nor another restore has.
    fence = snapshot.token + 1 + secrets.randbits(32)
    rows = {int(producer): ledger.Row(*row) for producer, row in counters.ledger.items()}
    num_fragments = sum(row.decided for row in rows.values())
    unlisted = [int(name) for name in snapshot.record.producers if name.isdecimal() and int(name) not in rows]
    num_bytes = min(int(number(state.get("appended_bytes", "").encode())), MOST_BYTES)
    # The weights are lost: the checkpoint's own are published as the next version.
    pointer = checkpoints.store_parts(client, run, fence, 0, snapshot.blob, {**snapshot.meta, "version": -1})
    fields = {
        **state,
        "updates": counters.updates,
        "version": snapshot.version,
        "appended_fragments": max(num_fragments, counters.fragments),
        "appended_steps": counters.env_steps,
        "appended_bytes": num_bytes,
        "trimmed_bytes": num_bytes,
        "allowance": 0,  # until the learner publishes
        "fence": fence,
        # A producer that the snapshot does not list appends no more: it may have been folded since.
        "folded": max([int(state.get("folded", 0)), int(state.get("retired", 0)), *unlisted]),
        "checkpoint": json.dumps(pointer),
    }
    producers = {
        producer: _producer_line(row, snapshot.record.producers.get(str(producer), ""))
        for producer, row in rows.items()
        if producer == ledger.ENDED or row.last_seq >= 0
    }
    ledger_fields = {str(producer): row.encode() for producer, row in rows.items()}
    of_run = (keys.state, keys.spec, keys.producers, keys.ledger, keys.weights, keys.experience, keys.journal)
    others = (keys.RUNS, keys.PRODUCERS, keys.DELETED, keys.OPEN, keys.counts(run))
    counts = {name: str(fields.pop(name)) for name in keys.COUNTS if name in fields}
    args = [
        *(run, json.dumps({name: str(value) for name, value in fields.items()}), snapshot.record.spec),
        *(json.dumps(producers), json.dumps(ledger_fields | {"cursor": counters.cursor})),
        *(fields["version"], counters.cursor, f"from the local checkpoint of update {counters.updates}"),
        *(state.get("created_ms", "0"), _last_producer(snapshot) + SPARE_PRODUCERS),
        *(int(even_deleted), JOURNAL_LENGTH, json.dumps(counts)),
    ]
    parts = checkpoints.part_keys(run, pointer)
    reply = call(client, "restore_run", [*(key(run) for key in of_run), *others, *parts], args)
    if reply != 1:
        client.unlink(*parts)
    if reply == -1:
        raise StoreError(f"run {run}: was deleted; restore it from its folder with `ddrl resume {run}`")
    return bool(reply == 1)


def _last_producer(snapshot: Snapshot) -> int:
    """Return the largest id that the lost server may have given; entries of a worker's own may name any."""
    given = [0, *map(int, snapshot.record.producers)]
    most = max(given) + SPARE_PRODUCERS
    return max(one for one in [*given, *map(int, snapshot.counters.ledger)] if one <= most)


def _producer_line(row: ledger.Row, line: str) -> str:
    """Return a producer as the append keeps it, with the fragments that the learner knows of."""
    producer = ledger.Producer.decode(line.encode()) if line else ledger.Producer()
    seq = max(row.last_seq, 0)
    return replace(producer, incarnation=str(row.incarnation), seq=seq, fragments=row.decided).encode()
