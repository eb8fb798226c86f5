"""All scripts against a model in plain Python: producers and two learners in any order, on a real server.

Replies are lost, so that scripts arrive twice; the server is killed and started again; it comes back older. After each
step the run that was touched is read through the Python API and compared with the model.
"""

from __future__ import annotations

import functools
import hashlib
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis
from support.private_server import PrivateServer, require_program
from support.processes import EXACT
from support.store import SPACES, fold_now, make_config

from ddrl.store import (
    bounded,
    capped_streams,
    checkpoints,
    evaluations,
    history,
    keys,
    leases,
    ledger,
    local_checkpoints,
    logs,
    metrics,
    quarantine,
    runs,
    segments,
    stream,
    weights,
)
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import LeaseLostError, RunGoneError, StoreError, call
from ddrl.store.evaluations import Evaluation, OpenEvaluations
from ddrl.store.history import History
from ddrl.store.runs import ENDED
from ddrl.store.stream import Refusal
from ddrl.types import EvaluationResult

SEEDS, EXAMPLES, STEPS, LEAST_STEPS = (12, 10, 100, 10_000) if EXACT else (6, 10, 100, 5_000)
SCRIPTS = Path(stream.__file__).parent / "scripts"
SEGMENT_MS, MAX_BYTES = 10**6, 65536  # a segment so long that no time that passes here matters
QUEUES = ("ddrl.rollout", "ddrl.rollout.box2d")
RESULT = EvaluationResult((1.0, 2.0), (5, 6))
APPENDED = ("appended_fragments", "appended_steps", "appended_bytes")
CONFIGS = {
    (weight, priority): make_config(
        weight=weight,
        priority=priority,
        rollout={"segment_s": SEGMENT_MS / 1e3},
        replay={"max_bytes": MAX_BYTES},
    )
    for weight in (1.0, 4.0)
    for priority in ("normal", "high")
}
REPEATED = {
    "duplicates",
    "producers",
    "full",
    "claim",
    "players",
    "journal",
    "logs",
}
"""What a call that arrives twice may change once more: counts of calls, beats, claims taken, and lines of text."""


# --- the model -----------------------------------------------------------------------------------------


@dataclass
class Producer:
    incarnation: int = -1
    seq: int = -1
    fragments: int = 0
    duplicates: int = 0


@dataclass
class Entry:
    """An entry of the stream, with the run's counts and its producer's up to it."""

    producer: int
    incarnation: int
    seq: int
    size: int
    fragments: int
    steps: int
    bytes: int
    of_producer: int
    entry_id: bytes = b""


@dataclass
class Run:
    """A run as the documents describe it."""

    weight: float
    priority: str
    queue: str
    status: str = "active"
    reason: str = ""
    is_open: bool = True
    fence: int | None = None
    lease: int | None = None
    handover: str = ""
    revision: int = 0
    rules: quarantine.Rules = ()
    earlier: bytes | None = None
    config_version: int = 0
    allowance: int = 0
    players: int = 1
    max_producers: int = 1000
    has_ids: bool = True
    version: int = -1
    updates: int = 0
    fragments: int = 0
    steps: int = 0
    bytes: int = 0
    trimmed_bytes: int = 0
    duplicates: int = 0
    full: int = 0
    dead: int = 0
    crashes: int = 0
    crashes_total: int = 0
    noted: int = -1  # step in which a crash was reported last
    lost: int = 0
    error: str = ""
    claim: int = 0
    played_ms: int = 0
    process_ms: int = 0
    allowance_wait_ms: int = 0
    room_wait_ms: int = 0
    episodes: int = 0
    logs: int = 0
    metrics: int = 0
    history: int = 0
    folded: int = 0
    virtual_ms: float | None = None
    away: str = ""
    entries: list[Entry] = field(default_factory=list)
    producers: dict[int, Producer] = field(default_factory=dict)
    rows: dict[int, ledger.Row] = field(default_factory=dict)
    cursor: bytes = b"0-0"
    playing: dict[str, tuple[int, float]] = field(
        default_factory=dict
    )  # process -> charge in ms, weight then
    draining: set[str] = field(default_factory=set)
    refusals: dict[str, str] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)
    latest: int = -1
    best: int = -1
    checkpoint: tuple[int, int, bytes, dict[str, Any]] | None = None  # token, number, tensors, meta
    stray: dict[str, int] = field(default_factory=dict)  # part -> token
    evaluating: dict[str, str | None] = field(default_factory=dict)  # id -> player; None: it has a result
    results: list[str] = field(default_factory=list)
    journal: list[str] = field(default_factory=lambda: ["created"])

    @property
    def live_bytes(self) -> int:
        return self.bytes - self.trimmed_bytes

    @property
    def waiting(self) -> list[Entry]:
        return [e for e in self.entries if stream.order(e.entry_id) > stream.order(self.cursor)]

    @property
    def may_be_played(self) -> bool:
        return self.status == "active" and self.is_open and self.version >= 0 and self.lease is not None

    @property
    def wants(self) -> bool:
        return self.may_be_played and self.steps < self.allowance

    @property
    def share(self) -> int:
        """Steps that one producer should append next: all that are left, or half an even share of them."""
        left = self.allowance - self.steps
        return math.ceil(left / (2 * self.players)) if left > 0 and self.players > 1 else left

    def append(
        self, who: tuple[int, int, int], steps: int, size: int, node: str, spent: dict[str, int]
    ) -> str:
        producer, incarnation, seq = who
        known = self.producers.get(producer)
        is_folded = known is None and producer <= self.folded
        is_taken = known is not None and (known.incarnation != incarnation or known.seq > seq)
        if self.status not in ("active", "paused") or is_folded or is_taken:
            return "STOPPED"
        if known is None and len(self.producers) >= self.max_producers:
            self.full += 1
            return "FULL"
        known = known or Producer()
        newest = known.seq
        if seq == newest:
            self.duplicates, known.duplicates = self.duplicates + 1, known.duplicates + 1
        elif self.live_bytes + size > MAX_BYTES or not self.has_ids:
            self.full += 1
            return "FULL"
        else:
            self.fragments, self.steps, self.bytes = self.fragments + 1, self.steps + steps, self.bytes + size
            fragments = (
                known.fragments + seq - newest
            )  # those that a restart of the server lost are counted, too
            known = Producer(incarnation, seq, fragments, known.duplicates)
            self.entries.append(Entry(*who, size, self.fragments, self.steps, self.bytes, fragments))
            self.played_ms, self.process_ms = (
                self.played_ms + spent["played_ms"],
                self.process_ms + spent["process_ms"],
            )
            self.allowance_wait_ms += spent["allowance_wait_ms"]
            self.room_wait_ms += spent["room_wait_ms"]
            self.crashes, self.episodes = 0, self.episodes + 1
        self.producers[producer] = known
        if self.status == "paused" or node in self.draining:
            return "YIELD"
        if self.claim > 0:
            self.claim -= 1
            return "YIELD"
        return "WAIT" if self.steps >= self.allowance else "GO"

    def count(self, entry: Entry, *, refused: bool) -> None:
        """Let the learner read an entry: its producer's fragments before it were read, or never will be."""
        row = self.rows.get(entry.producer, ledger.Row())
        unread = row.unread + max(entry.of_producer - 1 - row.decided, 0)
        consumed, dead = row.consumed + (not refused), row.refused + refused
        self.rows[entry.producer] = ledger.Row(consumed, dead, unread, entry.incarnation, entry.seq)
        self.cursor = entry.entry_id

    def trim(self, first_kept: bytes) -> int:
        kept = [entry for entry in self.entries if stream.order(entry.entry_id) >= stream.order(first_kept)]
        num, self.entries = len(self.entries) - len(kept), kept
        self.trimmed_bytes = kept[0].bytes - kept[0].size if kept else self.bytes
        return num

    def fold(self, quiet: set[int], newest: int) -> int:
        """Fold producers of whom nothing waits, and the quiet ones if there are many; return their number."""
        is_crowded = len(self.producers) > ledger.MIN_PRODUCERS // 2
        done = [
            p
            for p, one in self.producers.items()
            if (p >= 0 and p in self.rows and one.fragments == self.rows[p].decided)
            or (is_crowded and p in quiet)
        ]
        for one in done:
            producer, row = self.producers.pop(one), self.rows.pop(one, None)
            if row is None:  # no entry of it was read
                producer, row = Producer(), ledger.Row()
            total, whole = self.producers.get(-2, Producer(0, 0)), self.rows.get(-2, ledger.Row())
            counts = (total.fragments + producer.fragments, total.duplicates + producer.duplicates)
            self.producers[-2] = Producer(0, 0, *counts)
            counts = (whole.consumed + row.consumed, whole.refused + row.refused, whole.unread + row.unread)
            self.rows[-2] = ledger.Row(*counts)
            self.folded = max(self.folded, one if one <= newest else 0)
        return len(done)

    def set_status(self, new: str, reason: str) -> bool:
        if (self.status, self.reason) == (new, reason):
            return True
        ended = new in ENDED
        if self.status not in (
            {"active", "paused"}
            if ended
            else {"active"}
            if new == "paused"
            else {"paused", *ENDED} - {"solved"}
        ):
            return False
        self.status, self.reason, self.is_open = new, reason, True
        if new == "active":
            self.crashes, self.error = 0, ""
        self.journal.append(new)
        return True

    def refund(self, process: str, spent_ms: int = 0) -> None:
        """Let a process play no more: it is charged what it has spent."""
        if (noted := self.playing.pop(process, None)) is not None:
            charge_ms, weight = noted
            self.virtual_ms = (self.virtual_ms or 0.0) + (spent_ms - charge_ms) / weight

    def take_evaluation(self, name: str, player: str) -> bool:
        if self.evaluating.get(name) not in ("", player):
            return False
        self.evaluating[name] = player
        return True

    def finish_evaluation(self, name: str) -> None:
        if self.evaluating.get(name) is not None:
            self.evaluating[name] = None
            self.results.append(name)


