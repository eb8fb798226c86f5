"""Evaluations: opened by a learner or a command, played by any worker, each result stored once.

Each requester (the run's learner, or one `ddrl evaluate`) has its own hash of open evaluations, which workers only
read, its own hash of their players, and its own stream of results. Those of a command expire unless it goes on polling.

A task's argument names an evaluation as `[<requester>/]<id>`, where <id> is `<version>:<first_seed>:<num_episodes>`.
In the hash of open evaluations <id> is the evaluation, JSON, until it closes. In the hash of players:
    <id>:player  who plays it
    <id>:beats   how often its players have confirmed that they play
    <id>:error   why a worker could not play it
    <id>:done    it has a result
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import FailFast, Field, TypeAdapter, ValidationError
from redis import Redis

from ddrl.store import bounded, capped_streams, keys, weights
from ddrl.store.connection import call, execute
from ddrl.store.untrusted import Count, Name, Number, short_text
from ddrl.types import EvaluationResult

log = logging.getLogger(__name__)

TTL_S = 300  # a command's keys expire this long after its last poll
MAX_LOSSES = 3  # losses after which a command's evaluation is given up
ERROR_LENGTH = 300
RESULTS_LENGTH = 10_000  # of a run, or of a command, that are kept
_Metric = Annotated[Name, Field(max_length=60)]  # name of one
_PARTS = (":player", ":beats", ":error", ":done")

_MESSAGE = re.compile(r"([0-9a-f]{16}/)?[0-9]{1,18}:[0-9]{1,18}:[0-9]{1,9}", re.ASCII)


Purpose = Literal["watch", "confirm", "final", "backfill", "request"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Episodes to play with fixed seeds.

    Attributes:
        version: of the weights.
        first_seed, num_episodes: seeds are first_seed, first_seed + 1, ...
        purpose: "watch", "confirm" or "final" (of the best version, at the end) for the run's own, "backfill" for a
            command's that the run keeps, "request" for another one of a command.
        num_envs: episodes side by side; None: as the run's config says.
        epsilon: share of random actions; None: the algorithm's.
        noop_max: idle frames at the start of ALE games; None: the run's.
        opponent: the other side of a game of two; None: the run's.
        env_steps, updates: of the run when the version was chosen, for its curves.
        at_ms: time by the server's clock that the result stands for, if it is earlier than the result.
    """

    version: Count
    first_seed: Count
    num_episodes: Annotated[int, Field(ge=1, le=100_000)]
    purpose: Purpose
    num_envs: Annotated[int, Field(ge=1, le=10_000)] | None = None
    epsilon: float | None = None
    noop_max: Annotated[int, Field(ge=0, le=1_000)] | None = None
    opponent: Annotated[Name, Field(max_length=200)] | None = None
    env_steps: Count = 0
    updates: Count = 0
    at_ms: Count | None = None

    @property
    def id(self) -> str:
        """The version, the first seed and the number of episodes: opened twice, these are one evaluation."""
        return f"{self.version}:{self.first_seed}:{self.num_episodes}"

    @property
    def seeds(self) -> range:
        """One per episode."""
        return range(self.first_seed, self.first_seed + self.num_episodes)


@dataclass(frozen=True, kw_only=True)
class _Scored(Evaluation):
    """An evaluation with its result, in the order of the seeds."""

    returns: Annotated[list[Number], FailFast()]
    lengths: Annotated[list[Count], FailFast()]
    return_mean: Number
    return_std: Annotated[Number, Field(ge=0)]
    metrics: Annotated[dict[_Metric, Annotated[list[Number], FailFast()]], Field(max_length=20)] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if not len(self.returns) == len(self.lengths) == self.num_episodes:
            raise ValueError("an episode has no return or length")


INFO = "info/"  # prefix of the names of `env.metrics`, where they stand beside others


