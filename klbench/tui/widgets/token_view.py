"""The tokens of one request: where in the generation they differ, and each with its two logprobs.

Shared by the tokens screen and the wide main screen. The cursor of the table moves the caret of the strip.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from textual.app import ComposeResult
from textual.containers import Vertical

from klbench.core.text import delta
from klbench.tui.measurement import Measurement
from klbench.tui.tables import token_rows
from klbench.tui.widgets.strip import NOT_COMPARED, DifferenceStrip
from klbench.tui.widgets.virtual_table import NO_ROWS, VirtualTable

NONE_CHOSEN = "The tokens of the chosen request appear here."


class TokenView(Vertical):
    """Strip over table. `show` changes the request; the same request again keeps the cursor."""

    DEFAULT_CSS = """
    TokenView { height: 1fr; }
    TokenView VirtualTable { height: 1fr; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._shown: tuple[Measurement, int] | None = None
        self._magnitudes: npt.NDArray[np.float64] = np.zeros(0)
        self._differing: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def compose(self) -> ComposeResult:
        yield DifferenceStrip()
        yield VirtualTable(empty=NONE_CHOSEN)

    @property
    def table(self) -> VirtualTable:
        return self.query_one(VirtualTable)

    @property
    def place(self) -> str:
        """`row 5 of 128 · difference 2 of 12`, for the pane's lower border."""
        table = self.table
        if table.row is None:
            return ""
        place, count = f"row {table.cursor + 1} of {len(table.order)}", len(self._differing)
        at = int(np.searchsorted(self._differing, table.row))
        here = at < count and int(self._differing[at]) == table.row
        differ = f"difference {at + 1} of {count}" if here else f"{count} differ"
        words = [place, table.describe_filter() or differ, table.describe_sort()]
        return " · ".join(filter(None, words))

    def show(self, measured: Measurement | None, request: int | None, why: str = NONE_CHOSEN) -> None:
        """Show a request of a measurement, the cursor on its first difference; where there is none, `why`."""
        known = self._shown
        if measured is None or request is None or request >= measured.columns.requests:
            if known is not None or self.table.empty != why:
                self._shown = None
                self._magnitudes, self._differing = np.zeros(0), np.zeros(0, np.int64)
                self.table.empty = why
                self.table.show_rows(NO_ROWS)
                self._draw_strip()
            return
        if known is not None and known[0] is measured and known[1] == request:
            return
        same = (
            known is not None and known[1] == request and known[0].columns.helper == measured.columns.helper
        )
        self._shown = (measured, request)
        where = measured.columns.tokens_of(request)
        self._magnitudes = np.abs(measured.delta_nats[where])
        self._magnitudes[: int(measured.columns.lost[request])] = NOT_COMPARED
        self._differing = np.flatnonzero(measured.differs[where])
        first = max(int(measured.first_offset[request]), 0)
        self.table.empty = why_left_out(measured, request)
        self.table.show_rows(token_rows(measured, request), cursor_key=None if same else first)
        self._draw_strip()

    def next_difference(self, step: int) -> str | None:
        """Move to the next (1) or previous (-1) token that differs, around the end too; says when it went
        around, or that there is none."""
        if not len(self._differing):
            return "no token of this request differs"
        here = self.table.row
        here = -1 if here is None else here
        if step > 0:
            place = int(np.searchsorted(self._differing, here, side="right"))
        else:
            place = int(np.searchsorted(self._differing, here, side="left")) - 1
        around = not 0 <= place < len(self._differing)
        self.table.move_to_key(int(self._differing[place % len(self._differing)]))
        return ("first again" if step > 0 else "last again") if around else None

    def on_virtual_table_highlighted(self, _message: VirtualTable.Highlighted) -> None:
        self._draw_strip()

    def _draw_strip(self) -> None:
        strip, row = self.query_one(DifferenceStrip), self.table.row
        if self._shown is None or row is None:
            strip.show(self._magnitudes, 0, "")
            return
        measured, request = self._shown
        position = int(measured.columns.prompt_len[request]) + row
        value = float(measured.delta_nats[measured.columns.tokens_of(request)][row])
        lost = row == 0 and bool(measured.columns.lost[request])
        shown = "its logprob was lost by the server" if lost else f"Δ {delta(value)}"
        caption = f"token {position}, offset {row}, {shown}"
        if len(self._differing) and row == self._differing[0]:
            caption += ", the first difference"
        strip.show(self._magnitudes, row, caption)


def why_left_out(measured: Measurement, request: int) -> str:
    """Why a request has no tokens: what the helper wanted of the cache it did not get."""
    c = measured.columns
    if not c.dropped[request]:
        return "No tokens were compared:\nthe server generated none."
    cached = int(c.cached_generation[request])
    reason = (
        f"its {cached} cached tokens do not reach into what decode wrote"
        if cached
        else "nothing of its prompt was cached"
    )
    return f"No tokens were compared: {c.helper} left request {request} out,\nfor {reason}."
