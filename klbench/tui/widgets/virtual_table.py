"""A table over columns that formats only the rows on the screen: a million rows open as fast as ten.

Line API: a fixed header line, then one line a row. The cursor belongs to a row's key, not to its place, so
sorting and new data never move what is under it. Cells are text, never markup, and every cell passes
`visible` once more before it is drawn.

     #   prompt  cached  kl ▼      differ
    ▌ 0     268     267  5.4e-05  128/128
      5     220     219  5.1e-05  128/128
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from klbench.core.text import fit, visible
from klbench.tui.actions import bindings

_MARKER_WIDTH = 2
_GAP = 2
_KEPT_LINES = 2048


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `show(row)` is its text, `values` the raw quantity that sorting goes by (None: unsortable).

    Where columns do not fit, those with the highest `optional` go first; 0 always stays.
    """

    key: str
    title: str
    width: int
    show: Callable[[int], str]
    values: npt.NDArray[Any] | None = None
    right: bool = False
    optional: int = 0
    descends: bool = False
    """Whether the first sort by it puts the largest on top."""
    stretch: int = 0
    """Cells it may grow by where the window is wide."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What a table shows: `count` rows, an optional key for each (its number otherwise) and a tone each."""

    columns: tuple[Column, ...]
    count: int
    keys: npt.NDArray[np.int64] | None = None
    tone: Callable[[int], str] = field(default=lambda _row: "")
    """"", "strong" (differs), "dim" (equal) or "warn"."""

    def key(self, row: int) -> int:
        return row if self.keys is None else int(self.keys[row])


NO_ROWS = Rows((), 0)


