"""What lies over a screen until it is answered or closed: a question, help, the cells of a row.

Opaque: a translucent layer doubles what goes over the line. What is said meanwhile stands below it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from textual.app import ComposeResult
from textual.screen import ModalScreen
from textual.widget import Widget

from klbench.tui.screens.one_picture import OnePicture
from klbench.tui.widgets.message_line import MessageLine

Result = TypeVar("Result")


class Overlay(OnePicture[Result], ModalScreen[Result]):
    """Subclasses compose their box in `content`."""

    DEFAULT_CSS = """
    Overlay { align: center middle; background: $background; }
    Overlay > Vertical { border: round $border; background: $surface; padding: 0 1; max-width: 96%; }
    Overlay > MessageLine { dock: bottom; }
    """

    def compose(self) -> ComposeResult:
        yield from self.content()
        yield MessageLine(id="message")

    def content(self) -> Iterable[Widget]:
        raise NotImplementedError

    def say(self, text: str, severity: str = "information") -> None:
        """Show what came of the user's last key, until the next one; "" shows nothing."""
        if self.is_attached and (line := next(iter(self.query(MessageLine)), None)) is not None:
            line.say(text, severity)
