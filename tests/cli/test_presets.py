"""Presets: found by name from any folder, listed with what they reach."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.commands import call, call_json, refused

from ddrl import config
from ddrl.store import runs

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"), key=lambda path: path.stem)
BARE = ("--detach", "--no-learner", "--workers", "0")


def test_every_preset_is_listed_with_its_first_line() -> None:
    rows = call_json("presets")
    assert [(row["preset"], row["file"]) for row in rows] == [(path.stem, str(path)) for path in FILES]
    assert {"env": "ALE/Pong-v5", "algorithm": "ppo"}.items() <= {row["preset"]: row for row in rows}[
        "pong"
    ].items()
    text = call("presets")
    for row, path in zip(rows, FILES, strict=True):
        assert path.read_text("utf-8").startswith(f"# {row['reaches']}\n")
        assert re.fullmatch(r"(Return|Score|No figure).{1,100}\.", row["reaches"]), path.name
        assert re.search(
            rf"^{row['preset']} +{row['env']} +{row['algorithm']} +{re.escape(row['reaches'])}$", text, re.M
        )


@pytest.mark.parametrize("name", ["catch", "catch.yaml"])
def test_a_preset_is_found_from_any_folder_unless_a_local_file_has_its_name(client: Any, name: str) -> None:
    Path("catch").mkdir()  # a folder is no config
    done = commands.run("submit", name, *BARE)
    (run,) = runs.names(client)
    assert done.code == 0 and "preset" not in done.err
    assert runs.config(client, run) == config.load(next(path for path in FILES if path.stem == "catch"))

    Path("catch.yaml").write_text("env: {id: CartPole-v1}\nalgorithm: {name: ppo}\n", "utf-8")
    done = commands.run("submit", name, *BARE)
    assert done.err == "catch.yaml: the file in this folder, not the preset catch that ddrl ships\n"
    assert runs.config(client, runs.names(client)[-1]).env.id == "CartPole-v1"
    shutil.copy(FILES[0], "own.yaml")
    assert commands.run("submit", "./own", *BARE).err == ""


def test_a_misspelt_name_lists_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lunr", "Lunar", "configs/lunar.yaml"):
        assert re.match(rf"{name}: no such file or preset; did you mean lunar or ", refused("submit", name))
    assert refused("submit", "xyz.yml") == "xyz.yml: no such file or preset; `ddrl presets` lists the presets"
