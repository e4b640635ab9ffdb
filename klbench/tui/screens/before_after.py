"""Before and after: what changed since the session that this one repeats, by helper and in the code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from textual.widget import Widget

from klbench.core.text import shortened, visible
from klbench.session.compare_words import change_lines
from klbench.tui.actions import bindings
from klbench.tui.compare_tables import change_rows
from klbench.tui.model import Model, Reference
from klbench.tui.screens.base import WorkScreen
from klbench.tui.screens.compare import CompareScreen
from klbench.tui.widgets.reading import reading
from klbench.tui.widgets.text import Lines, Pane, Sentences
from klbench.tui.widgets.virtual_table import NO_ROWS, VirtualTable


class BeforeAfterScreen(WorkScreen):
    """Waits for the document; enter on a helper sets its first changed request side by side."""

    place = "before_after"
    BINDINGS = bindings("before_after")
    AUTO_FOCUS = "#change-table"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.document: Mapping[str, Any] | None = None
        self._drawn: object = None

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        empty = "Comparing. The new run must have measured something first."
        yield Pane(VirtualTable(empty=empty, id="change-table"), title="helpers", id="changes")
        yield reading("change-words", id="change-body", sentences=True)

    def draw(self) -> None:
        before = self.model.before
        name = before.folder.name if before is not None else "?"
        title = f" klbench · before {name} · after {self.model.session_name}"
        self.query_one("#title", Lines).show(shortened(visible(title), self.size.width, more=" · …"))
        if (self.document, self.size.width) == self._drawn:
            return
        self._drawn = (self.document, self.size.width)
        document = self.document
        self.query_one(VirtualTable).show_rows(change_rows(document["helpers"]) if document else NO_ROWS)
        self.query_one("#change-words", Sentences).say(change_lines(document) if document else [])

    def open_row(self, _table: VirtualTable, _row: int) -> None:
        self.perform("set_beside")

    def do_set_beside(self) -> None:
        """Set the first changed request of the helper beside what it was."""
        model, row = self.model, self.query_one(VirtualTable).row
        if self.document is None or model.before is None or model.run is None or row is None:
            self.say("nothing is compared yet")
            return
        helper = list(self.document["helpers"])[row]
        change = self.document["helpers"][helper].get("change") or {}
        changed = change.get("changed_requests") or [{"index": 0}]
        request = int(changed[0]["index"])
        model.chosen_helper, model.request = helper, request
        before = Reference(model.before.run.number, helper, request, before=True)
        self.app.push_screen(CompareScreen(model, before))
