"""The experience stream: the single-call append of collectors, the reads and trims of the learner.

An entry holds a fragment's fields (codec.py) and what the append writes: `f`, `n`, `b`: cumulative fragments,
transitions and bytes, this entry included; `s`: this entry's bytes; `p`, `i`, `q`: producer, incarnation, seq.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from pydantic import FailFast, Field, Json, TypeAdapter, ValidationError
from redis import Redis
from typing_extensions import TypedDict

from ddrl.store import bounded, capped_streams, keys
from ddrl.store.connection import UNREACHABLE, ReplyTooLongError, StoreError, call, execute
from ddrl.store.untrusted import Count, Number, number

if TYPE_CHECKING:
    from ddrl.config import Durability

ENTRY_OVERHEAD_BYTES = 128  # of an entry in the server: measured 75 to 83, counters and names besides
REPLY_BYTES = 8 * 1024**2  # aim for one read
MOST_AT_ONCE = 128  # entries
UNREADABLE = (ReplyTooLongError, *UNREACHABLE)
"""Errors of a read whose reply is too large, for the client or for the server, which then closes the connection."""
APPENDED = (b"f", b"n", b"b", b"s", b"p", b"i", b"q")  # numbers that the append adds to a fragment's fields
LONGEST_COUNT = 19  # digits of one
EPISODES_LENGTH = 20_000
MOST_LOWERED = 200_000  # entries of experience that get new ids at once: a second or two of the server's
MOST_RETURNS = 200_000  # of episodes that are read at once
DEAD_LENGTH = 1_000
MOST_SEQ = 2**63 - 1
IDS_TRIED = 20  # of a new producer; others after the pause of a process that could not play


class _Episodes(TypedDict):
    """A row of the episodes stream."""

    time_s: float
    env_steps: Count
    returns: Json[Annotated[list[Number], FailFast(), Field(max_length=10_000)]]


_EPISODES = TypeAdapter(_Episodes)
_COUNT = re.compile(rb"-?\d{1,16}")  # below 0 where a worker wrote it


class Answer(Enum):
    """The answer to an append."""

    GO = "GO"  # written; play on
    WAIT = "WAIT"  # written; the allowance is used up
    YIELD = "YIELD"  # written; end the segment: the run is paused, the node leaves, or a run claims it
    FULL = "FULL"  # not written: the byte budget is used up; append the same again later
    STOPPED = "STOPPED"  # not written: the run has ended or is gone; the producer was folded (ledger.py) or another's


@dataclass(frozen=True)
class Appended:
    """The reply to an append.

    Attributes:
        answer: see `Answer`.
        version: latest published version of the weights.
        allowance_id: entry of the allowance stream that the answer rests on; wait for a later one.
        remaining_steps: what this producer should append next; negative when the allowance is overshot. One of
            many producers gets half of an even share of what is left, so that they overshoot little though none
            knows what the others have not sent yet (guided self-scheduling: Polychronopoulos and Kuck 1987).
        players: the number of these producers; from `remaining` only.
    """

    answer: Answer
    version: int
    allowance_id: bytes
    remaining_steps: int
    players: int = 1


@dataclass(frozen=True)
class Entry:
    """One entry of the stream, and the number of its producer's newest fragment, if that was looked up."""

    entry_id: bytes
    fields: Mapping[bytes, bytes]
    newest_seq: int = MOST_SEQ

    def count(self, name: bytes, default: int = 0) -> int:
        """Return a number that the append wrote; `default` if it is missing or malformed."""
        value = self.fields.get(name, b"")
        return int(value) if value.isdigit() and len(value) < 20 else default

    @property
    def counted(self) -> tuple[int, ...]:
        """Fragments, transitions and bytes up to and with this one, as its append counted; () if one is malformed."""
        values = [self.fields.get(name, b"") for name in APPENDED[:3]]
        return tuple(map(int, values)) if all(map(_COUNT.fullmatch, values)) else ()

    @property
    def num_bytes(self) -> int:
        """Size of the fragment with its overhead in the server, as the append counts it."""
        own = ((name, value) for name, value in self.fields.items() if name not in APPENDED)
        return sum(len(name) + len(value) for name, value in own) + ENTRY_OVERHEAD_BYTES

    @property
    def producer(self) -> int:
        """Id of the producer; -1 (`ledger.UNKNOWN`) if no append wrote the entry."""
        return self.count(b"p", -1)


