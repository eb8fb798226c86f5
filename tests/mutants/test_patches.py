"""The planted bugs of tests/mutants/ fit the tree as it is; `make mutants` shows that each is caught."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_mutant_applies_and_names_a_test(patch: Path) -> None:
    breaks, test = patch.read_text("utf-8").splitlines()[:2]
    file, _, name = test.removeprefix("Caught by ").partition("::")
    assert breaks.endswith(".") and f"def {name.partition('[')[0]}(" in (ROOT / file).read_text("utf-8")
    done = subprocess.run(["git", "apply", "--check", "-v", patch], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Checking patch" in done.stderr, done.stderr


def test_there_are_many() -> None:
    assert len(PATCHES) >= 20
