"""The line in which a filter (or a search) is typed; it shows while it has the focus.

/ kl>1e-3 pos:97 tok:"the"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input

from klbench.tui.widgets.field import Field
from klbench.tui.widgets.text import Lines


class FilterBar(Horizontal):
    """Posts what is typed as it is typed, then whether it is kept (enter) or taken back (esc)."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "give_up", show=False, priority=True)]
    DEFAULT_CSS = """
    FilterBar { display: none; height: 1; background: $panel; }
    FilterBar.open { display: block; }
    FilterBar Lines { width: 3; color: $accent; text-style: bold; background: $panel; }
    FilterBar Input { border: none; height: 1; padding: 0; width: 1fr; background: $panel; }
    FilterBar Input:focus { border: none; }
    """

    @dataclass
    class Typed(Message):
        text: str

    class Kept(Message):
        """Enter: the filter stays."""

    class GivenUp(Message):
        """Esc: the filter goes."""

    def compose(self) -> ComposeResult:
        yield Lines(" / ")
        yield Field(select_on_focus=False)

    def open(self, text: str, hint: str) -> None:
        """Show the line with `text` in it."""
        field = self.query_one(Input)
        field.placeholder = hint
        with self.prevent(Input.Changed):
            field.value = text
        field.cursor_position = len(text)
        self.add_class("open")
        field.focus()

    def close(self) -> None:
        self.remove_class("open")

    @property
    def is_open(self) -> bool:
        return self.has_class("open")

    def on_input_changed(self, message: Input.Changed) -> None:
        message.stop()
        if self.is_open:
            self.post_message(self.Typed(message.value))

    def on_input_submitted(self, message: Input.Submitted) -> None:
        message.stop()
        self.post_message(self.Kept())

    def action_give_up(self) -> None:
        self.post_message(self.GivenUp())
