"""The ledger: what became of every fragment that was acknowledged, producer by producer.

The append counts a producer's fragments, the learner what it did with them; the rest waits in the stream. So

    appended = consumed + waiting + trimmed + refused

for each producer, where `trimmed` are those that went from the stream before the learner read them: none, in order.

Processes come and go, and each is a producer. Those that have been silent for long and of whose fragments nothing is
open any more become one account, RETIRED; one that speaks up all the same is told to begin anew under another number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from redis import Redis

from ddrl.store import keys, stream
from ddrl.store.leases import fenced

AUDITS = 10  # at most, of a run that goes on meanwhile
STRANGER = -1  # the producer of entries that no append wrote
RETIRED = -2  # stands for producers that were silent for long
_BATCH = 200  # producers retired in one script
_KNOWN = re.compile(  # of a producer; workers write it
    rb"\d{1,15} \d{1,15} \d{1,15} (?P<ms>\d{1,15}) \S+ (?P<fragments>\d{1,15}) \d{1,15} \S+"
)


@dataclass(frozen=True)
class Row:
    """What the learner did with one producer's fragments.

    Attributes:
        consumed: admitted to learning, or dropped by it as too stale.
        refused: into `dead`.
        unread: known to have gone before they were read, by a gap in the sequence numbers.
        incarnation, last_seq: of the newest one read.
    """

    consumed: int = 0
    refused: int = 0
    unread: int = 0
    incarnation: int = 0
    last_seq: int = -1


@dataclass(frozen=True)
class Account:
    """One producer's fragments, all of them; see the module's docstring.

    Attributes:
        host: where it plays or played.
        duplicates: repetitions that the append refused; not among those appended.
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
        """Fragments that nobody can account for; negative where one was counted twice."""
        return self.appended - self.consumed - self.waiting - self.trimmed - self.refused


@dataclass(frozen=True)
class Audit:
    """All producers' accounts, and what no producer appended.

    Attributes:
        accounts: by producer.
        strangers: entries of the stream that no append wrote, waiting or refused.
        cursor: the last entry that the ledger covers.
    """

    accounts: dict[int, Account]
    strangers: int
    cursor: str

    @property
    def is_balanced(self) -> bool:
        """Every acknowledged fragment is accounted for, once."""
        return all(account.difference == 0 for account in self.accounts.values())

    def total(self, name: str) -> int:
        """Sum of a column of the accounts."""
        return sum(getattr(account, name) for account in self.accounts.values())


_CURSOR = b"cursor"


def put(client: Redis, run: str, token: int, changed: Mapping[int, Row], cursor: bytes) -> None:
    """Store the rows that have changed, and the last entry that they cover, in one call.

    Raises:
        LeaseLostError: another learner took over.
    """
    parts: list[Any] = [_CURSOR, cursor]
    for producer, row in changed.items():
        parts += [producer, spelled(row)]
    fenced(client, "set_fields", [keys.state(run), keys.ledger(run)], token, *parts)


def spelled(row: Row) -> str:
    """A row as the ledger keeps it."""
    return f"{row.consumed} {row.refused} {row.unread} {row.incarnation} {row.last_seq}"


def replace(client: Redis, run: str, token: int, rows: Mapping[int, Row], cursor: bytes) -> None:
    """Store all rows anew: those of a learner that goes on from its checkpoint.

    Raises:
        LeaseLostError: another learner took over.
    """
    known, _ = read(client, run)
    put(client, run, token, {producer: rows.get(producer, Row()) for producer in {*known, *rows}}, cursor)


def read(client: Redis, run: str) -> tuple[dict[int, Row], bytes]:
    """The rows by producer, and the last entry that they cover."""
    return _parse(cast("dict[bytes, bytes]", client.hgetall(keys.ledger(run))))


