"""Bounded numbers and printable texts: the types with which everything that a worker wrote is read."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(ge=-(2**53), le=2**53)]
PRODUCER_ID = r"[0-9]{1,15}"
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]

_CONTROLS = {code: " " for code in (*range(32), *range(127, 160), 0x2028, 0x2029) if chr(code) not in "\t\n"}


def text(value: bytes) -> str:
    """Return bytes as text without control characters except tabs and line feeds."""
    return value.decode(errors="replace").translate(_CONTROLS)


def short_text(value: bytes) -> str:
    """Return the beginning of a text that ddrl itself writes in 500 characters."""
    return text(value[:2_000])


def number(value: bytes | None) -> float:
    """Return a number; 0 if it is missing or none."""
    return float(value) if value and re.fullmatch(rb"-?\d{1,16}(\.\d+)?", value) else 0.0
