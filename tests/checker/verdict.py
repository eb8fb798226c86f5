"""The verdict over a history: what was acknowledged was learned from, or refused with a reason, or waits.

It judges what clients were told (history.py), what the server and the run's folder hold (raw.py) and what was learned
(the log of `tagged.network`), and shares no code with ddrl.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from checker.history import ACCEPTED, REFUSED, Append, History, Name, Weights
from checker.raw import Raw, order
from checker.tagged import RECORD

MOST = 5  # findings of one kind that are spelled out
SURE = 40.0  # expected draws of a fragment: by chance none of it is drawn once in e^40


# --- what was learned ------------------------------------------------------------------------------------------


@dataclass
class Session:
    """Passes of one network that learned, in order.

    Attributes:
        began: monotonic time of the first one.
        hashes: of the network's state before each pass, all different.
        steps: of each pass, as `tagged.steps_of`.
    """

    began: float
    hashes: list[bytes] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)


def sessions(folder: Path) -> list[Session]:
    """Return the sessions that processes logged in a folder, by the time at which they began."""
    found: dict[bytes, Session] = {}
    for path in folder.glob("*.steps"):
        data: Any = np.memmap(path, np.uint8, "r")
        at = 0
        while at + RECORD.size <= len(data):
            when, name, digest, num = RECORD.unpack_from(data, at)
            at += RECORD.size
            if at + 8 * num > len(data):
                break  # its process was killed while it wrote
            session = found.setdefault(name, Session(when))
            session.hashes.append(digest)
            session.steps.append(data[at : at + 8 * num])
            at += 8 * num
    return sorted(found.values(), key=lambda session: session.began)


class Learned:
    """How often each step was learned from.

    Args:
        passes: arrays of steps.

    Attributes:
        num_draws: steps in all passes.
    """

    def __init__(self, passes: Iterable[Any]) -> None:
        self.num_draws = 0
        self._counts: dict[int, Any] = defaultdict(lambda: np.zeros(0, np.uint32))
        for raw in passes:
            steps = np.frombuffer(raw.tobytes(), np.uint64)
            self.num_draws += len(steps)
            lanes, at = steps >> np.uint64(24), (steps & np.uint64(2**24 - 1)).astype(np.int64)
            for lane in np.unique(lanes):
                counts = np.bincount(at[lanes == lane])
                known = self._counts[int(lane)]
                size = max(len(known), len(counts))
                if size > len(known):
                    known = np.pad(known, (0, max(size, 2 * len(known)) - len(known)))
                known[: len(counts)] += counts.astype(np.uint32)
                self._counts[int(lane)] = known

    def num_steps(self) -> Iterator[tuple[int, int]]:
        """Yield each lane, and the number of its steps up to the last one that was learned from."""
        for lane, counts in self._counts.items():
            yield lane, int(counts.nonzero()[0].max(initial=-1)) + 1

    def times(self, append: Append) -> Any:
        """Return how often each step of a fragment was learned from: [N, T]."""
        rows = []
        for first in append.lanes:
            counts, begin = self._counts[first >> 24], first & (2**24 - 1)
            row = counts[begin : begin + append.num_steps]
            rows.append(np.pad(row, (0, append.num_steps - len(row))))
        return np.array(rows)


def lineage(of_run: Iterable[Session]) -> list[Any]:
    """Return the passes that led to the last network: a session continues where its first weights were before.

    What a learner did after the checkpoint from which the next one started is undone by that.
    """
    hashes: list[bytes] = []
    passes: list[Any] = []
    for session in of_run:
        if session.hashes[0] in hashes:
            fork = hashes.index(session.hashes[0])
            del hashes[fork:], passes[fork:]
        hashes += session.hashes
        passes += session.steps
    return passes


# --- the verdict -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What a run promises to learn.

    Attributes:
        epochs: on-policy, how often each step is learned from, if no fragment is dropped; 0: off-policy.
        samples_per_insert: off-policy, draws of a step.
        capacity: off-policy, of the replay.
        may_lose: fragments may be trimmed before they are learned from, as of a server whose memory was full.
        may_refuse: clients may have sent fragments that the learner has to refuse.
        warmup_steps, slack_steps: off-policy, steps before the first draw, and by which draws may be ahead or behind.
    """

    epochs: int = 0
    samples_per_insert: float = 1.0
    capacity: int = 2**62
    may_lose: bool = False
    may_refuse: bool = False
    warmup_steps: int = 0
    slack_steps: int = 0

    def draws_of_step(self, inserted: int, total: int) -> float:
        """Return how often a step is drawn, as a mean: the replay held `inserted` with it, and `total` were sent.

        With each step inserted later, `samples_per_insert` steps are drawn of all that are held; in the end the learner
        may be `slack_steps` behind.
        """
        total = max(inserted, total - self.slack_steps)
        full = max(inserted, self.capacity)
        growing = math.log(min(total, full) / inserted)
        return self.samples_per_insert * (
            growing + max(0, min(total, inserted + self.capacity) - full) / self.capacity
        )


