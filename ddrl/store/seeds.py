"""A run outside of its server: what it takes to plant it again on a server that came back empty, or on another one.

A seed holds a checkpoint and what the server knew of the run: config, spaces, versions, counters, producers. The
learner keeps the newest one in the run's folder. Not in it: experience, weights, evaluations, figures and the journal.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from redis import Redis

from ddrl.store import checkpoints, keys, ledger
from ddrl.store.connection import StoreError
from ddrl.store.leases import RunGoneError
from ddrl.store.runs import JOURNAL_LENGTH

SPARE_PRODUCERS = 1_000  # ids left out: players that the old server knew and this seed does not
_FORGOTTEN = {  # fields of the state that make no sense on another server
    *("checkpoint", "fence", "allowance", "allowance_id", "players", "waiting", "claim", "claim_until_ms"),
    *("handover", "evaluation", "host", "folder"),
}


@dataclass(frozen=True)
class Known:
    """What a server knows of a run besides its experience, weights and checkpoint.

    Attributes:
        spec: its config, JSON.
        state: fields of its state.
        producers: what was last heard of each.
    """

    spec: str
    state: Mapping[str, str]
    producers: Mapping[str, str]


@dataclass(frozen=True)
class Seed:
    """A run, ready to be planted.

    Attributes:
        run: its id.
        token: of the learner that took the seed.
        known: what the server knew.
        meta: of the checkpoint: counters and ledger.
        blob: its tensors, safetensors.
    """

    run: str
    token: int
    known: Known
    meta: Mapping[str, Any]
    blob: bytes


def known(client: Redis, run: str) -> Known:
    """What the server knows of a run.

    Raises:
        RunGoneError: nothing.
    """
    with client.pipeline(transaction=True) as pipe:
        pipe.get(keys.spec(run))
        pipe.hgetall(keys.state(run))
        pipe.hgetall(keys.producers(run))
        spec, state, producers = cast(
            "tuple[bytes | None, dict[bytes, bytes], dict[bytes, bytes]]", pipe.execute()
        )
    if spec is None or b"status" not in state:
        raise RunGoneError(f"run {run}: the server does not know it any more")
    fields = {name.decode(): value.decode() for name, value in state.items()}
    return Known(
        spec.decode(),
        {name: value for name, value in fields.items() if name not in _FORGOTTEN},
        {name.decode(): value.decode() for name, value in producers.items()},
    )


# --- planting ------------------------------------------------------------------------------------------

_PLANT = """
-- KEYS: 1 state, 2 spec, 3 producers, 4 ledger, 5 weights, 6 experience, 7 journal, 8 runs (zset), 9 counter of
--       producers, 10 deleted runs (zset), 11 those that have not ended (zset), 12... parts of the checkpoint
-- ARGV: 1 run, 2 state (JSON object), 3 spec, 4 producers (JSON object), 5 ledger (JSON object), 6 latest version,
--       7 cursor of the stream, 8 reason for the journal, 9 created ms, 10 least producer id, 11 plant what was deleted
--       (1|0), 12 cap of the journal
-- Returns 1; 0 where the run is there by somebody else, or the parts have gone; -1 where it was deleted. It may be sent
-- twice: who finds his own checkpoint there has planted it.
if redis.call('HEXISTS', KEYS[1], 'status') == 1 then
  if redis.call('HGET', KEYS[1], 'checkpoint') == cjson.decode(ARGV[2])['checkpoint'] then return 1 end
  return 0
end
for i = 12, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return 0 end
end
if redis.call('ZSCORE', KEYS[10], ARGV[1]) then
  if ARGV[11] ~= '1' then return -1 end
  redis.call('ZREM', KEYS[10], ARGV[1])
end
for i = 1, 7 do redis.call('DEL', KEYS[i]) end
for i, at in ipairs({{1, 2}, {3, 4}, {4, 5}}) do
  for name, value in pairs(cjson.decode(ARGV[at[2]])) do redis.call('HSET', KEYS[at[1]], name, value) end
end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[5], 'latest', ARGV[6])
if ARGV[7] ~= '0-0' then  -- so that what is appended from now on comes after the learner's cursor, whatever the clock
  redis.call('XADD', KEYS[6], ARGV[7], 'x', '')
  redis.call('XDEL', KEYS[6], ARGV[7])
