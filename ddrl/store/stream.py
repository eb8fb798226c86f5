"""The experience stream: the single-call append of collectors, the reads and trims of the learner.

An entry holds a fragment's fields (codec.py) and what the append writes: `f`, `n`, `b`: cumulative fragments,
transitions and bytes, this entry included; `s`: this entry's bytes; `p`, `i`, `q`: producer, incarnation, seq.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from redis import Redis

from ddrl.store import keys
from ddrl.store.leases import FENCE, fenced

ENTRY_OVERHEAD_BYTES = 128  # of an entry in the server: measured 75 to 83, counters and names besides
REPLY_BYTES = 8 * 1024**2  # aim for one read
EPISODES_LENGTH = 20_000
DEAD_LENGTH = 1_000


class Answer(Enum):
    """What a collector is told by an append."""

    GO = "GO"  # written; play on
    WAIT = "WAIT"  # written; the allowance is used up
    YIELD = (
        "YIELD"  # written; end the segment: the run is paused, the machine leaves, or another run claims it
    )
    FULL = "FULL"  # not written: the byte budget is used up; append the same again later
    STOPPED = "STOPPED"  # not written: the run has ended or is gone, or the producer was retired


@dataclass(frozen=True)
class Appended:
    """The reply to an append.

    Attributes:
        answer: see `Answer`.
        version: latest published version of the weights.
        allowance_id: entry of the allowance stream that the answer rests on; wait for a later one.
        remaining_steps: what this producer should append next; negative when the allowance is overshot. One of
            many gets half of an even share of what is left, so that they overshoot little though each plays
            without knowing what the others have in hand (after guided self-scheduling: Polychronopoulos and
            Kuck 1987).
        players: how many those are, as `remaining` says.
    """

    answer: Answer
    version: int
    allowance_id: bytes
    remaining_steps: int
    players: int = 1


@dataclass(frozen=True)
class Entry:
    """One entry of the stream, with its cumulative counts."""

    entry_id: bytes
    fields: Mapping[bytes, bytes]

    def count(self, name: bytes, default: int = 0) -> int:
        """One of the numbers that the append wrote; `default` where an entry was not written by it."""
        value = self.fields.get(name, b"")
        return int(value) if value.isdigit() and len(value) < 20 else default

    @property
    def producer(self) -> int:
        """Who appended it; -1 where that cannot be read."""
        return self.count(b"p", -1)

    @property
    def disowned(self) -> Entry:
        """Without all that an append writes beside the fragment."""
        kept = {name: value for name, value in self.fields.items() if len(name) > 1 or name == b"h"}
        return Entry(self.entry_id, kept)


_APPEND = """
-- KEYS: 1 state (hash), 2 experience (stream), 3 episodes (stream), 4 draining (set),
--       5 producers (hash: id -> "incarnation seq steps ms host fragments duplicates node")
-- ARGV: 1 producer, 2 incarnation, 3 seq, 4 transitions, 5 bytes, 6 played ms, 7 host, 8 node, 9 episodes (JSON or ""),
--       10 cap of the episodes stream, 11 process ms, 12 and 13 ms waited for allowance and room, 14... fields
local state = redis.call('HMGET', KEYS[1], 'status', 'allowance', 'version', 'allowance_id', 'max_bytes',
  'appended_fragments', 'appended_steps', 'appended_bytes', 'trimmed_bytes', 'players', 'crashes', 'claim',
  'claim_until_ms', 'first_step_ms', 'retired')
local status, allowance, version = state[1], tonumber(state[2] or 0), tonumber(state[3] or -1)
local allowance_id, max_bytes = state[4] or '0-0', tonumber(state[5] or 0)
local fragments, steps = tonumber(state[6] or 0), tonumber(state[7] or 0)
local bytes, trimmed = tonumber(state[8] or 0), tonumber(state[9] or 0)
local players = tonumber(state[10] or 1)
local shares = players > 1 and 2 * players or 1
local function left()
  if steps < allowance then return math.ceil((allowance - steps) / shares) end
  return allowance - steps
end
if status ~= 'active' and status ~= 'paused' then return {'STOPPED', version, allowance_id, 0} end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local incarnation, seq, played, seen, host, count, doubles, node
local last = redis.call('HGET', KEYS[5], ARGV[1])
if last then
  incarnation, seq, played, seen, host, count, doubles, node =
    string.match(last, '^(%d+) (%d+) (%d+) (%d+) (%S+) (%d+) (%d+) (%S+)$')
