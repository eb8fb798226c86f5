"""Evaluations: opened by the learner, played by any worker, their results stored once.

An evaluation's id is made of its version and seeds, so the same one sent twice is one evaluation.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from redis import Redis

from ddrl.store import keys
from ddrl.store.leases import fenced
from ddrl.types import EvaluationResult


@dataclass(frozen=True)
class OpenEvaluation:
    """An evaluation without result.

    Attributes:
        version: of the weights.
        first_seed, num_episodes: seeds are first_seed, first_seed + 1, ...
        purpose: "watch" or "confirm".
        sent_ms: server's clock when it was sent last.
        env_steps, updates: of the run when the version was chosen, for the curves.
    """

    version: int
    first_seed: int
    num_episodes: int
    purpose: str
    sent_ms: int
    env_steps: int
    updates: int

    @property
    def evaluation_id(self) -> str:
        """Names version and seeds."""
        return f"{self.version}:{self.first_seed}:{self.num_episodes}"

    @property
    def seeds(self) -> tuple[int, ...]:
        """One per episode."""
        return tuple(range(self.first_seed, self.first_seed + self.num_episodes))


@dataclass(frozen=True)
class Row(OpenEvaluation):
    """An evaluation with what came of it, in the order of the seeds."""

    returns: list[float]
    lengths: list[int]
    return_mean: float
    return_std: float


_ROW = TypeAdapter(Row)

_FINISH = """
-- KEYS: evaluating (hash), evaluations (stream). ARGV: evaluation id, result (JSON). Stores a result once.
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 10000, '*', 'result', ARGV[2])
return 1
"""


def open_(client: Redis, run: str, token: int, evaluation: OpenEvaluation) -> None:
    """Open an evaluation, or note that it was sent again.

    Raises:
        LeaseLostError: another learner took over.
    """
    script_keys = [keys.state(run), keys.evaluating(run)]
    fenced(client, "set_fields", script_keys, token, evaluation.evaluation_id, json.dumps(asdict(evaluation)))


def opened(client: Redis, run: str) -> dict[str, OpenEvaluation]:
    """Open evaluations by id."""
    raw = cast("dict[bytes, bytes]", client.hgetall(keys.evaluating(run)))
    return {name.decode(): OpenEvaluation(**json.loads(value)) for name, value in raw.items()}


def get_open(client: Redis, run: str, evaluation_id: str) -> OpenEvaluation | None:
    """An open evaluation, or None when its result is stored already."""
    raw = cast("bytes | None", client.hget(keys.evaluating(run), evaluation_id))
    return OpenEvaluation(**json.loads(raw)) if raw else None


def finish(client: Redis, run: str, evaluation: OpenEvaluation, result: EvaluationResult) -> bool:
    """Store a result; False if another worker was first."""
    row = {
        **asdict(evaluation),
        "returns": list(result.returns),
        "lengths": list(result.lengths),
        "return_mean": result.return_mean,
        "return_std": result.return_std,
    }
    script_keys = [keys.evaluating(run), keys.evaluations(run)]
    return bool(client.eval(_FINISH, 2, *script_keys, evaluation.evaluation_id, json.dumps(row)))


def drop(client: Redis, run: str, token: int, evaluation_id: str) -> None:
    """Close an evaluation that cannot be played any more.

    Raises:
        LeaseLostError: another learner took over.
    """
    fenced(client, "close_evaluation", [keys.state(run), keys.evaluating(run)], token, evaluation_id)


def results(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """Results after an entry, oldest first, each with `time_s` (server's clock); and the last entry's id.

    What is no result is left out: evaluation workers write here.
    """
    raw = cast("list[Any]", client.xrange(keys.evaluations(run), min=b"(" + after))
    rows = []
    for entry_id, fields in raw:
        with contextlib.suppress(KeyError, ValidationError):
            row = _ROW.validate_json(fields[b"result"])
            rows.append({"time_s": int(entry_id.split(b"-")[0]) / 1e3, **asdict(row)})
    return rows, raw[-1][0] if raw else after
