"""What clients asked a server and what they were told, recorded between them: the history that verdict.py judges.

A `Recorder` gives a proxy (support/proxy.py) a tap for each connection, which reads requests and replies in the
server's protocol. It keeps appends of fragments and publications of weights with their answers, and what was read of
published weights. They are recognized by their keys and by docs/data-format.md alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import blosc2
import hiredis
import numpy as np
import safetensors.numpy
from checker.tagged import TAG, steps_of

EXPERIENCE = re.compile(rb"ddrl:\{(.+)\}:experience")
WEIGHTS = re.compile(rb"ddrl:\{(.+)\}:weights:(\d+)")
ACCEPTED, REFUSED = {"GO", "WAIT", "YIELD"}, {"FULL", "STOPPED", "NOSCRIPT"}
NO_REPLY = "no reply"
_NOTHING = object()
_now = itertools.count().__next__


class Name(NamedTuple):
    """The identity of a fragment."""

    producer: int
    incarnation: int
    seq: int


@dataclass
class Append:
    """An append of a fragment and its answer.

    Attributes:
        run: its id.
        name: of the fragment.
        policy_version: that played it.
        lanes: of environments of `tagged`, the first step of each lane; empty of others.
        num_steps: of each lane.
        began: when the server could have it; `ended`: when its client could have the answer. Both count events.
        known_version: the newest version that any client had been told of when it began.
        published_version: the newest version whose publication had begun then.
        answer: its first word, also of an error, or NO_REPLY.
        version: the newest one, as told in the answer; -1: not told.
    """

    run: str
    name: Name
    policy_version: int
    lanes: tuple[int, ...]
    num_steps: int
    known_version: int
    published_version: int
    began: int = field(default_factory=_now)
    ended: int = 0
    answer: str = NO_REPLY
    version: int = -1


@dataclass
class Weights:
    """Bytes of a version, as published or as read.

    Attributes:
        run, version: which.
        digest: of the bytes.
        is_publication: not a read.
        is_finite: all of its numbers are.
        answer: of a publication: "ok", NO_REPLY, or an error.
    """

    run: str
    version: int
    digest: str
    is_publication: bool
    is_finite: bool
    answer: str = NO_REPLY


@dataclass
class History:
    """All that was recorded, in the order in which it began."""

    appends: list[Append] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)
    """By run, the newest version that a client was told of."""
    published: dict[str, int] = field(default_factory=dict)
    """By run, the newest version whose publication began."""
    errors: list[str] = field(default_factory=list)
    """What the recorder could not follow."""

    def copy(self) -> History:
        """Return it as it is now; read the server after that, while clients go on."""
        appends = [replace(one) for one in self.appends]
        return History(appends, [replace(one) for one in self.weights], errors=list(self.errors))


class Recorder:
    """Taps of a server's connections, which write one history."""

    def __init__(self) -> None:
        self.history = History()
        self.loses_reply = False
        """The reply to the next fragment that is accepted is lost, and its connection is reset."""
        self.num_lost = 0

    def tap(self) -> Tap:
        """Return the tap of a new connection."""
        return Tap(self)


