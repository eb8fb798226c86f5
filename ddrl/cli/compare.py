"""`ddrl compare`: several runs side by side, as a table and as one plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddrl.cli.format import duration, picked, score
from ddrl.cli.output import Client, InputError, Json, emit, note, server, table
from ddrl.cli.settings import values_of
from ddrl.store import runs as store

if TYPE_CHECKING:
    from ddrl.runs.records import Records

PLOT = Path("compare.png")
OWN = ("name", "seed", "env.id", "algorithm.name")  # shown as columns, so not among the differences
LACKING = "-"  # value of an option that a run's algorithm does not have, and source of random initial weights


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Ids of runs, starts of ids, or last.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG file for the curves.")] = PLOT,
    json_output: Json = False,
) -> None:
    """Compare runs: their results, times and different settings."""
    from ddrl.runs.curves import plot_runs
    from ddrl.runs.records import read

    if output.suffix.lower() != ".png":
        raise InputError(f"--output {output}: the plot is a PNG; name a file that ends in .png")
    with server() as client:
        names = list(dict.fromkeys(store.resolve(client, run) for run in runs))
        if len(names) < 2:
            given = " ".join(runs)
            raise InputError(f"compare {given}: only one run; give two or more, `ddrl runs` lists them")
        records = [read(client, run) for run in names]
        rows, options = report(client, records)
    try:
        plot_runs({_label(each, place, options): each for place, each in enumerate(records)}, output)
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); name another file"
        raise InputError(f"--output {output}: {reason}") from None
    if json_output:
        emit({"runs": rows, "plot": str(output.resolve())})
        return
    _show(rows, options)
    if len({row["env"] for row in rows}) > 1:
        note("the runs play different environments, whose returns cannot be compared")
    note(f"curves in {output}")


def report(client: Client, records: Sequence[Records]) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Return a row of results for each run, and the options in which they differ with each one's value."""
    from ddrl.config import FORMER_OPTIONS, flat

    settings = [
        {"from": each.state.warm or LACKING} | values_of(each.config, store.spaces(client, each.state.run))
        for each in records
    ]
    now_s = store.server_ms(client) / 1e3
    stored = {name for each in records for name in flat(each.config.model_dump(by_alias=True))}
    named = {f"algorithm.{name}" for options in FORMER_OPTIONS.values() for name in options}
    options = differences(settings, stored - named)
    return [_row(each, now_s, place, options) for place, each in enumerate(records)], options


def differences(configs: Sequence[Mapping[str, Any]], given: Iterable[str]) -> dict[str, list[Any]]:
    """Return {dotted name: values} of the options that differ between configs; LACKING where a config has no such one.

    An option that only some of the configs have counts if it is `given`: another algorithm has many at their defaults.
    """
    names = sorted((set.intersection(*map(set, configs)) | set(given)) - set(OWN))
    found = {name: [config.get(name, LACKING) for config in configs] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _row(records: Records, now_s: float, place: int, options: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the row of one run."""
    state, config = records.state, records.config
    best, time_s = state.evaluation or {}, state.train_s(now_s)
    return {
        **picked(state, "run", "status", "updates"),
        "env": config.env.id,
        "algorithm": config.algorithm["name"],
        "seed": config.seed,
        "train_s": None if time_s is None else round(time_s, 3),
        "env_steps": state.appended_steps,
        "best_return": best.get("return_mean"),
        "best_return_std": best.get("return_std"),
        "best_version": best.get("version"),
        "differs": {name: values[place] for name, values in options.items() if values[place] != LACKING},
    }


def _show(rows: Sequence[Mapping[str, Any]], options: Mapping[str, Sequence[Any]]) -> None:
    shared = [name for name in ("env", "algorithm") if len({row[name] for row in rows}) == 1]
    apart = [name for name in ("env", "algorithm") if name not in shared]
    if shared:
        print(", ".join(f"{name} {rows[0][name]}" for name in shared), end="\n\n")
    cells = []
    for place, row in enumerate(rows, 1):
        names = (place, row["run"], *(row[name] for name in apart), str(row["seed"]), row["status"])
        best = {"return_mean": row["best_return"], "return_std": row["best_return_std"]}
        cells.append((*names, duration(row["train_s"]), row["env_steps"], row["updates"], score(best)))
    header = ("", "run", *apart, "seed", "status", "train", "env steps", "updates", "best return")
    table(header, cells, left=("run", *apart, "status"), optional=("updates",))
    print()
    if not options:
        seeds = {row["seed"] for row in rows}
        print(f"their settings are the same{' except for the seed' if len(seeds) > 1 else ''}")
        return
    differing = [(name, *map(_value, values)) for name, values in options.items()]
    table(("differs", *map(str, range(1, len(rows) + 1))), differing, left=("differs",))


def _value(value: Any) -> str:
    """Return a setting as YAML text on one line."""
    return value if isinstance(value, str) else json.dumps(value)


def _label(records: Records, place: int, options: Mapping[str, Sequence[Any]]) -> str:
    """Return the label of a run in the legend."""
    config, state = records.config, records.state
    parts = [f"{place + 1}  {state.run}", f"{config.algorithm['name']}, seed {config.seed}", state.status]
    texts = [f"{name.rpartition('.')[2]} {_value(values[place])}" for name, values in options.items()]
    if texts:
        parts.append(", ".join(texts[:3]) + (", ..." if len(texts) > 3 else ""))
    return "   ".join(parts)
