"""How a line of a table is put together: a marker that never scrolls away, cells, a mark where it goes on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from klbench.core.text import cell_width, fit, fit_words, visible
from klbench.tui.widgets.rows import GAP, MARKER_WIDTH, Column

CUT = "›"
"""Stands where a line goes on to the right."""


def header_segments(
    columns: Sequence[Column], sort_key: str | None, descends: bool, style: Style
) -> list[Segment]:
    """The titles, the sorted one with a mark."""
    mark = "▼" if descends else "▲"
    cells = [_heading(column, mark if column.key == sort_key else "") for column in columns]
    return [Segment(" " * MARKER_WIDTH, style), Segment((" " * GAP).join(cells), style)]


def _heading(column: Column, mark: str) -> str:
    """The title and its mark; where there is no room for both, the title is what is cut."""
    title = column.title
    if mark and cell_width(title) + 2 > column.width:
        title = fit(title, max(column.width - 1, 0)).rstrip() + mark
    elif mark:
        title += f" {mark}"
    return fit(title, column.width, right=column.right)


def row_segments(columns: Sequence[Column], row: int, under_cursor: bool, style: Style) -> list[Segment]:
    """The cells of a row, made safe to draw."""
    cells = [_cell(column, visible(column.show(row))) for column in columns]
    return [Segment("▌ " if under_cursor else "  ", style), Segment((" " * GAP).join(cells), style)]


def _cell(column: Column, text: str) -> str:
    return fit_words(text, column.width) if column.sentence else fit(text, column.width, right=column.right)


def cropped(segments: Sequence[Segment], start: int, width: int, style: Style) -> Strip:
    """The part of a line behind `start` cells that fits into `width`."""
    room = max(width - MARKER_WIDTH, 0)
    marker = Strip([segments[0]], MARKER_WIDTH)
    whole = Strip(segments[1:])
    if whole.cell_length - start <= room or not segments[-1].text[start + room - 1 :].strip():
        body = whole.crop(start, start + room)
    else:
        body = Strip.join([whole.crop(start, start + room - 1), Strip([Segment(CUT, style)], 1)])
    return Strip.join([marker, body]).adjust_cell_length(width, style)
