"""Several learners of one run: one leads, the others follow its orders, each with its own part of the stream.

Each round the ranks exchange short messages: followers report the entries that they have decoded, and the leader says
up to which entry they admit, and which batch all learn from. So the leader alone counts, paces, publishes, saves and
refuses, and a follower is a replay and an algorithm. Entries belong to ranks by their number.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch

from ddrl.algorithms import base
from ddrl.config import validate
from ddrl.learner.core import Core, Tensors
from ddrl.learner.publisher import decode_tensors
from ddrl.networks.ranks import RankLostError
from ddrl.replay.reader import Decoded, Reader
from ddrl.store import stream, weights
from ddrl.store.checkpoints import REPLAY
from ddrl.types import Played

MOST_REPORTED = 256  # entries a round
MOST_PENDING_BYTES = 128 * 1024**2  # of a follower's entries that wait to be admitted


class Leading:
    """The leader's side of the rounds; of a learner that is alone it does nothing.

    A rank that does not report an entry within `learner.rank_timeout_s`, though it is asked, is lost.

    Args:
        core: the leader's.

    Attributes:
        leaving: a follower asks for the end of the group.
        states: the replay's part of a checkpoint, of other ranks as last collected; before that, the one loaded.
    """

    def __init__(self, core: Core) -> None:
        self._core, self._ranks = core, core.ranks
        self._reports: dict[bytes, dict[str, Any]] = {}  # what other ranks say of entries, by id
        self._timeout_s, self._waited_since = core.config.learner.rank_timeout_s, math.inf
        self._num_asked = 0  # since then
        self.leaving = False
        self._admitted: list[str] = []
        self._oldest: list[bytes] = []
        self.states: list[Tensors] = []

    def report(self, entry: Decoded) -> dict[str, Any] | None:
        """Return the fields of an entry that another rank has decoded; None: it has not yet.

        Raises:
            RankLostError: it never will, perhaps, for the entry has left the stream since it was read here.
        """
        if (found := self._reports.get(entry.entry_id)) is not None or not entry.rank:
            self._waited_since = math.inf
            return found or {}
        if self._waited_since == math.inf:
            self._waited_since, self._num_asked = time.monotonic(), 0
        # Its newest report may be older than this wait, and an update may last longer than the time-out.
        if time.monotonic() - self._waited_since > self._timeout_s and self._num_asked > 1:
            raise RankLostError(f"rank {entry.rank} does not report entry {entry.entry_id.decode()}")
        return None

    def admit(self, entry: Decoded) -> None:
        """Have the rank that decoded an entry admit it; do nothing for the leader's own."""
        if entry.rank:
            self._admitted.append(entry.entry_id.decode())

    def tell(self, until: bytes, **orders: Any) -> None:
        """Exchange messages with the followers.

        Args:
            until: they leave out entries up to this one that were not admitted.
            orders: `version` published, `chosen` to learn from a batch, `options` changed: the config, `drops` to
                drop what waits, `saves` to send the state of the replay for a checkpoint, `ends` to end.

        Raises:
            RankLostError: a follower is lost, or has other parameters.
        """
        admitted, self._admitted = self._admitted, []
        self._num_asked += 1
        message = {"until": until.decode(), "admitted": admitted, **orders}
        reports = [json.loads(data) for data in self._ranks.exchange(json.dumps(message).encode())[1:]]
        for report in reports:
            self._reports |= {entry_id.encode(): _read(*of) for entry_id, *of in report["entries"]}
            self.leaving |= report["leaves"]
            if report["checksum"] != self._core.checksum:
                raise RankLostError("a rank's parameters differ from the leader's; use machines of one kind")
        taken = stream.order(until)
        while self._reports and stream.order(oldest := next(iter(self._reports))) <= taken:
            del self._reports[oldest]
        self._core.replay.others = [report["total"] for report in reports]
        self._oldest = [report["oldest"].encode() for report in reports if report["oldest"]]
        if orders.get("saves"):
            parts = self._ranks.exchange(b"")[1:]
            self.states = [dict(decode_tensors(part)) if part else {} for part in parts]

    def replay_state(self) -> dict[str, torch.Tensor]:
        """Return the replay's part of a checkpoint."""
        states = [state for state in (*self.states, self._core.replay_state()) if state]
        return merged(states) if states else {}

    def oldest(self, own: bytes | None) -> bytes | None:
        """Return the oldest entry that any rank holds."""
        held = [own, *self._oldest] if own else self._oldest
        return min(held, key=stream.order, default=None)


