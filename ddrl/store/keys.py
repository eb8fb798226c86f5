"""Every Redis key: its pattern, type, writers, readers, content and lifetime. No other file spells one.

Redis Cluster is not supported: some scripts touch the keys of several runs. `<r>` is the id of one `ddrl evaluate`.
"The run's" means: deleted with the run.

| key                               | type   | written by           | read by                   | content                                                      | lifetime |
|-----------------------------------|--------|----------------------|---------------------------|--------------------------------------------------------------|----------|
| ddrl:runs                         | zset   | submit               | all                       | ids of all runs, by creation time                            | a member: its run's |
| ddrl:open                         | zset   | submit, learner, cli | all                       | ids of runs whose results are not complete, by creation time | a member: until its run has ended, with its folder |
| ddrl:producers                    | string | collector            | collector                 | counter of producer ids                                      | kept |
| ddrl:deleted                      | zset   | cli                  | learner                   | ids of runs deleted on purpose, by time                      | a member: a month |
| ddrl:workers                      | set    | worker               | cli, dispatcher           | names of the heartbeats                                      | a member: its worker's |
| ddrl:worker:<node>:<host>:<pid>   | string | worker               | cli, dispatcher           | heartbeat                                                    | expires |
| ddrl:broker:*                     |        | Celery               | Celery                    | messages waiting; Celery's own keys                          | Celery's |
| ddrl:broken                       | stream | worker               | cli                       | items of the broker that are no messages, with reasons       | capped |
| ddrl:{run}:spec                   | string | submit, cli          | all                       | resolved config, JSON                                        | the run's |
| ddrl:{run}:state                  | hash   | submit, learner, cli | all                       | status, reason, settings that scripts read, allowance, version, pointer to the checkpoint | the run's |
| ddrl:{run}:counts                 | hash   | all                  | all                       | what workers count: appends, process time, crashes and ids of their reports, the last error (see COUNTS) | the run's |
| ddrl:{run}:initial                | string | submit               | learner                   | initial weights, safetensors                                 | the run's |
| ddrl:{run}:rollback               | string | cli                  | learner                   | weights of the version to go back to, safetensors            | until a learner has gone back |
| ddrl:{run}:lease                  | string | learner              | all                       | fencing token of the learner that holds the run              | expires |
| ddrl:{run}:learners               | hash   | learner              | learner, cli              | id of a learner -> where it runs, its rank and figures (JSON) | a field: while it lives, or the run's |
| ddrl:{run}:group                  | string | learner              | learner                   | the learners that learn together (JSON)                      | the run's |
| ddrl:{run}:allowance              | stream | learner              | collector                 | one entry: env steps that may be played, latest version      | the run's |
| ddrl:{run}:experience             | stream | collector            | learner                   | fragments: the replay buffer                                 | trimmed by the learner |
| ddrl:{run}:<stream>:lowered       | stream | learner              | learner                   | entries of a stream on their way to lower ids                | within scripts/lower_ids.lua |
| ddrl:{run}:producers              | hash   | collector, learner   | collector, learner, audit | producer -> JSON (see scripts/append.lua); -2: sum over producers that have ended (see ledger.py) | a field: until folded |
| ddrl:{run}:playing                | hash   | worker, dispatcher   | worker, dispatcher, cli   | process -> node, pid, task, since_ms, charge_ms, weight (JSON) | a field: while it plays |
| ddrl:{run}:draining               | set    | worker               | collector                 | nodes whose processes should end their segments              | expires |
| ddrl:{run}:refusals               | hash   | worker               | cli                       | host -> why it cannot play the run                           | the run's |
| ddrl:{run}:ledger                 | hash   | learner              | learner, audit            | producer -> JSON list (see `ledger.Row`); `cursor`: the last entry covered | a field: until folded |
| ddrl:{run}:weights                | hash   | learner              | all                       | latest and best version; bytes, time, updates of each kept one | the run's |
| ddrl:{run}:weights:<v>            | string | learner              | collector, cli            | weights of a version, safetensors                            | until pruned |
| ddrl:{run}:weights:<v>:onnx       | string | learner              | clients                   | the same as an ONNX file, with `weights.onnx`                | until pruned |
| ddrl:{run}:evaluating             | hash   | learner              | evaluation worker         | the run's open evaluations                                   | a field: until its result |
| ddrl:{run}:evaluating:<r>         | hash   | cli                  | evaluation worker         | the same of one `ddrl evaluate`                              | expires |
| ddrl:{run}:players                | hash   | learner, worker      | learner                   | who plays each of the run's open evaluations                 | a field: until its result |
| ddrl:{run}:players:<r>            | hash   | cli, worker          | cli                       | the same of one `ddrl evaluate`                              | expires |
| ddrl:{run}:evaluations            | stream | evaluation worker    | learner, cli              | the run's results: version, seeds, returns                   | the run's |
| ddrl:{run}:evaluations:<r>        | stream | evaluation worker    | cli                       | results of one `ddrl evaluate`                               | expires |
| ddrl:{run}:episodes               | stream | collector            | learner, cli              | finished training episodes                                   | capped |
| ddrl:{run}:metrics                | stream | learner              | cli                       | the learner's figures                                        | capped |
| ddrl:{run}:history                | stream | learner              | learner, cli              | metrics and episodes from the beginning, thinned             | the run's |
| ddrl:{run}:dead                   | stream | learner              | cli                       | stream entries that the learner refused, with reasons        | capped |
| ddrl:{run}:journal                | stream | all                  | cli                       | every change of state or setting                             | capped |
| ddrl:{run}:logs                   | stream | learner, worker      | cli                       | lines of log                                                 | capped |
| ddrl:{run}:checkpoint:<t>:<n>:<p> | string | learner              | learner                   | parts of a checkpoint, named by the pointer in state         | until the next checkpoint |
"""

