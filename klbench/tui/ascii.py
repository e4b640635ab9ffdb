"""Drawing with ASCII characters only: for terminals and fonts that have no others, and for logs of screens.

Every glyph of the workbench has an ASCII one of the same width; what comes from outside is spelled out where
it is loaded (`spelled_out`), and a `?` a cell stands for what is left.
"""

from __future__ import annotations

import locale
from functools import lru_cache

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from klbench.core.text import cell_width

_GLYPHS = str.maketrans(
    {
        "╭": "+", "╮": "+", "╰": "+", "╯": "+", "─": "-", "│": "|", "├": "+", "┤": "+", "┬": "+", "┴": "+",
        "┼": "+", "━": "=", "▌": ">", "▸": ">", "●": "*", "○": "o", "◌": "~", "✗": "x", "✓": "v", "·": ".",
        "–": "-", "—": "-", "…": "~", "›": ">", "‹": "<", "»": ">", "→": ">", "←": "<", "↑": "^", "↓": "v",
        "▲": "^", "▼": "v", "Δ": "d", "≠": "#", "≡": "=", "×": "x", "≤": "<", "≥": ">", "±": "~",
        "▁": "_", "▂": ".", "▃": ":", "▄": "-", "▅": "=", "▆": "+", "▇": "*", "█": "#",
        "░": ".", "▒": "%", "▓": "#", "◉": "@", "▏": "|", "▎": "|", "▍": "|", "▋": "#", "▊": "#", "▉": "#",
        "▐": "|", "▔": "-", "▕": "|", "◀": "<", "▶": ">", "⏎": "$", "⇥": ">", "␡": "^",
        "🔎": "/ ",
    }
)  # fmt: skip


@lru_cache(4096)
def plain(text: str) -> str:
    """`text` in ASCII, cell for cell."""
    if text.isascii():
        return text
    shown = text.translate(_GLYPHS)
    if shown.isascii():
        return shown
    return "".join(c if c.isascii() else ("^" if "␀" <= c <= "␟" else "?" * cell_width(c)) for c in shown)


def spelled_out(text: str) -> str:
    r"""A text from outside in ASCII that says which characters it holds: `\u7684`, `\x1b[31m`, `\n`."""
    return text.encode("unicode_escape", "backslashreplace").decode("ascii")


class AsciiFilter(LineFilter):
    """Draws every line in ASCII."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002
        return [Segment(plain(text), style, control) for text, style, control in segments]


def wanted(setting: object) -> bool:
    """Whether to draw in ASCII: on, off, or auto: where this terminal's locale is not UTF-8."""
    if setting == "auto":
        return locale.getpreferredencoding(False).lower().replace("-", "") not in ("utf8", "utf_8")
    return setting == "on"
