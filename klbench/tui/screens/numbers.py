"""The real rows of both arms at an origin, element by element, the largest difference first.

out.0 · bfloat16 · 54 of 128 elements differ, by at most 77 ulps, scattered
····▁▁█▃··  where in the row
  element      generation arm       scoring arm    difference    ulps
       17         -0.41210938       -0.41015625    -1.953e-03      77
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from klbench.core.text import counted, fit, visible
from klbench.engine.origin_numbers import OriginRows
from klbench.tui.screens.one_picture import OnePicture
from klbench.tui.widgets.strip import bars, pooled
from klbench.tui.widgets.text import Lines, Pane, entitle
from klbench.tui.widgets.virtual_table import Column, Rows, VirtualTable

_SHAPES = {
    "scattered": "scattered over the row: rounding looks like this",
    "block": "in a block: a head, a tile or a page looks like this",
    "whole": "the whole row: its input or its state was another",
    "equal": "",
}


class NumbersScreen(OnePicture[None], ModalScreen[None]):
    """One argument of the operator at a time; left and right go to the others."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f", "dismiss", show=False),
        Binding("left", "argument(-1)", show=False, priority=True),
        Binding("right", "argument(1)", show=False, priority=True),
    ]
    DEFAULT_CSS = """
    NumbersScreen { align: center middle; background: $background; }
    NumbersScreen > Pane { width: 96%; max-width: 110; height: 96%; border: round $border;
                               background: $surface; padding: 0 1; }
    NumbersScreen VirtualTable { height: 1fr; margin-top: 1; }
    """

    def __init__(self, rows: Sequence[OriginRows], title: str, arm: str) -> None:
        super().__init__()
        self._rows, self._title, self._arm, self._at = rows, title, arm, 0

    def compose(self) -> ComposeResult:
        with Pane(title="numbers", id="numbers-box"):
            yield Lines(id="numbers-head")
            yield VirtualTable(id="numbers-table")

    def on_mount(self) -> None:
        self._draw()
        self.query_one(VirtualTable).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def action_argument(self, step: int) -> None:
        self._at = (self._at + step) % len(self._rows)
        self._draw()

    def _draw(self) -> None:
        rows = self._rows[self._at]
        box = self.query_one("#numbers-box", Pane)
        others = f"{self._at + 1} of {len(self._rows)} · ← → others · " if len(self._rows) > 1 else ""
        entitle(box, f"numbers · {self._title}", f"{others}esc closes")
        width = max(box.size.width - 2, 20)
        self.query_one("#numbers-head", Lines).show("\n".join(head_lines(rows, width)))
        table = self.query_one(VirtualTable)
        table.show_rows(element_rows(rows, self._arm), order=_largest_first(rows), cursor_key=None)


def head_lines(rows: OriginRows, width: int) -> list[str]:
    """What differs, and where in the row."""
    found = rows.difference
    said = f"{visible(rows.name)} · {rows.dtype} · {found.differing} of {found.elements} elements differ"
    said += f", by at most {counted(found.max_ulps, 'ulp')}" if found.differing else ""
    said += f", {found.not_numbers} no numbers in one arm" if found.not_numbers else ""
    magnitudes = np.where(rows.elements.differs, np.maximum(rows.elements.ulps.astype(np.float64), 0.5), 0.0)
    lines = [fit(said, width).rstrip(), bars(pooled(magnitudes, width))]
    shape = _SHAPES.get(found.pattern, "")
    return [*lines, fit(f"the bars are ulps along the row · {shape}", width).rstrip()] if shape else lines


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
