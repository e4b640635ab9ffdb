"""Text on the screen that is never markup, and panes whose titles are not either.

Every string from a server, a model or a file reaches Textual as `Content` made here: a token such as
`[/INST]` would otherwise be parsed, and an escape sequence would reach the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import Vertical
from textual.content import Content
from textual.css.scalar import Unit
from textual.geometry import Region
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from klbench.core.text import cell_width, fit_words, shortened, visible, wrap


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
        self.show("\n".join(sentence_lines(statements, width, mark=mark, most=self._most_lines)))

    @property
    def _most_lines(self) -> int | None:
        """How many lines the stylesheet leaves it in this window."""
        limit = self.styles.max_height
        return int(limit.value) if limit is not None and limit.unit is Unit.CELLS else None


def sentence_lines(
    statements: Sequence[str], width: int, *, mark: str = " ▸ ", most: int | None = None
) -> list[str]:
    """The statements that are not empty in lines of `width` cells, the first with the mark; at most `most`.

    Where there are more the longest are cut behind a word, the last one after all others: it is what to do
    next, and its end behind the last dot, the key, stays.
    """
    blank = " " * len(mark)
    parts = [
        wrap((blank if number else mark) + visible(text), width, indent=blank)
        for number, text in enumerate(filter(None, statements))
    ]
    while most is not None and sum(map(len, parts)) > most:
        longest = max(parts[:-1], key=len, default=[])
        if len(longest) > 1:
            last = longest.pop()
            longest[-1] = fit_words(f"{longest[-1]} {last.strip()}", width).rstrip()
        elif len(parts) > most:
            parts = [*parts[: most - 1], parts[-1]]
        else:
            parts[-1] = _cut_before_the_key(parts[-1], most - len(parts) + 1, width)
    return [line for part in parts for line in part]


def _cut_before_the_key(lines: list[str], most: int, width: int) -> list[str]:
    rest = " ".join([lines[most - 1], *(line.strip() for line in lines[most:])])
    head, dot, key = rest.rpartition(" · ")
    end = dot + key if dot and cell_width(key) <= width // 2 else ""
    kept = head if end else rest
    return [*lines[: most - 1], fit_words(kept, width - cell_width(end)).rstrip() + end]


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

    titles: tuple[str, str] = ("", "")
    """Title and subtitle in full; a narrow border shows as many of their parts as it has room for."""

    def __init__(self, *children: Widget, title: str, id: str, classes: str | None = None) -> None:
        super().__init__(*children, id=id, classes=classes)
        entitle(self, title)

    def on_resize(self) -> None:
        entitle(self)


def entitle(pane: Pane, title: str | None = None, subtitle: str | None = None) -> None:
    """Set a pane's title and subtitle from untrusted text; draws only what changes."""
    room = pane.size.width - 4 if pane.size.width else 1 << 16  # a blank and a piece of border at each end
    pane.titles = (
        pane.titles[0] if title is None else visible(title),
        pane.titles[1] if subtitle is None else visible(subtitle),
    )
    titles = pane.titles
    if pane.styles.border_bottom[0] in ("", "none"):
        titles = " · ".join(filter(None, titles)), ""  # what has no lower border says all in the upper one
    above, below = (shortened(text, room) for text in titles)
    if _plain(pane._border_title) != above:
        pane._border_title = Content(above) if above else None
        _redraw_border(pane, -1)
    if _plain(pane._border_subtitle) != below:
        pane._border_subtitle = Content(below) if below else None
        _redraw_border(pane, pane.size.height)


def _redraw_border(widget: Widget, y: int) -> None:
    """Draw one line of the border again. Textual's own setter has the whole widget drawn, with all that is in
    it: twenty kilobytes for a cursor that moves."""
    if widget.size.height:
        widget.refresh(Region(-1, y, widget.size.width + 2, 1))
    else:
        widget.refresh()


def _plain(content: Content | None) -> str:
    return content.plain if content is not None else ""