@dataclass
class Server:
    """What a server knows."""

    runs: dict[str, Run] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    producers: int = 0


# --- the wire ------------------------------------------------------------------------------------------


class Wire:
    """Counts the scripts that a client calls; sends them twice, as redis-py does after a lost reply.

    Attributes:
        calls: by name of the script.
        is_lost: whether the first replies are lost.
        before: what happens once, just before a script of that name arrives.
    """

    def __init__(self, client: Redis) -> None:
        self.calls, self.is_lost, self.before = Counter[str](), False, dict[str, Callable[[], object]]()
        self._names = dict[str, str]()
        texts = {path.stem: path.read_text("utf-8") for path in SCRIPTS.glob("*.lua")}
        for name, text in texts.items():
            before = texts["common"] + (texts["fence"] if text.startswith("-- fenced\n") else "")
            digest = hashlib.sha1((before + text).encode()).hexdigest()
            self._names |= {before + text: name, digest: name}
        self._execute = client.execute_command
        client.execute_command = self._send  # type: ignore[method-assign]

    def _send(self, command: str, *arguments: Any, **options: Any) -> Any:
        if command not in ("EVAL", "EVALSHA"):
            return self._execute(command, *arguments, **options)
        name = self._names[arguments[0]]
        self.before.pop(name, lambda: None)()
        reply = self._execute(command, *arguments, **options)
        self.calls[name] += 1
        return self._execute(command, *arguments, **options) if self.is_lost else reply


# --- the machine ---------------------------------------------------------------------------------------

RUN, FEW = st.integers(0, 2), st.integers(0, 3)
AGE = st.sampled_from([0, 0, 0, 1])  # of a learner: 0 is the newest
AGES = st.sampled_from([0, 1, 2, 2])  # 2 is the operator
NODE = st.sampled_from(["a", "b"])
PROCESS = st.builds(segments.Process, NODE, st.integers(1, 3))
REASON = st.sampled_from(["one", "two"])


