"""Layers against rows: where the arms are equal, where a difference was inherited, where it was born.

            row 0         64             128            192          256 267
    layer 0 ······························································
    layer 1 ····························································◉▓
    layer 2 ·····························································▓

LEGEND says what the signs mean. The rows are max-pooled: an origin is never hidden by its neighbours.
Readable in monochrome.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from klbench.core.text import fit, visible
from klbench.tui.actions import bindings

GLYPHS = " ·▒▓◉"
"""Not observed, equal, state differs, differs, origin: rising weight, so that pooling keeps what matters."""
LEGEND = "▒ state  ▓ inherited  ◉ origin  · equal  blank unseen"
_LABEL_WIDTH = 9


MEANINGS = ("not observed", "equal", "state differs", "inherited difference", "origin")
"""What the GLYPHS stand for, in words."""


class LayerMap(Widget, can_focus=True):
    """`cells[layer, row]` are indices into GLYPHS. The cursor stands on a cell; `under_cursor` says it."""

    BINDINGS = bindings("map")
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "layer-map--label",
        "layer-map--origin",
        "layer-map--differs",
        "layer-map--cursor",
    }
    DEFAULT_CSS = """
    LayerMap { background: $surface; color: $foreground; height: auto; }
    LayerMap > .layer-map--label { color: $text-muted; }
    LayerMap > .layer-map--differs { color: $warning; }
    LayerMap > .layer-map--origin { color: $error; text-style: bold; }
    LayerMap > .layer-map--cursor { text-style: reverse; }
    """

    @dataclass
    class Moved(Message):
        """The cursor stands on another cell."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.at_layer, self.at_row = 0, 0
        """The cell of the cursor: its layer's number in `labels`, its row's number in `positions`."""
        self.labels: tuple[str, ...] = ()
        self.positions: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.cells: npt.NDArray[np.int8] = np.zeros((0, 0), np.int8)

    def show(
        self, labels: tuple[str, ...], positions: npt.NDArray[np.int64], cells: npt.NDArray[np.int8]
    ) -> None:
        """Draw `cells` with a label a layer and the row position of each column."""
        self.labels, self.positions, self.cells = labels, positions, cells
        self.at_layer, self.at_row = self._telling(range(len(labels)))
        self.refresh(layout=True)
        self.post_message(self.Moved())

    @property
    def under_cursor(self) -> str:
        """`layer 1 · rows 264 to 267 · origin`, empty without a map."""
        if not self.labels or not len(self.positions):
            return ""
        first, end = self._stretch(self._column(self.at_row))
        low, high = int(self.positions[first]), int(self.positions[end - 1])
        rows = f"row {low}" if end - first == 1 else f"rows {low} to {high}"
        meaning = MEANINGS[int(self.cells[self.at_layer, first:end].max())]
        return f"{visible(self.labels[self.at_layer])} · {rows} · {meaning}"

    def go_to_layer(self, layer: int) -> None:
        """Put the cursor on what is most telling in a layer."""
        self._go(*self._telling([layer]))

    def _telling(self, layers: Iterable[int]) -> tuple[int, int]:
        """The first cell of the gravest kind in these layers."""
        found = [(layer, int(self.cells[layer].argmax())) for layer in layers if self.cells.shape[1]]
        return max(found, key=lambda cell: int(self.cells[cell]), default=(0, 0))

    def _go(self, layer: int, at: int) -> None:
        if self.labels and len(self.positions):
            self.at_layer = min(max(layer, 0), len(self.labels) - 1)
            self.at_row = min(max(at, 0), len(self.positions) - 1)
            self.refresh()
            self.post_message(self.Moved())

    def action_map_up(self) -> None:
        self._go(self.at_layer - 1, self.at_row)

    def action_map_down(self) -> None:
        self._go(self.at_layer + 1, self.at_row)

    def action_map_left(self) -> None:
        column = self._column(self.at_row)
        self._go(self.at_layer, self._stretch(max(column - 1, 0))[0])

    def action_map_right(self) -> None:
        column = self._column(self.at_row)
        self._go(self.at_layer, self._stretch(min(column + 1, self._columns - 1))[0])

    @property
    def _columns(self) -> int:
        """How many columns are drawn."""
        return min(max(self.size.width - _LABEL_WIDTH - 2, 1), max(len(self.positions), 1))

    def _column(self, at: int) -> int:
        """The column that stands for the row numbered `at`."""
        return ((at + 1) * self._columns - 1) // max(len(self.positions), 1)

    def _stretch(self, column: int) -> tuple[int, int]:
        """The rows that a column stands for: the first and the one behind the last."""
        count, columns = len(self.positions), self._columns
        return column * count // columns, max((column + 1) * count // columns, column * count // columns + 1)

    def get_content_height(self, _container: Size, _viewport: Size, _width: int) -> int:
        return len(self.labels) + 1 if self.labels else 1

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        label = base + self.get_component_rich_style("layer-map--label", partial=True)
        columns = max(width - _LABEL_WIDTH - 2, 1)
        height = self.size.height
        if not self.labels:
            text = " no map: the trace does not hold whole rows" if y == 0 else ""
            return Strip([Segment(fit(text, width), label)], width)
        if y == 0:
            return Strip([Segment(fit(self._axis(columns), width), label)], width)
        layer = self._first_layer(height - 1) + y - 1
        if layer >= len(self.labels):
            return Strip.blank(width, label)
        segments = [Segment(fit(visible(self.labels[layer]), _LABEL_WIDTH) + " ", label)]
        here = self._column(self.at_row) if layer == self.at_layer else -1
        cursor = self.get_component_rich_style("layer-map--cursor", partial=True)
        for column, cell in enumerate(self._pooled(layer, columns).tolist()):
            name = {3: "differs", 2: "differs", 4: "origin"}.get(cell)
            style = base + self.get_component_rich_style(f"layer-map--{name}", partial=True) if name else base
            segments.append(Segment(GLYPHS[cell], style + cursor if column == here else style))
        return Strip(segments).simplify().adjust_cell_length(width, base)

    def _first_layer(self, room: int) -> int:
        """Where there are more layers than lines, those around the cursor are shown."""
        if len(self.labels) <= room:
            return 0
        return min(max(self.at_layer - room // 3, 0), len(self.labels) - room)

    def _pooled(self, layer: int, columns: int) -> npt.NDArray[np.int8]:
        row: npt.NDArray[np.int8] = self.cells[layer]
        if len(row) <= columns:
            return row
        return np.maximum.reduceat(row, (np.arange(columns) * len(row)) // columns)

    def _axis(self, columns: int) -> str:
        """Row positions over the columns, as many as fit, the last one always."""
        count = len(self.positions)
        shown = min(count, columns)
        line = list(" " * (_LABEL_WIDTH + 1 + columns + 1))
        if not shown:
            return "".join(line)
        free_from = 0
        line[0:3] = "row"
        last = str(int(self.positions[-1]))
        last_at = _LABEL_WIDTH + 1 + max(shown - len(last), 0)
        for column in range(0, shown, 16):
            text = str(int(self.positions[column * count // shown]))
            at = _LABEL_WIDTH + 1 + column
            if at < free_from or at + len(text) + 1 > last_at:
                continue
            line[at : at + len(text)] = text
            free_from = at + len(text) + 1
        line[last_at : last_at + len(last)] = last
        return "".join(line)
