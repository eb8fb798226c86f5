"""For the site: its first page is the README, and a link out of docs/ becomes the name of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_OUTWARD = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]*)(?:#[^)]*)?\)")
_TO_DOCS = re.compile(r"\]\(docs/")
_ELSEWHERE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|[\w./-]+\.(?:md|png|gif)(?:#[\w-]*)?\))([^)]*)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the first page."""
    text = _TO_DOCS.sub("](", (ROOT / "README.md").read_text("utf-8"))
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files that are not part of the site."""
    markdown = _OUTWARD.sub(lambda found: _named(found[1], found[2]), markdown)
    return _ELSEWHERE.sub(lambda found: found[0] if found[1] else _named(found[2], found[3]), markdown)


def _named(text: str, path: str) -> str:
    plain = text.strip("`")
    return f"`{plain}`" if plain == path.rstrip("/") else f"{text} (`{path}`)"
