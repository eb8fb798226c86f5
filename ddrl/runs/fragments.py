"""The fragments in a run's stream, by their headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddrl import codec
from ddrl.store import stream
from ddrl.store.connection import Redis
from ddrl.store.quarantine import Rule


@dataclass
class Covered:
    """How much of a stream falls under each of some rules, and how much there is.

    Attributes:
        fragments, steps: of each rule.
        under_any: fragments under at least one.
        total: fragments in the stream.
    """

    fragments: list[int]
    steps: list[int]
    under_any: int = 0
    total: int = 0


def headers(client: Redis, run: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield id and header of the fragments in the stream, oldest first; others are left out."""
    newest = stream.newest(client, run, 1)
    last = newest[0].entry_id if newest else b"0-0"
    for entries in stream.appended(client, run, b"0-0", last, (b"h", b"p"), codec.MAX_HEADER_BYTES):
        for entry in entries:
            try:
                header = codec.parse_header(entry.fields.get(b"h", b""))
            except codec.CodecError:
                continue
            yield entry.entry_id, header | {"producer": entry.producer}


def covered(client: Redis, run: str, rules: Sequence[Rule]) -> Covered:
    """Count what falls under rules."""
    found = Covered([0] * len(rules), [0] * len(rules))
    for entry_id, header in headers(client, run):
        names = ("host", "producer", "policy_version")
        covers = [rule.covers(entry_id, *(header[name] for name in names)) for rule in rules]
        found.total += 1
        found.under_any += any(covers)
        for place, is_covered in enumerate(covers):
            found.fragments[place] += is_covered
            found.steps[place] += is_covered * header["T"] * header["N"]
    return found