def step(**strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule whose replies may be lost."""

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def taken(self: Scripts, is_lost: bool, **arguments: Any) -> None:
            Scripts.steps += 1
            self.num_steps += 1
            self.wire.is_lost, self.has_failed = is_lost, True
            function(self, **arguments)
            self.wire.is_lost = False
            self.check(self.touched, is_whole=self.num_steps % 4 == 0)
            self.has_failed = False

        del taken.__wrapped__  # type: ignore[attr-defined]
        return rule(is_lost=st.sampled_from([False, False, True]), **strategies)(taken)

    return decorate


class Scripts(RuleBasedStateMachine):
    """A server, what it should know, and its clients."""

    private: PrivateServer
    wire: Wire
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.client, self.folder = self.private.client, Path(tempfile.mkdtemp(prefix="ddrl-m", dir="/tmp"))
        self.client.flushall()
        self.wire.is_lost = self.has_failed = False
        self.wire.before.clear()
        self.server, self.num_steps, self.touched = Server(), 0, ""
        self.names: list[str] = []
        self.tokens: dict[str, list[int]] = {}  # of the learners, the newest last
        self.players: dict[int, list[Any]] = {}  # slot -> run, producer, incarnation, next seq
        self.snapshots: dict[str, Run] = {}  # as they were when the local checkpoint was written
        self.versions, self.incarnations, self.was_restarted = Counter[str](), 0, False

    def teardown(self) -> None:
        shutil.rmtree(self.folder)
        if self.has_failed:
            return
        for name in self.names:
            self.check(name)
        assert runs.names(self.client) == sorted(self.server.runs, key=runs.names(self.client).index)

    # --- helpers ---

    def touch(self, number: int) -> tuple[str, Run | None]:
        """One of the runs; the second part is None if the server does not know it."""
        self.touched = self.names[number % len(self.names)]
        return self.touched, self.server.runs.get(self.touched)

    def expect(self, run: Run | None, act: Callable[[], Any]) -> Any:
        """The model's answer to a call, which arrives twice if its first reply is lost."""
        answer = act()
        if self.wire.is_lost:
            before = deepcopy(run)
            answer = act()
            if run is not None and before is not None:
                assert {name for name in vars(run) if vars(run)[name] != vars(before)[name]} <= REPEATED
                assert [(p.seq, p.fragments) for p in run.producers.values()] == [
                    (p.seq, p.fragments) for p in before.producers.values()
                ]
        return answer

    def token(self, name: str, age: int) -> int:
        """The token of the newest learner, or of the one before."""
        return self.tokens[name][-1 - age] if age < len(self.tokens[name]) else 1

    def write(self, name: str, age: int, act: Callable[[int], Any]) -> bool:
        """Let a learner write; return whether it may."""
        run, token = self.server.runs.get(name), self.token(name, age)
        error: type[StoreError] | None = None
        if run is None or run.fence is None or run.fence < token:
            error = RunGoneError
        elif run.fence != token:
            error = LeaseLostError
        if error is None:
            act(token)
            return True
        with pytest.raises(error):
            act(token)
        return False

    def take_over(self, name: str, *, force: bool, after: int = 0) -> bool:
        run = self.server.runs.get(name)
        token = leases.acquire(
            self.client, name, host="h", folder="/", ttl_ms=10**7, force=force, after=after
        )
        if run is None or (run.lease is not None and not force):
            assert token is None
            return False
        stored = int(self.client.get(keys.lease(name)) or 0)
        # Whose first reply is lost finds the lease taken, by itself.
        assert token == (None if self.wire.is_lost and not force else stored)
        assert stored > max(run.fence or 0, after)
        run.fence = run.lease = stored
        run.handover = ""
        if token is not None:
            self.tokens[name].append(token)
        return token is not None

    def entries(self, name: str) -> list[stream.Entry]:
        return stream.read(self.client, name, b"0-0", count=10**6)

    # --- runs ---

    @initialize()
    def begin(self) -> None:
        self.add_run(1.0, "normal", 0)
        self.add_run(4.0, "normal", 0)

    def add_run(self, weight: float, priority: str, queue: int) -> None:
        name = runs.create(self.client, CONFIGS[weight, priority], SPACES, queues=(QUEUES[queue], "e"))
        self.names.append(name)
        self.server.runs[name], self.tokens[name], self.touched = (
            Run(weight, priority, QUEUES[queue]),
            [],
            name,
        )
        self.take_over(name, force=False)

    @precondition(lambda self: len(self.names) < 3)
    @step(
        weight=st.sampled_from([1.0, 4.0]),
        priority=st.sampled_from(["normal", "high"]),
        queue=st.integers(0, 1),
    )
    def create(self, weight: float, priority: str, queue: int) -> None:
        self.add_run(weight, priority, queue)

    @step(
        number=RUN,
        age=AGES,
        new=st.sampled_from(["active", "active", "paused", "stopped", "failed", "solved", "complete"]),
        reason=REASON,
    )
    def set_status(self, number: int, age: int, new: str, reason: str) -> None:
        name, run = self.touch(number)

        def act(token: int | None) -> None:
            if new == "complete":
                runs.complete(self.client, name, token or 0)
                if run is not None and run.status in ENDED:
                    run.is_open = False
                return
            answer = runs.set_status(self.client, name, new, reason, token=token)
            assert answer == (run is not None and self.expect(run, lambda: run.set_status(new, reason)))

        if age < 2:
            self.write(name, age, act)
        else:
            act(None)

    @step(number=RUN, is_ended=st.booleans(), is_late=st.sampled_from([False, False, True]))
    def delete(self, number: int, is_ended: bool, is_late: bool) -> None:
        """Delete a run that has ended and whose lease is free, unless a learner takes it meanwhile."""
        name, run = self.touch(number)
        if run is not None and is_ended:
            run.set_status("stopped", "enough")
            runs.set_status(self.client, name, "stopped", "enough")
            runs.complete(self.client, name, 0)
            self.client.delete(keys.lease(name))
            run.is_open, run.lease = run.status not in ENDED, None
        if run is None or run.status not in ENDED or run.is_open or run.lease is not None:
            with pytest.raises(StoreError):
                runs.delete(self.client, name)
        elif is_late:
            self.wire.before["delete_run"] = lambda: self.take_over(name, force=True)
            with pytest.raises(StoreError, match="goes on again"):
                runs.delete(self.client, name)
        else:
            assert runs.delete(self.client, name) > 1
            del self.server.runs[name]
            self.server.deleted.add(name)

    @step(
        number=RUN,
        weight=st.sampled_from([1.0, 4.0]),
        priority=st.sampled_from(["normal", "high"]),
        stale=st.booleans(),
    )
    def change(self, number: int, weight: float, priority: str, stale: bool) -> None:
        name, run = self.touch(number)
        version = run.config_version + 5 * stale if run else 0
        changes = {"weight": (0, weight), "priority": ("", priority)}

        def act() -> int:
            return runs.change(self.client, name, CONFIGS[weight, priority], changes, version=version)

        if run is None or stale:
            with pytest.raises(StoreError, match="changed meanwhile"):
                act()
            return
        assert act() == version + 1 == runs.state(self.client, name).config_version
        assert runs.config(self.client, name) == CONFIGS[weight, priority]
        run.weight, run.priority, run.config_version = weight, priority, version + 1
        run.journal += ["set", "set"]

    @step(
        number=RUN,
        kind=st.sampled_from(["note", "log", "handover", "crash", "refuse"]),
        reason=REASON,
        host=NODE,
    )
    def note(self, number: int, kind: str, reason: str, host: str) -> None:
        name, run = self.touch(number)
        crashes = None
        if kind == "note":
            runs.note(self.client, name, "noted", reason)
        elif kind == "log":
            logs.add(self.client, name, "learner", "INFO", reason)
        elif kind == "handover":
            runs.request_handover(self.client, name, host)
        elif kind == "crash":
            crashes = segments.note_crash(self.client, name, reason)
        else:
            segments.note_refusal(self.client, name, host, reason)

        def act() -> int | None:
            if run is None:
                return 0 if kind == "crash" else None
            is_new = kind == "crash" and run.noted != self.num_steps  # a report that comes again counts once
            if is_new:
                run.crashes, run.crashes_total, run.error = run.crashes + 1, run.crashes_total + 1, reason
                run.noted = self.num_steps
            run.logs += kind == "log"
            run.handover = host if kind == "handover" else run.handover
            is_refused = kind == "refuse" and run.refusals.get(host) != reason
            if kind in ("note", "handover") or is_new or is_refused:
                run.journal.append({"note": "noted", "crash": "crashed", "refuse": "refused"}.get(kind, kind))
            if kind == "refuse":
                run.refusals[host] = reason
            return run.crashes if kind == "crash" else None

        assert crashes == self.expect(run, act)

    @step(
        number=RUN,
        age=AGE,
        kind=st.sampled_from(["rules", "weights", "stale", "end"]),
        version=st.integers(1, 3),
    )
    def revise(self, number: int, age: int, kind: str, version: int) -> None:
        name, run = self.touch(number)
        revision = run.revision if run else 0
        if kind == "end":
            if (
                self.write(name, age, lambda token: runs.end_rollback(self.client, name, token, revision))
                and run
            ):
                run.earlier = None
            return
        rules, blob = (quarantine.Rule(first_version=version),), b"w" if kind == "weights" else b""

        def act() -> None:
            read = revision + 5 * (kind == "stale")
            quarantine.change(self.client, name, read, rules, {"event": "revised"}, blob)

        if run is None or kind == "stale":
            with pytest.raises(StoreError, match="changed meanwhile"):
                act()
            return
        act()
        run.revision, run.rules, run.earlier = revision + 1, rules, blob or run.earlier
        run.journal.append("revised")

    # --- learners ---

    @step(
        number=RUN,
        age=AGE,
        kind=st.sampled_from(["acquire", "acquire", "force", "old", "renew", "renew", "release", "expire"]),
    )
    def hold(self, number: int, age: int, kind: str) -> None:
        name, run = self.touch(number)
        token = self.token(name, age)
        if kind == "old" and (counts := self.client.hgetall(keys.counts(name))):
            self.client.hset(keys.state(name), mapping=counts)  # as an earlier version of ddrl
            self.client.delete(keys.counts(name))
        if kind in ("acquire", "force", "old"):
            self.take_over(name, force=kind != "acquire")
        elif kind == "renew":
            if (
                self.write(name, age, lambda token: leases.renew(self.client, name, token, ttl_ms=10**7))
                and run
            ):
                run.lease = run.fence
        elif kind == "release":
            leases.release(self.client, name, token)
            if run and run.lease == token:
                run.lease = None
        else:  # its time passes
            self.client.delete(keys.lease(name))
            if run:
                run.lease = None

    @step(number=RUN, age=AGE, more=st.sampled_from([0, 40, 1000]), players=FEW, drop=st.integers(0, 4))
    def publish(self, number: int, age: int, more: int, players: int, drop: int) -> None:
        self.publish_next(self.touch(number)[0], age, more, players, drop)

    def publish_next(self, name: str, age: int, more: int, players: int, drop: int) -> None:
        run = self.server.runs.get(name)
        self.versions[name] += 1
        version, blob = self.versions[name], b"weights %d" % self.versions[name]
        fields = {"allowance": (run.steps if run else 0) + more, "updates": 10 * version, "players": players}
        dropped = tuple(sorted(run.blobs)[:-drop]) if run and drop else ()
        onnx = b"onnx" * (version % 2)

        def act(token: int) -> None:
            more = {"onnx": onnx, "drop": dropped, **fields}
            weights.publish(self.client, name, token, version=version, blob=blob, **more)

        if self.write(name, age, act) and run:
            assert version > run.version  # versions only grow
            run.version = run.latest = version
            run.allowance, run.updates, run.players = fields["allowance"], fields["updates"], players
            run.blobs = {old: data for old, data in run.blobs.items() if old not in dropped} | {version: blob}

    @step(number=RUN, age=AGE, more=st.sampled_from([-20, 0, 40, 1000]), players=FEW)
    def allow(self, number: int, age: int, more: int, players: int) -> None:
        self.set_allowance(self.touch(number)[0], age, more, players)

    def set_allowance(self, name: str, age: int, more: int, players: int) -> None:
        run = self.server.runs.get(name)
        allowance, before = (run.steps if run else 0) + more, stream.remaining(self.client, name).allowance_id

        def act(token: int) -> None:
            stream.allow(self.client, name, token, allowance, updates=7, players=players)

        is_written = self.write(name, age, act)
        assert stream.await_allowance(self.client, name, before, block_ms=1) == is_written
        if is_written and run:
            run.allowance, run.updates, run.players = allowance, 7, players

    @step(number=RUN, age=AGE)
    def write_figures(self, number: int, age: int) -> None:
        name, run = self.touch(number)
        best = run.latest if run else 0
        may = self.write(name, age, lambda token: metrics.add(self.client, name, token, {"loss": 0.5}))
        assert may == self.write(
            name, age, lambda token: weights.mark_best(self.client, name, token, best, 1.5)
        )
        if may and run:
            run.metrics, run.best = run.metrics + 1 + self.wire.is_lost, best

    @step(number=RUN, age=AGE, num=st.integers(1, 3))
    def keep_history(self, number: int, age: int, num: int) -> None:
        name, run = self.touch(number)
        begin = run.history if run else 0
        rows = [{"time_s": at, "env_steps": 2**at, "return": 1.0} for at in range(begin, begin + num)]
        tables: dict[str, list[history.Row]] = {"metrics": [], "episodes": rows}
        if self.write(name, age, lambda token: History(self.client, name, token).add(tables)) and run:
            run.history += num

    @step(number=RUN, age=AGE, count=st.integers(1, 9), refuse=st.integers(0, 9))
    def learn(self, number: int, age: int, count: int, refuse: int) -> None:
        self.read_entries(self.touch(number)[0], age, count, refuse)

    def read_entries(self, name: str, age: int, count: int, refuse: int) -> None:
        """Read some entries, refuse at most one, and write the rows of the ledger."""
        run = self.server.runs.get(name)
        read = run.waiting[:count] if run else []
        draft, may = deepcopy(run), True
        for place, entry in enumerate(read):
            if place == refuse:
                may = self.write(
                    name,
                    age,
                    lambda t, e=entry: stream.refuse(
                        self.client, name, t, [Refusal(e.entry_id, b"head", "bad")]
                    ),
                )
                if may and run and draft:
                    run.dead += 1
            if draft:
                draft.count(entry, refused=place == refuse)
        rows, cursor = (draft.rows, draft.cursor) if draft else ({}, b"0-0")
        assert may in (self.write(name, age, lambda t: ledger.put(self.client, name, t, rows, cursor)), True)
        if run and draft and run.fence == self.token(name, age):
            run.rows, run.cursor = draft.rows, draft.cursor

    learn_more = learn

    @step(number=RUN, age=AGE, place=st.integers(0, 6))
    def trim(self, number: int, age: int, place: int) -> None:
        name, run = self.touch(number)
        ids = [entry.entry_id for entry in run.entries] if run else []
        first_kept = ids[place] if place < len(ids) else stream.following(ids[-1]) if ids else b"1-0"

        def act(token: int) -> None:
            num = stream.trim(self.client, name, token, first_kept)
            assert run and num == self.expect(run, lambda: run.trim(first_kept))

        self.write(name, age, act)

    @step(number=RUN, age=AGE, num=st.integers(1, 3))
    def refuse_forged(self, number: int, age: int, num: int) -> None:
        """Entries that no append wrote are recorded and deleted."""
        name, run = self.touch(number)
        if run is None:
            return
        ids = [self.client.xadd(keys.experience(name), {"h": "x"}) for _ in range(num)]
        forged = [Refusal(one, b"head", "no append wrote it", is_fragment=False) for one in ids]
        if self.write(name, age, lambda t: stream.refuse(self.client, name, t, forged)):
            run.dead += num
            newest = self.client.xrevrange(keys.dead(name), count=num)
            assert [fields[b"entry"] for _, fields in newest] == ids[::-1]
        else:
            assert self.client.xdel(keys.experience(name), *ids) == num

    @step(number=RUN, age=AGE, size=st.sampled_from([1_000, 9_000]))
    def drop_next(self, number: int, age: int, size: int) -> None:
        """An entry after all others that is too long is recorded and deleted, once; another one stays."""
        name, run = self.touch(number)
        last = self.client.xrevrange(keys.experience(name), count=1)
        cursor = last[0][0] if last else b"0-0"
        forged = self.client.xadd(keys.experience(name), {"h": b"x" * size}) if run else b""
        done = self.write(name, age, lambda t: stream.drop_next(self.client, name, t, 5_000, cursor))
        if run is None:
            return
        is_dropped = bool(done) and size > 5_000
        run.dead += is_dropped
        assert self.client.xdel(keys.experience(name), forged) == (not is_dropped)

    @step(number=RUN, age=AGE, is_read=st.booleans(), forged=st.sampled_from(["", *APPENDED]))
    def correct_counts(self, number: int, age: int, is_read: bool, forged: str) -> None:
        """A worker forges a count; a learner that has read all sets it right."""
        name, run = self.touch(number)
        if is_read:
            self.read_entries(name, age, 10**6, -1)
        if run is None:
            return
        true = dict(zip(APPENDED, (run.fragments, run.steps, run.bytes), strict=True))
        if forged:
            self.client.hset(keys.counts(name), mapping=true | {forged: true[forged] + 3})
        has_counts = self.client.hexists(keys.counts(name), APPENDED[0])

        def act(token: int) -> None:
            counted = stream.Counted(run.cursor, run.fragments, run.steps, run.bytes)
            found = stream.correct_counts(self.client, name, token, counted, run.trimmed_bytes)
            differed = not run.waiting and (forged != "" or not has_counts)
            assert found == (differed and not self.wire.is_lost)

        if not self.write(name, age, act) or run.waiting:
            self.client.hset(keys.counts(name), mapping=true)

    @step(number=RUN, age=AGE, slot=FEW, times=FEW, is_last=st.booleans())
    def lower_ids(self, number: int, age: int, slot: int, times: int, is_last: bool) -> None:
        """Streams whose next id is far in the future, or that have none left, get the clock's ids again."""
        name, run = self.touch(number)
        if run is None:
            return
        latest = capped_streams.latest(self.client)
        for key in (keys.experience, keys.episodes, keys.evaluations, keys.journal, keys.logs):
            late = f"{2**64 - 1}-{2**64 - 1}" if is_last else b"9" + latest
            self.client.xdel(key(name), self.client.xadd(key(name), {"x": ""}, id=late))
        run.has_ids = not is_last
        self.players.pop(slot, None)
        self.play(number, slot, 50, "a", 0, times)
        runs.note(self.client, name, "noted", "late")
        run.journal += ["noted"] * run.has_ids * (1 + self.wire.is_lost)

        def act(token: int) -> None:
            stream.lower_ids(self.client, name, token, run.cursor, latest)
            assert stream.trim(self.client, name, token, stream.following(run.cursor)) == 0

        if not self.write(name, age, act):
            self.take_over(name, force=True)
            assert self.write(name, 0, act)
        run.has_ids, run.entries = True, run.waiting
        run.trim(stream.following(run.cursor))
        for entry, stored in zip(run.entries, self.entries(name), strict=True):
            is_late = stream.order(entry.entry_id) > stream.order(latest)
            assert (entry.entry_id != stored.entry_id) == is_late
            assert stream.order(stored.entry_id) <= stream.order(latest)
            entry.entry_id = stored.entry_id

    @step(number=RUN, age=AGE, most=st.sampled_from([3, 1000, 1000]))
    def limit_producers(self, number: int, age: int, most: int) -> None:
        name, run = self.touch(number)
        script_keys = [keys.state(name)] * 2

        def act(token: int) -> None:
            call(self.client, "set_fields", script_keys, [token, "max_producers", most])

        if self.write(name, age, act) and run:
            run.max_producers = most

    @step(
        number=RUN,
        age=AGE,
        is_read=st.booleans(),
        is_late=st.sampled_from([False, False, True]),
        is_forged=st.sampled_from([False, False, True]),
    )
    def fold(self, number: int, age: int, is_read: bool, is_late: bool, is_forged: bool) -> None:
        """Fold producers; an append of one of them may come between, and then none is folded."""
        name, run = self.touch(number)
        if is_read:
            self.read_entries(name, age, 10**6, -1)
        if is_forged and run:  # a record under an id that the counter has not given
            forged = self.server.producers + 10**6
            self.client.hset(keys.producers(name), forged, ledger.Producer(fragments=5).encode())
            run.producers[forged] = Producer(0, 0, 5)
        read_ms = stream.order(run.cursor)[0] if run and run.waiting else math.inf
        stored = self.client.hgetall(keys.producers(name))
        quiet = {int(p) for p, value in stored.items() if ledger.Producer.decode(value).last_ms < read_ms}
        quiet.discard(-2)
        draft, rows, newest = deepcopy(run), deepcopy(run.rows) if run else {}, self.server.producers
        num = draft.fold(quiet, newest) if draft else 0
        folded = {p for p in run.producers if p >= 0 and p not in draft.producers} if run and draft else set()
        late = [
            slot
            for slot, player in self.players.items()
            if is_late and player[:2] == [name, min(folded, default=0)]
        ]
        if late and self.token(name, age) == (run and run.fence):
            self.wire.before["fold"] = lambda: self.append_of(late[0], size=100, node="a", back=0)
        checkpoint = {str(producer): list(vars(row).values()) for producer, row in rows.items()}

        def act(token: int) -> None:
            before = deepcopy(run.producers) if run else {}
            found = fold_now(self.client, name, token, checkpoint)
            if run and run.producers == before:
                assert found == (0 if self.wire.is_lost else num)  # a second call finds nothing to fold
                run.fold(quiet, newest)
            else:
                assert found == 0

        if not num:  # nothing is written
            assert fold_now(self.client, name, 1, checkpoint) == 0
        else:
            self.write(name, age, act)
        listed = {p for p in (run.producers if run else ()) if p >= 0}
        assert ledger.unlisted(self.client, name, range(99)) == [p for p in range(99) if p not in listed]

    # --- producers ---

    def append_of(self, slot: int, *, size: int, node: str, back: int) -> None:
        """Let a player append its next fragment, or one `back` again."""
        name, producer, incarnation, next_seq = self.players[slot]
        run, seq = self.server.runs.get(name), max(next_seq - back, 0)
        fields = {b"h": bytes(size)}
        spent = {"played_ms": 3, "process_ms": 7, "allowance_wait_ms": size % 3, "room_wait_ms": size % 2}
        who = {"producer": producer, "incarnation": incarnation, "seq": seq, "num_transitions": 10}
        reply = stream.append(
            self.client, name, fields, **who, episode_returns=[1.0], node=node, pid=slot, **spent
        )
        whole = size + 1 + stream.ENTRY_OVERHEAD_BYTES
        act = (
            functools.partial(run.append, (producer, incarnation, seq), 10, whole, node, spent)
            if run
            else lambda: "STOPPED"
        )
        answer = self.expect(run, act)
        assert reply.answer.value == answer
        assert reply.version == (run.version if run else -1)
        assert reply.remaining_steps == (run.share if run and answer != "STOPPED" else 0)
        if answer == "WAIT":
            assert not stream.await_allowance(self.client, name, reply.allowance_id, block_ms=1)
        if answer not in ("FULL", "STOPPED") and seq == next_seq:
            self.players[slot][3] += 1
        if answer == "STOPPED":
            del self.players[slot]
        for entry, stored in zip(run.entries if run else [], self.entries(name), strict=True):
            entry.entry_id = entry.entry_id or stored.entry_id

    def play(self, number: int, slot: int, size: int, node: str, back: int, times: int) -> None:
        name, run = self.touch(number)
        if slot not in self.players:
            self.players[slot] = [name, stream.new_producer(self.client, name), self.incarnations, 0]
            self.incarnations += 1
            self.server.producers += 1
            while (
                run is not None and self.server.producers in run.producers
            ):  # of a server that came back older
                self.server.producers += 1
            assert self.players[slot][1] == self.server.producers
        for _ in range(times):
            if slot in self.players:
                self.touched = self.players[slot][0]
                self.append_of(slot, size=size, node=node, back=back)

    @step(number=RUN, slot=FEW, size=st.sampled_from([10, 100, 3000, 20_000]), node=NODE)
    def append(self, number: int, slot: int, size: int, node: str) -> None:
        self.play(number, slot, size, node, 0, 1)

    @step(number=RUN, slot=FEW, node=NODE, times=st.integers(2, 4))
    def append_several(self, number: int, slot: int, node: str, times: int) -> None:
        self.play(number, slot, 50, node, 0, times)

    @step(number=RUN, slot=FEW, node=NODE, back=st.integers(1, 3))
    def append_again(self, number: int, slot: int, node: str, back: int) -> None:
        self.play(number, slot, 60, node, back, 1)

    @precondition(lambda self: self.players)
    @step(slot=FEW, is_new=st.booleans())
    def restart_player(self, slot: int, is_new: bool) -> None:
        """A process begins anew: as another producer, or under another incarnation."""
        if slot in self.players and not is_new:
            self.incarnations += 1
            self.players[slot][2:] = [self.incarnations, 0]
        else:
            self.players.pop(slot, None)

    append_more = append_several

    @step(number=RUN, num=st.integers(1, 2), for_ms=st.sampled_from([0, 90_000]))
    def claim(self, number: int, num: int, for_ms: int) -> None:
        name, run = self.touch(number)
        stream.claim(self.client, name, num, for_ms=for_ms)
        if run and run.status == "active":
            run.claim = num if for_ms else 0

    # --- segments ---

    def loads(self) -> dict[str, segments.RunLoad]:
        return {load.run: load for load in segments.active(self.client)}

    def feed(self) -> None:
        """Let all active runs want processes."""
        for name, run in self.server.runs.items():
            if run.status == "active" and (run.lease is not None or self.take_over(name, force=False)):
                if run.version < 0:
                    self.publish_next(name, 0, 1000, 1, 0)
                self.set_allowance(name, 0, 1000, 1)

    @step(
        process=PROCESS,
        served=st.sampled_from([QUEUES, QUEUES[:1], QUEUES[1:]]),
        without=st.integers(-3, 2),
        limit=st.sampled_from([None, None, None, 10.0]),
        is_fed=st.booleans(),
        times=st.integers(1, 3),
    )
    def choose(
        self,
        process: segments.Process,
        served: tuple[str, ...],
        without: int,
        limit: float | None,
        is_fed: bool,
        times: int,
    ) -> None:
        if is_fed:
            self.feed()
        left_out = [self.names[without]] if 0 <= without < len(self.names) else []
        self.choose_some(process, served, left_out, limit, times)

    def choose_some(
        self,
        process: segments.Process,
        served: tuple[str, ...],
        left_out: list[str],
        limit: float | None,
        times: int,
    ) -> None:
        for number in range(times):
            one = replace(process, pid=(process.pid + number) % 4)
            found = segments.choose(self.client, one, served, limit_s=limit, cannot_play=left_out)
            for _ in range(1 + self.wire.is_lost):
                best = self.choose_in_model(one, served, left_out, limit, found)
            assert (found is None) == (not best) and (found is None or found in best)
            self.touched = found or self.names[0]
        loads = {load.run: load for load in segments.active(self.client)}
        known = self.server.runs.items()
        assert set(loads) == {name for name, run in known if run.status == "active" and run.is_open}
        for name, load in loads.items():
            run = self.server.runs[name]
            assert load.wants == run.wants and (load.weight, load.priority) == (run.weight, run.priority)
            assert load.virtual_ms == pytest.approx(run.virtual_ms or 0.0, abs=0.02)

    @step(number=RUN, process=PROCESS, times=st.integers(1, 3))
    def rest(self, number: int, process: segments.Process, times: int) -> None:
        """A run is paused while others are played; it has nothing to catch up."""
        name, run = self.touch(number)
        for new, reason in (("paused", "for others"), ("active", "again")):
            if run is not None:
                assert runs.set_status(self.client, name, new, reason) == run.set_status(new, reason)
            self.feed()
            self.choose_some(process, QUEUES, [], None, times)

    def choose_in_model(
        self,
        process: segments.Process,
        served: tuple[str, ...],
        left_out: list[str],
        limit: float | None,
        found: str | None,
    ) -> set[str]:
        """Choose as the documents say; return the runs that may be chosen, of which `found` is charged."""
        known, level = self.server.runs, {"high": 0, "normal": 1}
        shown = {name: run for name, run in known.items() if run.is_open}
        for run in shown.values():
            run.refund(str(process))  # whoever chooses plays nothing any more
        wanting = {name: run for name, run in shown.items() if run.wants}
        new = {name for name, run in wanting.items() if run.virtual_ms is None or run.away == "closed"}
        before = {name: run.virtual_ms for name, run in wanting.items()}
        for run in shown.values():
            run.away = "" if run.wants else "closed" if not run.may_be_played else run.away or "idle"
        for name, run in wanting.items():
            peers = [one for one in wanting if wanting[one].priority == run.priority]
            others = [before[one] for one in peers if one != name and one not in new]
            virtual = run.virtual_ms
            if others:
                least = min(others)  # of the others
                played = sum(len(wanting[one].playing) for one in peers) / sum(
                    wanting[one].weight for one in peers
                )
                credit = 2 * SEGMENT_MS * (played + max(1 / wanting[one].weight for one in peers))
                lowest = least if name in new else least - credit
                virtual = min(max(least if virtual is None else virtual, lowest), least + 2 * credit)
            run.virtual_ms = virtual or 0.0
        here = {
            name: run for name, run in shown.items()
            if run.may_be_played and run.queue in served and name not in left_out
            and process.node not in run.draining
        }  # fmt: skip
        if limit is not None:
            return {""} if here else set()  # all take longer

        def order(run: Run) -> tuple[bool, int, int]:
            return not run.wants, level[run.priority], round((run.virtual_ms or 0.0) / 10)

        best = min(map(order, here.values()), default=None)
        allowed = {name for name, run in here.items() if order(run) == best}
        if found in allowed:
            run = here[found]
            run.virtual_ms = (run.virtual_ms or 0.0) + SEGMENT_MS / run.weight
            run.playing[str(process)] = (SEGMENT_MS, run.weight)
        return allowed

    choose_more = choose

    @step(
        process=PROCESS,
        spent=st.sampled_from([0, 1000, SEGMENT_MS, 3 * SEGMENT_MS]),
        is_gone=st.sampled_from([False, False, True]),
    )
    def end(self, process: segments.Process, spent: int, is_gone: bool) -> None:
        """A process ends its segment, or is found to be gone."""
        who = str(process)
        name, run = self.touch(
            next(
                (
                    n
                    for n, name in enumerate(self.names)
                    if name in self.server.runs and who in self.server.runs[name].playing
                ),
                0,
            )
        )
        is_playing = run is not None and who in run.playing
        if is_gone:
            assert segments.note_lost(self.client, name, [who], "killed") == (
                is_playing and not self.wire.is_lost
            )
            if is_playing and run:
                del run.playing[who]
                run.lost += 1
                run.journal.append("lost")
            return
        segments.end(
            self.client, name, process, spent_ms=spent, process_ms=11, allowance_wait_ms=5, room_wait_ms=3
        )
        if is_playing and run:
            run.refund(who, spent)
            run.process_ms, run.room_wait_ms = run.process_ms + 11, run.room_wait_ms + 3
            run.allowance_wait_ms += 5

    @step(node=NODE, is_leaving=st.booleans())
    def drain(self, node: str, is_leaving: bool) -> None:
        (segments.drain if is_leaving else segments.stay)(self.client, node)
        for run in self.server.runs.values():
            if run.status == "active" and run.is_open:
                (run.draining.add if is_leaving else run.draining.discard)(node)

    # --- evaluations ---

    def evaluation(self, run: Run | None, seed: int, is_kept: bool) -> Evaluation:
        version = run.latest if run and run.latest in run.blobs and is_kept else 10**6
        return Evaluation(version=version, first_seed=seed, num_episodes=2, purpose="watch")

    def opens(self, name: str, token: int, timeout_s: float = 1e6) -> OpenEvaluations:
        return OpenEvaluations(self.client, name, send=lambda _: None, timeout_s=timeout_s, token=token)

    @step(number=RUN, age=AGE, seed=FEW, is_kept=st.booleans(), is_stored=st.booleans())
    def open_evaluation(self, number: int, age: int, seed: int, is_kept: bool, is_stored: bool) -> None:
        name, run = self.touch(number)
        one = self.evaluation(run, seed, is_kept)

        def act(token: int) -> None:
            opened = self.opens(name, token)
            opened.store(one, RESULT) if is_stored else opened.open([one])

        if self.write(name, age, act) and run:
            run.evaluating[one.id] = ""
            if is_stored:
                run.finish_evaluation(one.id)

    def take_evaluation(self, name: str, one: str, player: str) -> Evaluation | None:
        taken, run = evaluations.take(self.client, name, one, player), self.server.runs.get(name)
        expected = run is not None and self.expect(run, lambda: run.take_evaluation(one, player))
        assert (taken is not None) == expected
        return taken

    @step(number=RUN, age=AGE)
    def watch_evaluations(self, number: int, age: int) -> None:
        """The learner finds all evaluations lost: it opens them again, and closes those whose weights are gone."""
        name, run = self.touch(number)
        lost = set(run.evaluating) - set(run.results) if run else set()  # what has a result is not waited for
        if not run or not lost:
            return
        one = min(lost)
        self.take_evaluation(name, one, "a")

        def act(token: int) -> None:
            opened = self.opens(name, token, timeout_s=0.0)
            opened.take_over()
            assert len(opened.poll()) == len(run.results) and opened.poll() == []

        if self.write(name, age, act):
            run.evaluating = {one: "" for one in lost if int(one.split(":")[0]) in run.blobs}
        self.take_evaluation(name, one, "b")

    @step(number=RUN, place=FEW, player=NODE, end=st.sampled_from(["", "", "finish", "finish", "fail"]))
    def play_evaluation(self, number: int, place: int, player: str, end: str) -> None:
        name, run = self.touch(number)
        one = sorted(run.evaluating)[place] if run and place < len(run.evaluating) else "5:5:5"
        taken = self.take_evaluation(name, one, player)
        if taken is None:
            return
        assert run and taken.id == one
        if end == "finish":
            assert evaluations.finish(self.client, name, one, taken, RESULT) != self.wire.is_lost
            assert not evaluations.finish(self.client, name, one, taken, RESULT)
            run.finish_evaluation(one)
        elif end == "fail":
            evaluations.fail(self.client, name, one, "no display")
            run.evaluating[one] = ""

    @step(number=RUN, is_failing=st.booleans())
    def request_evaluation(self, number: int, is_failing: bool) -> None:
        """A command's evaluation has a result once, or is given up, and is then closed."""
        name, run = self.touch(number)
        if run is None:
            return
        sent: list[str] = []
        opened = OpenEvaluations(self.client, name, send=sent.append, timeout_s=1e6)
        one = Evaluation(version=3, first_seed=1, num_episodes=2, purpose="request")
        opened.open([one])
        assert evaluations.take(self.client, name, sent[0], "a") == one
        assert evaluations.take(self.client, name, sent[0], "b") is None
        if is_failing:
            evaluations.fail(self.client, name, sent[0], "no display")
            assert opened.poll() == [] and opened.given_up == {one.id: "no display"}
        else:
            evaluations.finish(self.client, name, sent[0], one, RESULT)
            assert len(opened.poll()) == 1
        assert opened.pending == [] and evaluations.take(self.client, name, sent[0], "a") is None
        opened.withdraw()

    # --- checkpoints ---

    def counters(self, run: Run) -> Counters:
        rows = {str(producer): list(vars(row).values()) for producer, row in run.rows.items()}
        read = [entry for entry in run.entries if entry not in run.waiting]
        return Counters(
            updates=run.updates, env_steps=read[-1].steps if read else 0, cursor=run.cursor.decode(),
            fragments=read[-1].fragments if read else 0, version=run.version, ledger=rows,
        )  # fmt: skip

    @step(
        number=RUN,
        age=AGE,
        size=st.integers(0, 20),
        kind=st.sampled_from(["local", "local", "", "overtaken", "dies"]),
    )
    def save(self, number: int, age: int, size: int, kind: str) -> None:
        self.save_one(self.touch(number)[0], age, size, kind)

    def save_one(self, name: str, age: int, size: int, kind: str) -> None:
        """Save a checkpoint, also as a local one; or be overtaken, or die, before it is complete."""
        run = self.server.runs.get(name)
        blob, token = bytes(range(size)), self.token(name, age)
        meta = asdict(self.counters(run)) if run else {}

        def act(token: int) -> None:
            checkpoints.save(self.client, name, token, blob, meta)

        def die(token: int) -> None:
            pointer = checkpoints.store_parts(self.client, name, token, 99, blob, {}, fence=token)
            if run:
                run.stray |= dict.fromkeys(checkpoints.part_keys(name, pointer), token)

        if kind == "dies":
            self.write(name, age, die)
            return
        if kind == "overtaken" and run and run.fence == token:
            self.wire.before["flip_checkpoint"] = lambda: self.take_over(name, force=True)
            with pytest.raises(LeaseLostError):
                act(token)
            return
        if self.write(name, age, act) and run:
            run.checkpoint = (token, run.checkpoint[1] + 1 if run.checkpoint else 0, blob, meta)
            if kind == "local":
                record = local_checkpoints.record(self.client, name)
                snapshot = local_checkpoints.Snapshot(name, token, record, meta, blob)
                if token >= local_checkpoints.token(self.folder / name, name):
                    known = {one: p for one, p in run.producers.items() if one <= self.server.producers}
                    self.snapshots[name] = deepcopy(replace(run, producers=known))  # without forged ids
                local_checkpoints.write(self.folder / name, snapshot)

    @step(number=RUN, age=AGE, is_next=st.booleans())
    def sweep(self, number: int, age: int, is_next: bool) -> None:
        """Remove what learners left that died while they saved, perhaps the one before this."""
        name, run = self.touch(number)
        if is_next:
            self.save_one(name, 0, 9, "dies")
            self.take_over(name, force=True)
        token = self.token(name, age)
        found = [part for part, writer in run.stray.items() if writer < token] if run else []
        if not found or not run:
            assert checkpoints.sweep(self.client, name, token) == 0
        elif self.write(name, age, lambda token: checkpoints.sweep(self.client, name, token)):
            run.stray = {part: writer for part, writer in run.stray.items() if part not in found}

    # --- the server ends, or comes back older ---

    @precondition(lambda self: not self.was_restarted and self.num_steps > 40)
    @step()
    def kill_server(self) -> None:
        """Everything acknowledged is still there."""
        self.was_restarted, self.touched = True, self.names[-1]
        self.private.kill()
        self.private.start()
        for name in self.names[:-1]:
            self.check(name)

    def backup(self) -> tuple[Server, list[tuple[bytes, bytes, int]]]:
        names = self.client.keys("*")
        stored = [(key, self.client.dump(key), max(self.client.pttl(key), 0)) for key in names]
        return deepcopy(self.server), [(key, value, ttl) for key, value, ttl in stored if value]

    def come_back(self, backup: tuple[Server, list[tuple[bytes, bytes, int]]]) -> None:
        """The server comes back as it was at a backup."""
        self.server, stored = backup
        self.client.flushall()
        for key, value, ttl in stored:
            self.client.restore(key, ttl, value)
        for name in self.names:
            self.check(name)

    @precondition(lambda self: self.num_steps > 30)
    @step(number=RUN, age=AGE, slot=FEW, place=FEW, is_empty=st.sampled_from([False, False, False, True]))
    def come_back_older(self, number: int, age: int, slot: int, place: int, is_empty: bool) -> None:
        """The server comes back as it was some appends ago, or empty; a learner may have a local checkpoint."""
        name, _ = self.touch(number)
        backup = (Server(), []) if is_empty else self.backup()
        self.play(number, slot, 40, "a", 0, 3)
        if age:
            self.take_over(self.touched, force=True)
        if place:
            self.read_entries(self.touched, 0, 2 * place, 2)
            self.save_one(self.touched, 0, 9, "local")
        self.come_back(backup)
        if place and self.touched in self.snapshots:
            self.restore_run(self.touched)

    @precondition(lambda self: self.snapshots)
    @step(place=FEW)
    def restore(self, place: int) -> None:
        self.restore_run(sorted(self.snapshots)[place % len(self.snapshots)])

    def restore_run(self, name: str) -> None:
        """A learner goes on from the local checkpoint, if the server does not know the run or is older."""
        run, folder, self.touched = self.server.runs.get(name), self.folder / name, name
        snapshot = local_checkpoints.read(folder)
        assert snapshot is not None
        if run is None:
            if name in self.server.deleted:
                with pytest.raises(StoreError, match="was deleted"):
                    local_checkpoints.restore(self.client, snapshot)
            assert local_checkpoints.restore(self.client, snapshot, even_deleted=True)
            self.server.deleted.discard(name)
            self.server.runs[name] = self.restored(name, snapshot)
            return
        assert not local_checkpoints.restore(self.client, snapshot) or (
            run.checkpoint is not None and run.checkpoint[0] > snapshot.token
        )
        if not self.take_over(name, force=True, after=snapshot.token):
            return
        stored = (-1, -1, -1)
        if run.checkpoint is not None:
            stored = (run.checkpoint[0], run.checkpoint[3]["updates"], run.latest)
        is_newer = (snapshot.token, snapshot.counters.updates, snapshot.version) > stored
        token = self.tokens[name][-1]
        assert local_checkpoints.restore_newer(self.client, name, token, folder) == is_newer
        if is_newer:
            counters = snapshot.counters
            meta = {**snapshot.meta, "version": snapshot.version if snapshot.version > run.latest else -1}
            run.checkpoint = (token, run.checkpoint[1] + 1 if run.checkpoint else 0, snapshot.blob, meta)
            run.fragments, run.steps = (
                max(run.fragments, counters.fragments),
                max(run.steps, counters.env_steps),
            )
            run.journal += ["restored"] * (1 + self.wire.is_lost)
            for producer, known in self.producers_of(name, snapshot).items():
                found = run.producers.setdefault(producer, known)
                if found.incarnation == known.incarnation and found.seq < known.seq:
                    found.fragments, found.seq = found.fragments + known.seq - found.seq, known.seq
            self.count_producers(snapshot)
            rows = {int(producer): ledger.Row(*row) for producer, row in counters.ledger.items()}
            ledger.replace(self.client, name, token, rows, counters.cursor.encode())
            run.rows = dict.fromkeys(run.rows, ledger.Row()) | rows
            run.cursor = counters.cursor.encode()

    def count_producers(self, snapshot: local_checkpoints.Snapshot) -> None:
        spare, given = local_checkpoints.SPARE_PRODUCERS, [0, *map(int, snapshot.record.producers)]
        read = [one for one in map(int, snapshot.counters.ledger) if one <= max(given) + spare]
        self.server.producers = max(self.server.producers, max(given + read) + spare)

    def producers_of(self, name: str, snapshot: local_checkpoints.Snapshot) -> dict[int, Producer]:
        """The producers that the learner of a snapshot has read from."""
        rows = {int(producer): ledger.Row(*row) for producer, row in snapshot.counters.ledger.items()}
        known = self.snapshots[name].producers
        return {
            producer: Producer(
                row.incarnation, row.last_seq, row.decided, known.get(producer, Producer()).duplicates
            )
            for producer, row in rows.items()
            if row.last_seq >= 0
        }

    def restored(self, name: str, snapshot: local_checkpoints.Snapshot) -> Run:
        """A run as its snapshot describes it, without experience, weights and learner."""
        before, counters = deepcopy(self.snapshots[name]), snapshot.counters
        rows = {int(producer): ledger.Row(*row) for producer, row in counters.ledger.items()}
        unlisted = [producer for producer in before.producers if producer not in rows]
        producers = self.producers_of(name, snapshot)
        if -2 in rows:
            producers[-2] = replace(before.producers[-2], fragments=rows[-2].decided)
        self.count_producers(snapshot)
        fence = checkpoints.newest_pointer(self.client, name) or {"token": 0}
        assert fence["token"] > snapshot.token
        return replace(
            Run(before.weight, before.priority, before.queue),
            **{
                one: getattr(before, one)
                for one in ("status", "reason", "config_version", "bytes", "duplicates", "rules", "revision")
            },
            **{one: getattr(before, one) for one in ("full", "dead", "crashes", "crashes_total", "lost", "error")},
            max_producers=before.max_producers,
            **{one: getattr(before, one) for one in ("played_ms", "process_ms", "allowance_wait_ms", "room_wait_ms")},
            is_open=before.status in ("active", "paused"), fence=fence["token"], version=snapshot.version,
            latest=snapshot.version, updates=counters.updates, steps=counters.env_steps,
            fragments=max(sum(row.decided for row in rows.values()), counters.fragments),
            trimmed_bytes=before.bytes, folded=max([before.folded, *unlisted]), producers=producers, rows=rows,
            cursor=counters.cursor.encode(), journal=["restored"],
            checkpoint=(fence["token"], 0, snapshot.blob, {**snapshot.meta, "version": -1}),
        )  # fmt: skip

    # --- what is there ---

    def check(self, name: str, *, is_whole: bool = True) -> None:
        """Compare what the server tells of a run with the model: state, stream and ledger, or everything."""
        run = self.server.runs.get(name)
        if run is None:
            assert not self.client.keys(keys.run_pattern(name)) and name not in runs.names(self.client)
            return
        state = runs.state(self.client, name)
        shown = "ending" if run.status in ENDED and run.is_open else run.status
        assert (state.status, state.leased, state.handover) == (shown, run.lease is not None, run.handover)
        assert quarantine.read(self.client, name) == (run.rules, run.revision)
        assert runs.rollback(self.client, name) == (run.earlier, run.revision)
        assert (state.allowance, state.version, state.updates) == (run.allowance, run.version, run.updates)
        appended = (state.appended_fragments, state.appended_steps, state.appended_bytes, state.trimmed_bytes)
        assert appended == (run.fragments, run.steps, run.bytes, run.trimmed_bytes)
        assert (state.duplicates, state.full, state.dead) == (run.duplicates, run.full, run.dead)
        assert (state.crashes, state.crashes_total, state.error) == (
            run.crashes,
            run.crashes_total,
            run.error,
        )
        assert (state.weight, state.priority, state.config_version) == (
            run.weight,
            run.priority,
            run.config_version,
        )
        times = (
            state.played_s,
            state.process_s,
            state.allowance_wait_s,
            state.room_wait_s,
            state.lost_producers,
        )
        expected = (run.played_ms, run.process_ms, run.allowance_wait_ms, run.room_wait_ms, 1e3 * run.lost)
        assert times == pytest.approx([value / 1e3 for value in expected])
        self.check_stream(name, run, state)
        if is_whole:
            self.check_ledger(name, run)
            self.check_others(name, run)

    def check_others(self, name: str, run: Run) -> None:
        stored = weights.index(self.client, name)
        assert (stored.latest, stored.best, set(stored.sizes)) == (run.latest, run.best, set(run.blobs))
        assert all(weights.get(self.client, name, version) == blob for version, blob in run.blobs.items())
        assert not {field.encode() for field in keys.COUNTS} & {*self.client.hkeys(keys.state(name))}
        blobs = self.client.keys(keys.weights_blob(name, 0)[:-1] + "*")
        files = {keys.weights_onnx(name, version) for version in run.blobs if version % 2}
        versions = {keys.weights_blob(name, version) for version in run.blobs}
        assert {key.decode() for key in blobs} == versions | files
        parts = set(run.stray)
        if run.checkpoint is not None:
            token, number, blob, meta = run.checkpoint
            assert checkpoints.load(self.client, name) == (blob, meta)
            pointer = checkpoints.newest_pointer(self.client, name)
            assert pointer and (pointer["token"], pointer["number"]) == (token, number)
            parts |= set(checkpoints.part_keys(name, pointer))
        assert {key.decode() for key in self.client.keys(keys.checkpoint_pattern(name))} == parts
        assert set(evaluations.opened(self.client, name)) == set(run.evaluating)
        rows, _ = evaluations.results(self.client, name)
        assert [f"{row['version']}:{row['first_seed']}:{row['num_episodes']}" for row in rows] == run.results
        assert set(segments.playing(self.client, name)) == set(run.playing)
        assert segments.refusals(self.client, name) == run.refusals
        assert [row["event"] for row in runs.journal(self.client, name)[0]] == run.journal
        assert len(logs.read(self.client, name)[0]) == run.logs
        assert len(metrics.read(self.client, name)[0]) == run.metrics
        assert len(stream.episodes(self.client, name)[0]) == run.episodes
        kept = {row["env_steps"] for row in history.read(self.client, name)["episodes"]}
        assert kept == {2**at for at in range(run.history)}

    def check_stream(self, name: str, run: Run, state: runs.RunState) -> None:
        found = self.entries(name)
        counts = [
            (e.producer, *(e.count(field) for field in (b"i", b"q", b"s", b"f", b"n", b"b"))) for e in found
        ]
        known = run.entries
        assert counts == [
            (e.producer, e.incarnation, e.seq, e.size, e.fragments, e.steps, e.bytes) for e in known
        ]
        assert [entry.entry_id for entry in found] == [entry.entry_id for entry in known]
        own = {*bounded.names(self.client, keys.run_pattern(name))}
        assert own == {*self.client.scan_iter(keys.run_pattern(name))}
        newest = call(self.client, "newest_id", [keys.experience(name)])
        assert newest == (known[-1].entry_id if known else None)
        assert state.live_bytes == sum(entry.count(b"s") for entry in found) <= MAX_BYTES
        rows, cursor = ledger.read(self.client, name)
        assert (rows, cursor) == (run.rows, run.cursor)

    def check_ledger(self, name: str, run: Run) -> None:
        waiting = Counter(entry.producer for entry in run.waiting)
        accounts = ledger.audit(self.client, name).accounts
        assert set(accounts) == set(run.producers)
        for producer, account in accounts.items():
            row, one = run.rows.get(producer, ledger.Row()), run.producers[producer]
            assert (account.appended, account.duplicates) == (one.fragments, one.duplicates)
            assert (account.consumed, account.refused) == (row.consumed, row.refused)
            assert (account.waiting, account.trimmed) == (waiting[producer], row.unread)
        for node in ("a", "b"):
            answer = stream.remaining(self.client, name, node=node)
            assert (answer.remaining_steps, answer.version) == (run.share, run.version)
            expected = "WAIT" if run.version < 0 or run.steps >= run.allowance else "GO"
            expected = "YIELD" if run.status == "paused" or node in run.draining else expected
            assert answer.answer.value == ("STOPPED" if run.status in ENDED else expected)


@pytest.fixture(scope="module")
def durable_server() -> Iterator[PrivateServer]:
    """A server whose file has each write before the reply."""
    require_program()
    server = PrivateServer("--appendonly", "yes", "--appendfsync", "no", "--hz", "500")
    yield server
    server.close()


@pytest.mark.timeout(900)
def test_the_scripts_do_what_the_model_does(
    durable_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PART_BYTES", 8)
    monkeypatch.setattr(ledger, "MIN_PRODUCERS", 4)
    monkeypatch.setattr(Scripts, "private", durable_server, raising=False)
    monkeypatch.setattr(Scripts, "wire", Wire(durable_server.client), raising=False)
    options = settings(
        max_examples=EXAMPLES, stateful_step_count=STEPS, derandomize=True, deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    for number in range(SEEDS):  # later examples of one seed resemble its first ones
        run_state_machine_as_test(seed(number)(Scripts), settings=options)
    assert Scripts.steps >= LEAST_STEPS
    assert set(Scripts.wire.calls) == {path.stem for path in SCRIPTS.glob("*.lua")} - {"common", "fence"}
