"""All cells of one row, each in full, to copy one of them.

╭─ cells of the row ──────────────────── esc closes ─╮
│▌ token     "'[/INST]'"                            │
│  decode    -1.234567                               │
╰─────────────────────────────── enter copies a cell ╯
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widget import Widget

from klbench.core.text import cell_width, visible
from klbench.tui.screens.overlay import Overlay
from klbench.tui.widgets.virtual_table import Column, Rows, VirtualTable


def cells_of(rows: Rows, row: int) -> list[tuple[str, str]]:
    """(column, text) of each cell of a row, made safe to show; those too narrow for the table included."""
    return [
        (visible(column.title.strip() or column.key), visible(column.show(row)).strip())
        for column in rows.columns
    ]


class CellsScreen(Overlay[str]):
    """Dismissed with the text of the chosen cell, "" for none."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,i", "close", show=False)]
    DEFAULT_CSS = """
    CellsScreen > Vertical { width: 76; height: auto; max-height: 96%; }
    CellsScreen VirtualTable { max-height: 100%; }
    """

    def __init__(self, cells: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._cells = cells

    def content(self) -> Iterable[Widget]:
        box = Vertical(VirtualTable(header=False))
        box.border_title = "cells of the row"
        box.border_subtitle = "enter copies a cell, ← → show more, esc closes"
        yield box

    def on_mount(self) -> None:
        cells = self._cells
        columns = (
            Column("column", "column", max(cell_width(name) for name, _ in cells), lambda row: cells[row][0]),
            Column(
                "text", "text", max(cell_width(text) for _, text in cells) or 1, lambda row: cells[row][1]
            ),
        )
        table = self.query_one(VirtualTable)
        table.styles.height = len(cells)
        table.show_rows(Rows(columns, len(cells)))
        table.focus()

    def on_virtual_table_chosen(self, message: VirtualTable.Chosen) -> None:
        self.dismiss(self._cells[message.row][1])

    def on_virtual_table_cells_wanted(self, _message: VirtualTable.CellsWanted) -> None:
        self.dismiss("")

    def on_virtual_table_copy_wanted(self, message: VirtualTable.CopyWanted) -> None:
        if message.table.row is not None:
            self.dismiss(self._cells[message.table.row][1])

    def action_close(self) -> None:
        self.dismiss("")
