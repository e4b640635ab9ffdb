"""Text on the screen that is never markup, and panes whose titles are not either.

Every string from a server, a model or a file reaches Textual as `Content` made here: a token such as
`[/INST]` would otherwise be parsed, and an escape sequence would reach the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from klbench.core.text import visible, wrap


def safe(text: str) -> Content:
    """`text` as content: line breaks stay, everything else that is not plain is made visible."""
    return Content("\n".join(visible(line) for line in text.split("\n")))


class Lines(Static):
    """Some lines of text. Showing the same text again draws nothing."""

    DEFAULT_CSS = "Lines { width: 1fr; height: auto; }"

    def __init__(self, text: str = "", *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(safe(text), id=id, classes=classes, markup=False)
        self.text = text

    def show(self, text: str, *, layout: bool = True) -> None:
        if text != self.text:
            self.text = text
            self.update(safe(text), layout=layout)


class Sentences(Lines):
    """Statements under a ▸, wrapped to the window with a hanging indent."""

    def say(self, statements: Sequence[str], *, mark: str = " ▸ ") -> None:
        """Show the statements that are not empty, the first with the mark."""
        # A blank before the edge, and inside a scrolling part its bar.
        width = max(self.app.size.width - (1 if isinstance(self.parent, Screen) else 2), 20)
        blank = " " * len(mark)
        lines: list[str] = []
        for statement in filter(None, statements):
            lines += wrap((blank if lines else mark) + visible(statement), width, indent=blank)
        self.show("\n".join(lines))


class Paragraphs(Lines):
    """Paragraphs inside a pane, wrapped to it."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._paragraphs: tuple[str, ...] = ()

    def show_all(self, *paragraphs: str) -> None:
        """Show the paragraphs, each after an empty line."""
        self._paragraphs = paragraphs
        width = max((self.size.width or self.app.size.width - 2) - 1, 20)
        lines: list[str] = []
        for paragraph in paragraphs:
            lines += ["", *wrap(" " + visible(paragraph), width, indent=" ")]
        self.show("\n".join(lines))

    def on_resize(self) -> None:
        self.show_all(*self._paragraphs)


class Pane(Vertical):
    """A bordered part of a screen; its digit stands in its title."""

    DEFAULT_CSS = """
    Pane {
        border: round $border-blurred; border-title-color: $foreground; border-subtitle-color: $text-muted;
        background: $surface; padding: 0;
    }
    Pane:focus-within {
        border: round $border; border-title-color: $border; border-subtitle-color: $border;
        border-title-style: bold;
    }
    Pane.zoomed { height: 1fr; width: 1fr; }
    """

    def __init__(self, *children: Widget, title: str, id: str, classes: str | None = None) -> None:
        super().__init__(*children, id=id, classes=classes)
        entitle(self, title)


def entitle(widget: Widget, title: str | None = None, subtitle: str | None = None) -> None:
    """Set a border title and subtitle from untrusted text, only where they change."""
    if title is not None and _plain(widget._border_title) != (line := visible(title)):
        widget.border_title = Content(line) if line else None
    if subtitle is not None and _plain(widget._border_subtitle) != (line := visible(subtitle)):
        widget.border_subtitle = Content(line) if line else None


def _plain(content: Content | None) -> str:
    return content.plain if content is not None else ""
