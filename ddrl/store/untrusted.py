"""Bounded numbers and printable texts: the types with which everything that a worker wrote is read."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(ge=-(2**53), le=2**53)]
PRODUCER_ID = r"[0-9]{1,15}"
Name = Annotated[str, Field(pattern=r"^[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]*$")]

# Directions of writing and what is invisible: they show a line otherwise than it is.
_UNSEEN = (0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160), *_UNSEEN, *range(0xE0000, 0xE0080)} - {9, 10}, " ")


def text(value: bytes) -> str:
    """Return bytes as text without control characters except tabs and line feeds."""
    found = value.decode(errors="replace")
    return found if found.isprintable() else found.translate(_CONTROLS)  # which takes several times as long


def short_text(value: bytes) -> str:
    """Return the beginning of a text that ddrl itself writes in a line of 500 characters."""
    return text(value[:2_000])[:500].translate({9: " ", 10: " "})


def number(value: bytes | None) -> float:
    """Return a number; 0 if it is missing, none, or beyond those that scripts read."""
    found = float(value) if value and re.fullmatch(rb"-?\d{1,16}(\.\d+)?", value) else 0.0
    return found if abs(found) <= 2**53 else 0.0