from __future__ import annotations

import math
import re
from functools import partial

ALL = "ddrl:*"  # glob
RUNS = "ddrl:runs"
OPEN = "ddrl:open"
PRODUCERS = "ddrl:producers"
DELETED = "ddrl:deleted"
WORKERS = "ddrl:workers"
BROKEN = "ddrl:broken"
BROKER_PREFIX = "ddrl:broker:"  # prefix of Celery's own keys; `celery.py` sets it


def worker(name: str) -> str:
    """Heartbeat of one worker; `name` is `<node>:<host>:<pid>`."""
    return f"ddrl:worker:{name}"


FIRST, LATER = 0, 3
"""Celery priorities on Redis (0 is served first): a run's evaluations FIRST, rollouts and `ddrl evaluate` LATER."""


def queue(name: str) -> str:
    """The list in which Celery keeps a queue's messages of priority LATER, such as rollouts.

    Kombu separates the queue's name and the priority by the bytes 0x06 0x16.
    """
    return f"{BROKER_PREFIX}{name}\x06\x16{LATER}"


def lists(queue_name: str) -> tuple[str, str]:
    """The lists of a queue's messages, of priority FIRST and LATER."""
    return BROKER_PREFIX + queue_name, queue(queue_name)


def of_run(run: str, name: str) -> str:
    """A key of a run; `name` is one of those in the table above."""
    return f"ddrl:{{{run}}}:{name}"


def run_of(key: str) -> str:
    """The run that a key belongs to."""
    return key.partition("{")[2].partition("}")[0]


# Each takes the run's id; the table above says what the key holds.
spec = partial(of_run, name="spec")
state = partial(of_run, name="state")
counts = partial(of_run, name="counts")
lease = partial(of_run, name="lease")
learners = partial(of_run, name="learners")
group = partial(of_run, name="group")
allowance = partial(of_run, name="allowance")
experience = partial(of_run, name="experience")
producers = partial(of_run, name="producers")
playing = partial(of_run, name="playing")
draining = partial(of_run, name="draining")
refusals = partial(of_run, name="refusals")
ledger = partial(of_run, name="ledger")
initial = partial(of_run, name="initial")
rollback = partial(of_run, name="rollback")
logs = partial(of_run, name="logs")
weights = partial(of_run, name="weights")
episodes = partial(of_run, name="episodes")
metrics = partial(of_run, name="metrics")
history = partial(of_run, name="history")
dead = partial(of_run, name="dead")
journal = partial(of_run, name="journal")

COUNTS = (
    *("appended_fragments", "appended_steps", "appended_bytes", "duplicates", "full", "first_step_ms"),
    *("played_ms", "process_ms", "allowance_wait_ms", "room_wait_ms", "virtual_ms", "away_ms", "error"),
    *("crashes", "crashes_total", "lost_producers", "claim", "claim_until_ms"),
)
"""Fields of `counts`; earlier versions of ddrl kept them in `state`, from where the run's next learner moves them."""


def weights_blob(run: str, version: int) -> str:
    """Safetensors bytes of one version."""
    return of_run(run, f"weights:{version}")


def weights_onnx(run: str, version: int) -> str:
    """The same as an ONNX file."""
    return of_run(run, f"weights:{version}:onnx")


def _of_requester(run: str, requester: str = "", *, name: str) -> str:
    """A key of the run's own evaluations, or of those of one `ddrl evaluate`."""
    return of_run(run, f"{name}:{requester}" if requester else name)


evaluations = partial(_of_requester, name="evaluations")
"""Results of evaluations."""

evaluating = partial(_of_requester, name="evaluating")
"""Open evaluations."""

players = partial(_of_requester, name="players")
"""Players of open evaluations."""


def checkpoint_part(run: str, token: int, number: int, part: int) -> str:
    """One part of a checkpoint."""
    return of_run(run, f"checkpoint:{token}:{number}:{part}")


def checkpoint_token(part: bytes) -> float:
    """Token of the learner that wrote a part of a checkpoint; infinite for the key of anything else."""
    token = re.search(rb"}:checkpoint:(\d{1,15}):\d+:\d+$", part)
    return int(token[1]) if token else math.inf


checkpoint_pattern = partial(of_run, name="checkpoint:*")
"""Glob for all parts of a run's checkpoints."""

run_pattern = partial(of_run, name="*")
"""Glob for all keys of a run; run ids contain no glob characters."""