def means(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each metric of an evaluation's episodes that there is; names begin with INFO."""
    return {INFO + name: statistics.fmean(values) for name, values in metrics.items() if values}


_EVALUATION, _SCORED = TypeAdapter(Evaluation), TypeAdapter(_Scored)


def is_of_run(message: str) -> bool:
    """Return whether a task's argument names an evaluation of the run itself: it has no requester."""
    return "/" not in message


# --- for workers -----------------------------------------------------------------------------------------


def take(client: Redis, run: str, message: str, player: str) -> Evaluation | None:
    """Claim an evaluation, or confirm the claim; call it every few seconds while playing.

    Args:
        client: connection to the server.
        run: its id.
        message: the task's argument.
        player: random id of this attempt to play it.

    Returns:
        None if it has a result, was never opened or is withdrawn, is played by another, or `message` is malformed.

    Raises:
        ValueError: the stored evaluation cannot be read.
    """
    if _MESSAGE.fullmatch(message) is None:
        return None
    requester, _, evaluation_id = message.rpartition("/")
    raw = call(client, "take_evaluation", _hashes(run, requester), [evaluation_id, player])
    try:
        return None if raw is None else _EVALUATION.validate_json(raw)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        reason = " ".join(": ".join((*map(str, problem["loc"]), problem["msg"])).split())
        raise ValueError(f"evaluation {evaluation_id} cannot be read ({reason}); open it again") from None


def finish(client: Redis, run: str, message: str, evaluation: Evaluation, result: EvaluationResult) -> bool:
    """Store a result; False if there is one already, or the evaluation was withdrawn."""
    requester, _, evaluation_id = message.rpartition("/")
    score = {"return_mean": result.return_mean, "return_std": statistics.pstdev(result.returns)}
    row = asdict(evaluation) | vars(result) | score
    script_keys = [*_hashes(run, requester), keys.evaluations(run, requester)]
    ttl_s = TTL_S if requester else 0
    return bool(call(client, "finish_evaluation", script_keys, [evaluation_id, json.dumps(row), ttl_s]))


def fail(client: Redis, run: str, message: str, reason: str) -> None:
    """Store why an evaluation could not be played, "" for no fault of it; it stays open, for another worker."""
    requester, _, evaluation_id = message.rpartition("/")
    call(client, "fail_evaluation", _hashes(run, requester), [evaluation_id, reason[:ERROR_LENGTH]])


def _hashes(run: str, requester: str) -> list[str]:
    """The keys of a requester's open evaluations and of their players."""
    return [keys.evaluating(run, requester), keys.players(run, requester)]


# --- for learners and commands ---------------------------------------------------------------------------


@dataclass
class _Pending:
    """An open evaluation, and when its player was last active."""

    evaluation: Evaluation
    is_sent: bool = False
    heartbeat: tuple[bytes | None, bytes | None] = (None, b"0")  # player and beats, as read last
    active_at: float = 0.0  # when it was sent or the heartbeat changed
    losses: int = 0


class OpenEvaluations:
    """The open evaluations of a run or of a command: sent until each has a result or is given up.

    An evaluation is lost when no player has confirmed it for `timeout_s`. It is then sent again, or given up if its
    weights are gone. A command's is also given up after MAX_LOSSES losses, or when a worker could not play it.

    Args:
        client: connection to the server.
        run: its id.
        send: sends a task, given its argument.
        timeout_s: seconds without a confirmation after which an evaluation is lost; assignable.
        token: fencing token of the run's learner; 0: the evaluations are those of a command.

    Attributes:
        given_up: reasons of the evaluations that were closed without a result, by id; the caller may clear it.
    """

    def __init__(
        self, client: Redis, run: str, *, send: Callable[[str], None], timeout_s: float, token: int = 0
    ) -> None:
        self._client, self._run, self._send, self.timeout_s = client, run, send, timeout_s
        self._token = token  # the fence lets 0 pass
        self._requester = "" if token else secrets.token_hex(8)
        self._hashes = _hashes(run, self._requester)
        self._script_keys = [keys.state(run), *self._hashes]
        self._results_key = keys.evaluations(run, self._requester)
        self._cursor, self._returns_all = b"0-0", bool(token)
        self.given_up: dict[str, str] = {}
        self._pending: dict[str, _Pending] = {}

    @property
    def pending(self) -> list[Evaluation]:
        """Evaluations that have no result yet."""
        return [item.evaluation for item in self._pending.values()]

    def take_over(self) -> None:
        """Wait for the run's open evaluations, of an earlier learner."""
        self._pending = {name: _Pending(one) for name, one in opened(self._client, self._run).items()}

    def open(self, evaluations: Sequence[Evaluation]) -> None:
        """Open evaluations and send them. If sending raises, the next `poll` sends the rest.

        Raises:
            LeaseLostError: another learner took over.
        """
        self._write(evaluations)
        self._pending |= {evaluation.id: _Pending(evaluation) for evaluation in evaluations}
        self._send_unsent()

    def poll(self) -> list[dict[str, Any]]:
        """Return new results, oldest first, and send lost evaluations again.

        The first call of the run's learner returns all results that there are, later ones those of open evaluations.

        Raises:
            LeaseLostError: another learner took over.
        """
        if self._requester:  # a run's are its learner's `Reader`'s
            args = [self._token, capped_streams.latest(self._client), "", 0, RESULTS_LENGTH]
            call(self._client, "lower_ids", [keys.state(self._run), self._results_key], args)
        states = self._states()  # read before the results, so that a result stored in between is not missed

        def close(row: dict[str, Any]) -> dict[str, Any] | None:
            item = self._pending.get(f"{row['version']}:{row['first_seed']}:{row['num_episodes']}")
            if item is None:  # a worker may have made it up: it confirms nothing
                return row | {"purpose": "watch"} if self._returns_all else None
            if self._requester:  # it goes with the others, by `withdraw`
                del self._pending[item.evaluation.id]
            else:
                self._close(item)
            return row | asdict(item.evaluation)

        rows, self._cursor = results(
            self._client, self._run, self._cursor, requester=self._requester, keep=close
        )
        self._returns_all = False
        for evaluation_id, item in list(self._pending.items()):
            player, beats, error, done = states[evaluation_id]
            if done:
                self._check(item, item.heartbeat, "its result is missing or cannot be read")
            else:
                self._check(item, (player, beats), short_text(error or b""))
        self._send_unsent()
        return rows

    def store(self, evaluation: Evaluation, result: EvaluationResult) -> None:
        """Store the result of a run's evaluation that was played here. It is opened first, which checks the token.

        Raises:
            LeaseLostError: another learner took over.
        """
        self._write([evaluation])
        self._pending[evaluation.id] = _Pending(evaluation, is_sent=True, active_at=time.monotonic())
        finish(self._client, self._run, evaluation.id, evaluation, result)

    def keep(self, row: dict[str, Any]) -> None:
        """Store a result of a command's evaluation with those of the run."""
        fields = {"result": json.dumps({name: x for name, x in row.items() if name != "time_s"})}
        capped_streams.add(
            self._client, self._run, keys.evaluations(self._run), length=RESULTS_LENGTH, **fields
        )

    def withdraw(self) -> None:
        """Delete a command's evaluations and results (never a run's); their players stop within seconds."""
        self._client.delete(*self._hashes, self._results_key)

    def _check(self, item: _Pending, heartbeat: tuple[bytes | None, bytes | None], error: str) -> None:
        """Give an evaluation up, note a heartbeat of its player, or open a lost one again."""
        now = time.monotonic()
        if self._requester and error and item.is_sent:
            self._give_up(item, error)
        elif heartbeat != item.heartbeat:
            item.heartbeat, item.active_at = heartbeat, now
        elif item.is_sent and now - item.active_at >= self.timeout_s:
            item.losses += 1
            if item.evaluation.version not in weights.index(self._client, self._run).sizes:
                self._give_up(item, "its weights are gone")
            elif self._requester and item.losses >= MAX_LOSSES:
                self._give_up(item, f"it was lost {item.losses} times")
            else:
                reason = error or f"no heartbeat of a player for {self.timeout_s:g} s"
                log.info("evaluation %s is sent again: %s", item.evaluation.id, reason)
                self._write([item.evaluation])
                item.is_sent = False

    def _give_up(self, item: _Pending, reason: str) -> None:
        self._close(item)
        self.given_up[item.evaluation.id] = reason

    def _close(self, item: _Pending) -> None:
        call(self._client, "close_evaluation", self._script_keys, [self._token, item.evaluation.id])
        del self._pending[item.evaluation.id]

    def _write(self, evaluations: Sequence[Evaluation]) -> None:
        """Open evaluations on the server, for anyone to play."""
        items = {one.id: json.dumps(asdict(one)) for one in evaluations}
        ttl_s = TTL_S if self._requester else 0
        call(self._client, "open_evaluations", self._script_keys, [self._token, ttl_s, items])

    def _send_unsent(self) -> None:
        for evaluation_id, item in self._pending.items():
            if not item.is_sent:
                self._send(f"{self._requester}/{evaluation_id}" if self._requester else evaluation_id)
                item.is_sent, item.active_at = True, time.monotonic()

    def _states(self) -> dict[str, tuple[bytes | None, ...]]:
        """Return player, beats, error and done of each pending evaluation; put off the expiry of a command's."""
        pending = list(self._pending)
        with self._client.pipeline(transaction=False) as pipe:
            bounded.values(pipe, self._hashes[1], [one + part for one in pending for part in _PARTS])
            for key in (*self._hashes, self._results_key) if self._requester else ():
                pipe.expire(key, TTL_S)
            values = execute(pipe)[0]
        parts = zip(*(values[place :: len(_PARTS)] for place in range(len(_PARTS))), strict=True)
        return dict(zip(pending, parts, strict=True))


def opened(client: Redis, run: str) -> dict[str, Evaluation]:
    """Return the run's own open evaluations by id."""
    found = {}
    for value in cast("dict[bytes, bytes]", client.hgetall(keys.evaluating(run))).values():
        with contextlib.suppress(ValidationError):  # of another version of ddrl
            evaluation = _EVALUATION.validate_json(value)
            found[evaluation.id] = evaluation
    return found


def results(
    client: Redis,
    run: str,
    after: bytes = b"0-0",
    *,
    requester: str = "",
    keep: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda row: row,
) -> tuple[list[dict[str, Any]], bytes]:
    """Return results after an entry in their order, and the last entry's id; `time_s` (server's clock) is `at_ms`, or
    when the result came.

    Entries that are not a complete result are logged and left out.

    Args:
        client: connection to the server.
        run: its id.
        after: id of an entry.
        requester: of a command's evaluations; "": those of the run.
        keep: what to return of each result; None leaves it out. A worker may write many and long ones.
    """
    raw, last = bounded.newest(client, keys.evaluations(run, requester), after, capped_streams.latest(client))
    rows, others = [], []
    for entry_id, fields in raw:
        try:
            row = vars(_SCORED.validate_json(fields[b"result"]))
        except (KeyError, ValidationError):
            others.append(entry_id.decode())
        else:
            came_ms = int(entry_id.split(b"-")[0])
            if kept := keep({"time_s": min(came_ms, row["at_ms"] or came_ms) / 1e3, **row}):
                rows.append(kept)
    if others:
        text = "run %s: %d entries of evaluations are no results (%s, ...); left out"
        log.warning(text, run, len(others), others[0])
    return rows, last
