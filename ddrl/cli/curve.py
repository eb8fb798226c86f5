"""A learning curve in text: training returns as a braille line, evaluations as marks, the target."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ddrl.runs.curves import WINDOW, trailing_mean

# Bits of the eight dots of a braille character, [row][column].
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LABEL_WIDTH = 7


def legend(target: float | None) -> Text:
    """Return the line above the drawing."""
    text = Text("return: ", style="dim", no_wrap=True)
    text.append("⠤ ", style="cyan").append(f"training, mean of {WINDOW}  ", style="dim")
    text.append("● ", style="bold yellow").append("evaluation  ", style="dim")
    text.append("◆ ", style="bold green").append("confirmed  ", style="dim")
    if target is not None:
        text.append("╌ ", style="green").append(f"target {target:g}", style="dim")
    return text


def draw(
    returns: Sequence[tuple[float, float]],
    evaluations: Sequence[tuple[float, float, bool]],
    *,
    width: int,
    height: int,
    target: float | None = None,
) -> Text:
    """Draw returns over time.

    Args:
        returns: (seconds, return) of training episodes, in order of time.
        evaluations: (seconds, mean return, whether it is a confirmation).
        width, height: of the whole drawing in characters; the last line is the time axis.
        target: return at which the run is solved.
    """
    width, height = max(width - _LABEL_WIDTH - 1, 8), max(height - 1, 3)
    means = trailing_mean([value for _, value in returns])
    if len(means) > WINDOW:  # the mean of few episodes would stretch the axis
        returns, means = returns[WINDOW // 4 :], means[WINDOW // 4 :]
    levels = means + [value for _, value, _ in evaluations]
    end_s = max([when for when, *_ in (*returns, *evaluations)], default=0.0)
    if not levels or end_s <= 0:
        return Text("no episode has ended yet".center(width + _LABEL_WIDTH), style="dim")
    levels += [] if target is None else [target]
    low, high = min(levels), max(levels)
    margin = 0.05 * (high - low) or max(1.0, 0.1 * abs(high))
    low, high = low - margin, high + margin

    def row_of(value: float, rows: int) -> int:
        return min(rows - 1, max(0, round((high - value) / (high - low) * (rows - 1))))

    cells = [[(" ", "")] * width for _ in range(height)]
    if target is not None:
        cells[row_of(target, height)] = [("╌", "green")] * width
    columns = [min(2 * width - 1, max(0, int(when / end_s * 2 * width))) for when, _ in returns]
    line = sorted(dict(zip(columns, means, strict=True)).items())  # the last of the means in a column
    for (row, column), bits in _dots([(x, row_of(y, 4 * height)) for x, y in line]).items():
        cells[row][column] = (chr(0x2800 + bits), "cyan")
    for when, value, confirmation in evaluations:
        column = min(width - 1, max(0, int(when / end_s * (width - 1))))
        cells[row_of(value, height)][column] = ("◆", "bold green") if confirmation else ("●", "bold yellow")
    return _assemble(cells, low, high, end_s)


def _dots(points: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the braille bits of each cell (row, column) for straight lines between points."""
    bits: dict[tuple[int, int], int] = {}
    for (x0, y0), (x1, y1) in zip(points, [*points[1:], *points[-1:]], strict=True):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            x, y = x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps)
            cell = (y // 4, x // 2)
            bits[cell] = bits.get(cell, 0) | _DOTS[y % 4][x % 2]
    return bits


def _assemble(cells: Sequence[Sequence[tuple[str, str]]], low: float, high: float, end_s: float) -> Text:
    text = Text(no_wrap=True)
    height, width = len(cells), len(cells[0])
    for row, line in enumerate(cells):
        value = high - (high - low) * row / max(height - 1, 1)
        label = _label(value) if row in {0, height // 2, height - 1} else ""
        text.append(f"{label:>{_LABEL_WIDTH}}│", style="dim")
        text.append_tokens([*line, ("\n", "")])
    left, right = "0s", f"{end_s:.0f}s"
    text.append(" " * _LABEL_WIDTH + "└" + left + "─" * (width - len(left) - len(right)) + right, style="dim")
    return text


def _label(value: float) -> str:
    if abs(value) >= 10 ** (_LABEL_WIDTH - 2):
        return f"{value:.1e}".replace("e+0", "e").replace("+", "")
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"
