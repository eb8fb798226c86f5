"""The planted bugs of tests/mutants/ fit the tree as it is; `make mutants` shows that each is caught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_mutant_applies_and_names_its_test(patch: Path) -> None:
    breaks, test = patch.read_text("utf-8").splitlines()[:2]
    assert breaks.endswith(".") and test.startswith("Caught by ")
    done = subprocess.run(["git", "apply", "--check", "-v", patch], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Checking patch" in done.stderr, done.stderr


def test_the_tests_that_catch_them_are_there() -> None:
    names = {patch.read_text("utf-8").splitlines()[1].removeprefix("Caught by ") for patch in PATCHES}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *sorted(names),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_there_are_many() -> None:
    assert len(PATCHES) >= 20
