"""Checkpoints: the learner's full state in parts of at most 4 MB, then one fenced flip of the pointer.

A large SET stalls every other client of the server (100 MB: 0.8 s; 4 MB: 20 ms), hence the parts. Their names hold the
writer's token, so that a learner that was replaced overwrites nothing.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, cast

from pydantic import Field, TypeAdapter
from redis import Redis
from redis.exceptions import ResponseError
from typing_extensions import TypedDict

from ddrl.store import bounded, keys
from ddrl.store.connection import StoreError, call
from ddrl.store.untrusted import PRODUCER_ID

PART_BYTES = 4 * 1024**2
REPLAY = "replay."  # prefix of the replay's tensors
DROPPED_AT_ONCE = 1_000  # parts, as a script's stack is limited

EntryId = Annotated[str, Field(pattern=r"^\d+-\d+$")]
PRODUCER = re.compile(f"-?{PRODUCER_ID}")
Producer = Annotated[str, Field(pattern=f"^{PRODUCER.pattern}$")]
Row = Annotated[Sequence[int], Field(max_length=5)]


@dataclass(frozen=True)
class Counters:
    """The progress of a learner: what a checkpoint holds besides tensors.

    Attributes:
        updates: of the algorithm.
        env_steps: transitions appended up to the cursor; the axis of curves and of the rate limiter.
        admitted: fragments admitted to the view, each counted once.
        dead: entries refused.
        elapsed_s: of learning, over all learners of the run.
        cursor: last entry taken from the stream.
        oldest: first entry that is held; the one after the cursor if none is.
        dropped: fragments admitted and not learned from, because they were too stale.
        waiting: fragments admitted and not learned from yet; on-policy only.
        version: of the published weights if these are the checkpoint's own; -1 otherwise.
        fragments: cumulative count of the stream at the cursor; -1 if it is not known.
        ledger: producer -> consumed, refused, unread, incarnation, last_seq (see `ledger.Row`); {} between checkpoints.
        held: transitions of the view.
        refilled: steps that were played again to fill a view whose stream was lost; the rate limiter ignores them.
    """

    updates: int = 0
    env_steps: int = 0
    admitted: int = 0
    dead: int = 0
    elapsed_s: float = 0.0
    cursor: EntryId = "0-0"
    oldest: EntryId = "0-0"
    dropped: int = 0
    waiting: int = 0
    version: int = -1
    fragments: int = -1
    ledger: Mapping[Producer, Row] = field(default_factory=dict)
    held: int = 0
    refilled: int = 0

    @classmethod
    def decode(cls, meta: Mapping[str, Any]) -> Counters:
        """Return what `asdict` made; fields of other versions of ddrl are left out.

        Raises:
            ValueError: a field has another type.
        """
        return TypeAdapter(cls).validate_python(meta)


class Parts(TypedDict):
    """The parts of a checkpoint: the writer's token and the checkpoint's number, which name them, and their count."""

    token: int
    number: int
    parts: Annotated[int, Field(ge=1, le=1_000_000)]


class Pointer(Parts):
    """The newest checkpoint, in the run's state: its parts, their length in bytes and checksum, and its `Counters`."""

    bytes: int
    crc32: int
    meta: dict[str, Any]


def save(client: Redis, run: str, token: int, blob: bytes, meta: Mapping[str, Any]) -> None:
    """Store a checkpoint; the previous one stays until this one is complete, and if the server refuses a part.

    Args:
        client: connection to the server.
        run: its id.
        token: fencing token.
        blob: tensors, safetensors.
        meta: `Counters` as plain data, JSON.

    Raises:
        LeaseLostError: another learner took over; nothing of this checkpoint is left.
    """
    previous = newest_pointer(client, run)
    number = previous["number"] + 1 if previous else 0
    try:
        pointer = store_parts(client, run, token, number, blob, meta, fence=token)
        old = part_keys(run, previous) if previous else []
        call(client, "flip_checkpoint", [keys.state(run), *old], [token, json.dumps(pointer)])
    except (StoreError, ResponseError):
        stray = part_keys(run, parts_of(blob, token=token, number=number))
        found = newest_pointer(client, run)  # a flip that was sent twice may have been refused once
        if found is None or part_keys(run, found) != stray:
            client.unlink(*stray)
        raise


