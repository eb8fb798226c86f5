"""The ledger: what became of every acknowledged fragment, producer by producer.

`append.lua` counts a producer's fragments, the learner counts what it did with them; fragments not yet decided wait in
the stream. So for each producer

    appended = consumed + waiting + trimmed + refused

where `trimmed` counts those that left the stream before the learner read them (`Row.unread`): normally zero.

Each process that plays is a producer. Once it has ended and none of its fragments waits, its row is folded into the row
ENDED. A late append of a folded producer is answered STOPPED, since it may repeat a fragment that was counted; if the
process is still alive, it continues under a new producer id.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from redis import Redis

from ddrl.store import bounded, keys, stream, workers
from ddrl.store.connection import call, execute
from ddrl.store.untrusted import PRODUCER_ID, Count, Name

AUDITS = 10  # attempts, since the run goes on during an audit
UNKNOWN = -1  # the producer of entries that no append wrote
ENDED = -2  # stands for all producers that were folded
QUIET_S = 60.0  # after its last append, at the earliest, a producer is folded: a heartbeat may be late
ACTOR_QUIET_S = 3_600.0  # the same of an actor in another language (node "-"), which has no heartbeat
FOLDED_AT_ONCE = 1_000  # producers in one call, since a long script delays every other client
MIN_PRODUCERS = 1_000  # that a run may have, however few processes play
MAX_PRODUCERS = 20_000  # that are not folded, of a run; those of 1,000 workers with 16 processes each
_CURSOR = b"cursor"
_ID = re.compile(PRODUCER_ID.encode())


@dataclass(frozen=True)
class Row:
    """The learner's counts of one producer's fragments.

    Attributes:
        consumed: admitted to learning, or dropped as too stale.
        refused: recorded in the stream `dead`.
        unread: never read: a gap in the sequence numbers shows that they were trimmed first.
        incarnation, last_seq: those of the newest fragment read.
    """

    consumed: int = 0
    refused: int = 0
    unread: int = 0
    incarnation: int = 0
    last_seq: int = -1

    @property
    def decided(self) -> int:
        """Fragments that no longer wait."""
        return self.consumed + self.refused + self.unread

    def encode(self) -> str:
        """Return the row as the ledger holds it: a JSON list."""
        return json.dumps(astuple(self))

    @classmethod
    def decode(cls, value: bytes) -> Row:
        """Return a stored row; earlier versions of ddrl stored numbers between spaces."""
        return cls(*(json.loads(value) if value.startswith(b"[") else map(int, value.split())))


@dataclass(frozen=True)
class Producer:
    """A producer as `append.lua` stores it (JSON).

    Attributes:
        incarnation: a number of 48 bits, as text: Lua's JSON keeps 14 digits of a number.
        seq: number of its newest fragment.
        last_ms: time of its last append, by the server's clock.
        host, node, pid: the machine, the worker's name and the process.
        fragments: how many were acknowledged.
        duplicates: repeated appends, which wrote nothing.
    """

    incarnation: str = "0"
    seq: Count = 0
    last_ms: Count = 0
    host: Name = "-"
    node: Name = "-"
    pid: Count = 0
    fragments: Count = 0
    duplicates: Count = 0

    def encode(self) -> str:
        """Return the JSON that the append reads."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, value: bytes) -> Producer:
        """Return a stored producer, an empty one if it cannot be read; earlier versions of ddrl stored text."""
        try:
            if value.startswith(b"{"):
                return _PRODUCER.validate_json(value)
            names = ("incarnation", "seq", "", "last_ms", "host", "fragments", "duplicates", "node")
            return _PRODUCER.validate_python(dict(zip(names, value.decode().split(" "), strict=True)))
        except (ValidationError, ValueError):
            return cls()


_PRODUCER = TypeAdapter(Producer)


@dataclass(frozen=True)
class Account:
    """The counts of one producer's fragments; see the module's docstring.

    Attributes:
        host: where it plays or played.
        appended: acknowledged by the server.
        consumed: admitted to learning, or dropped as too stale.
        waiting: in the stream, not yet read by the learner.
        trimmed: trimmed before the learner read them.
        refused: recorded in the stream `dead`.
        duplicates: repeated appends, which wrote nothing.
    """

    host: str
    appended: int
    consumed: int
    waiting: int
    trimmed: int
    refused: int
    duplicates: int

    @property
    def difference(self) -> int:
        """Fragments that are not accounted for; negative if one was counted twice."""
        return self.appended - self.consumed - self.waiting - self.trimmed - self.refused


@dataclass(frozen=True)
class Audit:
    """All producers' accounts.

    Attributes:
        accounts: by producer.
        unknown: entries in no producer's account: waiting, or refused.
        cursor: the last entry that the ledger covers.
    """

    accounts: dict[int, Account]
    unknown: int
    cursor: str

    @property
    def is_balanced(self) -> bool:
        """Every acknowledged fragment is accounted for once; trimmed (lost) ones count as accounted for."""
        return all(account.difference == 0 for account in self.accounts.values())

    def total(self, name: str) -> int:
        """Sum of a column of the accounts."""
        return sum(getattr(account, name) for account in self.accounts.values())


