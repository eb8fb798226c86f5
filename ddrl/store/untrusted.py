"""Bounded numbers and printable texts: the types with which everything that a worker wrote is read."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(ge=-(2**53), le=2**53)]
PRODUCER_ID = r"[0-9]{1,15}"
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]*$")]

# Directions of writing: they show a line otherwise than it is.
_DIRECTIONS = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160), 0x2028, 0x2029, *_DIRECTIONS} - {9, 10}, " ")


def text(value: bytes) -> str:
    """Return bytes as text without control characters except tabs and line feeds."""
    return value.decode(errors="replace").translate(_CONTROLS)


def short_text(value: bytes) -> str:
    """Return the beginning of a text that ddrl itself writes in 500 characters."""
    return text(value[:2_000])[:500]


def number(value: bytes | None) -> float:
    """Return a number; 0 if it is missing, none, or beyond those that scripts read."""
    found = float(value) if value and re.fullmatch(rb"-?\d{1,16}(\.\d+)?", value) else 0.0
    return found if abs(found) <= 2**53 else 0.0