class VirtualTable(ScrollView, can_focus=True):
    """The table. `rows` is replaced as a whole; the cursor stays on its key."""

    BINDINGS = bindings("table")
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "virtual-table--header",
        "virtual-table--cursor",
        "virtual-table--cursor-blurred",
        "virtual-table--strong",
        "virtual-table--dim",
        "virtual-table--warn",
        "virtual-table--empty",
    }
    DEFAULT_CSS = """
    VirtualTable { background: $surface; color: $foreground; scrollbar-size: 1 1; }
    VirtualTable > .virtual-table--header { color: $text-muted; text-style: bold; }
    VirtualTable > .virtual-table--cursor {
        background: $block-cursor-background; color: $block-cursor-foreground; text-style: bold;
    }
    VirtualTable > .virtual-table--cursor-blurred {
        background: $block-cursor-blurred-background; color: $block-cursor-blurred-foreground;
    }
    VirtualTable > .virtual-table--strong { color: $warning; }
    VirtualTable > .virtual-table--dim { color: $text-muted; }
    VirtualTable > .virtual-table--warn { color: $error; text-style: bold; }
    VirtualTable > .virtual-table--empty { color: $text-muted; }
    """

    @dataclass
    class Highlighted(Message):
        """The cursor came to rest on a row."""

        table: VirtualTable
        row: int

        @property
        def control(self) -> VirtualTable:
            return self.table

    @dataclass
    class Chosen(Message):
        """Enter or a double click on a row."""

        table: VirtualTable
        row: int

        @property
        def control(self) -> VirtualTable:
            return self.table

    def __init__(
        self, *, empty: str = "", header: bool = True, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.empty = empty
        """What an empty table says: the key that fills it."""
        self._header_lines = 1 if header else 0
        self.rows = NO_ROWS
        self.cursor = 0
        """Place of the cursor in the shown order."""
        self.sort_key: str | None = None
        self.sort_descends = False
        self.order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._given_order: npt.NDArray[np.int64] | None = None
        self._lines: dict[tuple[int, bool], Strip] = {}
        self._shown_columns: tuple[Column, ...] = ()
        self._table_width = 0

    # What is shown

    @property
    def row(self) -> int | None:
        """The row under the cursor, None in an empty table."""
        return int(self.order[self.cursor]) if len(self.order) else None

    def show_rows(
        self, rows: Rows, *, order: npt.NDArray[np.int64] | None = None, cursor_key: int | None = None
    ) -> None:
        """Replace the rows. `order` is how they lie until the user sorts; the cursor goes to `cursor_key`, or
        stays on the key it has, or on its place where that key is gone."""
        row = self.row
        key = cursor_key if cursor_key is not None else self.rows.key(row) if row is not None else None
        self.rows = rows
        self._given_order = order
        if self.sort_key is not None and self.sort_key not in {column.key for column in rows.columns}:
            self.sort_key = None
        self._arrange(key)

    def sort(self, key: str | None, *, descends: bool) -> None:
        """Sort by the raw values of a column, stable; None restores the order that was given."""
        row = self.row
        current = self.rows.key(row) if row is not None else None
        self.sort_key, self.sort_descends = key, descends
        self._arrange(current)

    def move_to_key(self, key: int) -> bool:
        """Put the cursor on the row with `key`; False where there is none."""
        place = self._place_of(key)
        if place is None:
            return False
        self.move_to(place)
        return True

    def move_to(self, place: int, *, announce: bool = True) -> None:
        """Put the cursor on a place in the shown order and make it visible."""
        if not len(self.order):
            return
        before, self.cursor = self.cursor, min(max(place, 0), len(self.order) - 1)
        for line in {before, self.cursor}:
            self.refresh_line(line + self._header_lines)
        self._reveal()
        if announce:
            self.post_message(self.Highlighted(self, int(self.order[self.cursor])))

    def describe_sort(self) -> str:
        """`sort kl ▼`, or nothing in the given order."""
        if self.sort_key is None:
            return ""
        title = next(column.title for column in self.rows.columns if column.key == self.sort_key)
        return f"sort {title} {'▼' if self.sort_descends else '▲'}"

    # Keys

    def action_up(self) -> None:
        self.move_to(self.cursor - 1)

    def action_down(self) -> None:
        self.move_to(self.cursor + 1)

    def action_page_up(self) -> None:
        self.move_to(self.cursor - self._page)

    def action_page_down(self) -> None:
        self.move_to(self.cursor + self._page)

    def action_first(self) -> None:
        self.move_to(0)

    def action_last(self) -> None:
        self.move_to(len(self.order) - 1)

    def action_scroll_left(self) -> None:
        self.scroll_to(x=max(self.scroll_offset.x - 8, 0), animate=False)

    def action_scroll_right(self) -> None:
        self.scroll_to(x=self.scroll_offset.x + 8, animate=False)

    def action_choose(self) -> None:
        if (row := self.row) is not None:
            self.post_message(self.Chosen(self, row))

    def action_sort_next(self) -> None:
        """Sort by the next sortable column that is on the screen; after the last, the given order."""
        keys = [column.key for column in self._shown_columns if column.values is not None]
        if not keys:
            return
        place = keys.index(self.sort_key) + 1 if self.sort_key in keys else 0
        if place == len(keys):
            self.sort(None, descends=False)
            return
        column = next(column for column in self.rows.columns if column.key == keys[place])
        self.sort(column.key, descends=column.descends)

    def action_sort_reverse(self) -> None:
        if self.sort_key is not None:
            self.sort(self.sort_key, descends=not self.sort_descends)

    def on_click(self, event: events.Click) -> None:
        place = int(self.scroll_offset.y) + event.y - self._header_lines
        if event.y < self._header_lines or not 0 <= place < len(self.order):
            return
        self.move_to(place)
        if event.chain == 2:
            self.action_choose()

    def on_resize(self) -> None:
        self._measure()
        self._reveal()

    def on_focus(self) -> None:
        self._refresh_cursor()

    def on_blur(self) -> None:
        self._refresh_cursor()

    # Drawing

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        if not len(self.order):
            return self._empty_line(y, width)
        if y < self._header_lines:
            style = base + self.get_component_rich_style("virtual-table--header", partial=True)
            return self._crop(self._header(style), width, style)
        place = int(self.scroll_offset.y) + y - self._header_lines
        if place >= len(self.order):
            return Strip.blank(width, base)
        under_cursor = place == self.cursor
        line = self._lines.get((place, under_cursor))
        if line is None:
            if len(self._lines) >= _KEPT_LINES:
                self._lines.clear()
            line = self._crop(self._row(place, under_cursor), width, self._row_style(place, under_cursor))
            self._lines[place, under_cursor] = line
        return line

    def watch_scroll_x(self, old_value: float, new_value: float) -> None:
        self._lines.clear()
        super().watch_scroll_x(old_value, new_value)

    def notify_style_update(self) -> None:
        self._lines.clear()
        super().notify_style_update()

    @property
    def _page(self) -> int:
        return max(self.scrollable_content_region.height - 2, 1)

    def _header(self, style: Style) -> list[Segment]:
        cells = []
        for column in self._shown_columns:
            title = column.title
            if column.key == self.sort_key:
                title += " ▼" if self.sort_descends else " ▲"
            cells.append(fit(title, column.width, right=column.right))
        return [Segment(" " * _MARKER_WIDTH, style), Segment((" " * _GAP).join(cells), style)]

    def _row(self, place: int, under_cursor: bool) -> list[Segment]:
        row, style = int(self.order[place]), self._row_style(place, under_cursor)
        cells = [fit(visible(c.show(row)), c.width, right=c.right) for c in self._shown_columns]
        return [Segment("▌ " if under_cursor else "  ", style), Segment((" " * _GAP).join(cells), style)]

    def _row_style(self, place: int, under_cursor: bool) -> Style:
        style = self.rich_style
        tone = self.rows.tone(int(self.order[place]))
        if tone:
            style += self.get_component_rich_style(f"virtual-table--{tone}", partial=True)
        if under_cursor:
            name = "virtual-table--cursor" if self.has_focus else "virtual-table--cursor-blurred"
            style += self.get_component_rich_style(name, partial=True)
        return style

    def _crop(self, segments: list[Segment], width: int, style: Style) -> Strip:
        """The part of a line that the horizontal scroll shows; the marker never scrolls away."""
        start = int(self.scroll_offset.x)
        marker = Strip([segments[0]], _MARKER_WIDTH)
        body = Strip(segments[1:]).crop(start, start + max(width - _MARKER_WIDTH, 0))
        return Strip.join([marker, body]).adjust_cell_length(width, style)

    def _empty_line(self, y: int, width: int) -> Strip:
        style = self.rich_style + self.get_component_rich_style("virtual-table--empty", partial=True)
        lines = self.empty.split("\n")
        top = max((self.size.height - len(lines)) // 2, 0)
        text = lines[y - top] if 0 <= y - top < len(lines) else ""
        return Strip([Segment(fit("  " + visible(text), width), style)], width)

    # Arithmetic

    def _arrange(self, key: int | None) -> None:
        """Put the rows in order, the cursor on `key`, and draw everything."""
        column = next((c for c in self.rows.columns if c.key == self.sort_key), None)
        given = self._given_order
        base = np.arange(self.rows.count, dtype=np.int64) if given is None else given
        if column is None or column.values is None:
            self.order = base
        else:
            self.order = base[_stable_order(column.values[base], descends=self.sort_descends)]
        place = self._place_of(key) if key is not None else None
        self.cursor = place if place is not None else min(self.cursor, max(len(self.order) - 1, 0))
        self._measure()
        self._reveal()
        if len(self.order):
            self.post_message(self.Highlighted(self, int(self.order[self.cursor])))

    def _place_of(self, key: int) -> int | None:
        row = np.flatnonzero(self.rows.keys == key) if self.rows.keys is not None else np.asarray([key])
        if not len(row):
            return None
        found = np.flatnonzero(self.order == row[0])
        return int(found[0]) if len(found) else None

    def _measure(self) -> None:
        """Choose the columns that fit and tell the scroll bars how much there is."""
        columns = list(self.rows.columns)
        scrolls = len(self.order) + self._header_lines > self.size.height
        room = max(self.size.width - (1 if scrolls else 0), 20)
        while (width := _total_width(columns)) > room:
            least = max(columns, key=lambda column: column.optional, default=None)
            if least is None or least.optional == 0:
                break
            columns.remove(least)
        for index, column in enumerate(columns):
            if column.stretch and (extra := min(column.stretch, room - width)) > 0:
                columns[index] = replace(column, width=column.width + extra)
                width += extra
        self._shown_columns = tuple(columns)
        self._lines.clear()
        count = len(self.order)
        self.virtual_size = Size(width, count + self._header_lines) if count else Size(0, 0)
        self.refresh()

    def _reveal(self) -> None:
        """Scroll as little as possible so that the cursor is on the screen."""
        height = self.scrollable_content_region.height - self._header_lines
        if height < 1 or not len(self.order):
            return
        top = int(self.scroll_offset.y)
        around = 1 if height > 2 else 0
        if self.cursor - around < top:
            self.scroll_to(y=max(self.cursor - around, 0), animate=False)
        elif self.cursor + around >= top + height:
            self.scroll_to(y=min(self.cursor + around, len(self.order) - 1) - height + 1, animate=False)

    def _refresh_cursor(self) -> None:
        self._lines.clear()
        self.refresh(
            Region(0, self.cursor + self._header_lines - int(self.scroll_offset.y), self.size.width, 1)
        )


def _total_width(columns: list[Column]) -> int:
    return _MARKER_WIDTH + sum(column.width for column in columns) + _GAP * max(len(columns) - 1, 0)


def _stable_order(values: npt.NDArray[Any], *, descends: bool) -> npt.NDArray[np.int64]:
    """Indices that sort `values`; equal ones keep their order, what is no number comes last either way."""
    if values.dtype.kind not in "biuf":
        values = np.unique(values, return_inverse=True)[1]
    numbers = values.astype(np.float64)
    order = np.argsort(-numbers if descends else numbers, kind="stable")
    return order.astype(np.int64)
