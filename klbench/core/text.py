"""Text from servers, models and files made safe to show, and numbers in a width that does not jitter.

Everything that was not written by klbench goes through `visible` before it reaches a terminal, a report or a
table. What comes out holds no control character, nothing that reorders or hides text, and only characters
whose width is certain; what was hidden is shown:

    >>> visible("a\\x1b[31m\\u200b\\n")
    'a␛[31m\\\\u200b⏎'
    >>> visible_token(" of")
    "' of'"

Invariants: `visible` is idempotent; `fit(text, n)` takes exactly n cells; no line of `wrap(text, n)` more.
"""

from __future__ import annotations

import functools
import math
import unicodedata

_NAMED = {"\n": "⏎", "\t": "⇥", "\x7f": "␡"}
# Blank although they are letters or symbols, or joined by terminals with their neighbours: width uncertain.
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
_MAX_MARKS = 4
"""Combining marks on one character that are still shown as such; real scripts need three."""

LOGPROB_WIDTH = 11
DELTA_WIDTH = 10
KL_WIDTH = 7


def visible(text: str) -> str:
    """`text` with every control, bidirectional, zero-width, blank or unassigned character spelled out.

    Controls become their picture (␛), newline ⏎ and tab ⇥; others become an escape such as \\u200b. Combining
    marks stay on the character they belong to; a mark without one gets a dotted circle.
    """
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = -1  # marks on the last character; -1 where a mark has nothing to stand on
    for character in text:
        if character == " " or ("\x21" <= character < "\x7f"):
            shown.append(character)
            marks = 0 if character != " " else -1
        elif unicodedata.category(character) in ("Mn", "Me") and not _is_selector(character):
            if marks < 0:
                shown.append("\u25cc")
                marks = 0
            marks += 1
            shown.append(character if marks <= _MAX_MARKS else _escape(character))
        elif _is_plain(character):
            shown.append(character)
            marks = 0
        else:
            shown.append(_NAMED.get(character) or _picture(character) or _escape(character))
            marks = 0
    return "".join(shown)


def visible_token(text: str) -> str:
    """A token in quotes, so that its spaces show: `' of'`."""
    return f"'{visible(text)}'"


