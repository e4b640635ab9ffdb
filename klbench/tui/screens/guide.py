"""The guided path in full: every step with its state, the chosen one explained, with the words that it uses.

Enter does the step under the cursor, space passes it over (and back), so nobody is ever held up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.widget import Widget

from klbench.core.guide import StepState
from klbench.tui import actions, guide_words, next_step, wording
from klbench.tui.screens.base import WorkScreen
from klbench.tui.verdict_words import wrapped
from klbench.tui.widgets.guide_panel import GuideSize
from klbench.tui.widgets.reading import Reading, reading
from klbench.tui.widgets.text import Lines, Pane, entitle
from klbench.tui.widgets.virtual_table import Column, Rows, VirtualTable


class GuideScreen(WorkScreen):
    """The cursor starts on the current step."""

    place = "guide"
    BINDINGS = actions.bindings("guide")
    AUTO_FOCUS = "#steps-table"

    _states: Sequence[StepState] = ()
    _drawn: Sequence[StepState] | None = None

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Pane(VirtualTable(header=False, id="steps-table"), title="the path", id="steps")
        yield Pane(reading("step-text", id="step-body"), title="the step", id="step")

    def draw(self) -> None:
        self.query_one("#title", Lines).show(wording.title(self.model.state, "", self.size.width))
        self._states = self.model.guide_states()
        table = self.query_one("#steps-table", VirtualTable)
        if self._states != self._drawn:
            first = self._drawn is None
            self._drawn = self._states
            now = next_step.current(self._states)
            here = self._states.index(now) if now is not None else 0
            table.show_rows(step_rows(self._states), cursor_key=here if first else table.row or 0)
            done = sum(item.state in ("done", "not_needed") for item in self._states)
            entitle(self.query_one("#steps", Pane), subtitle=f"{done} of {len(self._states)} answered")
        self._draw_step()

    def _draw_step(self) -> None:
        if (item := self.chosen) is None:
            return
        entitle(self.query_one("#step", Pane), f"the step · {item.step.code.replace('_', ' ')}")
        lines = wrapped(guide_words.explanation(item), max(self.size.width - 6, 20))
        self.query_one("#step-text", Lines).show("\n".join(lines))

    @property
    def guide_size(self) -> GuideSize | None:
        return None

    @property
    def chosen(self) -> StepState | None:
        row = self.query_one("#steps-table", VirtualTable).row
        return self._states[row] if row is not None and row < len(self._states) else None

    def on_virtual_table_highlighted(self, _message: VirtualTable.Highlighted) -> None:
        self._draw_step()
        self.query_one("#step-body", Reading).scroll_home(animate=False)

    def open_row(self, _table: VirtualTable, _row: int) -> None:
        self.perform("do_step")

    def do_do_step(self) -> None:
        """Leave the guide and press the step's key on the main screen."""
        item = self.chosen
        screens = [screen for screen in self.app.screen_stack if isinstance(screen, WorkScreen)]
        main = next((screen for screen in screens if screen.place == "main"), None)
        if item is None or main is None:
            return
        action = actions.by_default(item.key)
        if action is None:
            return
        answer = action.enabled(self.model.situation())
        if answer is True:
            self.dismiss()
        main.perform(action.id)

    def do_skip(self) -> None:
        """Pass the step under the cursor over, or take it up again."""
        item = self.chosen
        if item is None:
            return
        if item.state in ("done", "not_needed"):
            self.app.notify("this step has its answer already", markup=False, timeout=3)
            return
        self.model.skipped ^= {item.step.code}
        self.show_model()


def step_rows(states: Sequence[StepState]) -> Rows:
    """One line a step: its mark, its title, what it taught."""

    def said(row: int) -> str:
        item = states[row]
        return {"now": "▸ now", "skipped": "passed over"}.get(item.state, item.learned)

    columns = (
        Column("mark", "", 1, lambda r: states[r].mark),
        Column("title", "step", 38, lambda r: states[r].step.title),
        Column("learned", "learned", 30, said, stretch=120, sentence=True),
    )
    tones = {"now": "strong", "not_needed": "dim", "skipped": "dim"}
    return Rows(columns, len(states), tone=lambda r: tones.get(states[r].state, ""))
