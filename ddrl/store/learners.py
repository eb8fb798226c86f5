"""The learners of a run that wants several: each announces itself, and the one that leads names those of its group."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

from pydantic import TypeAdapter, ValidationError
from redis import Redis

from ddrl.store import keys, runs
from ddrl.store.untrusted import Count, Name, Number

BEAT_S = 0.5
TTL_S = 6.0  # without a beat, after which a learner is gone


@dataclass(frozen=True, kw_only=True)
class Member:
    """One learner of a run.

    Attributes:
        host, pid: where it runs.
        address: where other learners reach its machine.
        device: on which it learns.
        versions: of what must be the same for all, by package.
        rank: 0 leads; -1: it waits to be taken in.
        updates_per_s: of late.
        waiting: share of that time in which it waited for the others, the sums of gradients included.
        beat_s: when it was last seen, by the server's clock.
    """

    host: Name
    pid: Count
    address: Name
    device: Name
    versions: dict[Name, Name]
    rank: int = -1
    updates_per_s: Number = 0.0
    waiting: Number = 0.0
    beat_s: Number = 0.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """The learners that learn together.

    Attributes:
        token: of the leader's lease, without which this counts for nothing.
        number: random, of this group.
        wanted: number of learners that the run wants.
        members: their ids in the order of ranks.
        address, port: where they find each other; port 0: the leader is alone.
        is_ready: all have restored the run, and join each other now.
    """

    token: int
    number: str
    wanted: int
    members: Sequence[str]
    address: str = ""
    port: int = 0
    is_ready: bool = False


_MEMBER, _GROUP = TypeAdapter(Member), TypeAdapter(Group)


def announce(client: Redis, run: str, member_id: str, member: Member) -> None:
    """Write a learner's beat."""
    row = asdict(member) | {"beat_s": runs.server_ms(client) / 1e3}
    client.hset(keys.learners(run), member_id, json.dumps(row))


def leave(client: Redis, run: str, member_id: str) -> None:
    """Forget a learner that ends."""
    client.hdel(keys.learners(run), member_id)


def alive(client: Redis, run: str, *, since_s: float = 0.0) -> dict[str, Member]:
    """Return the learners of a run that were seen of late, and since a time of the server's clock, by id."""
    now_s, found = runs.server_ms(client) / 1e3, {}
    for name, value in cast("dict[bytes, bytes]", client.hgetall(keys.learners(run))).items():
        with contextlib.suppress(ValidationError):
            member = _MEMBER.validate_json(value)
            if member.beat_s >= max(since_s, now_s - TTL_S):
                found[name.decode()] = member
    return found


def by_rank(client: Redis, run: str) -> list[Member]:
    """Return the learners of a run, those that learn together first."""
    return sorted(alive(client, run).values(), key=lambda one: (one.rank < 0, one.rank, one.host, one.pid))


def form(client: Redis, run: str, group: Group) -> float:
    """Name the learners that learn together; return the server's time."""
    client.set(keys.group(run), json.dumps(asdict(group)))
    return runs.server_ms(client) / 1e3


def formed(client: Redis, run: str) -> Group | None:
    """Return the group of the learner that holds a run."""
    value, lease = cast("list[bytes | None]", client.mget(keys.group(run), keys.lease(run)))
    if value is None or lease is None:
        return None
    group = _GROUP.validate_json(value)
    return group if str(group.token).encode() == lease else None


def wanting(client: Redis, names: Sequence[str]) -> list[str]:
    """Return those of some runs whose leader wants more learners than there are."""
    values = client.mget([keys.group(run) for run in names]) if names else []
    grouped = [run for run, value in zip(names, values, strict=True) if value is not None]  # few want several
    return [
        run for run in grouped if (group := formed(client, run)) and _count(client, run, group) < group.wanted
    ]


def _count(client: Redis, run: str, group: Group) -> int:
    """Return the number of learners that have the versions of a group's leader."""
    found = alive(client, run)
    leader = found.get(group.members[0])
    return sum(leader is None or one.versions == leader.versions for one in found.values())
