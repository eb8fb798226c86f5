"""The fragments in a run's stream, by their headers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddrl import codec
from ddrl.store import stream
from ddrl.store.connection import Redis
from ddrl.store.quarantine import Rule


@dataclass
class Covered:
    """The fragments of a stream that rules of quarantine cover, counted.

    Attributes:
        fragments, steps: of each rule.
        under_any: fragments under at least one.
        total: fragments in the stream.
    """

    fragments: list[int]
    steps: list[int]
    under_any: int = 0
    total: int = 0


def headers(
    client: Redis, run: str, columns: Sequence[str] = ()
) -> Iterator[tuple[stream.Entry, dict[str, Any], dict[str, np.ndarray]]]:
    """Yield the fragments in the stream, oldest first, without their large columns.

    Entries that no append wrote, or that cannot be read, are left out.

    Args:
        client: connection to the server.
        run: its id.
        columns: names of those to decode, which are short.

    Yields:
        The entry, of which only `h`, `p` and these columns were read; its header; and those columns that it has.
    """
    newest = stream.newest(client, run, 1)
    last = newest[0].entry_id if newest else b"0-0"
    names = (b"h", b"p", *(name.encode() for name in columns))
    for entries in stream.appended(client, run, b"0-0", last, names, codec.MAX_HEADER_BYTES):
        for entry in entries:
            if entry.producer >= 0:
                with contextlib.suppress(codec.CodecError):
                    header = codec.parse_header(entry.fields.get(b"h", b""))
                    found = codec.decode_columns(entry.fields, columns) if columns else {}
                    yield entry, header, found


def covered(client: Redis, run: str, rules: Sequence[Rule]) -> Covered:
    """Count what falls under rules."""
    found = Covered([0] * len(rules), [0] * len(rules))
    for entry, header, _ in headers(client, run):
        where, version = (entry.entry_id, header["host"], entry.producer), header["policy_version"]
        covers = [rule.covers(*where, version) for rule in rules]
        found.total += 1
        found.under_any += any(covers)
        for place, is_covered in enumerate(covers):
            found.fragments[place] += is_covered
            found.steps[place] += is_covered * header["T"] * header["N"]
    return found