def cell_width(text: str) -> int:
    """Terminal cells that `text` (already visible) takes."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


def fit(text: str, width: int, *, right: bool = False) -> str:
    """`text` in exactly `width` cells: padded (on the left when `right`), or cut with … at its end."""
    taken = cell_width(text)
    if taken > width:
        text, taken = _cut(text, width)
    padding = " " * (width - taken)
    return padding + text if right else text + padding


def fit_words(text: str, width: int) -> str:
    """As `fit`, but cut behind a whole word; a first word that is longer than a third of the width is cut.

    >>> fit_words("cold requests are bit-equal", 16)
    'cold requests … '
    """
    if cell_width(text) <= width:
        return fit(text, width)
    kept, _ = _cut(text, width - 1)  # a blank stands before the …
    kept = kept.removesuffix("…")
    if not text[len(kept) :].startswith(" "):
        space = kept.rfind(" ")
        if space <= width // 3:
            return fit(text, width)
        kept = kept[:space]
    return fit(kept.rstrip(" ,;:·") + " …", width)


def wrap(text: str, width: int, *, indent: str = "") -> list[str]:
    """`text` (already visible) in lines of at most `width` cells, broken at spaces where there are some.

    Every line after the first begins with `indent`.
    """
    lines: list[str] = []
    rest, room = text, max(width, 8)
    while cell_width(rest) > room:
        head = _head(rest, room)
        space = head.rfind(" ", len(indent) + 1 if lines else 1)
        # Not within the leading blanks or the indent, which would never end.
        if space > len(head) // 3 and rest[len(head) : len(head) + 1] != " ":
            head = head[:space]
        elif (slash := head.rfind("/")) > len(head) // 3 and rest[len(head) : len(head) + 1] != " ":
            head = head[: slash + 1]  # a path that is longer than a line
        lines.append(head.rstrip())
        rest = indent + rest[len(head) :].lstrip(" ")
    lines.append(rest)
    return lines


def shortened(text: str, width: int, *, more: str = "") -> str:
    """As many of the parts between middle dots as fit into `width` cells, `more` where some are left out; the
    first part is cut where it must be.

    >>> shortened("0 of 128 differ · divergent first", 20)
    '0 of 128 differ'
    >>> shortened("klbench · request 6 · match", 24, more=" · …")
    'klbench · request 6 · …'
    """
    if cell_width(text) <= width:
        return text
    parts = text.split(" · ")
    while len(parts) > 1:
        parts.pop()
        if cell_width(kept := " · ".join(parts) + more) <= width:
            return kept
    return fit(parts[0], width).rstrip()


def logprob(nats: float) -> str:
    """A logprob with 7 decimals, in at most LOGPROB_WIDTH cells: `-3.4072628`."""
    if math.isnan(nats):
        return "NaN"
    if math.isinf(nats):
        return "+inf" if nats > 0 else "-inf"
    shown = f"{nats:.7f}"
    return shown if len(shown) <= LOGPROB_WIDTH else f"{nats:.3e}"


def delta(nats: float) -> str:
    """A signed difference in at most DELTA_WIDTH cells; only an exact zero reads `0`."""
    if math.isnan(nats):
        return "NaN"
    if math.isinf(nats):
        return "+inf" if nats > 0 else "-inf"
    if nats == 0:
        return "0"
    shown = f"{nats:+.7f}"
    return shown if abs(nats) >= 1e-4 and len(shown) <= DELTA_WIDTH else f"{nats:+.3e}"


def kl(nats: float | None) -> str:
    """A divergence as `5.4e-05`; only an exact zero reads `0`, what was not compared reads `–`."""
    if nats is None:
        return "–"
    if math.isnan(nats):
        return "NaN"
    if math.isinf(nats):
        return "inf"
    return "0" if nats == 0 else f"{nats:.1e}"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 request`, `2 requests`; `many` where the plural takes more than an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def cache_hits(helper: str, hits: int, requests: int) -> str:
    """How many requests began on a cached prefix: "hits 32/32"; in match none is meant to: "cold 32/32"."""
    return f"cold {requests}/{requests}" if helper == "match" and not hits else f"hits {hits}/{requests}"


def magnitude(nats: float) -> str:
    """The size of a difference, two digits: `1.3`, `0.0095`, `3.1e-06`."""
    if math.isnan(nats):
        return "NaN"
    return "inf" if math.isinf(nats) else f"{nats:.2g}"


def elapsed(elapsed_s: float) -> str:
    """Minutes and seconds, `0:17`, or `1:02:03` from an hour on."""
    seconds = int(max(elapsed_s, 0))
    hours, rest = divmod(seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def size(size_bytes: float) -> str:
    """Decimal units, `2.9 MB`."""
    amount, units = float(size_bytes), ("B", "kB", "MB", "GB", "TB")
    for unit in units:
        if amount < 1000 or unit == units[-1]:
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def _cut(text: str, width: int) -> tuple[str, int]:
    kept: list[str] = []
    taken = 0
    for character in text:
        step = _width(character)
        if taken + step > width - 1:
            break
        kept.append(character)
        taken += step
    return ("".join(kept) + "…", taken + 1) if width > 0 else ("", 0)


def _head(text: str, width: int) -> str:
    """As much of the beginning as fits into `width` cells, at least one character."""
    taken = 0
    for index, character in enumerate(text):
        taken += _width(character)
        if taken > width and index:
            return text[:index]
    return text


@functools.lru_cache(maxsize=4096)
def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _is_plain(character: str) -> bool:
    """Printable, with a width that every terminal agrees on."""
    if character in _BLANK or unicodedata.category(character) in _HIDDEN or _is_selector(character):
        return False
    point = ord(character)
    joins = 0x1160 <= point <= 0x11FF or 0xD7B0 <= point <= 0xD7FF  # Hangul vowels and finals
    pairs = 0x1F1E6 <= point <= 0x1F1FF or 0x1F3FB <= point <= 0x1F3FF  # flags, skin tones
    unsettled = 0x2630 <= point <= 0x2637 or 0x268A <= point <= 0x268F or 0x4DC0 <= point <= 0x4DFF
    moved = 0x1D300 <= point <= 0x1D37F or 0x16FE0 <= point <= 0x18CFF  # widths changed between Unicodes
    return not (joins or pairs or unsettled or moved)


_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp", "Mc"))


def _is_selector(character: str) -> bool:
    point = ord(character)
    return 0xFE00 <= point <= 0xFE0F or 0xE0100 <= point <= 0xE01EF or 0x180B <= point <= 0x180F


def _picture(character: str) -> str | None:
    point = ord(character)
    return chr(0x2400 + point) if point < 0x20 else None


def _escape(character: str) -> str:
    point = ord(character)
    if point <= 0xFF:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"
