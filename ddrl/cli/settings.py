"""`ddrl set`: change settings of a run while it goes on."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.output import Client, InputError, Json, Run, answer, emit, note, server_of, table
from ddrl.store import runs as store

if TYPE_CHECKING:
    from ddrl.config import RunConfig
    from ddrl.types import EnvSpec

LISTED = ("option", "value", "default", "allowed", "effect")
Changes = dict[str, tuple[Any, Any]]  # option -> (from, to)


def set_(
    run: Run,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Such as weight=2 or stop.time=30m. None: list them."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Change settings of a run while it goes on, either all of them or none; or list those that can change."""
    wanted = parse(settings or [])
    with server_of(run) as (client, run):
        if not wanted:
            _check_active(client, run)
            _list(run, store.config(client, run), store.spaces(client, run), json_output)
            return
        is_leased = _check_active(client, run).leased
        report = apply(client, run, wanted)
    rows = [(row["option"], *map(json.dumps, (row["from"], row["to"]))) for row in report["changes"]]
    lines = [f"{name}: already {json.dumps(value)}" for name, value in report["unchanged"].items()]
    lines += [f"{name}: {old} -> {new}" for name, old, new in rows]
    answer(report, "\n".join(lines), json_output=json_output)
    if rows and not is_leased and not json_output:
        note(f"{run}: has no learner now; the next one uses the new settings")


def apply(client: Client, run: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Change settings of a run; return what `ddrl set --json` prints.

    Raises:
        InputError, ConfigError, StoreError: it has ended, or an option or a value cannot be used; nothing is changed.
    """
    version = _check_active(client, run).config_version
    before, spaces = store.config(client, run), store.spaces(client, run)
    after, changes = change(before, spaces, wanted)
    if changes:
        from ddrl.runs import submit

        submit.check_memory(client, after, run=run)
        version = store.change(client, run, after, changes, version=version)
    values = values_of(after, spaces)
    rows = [{"option": name, "from": old, "to": new} for name, (old, new) in changes.items()]
    unchanged = {name: values[name] for name in wanted if name not in changes}
    return {"run": run, "config_version": version, "changes": rows, "unchanged": unchanged}


def _check_active(client: Client, run: str) -> store.RunState:
    state = store.state(client, run)
    if state.outcome:
        remedy = "" if state.outcome == "solved" else f"; `ddrl resume {run}` continues it first"
        raise InputError(f"run {run}: has ended ({state.outcome}), its settings cannot change{remedy}")
    return state


def _list(run: str, config: RunConfig, spaces: EnvSpec, json_output: bool) -> None:
    """Print the options that can change, with their values, and what they do."""
    from ddrl.algorithms import base
    from ddrl.config import RunConfig, allowed, live_options

    values, own, rows = values_of(config, spaces), base.config_class(config.algorithm["name"]), []
    for name, field in sorted((live_options(RunConfig) | live_options(own, "algorithm.")).items()):
        may_be, effect = allowed(field.annotation, field.metadata), " ".join(str(field.description).split())
        rows.append((name, values[name], field.default, may_be, effect))
    if json_output:
        emit({"run": run, "options": [dict(zip(LISTED, row, strict=True)) for row in rows]})
        return
    cells = [(row[0], *map(json.dumps, row[1:3]), ". ".join(row[3:])) for row in rows]
    header = (*LISTED[:3], "allowed values, and effect")
    table(header, cells, left=header, optional=("default",))
    note(f"change them with `ddrl set {run} NAME=VALUE`; durations such as 90s or 15m, sizes such as 1GB")


def change(before: RunConfig, spaces: EnvSpec, wanted: Mapping[str, Any]) -> tuple[RunConfig, Changes]:
    """Return a config with changed settings, checked as at submit, and the options that differ.

    Args:
        before: the present config.
        spaces: of the run's environment.
        wanted: option -> value.

    Raises:
        InputError: an option is unknown, or cannot change while a run goes on.
        ConfigError: a value cannot be used.
    """
    from ddrl.algorithms import base
    from ddrl.config import RunConfig, live_options, options, validate
    from ddrl.runs import submit

    own = base.config_class(before.algorithm["name"])
    live = live_options(RunConfig) | live_options(own, "algorithm.")
    known = {*options(RunConfig), "algorithm.name", *options(own, "algorithm.")} - {"algorithm"}
    tree = before.model_dump(mode="json", by_alias=True)
    for name, value in wanted.items():
        if name not in live:
            raise InputError(_refusal(name, live, known))
        *sections, option = name.split(".")
        functools.reduce(dict.__getitem__, sections, tree)[option] = value
    after = validate(tree)
    submit.check(after, spaces)
    old, new = values_of(before, spaces), values_of(after, spaces)
    # The algorithm's section is stored as given; YAML reads 1e-4 as text, so the validated number is stored.
    given = {name: new[f"algorithm.{name}"] for name in after.algorithm if f"algorithm.{name}" in wanted}
    after = after.model_copy(update={"algorithm": after.algorithm | given})
    return after, {name: (old.get(name), new[name]) for name in new if old.get(name) != new[name]}


def parse(settings: Sequence[str]) -> dict[str, Any]:
    """Return {NAME: VALUE} of NAME=VALUE texts; values are YAML."""
    from ddrl.config import parse_yaml

    wanted: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InputError(f"{text}: expected NAME=VALUE, such as algorithm.learning_rate=1e-4")
        if name in wanted:
            raise InputError(f"{name}: given twice; give it once")
        try:
            wanted[name] = parse_yaml(value)
        except ValueError:
            raise InputError(f"{text}: the value is not valid YAML") from None
    return wanted


def _refusal(name: str, live: Iterable[str], known: set[str]) -> str:
    """Return the message for an option that cannot be set."""
    if parts := sorted(option for option in live if option.startswith(f"{name}.")):
        return f"{name}: is a section; name an option of it, such as {parts[0]}"
    if name in known or any(name.startswith(f"{option}.") for option in known):
        return f"{name}: cannot change while a run goes on; these can: {_in_words(live)}"
    near = [option for option in sorted(known) if option.rpartition(".")[2] == name]
    near = near or difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"these can change: {_in_words(live)}"
    return f"{name}: unknown option; {hint}"


def _in_words(names: Iterable[str]) -> str:
    """Return dotted names in one line: weight, stop.{return, time}."""
    sections: dict[str, list[str]] = {}
    for name in sorted(names):
        section, _, option = name.rpartition(".")
        sections.setdefault(section, []).append(option)
    words = sections.pop("", [])
    for section, options in sections.items():
        words.append(f"{section}.{{{', '.join(options)}}}" if len(options) > 1 else f"{section}.{options[0]}")
    return ", ".join(words)


def values_of(config: RunConfig, spaces: EnvSpec) -> dict[str, Any]:
    """Return the JSON value of every option by its dotted name, with the algorithm's defaults."""
    from ddrl.algorithms import base
    from ddrl.config import flat

    tree = config.model_dump(mode="json", by_alias=True)
    tree["algorithm"] |= base.resolve(config, spaces).config.model_dump(mode="json", by_alias=True)
    return flat(tree)
