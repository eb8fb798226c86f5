"""Requests: episodes that somebody at a command line wants played by the fleet, apart from the run's own evaluations.

One `ddrl evaluate` is a set of requests under a name of its own, each answered once. A request that nobody has played
on for a while may be taken by another process; whoever lost it, or whose set was withdrawn, is told at its next sign
of life. Both keys expire unless the asker goes on looking, so that nothing stays behind.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from pydantic import TypeAdapter, ValidationError
from redis import Redis

from ddrl.store import keys

TTL_S = 300  # after the asker's last look
SILENT_MS = 15_000  # without a sign of life a request may be taken by another

_PREFIX = "request"  # of a task's argument; an evaluation's begins with a number
_ID = re.compile(rf"{_PREFIX}:(\w+):(0|[1-9][0-9]{{0,8}})", re.ASCII)


@dataclass(frozen=True)
class Request:
    """Episodes wanted.

    Attributes:
        version: of the weights.
        first_seed, num_episodes: seeds are first_seed, first_seed + 1, ...
        num_envs: episodes side by side.
        epsilon: share of random actions.
        noop_max: idle frames at the start of ALE games; None: as the run has it.
    """

    version: int
    first_seed: int
    num_episodes: int
    num_envs: int
    epsilon: float
    noop_max: int | None

    @property
    def seeds(self) -> range:
        """One per episode."""
        return range(self.first_seed, self.first_seed + self.num_episodes)


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        number: of the request in its set; -1 where that cannot be read.
        returns, lengths: of its episodes, in the order of the seeds; empty where it failed.
        error: why it could not be played; "" otherwise.
    """

    number: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    error: str = ""


_REQUEST, _ANSWERED = TypeAdapter(Request), TypeAdapter(Answer)

_PUT = """
-- KEYS: requests (hash). ARGV: seconds to live, then number and request (JSON) in turn. Opens them, for anyone.
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  redis.call('HDEL', KEYS[1], ARGV[i] .. ':player')
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""

_TAKE = """
-- KEYS: requests (hash). ARGV: number, player, milliseconds after which a silent player has lost it.
-- Gives the request to the player, or notes that it still plays. Nothing if it is answered or another's.
local request = redis.call('HGET', KEYS[1], ARGV[1])
if not request then return false end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HGET', KEYS[1], ARGV[1] .. ':player')
if held then
  local player, heard = string.match(held, '^(%S+) (%d+)$')
  if player ~= ARGV[2] and now - tonumber(heard) < tonumber(ARGV[3]) then return false end
end
redis.call('HSET', KEYS[1], ARGV[1] .. ':player', ARGV[2] .. ' ' .. string.format('%.0f', now))
return request
"""

_ANSWER = """
-- KEYS: requests (hash), answers (list). ARGV: number, answer (JSON), seconds to live. Takes one answer a request.
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1] .. ':player')
redis.call('RPUSH', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""


def new_name() -> str:
    """A name for a set of requests, unlike any other."""
    return secrets.token_hex(8)


def request_id(name: str, number: int) -> str:
    """What a task is sent to play a request."""
    return f"{_PREFIX}:{name}:{number}"


def is_request(text: str) -> bool:
    """Whether a task's argument means a request, and not one of the run's evaluations."""
    return text.startswith(_PREFIX + ":")


def number_of(text: str) -> int | None:
    """The number in a `request_id`; None where it is none."""
    found = _ID.fullmatch(text)
    return None if found is None else int(found[2])


def put(client: Redis, run: str, name: str, wanted: Mapping[int, Request]) -> None:
    """Open requests, or open them again: then anybody may take them at once."""
    parts = [part for number, request in wanted.items() for part in (number, json.dumps(asdict(request)))]
    client.eval(_PUT, 1, keys.requests(run, name), TTL_S, *parts)


def take(client: Redis, run: str, text: str, player: str, *, silent_ms: int = SILENT_MS) -> Request | None:
    """Begin to play a request, or go on: to be called every few seconds.

    Args:
        client: connection to the server.
        run: whose.
        text: the `request_id`.
        player: unique for each time that one is played; without spaces.
        silent_ms: a player unheard of for so long has lost it.

    Returns:
        None if it is answered, withdrawn, or played by another; or `text` means no request.

    Raises:
        ValueError: what is stored there is no request.
    """
    found = _ID.fullmatch(text)
    if found is None:
        return None
    name, number = found.groups()
    raw = cast("bytes | None", client.eval(_TAKE, 1, keys.requests(run, name), number, player, silent_ms))
    if raw is None:
        return None
    try:
        return _REQUEST.validate_json(raw)
    except ValidationError as error:
        raise ValueError(f"request {number}: cannot be read ({_reason(error)}); send it again") from None


def answer(client: Redis, run: str, text: str, given: Answer) -> bool:
    """Store an answer; False if there was one, or nobody waits for it any more."""
    found = _ID.fullmatch(text)
    if found is None:
        return False
    name, number = found.groups()
    script_keys = [keys.requests(run, name), keys.answers(run, name)]
    return bool(client.eval(_ANSWER, 2, *script_keys, number, json.dumps(asdict(given)), TTL_S))


def answers(client: Redis, run: str, name: str, after: int = 0) -> list[Answer]:
    """Answers after the first so many, in order of coming; those that cannot be read say so."""
    return [
        _read_answer(raw) for raw in cast("list[bytes]", client.lrange(keys.answers(run, name), after, -1))
    ]


def look(client: Redis, run: str, name: str) -> dict[int, str]:
    """The last sign of life of each request that is being played; and the set lives on."""
    with client.pipeline(transaction=False) as pipe:
        pipe.hgetall(keys.requests(run, name))
        pipe.expire(keys.requests(run, name), TTL_S)
        pipe.expire(keys.answers(run, name), TTL_S)
        raw: dict[bytes, bytes] = pipe.execute()[0]
    signs = {re.fullmatch(rb"([0-9]{1,9}):player", field): value for field, value in raw.items()}
    return {int(field[1]): value.decode(errors="replace") for field, value in signs.items() if field}


def withdraw(client: Redis, run: str, name: str) -> None:
    """Forget a set: what is being played of it ends at its next sign of life."""
    client.delete(keys.requests(run, name), keys.answers(run, name))


def _read_answer(raw: bytes) -> Answer:
    try:
        return _ANSWERED.validate_json(raw)
    except ValidationError as error:
        reason = _reason(error)
    try:
        row = json.loads(raw)
        number = row["number"]
    except (ValueError, TypeError, KeyError, RecursionError):
        number = -1
    return Answer(number if isinstance(number, int) else -1, (), (), f"its answer cannot be read ({reason})")


def _reason(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    return " ".join(": ".join((*map(str, first["loc"]), first["msg"])).split())
