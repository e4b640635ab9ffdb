"""Two requests side by side, offset by offset: other requests, helpers or runs, or the run that this session
repeats.

The right side is the request that was chosen; the left one is the marked request, or the same request in
another helper, and its keys move it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from textual.widget import Widget

from klbench.core.text import kl, shortened
from klbench.tui.actions import bindings, key_of
from klbench.tui.compare_tables import Beside, beside, beside_rows
from klbench.tui.messages import Wanted
from klbench.tui.model import Model, Reference
from klbench.tui.screens.base import WorkScreen
from klbench.tui.widgets.rows import following
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import NO_ROWS, VirtualTable


class CompareScreen(WorkScreen):
    """See the module."""

    place = "compare"
    BINDINGS = bindings("compare")
    AUTO_FOCUS = "#beside-table"

    def __init__(self, model: Model, left: Reference | None = None) -> None:
        super().__init__(model)
        here = model.here
        self._right = here
        marked = left or (model.marked if model.marked != here else None)
        self._left = marked or (self._first_left(here) if here is not None else None)
        self._drawn: object = None
        self._pair: Beside | None = None

    def _first_left(self, here: Reference) -> Reference:
        """Where nothing was marked: the same request before, else in another helper of the run."""
        if here.helper in self.model.before_measurements and self.model.before is not None:
            return replace(here, run=self.model.before.run.number, before=True)
        names = self._helpers(here)
        other = next((name for name in names if name != here.helper), here.helper)
        return replace(here, helper=other)

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="left-side", classes="side")
        yield Lines(id="right-side", classes="side")
        yield Pane(VirtualTable(id="beside-table"), title="by offset", id="beside")
        yield Sentences(id="sentences")

    def draw(self) -> None:
        left, right = self._left, self._right
        self.query_one("#title", Lines).show(" klbench · compare")
        if left is None or right is None:
            return
        measured = self.model.find(left), self.model.find(right)
        width = self.size.width - 1
        for name, one in (("left", left), ("right", right)):
            self.query_one(f"#{name}-side", Lines).show(
                shortened(self._described(name, one), width, more=" · …")
            )
        table = self.query_one(VirtualTable)
        state = (left, right, measured)
        if state != self._drawn:
            self._drawn = state
            self._pair = self._beside()
            missing = "This side is not loaded: it was not measured, or its file is still being read."
            table.empty = missing if self._pair is None else "No tokens were compared."
            rows = beside_rows(self._pair) if self._pair is not None else NO_ROWS
            only = self._pair.only_one if self._pair is not None else np.zeros(0, np.int64)
            table.show_rows(rows, cursor_key=int(only[0]) if len(only) else None)
            self.query_one("#sentences", Sentences).say(said(self._pair))
        place = f"row {table.cursor + 1} of {len(table.order)}" if table.row is not None else ""
        words = filter(None, [place, table.describe_filter(), table.describe_sort()])
        entitle(self.query_one("#beside", Pane), subtitle=" · ".join(words))

    def _beside(self) -> Beside | None:
        left, right = self._left, self._right
        if left is None or right is None:
            return None
        one, two = self.model.find(left), self.model.find(right)
        for wanted, measured in ((left, one), (right, two)):
            if measured is None:
                self.post_message(Wanted(wanted))
        if one is None or two is None:
            return None
        if left.request >= one.columns.requests or right.request >= two.columns.requests:
            return None
        return beside(one, left.request, two, right.request)

    def _described(self, name: str, one: Reference) -> str:
        """`left   run 1 · match · request 23 · 0 of 128 differ · kl 0 · prompt 132 · cached 0`."""
        before = self.model.before
        run = f"run {one.run}" + (" before" if one.before else "")
        words = [run, one.helper, f"request {one.request}"]
        measured = self.model.find(one)
        if measured is not None and one.request < measured.columns.requests:
            c, request = measured.columns, one.request
            words += [
                f"{measured.differing[request]} of {measured.compared[request]} differ",
                f"kl {kl(float(measured.kl_nats[request]))}",
                f"prompt {c.prompt_len[request]}",
                f"cached {c.cached_generation[request]}",
            ]
        if one.before and before is not None:
            words.append(f"session {before.folder.name}")
        mark = " (marked)" if one == self.model.marked else ""
        return f" {name:5} {' · '.join(words)}{mark}"

    def on_virtual_table_highlighted(self, _message: VirtualTable.Highlighted) -> None:
        self.draw()

    def _helpers(self, one: Reference) -> list[str]:
        if one.before:
            return list(self.model.before_measurements)
        run = next((run for run in self.model.state.runs if run.number == one.run), None)
        return [helper.helper for helper in run.helpers if helper.columns] if run is not None else []

    def _move(self, left: Reference, said: str) -> None:
        if left == self._left:
            self.say(said)
            return
        self._left = left
        self.show_model()

    def do_other_helper(self) -> None:
        if (left := self._left) is None:
            return
        names = self._helpers(left)
        following = (
            names[(names.index(left.helper) + 1) % len(names)] if left.helper in names else left.helper
        )
        self._move(replace(left, helper=following), "there is no other helper with tokens in that run")

    def do_other_run(self) -> None:
        """The next run that has this helper; behind the last one the run that this session repeats."""
        if (left := self._left) is None:
            return
        runs = [
            replace(left, run=run.number, before=False)
            for run in self.model.state.runs
            if (helper := run.helper(left.helper)) is not None and helper.columns
        ]
        before = self.model.before
        if before is not None and left.helper in self.model.before_measurements:
            runs.append(replace(left, run=before.run.number, before=True))
        if not runs:
            return
        at = runs.index(left) if left in runs else -1
        made = f"{key_of('run')} makes one, {key_of('like')} another session"
        self._move(runs[(at + 1) % len(runs)], f"this session holds no other run: {made}")

    def do_previous_request(self) -> None:
        self._request(-1)

    def do_next_request(self) -> None:
        self._request(1)

    def _request(self, step: int) -> None:
        left = self._left
        measured = self.model.find(left) if left is not None else None
        if left is None or measured is None:
            return
        other = (left.request + step) % measured.columns.requests
        self._move(replace(left, request=other), "there is no other request")

    def do_next_difference(self) -> None:
        self._step(1)

    def do_previous_difference(self) -> None:
        self._step(-1)

    def _step(self, step: int) -> None:
        """Go to the next offset where the two are not alike."""
        table = self.query_one(VirtualTable)
        only = self._pair.only_one if self._pair is not None else np.zeros(0, np.int64)
        if not len(only) or table.row is None:
            self.say("the two are alike at every offset")
            return
        offset, around = following(only, table.row, step)
        if around:
            self.say("first again" if step > 0 else "last again")
        table.move_to_key(offset)


def said(pair: Beside | None) -> list[str]:
    """What the two have in common, in one or two sentences."""
    if pair is None:
        return []
    common = min(pair.counts)
    both = int(np.count_nonzero(pair.left_differs[:common] & pair.right_differs[:common]))
    left = int(np.count_nonzero(pair.left_differs[:common])) - both
    right = int(np.count_nonzero(pair.right_differs[:common])) - both
    lines = [f"Of {common} offsets in both: {both} differ in both, {left} left only, {right} right only."]
    if pair.parted_at is not None:
        lines.append(f"The tokens are other ones from offset {pair.parted_at} on: the texts part there.")
    elif common:
        lines.append("Both generated the same tokens.")
    return lines
