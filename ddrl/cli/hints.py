"""Hints: why a run does not go on and what to do about it, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddrl.cli.format import duration, size
from ddrl.cli.output import Client
from ddrl.envs.requirements import PACKAGES
from ddrl.store import connection, runs
from ddrl.store.segments import LEVELS, REASON_LENGTH

if TYPE_CHECKING:
    from ddrl.cli.watcher import Figures
    from ddrl.store.workers import Heartbeat

ROOM_WAIT = 0.05  # share of the process time spent waiting for room, from which on it is reported
QUIET_S = 20.0  # without a step though some are allowed
BETWEEN_S = 2.0  # without a step, as happens between two segments
SHOWN = 3  # workers named in one sentence
STARTING_S = 30.0  # that the processes of a new run may take


def hint(figures: Figures, *, server: str, starting: bool) -> str:
    """Return why the run does not play or learn, and the remedy; empty while all is well.

    Args:
        figures: all that is known of the run.
        server: what is wrong with the server, if anything is.
        starting: the caller is starting a learner and workers, so that their absence says nothing yet.
    """
    state = figures.state
    if state.ended:
        return ""
    if state.status == "paused":
        is_complete = "ddrl resume" in state.reason  # it names the remedy
        return state.reason if is_complete else f"{state.reason}; `ddrl resume {state.run}` goes on"
    if server:
        return server
    # The command that created the run may still be starting its processes.
    is_new = connection.is_embedded() and figures.now_s < state.created_s + STARTING_S
    if (starting or is_new) and not (state.appended_steps and state.leased and figures.serving):
        return "starting"
    if not state.leased:
        device = figures.config.learner.device
        has = "" if device in ("auto", "cpu") else f" that has {device}"
        return f"waiting for a learner{has}: start `ddrl learner`"
    if state.outcome:
        return f"{state.reason}: the learner on {state.host} completes the results"
    if state.handover:
        return f"the learner on {state.host} hands over to {state.handover}"
    if state.reads:  # nobody plays a shadow
        return ""
    if not figures.serving:
        return _nobody(figures)
    return _obstacle(figures)


def _nobody(figures: Figures) -> str:
    """Return that no worker serves the run, and why those that run do not."""
    queue = figures.state.queue
    text = f"no worker plays {queue}: start `celery -A ddrl worker`"
    misfits = [*dict.fromkeys(f"{worker.host} {misfit(worker, queue)}" for worker in figures.present)]
    more = f", and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
    return f"{text}; there: {', '.join(misfits[:SHOWN])}{more}" if misfits else text


def _obstacle(figures: Figures) -> str:
    """Return what keeps the workers from playing, or the learner from going on."""
    state = figures.state
    is_still = figures.quiet_s > BETWEEN_S or not state.appended_steps
    if figures.refusals and not figures.num_playing and is_still:
        host, reason = next(iter(figures.refusals.items()))
        others = f" (and {len(figures.refusals) - 1} more)" if len(figures.refusals) > 1 else ""
        return (reason if host in reason else f"{host}: {reason}") + others
    if state.error and (state.crashes or not state.appended_steps):
        times = f" ({state.crashes} times since the last fragment)" if state.crashes > 1 else ""
        return f"workers cannot play it{times}: {state.error}"
    if (figures.recent.room_wait or 0.0) >= ROOM_WAIT:
        budget = size(figures.config.replay.max_bytes)
        return f"the stream is full ({budget}): play waits for the learner; raise replay.max_bytes"
    if not state.appended_steps:
        return "waiting for the first steps"
    if figures.quiet_s > QUIET_S and state.allowance > state.appended_steps:
        quiet = f"no step for {duration(figures.quiet_s)}"
        level = LEVELS[state.priority]
        ahead = [load.run for load in figures.loads if LEVELS[load.priority] < level and load.wants]
        return f"{quiet}: {ahead[0]} has a higher priority" if ahead else quiet
    return ""


def misfit(worker: Heartbeat, queue: str) -> str:
    """Return why a worker does not take messages of a queue; empty if it does."""
    if worker.draining:
        return "is leaving"
    if queue in worker.queues:
        return ""
    kind, _, need = queue.partition(".")[2].partition(".")
    if not any(name.startswith(f"ddrl.{kind}") for name in worker.queues):
        return "only evaluates" if kind == "rollout" else "only plays"
    known = worker.capabilities or tuple(name.rpartition(".")[2] for name in worker.queues)
    if need in PACKAGES and need not in known:
        return f"lacks {need} (pip install 'ddrl[{need}]' there)"
    if need and need not in PACKAGES:
        return f"does not allow {need} (DDRL_ALLOW_MODULES={need} there, and install it)"
    return "does not serve that queue"


def server_trouble(client: Client) -> str:
    """Return whether the memory or the disk of a server that answers is full, and the remedy; empty if neither is."""
    try:
        info = client.info("memory") | client.info("persistence")
    except connection.UNREACHABLE:
        raise
    except connection.OUTAGES:  # a user that may not ask is no trouble
        return ""
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if 0 < limit <= used:
        return (
            f"the server is full ({size(used)} of maxmemory {size(limit)}): all wait; "
            "raise maxmemory, or make room with `ddrl prune`"
        )
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        return "the server cannot write to its disk: all wait; free space there"
    return ""


def notice(entry: Mapping[str, Any]) -> str:
    """Return an entry of the journal as text; empty for changes of status, which the live view shows anyway."""
    event, reason = entry["event"], entry.get("reason", "")[:REASON_LENGTH]
    if event in runs.CHANGES:
        return f"{event} {entry['option']}: {entry['from']} -> {entry['to']}"
    if event in ("created", "active", "paused", "solved", "time", "stopped", "failed"):
        return ""
    if event == "lost" and reason.endswith("unread"):  # in journals of earlier versions
        event = "lost fragments"
    texts = {"crashed": "a process could not play it", "lost": "lost a process that played it"}
    return ": ".join(filter(None, (texts.get(event, event), reason)))