def verdict(history: History, raw: Raw, run: str, rules: Rules, logs: Path | None = None) -> list[str]:
    """Return what is wrong with a run, one line a finding; nothing if all is as it should be.

    Args:
        history: of the clients.
        raw: what is stored, once nothing moves any more.
        run: its id.
        rules: its own.
        logs: folder of the passes of its network, if its environment and its network are those of `tagged`.
    """
    appends = [one for one in history.appends if one.run == run]
    lanes = {first >> 24 for one in appends for first in one.lanes}
    of_run = [one for one in sessions(logs) if _lane(one) in lanes] if logs is not None else []
    learned = Learned(lineage(of_run))
    findings = [*history.errors[:MOST], *_appends(appends, raw, rules, learned), *_order(appends)]
    findings += [*_versions(appends), *_weights([one for one in history.weights if one.run == run], raw)]
    findings += _stored(raw)
    if logs is not None:
        findings += (_on_policy if rules.epochs else _off_policy)(appends, raw, learned, rules)
    return findings


def _lane(session: Session) -> int:
    return int(np.frombuffer(session.steps[0][:8].tobytes(), np.uint64)[0]) >> 24


def _some(what: str, found: Iterable[Any]) -> Iterator[str]:
    found = list(found)
    if found:
        more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
        yield f"{what}: {', '.join(map(str, found[:MOST]))}{more}"


def accepted(appends: Iterable[Append]) -> dict[Name, Append]:
    """Return the fragments whose clients were told that the server has them, as told first."""
    found: dict[Name, Append] = {}
    for one in sorted((one for one in appends if one.answer in ACCEPTED), key=lambda one: one.ended):
        found.setdefault(one.name, one)
    return found


def _appends(appends: list[Append], raw: Raw, rules: Rules, learned: Learned) -> Iterator[str]:
    """Each fragment is written once, if it was acknowledged or if nobody knows, and not if it was refused.

    One that was trimmed between two looks at the stream was learned from.
    """
    known = accepted(appends)
    unclear = {one.name for one in appends if one.answer not in ACCEPTED | REFUSED}
    times = Counter(name for name in raw.entries.values() if name is not None)
    lost = (name for name, one in known.items() if not times[name] and not learned.times(one).any())
    yield from _some("acknowledged, but neither seen in the stream nor learned from", lost)
    yield from _some("in the stream more than once", (name for name, num in times.items() if num > 1))
    sent = {one.name for one in appends}
    wrong = (name for name in times if name in sent and name not in known and name not in unclear)
    yield from _some("in the stream, although its client was told that it is not", wrong)
    gone = (
        name
        for entry_id, name in raw.entries.items()
        if name in known and raw.cursor and entry_id not in raw.stored and order(entry_id) > order(raw.cursor)
    )
    yield from _some("trimmed, although no checkpoint covers it", gone)
    if not rules.may_refuse:
        refused = (
            f"{raw.entries[one]} ({raw.dead[one]})" for one in raw.dead if raw.entries.get(one) in known
        )
        yield from _some("refused, although its client did nothing wrong", refused)


def _versions(appends: list[Append]) -> Iterator[str]:
    """Nobody is told of an older version than anybody was told of before."""
    back = [one for one in appends if one.ended and one.version < one.known_version]
    yield from _some("versions went back", (f"{one.known_version} to {one.version}" for one in back))
    early = (one.name for one in appends if one.policy_version > one.published_version)
    yield from _some("played by a version that was not published", early)


def _weights(found: list[Weights], raw: Raw) -> Iterator[str]:
    """The bytes of a version never change, and all of its numbers are finite."""
    digests: dict[int, set[str]] = defaultdict(set)
    for one in found:
        if one.answer == "ok" or not one.is_publication:
            digests[one.version].add(one.digest)
    for version, digest in raw.weights.items():
        digests[version].add(digest)
    yield from _some("several weights of one version", (v for v, some in digests.items() if len(some) > 1))
    infinite = {one.version for one in found if not one.is_finite} | set(raw.infinite)
    yield from _some("weights are not finite, versions", sorted(infinite))


def _stored(raw: Raw) -> Iterator[str]:
    """Fragments are counted, reasons given, checkpoints whole, and a solved run was evaluated."""
    ids = sorted(raw.counts, key=order)
    again = (raw.entries[two] for one, two in itertools.pairwise(ids) if raw.counts[two] <= raw.counts[one])
    yield from _some("counted as if fragments before it were not there", again)
    yield from _some("refused without a reason", (one for one, reason in raw.dead.items() if not reason))
    if raw.damaged:
        yield f"the local checkpoint is damaged: {raw.damaged}"
    if raw.status == "solved":
        means = [fmean(one["returns"]) for one in raw.evaluations if one["purpose"] == "confirm"]
        if raw.target is None or not means or max(means) < raw.target:
            yield f"solved at {raw.target}, but evaluations gave {means}"
    wrong = (one["version"] for one in raw.evaluations if not all(map(math.isfinite, one["returns"])))
    yield from _some("evaluations without a finite return, of versions", wrong)


