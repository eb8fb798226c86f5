"""Planted bugs: is each patch of tests/mutants/ noticed by the test that it names?

make mutants      python benchmarks/mutants.py --report docs/mutants.md      python benchmarks/mutants.py trim append

A patch's first line says what it breaks, its second one which test catches it. Each is applied to a copy of the tree,
in which that test must then fail; without any patch the same tests must pass. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from machine import facts

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "tests" / "mutants"


class Mutant(NamedTuple):
    """A patch.

    Attributes:
        path: of the file.
        breaks: what is wrong in it.
        test: which finds that.
    """

    path: Path
    breaks: str
    test: str


class Result(NamedTuple):
    """How a test ended.

    Attributes:
        passed: None if it was not even run.
        reason: the line that says why it failed.
        seconds: that it took.
    """

    passed: bool | None
    reason: str
    seconds: float


def read(path: Path) -> Mutant:
    """Return the mutant of a patch."""
    breaks, test = path.read_text().splitlines()[:2]
    return Mutant(path, breaks, test.removeprefix("Caught by "))


def run(limit_s: float, test: str, patch: Path | None = None) -> Result:
    """Run a test in a copy of the tree, with a patch or as it is."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddrl-mutant-") as folder:
        tree = Path(folder, "tree")
        files = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, files.stdout.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        if patch is not None:
            subprocess.run(["git", "apply", "--whitespace=nowarn", str(patch)], cwd=tree, check=True)
        pytest = [sys.executable, "-m", "pytest", test, "-q", "-x", f"--basetemp={folder}/tests"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "GIT_CEILING_DIRECTORIES": folder}
        command = [*pytest, "-p", "no:cacheprovider", f"--timeout={limit_s:.0f}"]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    lines = re.findall(r"^E +(.+)$", done.stdout, re.MULTILINE)
    reason = max(lines, key=lambda line: "Error" in line)[:300] if lines else done.stdout[-300:]
    return Result({0: True, 1: False}.get(done.returncode), reason, time.monotonic() - began)


def main() -> int:
    """Parse the options, try the mutants, report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="only patches whose name begins so")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds of a test; a busy machine needs more"
    )
    parser.add_argument("--report", type=Path, help="also write the table there, as Markdown")
    arguments = parser.parse_args()
    began = time.monotonic()
    mutants = [read(path) for path in sorted(PATCHES.glob("*.patch"))]
    names = tuple(arguments.names)
    mutants = [one for one in mutants if not names or one.path.stem.startswith(names)]
    rows, missed = [], 0
    try_test = partial(run, arguments.limit)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        tests = sorted({mutant.test for mutant in mutants})
        for test, result in zip(tests, pool.map(try_test, tests), strict=True):
            print(f"as it is: {test}: passed {result.passed} in {result.seconds:.0f} s", flush=True)
            if not result.passed:
                print(result.reason)
                return 1
        results = pool.map(try_test, (one.test for one in mutants), (one.path for one in mutants))
        for mutant, result in zip(mutants, results, strict=True):
            is_caught = result.passed is False and "pytest-timeout" not in result.reason
            missed += not is_caught
            word = result.reason if is_caught else "**not caught**"
            print(f"{mutant.path.stem}: {word} ({result.seconds:.0f} s)", flush=True)
            test = mutant.test.partition("/")[2]
            rows.append(f"| `{mutant.path.stem}` | {mutant.breaks} | `{test}` | {result.seconds:.0f} |")
    lines = [
        f"# Mutants: {len(mutants) - missed} of {len(mutants)} planted bugs caught",
        "",
        f"{facts()}; {arguments.jobs} at a time, {time.monotonic() - began:.0f} s in all. `make mutants` runs it: each"
        " patch of `tests/mutants/` in a copy of the tree, where the test that it names must then fail. The same tests"
        " pass without a patch.",
        "",
        "| mutant | what it breaks | caught by | s |",
        "|---|---|---|---|",
        *rows,
    ]
    if arguments.report is not None:
        arguments.report.write_text("\n".join(lines) + "\n")
    print(f"{len(mutants) - missed} of {len(mutants)} caught in {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