def parts_of(blob: bytes, *, token: int, number: int) -> Parts:
    """Return how a checkpoint's parts are named."""
    return Parts(token=token, number=number, parts=-(-len(blob) // PART_BYTES) or 1)


def store_parts(
    client: Redis, run: str, token: int, number: int, blob: bytes, meta: Mapping[str, Any], *, fence: int = 0
) -> Pointer:
    """Store the parts of a checkpoint and return the pointer that will name them.

    Args:
        client: connection to the server.
        run: its id.
        token, number: of their names.
        blob, meta: as of `save`.
        fence: token of the run's learner; 0: the run may not be on the server.

    Raises:
        LeaseLostError: another learner took over.
    """
    parts = [blob[start : start + PART_BYTES] for start in range(0, len(blob), PART_BYTES)] or [b""]
    names = Parts(token=token, number=number, parts=len(parts))
    for key, data in zip(part_keys(run, names), parts, strict=True):
        call(client, "store_part", [keys.state(run), key], [fence, data])
    return Pointer(**names, bytes=len(blob), crc32=zlib.crc32(blob), meta=dict(meta))


def load(client: Redis, run: str) -> tuple[bytes, dict[str, Any]] | None:
    """Return the newest checkpoint as (tensors, meta), or None.

    Raises:
        StoreError: parts are missing or damaged.
    """
    if (pointer := newest_pointer(client, run)) is None:
        return None
    blob = b"".join(cast("bytes | None", client.get(key)) or b"" for key in part_keys(run, pointer))
    if len(blob) != pointer["bytes"] or zlib.crc32(blob) != pointer["crc32"]:
        if newest_pointer(client, run) != pointer:  # another one has replaced it meanwhile
            return load(client, run)
        raise StoreError(
            f"run {run}: checkpoint {pointer['number']} is damaged ({len(blob)} of {pointer['bytes']} bytes); "
            "restore the server's data or start the run anew"
        )
    return blob, pointer["meta"]


def sweep(client: Redis, run: str, token: int) -> int:
    """Remove parts that no pointer names: of a learner that died while it saved. Return their number.

    Call it as the run's learner, before the first save; parts of later learners stay.

    Raises:
        LeaseLostError: another learner took over; its parts stay.
    """
    pointer = newest_pointer(client, run)
    named = {key.encode() for key in part_keys(run, pointer)} if pointer else set()
    found = bounded.names(client, keys.checkpoint_pattern(run))
    stray = (key for key in found if key not in named and keys.checkpoint_token(key) < token)
    batches = iter(lambda: [*islice(stray, DROPPED_AT_ONCE)], [])
    return sum(call(client, "drop_parts", [keys.state(run), *some], [token]) for some in batches)


def newest_pointer(client: Redis, run: str) -> Pointer | None:
    """Return the newest checkpoint's pointer; None if there is none.

    Raises:
        StoreError: it is damaged.
    """
    if not (raw := cast("bytes | None", client.hget(keys.state(run), "checkpoint"))):
        return None
    try:
        pointer = TypeAdapter(Pointer).validate_json(raw)
        Counters.decode(pointer["meta"])
    except ValueError:
        raise StoreError(
            f"run {run}: the pointer to its checkpoint is damaged ({raw[:80]!r}); restore the server's data or start "
            "the run anew"
        ) from None
    return pointer


def part_keys(run: str, pointer: Parts) -> list[str]:
    """Return the keys of a checkpoint's parts."""
    token, number = pointer["token"], pointer["number"]
    return [keys.checkpoint_part(run, token, number, part) for part in range(pointer["parts"])]