end
played, count, doubles = tonumber(played or 0), tonumber(count or 0), tonumber(doubles or 0)
if not last and tonumber(ARGV[1]) <= tonumber(state[15] or 0) then  -- retired; what it repeats is known no more
  return {'STOPPED', version, allowance_id, 0}
end
if incarnation == ARGV[2] and tonumber(ARGV[3]) <= tonumber(seq) then
  redis.call('HINCRBY', KEYS[1], 'duplicates', 1)
  redis.call('HSET', KEYS[5], ARGV[1], table.concat(
    {incarnation, seq, string.format('%.0f', played), seen, host, count, doubles + 1, node}, ' '))
else
  if bytes - trimmed + tonumber(ARGV[5]) > max_bytes then
    redis.call('HINCRBY', KEYS[1], 'full', 1)
    return {'FULL', version, allowance_id, left()}
  end
  fragments, steps, bytes = fragments + 1, steps + tonumber(ARGV[4]), bytes + tonumber(ARGV[5])
  local entry = {'f', fragments, 'n', steps, 'b', bytes, 's', ARGV[5], 'p', ARGV[1], 'i', ARGV[2], 'q', ARGV[3]}
  for i = 14, #ARGV do entry[#entry + 1] = ARGV[i] end
  redis.call('XADD', KEYS[2], '*', unpack(entry))
  redis.call('HSET', KEYS[1], 'appended_fragments', fragments, 'appended_steps', steps, 'appended_bytes', bytes)
  if not state[14] then redis.call('HSET', KEYS[1], 'first_step_ms', now_ms - tonumber(ARGV[6])) end
  if state[11] and state[11] ~= '0' then redis.call('HSET', KEYS[1], 'crashes', 0) end
  redis.call('HINCRBY', KEYS[1], 'played_ms', ARGV[6])
  redis.call('HINCRBY', KEYS[1], 'process_ms', ARGV[11])
  if ARGV[12] ~= '0' then redis.call('HINCRBY', KEYS[1], 'allowance_wait_ms', ARGV[12]) end
  if ARGV[13] ~= '0' then redis.call('HINCRBY', KEYS[1], 'room_wait_ms', ARGV[13]) end
  redis.call('HSET', KEYS[5], ARGV[1], table.concat({ARGV[2], ARGV[3],
    string.format('%.0f', played + tonumber(ARGV[4])), string.format('%.0f', now_ms), ARGV[7], count + 1, doubles,
    ARGV[8]}, ' '))
  if ARGV[9] ~= '' then
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[10], '*', 'returns', ARGV[9], 'env_steps', steps)
  end
end
local answer = 'GO'
if status == 'paused' or redis.call('SISMEMBER', KEYS[4], ARGV[8]) == 1 then
  answer = 'YIELD'
elseif tonumber(state[12] or 0) > 0 and now_ms < tonumber(state[13] or 0) then
  redis.call('HINCRBY', KEYS[1], 'claim', -1)
  answer = 'YIELD'
elseif steps >= allowance then
  answer = 'WAIT'
end
return {answer, version, allowance_id, left()}
"""

_CLAIM = """
-- KEYS: state. ARGV: processes, ms for which the claim stands. Only what goes on can give way.
if redis.call('HGET', KEYS[1], 'status') ~= 'active' then return 0 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'claim', ARGV[1], 'claim_until_ms',
  string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2])))
