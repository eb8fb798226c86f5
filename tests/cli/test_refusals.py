"""Bad input of every kind: refusals.json holds command lines that must be refused, and what they print in one line.

`PYTHONPATH=tests python tests/cli/test_refusals.py` writes the messages of this version into it, "now"; "was" stays.
A new case is a row {"line": ...}: RUN is an active run of SAC, PPO one of PPO, ENDED a stopped one, NAME.yaml a config
of `CONFIGS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from redis import Redis
from support import commands
from support.store import events

from ddrl.store import runs as stored

GOLDEN = Path(__file__).resolve().with_name("refusals.json")
ROWS = json.loads(GOLDEN.read_text("utf-8"))
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


def outcomes() -> Iterator[tuple[int, str]]:
    """Yield the exit code and stderr, without ids, paths and times, of each row, on the server at hand.

    The current folder gets the files that the lines name.
    """
    for name, (env, algorithm, network) in CONFIGS.items():
        options = {"name": algorithm} | ({"network": network} if network else {})
        Path(f"{name}.yaml").write_text(json.dumps({"env": {"id": env}, "algorithm": options}))
    for name, text in BAD_FILES.items():
        Path(f"{name}.yaml").write_text(text)
    bare = ["--detach", "--no-learner", "--workers", "0", "--json"]
    algorithms = {"PPO": "ppo", "RUN": "sac", "ENDED": "sac"}
    runs = {
        word: json.loads(commands.run("submit", f"{name}.yaml", *bare).out)["run"]
        for word, name in algorithms.items()
    }
    commands.run("stop", runs["ENDED"])
    for row in ROWS:
        words, _, override = row["line"].partition(" -s ")
        given = re.sub("|".join(runs), lambda word: runs[word[0]], words).split()
        code, _, error = commands.run(*given, *(["-s", override, *bare] if override else []))
        for word, run in runs.items():
            error = error.replace(run, word)
        yield code, re.sub(r"(unix|redis)://\S+", "URL", error).strip()


def test_bad_input_is_refused_in_one_line(client: Redis) -> None:
    for row, (code, error) in zip(ROWS, outcomes(), strict=True):
        assert (code, error) == (row["code"], row["now"]), row["line"]
        assert code != 0 and error.startswith("ddrl: error: ") and "\n" not in error
    names = stored.names(client)
    assert [folder.name for folder in Path("runs").iterdir()] == [names[2]]  # of the one that was stopped
    assert len(names) == 3, "none made a fourth run, or changed one"
    assert [events(client, name) for name in names] == [["created"]] * 2 + [["created", "stopped"]]


if __name__ == "__main__":
    assert "DDRL_REDIS_URL" in os.environ, "name a server that may be filled; `ddrl up` is among the lines"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for row, (code, error) in zip(ROWS, outcomes(), strict=True):
            row |= {"code": code, "was": row.get("was", error), "now": error}
    GOLDEN.write_text(json.dumps(ROWS, indent=1) + "\n", "utf-8")
