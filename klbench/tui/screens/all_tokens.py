"""All tokens of a run in one table, to sort and filter: which positions differ, whoever's they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from textual.widget import Widget

from klbench.tui.actions import bindings
from klbench.tui.compare_tables import AllTokens, all_token_rows, all_tokens
from klbench.tui.measurement import Measurement
from klbench.tui.messages import Perform
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.widgets.rows import following
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import VirtualTable


class AllTokensScreen(WorkScreen):
    """The loaded helpers of the latest run; enter opens the token's request."""

    place = "all_tokens"
    BINDINGS = bindings("all_tokens")
    AUTO_FOCUS = "#all-tokens-table"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._drawn: tuple[Measurement, ...] | None = None
        self._tokens: AllTokens | None = None

    def content(self) -> Iterable[Widget]:
        yield Lines(" klbench · all tokens of the run", id="title")
        empty = "No helper of this run is loaded yet."
        yield Pane(VirtualTable(empty=empty, id="all-tokens-table"), title="all tokens", id="all-tokens")
        yield Sentences(id="sentences")

    def draw(self) -> None:
        model = self.model
        run = model.run
        found = [model.measurements.get((run.number, h.helper)) for h in run.helpers] if run else []
        measured = tuple(one for one in found if one is not None)
        table = self.query_one(VirtualTable)
        if measured != self._drawn:
            self._drawn = measured
            self._tokens = all_tokens(measured)
            differs = np.concatenate([one.differs for one in measured]) if measured else np.zeros(0, bool)
            differing = int(np.count_nonzero(differs))
            first = int(np.argmax(differs)) if differing else None
            table.show_rows(all_token_rows(self._tokens), cursor_key=first)
            names = ", ".join(one.columns.helper for one in measured)
            lost = sum(int(np.count_nonzero(one.columns.lost)) for one in measured)
            missed = f", {lost:,} not compared: the server lost a logprob" if lost else ""
            self.query_one("#sentences", Sentences).say(
                [f"{table.rows.count:,} tokens of {names or 'no helper'}; {differing:,} differ{missed}."]
            )
        words = [table.describe_filter(), table.describe_sort(), "sorting" if table.arranging else ""]
        place = f"row {table.cursor + 1:,} of {len(table.order):,}" if table.row is not None else ""
        entitle(self.query_one("#all-tokens", Pane), subtitle=" · ".join(filter(None, [place, *words])))

    def on_virtual_table_highlighted(self, _message: VirtualTable.Highlighted) -> None:
        self.draw()

    def open_row(self, _table: VirtualTable, _row: int) -> None:
        self.perform("open_token")

    def do_open_token(self) -> None:
        """Open the request of the row, at its token."""
        tokens, row = self._tokens, self.query_one(VirtualTable).row
        if tokens is None or row is None:
            self.say("no token is under the cursor")
            return
        self.model.chosen_helper = tokens.measured[int(tokens.source[row])].columns.helper
        self.model.request = int(tokens.request[row])
        self.model.offset = int(tokens.offset[row])
        self.post_message(Perform("tokens"))

    def do_next_difference(self) -> None:
        self._step(1)

    def do_previous_difference(self) -> None:
        self._step(-1)

    def _step(self, step: int) -> None:
        """Go to the next row that differs, in the order that is shown; around the end too."""
        table = self.query_one(VirtualTable)
        if self._tokens is None or table.row is None:
            return
        differs = np.concatenate([one.differs for one in self._tokens.measured])
        places = np.flatnonzero(differs[table.order])
        if not len(places):
            self.say("no token that is shown differs")
            return
        place, around = following(places, table.cursor, step)
        if around:
            self.say("first again" if step > 0 else "last again")
        table.move_to(place)
