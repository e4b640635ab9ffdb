"""A text that may be longer than its place: it says how much of it is seen, and which key goes on.

╭─ explanation 1 ───────────────────────────────╮
│ the prefix that the cache restored is not ... │
╰──────────────────── line 2 of 9 · > reads on ─╯

Where it stands in no pane of its own it draws that border itself, and only while there is something to say.
"""

from __future__ import annotations

from textual import events
from textual.containers import VerticalScroll

from klbench.tui.actions import key_of
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle


class Reading(VerticalScroll):
    """One text. Keys scroll it from its screen (`read`), the focus need not be here."""

    DEFAULT_CSS = """
    Reading { height: 1fr; scrollbar-size-vertical: 1; }
    Reading.cut { border-bottom: round $border-blurred; border-subtitle-color: $text-muted; }
    """

    def __init__(self, text: Lines, *, id: str) -> None:
        super().__init__(text, id=id)
        self._text = text

    def on_mount(self) -> None:
        # Its text grows and shrinks without a message to what it stands in.
        self.watch(self, "virtual_size", self._tell_soon, init=False)

    def on_resize(self, _event: events.Resize) -> None:
        self._tell_soon()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._tell()

    def read(self, step: int) -> bool:
        """Go on (1) or back (-1) by a window; False where there is nothing more."""
        here, most = int(self.scroll_offset.y), self.max_scroll_y
        if not self.display or (here >= most if step > 0 else here <= 0):
            return False
        self.scroll_to(y=here + step * max(self.scrollable_content_region.height - 1, 1), animate=False)
        return True

    def _tell_soon(self) -> None:
        self.call_after_refresh(self._tell)

    def _tell(self) -> None:
        """Say in the border below what is not seen."""
        here, most = int(self.scroll_offset.y), self.max_scroll_y
        words = ""
        if most > 0:
            last = min(here + self.scrollable_content_region.height, self.virtual_size.height)
            way = f"{key_of('read_on')} reads on" if here < most else f"{key_of('read_back')} reads back"
            words = f"line {last} of {self.virtual_size.height} · {way}"
        if isinstance(self.parent, Pane):
            entitle(self.parent, subtitle=words)
            return
        self.set_class(bool(words), "cut")
        self.border_subtitle = f" {words} " if words else ""


def reading(text_id: str, *, id: str, sentences: bool = False) -> Reading:
    """A place `id` with its text `text_id`."""
    return Reading((Sentences if sentences else Lines)(id=text_id), id=id)
