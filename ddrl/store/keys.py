"""Every Redis key: its pattern, type, writer, reader and lifetime. No other file spells one.

`{run}` is a hash tag: all keys of a run share a cluster slot, so one script may touch several of them.

| key                               | type   | written by            | read by             | lifetime |
|-----------------------------------|--------|-----------------------|---------------------|----------|
| ddrl:runs                         | zset   | submit                | all                 | ids by creation time; a member goes with its run |
| ddrl:open                         | zset   | submit, learner, cli  | all                 | those that have not ended, by creation |
| ddrl:producers                    | string | collector             | collector           | counter of producer ids |
| ddrl:deleted                      | zset   | cli                   | learner             | ids of runs deleted on purpose, by time; a month |
| ddrl:workers                      | set    | worker                | status, dispatcher  | names of heartbeats; one goes with its worker |
| ddrl:worker:<node>:<host>:<pid>   | string | worker                | status, dispatcher  | heartbeat, expires |
| ddrl:broker:*                     |        | Celery                | Celery              | messages waiting; Celery's own keys |
| ddrl:{run}:spec                   | string | submit                | all                 | the run's |
| ddrl:{run}:state                  | hash   | all                   | all                 | the run's; status, reason, counters, allowance, share of the fleet, last producer folded |
| ddrl:{run}:initial                | string | submit                | learner             | weights to begin with, safetensors; the run's |
| ddrl:{run}:lease                  | string | learner               | learner             | token of the learner, expires |
| ddrl:{run}:allowance              | stream | learner               | collector           | one entry: env steps that may be played, latest version |
| ddrl:{run}:experience             | stream | collector             | learner             | fragments: the replay buffer; trimmed by the learner |
| ddrl:{run}:producers              | hash   | collector             | stream, audit       | producer -> JSON: see scripts/append.lua; -2: all that were folded |
| ddrl:{run}:playing                | hash   | worker                | dispatcher, fleet   | process -> node, pid, task, since_ms, charge_ms, weight (JSON); while it plays |
| ddrl:{run}:draining               | set    | worker                | collector           | nodes whose processes end their segments; expires |
| ddrl:{run}:refusals               | hash   | worker                | cli                 | host -> why it does not play the run |
| ddrl:{run}:ledger                 | hash   | learner               | audit               | producer -> JSON list: see `ledger.Row`; `cursor`: the last entry covered |
| ddrl:{run}:weights                | hash   | learner               | all                 | latest, best, kept |
| ddrl:{run}:weights:<v>            | string | learner               | collector, cli      | safetensors; until pruned |
| ddrl:{run}:evaluating             | hash   | learner, worker       | evaluation worker   | the run's open evaluations and who plays each; fields go with the result |
| ddrl:{run}:evaluating:<r>         | hash   | cli, worker           | evaluation worker   | the same of one `ddrl evaluate`; expires |
| ddrl:{run}:evaluations            | stream | evaluation worker     | learner, cli        | the run's results: version, seeds, returns; the run's |
| ddrl:{run}:evaluations:<r>        | stream | evaluation worker     | cli                 | results of one `ddrl evaluate`; expires |
| ddrl:{run}:episodes               | stream | collector             | learner, cli        | finished training episodes, capped |
| ddrl:{run}:metrics                | stream | learner               | cli                 | the learner's figures, capped |
| ddrl:{run}:dead                   | stream | learner               | cli                 | refused entries and why, capped |
| ddrl:{run}:journal                | stream | all                   | cli                 | every change of state or setting, capped |
| ddrl:{run}:logs                   | stream | learner, worker       | cli                 | lines of log, capped |
| ddrl:{run}:checkpoint:<t>:<n>:<p> | string | learner               | learner             | parts, named by the pointer in state |
"""

from __future__ import annotations

from functools import partial

RUNS = "ddrl:runs"
OPEN = "ddrl:open"
PRODUCERS = "ddrl:producers"
DELETED = "ddrl:deleted"
WORKERS = "ddrl:workers"
BROKER_PREFIX = "ddrl:broker:"  # of Celery's own keys; `celery.py` sets it


def worker(node: str) -> str:
    """Heartbeat of one worker."""
    return f"ddrl:worker:{node}"


FIRST, LATER = 0, 3
"""Priorities of messages, as Celery's Redis transport counts them: evaluations go before rollouts."""


def queue(name: str) -> str:
    """The list in which Celery keeps a queue's messages of priority LATER, such as rollouts."""
    return f"{BROKER_PREFIX}{name}\x06\x16{LATER}"


def of_run(run: str, name: str) -> str:
    """A key of a run; `name` is one of those in the table above."""
    return f"ddrl:{{{run}}}:{name}"


def run_of(key: str) -> str:
    """The run that a key belongs to."""
    return key.partition("{")[2].partition("}")[0]


# Each takes the run's id; the table above says what the key holds.
spec = partial(of_run, name="spec")
state = partial(of_run, name="state")
lease = partial(of_run, name="lease")
allowance = partial(of_run, name="allowance")
experience = partial(of_run, name="experience")
producers = partial(of_run, name="producers")
playing = partial(of_run, name="playing")
draining = partial(of_run, name="draining")
refusals = partial(of_run, name="refusals")
ledger = partial(of_run, name="ledger")
initial = partial(of_run, name="initial")
logs = partial(of_run, name="logs")
weights = partial(of_run, name="weights")
episodes = partial(of_run, name="episodes")
metrics = partial(of_run, name="metrics")
dead = partial(of_run, name="dead")
journal = partial(of_run, name="journal")


def weights_blob(run: str, version: int) -> str:
    """Safetensors bytes of one version."""
    return of_run(run, f"weights:{version}")


def evaluations(run: str, requester: str = "") -> str:
    """Results of evaluations: the run's, or those of one `ddrl evaluate`."""
    return of_run(run, f"evaluations:{requester}" if requester else "evaluations")


def evaluating(run: str, requester: str = "") -> str:
    """Open evaluations: the run's, or those of one `ddrl evaluate`."""
    return of_run(run, f"evaluating:{requester}" if requester else "evaluating")


def checkpoint_part(run: str, token: int, number: int, part: int) -> str:
    """One part of a checkpoint."""
    return of_run(run, f"checkpoint:{token}:{number}:{part}")


def checkpoint_token(part: str) -> int:
    """Token of the learner that wrote a part of a checkpoint."""
    return int(part.split(":")[-3])


def checkpoint_pattern(run: str) -> str:
    """Matches all parts of a run's checkpoints (glob)."""
    return of_run(run, "checkpoint:*")


def run_pattern(run: str) -> str:
    """Matches every key of a run (glob; run ids hold no special character)."""
    return f"ddrl:{{{run}}}:*"