def retire(client: Redis, run: str, token: int, checkpoint: Mapping[str, Any], *, silent_s: float) -> int:
    """Make the producers that have been silent for long one account; how many.

    Args:
        client: connection to the server.
        run: whose ledger.
        token: fencing token.
        checkpoint: rows of the newest checkpoint, as `Counters.ledger`: whoever has changed since stays, so that no
            later learner reads a fragment of one that went.
        silent_s: since their last append, by the server's clock.

    Raises:
        LeaseLostError: another learner took over.
    """
    with client.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys.producers(run))
        pipe.hgetall(keys.ledger(run))
        pipe.time()
        producers, raw, (now_s, _) = pipe.execute()
    parts: list[Any] = []
    for producer, values in checkpoint.items():
        row, known = Row(*values), _KNOWN.fullmatch(producers.get(producer.encode(), b""))
        if known is None or int(producer) < 0 or now_s - int(known["ms"]) / 1e3 < silent_s:
            continue
        is_closed = int(known["fragments"]) == row.consumed + row.refused + row.unread
        if is_closed and raw.get(producer.encode()) == spelled(row).encode():
            parts += [producer, known[0], spelled(row)]
    script_keys, size, num = [keys.state(run), keys.producers(run), keys.ledger(run)], 3 * _BATCH, 0
    for at in range(0, len(parts), size):
        num += cast(int, fenced(client, "retire", script_keys, token, RETIRED, *parts[at : at + size]))
    return num


def retired(client: Redis, run: str) -> tuple[int, set[int]]:
    """The last producer that was retired, and those that are known: who is neither later nor known was retired."""
    last = cast("bytes | None", client.hget(keys.state(run), "retired"))  # first: later ones may be new then
    known = cast("list[bytes]", client.hkeys(keys.producers(run)))
    return (_number(last or b"0") or 0), {number for name in known if (number := _number(name)) is not None}


def _number(text: bytes) -> int | None:
    """What workers may write too is not taken on trust."""
    return int(text) if text.isdigit() and len(text) < 16 else None


def audit(client: Redis, run: str, *, on_entries: Callable[[int, int], None] | None = None) -> Audit:
    """Account for every fragment that was acknowledged, as of now.

    Args:
        client: connection to the server.
        run: whose stream.
        on_entries: told how many of how many entries that wait have been read.
    """
    for _ in range(AUDITS):
        found = _audit(client, run, on_entries)
        if found.is_balanced or read(client, run)[1].decode() == found.cursor:
            break  # else the learner may have trimmed what was still to be read as waiting
    return found


def _audit(client: Redis, run: str, on_entries: Callable[[int, int], None] | None) -> Audit:
    with client.pipeline(
        transaction=True
    ) as pipe:  # all as of one moment, but for the entries read afterwards
        pipe.hgetall(keys.producers(run))
        pipe.hgetall(keys.ledger(run))
        pipe.xrevrange(keys.experience(run), count=1)
        pipe.xlen(keys.experience(run))
        producers, raw, last, length = pipe.execute()
    rows, cursor = _parse(raw)
    tally = _Tally()
    if last:
        after, count = cursor, stream.read_count(client, run)
        while entries := stream.read(client, run, after, count=count, until=last[0][0]):
            for entry in entries:
                tally.add(entry)
            after = entries[-1].entry_id
            if on_entries is not None:
                on_entries(tally.num_entries, length)
    accounts = {}
    for producer, value in producers.items():
        _, _, _, _, host, appended, duplicates, _ = value.decode().split(" ")
        row, waits = rows.get(int(producer), Row()), tally.waiting.get(int(producer), 0)
        accounts[int(producer)] = Account(
            host=host,
            appended=int(appended),
            consumed=row.consumed,
            waiting=waits,
            trimmed=row.unread,
            refused=row.refused,
            duplicates=int(duplicates),
        )
    unknown = [row.refused + row.consumed for producer, row in rows.items() if producer not in accounts]
    waiting = sum(num for producer, num in tally.waiting.items() if producer not in accounts)
    return Audit(accounts=accounts, strangers=sum(unknown) + waiting, cursor=cursor.decode())


@dataclass
class _Tally:
    """Entries that wait, by producer."""

    waiting: dict[int, int] = field(default_factory=dict)
    num_entries: int = 0

    def add(self, entry: stream.Entry) -> None:
        self.num_entries += 1
        self.waiting[entry.producer] = self.waiting.get(entry.producer, 0) + 1


def _parse(raw: Mapping[bytes, bytes]) -> tuple[dict[int, Row], bytes]:
    rows = {
        int(producer): Row(*map(int, value.split())) for producer, value in raw.items() if producer != _CURSOR
    }
    return rows, raw.get(_CURSOR, b"0-0")
