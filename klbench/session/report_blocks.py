"""What a report is made of, whatever it is written as: a few kinds of blocks with inline text.

Text is either our own sentence or a value from outside, which is a `Code`; a writer makes both safe in its
own syntax, so no block holds markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Code:
    """A value as it stands: a name, a path, a number from outside."""

    value: str


@dataclass(frozen=True, slots=True)
class Strong:
    value: str


Inline: TypeAlias = str | Code | Strong
Span: TypeAlias = tuple[Inline, ...]


@dataclass(frozen=True, slots=True)
class Heading:
    level: int
    span: Span


@dataclass(frozen=True, slots=True)
class Paragraph:
    span: Span


@dataclass(frozen=True, slots=True)
class Bullets:
    items: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Table:
    names: tuple[str, ...]
    rows: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """Lines as they stand."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot; writers without pictures leave it out, for its numbers are in the tables."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Fold:
    """A part that not every reader wants to see; folded where the format can."""

    title: str
    blocks: tuple[Block, ...]
    open: bool = False
    """Whether it begins unfolded, where there is room."""


Block: TypeAlias = "Heading | Paragraph | Bullets | Table | Fence | Figure | Fold"


def heading(level: int, *span: Inline) -> Heading:
    return Heading(level, span)


def paragraph(*span: Inline) -> Paragraph:
    return Paragraph(span)


def bullets(items: Sequence[Span | str]) -> Bullets:
    return Bullets(tuple((item,) if isinstance(item, str) else item for item in items))


def table(names: Sequence[str], rows: Sequence[Sequence[Inline]]) -> Table:
    """A table of cells that are one inline each."""
    return Table(tuple(names), tuple(tuple((cell,) for cell in row) for row in rows))