return 1
"""


def new_producer(client: Redis) -> int:
    """An id that no other collector has or had on this server."""
    return client.incr(keys.PRODUCERS)


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
) -> Appended:
    """Append one fragment, once: repeating the call writes nothing more and answers as the first time, or STOPPED.

    Args:
        fields: the encoded fragment.
        producer, incarnation, seq: its identity.
        num_transitions: what it adds to `env_steps`.
        episode_returns: of the training episodes that ended in it.
        played_ms: time that the play took; the first fragment dates the run's first step with it.
        process_ms: of a process since its last append: play and what else it did, waits included.
        allowance_wait_ms, room_wait_ms: of these, waited for the learner, and for room in the stream.
        host, node: where it was played, and by which worker; without spaces.
    """
    flat: list[bytes] = [part for pair in fields.items() for part in pair]
    size = sum(map(len, flat)) + ENTRY_OVERHEAD_BYTES
    reply = client.eval(
        _APPEND,
        5,
        *(keys.state(run), keys.experience(run), keys.episodes(run), keys.draining(run), keys.producers(run)),
        *(producer, incarnation, seq, num_transitions, size, played_ms, host, node),
        json.dumps([round(value, 3) for value in episode_returns]) if episode_returns else "",
        EPISODES_LENGTH,
        *(process_ms, allowance_wait_ms, room_wait_ms),
        *flat,
    )
    answer, version, allowance_id, remaining = cast("tuple[bytes, int, bytes, int]", reply)
    return Appended(Answer(answer.decode()), version, allowance_id, remaining)


def claim(client: Redis, run: str, processes: int, *, for_ms: int = 1000) -> None:
    """Have so many processes end their segments of a run at their next append, for another run's sake.

    Args:
        processes: replaces what was claimed before.
        for_ms: after which what was not taken lapses.
    """
    client.eval(_CLAIM, 1, keys.state(run), processes, for_ms)


def read(client: Redis, run: str, cursor: bytes, *, count: int, until: bytes = b"+") -> list[Entry]:
    """Entries after `cursor` up to `until`, oldest first, at most `count`."""
    raw = cast("list[Any]", client.xrange(keys.experience(run), min=b"(" + cursor, max=until, count=count))
    return [Entry(entry_id, fields) for entry_id, fields in raw]


def follow(client: Redis, run: str, cursor: bytes, *, count: int, block_ms: int) -> list[Entry]:
    """As `read`, but waits up to `block_ms` for the first entry, and believes none that no append can have written.

    An append counts in the entry and in the run's state at once. What counts more than the state does afterwards loses
    all that an append would have written of it.
    """
    with client.pipeline(transaction=False) as pipe:  # one after the other all the same
        pipe.xread({keys.experience(run): cursor}, count=count, block=block_ms)
        pipe.hmget(keys.state(run), ["appended_fragments", "appended_steps", "appended_bytes", "status"])
        reply, (*values, status) = cast("tuple[list[Any], list[bytes | None]]", pipe.execute())
    if not reply:
        return []
    entries = [Entry(entry_id, fields) for entry_id, fields in reply[0][1]]
    if status is None:  # the run is gone, and with it what its entries could be held to
        return entries
    appended = [(name, int(value or 0)) for name, value in zip((b"f", b"n", b"b"), values, strict=True)]
    return [
        entry if all(entry.count(name) <= most for name, most in appended) else entry.disowned
        for entry in entries
    ]


def read_count(client: Redis, run: str) -> int:
    """How many entries make a reply of about REPLY_BYTES."""
    length = client.xlen(keys.experience(run))
    values = cast("list[bytes | None]", client.hmget(keys.state(run), ["appended_bytes", "trimmed_bytes"]))
    live_bytes = int(values[0] or 0) - int(values[1] or 0)
    return max(1, min(1024, REPLY_BYTES * length // max(live_bytes, 1))) if length else 64


_TRIM = (
    FENCE
    + """
-- KEYS: state, experience. ARGV: token, first entry that stays.
-- What was appended before the first entry that stays is what was trimmed; an entry that says what cannot be was not
-- written by the append, and the next one is asked.
local removed = redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
local appended = tonumber(redis.call('HGET', KEYS[1], 'appended_bytes') or 0)
local trimmed = appended
local from = '-'
for _ = 1, 8 do  -- one by one, for entries are large
  local entry = redis.call('XRANGE', KEYS[2], from, '+', 'COUNT', 1)[1]
  if not entry then break end
  from = '(' .. entry[1]
  local bytes, size
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'b' then bytes = tonumber(entry[2][i + 1]) end
    if entry[2][i] == 's' then size = tonumber(entry[2][i + 1]) end
  end
  if bytes and size and size > 0 and bytes <= appended and bytes >= size then
    trimmed = bytes - size
    break
  end