def put(client: Redis, run: str, token: int, changed: Mapping[int, Row], cursor: bytes) -> None:
    """Store the rows that have changed, and the last entry that they cover, in one call.

    Raises:
        LeaseLostError: another learner took over.
    """
    rows = {producer: row.encode() for producer, row in changed.items()}
    call(client, "set_fields", [keys.state(run), keys.ledger(run)], [token, _CURSOR, cursor, rows])


def replace(client: Redis, run: str, token: int, rows: Mapping[int, Row], cursor: bytes) -> None:
    """Replace all rows by those of a checkpoint; producers that it does not know get empty rows.

    Raises:
        LeaseLostError: another learner took over.
    """
    known, _ = read(client, run)
    put(client, run, token, {producer: rows.get(producer, Row()) for producer in {*known, *rows}}, cursor)


def read(client: Redis, run: str) -> tuple[dict[int, Row], bytes]:
    """Return the rows by producer, and the last entry that they cover."""
    return _rows(cast("dict[bytes, bytes]", client.hgetall(keys.ledger(run))))


def fold(client: Redis, run: str, token: int, checkpoint: Mapping[str, Sequence[int]]) -> int:
    """Fold producers that have ended and have no waiting fragments; return their number.

    Where there are many (half of MIN_PRODUCERS), a process that lives keeps only the producers that appended last, one
    a thread, and the others' counts need not agree; a record of which no entry was read is deleted, and ACTOR_QUIET_S
    is QUIET_S. So those go too that workers have only written.

    Args:
        client: connection to the server.
        run: its id.
        token: fencing token.
        checkpoint: rows of the newest checkpoint, as `Counters.ledger`. Producers whose rows changed after it are not
            folded: a learner that starts from it would read their fragments again.

    Raises:
        LeaseLostError: another learner took over.
    """
    with client.pipeline(transaction=True) as pipe:
        bounded.ask_fields(pipe, keys.producers(run))
        bounded.values(pipe, keys.producers(run), [b"%d" % ENDED])
        pipe.hgetall(keys.ledger(run))
        call(pipe, "newest_id", [keys.experience(run)])
        pipe.time()
        listed, (folded,), raw, newest, (seconds, micros) = execute(pipe)
    producers = bounded.paired(listed)
    quiet_ms = 1e3 * QUIET_S
    now_ms, cursor = 1e3 * seconds + micros / 1e3, stream.order(raw.get(_CURSOR, b"0-0"))
    read_ms = cursor[0] if newest and stream.order(newest) > cursor else now_ms
    fleet = workers.alive(client)  # a process has a producer for each of its threads
    alive = {(one.node, pid): -(-one.processes // len(one.pids)) for one in fleet for pid in one.pids}
    is_crowded = len(producers) > MIN_PRODUCERS // 2
    known = {field: Producer.decode(value) for field, value in producers.items()}
    last_ms = {field: one.last_ms if one.last_ms <= now_ms else 0 for field, one in known.items()}
    by_time = sorted(known, key=lambda field: (last_ms[field], len(field), field))
    kept, room = set[bytes](), dict(alive)
    for field in reversed(by_time):
        process = known[field].node, known[field].pid
        room[process] = room.get(process, 0) - 1
        if room[process] >= 0:
            kept.add(field)
    ended: list[tuple[bytes, Producer, Row]] = []
    for field, producer in known.items():
        values = checkpoint.get(field.decode(errors="replace"))
        row = Row() if values is None else Row(*values)
        if field == b"%d" % ENDED or raw.get(field) != (None if values is None else row.encode().encode()):
            continue
        is_ended = (producer.node, producer.pid) not in alive or (is_crowded and field not in kept)
        is_read = values is not None and producer.fragments == row.decided
        is_read |= is_crowded and last_ms[field] + quiet_ms < read_ms  # all entries of that time were read
        least_ms = 1e3 * ACTOR_QUIET_S if producer.node == "-" and not is_crowded else quiet_ms
        if now_ms - last_ms[field] >= least_ms and is_ended and is_read:
            ended.append((field, Producer() if values is None else producer, row))
    # Rows whose records are gone, and which the learner has folded: a worker may delete all records.
    gone = {field for field in raw.keys() - producers.keys() if _ID.fullmatch(field)}
    ended += [(field, Producer(), Row()) for field in gone if field.decode() not in checkpoint]
    one = Producer.decode(folded or Producer().encode().encode())
    total = Row.decode(raw.get(b"%d" % ENDED, Row().encode().encode()))
    script_keys = [keys.state(run), keys.producers(run), keys.ledger(run), keys.PRODUCERS]
    for first in range(0, len(ended), FOLDED_AT_ONCE):
        parts: list[Any] = []
        for field, producer, row in ended[first : first + FOLDED_AT_ONCE]:
            parts += [field, producers.get(field, b""), raw.get(field, b"")]
            fragments, duplicates = one.fragments + producer.fragments, one.duplicates + producer.duplicates
            one = dataclasses.replace(one, fragments=fragments, duplicates=duplicates)
            total = sum_rows(total, row)
        if not call(client, "fold", script_keys, [token, ENDED, one.encode(), total.encode(), *parts]):
            return first
    return len(ended)


def sum_rows(total: Row, row: Row) -> Row:
    """Return the sum of two rows, without incarnation and last_seq."""
    return Row(total.consumed + row.consumed, total.refused + row.refused, total.unread + row.unread)


def unlisted(client: Redis, run: str, producers: Sequence[int]) -> list[int]:
    """Return those of these producers that are folded."""
    with client.pipeline(transaction=False) as pipe:
        for producer in producers:
            pipe.hexists(keys.producers(run), str(producer))
        return [one for one, is_listed in zip(producers, pipe.execute(), strict=True) if not is_listed]


def checked(
    client: Redis, run: str, entries: Sequence[stream.Entry], *, keeps_folded: bool = False
) -> list[stream.Entry]:
    """Return entries that wait, without a producer where no append wrote them: it has not noted as much for it.

    Nor does it write other fields than `stream.APPENDED` beside the fragment's, or long ones.

    A worker may write any entry. One that names a number which the producer has appended cannot be told from it.

    Args:
        client: connection to the server.
        run: its id.
        entries: of its stream.
        keeps_folded: of a shadow: folded producers, of which no record is left, keep their entries.
    """
    names = list({b"%d" % entry.producer for entry in entries})
    values = bounded.values(client, keys.producers(run), names) if names else []
    found = zip(names, values, strict=True)
    known = {int(name): Producer.decode(value) for name, value in found if value and _ID.fullmatch(name)}
    folded = 0
    if keeps_folded and not all(values):
        folded = int(cast("bytes | None", client.hget(keys.state(run), "folded")) or 0)

    def check(entry: stream.Entry) -> stream.Entry:
        is_folded = entry.producer not in known and 0 < entry.producer <= folded
        producer = known.get(entry.producer, Producer(seq=stream.MOST_SEQ if is_folded else -1))
        is_current = is_folded or entry.fields.get(b"i") == producer.incarnation.encode()
        is_short = all(len(entry.fields.get(name, b"")) < 20 for name in stream.APPENDED)
        if is_current and is_short and entry.count(b"q", -1) <= producer.seq:
            return dataclasses.replace(entry, newest_seq=producer.seq)
        return stream.Entry(entry.entry_id, {name: x for name, x in entry.fields.items() if name != b"p"})

    return list(map(check, entries))


def audit(client: Redis, run: str, *, on_entries: Callable[[int, int], None] | None = None) -> Audit:
    """Account for every acknowledged fragment as of now.

    Args:
        client: connection to the server.
        run: its id.
        on_entries: called with the entries read so far and an upper bound of their number.
    """
    for _ in range(AUDITS):
        found = _audit(client, run, on_entries)
        if found.is_balanced or read(client, run)[1].decode() == found.cursor:
            break  # otherwise the ledger moved during the audit, which may be all that is wrong: try again
    return found


def _audit(client: Redis, run: str, on_entries: Callable[[int, int], None] | None) -> Audit:
    # An atomic snapshot; the entries are read afterwards.
    with client.pipeline(transaction=True) as pipe:
        bounded.ask_fields(pipe, keys.producers(run))
        pipe.hgetall(keys.ledger(run))
        call(pipe, "newest_id", [keys.experience(run)])
        pipe.xlen(keys.experience(run))
        pipe.hget(keys.state(run), "reads")
        listed, raw, last, length, reads = execute(pipe)
    # A shadow has no accounts: what it learns from was appended to another run's stream.
    producers, (rows, cursor) = {} if reads else bounded.paired(listed), _rows(raw)
    waiting: Counter[int] = Counter()
    if last:
        for entries in stream.appended(client, run, cursor, last):
            waiting.update(entry.producer for entry in checked(client, run, entries))
            if on_entries is not None:
                on_entries(waiting.total(), length)
    accounts = {}
    for name, value in producers.items():
        if not _ID.fullmatch(name.removeprefix(b"-")):
            continue
        producer, row = Producer.decode(value), rows.pop(int(name), Row())
        accounts[int(name)] = Account(
            host=producer.host[:100],
            appended=producer.fragments,
            consumed=row.consumed,
            waiting=waiting.pop(int(name), 0),
            trimmed=row.unread,
            refused=row.refused,
            duplicates=producer.duplicates,
        )
    unknown = sum(row.consumed + row.refused for row in rows.values()) + waiting.total()
    return Audit(accounts=accounts, unknown=0 if reads else unknown, cursor=cursor.decode())


def _rows(raw: Mapping[bytes, bytes]) -> tuple[dict[int, Row], bytes]:
    rows = {int(name): Row.decode(value) for name, value in raw.items() if name != _CURSOR}
    return rows, raw.get(_CURSOR, b"0-0")
