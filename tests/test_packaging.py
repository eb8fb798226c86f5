"""The constraints pin what pyproject.toml names; the wheel holds `ddrl` only, with the presets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ddrl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DIRECT = [
    Requirement(text)
    for group in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for text in group
]
LEFT_TO_TORCH = ("nvidia-", "cuda-", "triton")  # what its CUDA build pins itself
PIN = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)")


def pins() -> dict[str, str]:
    """Name -> version of constraints.txt; every line must be a plain pin."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    found = [PIN.fullmatch(line) for line in lines if line and not line.startswith("#")]
    assert all(found), "a line is no plain pin"
    return {match[1]: match[2] for match in found if match}


def unpinned(requirements: list[Requirement], pinned: dict[str, str]) -> set[str]:
    """Requirements that constraints.txt leaves open or contradicts."""
    return {
        str(need)
        for need in requirements
        if not canonicalize_name(need.name).startswith(LEFT_TO_TORCH)
        and not need.specifier.contains(
            pinned.get(canonicalize_name(need.name), "0.dev0"), need.specifier.prereleases or False
        )
    }


def test_each_direct_dependency_has_a_pin_in_its_range() -> None:
    assert unpinned(DIRECT, pins()) == set()


def test_a_missing_or_contradicting_pin_is_found() -> None:
    assert unpinned([Requirement("nosuch")], pins()) == {"nosuch"}
    assert unpinned([Requirement("torch<1")], pins()) == {"torch<1"}
    assert unpinned([Requirement("nvidia-cublas")], pins()) == set()


def test_each_indirect_dependency_has_a_pin() -> None:
    """Follows what is installed here; packages of extras that are not installed cannot be followed."""
    open_names = [(canonicalize_name(need.name), frozenset(need.extras)) for need in DIRECT]
    seen: set[tuple[str, frozenset[str]]] = set()
    needed: list[Requirement] = []
    while open_names:
        name, extras = open_names.pop()
        if (name, extras) in seen or name.startswith(LEFT_TO_TORCH):
            continue
        seen.add((name, extras))
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for need in map(Requirement, texts):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                needed.append(need)
                open_names.append((canonicalize_name(need.name), frozenset(need.extras)))
    assert len(seen) > 40
    assert unpinned(needed, pins()) == set()


def test_the_wheel_holds_ddrl_with_its_scripts_and_presets(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    builder = wheel.WheelBuilder(str(ROOT))
    with zipfile.ZipFile(next(builder.build(directory=str(tmp_path)))) as archive:
        archive.extractall(tmp_path / "installed")
    paths = {str(path.relative_to(tmp_path / "installed")) for path in tmp_path.glob("installed/**/*.*")}
    assert "ddrl/cli/__init__.py" in paths and "ddrl/store/runs.py" in paths
    scripts = ROOT / "ddrl" / "store" / "scripts"
    assert {f"ddrl/store/scripts/{path.name}" for path in scripts.glob("*.lua")} <= paths
    version = builder.metadata.version
    assert {path.split("/")[0] for path in paths} == {"ddrl", f"ddrl-{version}.dist-info"}
    assert version == ddrl.__version__

    own_path = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "ddrl", "presets", "--json"]
    listed = json.loads(subprocess.check_output(command, env=own_path, cwd=tmp_path, text=True))
    assert [row["preset"] for row in listed] == sorted(path.stem for path in ROOT.glob("configs/*.yaml"))
    assert {str(Path(row["file"]).parent) for row in listed} == {str(tmp_path / "installed/ddrl/configs")}
