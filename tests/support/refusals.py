"""Bad input of every kind: what the command lines of a golden file print, all of which must be refused.

`PYTHONPATH=tests python tests/support/refusals.py FILE` writes the messages of this version into FILE, "now"; "was"
stays. A new case is a row {"line": ...}: RUN is an active run, ENDED a stopped one, NAME.yaml a config of `CONFIGS`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from support import commands

CONFIGS: dict[str, tuple[str, str, str | None]] = {  # name -> environment, algorithm, network
    "sac": ("LunarLanderContinuous-v3", "sac", None),
    "ppo": ("CartPole-v1", "ppo", None),
    "dqn": ("CartPole-v1", "dqn", None),
    "r2d2": ("CartPole-v1", "r2d2", None),
    "catch": ("ddrl/Catch-v0", "dqn", "nature"),
    "spot": ("ddrl/Spot-v0", "dqn", "conv"),
    "asterix": ("ALE/Asterix-v5", "dqn", "nature"),
    "target": ("ddrl/Target-v0", "sac", None),
    "pairs": ("ddrl/Pairs-v0", "ppo", None),
}
BAD_FILES = {"empty": "", "broken": "env: {id: [", "list": "- a\n- b\n"}


def outcomes(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the exit code and stderr, without ids, paths and times, of each command line, on the server at hand.

    The current folder gets the files that the lines name.
    """
    for name, (env, algorithm, network) in CONFIGS.items():
        options = {"name": algorithm} | ({"network": network} if network else {})
        Path(f"{name}.yaml").write_text(json.dumps({"env": {"id": env}, "algorithm": options}))
    for name, text in BAD_FILES.items():
        Path(f"{name}.yaml").write_text(text)
    bare = ["--detach", "--no-learner", "--workers", "0", "--json"]
    runs = [json.loads(commands.run("submit", "sac.yaml", *bare).out)["run"] for _ in range(2)]
    commands.run("stop", runs[1])
    for line in lines:
        words, _, override = line.partition(" -s ")
        given = words.replace("RUN", runs[0]).replace("ENDED", runs[1]).split()
        code, _, error = commands.run(*given, *(["-s", override, *bare] if override else []))
        error = error.replace(runs[0], "RUN").replace(runs[1], "ENDED")
        yield code, re.sub(r"(unix|redis)://\S+", "URL", error).strip()


if __name__ == "__main__":
    golden = Path(sys.argv[1]).resolve()
    rows = json.loads(golden.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for row, (code, error) in zip(rows, outcomes([row["line"] for row in rows]), strict=True):
            row |= {"code": code, "was": row.get("was", error), "now": error}
        os.chdir("/")
    golden.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
