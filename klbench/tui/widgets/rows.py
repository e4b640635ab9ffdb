"""What a table shows: columns that format a cell when it is drawn, and the raw values behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.text import visible


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `show(row)` is its text, `values` the raw quantity that sorting goes by (None: unsortable).

    Where columns do not fit, those with the highest `optional` go first; 0 always stays.
    """

    key: str
    title: str
    width: int
    show: Callable[[int], str]
    values: npt.NDArray[Any] | None = None
    right: bool = False
    optional: int = 0
    descends: bool = False
    """Whether the first sort by it puts the largest on top."""
    stretch: int = 0
    """Cells it may grow by where the window is wide."""
    names: tuple[str, ...] = ()
    """What else a filter may call it."""
    search: Callable[[str], npt.NDArray[np.bool_]] | None = None
    """[count] which rows hold a text, for a column that is searched as text."""
    sentence: bool = False
    """Where it is too long it is cut behind a whole word."""
    copied_alone: bool = False
    """A copy takes this column only, without its title: a command that is to be run."""
    compared: npt.NDArray[Any] | None = None
    """What a filter compares where that is not what sorting goes by."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What a table shows: `count` rows, an optional key for each (its number otherwise) and a tone each."""

    columns: tuple[Column, ...]
    count: int
    keys: npt.NDArray[np.int64] | None = None
    tone: Callable[[int], str] = field(default=lambda _row: "")
    """"", "strong" (differs), "dim" (equal) or "warn"."""

    def key(self, row: int) -> int:
        return row if self.keys is None else int(self.keys[row])


NO_ROWS = Rows((), 0)

MARKER_WIDTH = 2
GAP = 2


def fitting(columns: Sequence[Column], room: int) -> tuple[tuple[Column, ...], int]:
    """The columns that fit into `room` cells, grown as they may, and the cells that they take."""
    kept = list(columns)
    room = max(room, 20)
    while (width := _total_width(kept)) > room:
        least = max((column.optional for column in kept), default=0)
        if least == 0:
            break
        # Those of one rank go together: half of a comparison says nothing.
        kept = [column for column in kept if column.optional < least]
    for index, column in enumerate(kept):
        if column.stretch and (extra := min(column.stretch, room - width)) > 0:
            kept[index] = replace(column, width=column.width + extra)
            width += extra
    return tuple(kept), width


def _total_width(columns: Sequence[Column]) -> int:
    return MARKER_WIDTH + sum(column.width for column in columns) + GAP * max(len(columns) - 1, 0)


def as_text(rows: Rows, order: npt.NDArray[np.int64]) -> str:
    """Rows as lines with tabs between the columns; of a table of commands only these, ready to be run."""
    if not len(order):
        return ""
    alone = next((column for column in rows.columns if column.copied_alone), None)
    if alone is not None:
        return "\n".join(visible(alone.show(int(row))) for row in order)
    lines = ["\t".join(column.title for column in rows.columns)]
    lines += ["\t".join(visible(c.show(int(row))).replace("\t", " ") for c in rows.columns) for row in order]
    return "\n".join(lines) + "\n"


def following(places: npt.NDArray[np.int64], here: int, step: int) -> tuple[int, bool]:
    """Of ascending `places` (at least one) the next behind (step 1) or before (-1) `here`, and whether that
    went around the end."""
    if step > 0:
        at = int(np.searchsorted(places, here, side="right"))
    else:
        at = int(np.searchsorted(places, here, side="left")) - 1
    return int(places[at % len(places)]), not 0 <= at < len(places)


def first_shown(cursor: int, here: int, top: int | None, height: int, count: int) -> int:
    """The first of `height` shown lines, as near to `here` (or to `top`) as shows the cursor's of `count`."""
    last = max(count - height, 0)
    wanted = here if top is None else min(max(top, 0), last)
    around = 1 if height > 2 else 0
    if not wanted - height <= cursor < wanted + 2 * height:
        # From far away it comes to rest in the middle, so that the next keys do not scroll.
        return min(max(cursor - height // 2, 0), last)
    if cursor - around < wanted:
        return max(cursor - around, 0)
    if cursor + around >= wanted + height:
        return min(cursor + around, count - 1) - height + 1
    return wanted


def stable_order(values: npt.NDArray[Any], *, descends: bool) -> npt.NDArray[np.int64]:
    """Indices that sort `values`; equal ones keep their order, what is no number comes last either way."""
    if values.dtype.kind not in "biuf":
        values = np.unique(values, return_inverse=True)[1]
    numbers = values.astype(np.float64)
    order = np.argsort(-numbers if descends else numbers, kind="stable")
    return order.astype(np.int64)
