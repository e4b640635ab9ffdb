"""A field for a line of text, where ctrl+c means what it means on every screen."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input


class Field(Input):
    """Textual's input; ctrl+c copies what is selected, and otherwise asks to leave as everywhere."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c,super+c", "copy_or_leave", show=False)]

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self.cursor_blink = False  # nothing moves by itself: it would cross a slow line for ever

    async def action_copy_or_leave(self) -> None:
        if self.selection.is_empty:
            await self.run_action("app.help_quit")
        else:
            self.action_copy()
