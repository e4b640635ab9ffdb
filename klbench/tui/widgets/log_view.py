"""Lines of a log, drawn by the Line API: only what is on the screen costs anything.

The view follows the end until the user moves up; then it stays where it is, whatever arrives. Lines come
cleaned (server_log.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from klbench.core.text import cell_width, fit
from klbench.tui.actions import bindings
from klbench.tui.messages import Copy
from klbench.tui.server_log import speaks_of_trouble
from klbench.tui.widgets.table_lines import CUT


class LogView(ScrollView, can_focus=True):
    """The view. `show` takes the whole bounded list: it grows at its end, shrinks at its head."""

    BINDINGS = bindings("lines")
    COMPONENT_CLASSES: ClassVar[set[str]] = {"log-view--trouble", "log-view--here", "log-view--empty"}
    DEFAULT_CSS = """
    LogView { background: $surface; color: $foreground; scrollbar-size: 0 1; }
    LogView > .log-view--trouble { color: $error; text-style: bold; }
    LogView > .log-view--here { text-style: reverse; }
    LogView > .log-view--empty { color: $text-muted; }
    """

    class Moved(Message):
        """The view shows other lines, or follows the end or no longer does."""

    def __init__(self, *, empty: str = "", id: str | None = None) -> None:
        super().__init__(id=id)
        self.empty = empty
        self.following = True
        self.here: int | None = None
        """The line that `next_error` found."""
        self.pattern: re.Pattern[str] | None = None
        """What is searched for."""
        self._lines: Sequence[str] = ()
        self._revision = -1
        self._dropped = 0
        self._widest = 0
        self._measured = 0

    def show(self, lines: Sequence[str], revision: int, dropped: int) -> None:
        """Draw the lines of this revision; `dropped` counts those let go at the beginning so far."""
        if revision == self._revision:
            return
        gone = dropped - self._dropped
        self._lines, self._revision, self._dropped = lines, revision, dropped
        new = lines[max(self._measured - gone, 0) :]
        self._widest = max(self._widest, max(map(cell_width, new), default=0))
        self._measured = len(lines)
        if self.here is not None:
            self.here = self.here - gone if self.here >= gone else None
        self.virtual_size = Size(self._widest + 2, len(lines))
        if self.following:
            self._to_end()
            self.call_after_refresh(self._follow_on)
        elif gone:
            self.scroll_to(y=max(int(self.scroll_offset.y) - gone, 0), animate=False)
        self.refresh()

    @property
    def count(self) -> int:
        return len(self._lines)

    @property
    def last_shown(self) -> int:
        """Number of the last line on the screen, from 1."""
        return min(int(self.scroll_offset.y) + self.scrollable_content_region.height, self.count)

    def place(self, key: str) -> str:
        """`line 18 of 47 · 29 below, f follows`, for the pane's lower border; `key` goes to the end."""
        if not self.count:
            return ""
        below = self.count - self.last_shown
        more = f" · {below:,} below, {key} follows" if below and not self.following else ""
        return f"line {self.last_shown} of {self.count}{more}"

    def follow(self, following: bool) -> None:
        """Follow the end, or stay."""
        self.following = following
        if following:
            self.here = None
            self._to_end()
        self.refresh()
        self.post_message(self.Moved())

    def next_error(self) -> bool:
        """Go to the next line that speaks of trouble, from the top again after the last; False for none."""
        start = 0 if self.here is None else self.here + 1
        order = [*range(start, self.count), *range(start)]
        found = next((index for index in order if speaks_of_trouble(self._lines[index])), None)
        if found is None:
            return False
        self.following, self.here = False, found
        self._move_to(found - 2)
        return True

    def search(self, pattern: re.Pattern[str] | None) -> int:
        """Look for `pattern` from now on, for nothing with None; returns how many lines hold it."""
        self.pattern = pattern
        self.refresh()
        return sum(pattern.search(line) is not None for line in self._lines) if pattern is not None else 0

    def next_match(self, step: int) -> bool:
        """Go to the next (1) or previous (-1) line that holds the pattern, around the ends too; False where
        none does."""
        pattern = self.pattern
        if pattern is None or not self.count:
            return False
        start = self.here if self.here is not None else (-1 if step > 0 else self.count)
        order = [(start + step * away) % self.count for away in range(1, self.count + 1)]
        found = next((index for index in order if pattern.search(self._lines[index])), None)
        if found is None:
            return False
        self.following, self.here = False, found
        self._move_to(found - 2)
        return True

    def action_copy_screen(self) -> None:
        top = int(self.scroll_offset.y)
        self.post_message(Copy("\n".join(self._lines[top : self.last_shown])))

    def action_copy_log(self) -> None:
        self.post_message(Copy("\n".join(self._lines)))

    def action_up(self) -> None:
        self._leave_end(-1)

    def action_down(self) -> None:
        self._leave_end(1)

    def action_page_up(self) -> None:
        self._leave_end(-max(self.scrollable_content_region.height - 1, 1))

    def action_page_down(self) -> None:
        self._leave_end(max(self.scrollable_content_region.height - 1, 1))

    def action_first(self) -> None:
        self.following = False
        self._move_to(0)

    def action_last(self) -> None:
        self.follow(True)

    def action_scroll_left(self) -> None:
        self.scroll_to(x=max(int(self.scroll_offset.x) - 16, 0), animate=False)

    def action_scroll_right(self) -> None:
        self.scroll_to(x=int(self.scroll_offset.x) + 16, animate=False)

    def on_mouse_scroll_up(self) -> None:
        self.following = False
        self.post_message(self.Moved())

    def on_resize(self) -> None:
        if self.following:
            self.call_after_refresh(self._follow_on)

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style  # what the scroll bar leaves
        index = int(self.scroll_offset.y) + y
        if index >= self.count:
            text = f"  {self.empty}" if not self.count and y == 0 else ""
            style = base + self.get_component_rich_style("log-view--empty", partial=True)
            return Strip([Segment(fit(text, width), style)], width)
        line, style = self._lines[index], base
        if speaks_of_trouble(line):
            style += self.get_component_rich_style("log-view--trouble", partial=True)
        if index == self.here:
            style += self.get_component_rich_style("log-view--here", partial=True)
        start = int(self.scroll_offset.x)
        mark = "!" if speaks_of_trouble(line) else " "
        if self.pattern is not None and self.pattern.search(line):
            mark = "»"
        strip = Strip([Segment(f"{mark}{line}", style)])
        if strip.cell_length - start <= width:
            return strip.crop(start, start + width).adjust_cell_length(width, base)
        here = strip.crop(start, start + width - 1).adjust_cell_length(width - 1, base)
        return Strip.join([here, Strip([Segment(CUT, base)], 1)])

    def _leave_end(self, step: int) -> None:
        target = int(self.scroll_offset.y) + step
        self.following = step > 0 and target >= self.max_scroll_y
        self._move_to(target)

    def _move_to(self, line: int) -> None:
        self.scroll_to(y=min(max(line, 0), self.max_scroll_y), animate=False)
        self.refresh()
        self.post_message(self.Moved())

    def _follow_on(self) -> None:
        """How far down the end is is known once the layout is."""
        if self.following:
            self._to_end()

    def _to_end(self) -> None:
        self.scroll_to(y=max(self.count - self.scrollable_content_region.height, 0), animate=False)
        self.post_message(self.Moved())
