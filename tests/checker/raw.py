"""What a server and a run's folder hold, read as docs/data-format.md describes them."""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checker.history import Name, is_finite
from redis import Redis, RedisError

FOLLOW_S = 0.05
COUNT = 500


def order(entry_id: bytes) -> tuple[int, int]:
    """Return a key that sorts ids as the stream does."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)


@dataclass
class Raw:
    """A run as it is stored at the end.

    Attributes:
        entries: names of the fragments by their entries' ids: of those that are there, and of those that were seen
            before the first of these; None: no append wrote it. What a server lost when it was killed is not there.
        counts: `f` of those entries that name a fragment: how many the run has with this one.
        stored: the ids of those that are there.
        spans: the newest entry by the oldest one, when the stream was last seen with this as its oldest.
        dead: reasons by the ids of entries that were refused.
        weights: digests of the versions that are stored; infinite: those whose numbers are not all finite.
        status, target: of the run, and the return at which it is solved.
        evaluations: results: version, purpose, returns.
        cursor: the last entry that the checkpoint in the folder covers; "": there is none.
        damaged: what is wrong with the folder's checkpoint; "" if nothing is.
    """

    entries: dict[bytes, Name | None] = field(default_factory=dict)
    counts: dict[bytes, int] = field(default_factory=dict)
    stored: set[bytes] = field(default_factory=set)
    spans: dict[bytes, bytes] = field(default_factory=dict)
    dead: dict[bytes, str] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    infinite: list[int] = field(default_factory=list)
    status: str = ""
    target: float | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    cursor: bytes = b""
    damaged: str = ""


def _key(run: str, name: str) -> str:
    return f"ddrl:{{{run}}}:{name}"


def _name(fields: dict[bytes, bytes]) -> Name | None:
    try:
        return Name(*(int(fields[one]) for one in (b"p", b"i", b"q")))
    except (KeyError, ValueError):
        return None


def _is_counted(fields: dict[bytes, bytes]) -> bool:
    return _name(fields) is not None and fields.get(b"f", b"").isdigit()


class Follower:
    """Reads a run's stream all the time, since the learner trims it; a context manager.

    Args:
        client: connection to the server itself, of this object alone.
        run: its id.
    """

    def __init__(self, client: Redis, run: str) -> None:
        self._client, self.run = client, run
        self.entries: dict[bytes, Name | None] = {}
        self.counts: dict[bytes, int] = {}
        self.dead: dict[bytes, str] = {}
        self.spans: dict[bytes, bytes] = {}
        self.forged: set[bytes] = set()
        """Ids of entries that a test has written itself."""
        self._after, self._dead_after = b"0-0", b"0-0"
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _follow(self) -> None:
        while not self._ended.wait(FOLLOW_S):
            try:
                self.look()
            except RedisError:  # the server is away
                continue

    def look(self) -> None:
        """Read what is new."""
        with self._lock:
            while entries := self._read("experience", self._after):
                self.entries |= {entry_id: _name(fields) for entry_id, fields in entries}
                self.counts |= {one: int(fields[b"f"]) for one, fields in entries if _is_counted(fields)}
                self._after = entries[-1][0]
            for oldest, _ in self._read("experience", b"0-0", count=1):
                self.spans[oldest] = self._after
            while entries := self._read("dead", self._dead_after):
                self.dead |= {fields[b"entry"]: fields[b"reason"].decode() for _, fields in entries}
                self._dead_after = entries[-1][0]

    def _read(self, name: str, after: bytes, count: int = COUNT) -> Any:
        return self._client.xrange(_key(self.run, name), min=b"(" + after, count=count)

    def finish(self, folder: Path | None = None) -> Raw:
        """Return what is there now; the run may go on meanwhile.

        Args:
            folder: of the run.
        """
        self.look()
        client: Any = self._client
        raw, after = Raw(dead=self.dead.copy(), spans=self.spans.copy()), b"0-0"
        while entries := self._read("experience", after):
            raw.entries |= {entry_id: _name(fields) for entry_id, fields in entries}
            after = entries[-1][0]
        raw.stored = set(raw.entries)
        first = min(map(order, raw.stored), default=(2**63, 0))
        with self._lock:
            raw.entries |= {one: name for one, name in self.entries.items() if order(one) < first}
            for one in self.forged:
                raw.entries.pop(one, None)
            raw.counts = {one: count for one, count in self.counts.items() if one in raw.entries}
        for key in client.scan_iter(match=_key(self.run, "weights:*"), count=1000):
            version, blob = int(key.rpartition(b":")[2]), client.get(key)
            if blob is not None:  # else it was superseded meanwhile
                raw.weights[version] = hashlib.sha256(blob).hexdigest()
                raw.infinite += [] if is_finite(blob) else [version]
        raw.status = client.hget(_key(self.run, "state"), "status").decode()
        raw.target = json.loads(client.get(_key(self.run, "spec")))["stop"]["return"]
        results = client.xrange(_key(self.run, "evaluations"))
        raw.evaluations = [json.loads(fields[b"result"]) for _, fields in results]
        if folder is not None and (folder / "checkpoint" / "checkpoint.json").exists():
            pointer = json.loads((folder / "checkpoint" / "checkpoint.json").read_bytes())
            raw.cursor = pointer["meta"]["cursor"].encode()
            blob = (folder / "checkpoint" / pointer["tensors"]).read_bytes()
            if len(blob) != pointer["bytes"] or zlib.crc32(blob) != pointer["crc32"]:
                raw.damaged = "its bytes are not those of checkpoint.json"
            elif not is_finite(blob):
                raw.damaged = "its numbers are not finite"
        return raw
