"""Figures, times and sizes as text, and records as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def cell(value: Any) -> str:
    """Return a value as text: "12,345", "12.3", "yes", "-" for None; text as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else number(value)


def counted(num: int, noun: str, ending: str = "s") -> str:
    """Return a number with its noun: "1 machine", "2 machines"."""
    return f"{num:,} {noun}{ending * (num != 1)}"


def duration(seconds: float | None) -> str:
    """Return seconds as "9s", "3m05s", "2h10m" or "3d04h"; "-" for None."""
    if seconds is None:
        return "-"
    minutes, s = divmod(max(0, int(seconds)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}m"
    return f"{m}m{s:02}s" if minutes else f"{s}s"


def size(num_bytes: float) -> str:
    """Return bytes as "512 B", "3.1 MB": powers of 1024."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def number(value: float | None) -> str:
    """Return a figure with one decimal, or "-" if it is missing."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.1f}" if abs(value) < 1e12 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """Return a share as "25 %", or "-" if it is unknown."""
    return "-" if share is None else f"{100 * share:.0f} %"


def score(evaluation: Mapping[str, Any] | None) -> str:
    """Return `return_mean` and `return_std` as "200.3 ± 15.0", or "-" if there is no evaluation."""
    if evaluation is None or evaluation.get("return_mean") is None:
        return "-"
    return f"{number(evaluation['return_mean'])} ± {number(evaluation['return_std'])}"


def picked(source: object, *names: str) -> dict[str, Any]:
    """Return some attributes by name, for JSON."""
    return {name: getattr(source, name) for name in names}
