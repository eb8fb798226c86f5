"""`ddrl presets`."""

from __future__ import annotations

from ddrl import config as configs
from ddrl.cli.output import Json, emit, note, table


def presets(json_output: Json = False) -> None:
    """List the presets that ddrl ships, and what each reaches in what time."""
    rows = []
    for name, path in configs.presets().items():
        config, reaches = configs.load(path), path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        settings = {"env": config.env.id, "algorithm": config.algorithm["name"]}
        rows.append({"preset": name, **settings, "reaches": reaches, "file": str(path)})
    if json_output:
        emit(rows)
        return
    header = ("preset", "env", "algorithm", "reaches")
    table(header, [[row[column] for column in header] for row in rows], left=header)
    note("`ddrl submit lunar` starts one; -s NAME=VALUE changes a setting")
