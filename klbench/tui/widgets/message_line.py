"""What came of the user's last key, in lines of their own above the footer: they cover no evidence.

    ✗ the runner is busy: locate the origin
      why: one job at a time, for two would change each other's batches · next: wait for it or cancel it

A message stays until the next key: nothing vanishes while it is read, and nothing moves by itself.
"""

from __future__ import annotations

from klbench.core.text import visible, wrap
from klbench.tui.widgets.text import Lines

MOST_LINES = 8
_MARKS = {"information": "·", "warning": "!", "error": "✗"}


class MessageLine(Lines):
    """Empty and without height while there is nothing to say."""

    DEFAULT_CSS = """
    MessageLine { display: none; height: auto; background: $panel; color: $foreground; text-style: bold; }
    MessageLine.said { display: block; }
    MessageLine.error { color: $error; }
    MessageLine.warning { color: $warning; }
    """

    def say(self, text: str, severity: str = "information") -> None:
        """Show `text` (lines become sentences), "" to show nothing."""
        for name in ("error", "warning"):
            self.set_class(severity == name, name)
        self.set_class(bool(text), "said")
        self.show("\n".join(message_lines(text, severity, self.app.size.width)))


def message_lines(text: str, severity: str, width: int) -> list[str]:
    """The message in lines of at most `width` cells, the first with a mark; an excess is cut with a mark."""
    if not text:
        return []
    mark = f" {_MARKS.get(severity, '·')} "
    lines: list[str] = []
    for part in text.split("\n"):
        lines += wrap((mark if not lines else "   ") + visible(part), max(width - 1, 20), indent="   ")
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "   …"]
    return lines
