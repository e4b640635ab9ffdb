"""Scroll bars in whole cells: the eighths of a cell that Textual ends them with read as stray characters.

A bar whose thumb stays where it is, is not drawn again: beside a million rows that is nearly every key.
"""

from __future__ import annotations

from typing import ClassVar

from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar, ScrollBarRender


class WholeCells(ScrollBarRender):
    """A thumb that begins and ends with a cell; reversed, so that it shows without colours too."""

    VERTICAL_BARS: ClassVar[list[str]] = [" "]
    HORIZONTAL_BARS: ClassVar[list[str]] = [" "]


def use_whole_cells() -> None:
    """Draw every scroll bar of this process so."""
    ScrollBar.renderer = WholeCells


class StillBar(ScrollView):
    """A view of lines whose bar is drawn again only where its thumb goes to another cell."""

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        if self.show_vertical_scrollbar:
            bar = self.vertical_scrollbar
            position = bar.validate_position(new_value)
            if _thumb_cell(bar, position) == _thumb_cell(bar, bar.position):
                # It is at this position before Textual says so, which then changes nothing.
                bar.set_reactive(ScrollBar.position, position)
        super().watch_scroll_y(old_value, new_value)


def _thumb_cell(bar: ScrollBar, position: float) -> int:
    """Where the thumb begins; the arithmetic of `ScrollBarRender.render_bar`."""
    size, window, whole = bar.size.height, bar.window_size, bar.window_virtual_size
    if whole <= window:
        return 0
    thumb = max(1, window * size / whole)
    return int((size - thumb) * position / (whole - window))
