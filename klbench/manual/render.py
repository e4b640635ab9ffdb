"""Markdown as lines for a terminal: headings, paragraphs, lists, code and tables, wrapped to a width.

    The filter line                        a heading
      / filters any table as you type      everything else is indented

Only what the manual uses is understood. Inline marks (`code`, *stress*) stay: they read well as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from klbench.core.text import cell_width, fit, wrap

_INDENT = "  "


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    heading: bool = False


def render(markdown: str, width: int) -> list[Line]:
    """The text in lines of at most `width` cells."""
    lines: list[Line] = []
    for block in _blocks(markdown):
        if lines:
            lines.append(Line(""))
        first = block[0]
        if first.startswith("#"):
            lines += [Line(text, heading=True) for text in wrap(first.lstrip("#").strip(), width)]
        elif first.startswith("|"):
            lines += [Line(_INDENT + text) for text in _table(block, width - len(_INDENT))]
        elif first.startswith("- "):
            for item in block:
                lines += [Line(_INDENT + text) for text in wrap(item, width - len(_INDENT), indent="  ")]
        elif first.startswith("```"):
            lines += [Line(_INDENT * 2 + text) for text in block[1:-1]]
        else:
            lines += [Line(_INDENT + text) for text in wrap(" ".join(block), width - len(_INDENT))]
    return lines


def _blocks(markdown: str) -> Iterator[list[str]]:
    """Paragraphs, headings, lists, tables and code, each as its lines."""
    block: list[str] = []
    code = False
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("```"):
            code = not code
        if line.strip() or code:
            block.append(line.rstrip())
        elif block:
            yield block
            block = []


def _cells(line: str) -> list[str]:
    marked = line.strip().strip("|").replace("\\|", "\0")
    return [cell.strip().replace("\0", "|") for cell in marked.split("|")]


def _table(block: list[str], width: int) -> list[str]:
    """A table whose last column is wrapped; where that leaves too little, each row as a block."""
    head, _, *rows = [_cells(line) for line in block]
    widths = [max(cell_width(row[column]) for row in [head, *rows]) for column in range(len(head) - 1)]
    indent = sum(widths) + 2 * len(widths)
    if width - indent < 24:
        return _stacked(rows, width)
    lines = []
    for row in [head, *rows]:
        begin = "".join(fit(cell, size) + "  " for cell, size in zip(row, widths, strict=False))
        lines += wrap(begin + row[-1], width, indent=" " * indent)
    return [line.rstrip() for line in lines]


def _stacked(rows: list[list[str]], width: int) -> list[str]:
    lines: list[str] = []
    for row in rows:
        lines += wrap(" · ".join(cell for cell in row[:-1] if cell), width, indent="  ")
        lines += [f"    {line}" for line in wrap(row[-1], width - 4)]
    return lines