def _order(appends: list[Append]) -> Iterator[str]:
    """A collector sends one fragment after another, each until it is answered, and no step of a lane is left out."""
    of_collector: dict[tuple[int, int], list[Append]] = defaultdict(list)
    for one in appends:
        of_collector[one.name[:2]].append(one)
    for sent in of_collector.values():
        for before, one in itertools.pairwise(sent):
            if one.name == before.name:
                if one.lanes != before.lanes:
                    yield f"{one.name}: two fragments of this name"
            elif before.answer not in ACCEPTED or one.name.seq != before.name.seq + 1:
                yield f"{one.name}: sent after {before.name}, which was answered by {before.answer}"
            elif any(
                first < 0 or (last >> 24 == first >> 24 and first != last + before.num_steps)
                for last, first in zip(before.lanes, one.lanes, strict=True)
            ):
                yield f"{one.name}: its steps do not follow those of the fragment before"
            elif one.policy_version < before.version:
                yield f"{one.name}: played by {one.policy_version}, when {before.version} was known"


def _entries(appends: list[Append], raw: Raw) -> list[tuple[bytes, Append]]:
    """Return the fragments in the stream's order, without those that were refused."""
    sent = {one.name: one for one in appends}
    names = ((one, raw.entries[one]) for one in sorted(raw.entries, key=order) if one not in raw.dead)
    return [(entry_id, sent[name]) for entry_id, name in names if name in sent]


def _on_policy(appends: list[Append], raw: Raw, learned: Learned, rules: Rules) -> Iterator[str]:
    """Each fragment is learned from in `epochs` passes, in the stream's order; those that wait come last."""
    entries = _entries(appends, raw)
    waiting: list[Name] = []
    lost, odd, passed = [], [], []
    for entry_id, one in entries:
        if learned.times(one).any():
            passed += waiting
            waiting = []
            continue
        waiting.append(one.name)
        if entry_id not in raw.stored:
            lost.append(one.name)
    for name, one in (accepted(appends) | {one.name: one for _, one in entries}).items():
        times = learned.times(one)
        if times.any() and (times != rules.epochs).any():
            odd.append(f"{name} ({times.min()} to {times.max()} times)")
    if not rules.may_lose:
        yield from _some("trimmed before it was learned from", lost)
        yield from _some("never learned from, while later ones were", passed)
    yield from _some(f"not learned from {rules.epochs} times", odd)
    yield from _unknown(appends, raw, learned)


def _off_policy(appends: list[Append], raw: Raw, learned: Learned, rules: Rules) -> Iterator[str]:
    """Each fragment that was in the replay for long enough is drawn, and so are the newest ones and each place in them.

    A learner that starts has those that are in the stream. A place is a lane and a step, counted from the fragment's
    first step and, below zero, from its end.
    """
    entries, never, unseen = _entries(appends, raw), [], 0.0
    sums = [*itertools.accumulate(one.num_steps * len(one.lanes) for _, one in entries)]
    total = max(sums, default=0)
    expected: Any = defaultdict(float)
    found: Any = Counter()
    for (_, one), inserted, until in zip(entries, sums, _held(entries, sums, raw), strict=True):
        draws = rules.draws_of_step(inserted, until)
        times = learned.times(one)
        if draws * times.size > SURE and not times.any():
            never.append(one.name)
        unseen = 0.0 if times.any() else unseen + draws * times.size
        for (lane, step), num in np.ndenumerate(times):
            for place in ((lane, step), (lane, step - one.num_steps)):
                expected[place] += draws
                found[place] += int(num)
    yield from _some("never learned from", never)
    if unseen > 2 * SURE:
        yield f"of the newest fragments no step is learned from, where {unseen:.0f} draws are expected"
    places = (place for place in expected if expected[place] > SURE and not found[place])
    yield from _some("never learned from, these lanes and steps of any fragment", places)
    most = rules.samples_per_insert * (total - rules.warmup_steps + rules.slack_steps)
    if learned.num_draws > most:
        yield f"{learned.num_draws} draws of {total} steps, at most {most:.0f} are right"
    yield from _unknown(appends, raw, learned)


def _held(entries: list[tuple[bytes, Append]], sums: list[int], raw: Raw) -> Iterator[int]:
    """Yield of each entry how many steps the stream had held, in all, when the entry was last seen in it."""
    ids, oldest = [order(one) for one, _ in entries], sorted(raw.spans, key=order)
    seen = [order(one) for one in oldest]
    for one in ids:
        at = bisect.bisect(seen, one) - 1
        until = bisect.bisect(ids, order(raw.spans[oldest[at]])) if at >= 0 else 0
        yield sums[until - 1] if until else 0


def _unknown(appends: list[Append], raw: Raw, learned: Learned) -> Iterator[str]:
    """What is learned from was sent and not refused."""
    ends: Counter[int] = Counter()
    for one in appends:
        for first in one.lanes:
            ends[first >> 24] = max(ends[first >> 24], (first & (2**24 - 1)) + one.num_steps)
    strange = (hex(lane) for lane, num in learned.num_steps() if num > ends[lane])
    yield from _some("learned from steps that nobody sent, of lanes", strange)
    refused = {raw.entries.get(one) for one in raw.dead}
    wrong = (one.name for one in appends if one.name in refused and learned.times(one).any())
    yield from _some("refused and learned from", wrong)