class Tap:
    """Follows one connection.

    Args:
        recorder: whose history is written.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._history = recorder, recorder.history
        options: dict[str, Any] = {"notEnoughData": _NOTHING}
        self._requests, self._replies = hiredis.Reader(**options), hiredis.Reader(**options)
        self._waiting: deque[Callable[[Any], bool] | None] = deque()
        """What is to be done with each reply that has not come yet; False: it is lost."""
        self._is_followed = True

    def sent(self, data: bytes) -> bool:
        """Follow what the client sends, which the server always gets."""
        if not self._is_followed:
            return True
        self._requests.feed(data)
        while (request := self._requests.gets()) is not _NOTHING:
            command = request[0].upper()
            if command.endswith(b"SUBSCRIBE"):  # from here on replies do not go with requests
                self._is_followed = False
                return True
            try:
                note = self._note(command, request)
            except Exception as error:
                note = None
                self._history.errors.append(f"{request[:3]!r:.200}: {error!r}")
            self._waiting.append(note)
        return True

    def received(self, data: bytes) -> bool:
        """Follow what the server sends; return whether the client gets it."""
        if not self._is_followed:
            return True
        self._replies.feed(data)
        is_passed = True
        while (reply := self._replies.gets()) is not _NOTHING:
            if isinstance(reply, hiredis.PushNotification):
                continue
            if not self._waiting:
                self._history.errors.append(f"a reply without a request: {reply!r:.200}")
                return True
            note = self._waiting.popleft()
            is_passed &= note is None or note(reply)
        return is_passed

    def _note(self, command: bytes, request: list[bytes]) -> Callable[[Any], bool] | None:
        if command == b"GET" and (of_weights := WEIGHTS.fullmatch(request[1])):
            return lambda blob: self._read(of_weights, blob)
        if command not in (b"EVAL", b"EVALSHA", b"FCALL"):
            return None
        num_keys = int(request[2])
        keys, arguments = request[3 : 3 + num_keys], request[3 + num_keys :]
        matches = [(EXPERIENCE.fullmatch(key), WEIGHTS.fullmatch(key)) for key in keys]
        if any(experience for experience, _ in matches) and b"h" in arguments:
            return self._append(arguments)
        blobs = [one for one in arguments if one[8:10] == b'{"']
        published = next((weights for _, weights in matches if weights), None)
        return self._publish(published, blobs[0]) if published and blobs else None

    def _append(self, arguments: list[bytes]) -> Callable[[Any], bool]:
        at = arguments.index(b"h")
        fields = dict(zip(arguments[at::2], arguments[at + 1 :: 2], strict=True))
        header = json.loads(fields[b"h"])
        run = header["run"]
        append = Append(
            run,
            Name(header["producer"], header["incarnation"], header["seq"]),
            header["policy_version"],
            _lanes(header, fields),
            header["T"],
            self._history.told.get(run, -1),
            self._history.published.get(run, -1),
        )
        self._history.appends.append(append)

        def answered(reply: Any) -> bool:
            if isinstance(reply, Exception):
                append.answer = str(reply).partition(" ")[0]
                return True
            answer = reply[0].decode()
            if self._recorder.loses_reply and answer in ACCEPTED:
                self._recorder.loses_reply = False
                self._recorder.num_lost += 1
                return False
            append.answer, append.version, append.ended = answer, int(reply[1]), _now()
            self._history.told[run] = max(self._history.told.get(run, -1), append.version)
            return True

        return answered

    def _publish(self, match: re.Match[bytes], blob: bytes) -> Callable[[Any], bool]:
        weights, published = _weights(match, blob, is_publication=True), self._history.published
        self._history.weights.append(weights)
        published[weights.run] = max(published.get(weights.run, -1), weights.version)

        def answered(reply: Any) -> bool:
            weights.answer = str(reply) if isinstance(reply, Exception) else "ok"
            return True

        return answered

    def _read(self, match: re.Match[bytes], blob: Any) -> bool:
        if isinstance(blob, bytes):
            self._history.weights.append(_weights(match, blob, is_publication=False))
        return True


def _weights(match: re.Match[bytes], blob: bytes, *, is_publication: bool) -> Weights:
    return Weights(
        match[1].decode(),
        int(match[2]),
        hashlib.sha256(blob).hexdigest(),
        is_publication,
        is_finite(blob),
    )


def is_finite(blob: bytes) -> bool:
    """Return whether all numbers of a safetensors file are finite; False if it is none."""
    try:
        tensors = safetensors.numpy.load(blob).values()
    except Exception:  # whatever the library raises
        return False
    return all(np.isfinite(one).all() for one in tensors if one.dtype.kind == "f")


def _lanes(header: dict[str, Any], fields: dict[bytes, bytes]) -> tuple[int, ...]:
    """Return the first step of each lane; -1 for a lane whose steps do not follow one another."""
    shape = next(one["shape"] for one in header["columns"] if one["name"] == "observation")
    if len(shape) != 3 or shape[2] != TAG.stop:
        return ()
    values = np.frombuffer(blosc2.decompress2(fields[b"observation"]), "<f4").reshape(shape)
    steps = steps_of(values[header["C"] :, :, TAG])  # [T + 1, N]
    follow = (steps == steps[0] + np.arange(len(steps), dtype=np.uint64)[:, None]).all(axis=0)
    return tuple(int(first) if good else -1 for first, good in zip(steps[0], follow, strict=True))
