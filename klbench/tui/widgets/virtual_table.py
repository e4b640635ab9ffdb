"""A table over columns that formats only the rows on the screen: a million rows open as fast as ten.

Line API: a fixed header line, then one line a row. The cursor belongs to a row's key, not to its place, so
sorting and new data never move what is under it. Cells are text, never markup, and every cell passes
`visible` once more before it is drawn.

     #   prompt  cached  kl ▼      differ
    ▌ 0     268     267  5.4e-05  128/128
      5     220     219  5.1e-05  128/128
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.actions import SkipAction
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from klbench.core.text import fit, visible
from klbench.tui.actions import bindings, key_of
from klbench.tui.filtering import FilterError, Term, arranged, check, parse
from klbench.tui.widgets.rows import NO_ROWS, Column, Rows, as_text, first_shown, fitting
from klbench.tui.widgets.scroll_bars import StillBar
from klbench.tui.widgets.table_lines import cropped, header_segments, row_segments

__all__ = ["NO_ROWS", "Column", "Rows", "VirtualTable"]

BACKGROUND_ROWS = 200_000
"""From so many rows on, sorting and filtering happen in a thread: a key must answer within a frame."""

_KEPT_LINES = 2048
MOST_COPIED_ROWS = 200_000


class VirtualTable(StillBar, can_focus=True):
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
    VirtualTable { background: $surface; color: $foreground; scrollbar-size: 0 1; }
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

    @dataclass
    class Rearranged(Message):
        """Other rows are shown, or in another order."""

        table: VirtualTable

    @dataclass
    class Arranged(Message):
        """A thread has put the rows in order."""

        number: int
        order: npt.NDArray[np.int64]
        key: int | None

    @dataclass
    class FilterWanted(Message):
        """The user wants to type a filter for this table."""

        table: VirtualTable

    @dataclass
    class CopyWanted(Message):
        """The user wants the row under the cursor, or all rows that are shown, as text."""

        table: VirtualTable
        whole: bool

    @dataclass
    class CellsWanted(Message):
        """The user wants one cell of a row, and to see all of it."""

        table: VirtualTable
        row: int

    @dataclass
    class Chosen(Message):
        """Enter or a double click on a row."""

        table: VirtualTable
        row: int

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
        self._styles: dict[tuple[str, bool], Style] = {}
        """By tone, and whether the cursor is there."""
        self._shown_columns: tuple[Column, ...] = ()
        self.filter_text = ""
        """The filter in force, as it was typed."""
        self.arranging = False
        """A thread sorts or filters; the order is that of before."""
        self._terms: tuple[Term, ...] = ()
        self._arrangement = 0

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
        try:
            check(rows, self._terms)
        except FilterError:
            # These rows have other columns than those that the filter was made for.
            self.filter_text, self._terms = "", ()
        self._arrange(key)

    def filter(self, text: str) -> None:
        """Show only the rows that pass a filter line, all for an empty one. Raises FilterError, and then
        the filter in force stays."""
        terms = parse(text)
        check(self.rows, terms)
        self.filter_text, self._terms = text.strip(), terms
        row = self.row
        self._arrange(self.rows.key(row) if row is not None else None)

    def describe_filter(self) -> str:
        """`37 of 131,072 · kl>1e-3`, nothing without a filter."""
        if not self.filter_text:
            return ""
        return f"{len(self.order):,} of {self.rows.count:,} · {self.filter_text}"

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

    def move_to(self, place: int, *, announce: bool = True, top: int | None = None) -> None:
        """Put the cursor on a place in the shown order and make it visible, if it can be below `top`."""
        if not len(self.order):
            return
        before, self.cursor = self.cursor, min(max(place, 0), len(self.order) - 1)
        for line in {before, self.cursor}:
            self.refresh_line(line + self._header_lines)
        self._reveal(top)
        if announce:
            self.post_message(self.Highlighted(self, int(self.order[self.cursor])))

    def offers(self, action: str) -> bool:
        """Whether an action of tables has anything to work on here."""
        if action == "sort_next":
            return any(column.values is not None for column in self.rows.columns)
        return self.rows.count > 0

    def describe_sort(self) -> str:
        """`sort kl ▼`, or nothing in the given order."""
        if self.sort_key is None:
            return ""
        title = next(column.title for column in self.rows.columns if column.key == self.sort_key)
        return f"sort {title} {'▼' if self.sort_descends else '▲'}"

    def as_text(self, *, whole: bool) -> str:
        """The row under the cursor, or all rows that are shown, for a copy."""
        at = slice(0, MOST_COPIED_ROWS) if whole else slice(self.cursor, self.cursor + 1)
        return as_text(self.rows, self.order[at])

    # Keys

    def action_up(self) -> None:
        self.move_to(self.cursor - 1)

    def action_down(self) -> None:
        self.move_to(self.cursor + 1)

    def action_page_up(self) -> None:
        self._turn_page(-self._page)

    def action_page_down(self) -> None:
        self._turn_page(self._page)

    def _turn_page(self, rows: int) -> None:
        """The cursor keeps its line, so that the next keys do not scroll."""
        self.move_to(self.cursor + rows, top=int(self.scroll_offset.y) + rows)

    def action_first(self) -> None:
        self.move_to(0)

    def action_last(self) -> None:
        self.move_to(len(self.order) - 1)

    def action_scroll_left(self) -> None:
        self.scroll_to(x=max(self.scroll_offset.x - 8, 0), animate=False)

    def action_scroll_right(self) -> None:
        self.scroll_to(x=self.scroll_offset.x + 8, animate=False)

    def action_choose(self) -> None:
        if (row := self.row) is None:
            # The screen's own meaning of the key, which says why there is nothing to choose.
            raise SkipAction
        self.post_message(self.Chosen(self, row))

    def action_sort_next(self) -> None:
        """Sort by the next sortable column that is on the screen; after the last, the given order."""
        keys = [column.key for column in self._shown_columns if column.values is not None]
        if not keys:
            self.notify("the rows of this table lie in one order only")
            return
        place = keys.index(self.sort_key) + 1 if self.sort_key in keys else 0
        if place == len(keys):
            self.sort(None, descends=False)
            return
        column = next(column for column in self.rows.columns if column.key == keys[place])
        self.sort(column.key, descends=column.descends)

    def action_filter(self) -> None:
        self.post_message(self.FilterWanted(self))

    def action_copy_row(self) -> None:
        self.post_message(self.CopyWanted(self, whole=False))

    def action_copy_cell(self) -> None:
        if self.row is None:
            raise SkipAction
        self.post_message(self.CellsWanted(self, self.row))

    def action_copy_rows(self) -> None:
        self.post_message(self.CopyWanted(self, whole=True))

    def action_sort_reverse(self) -> None:
        if self.sort_key is None:
            self.notify(f"no column is sorted by: {key_of('sort_next')} sorts by the first")
            return
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
        width = self.scrollable_content_region.width  # what the scroll bar leaves
        if not len(self.order):
            return self._empty_line(y, width)
        if y < self._header_lines:
            style = self.rich_style + self.get_component_rich_style("virtual-table--header", partial=True)
            heads = header_segments(self._shown_columns, self.sort_key, self.sort_descends, style)
            return cropped(heads, int(self.scroll_offset.x), width, style)
        place = int(self.scroll_offset.y) + y - self._header_lines
        under_cursor = place == self.cursor
        line = self._lines.get((place, under_cursor))
        if line is None:
            if place >= len(self.order):
                return Strip.blank(width, self.rich_style)
            if len(self._lines) >= _KEPT_LINES:
                self._lines.clear()
            style = self._row_style(place, under_cursor)
            cells = row_segments(self._shown_columns, int(self.order[place]), under_cursor, style)
            line = cropped(cells, int(self.scroll_offset.x), width, style)
            self._lines[place, under_cursor] = line
        return line

    def watch_scroll_x(self, old_value: float, new_value: float) -> None:
        self._lines.clear()
        super().watch_scroll_x(old_value, new_value)

    def notify_style_update(self) -> None:
        self._forget_lines()
        super().notify_style_update()

    @property
    def _page(self) -> int:
        return max(self.scrollable_content_region.height - 2, 1)

    def _row_style(self, place: int, under_cursor: bool) -> Style:
        tone = self.rows.tone(int(self.order[place]))
        style = self._styles.get((tone, under_cursor))
        if style is None:
            style = self.rich_style
            if tone:
                style += self.get_component_rich_style(f"virtual-table--{tone}", partial=True)
            if under_cursor:
                name = "virtual-table--cursor" if self.has_focus else "virtual-table--cursor-blurred"
                style += self.get_component_rich_style(name, partial=True)
            self._styles[tone, under_cursor] = style
        return style

    def _forget_lines(self) -> None:
        """Draw every line anew: they would look otherwise now."""
        self._lines.clear()
        self._styles.clear()

    def _empty_line(self, y: int, width: int) -> Strip:
        style = self.rich_style + self.get_component_rich_style("virtual-table--empty", partial=True)
        lines = self.empty.split("\n")
        if self.rows.count:
            end = f"{key_of('filter')} changes it, esc there takes it away."
            lines = [f"No row passes the filter {self.filter_text}", end]
        top = max((self.size.height - len(lines)) // 2, 0)
        text = lines[y - top] if 0 <= y - top < len(lines) else ""
        return Strip([Segment(fit("  " + visible(text), width), style)], width)

    # Arithmetic

    def _arrange(self, key: int | None) -> None:
        """Put the rows in order, the cursor on `key`, and draw everything; many rows in a thread."""
        column = next((c for c in self.rows.columns if c.key == self.sort_key), None)
        work = (self.rows, self._given_order, column, self.sort_descends, self._terms)
        self._arrangement += 1
        self.arranging = (column is not None or bool(self._terms)) and self.rows.count >= BACKGROUND_ROWS
        if not self.arranging:
            self._apply(arranged(*work), key)
            return
        number = self._arrangement
        if len(self.order) > self.rows.count or (len(self.order) and self.order.max() >= self.rows.count):
            self._apply(arranged(self.rows, self._given_order, None, False, ()), key)

        def arrange() -> None:
            self.post_message(self.Arranged(number, arranged(*work), key))

        self.app.run_worker(arrange, thread=True, group="arrange", exit_on_error=False)
        self.post_message(self.Rearranged(self))

    def on_virtual_table_arranged(self, message: Arranged) -> None:
        message.stop()
        if message.number == self._arrangement:
            self.arranging = False
            # The cursor may have moved meanwhile.
            row = self.row
            self._apply(message.order, self.rows.key(row) if row is not None else message.key)

    def _apply(self, order: npt.NDArray[np.int64], key: int | None) -> None:
        line = self.cursor - int(self.scroll_offset.y)
        had_rows = len(self.order) > 0
        self.order = order
        place = self._place_of(key) if key is not None else None
        self.cursor = place if place is not None else min(self.cursor, max(len(self.order) - 1, 0))
        self._measure()
        # What is under the cursor stays on its line, too.
        self._reveal(top=self.cursor - line if had_rows and place is not None else None)
        if len(self.order):
            self.post_message(self.Highlighted(self, int(self.order[self.cursor])))
        self.post_message(self.Rearranged(self))

    def _place_of(self, key: int) -> int | None:
        row = np.flatnonzero(self.rows.keys == key) if self.rows.keys is not None else np.asarray([key])
        if not len(row):
            return None
        found = np.flatnonzero(self.order == row[0])
        return int(found[0]) if len(found) else None

    def _measure(self) -> None:
        """Choose the columns that fit and tell the scroll bars how much there is."""
        scrolls = len(self.order) + self._header_lines > self.size.height
        # A blank at the right: no number touches the border or the scroll bar.
        self._shown_columns, width = fitting(self.rows.columns, self.size.width - (2 if scrolls else 1))
        self._forget_lines()
        count = len(self.order)
        self.virtual_size = Size(width, count + self._header_lines) if count else Size(0, 0)
        self.refresh()

    def _reveal(self, top: int | None = None) -> None:
        """Scroll as little as possible from here (or from `top`) so that the cursor is on the screen."""
        height = self.scrollable_content_region.height - self._header_lines
        if height < 1 or not len(self.order):
            return
        here = int(self.scroll_offset.y)
        wanted = first_shown(self.cursor, here, top, height, len(self.order))
        if wanted != here:
            self.scroll_to(y=wanted, animate=False)

    def _refresh_cursor(self) -> None:
        self._forget_lines()
        self.refresh_line(self.cursor + self._header_lines)
