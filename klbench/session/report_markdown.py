"""A report as Markdown that renders the same in any viewer and pastes into an issue.

Invariants: no untrusted text is ever read as markup. Values from outside stand in code spans or fences longer
than any run of backticks in them; our sentences, which may quote such values, have all punctuation escaped.
Control and bidirectional characters are spelled out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from klbench.core.text import visible
from klbench.session.report_blocks import (
    Block,
    Bullets,
    Code,
    Fence,
    Figure,
    Fold,
    Heading,
    Inline,
    Paragraph,
    Span,
    Strong,
    Table,
)

# What Markdown could take for markup inside a line: no more, for a report is also read as it stands.
_MARKUP = re.compile(r"[\\`*\[\]<>|~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=:)//")
_LINE_START = re.compile(r"^(\s*)(?=[-+#=]|\d+[.)])(\d*)")
# What GitHub makes of plain words: mentions and references. A comment inside keeps them plain.
_MENTION = re.compile(r"[@#](?=\w)")


def text(value: object, *, for_issue: bool = False) -> str:
    """A sentence that renders as it reads."""
    escaped = _MARKUP.sub(lambda found: "\\" + found.group(), visible(str(value)))
    if for_issue:
        escaped = _MENTION.sub(lambda found: found.group() + "<!-- -->", escaped)
    # A sentence that begins like a list or a heading is none.
    return _LINE_START.sub(lambda found: f"{found.group(1)}{found.group(2)}\\", escaped)


def code(value: object) -> str:
    """Untrusted text in a code span, also inside a table's cell."""
    shown = visible(str(value)).replace("|", "\\|")
    if not shown.strip():
        return f"`{shown}`" if shown else "–"
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def block(lines: Iterable[str]) -> list[str]:
    """Untrusted lines in a fence that they cannot close."""
    shown = [visible(line) for line in lines]
    longest = max((len(run) for line in shown for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *shown, fence]


def markdown(blocks: Sequence[Block], *, for_issue: bool = False) -> str:
    """The blocks as Markdown, ending in one line feed; for an issue with folds and without mentions."""
    lines = _Writer(for_issue).lines(blocks)
    return "\n".join(lines).rstrip() + "\n"


class _Writer:
    def __init__(self, for_issue: bool) -> None:
        self._for_issue = for_issue

    def lines(self, blocks: Sequence[Block]) -> list[str]:
        return [line for part in blocks for line in self._block(part)]

    def _block(self, part: Block) -> list[str]:
        match part:
            case Heading(level, span):
                return ["#" * level + " " + self._span(span), ""]
            case Paragraph(span):
                return [self._span(span), ""]
            case Bullets(items):
                return [*(f"- {self._span(item)}" for item in items), ""]
            case Table():
                return [*self._table(part), ""]
            case Fence(lines):
                return [*block(lines), ""]
            case Figure():
                return []
            case Fold(title, blocks) if self._for_issue:
                title = text(title, for_issue=True)
                return [f"<details><summary>{title}</summary>", "", *self.lines(blocks), "</details>", ""]
            case Fold(_, blocks):
                return self.lines(blocks)

    def _table(self, part: Table) -> list[str]:
        names = " | ".join(text(name, for_issue=self._for_issue) for name in part.names)
        lines = [f"| {names} |", "|" + "---|" * len(part.names)]
        return lines + ["| " + " | ".join(map(self._span, row)) + " |" for row in part.rows]

    def _span(self, span: Span) -> str:
        return "".join(self._inline(part) for part in span)

    def _inline(self, part: Inline) -> str:
        match part:
            case Code(value):
                return code(value)
            case Strong(value):
                return f"**{text(value, for_issue=self._for_issue)}**"
            case _:
                return text(part, for_issue=self._for_issue)