end
redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[12], '*', 'event', 're-seeded', 'reason', ARGV[8])
if tonumber(redis.call('GET', KEYS[9]) or 0) < tonumber(ARGV[10]) then redis.call('SET', KEYS[9], ARGV[10]) end
redis.call('ZADD', KEYS[8], ARGV[9], ARGV[1])
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'active' or status == 'paused' then redis.call('ZADD', KEYS[11], ARGV[9], ARGV[1]) end
return 1
"""


def plant(client: Redis, seed: Seed, *, deleted_too: bool = False) -> bool:
    """Put a run onto a server that does not know it, whole or not at all; False where it is there already.

    False too where the server was emptied anew meanwhile; try again then. Whoever acquires its lease then goes on from
    the seed's checkpoint.

    Args:
        client: connection to the server.
        seed: of the run.
        deleted_too: plant it even where it was deleted on purpose.

    Raises:
        StoreError: it was deleted on purpose.
    """
    run, state = seed.run, seed.known.state
    token = (
        seed.token + 1 + secrets.randbits(32)
    )  # no learner of the old server has it, nor another that plants
    rows = {int(producer): ledger.Row(*row) for producer, row in seed.meta.get("ledger", {}).items()}
    producers = {
        producer: _producer(row, seed.known.producers.get(str(producer), ""))
        for producer, row in rows.items()
        if producer == ledger.ENDED or row.last_seq >= 0
    }
    num_bytes = state.get("appended_bytes", "0")
    num_fragments = sum(row.consumed + row.refused + row.unread for row in rows.values())
    fields = {
        **state,
        "updates": seed.meta["updates"],
        "version": max(int(state.get("version", -1)), int(seed.meta.get("version", -1))),
        "appended_fragments": max(num_fragments, int(seed.meta.get("fragments", -1))),
        "appended_steps": seed.meta["env_steps"],
        "appended_bytes": num_bytes,
        "trimmed_bytes": num_bytes,
        "allowance": 0,  # until the learner has published
        "waiting": 0,
        "fence": token,
        # Whoever is known and not planted appends no more: it may have been retired since the state was read.
        "folded": max(
            [int(state.get("folded", 0)), *(int(p) for p in seed.known.producers if int(p) not in rows)]
        ),
    }
    # The weights of before are gone, so the checkpoint's own, if any, are published again as the next version.
    pointer = checkpoints.store_parts(client, run, token, 0, seed.blob, {**seed.meta, "version": -1})
    fields["checkpoint"] = json.dumps(pointer)
    text = {name: str(value) for name, value in fields.items()}
    known_ids = [int(producer) for producer in seed.known.producers] + list(rows)
    parts = checkpoints.part_keys(run, pointer)
    reply = client.eval(
        _PLANT,
        11 + len(parts),
        *(keys.state(run), keys.spec(run), keys.producers(run), keys.ledger(run), keys.weights(run)),
        *(keys.experience(run), keys.journal(run), keys.RUNS, keys.PRODUCERS, keys.DELETED, keys.OPEN),
        *parts,
        *(run, json.dumps(text), seed.known.spec, json.dumps(producers)),
        *(_spelled(rows, seed.meta["cursor"]), text["version"], seed.meta["cursor"]),
        f"what was appended after update {seed.meta['updates']} of the old server is lost",
        *(text.get("created_ms", "0"), max(known_ids, default=0) + SPARE_PRODUCERS, int(deleted_too)),
        JOURNAL_LENGTH,
    )
    if reply != 1:
        checkpoints.drop_parts(client, run, pointer)
    if reply == -1:
        raise StoreError(f"run {run}: was deleted; `ddrl resume {run}` brings it back from its folder's copy")
    return bool(reply == 1)


def _spelled(rows: Mapping[int, ledger.Row], cursor: str) -> str:
    """The ledger as JSON."""
    return json.dumps({**{str(producer): row.encode() for producer, row in rows.items()}, "cursor": cursor})


def _producer(row: ledger.Row, record: str) -> str:
    """Return a producer as the append holds it, with no more fragments than the learner knows of."""
    known = ledger.Producer.decode(record.encode()) if record else ledger.Producer()
    seq = max(row.last_seq, 0)
    return replace(known, incarnation=str(row.incarnation), seq=seq, fragments=row.decided).encode()
