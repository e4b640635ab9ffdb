"""The experiments as a matrix: which outcome each had, which it can have, what it costs, what it means.

         experiment           same differs moved gone  state         about
         repeats               ●      ·                same bits      0:08
     ▌ ▸ wide_restore                 ·           ·    not made       0:02
         page_size             ·             ●    ·    moved          1:20
         graphs                                        not possible

Enter makes the experiment under the cursor, a plan is made of those that are marked. Relaunches that take
more than a minute are asked about before they are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.widget import Widget

from klbench.core.text import elapsed, shortened, visible
from klbench.session import commands as cmd
from klbench.tui import experiment_words as words
from klbench.tui.actions import bindings, key_of
from klbench.tui.messages import Send
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.verdict_words import wrapped
from klbench.tui.widgets.reading import Reading, reading
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import Column, Rows, VirtualTable


class ExperimentsScreen(WorkScreen):
    """The matrix, and the reading of the experiment under the cursor."""

    place = "experiments"
    BINDINGS = bindings("experiments")
    AUTO_FOCUS = "#matrix-table"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.marked: set[str] = set()
        self._matrix: list[words.MatrixLine] = []
        self._drawn: tuple[object, ...] | None = None

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Pane(VirtualTable(id="matrix-table"), title="experiments", id="matrix")
        yield Pane(reading("reading-text", id="reading-body"), title="reading", id="reading")
        yield Sentences(id="sentences")

    def draw(self) -> None:
        state = self.model.state
        helper = words.helper_to_try(state)
        run = f"run {state.run.number}" if state.run is not None else "no run yet"
        title = f" klbench · experiments · {helper} · {run}"
        self.query_one("#title", Lines).show(shortened(visible(title), self.size.width, more=" · …"))
        self._matrix = words.matrix(state)
        drawn = (*self._matrix, *sorted(self.marked))
        if drawn != self._drawn:
            self._drawn = drawn
            table = self.query_one("#matrix-table", VirtualTable)
            next_one = words.proposed(state)
            names = [line.name for line in self._matrix]
            here = names.index(next_one) if next_one is not None and table.row is None else table.row or 0
            table.show_rows(matrix_rows(self._matrix, self.marked, next_one), cursor_key=here)
        made = sum(line.made is not None and line.state != "not possible" for line in self._matrix)
        entitle(self.query_one("#matrix", Pane), subtitle=f"{made} of {len(self._matrix)} made")
        said = [*words.job_lines(state), words.plan_line(state, self.marked)]
        self.query_one("#sentences", Sentences).say([text[:1].upper() + text[1:] for text in said])
        self._draw_reading()

    def _draw_reading(self) -> None:
        line = self.chosen
        if line is None:
            return
        entitle(self.query_one("#reading", Pane), line.name)
        paragraphs = words.reading(line, self.model.state.experiment_plan)
        text = "\n".join(wrapped(paragraphs, max(self.size.width - 6, 20)))
        self.query_one("#reading-text", Lines).show(text)

    @property
    def chosen(self) -> words.MatrixLine | None:
        row = self.query_one("#matrix-table", VirtualTable).row
        return self._matrix[row] if row is not None and row < len(self._matrix) else None

    def on_virtual_table_highlighted(self, _message: VirtualTable.Highlighted) -> None:
        self._draw_reading()
        self.query_one("#reading-body", Reading).scroll_home(animate=False)

    def open_row(self, _table: VirtualTable, _row: int) -> None:
        self.perform("make")

    def do_make(self) -> None:
        """Make the experiment under the cursor."""
        if (line := self.chosen) is not None:
            self._make([line.name])

    def do_mark_experiment(self) -> None:
        """Mark or unmark the experiment under the cursor."""
        line = self.chosen
        if line is None:
            return
        if line.impossible is not None:
            self._say(f"{line.name} is not possible here: {line.impossible}")
        else:
            self.marked ^= {line.name}
            self.show_model()

    def do_make_plan(self) -> None:
        """Make all marked experiments, each configuration started once."""
        if not self.marked:
            self._say(f"no experiment is marked: {key_of('mark_experiment')} marks the one under the cursor")
            return
        names = [line.name for line in self._matrix if line.name in self.marked]
        self.marked.clear()
        self._make(names)

    def _make(self, names: Sequence[str]) -> None:
        impossible = {line.name: line.impossible for line in self._matrix if line.impossible is not None}
        possible = [name for name in names if name not in impossible]
        if not possible:
            self._say(f"{names[0]} is not possible here: {impossible[names[0]]}")
            return
        self.post_message(Send(cmd.Experiment(names=possible)))
        self.show_model()

    def _say(self, text: str) -> None:
        self.app.notify(visible(text), markup=False, timeout=6)

    def do_cancel(self) -> None:
        self.post_message(Send(cmd.Cancel()))

    def do_agree(self) -> None:
        self.post_message(Send(cmd.Confirm()))


def matrix_rows(lines: Sequence[words.MatrixLine], marked: set[str], next_one: str | None) -> Rows:
    """The matrix as a table: + marks what is marked, ▸ what the verdict proposes."""

    def mark(row: int) -> str:
        name = lines[row].name
        return "+" if name in marked else "▸" if name == next_one else ""

    def about(row: int) -> str:
        estimate = lines[row].estimate_s
        if lines[row].impossible is not None or estimate is None:
            return ""
        return elapsed(estimate)

    def found(row: int) -> str:
        made = lines[row].made
        if lines[row].impossible is not None:
            return str(lines[row].impossible)
        return str(made.result.get("text") or "") if made is not None else ""

    outcomes = [
        Column(outcome, title, len(title), lambda r, outcome=outcome: lines[r].cell(outcome))  # type: ignore[misc]
        for outcome, title in words.OUTCOMES
    ]
    columns = (
        Column("mark", "", 1, mark),
        Column("name", "experiment", 19, lambda r: lines[r].name),
        *outcomes,
        Column("state", "state", 12, lambda r: lines[r].state),
        Column("about", "about", 6, about, right=True),
        Column("runs", "runs", 4, lambda r: str(lines[r].runs or ""), right=True, optional=1),
        Column("launches", "starts", 6, lambda r: str(lines[r].launches or ""), right=True, optional=2),
        Column("found", "found", 20, found, optional=3, stretch=160, sentence=True),
    )

    def tone(row: int) -> str:
        line = lines[row]
        if line.impossible is not None:
            return "dim"
        return "strong" if line.made is not None or line.state == "running" else ""

    return Rows(columns, len(lines), tone=tone)
