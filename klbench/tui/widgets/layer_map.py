"""Layers against rows: where the arms are equal, where a difference was inherited, where it was born.

            row 0         64             128            192          256 267
    layer 0 ······························································
    layer 1 ····························································◉▓
    layer 2 ·····························································▓
            · equal  ▒ state differs  ▓ inherited  ◉ origin, blank: not observed

The rows are max-pooled: an origin is never hidden by its neighbours. Readable in monochrome.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from klbench.core.text import fit, visible

GLYPHS = " ·▒▓◉"
"""Not observed, equal, state differs, differs, origin: rising weight, so that pooling keeps what matters."""
_LEGEND = "· equal  ▒ state differs  ▓ inherited  ◉ origin, blank: not observed"
_LABEL_WIDTH = 9


class LayerMap(Widget):
    """`cells[layer, row]` are indices into GLYPHS."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"layer-map--label", "layer-map--origin", "layer-map--differs"}
    DEFAULT_CSS = """
    LayerMap { background: $surface; color: $foreground; height: auto; }
    LayerMap > .layer-map--label { color: $text-muted; }
    LayerMap > .layer-map--differs { color: $warning; }
    LayerMap > .layer-map--origin { color: $error; text-style: bold; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.labels: tuple[str, ...] = ()
        self.positions: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.cells: npt.NDArray[np.int8] = np.zeros((0, 0), np.int8)

    def show(
        self, labels: tuple[str, ...], positions: npt.NDArray[np.int64], cells: npt.NDArray[np.int8]
    ) -> None:
        """Draw `cells` with a label a layer and the row position of each column."""
        self.labels, self.positions, self.cells = labels, positions, cells
        self.refresh(layout=True)

    def get_content_height(self, _container: Size, _viewport: Size, _width: int) -> int:
        return len(self.labels) + 2 if self.labels else 1

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
        first = self._first_layer(height - 2)
        layer = first + y - 1
        if y == height - 1 or layer >= len(self.labels):
            text = " " * _LABEL_WIDTH + " " + _LEGEND if y == height - 1 else ""
            return Strip([Segment(fit(text, width), label)], width)
        segments = [Segment(fit(visible(self.labels[layer]), _LABEL_WIDTH) + " ", label)]
        for cell in self._pooled(layer, columns).tolist():
            name = {3: "differs", 2: "differs", 4: "origin"}.get(cell)
            style = base + self.get_component_rich_style(f"layer-map--{name}", partial=True) if name else base
            segments.append(Segment(GLYPHS[cell], style))
        return Strip(segments).simplify().adjust_cell_length(width, base)

    def _first_layer(self, room: int) -> int:
        """Where there are more layers than lines, those around the first origin are shown."""
        if len(self.labels) <= room:
            return 0
        origins = np.flatnonzero((self.cells == 4).any(axis=1))
        middle = int(origins[0]) if len(origins) else 0
        return min(max(middle - room // 3, 0), len(self.labels) - room)

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
