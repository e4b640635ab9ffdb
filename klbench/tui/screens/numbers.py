"""The real rows of both arms at an origin, element by element, the largest difference first.

 klbench · numbers · model.layers.1.self_attn.attn · row 267
 out.0 · bfloat16 · 54 of 128 elements differ, by at most 77 ulps
 ····▁▁█▃··
 ulps along the row · scattered over the row, as rounding is
╭─ argument 1 of 3 ──────────────────────────────────────────────────────╮
│    element  generation arm       scoring arm    difference    ulps     │
│▌        17     -0.41210938       -0.41015625    -1.953e-03      77     │
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from textual.widget import Widget

from klbench.core.text import counted, shortened, visible, wrap
from klbench.engine.origin_numbers import OriginRows
from klbench.tui.actions import bindings
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.widgets.strip import bars, pooled
from klbench.tui.widgets.text import Lines, Pane, entitle
from klbench.tui.widgets.virtual_table import Column, Rows, VirtualTable

_SHAPES = {
    "scattered": "scattered over the row, as rounding is",
    "block": "in a block, as a head, a tile or a page is",
    "whole": "the whole row: its input or its state was another",
    "equal": "",
}


class NumbersScreen(WorkScreen):
    """One argument of the operator at a time."""

    place = "numbers"
    BINDINGS = bindings("numbers")
    AUTO_FOCUS = "#numbers-table"

    def __init__(self, model: Model, rows: Sequence[OriginRows], title: str, arm: str) -> None:
        """`title` names the operator and the row; `arm` is the one beside the scoring arm."""
        super().__init__(model)
        self._rows, self._title, self._arm, self._at = rows, title, arm, 0
        self._drawn: tuple[int, int] | None = None

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="numbers-head")
        yield Pane(VirtualTable(id="numbers-table"), title="elements", id="numbers")

    def draw(self) -> None:
        rows, width = self._rows[self._at], self.size.width
        table = self.query_one("#numbers-table", VirtualTable)
        if (self._at, width) != self._drawn:
            new = self._drawn is None or self._drawn[0] != self._at
            self._drawn = (self._at, width)
            title = visible(f" klbench · numbers · {self._title}")
            self.query_one("#title", Lines).show(shortened(title, width, more=" · …"))
            head = "\n".join(f" {line}" for line in head_lines(rows, width - 2))
            self.query_one("#numbers-head", Lines).show(head)
            if new:
                table.show_rows(element_rows(rows, self._arm), order=_largest_first(rows))
                table.move_to(0)
        here = f"row {table.cursor + 1} of {len(table.order)}" if table.row is not None else ""
        words = [here, table.describe_filter(), table.describe_sort() or "largest difference first"]
        entitle(
            self.query_one("#numbers", Pane),
            f"argument {self._at + 1} of {len(self._rows)} · {rows.name}",
            " · ".join(filter(None, words)),
        )

    def on_virtual_table_highlighted(self, _message: VirtualTable.Highlighted) -> None:
        self.draw()

    def do_next_argument(self) -> None:
        self._turn(1)

    def do_previous_argument(self) -> None:
        self._turn(-1)

    def _turn(self, step: int) -> None:
        if len(self._rows) == 1:
            self.say("no other argument of this operator was kept")
        self._at = (self._at + step) % len(self._rows)
        self.show_model()


def head_lines(rows: OriginRows, width: int) -> list[str]:
    """What differs, and where in the row."""
    found = rows.difference
    said = f"{visible(rows.name)} · {rows.dtype} · {found.differing} of {found.elements} elements differ"
    said += f", by at most {counted(found.max_ulps, 'ulp')}" if found.differing else ""
    said += f", {found.not_numbers} no numbers in one arm" if found.not_numbers else ""
    magnitudes = np.where(rows.elements.differs, np.maximum(rows.elements.ulps.astype(np.float64), 0.5), 0.0)
    lines = [*wrap(said, width), bars(pooled(magnitudes, width))]
    shape = _SHAPES.get(found.pattern, "")
    return [*lines, *wrap(f"ulps along the row · {shape}", width)] if shape else lines


def _largest_first(rows: OriginRows) -> npt.NDArray[np.int64]:
    elements = rows.elements
    size = np.where(elements.differs & ~elements.number, np.inf, elements.ulps.astype(np.float64))
    order: npt.NDArray[np.int64] = np.lexsort((np.arange(len(size)), -size, ~elements.differs)).astype(
        np.int64
    )
    return order


def element_rows(rows: OriginRows, arm: str) -> Rows:
    """Every element of the row: as `arm` (warming or generation) computed it, and as the scoring arm did."""
    e = rows.elements
    with np.errstate(invalid="ignore"):
        apart = e.a - e.b

    def ulps(row: int) -> str:
        return str(int(e.ulps[row])) if e.number[row] else "–"

    columns = (
        Column("element", "element", 9, str, np.arange(len(e.a)), right=True),
        Column("a", f"{visible(arm)} arm", 16, lambda r: f"{e.a[r]:.8g}", e.a, right=True),
        Column("b", "scoring arm", 16, lambda r: f"{e.b[r]:.8g}", e.b, right=True),
        Column("apart", "difference", 12, lambda r: f"{apart[r]:+.3e}" if e.differs[r] else "0",
               np.abs(apart), right=True, descends=True),
        Column("ulps", "ulps", 6, ulps, e.ulps.astype(np.float64), right=True, descends=True),
    )  # fmt: skip
    return Rows(columns, len(e.a), tone=lambda r: "strong" if e.differs[r] else "dim")
