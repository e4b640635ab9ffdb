"""Charts as plain text: bars that grow to the right, columns that grow upwards. Readable without colour.

100% ██▇▅
     ████
  0% ████▁▁··
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_LEVELS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
NOT_COMPARED = " "
EQUAL = "·"


def bar(part: float, width: int) -> str:
    """A bar of `part` (0 to 1) of `width` cells, to an eighth of a cell; what is not 0 shows."""
    eighths = min(max(round(part * width * 8), 1 if part > 0 else 0), width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def logarithmic(count: int, top: int) -> float:
    """How far a bar of `count` reaches where one of `top` reaches 1 and one of 1 is still seen."""
    if count <= 0:
        return 0.0
    return (1 + math.log2(count)) / (1 + math.log2(max(top, count)))


def columns(shares: npt.NDArray[np.float64], height: int) -> list[str]:
    """`height` lines, the top one first, of one column for each share (0 to 1).

    NaN is blank (nothing was compared), 0 a dot, anything else at least ▁.
    """
    lines: list[list[str]] = [[] for _ in range(height)]
    for share in shares.tolist():
        if math.isnan(share):
            cells = [NOT_COMPARED] * height
        elif share <= 0:
            cells = [" "] * (height - 1) + [EQUAL]
        else:
            eighths = max(1, round(min(share, 1.0) * height * 8))
            # The bottom cell is filled first.
            cells = [_LEVELS[min(max(eighths - 8 * above, 0), 8)] for above in reversed(range(height))]
        for line, cell in zip(lines, cells, strict=True):
            line.append(cell)
    return ["".join(line) for line in lines]


def counts(numbers: Sequence[int], cells: int = 1) -> str:
    """One character a number, in `cells`: blank for 0, the digit up to 9, + above."""
    return "".join((" " if n <= 0 else str(n) if n <= 9 else "+").ljust(cells) for n in numbers)


def wide(line: str, cells: int) -> str:
    """A line of columns, each `cells` wide."""
    return "".join(column * cells for column in line)


def axis(edges: npt.NDArray[np.int64], every: int = 16, cells: int = 1) -> str:
    """The first value of a bin under its column of `cells`, as many as fit; the last value at the end."""
    bins = len(edges) - 1
    line = [" "] * max(bins * cells, 1)
    last = str(int(edges[-1]) - 1)
    last_at = max(bins * cells - len(last), 0)
    free_from = 0
    for column in range(0, bins, max(every // cells, 1)):
        text, at = str(int(edges[column])), column * cells
        if at < free_from or at + len(text) + 1 > last_at:
            continue
        line[at : at + len(text)] = text
        free_from = at + len(text) + 1
    if free_from <= last_at:
        line[last_at : last_at + len(last)] = last
    return "".join(line).rstrip()
