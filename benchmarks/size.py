"""Print the size of the source: lines of code by folder, entries of ddrl/ and its import layers.

A line of code holds a token; docstrings (those of attributes, too), comments and blank lines do not count.

    python benchmarks/size.py
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SILENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def lines_of_code(source: str) -> int:
    """Return the number of lines that hold a token outside of docstrings."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def report() -> Iterator[str]:
    """Yield the lines to print."""
    for top in ("ddrl", "tests", "benchmarks", "workers"):
        sizes: dict[str, int] = {}
        for path in sorted((ROOT / top).rglob("*.py")):
            part = path.relative_to(ROOT).parts
            name = "/".join(part[:2]) + ("/" if len(part) > 2 else "")
            sizes[name] = sizes.get(name, 0) + lines_of_code(path.read_text("utf-8"))
        yield f"{sum(sizes.values()):6,}  {top}/"
        if top in ("ddrl", "tests"):
            for name, size in sizes.items():
                yield f"        {size:6,}  {name}"
    scripts = sorted((ROOT / "ddrl/store/scripts").glob("*.lua"))
    texts = [line for path in scripts for line in path.read_text("utf-8").splitlines()]
    lua = [line for line in texts if line.strip() and not line.strip().startswith("--")]
    yield f"{len(lua):6,}  lines of Lua in {len(scripts)} scripts"
    entries = [path for path in (ROOT / "ddrl").iterdir() if path.name != "__pycache__"]
    yield f"{len(entries):6,}  entries in ddrl/"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # of a reader that has ended, as `head` does
        os.write(sys.stdout.fileno(), "".join(f"{line}\n" for line in report()).encode())
