"""Texts that a worker wrote, as a terminal and a page show them."""

from __future__ import annotations

import sys

import pytest

from ddrl.store import untrusted


def test_every_control_character_becomes_a_space() -> None:
    for code in untrusted._CONTROLS:
        assert untrusted.text(f"a{chr(code)}b".encode()) == "a b"
    shown = "".join(chr(code) for code in range(sys.maxunicode) if chr(code).isprintable())
    assert untrusted.text(shown.encode()) == shown and not {*map(ord, shown)} & untrusted._CONTROLS.keys()


@pytest.mark.parametrize(("value", "shown"), [(b"a\tb\nc", "a\tb\nc"), (b"\xff\x1b[2J", "� [2J")])
def test_lines_tabs_and_wrong_bytes(value: bytes, shown: str) -> None:
    assert untrusted.text(value) == shown