def follow(core: Core, reader: Reader, leaves: threading.Event) -> None:
    """Follow the leader's orders until it ends the group.

    Args:
        core: of this rank.
        reader: of the stream, from the leader's checkpoint on.
        leaves: once set, the leader is asked for the end.

    Raises:
        RankLostError: the leader, or another follower, is lost.
    """
    pending: deque[Decoded] = deque()
    while True:
        is_full = sum(entry.memory_bytes for entry in pending) > MOST_PENDING_BYTES
        entries = [] if is_full else list(itertools.islice(reader.take(0.01), MOST_REPORTED))
        own = [entry for entry in entries if entry.rank == core.ranks.rank]
        pending.extend(own)
        report = {
            "entries": [_reported(entry) for entry in own],
            "total": core.replay.total,
            "oldest": (core.replay.oldest_entry_id or b"").decode(),
            "leaves": leaves.is_set(),
            "checksum": core.checksum,
        }
        order = json.loads(core.ranks.exchange(json.dumps(report).encode())[0])
        if "options" in order:
            core.apply_options(base.resolve(validate(order["options"]), core.resolved.spec).config)
        until, admitted = stream.order(order["until"].encode()), {*order["admitted"]}
        while pending and stream.order(pending[0].entry_id) <= until:
            entry = pending.popleft()
            if entry.entry_id.decode() in admitted:
                core.admit(entry, version=order["version"])
        if order.get("drops"):
            core.replay.drop_waiting()
        if "chosen" in order:
            core.learn(core.replay.draw_chosen(order["chosen"]))
        else:
            core.replay.pause()
        if order.get("saves"):
            state = core.replay_state()
            core.ranks.exchange(weights.encode_weights(state) if state else b"")
        if order.get("ends"):
            return


def _reported(entry: Decoded) -> tuple[Any, ...]:
    """Return what the leader must know of an entry, JSON."""
    played = None if entry.played is None else astuple(entry.played)
    return entry.entry_id.decode(), entry.reason, entry.head.decode("latin-1"), played, entry.left_out


def _read(reason: str, head: str, played: Sequence[Any] | None, left_out: bool) -> dict[str, Any]:
    """Return the fields of `Decoded` that `_reported` held."""
    return {
        "reason": reason,
        "head": head.encode("latin-1"),
        "played": None if played is None else Played(*played),
        "left_out": left_out,
    }


def merged(states: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Return the state of one replay that holds what several hold: see `Replay.state`.

    Of an entry that several name, the last one's priorities count.
    """
    if len(states) == 1:
        return dict(states[0])
    parts: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}  # entry, items, priority of each
    for state in states:
        entry, items, priority = (state[REPLAY + name] for name in ("entry", "items", "priority"))
        columns = zip(entry, items, priority.split_with_sizes(items.tolist()), strict=True)
        parts |= zip(map(tuple, entry.tolist()), columns, strict=True)
    found = dict(states[-1])
    if parts:
        entries, sizes, priorities = zip(*parts.values(), strict=True)
        found[REPLAY + "entry"], found[REPLAY + "items"] = torch.stack(entries), torch.stack(sizes)
        found[REPLAY + "priority"] = torch.cat(priorities)
    found[REPLAY + "largest"] = torch.stack([state[REPLAY + "largest"] for state in states]).amax()
    return found
