"""Quarantine: rules for fragments that a run's learner leaves out, which stay in the stream until the rule is lifted.

A learner that goes on from its checkpoint when the rules change has all that the stream still holds, less what they
cover. So a fragment that is covered is never drawn, and is drawn again once no rule covers it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

from pydantic import Field, TypeAdapter
from redis import Redis

from ddrl.store import keys, stream
from ddrl.store.connection import StoreError, call
from ddrl.store.runs import JOURNAL_LENGTH
from ddrl.store.untrusted import Count, Name

MOST_RULES = 100


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Fragments for which everything holds that is given.

    Attributes:
        host: machine that played them.
        producer: process that did.
        first_version, last_version: of the weights that played them, both included.
        since_ms, until_ms: when they were appended, by the server's clock.
    """

    host: Name | None = None
    producer: Count | None = None
    first_version: Count = 0
    last_version: Count | None = None
    since_ms: Count = 0
    until_ms: Count | None = None

    def covers(self, entry_id: bytes, host: str, producer: int, version: int) -> bool:
        """Return whether a fragment falls under the rule."""
        at_ms, last_version, until_ms = stream.order(entry_id)[0], self.last_version, self.until_ms
        return (
            self.host in (None, host)
            and self.producer in (None, producer)
            and self.first_version <= version
            and (last_version is None or version <= last_version)
            and self.since_ms <= at_ms
            and (until_ms is None or at_ms <= until_ms)
        )

    def __str__(self) -> str:
        """The rule in words, for people."""
        last = "" if self.last_version is None else str(self.last_version)
        parts = [
            f"host {self.host}" if self.host is not None else "",
            f"producer {self.producer}" if self.producer is not None else "",
            f"versions {self.first_version} to {last}".rstrip() if self.first_version or last else "",
            f"appended from {_clock(self.since_ms)} on" if self.since_ms else "",
            f"appended until {_clock(self.until_ms)}" if self.until_ms is not None else "",
        ]
        return ", ".join(filter(None, parts)) or "all"


def _clock(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1e3))


Rules = tuple[Rule, ...]
_RULES = TypeAdapter(Annotated[Rules, Field(max_length=MOST_RULES)])


def read(client: Redis, run: str) -> tuple[Rules, int]:
    """Return the rules of a run, and the revision of its state."""
    names = ("quarantine", "revision")
    found, revision = cast("list[bytes | None]", client.hmget(keys.state(run), names))
    return _RULES.validate_json(found or "[]"), int(revision or 0)


def change(
    client: Redis, run: str, revision: int, rules: Rules, entry: Mapping[str, Any], weights: bytes = b""
) -> None:
    """Replace the rules, and have the run's learner go on from its checkpoint with them.

    Args:
        client: connection to the server.
        run: its id.
        revision: as it was read with the rules that these replace.
        rules: the new ones.
        entry: of the journal.
        weights: that the learner goes back to, as safetensors; b"": none.

    Raises:
        StoreError: there was another change since, the rules are too many, or the run is gone.
    """
    if len(rules) > MOST_RULES:
        raise StoreError(f"run {run}: has {MOST_RULES} rules of quarantine, which is the most; lift some")
    text = json.dumps([asdict(rule) for rule in rules]) if rules else ""
    script_keys = [keys.state(run), keys.journal(run), keys.rollback(run)]
    args = [revision, text, weights, JOURNAL_LENGTH, secrets.token_hex(8), dict(entry)]
    if not call(client, "revise", script_keys, args):
        raise StoreError(f"run {run}: its quarantine was changed meanwhile; look at it and try again")
