"""Where in the generation two logprobs differ: one bar a column, the largest of the tokens it stands for.

    0.0308 ▇▂▅▁▃▆▂▁▄▂▃▁▅▂▁▃▂▄▁▂▃▅▁▂▄▃▁▂▅▃▁▄▂▁▃▂▄▁▅▂▁▃▂▄▃▁▅
           ^ token 268, offset 0, the first generated one · Δ +0.0002485

A peak never vanishes: columns are max-pooled, and what differs is at least ▁ while what is equal is a dot and
what was not compared a dash.
The number is the largest difference; a bar's height is its logarithm. Readable without colour.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from textual.strip import Strip
from textual.widget import Widget

from klbench.core.text import cell_width, fit

DECADES = 4
"""Differences of one request span orders of magnitude: on a linear scale one outlier flattens the rest."""

_BARS = "▁▂▃▄▅▆▇█"
_EQUAL = "·"
_MISSING = "–"
NOT_COMPARED = -1.0
"""Stands for the magnitude of a token that was not compared."""
_NOT_A_NUMBER = "!"
_LABEL_WIDTH = 9


def pooled(magnitudes: npt.NDArray[np.float64], columns: int) -> npt.NDArray[np.float64]:
    """The largest magnitude of each of `columns` stretches of tokens (NaN wins), fewer for fewer tokens."""
    count = len(magnitudes)
    if count <= columns:
        return magnitudes
    return np.maximum.reduceat(magnitudes, _edges(count, columns))


def bars(magnitudes: npt.NDArray[np.float64]) -> str:
    """One character for each magnitude on a logarithmic scale of DECADES below the largest finite one."""
    top = float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))
    shown = []
    for magnitude in magnitudes.tolist():
        if magnitude == 0:
            shown.append(_EQUAL)
        elif magnitude < 0:
            shown.append(_MISSING)
        elif not np.isfinite(magnitude):
            shown.append(_NOT_A_NUMBER)
        else:
            height = 1 + math.log10(max(magnitude / top, 1e-300)) / DECADES
            shown.append(_BARS[min(max(int(height * len(_BARS)), 0), len(_BARS) - 1)])
    return "".join(shown)


def column_of(offset: int, count: int, columns: int) -> int:
    """The column that stands for the token at `offset` of `count`."""
    if count <= columns:
        return offset
    return int(np.searchsorted(_edges(count, columns), offset, side="right")) - 1


def _edges(count: int, columns: int) -> npt.NDArray[np.int64]:
    return (np.arange(columns, dtype=np.int64) * count) // columns


class DifferenceStrip(Widget):
    """Two lines: the bars, and a caret with the value under the cursor."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "difference-strip--bar",
        "difference-strip--label",
        "difference-strip--cursor",
    }
    DEFAULT_CSS = """
    DifferenceStrip { height: 2; background: $surface; color: $foreground; }
    DifferenceStrip > .difference-strip--bar { color: $warning; }
    DifferenceStrip > .difference-strip--label { color: $text-muted; }
    DifferenceStrip > .difference-strip--cursor { text-style: reverse; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._magnitudes: npt.NDArray[np.float64] = np.zeros(0)
        self._offset = 0
        self._caption = ""

    def show(self, magnitudes: npt.NDArray[np.float64], offset: int, caption: str) -> None:
        """Draw `magnitudes` (|Δ| in nats by offset) with the caret at `offset`; `caption` is safe text."""
        if magnitudes is self._magnitudes and offset == self._offset and caption == self._caption:
            return
        self._magnitudes, self._offset, self._caption = magnitudes, offset, caption
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        label = base + self.get_component_rich_style("difference-strip--label", partial=True)
        count = len(self._magnitudes)
        if y > 1 or count == 0:
            return Strip.blank(width, base)
        columns = max(width - _LABEL_WIDTH - 1, 1)
        at = column_of(min(self._offset, count - 1), count, columns)
        if y == 1:
            return Strip([Segment(fit(self._caret_line(at, width), width), label)], width)
        bar = base + self.get_component_rich_style("difference-strip--bar", partial=True)
        cursor = bar + self.get_component_rich_style("difference-strip--cursor", partial=True)
        drawn = bars(pooled(self._magnitudes, columns))
        finite = self._magnitudes[np.isfinite(self._magnitudes)]
        top = float(finite.max(initial=0.0)) if len(finite) else float("nan")
        segments = [
            Segment(fit(f"{top:.2g}" if top else "0", _LABEL_WIDTH - 1, right=True) + " ", label),
            Segment(drawn[:at], bar),
            Segment(drawn[at : at + 1], cursor),
            Segment(drawn[at + 1 :], bar),
        ]
        return Strip(segments).adjust_cell_length(width, base)

    def _caret_line(self, at: int, width: int) -> str:
        """The caret under its column, the caption on the side where there is room."""
        start = _LABEL_WIDTH + at
        if start + 2 + len(self._caption) <= width:
            return " " * start + "^ " + self._caption
        before = start - 1 - len(self._caption)
        if before >= 0:
            return " " * before + self._caption + " ^"
        # Neither side has room for all of it: the larger one shows its beginning, with the numbers.
        right, left = width - start - 2, start - 1
        if right >= left:
            return " " * start + "^ " + _by_words(self._caption, max(right, 0))
        return _by_words(self._caption, left) + " ^"


def _by_words(caption: str, width: int) -> str:
    """The caption in `width` cells, without its last parts where they do not fit."""
    while cell_width(caption) > width and ", " in caption:
        caption = caption.rpartition(", ")[0]
    return fit(caption, width)