end
redis.call('HSET', KEYS[1], 'trimmed_bytes', string.format('%.0f', trimmed))
return removed
"""
)


def trim(client: Redis, run: str, token: int, first_kept: bytes) -> int:
    """Drop the entries before `first_kept`; the number dropped.

    Raises:
        LeaseLostError: another learner took over.
    """
    return cast(int, fenced(client, _TRIM, [keys.state(run), keys.experience(run)], token, first_kept))


_REFUSE = (
    FENCE
    + """
-- KEYS: state, dead. ARGV: token, cap, entry id, reason, head of the entry's header.
redis.call('HINCRBY', KEYS[1], 'dead', 1)
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'entry', ARGV[3], 'reason', ARGV[4], 'head', ARGV[5])
"""
)


def refuse(client: Redis, run: str, token: int, entry_id: bytes, head: bytes, reason: str) -> None:
    """Note an entry that cannot be used, with the reason and the head of its header.

    Raises:
        LeaseLostError: another learner took over.
    """
    script_keys = [keys.state(run), keys.dead(run)]
    fenced(client, _REFUSE, script_keys, token, DEAD_LENGTH, entry_id, reason[:500], head)


_ALLOW = (
    FENCE
    + """
-- KEYS: state, allowance (stream of one entry). ARGV: token, allowance, updates, players.
local version = redis.call('HGET', KEYS[1], 'version')
local id = redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'allowance', ARGV[2], 'version', version)
redis.call('HSET', KEYS[1], 'allowance', ARGV[2], 'allowance_id', id, 'updates', ARGV[3], 'players', ARGV[4])
return id
"""
)


def allow(client: Redis, run: str, token: int, allowance: int, *, updates: int, players: int = 1) -> None:
    """Raise what may be played, and wake the collectors that wait for it.

    Args:
        allowance: steps that may have been appended in all.
        updates: of the learner, for the run's state.
        players: producers among which what is left is divided; 1: each may take all of it.

    Raises:
        LeaseLostError: another learner took over.
    """
    fenced(client, _ALLOW, [keys.state(run), keys.allowance(run)], token, allowance, updates, players)


def await_allowance(client: Redis, run: str, after: bytes, *, block_ms: int) -> bool:
    """Wait up to `block_ms` for word later than `after`; False if there was none."""
    return bool(client.xread({keys.allowance(run): after}, count=1, block=block_ms))


def remaining(client: Redis, run: str, *, node: str = "-") -> Appended:
    """What an append of a node would be answered now, without appending; WAIT also before the first version."""
    names = ["status", "version", "allowance_id", "allowance", "appended_steps", "players"]
    with client.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.state(run), names)
        pipe.sismember(keys.draining(run), node)
        raw, is_draining = cast("tuple[list[bytes | None], int]", pipe.execute())
    steps = int(raw[3] or 0) - int(raw[4] or 0)
    version = int(raw[1] or -1)
    going = Answer.YIELD if is_draining else Answer.GO if steps > 0 and version >= 0 else Answer.WAIT
    answers = {b"active": going, b"paused": Answer.YIELD}
    players = int(raw[5] or 1)
    share = -(-steps // (2 * players)) if steps > 0 and players > 1 else steps
    answer = answers.get(raw[0] or b"", Answer.STOPPED)
    return Appended(answer, version, raw[2] or b"0-0", share, players)


def episodes(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """Finished training episodes after an entry: rows of time_s, env_steps, returns; and the last entry's id."""
    raw = cast("list[Any]", client.xrange(keys.episodes(run), min=b"(" + after))
    rows = [
        {
            "time_s": int(entry_id.split(b"-")[0]) / 1e3,
            "env_steps": int(fields[b"env_steps"]),
            "returns": json.loads(fields[b"returns"]),
        }
        for entry_id, fields in raw
    ]
    return rows, raw[-1][0] if raw else after


def before(entry_id: bytes) -> bytes:
    """The largest id below `entry_id`: as a cursor, it makes that entry the next one read."""
    milliseconds, number = order(entry_id)
    if number > 0:
        return b"%d-%d" % (milliseconds, number - 1)
    return b"%d-%d" % (milliseconds - 1, 2**64 - 1) if milliseconds else b"0-0"


def following(entry_id: bytes) -> bytes:
    """The smallest id above `entry_id`."""
    milliseconds, number = order(entry_id)
    return b"%d-%d" % (milliseconds, number + 1)


def order(entry_id: bytes) -> tuple[int, int]:
    """What sorts ids as the stream does."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)
