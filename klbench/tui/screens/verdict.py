"""The verdict: conditions with their grade, hypotheses with what speaks for and against each, the one
experiment that decides it, and what was and was not compared.

Narrow windows show the evidence below the chosen hypothesis, wide ones beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from textual.containers import Horizontal
from textual.widget import Widget

from klbench.core.experiments import CATALOGUE
from klbench.core.text import visible
from klbench.session import commands as cmd
from klbench.tui import actions, verdict_words, wording
from klbench.tui.messages import Perform, Send
from klbench.tui.screens.base import WorkScreen
from klbench.tui.widgets.reading import Reading, reading
from klbench.tui.widgets.text import Lines, Pane, entitle
from klbench.tui.widgets.virtual_table import NO_ROWS, Column, Rows, VirtualTable

_MOST_ROWS = 6


class VerdictScreen(WorkScreen):
    """The cursor of the hypotheses chooses which one is explained."""

    place = "verdict"
    BINDINGS = actions.bindings("verdict")
    AUTO_FOCUS = "#hypotheses-table"

    _drawn: Sequence[Mapping[str, Any]] | None = None

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="summary")
        yield Pane(VirtualTable(id="hypotheses-table"), title="explanations", id="hypotheses")
        yield Horizontal(
            Pane(reading("why-text", id="why-body"), title="why", id="why"),
            Pane(reading("evidence-text", id="evidence-body"), title="evidence", id="evidence"),
            classes="row",
        )

    def draw(self) -> None:
        model, run = self.model, self.model.run
        self.query_one("#title", Lines).show(wording.title(model.state, "", self.size.width))
        self.query_one("#summary", Lines).show("\n".join(map(visible, verdict_words.summary_lines(run))))
        found = verdict_words.hypotheses_of(run)
        table, pane = self.query_one("#hypotheses-table", VirtualTable), self.query_one("#hypotheses", Pane)
        pane.display = bool(found)
        pane.styles.height = min(len(found), _MOST_ROWS) + 3
        if found != self._drawn:
            self._drawn = found
            table.show_rows(hypothesis_rows(found) if found else NO_ROWS, cursor_key=table.row or 0)
        self._draw_why()

    def _draw_why(self) -> None:
        run, chosen = self.model.run, self.chosen
        key = actions.BY_ID["decide"].shown_key
        why = verdict_words.why_paragraphs(chosen, key) if chosen is not None else []
        evidence = verdict_words.evidence_paragraphs(run, self.model.state.server) if run is not None else []
        if not self.wide:
            why, evidence = [*why, *([("", "")] if why else []), *evidence], []
        name = f"explanation {self.place_of_chosen}" if chosen is not None else "evidence"
        entitle(self.query_one("#why", Pane), name)
        share = self.size.width // 2 if self.wide else self.size.width
        width = max(share - 6, 20)
        self.query_one("#why-text", Lines).show("\n".join(verdict_words.wrapped(why, width)))
        self.query_one("#evidence-text", Lines).show("\n".join(verdict_words.wrapped(evidence, width)))

    @property
    def chosen(self) -> Mapping[str, Any] | None:
        """The hypothesis under the cursor."""
        found = verdict_words.hypotheses_of(self.model.run)
        row = self.query_one("#hypotheses-table", VirtualTable).row
        if row is None or row >= len(found):
            return found[0] if found else None
        return found[row]

    @property
    def place_of_chosen(self) -> int:
        return (self.query_one("#hypotheses-table", VirtualTable).row or 0) + 1

    def on_virtual_table_highlighted(self, _message: VirtualTable.Highlighted) -> None:
        self._draw_why()
        self.query_one("#why-body", Reading).scroll_home(animate=False)

    def do_decide(self) -> None:
        """Make the experiment that decides the chosen hypothesis, or say why it cannot be made here."""
        step = self._next_step()
        code = str(step.get("code") or "")
        if (reason := verdict_words.not_possible(step)) is not None:
            self._say(f"not possible here: {reason}")
        elif code == "locate":
            self.perform("locate")
        elif code in CATALOGUE:
            self.post_message(Send(cmd.Experiment(names=[code])))
            self.post_message(Perform("experiments"))
        elif code == "run_match":
            self.post_message(Send(cmd.Run(helpers=["match"])))
        elif code == "census":
            self.post_message(Send(cmd.Census()))
            self.post_message(Perform("census"))
        else:
            self._say(verdict_words.how_to(step, "") or "nothing is left to decide")

    def _next_step(self) -> Mapping[str, Any]:
        chosen = self.chosen
        if chosen is not None:
            return {} if chosen.get("grade") == "confirmed" else verdict_words.next_of(chosen)
        verdict = (self.model.run.verdict if self.model.run else None) or {}
        steps = verdict_words.mappings(verdict.get("next"))
        return steps[0] if steps else {}

    def _say(self, text: str) -> None:
        self.app.notify(visible(text), markup=False, timeout=6)


def hypothesis_rows(found: Sequence[Mapping[str, Any]]) -> Rows:
    """The hypotheses in the order of the verdict."""

    def text(row: int, key: str) -> str:
        return str(found[row].get(key) or "?")

    def weight(row: int) -> str:
        pro, contra = (len(verdict_words.mappings(found[row].get(key))) for key in ("for", "against"))
        return f"+{pro} -{contra}"

    def conditions(row: int) -> str:
        return verdict_words.condition_numbers(found[row].get("conditions"))

    columns = (
        Column("number", "#", 2, lambda r: str(r + 1), right=True),
        Column("grade", "grade", 9, lambda r: text(r, "grade")),
        Column("condition", "cond.", 6, conditions),
        Column("evidence", "for", 6, weight),
        Column("text", "explanation", 44, lambda r: text(r, "text"), stretch=120, sentence=True),
    )

    def tone(row: int) -> str:
        return {"confirmed": "warn", "probable": "strong"}.get(text(row, "grade"), "")

    return Rows(columns, len(found), tone=tone)