def new_producer(client: Redis, run: str) -> int:
    """Return an id that no other collector has or had on this server, and that no other appends to the run with.

    Raises:
        StoreError: the next ones are taken.
    """
    for _ in range(IDS_TRIED):
        # Workers may not INCRBY, which redis-py's `incr` sends.
        producer = cast(int, cast(Any, client).execute_command("INCR", keys.PRODUCERS))
        # A worker may have made one up, or an older server have given it.
        if not client.hexists(keys.producers(run), str(producer)):
            return producer
    raise StoreError(f"run {run}: a worker has taken the next ids of producers; try again in a minute")


def append(
    client: Redis,
    run: str,
    fields: Mapping[bytes, bytes],
    *,
    producer: int,
    incarnation: int,
    seq: int,
    num_transitions: int,
    episode_returns: Sequence[float] = (),
    played_ms: int = 0,
    process_ms: int = 0,
    allowance_wait_ms: int = 0,
    room_wait_ms: int = 0,
    host: str = "-",
    node: str = "-",
    pid: int = 0,
    durability: Durability = "process",
) -> Appended:
    """Append a fragment once; a repeated call writes nothing and is answered by the present state.

    Args:
        fields: the encoded fragment.
        producer, incarnation, seq: its identity.
        num_transitions: what it adds to `env_steps`.
        episode_returns: of the training episodes that ended in it.
        played_ms: time that the play took; the first fragment dates the run's first step by it.
        process_ms: of the process since its last append, waits included.
        allowance_wait_ms, room_wait_ms: of these, waited for the learner, and for room in the stream.
        host, node, pid: where it was played, by which worker and which of its processes.
        durability: of the run.
    """
    size = sum(len(name) + len(value) for name, value in fields.items()) + ENTRY_OVERHEAD_BYTES
    of_run = (keys.state, keys.counts, keys.experience, keys.episodes, keys.draining, keys.producers)
    returns = json.dumps([round(value, 3) for value in episode_returns]) if episode_returns else ""
    who = (producer, incarnation, seq, num_transitions, size, played_ms, host, node, pid)
    args = [*who, returns, EPISODES_LENGTH, process_ms, allowance_wait_ms, room_wait_ms, fields]
    reply = call(client, "append", [key(run) for key in of_run], args, durability=durability)
    answer, version, allowance_id, remaining = cast("tuple[bytes, int, bytes, int]", reply)
    return Appended(Answer(answer.decode()), version, allowance_id, remaining)


def claim(client: Redis, run: str, processes: int, *, for_ms: int = 1000) -> None:
    """Ask processes to end their segments of a run at their next append, for another run.

    Args:
        processes: their number; replaces an earlier claim.
        for_ms: after which the claim lapses.
    """
    call(client, "claim", [keys.state(run), keys.counts(run)], [processes, for_ms])


def read(client: Redis, run: str, cursor: bytes, *, count: int, until: bytes = b"+") -> list[Entry]:
    """Return at most `count` entries after `cursor` up to `until`, oldest first."""
    raw = cast("list[Any]", client.xrange(keys.experience(run), min=b"(" + cursor, max=until, count=count))
    return [Entry(entry_id, fields) for entry_id, fields in raw]


def newest(client: Redis, run: str, count: int) -> list[Entry]:
    """Return at most `count` of the newest entries, oldest first."""
    raw = cast("list[Any]", client.xrevrange(keys.experience(run), count=count))
    return [Entry(entry_id, fields) for entry_id, fields in reversed(raw)]


def pages(client: Redis, run: str, after: bytes, until: bytes) -> Iterator[list[Entry]]:
    """Yield the entries after one id up to another, oldest first, in lists of about REPLY_BYTES.

    After a reply that was too large, for the client or for the server, they are read one by one at first.

    Raises:
        ReplyTooLongError: one entry is longer than a reply may be.
    """
    count = 1
    while True:
        try:
            entries = read(client, run, after, count=count, until=until)
        except UNREADABLE:
            if count == 1:
                raise
            count = 1
            continue
        if not entries:
            return
        yield entries
        after, count = entries[-1].entry_id, next_count(entries, count)


