"""`ddrl quarantine`: have a run's learner leave fragments out, and take them back."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from ddrl.cli.format import counted
from ddrl.cli.output import InputError, Json, Run, emit, say, seconds, server_of, table
from ddrl.store import quarantine as store
from ddrl.store import runs
from ddrl.store.quarantine import Rule


def quarantine(
    run: Run = "last",
    host: Annotated[str | None, typer.Option(help="What this machine played, now and later.")] = None,
    producer: Annotated[
        int | None, typer.Option(min=0, help="What this process played: its number in `ddrl audit`.")
    ] = None,
    versions: Annotated[str | None, typer.Option(metavar="A-B", help="Played by these versions.")] = None,
    since: Annotated[str | None, typer.Option(help="Appended within this time, such as 10m.")] = None,
    lift: Annotated[int | None, typer.Option(min=1, help="Number of a rule to lift.")] = None,
    json_output: Json = False,
) -> None:
    """Leave fragments out of what a run learns from; without options, list the rules. All that is given must hold."""
    since_s = seconds(since, "--since")
    with server_of(run) as (client, run):
        before, revision = store.read(client, run)
        after, reason = before, ""
        if any(option is not None for option in (host, producer, versions, since)):
            if lift is not None:
                raise InputError(f"--lift {lift}: not together with a new rule; lift it first")
            rule = _rule(runs.server_ms(client), host, producer, versions, since_s)
            after, reason = (*before, rule), str(rule)
        elif lift is not None:
            if lift > len(before):
                raise InputError(f"--lift {lift}: {run} has {counted(len(before), 'rule')} of quarantine")
            after, reason = (*before[: lift - 1], *before[lift:]), f"lifted: {before[lift - 1]}"
        from ddrl.runs.fragments import covered

        found = covered(client, run, after)
        if len(after) > len(before):
            if not found.fragments[-1] and host is None and producer is None:
                raise InputError(f"quarantine of {reason}: no fragment in the stream of {run} falls under it")
            if found.under_any == found.total > 0:
                raise InputError(
                    f"quarantine of {reason}: would leave {run} nothing of its {found.total:,} fragments; name fewer"
                )
        if after != before:
            store.change(client, run, revision, after, {"event": "quarantine", "reason": reason})
    rows: list[dict[str, Any]] = [
        {"rule": number, "what": str(rule), "fragments": fragments, "env_steps": steps}
        for number, (rule, fragments, steps) in enumerate(
            zip(after, found.fragments, found.steps, strict=True), 1
        )
    ]
    if json_output:
        emit({"run": run, "rules": rows, "fragments": found.under_any, "of": found.total})
    elif not rows:
        say(f"{run}: nothing is in quarantine")
    else:
        cells = [tuple(map(str, row.values())) for row in rows]
        table(("rule", "what", "fragments", "env steps"), cells, left=("what",))


def _rule(
    now_ms: int, host: str | None, producer: int | None, versions: str | None, since_s: float | None
) -> Rule:
    """Return the rule of the options.

    One of a time alone ends now: otherwise all play to come would fall under it.

    Raises:
        InputError: the versions are no range.
    """
    first, last = 0, None
    if versions is not None:
        if not (found := re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", versions)):
            raise InputError(f"--versions {versions}: is no range of versions; write it like 40-57")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise InputError(f"--versions {versions}: ends before it begins; write it like {last}-{first}")
    is_time_alone = host is None and producer is None and versions is None
    return Rule(
        host=host,
        producer=producer,
        first_version=first,
        last_version=last,
        since_ms=0 if since_s is None else max(0, now_ms - round(1e3 * since_s)),
        until_ms=now_ms if is_time_alone else None,
    )