def next_count(entries: Sequence[Entry], count: int) -> int:
    """Return how many to read after these of at most `count`: twice as many, or REPLY_BYTES of their size."""
    size = sum(entry.num_bytes for entry in entries)
    return max(1, min(2 * count, MOST_AT_ONCE, REPLY_BYTES * len(entries) // size)) if entries else count


def appended(
    client: Redis,
    run: str,
    after: bytes,
    until: bytes,
    names: Sequence[bytes] = APPENDED,
    longest: int = LONGEST_COUNT,
) -> Iterator[list[Entry]]:
    """Yield the entries after one id up to that of another, oldest first, of each some short fields only.

    Args:
        client: connection to the server.
        run: its id.
        after, until: ids.
        names: of the fields; by default what the append counted.
        longest: bytes of a value, at most 64 KiB; longer ones are left out.
    """
    while order(after) < order(until):
        args = [after, until, REPLY_BYTES, longest, *names]
        found = cast("list[Any]", call(client, "read_short", [keys.experience(run)], args))
        if not found:
            return
        entries = zip(found[::2], found[1::2], strict=True)
        yield [Entry(entry_id, bounded.paired(fields)) for entry_id, fields in entries]
        after = found[-2]


def follow(client: Redis, run: str, cursor: bytes, *, count: int, block_ms: int) -> list[Entry]:
    """As `read`, but wait up to `block_ms` for the first entry."""
    reply = cast("list[Any]", client.xread({keys.experience(run): cursor}, count=count, block=block_ms))
    return [Entry(entry_id, fields) for entry_id, fields in reply[0][1]] if reply else []


def trim(client: Redis, run: str, token: int, first_kept: bytes) -> int:
    """Drop the entries before `first_kept`; return their number.

    Raises:
        LeaseLostError: another learner took over.
    """
    script_keys = [keys.state(run), keys.experience(run), keys.counts(run)]
    return cast(int, call(client, "trim", script_keys, [token, first_kept]))


class Refusal(NamedTuple):
    """An entry that cannot be used.

    Attributes:
        entry_id: its id.
        head: of its header.
        reason: why.
        is_fragment: an append wrote it; else it is deleted, so that no later learner reads it again.
    """

    entry_id: bytes
    head: bytes
    reason: str
    is_fragment: bool = True


def refuse(client: Redis, run: str, token: int, refusals: Sequence[Refusal]) -> None:
    """Record entries that cannot be used in `dead`: at least one, and no more than 1,000 at once.

    Raises:
        LeaseLostError: another learner took over.
    """
    args: list[Any] = [token, DEAD_LENGTH]
    for one in refusals:
        args += [one.entry_id, one.head, one.reason[:500], int(not one.is_fragment)]
    call(client, "refuse", [keys.state(run), keys.dead(run), keys.experience(run)], args)


def drop_next(client: Redis, run: str, token: int, longest: int, cursor: bytes) -> None:
    """Delete the entry after `cursor` if its reply would have more than `longest` bytes, and record it in `dead`.

    Raises:
        LeaseLostError: another learner took over.
    """
    script_keys = [keys.state(run), keys.dead(run), keys.experience(run)]
    call(client, "drop_next", script_keys, [token, DEAD_LENGTH, longest, cursor])


def lower_ids(client: Redis, run: str, token: int, cursor: bytes, latest: bytes) -> None:
    """Give new ids to entries after `latest`, in the streams that workers write; experience up to `cursor` may go.

    Experience within a day after `cursor` keeps its ids.

    Raises:
        LeaseLostError: another learner took over.
    """
    streams = (keys.experience, keys.episodes, keys.evaluations, keys.journal, keys.logs)
    args = [token, latest, cursor, MOST_LOWERED, EPISODES_LENGTH]
    call(client, "lower_ids", [keys.state(run), *(key(run) for key in streams)], args)


class Counted(NamedTuple):
    """Amounts that a learner has taken from the stream, beside what the append of the last entry counted.

    Attributes:
        entry_id: of the last entry taken.
        fragments, steps, bytes: of all entries up to and with it, as the learner counts them.
        by_append: the same three, as the append that wrote it counted them; () if they are not known.
    """

    entry_id: bytes
    fragments: int
    steps: int
    bytes: int
    by_append: tuple[int, ...] = ()


def correct_counts(
    client: Redis, run: str, token: int, counted: Counted, trimmed_bytes: int = 0, *, most_steps: int = 2**53
) -> bool:
    """Set the counts of appends right where the learner knows better; return whether they differed.

    Args:
        counted: what this learner has taken.
        trimmed_bytes: of these bytes, those that have left the stream.
        most_steps: that can have been appended.

    Raises:
        LeaseLostError: another learner took over.
    """
    entry_id, fragments, steps, num_bytes, by_append = counted
    script_keys = [keys.state(run), keys.experience(run), keys.counts(run)]
    args = [token, entry_id, fragments, steps, num_bytes - trimmed_bytes, most_steps, *by_append]
    return bool(call(client, "correct_counts", script_keys, args))


def most_allowed(client: Redis, run: str) -> int:
    """Return the largest allowance that the run has had."""
    found = cast("list[bytes | None]", client.hmget(keys.state(run), ["most_allowed", "allowance"]))
    return max(int(value or 0) for value in found)


def allow(client: Redis, run: str, token: int, allowance: int, *, updates: int, players: int = 1) -> None:
    """Set the allowance, and wake the collectors that wait for it.

    Args:
        allowance: steps that may have been appended in all.
        updates: of the learner, for the run's state.
        players: collectors that share the remaining steps; 1: each may take all of them.

    Raises:
        LeaseLostError: another learner took over.
    """
    call(client, "allow", [keys.state(run), keys.allowance(run)], [token, allowance, updates, players])


def await_allowance(client: Redis, run: str, after: bytes, *, block_ms: int) -> bool:
    """Wait up to `block_ms` for an allowance later than `after`; return False if there was none."""
    return bool(client.xread({keys.allowance(run): after}, count=1, block=block_ms))


def remaining(client: Redis, run: str, *, node: str = "-") -> Appended:
    """Return how an append of a node would be answered now, without appending; WAIT also before the first version.

    The rule is that of append.lua; claims, room in the stream and folded producers are left to the append.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.state(run), ["status", "version", "allowance_id", "allowance", "players"])
        bounded.values(pipe, keys.counts(run), ["appended_steps"])
        pipe.sismember(keys.draining(run), node)
        (status, latest, allowance_id, allowance, sharing), [appended], is_draining = execute(pipe)
    steps = int(allowance or 0) - int(number(appended))
    version = int(latest or -1)
    going = Answer.YIELD if is_draining else Answer.GO if steps > 0 and version >= 0 else Answer.WAIT
    answers = {b"active": going, b"paused": Answer.YIELD}
    players = int(sharing or 1)
    share = -(-steps // (2 * players)) if steps > 0 and players > 1 else steps
    answer = answers.get(status or b"", Answer.STOPPED)
    return Appended(answer, version, allowance_id or b"0-0", share, players)


def episodes(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """Return the newest finished episodes after an entry (time_s, env_steps, returns), and the last entry's id."""
    rows, last_id = capped_streams.read(client, keys.episodes(run), after)
    parsed: list[dict[str, Any]] = []
    num_returns = 0
    for row in reversed(rows):
        with contextlib.suppress(ValidationError):
            found: Any = _EPISODES.validate_python(row)
            num_returns += len(found["returns"])
            if num_returns > MOST_RETURNS:
                break
            parsed.append(found)
    return parsed[::-1], last_id


def before(entry_id: bytes) -> bytes:
    """Return the largest id below `entry_id`: a cursor after which that entry is read next."""
    milliseconds, number = order(entry_id)
    if number > 0:
        return b"%d-%d" % (milliseconds, number - 1)
    return b"%d-%d" % (milliseconds - 1, 2**64 - 1) if milliseconds else b"0-0"


def following(entry_id: bytes) -> bytes:
    """Return the smallest id above `entry_id`."""
    milliseconds, number = order(entry_id)
    return b"%d-%d" % ((milliseconds, number + 1) if number < 2**64 - 1 else (milliseconds + 1, 0))


def order(entry_id: bytes) -> tuple[int, int]:
    """Return a key that sorts ids as the stream does."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)
