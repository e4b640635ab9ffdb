"""The residue table: every modulus against every length, the striking ones on top and marked.

quantity        mod  rest   differ    clean  chance  is
cached tokens     8     3    8 / 8   0 / 24   1e-05  tile
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from textual.widget import Widget

from klbench.core.kl import summarise
from klbench.core.residue_table import QUANTITIES, ResidueLine, residue_table
from klbench.core.residues import CHANCE, LOGPROB_CHUNK
from klbench.session import commands as cmd
from klbench.tui.actions import bindings, key_of
from klbench.tui.messages import Perform, Send
from klbench.tui.screens.analysis import AnalysisScreen, Subject
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import NO_ROWS, Column, Rows, VirtualTable


class ResiduesScreen(AnalysisScreen):
    """The cursor chooses the residue to which `pad` pads the prompts."""

    place = "residues"
    heading = "residues"
    BINDINGS = bindings("residues")
    AUTO_FOCUS = "#residues-table"

    _lines: Sequence[ResidueLine] = ()

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Pane(VirtualTable(id="residues-table"), title="divergent requests by residue", id="residues")
        yield Sentences(id="sentences")

    def compute(self, subject: Subject) -> Any:
        columns = subject.measured.columns
        return residue_table(columns, summarise(columns), subject.server)

    def show(self, result: Any) -> None:
        self._lines = result
        table = self.query_one("#residues-table", VirtualTable)
        table.empty = "No request of this helper diverges, so there is nothing to gather."
        table.show_rows(residue_rows(result) if result else NO_ROWS, cursor_key=0)
        striking = sum(line.striking for line in result)
        words = f"{striking} of {len(result)} striking" if result else ""
        entitle(self.query_one("#residues", Pane), subtitle=words)
        self.query_one("#sentences", Sentences).say(sentences(result))

    def show_nothing(self, why: str) -> None:
        self._lines = ()
        table = self.query_one("#residues-table", VirtualTable)
        table.empty = why
        table.show_rows(NO_ROWS)
        self.query_one("#sentences", Sentences).say([])

    def do_pad(self) -> None:
        """Predict, pad the prompts to the residue under the cursor, and see."""
        row = self.query_one("#residues-table", VirtualTable).row
        if row is None or row >= len(self._lines):
            self.app.notify("no residue is chosen: no request diverges", markup=False, timeout=4)
            return
        line = self._lines[row]
        if line.clean_there is None:
            self.app.notify(
                "prompts are padded to a residue of their length or cached tokens, not of a row",
                markup=False,
                timeout=5,
            )
            return
        name = f"pad:{line.quantity}%{line.modulus}={line.residue}"
        self.post_message(Send(cmd.Experiment(names=[name], helper=self.model.helper.helper)))
        self.post_message(Perform("experiments"))


_SETTINGS = {
    "page_size": "page",
    "chunked_prefill_size": "chunk",
    "sliding_window": "window",
    "conv_width": "conv width",
    "checkpoint_interval": "checkpoint",
}


def kind_of(line: ResidueLine) -> str:
    """What the modulus stands for: a setting of the server, else a tile or chunk of kernels."""
    if line.setting is not None:
        return _SETTINGS.get(line.setting, line.setting.replace("_", " "))
    return "logprobs" if line.modulus == LOGPROB_CHUNK else "tile"


def residue_rows(lines: Sequence[ResidueLine]) -> Rows:
    """The table; sorting by chance puts the striking ones on top."""
    chance = np.asarray([line.chance if line.chance is not None else np.nan for line in lines])

    def clean(line: ResidueLine) -> str:
        return "–" if line.clean_there is None else f"{line.clean_there} / {line.clean}"

    columns = (
        Column("mark", "", 1, lambda r: "◀" if lines[r].striking else ""),
        Column("quantity", "quantity", 19, lambda r: QUANTITIES[lines[r].quantity]),
        Column("modulus", "mod", 5, lambda r: str(lines[r].modulus),
               np.asarray([line.modulus for line in lines]), right=True),
        Column("residue", "rest", 5, lambda r: str(lines[r].residue),
               np.asarray([line.residue for line in lines]), right=True),
        Column("divergent", "differ", 7, lambda r: f"{lines[r].divergent_there} / {lines[r].divergent}",
               np.asarray([line.divergent_there for line in lines]), right=True, descends=True),
        Column("clean", "clean", 7, lambda r: clean(lines[r]), right=True),
        Column("chance", "chance", 6, lambda r: f"{chance[r]:.0e}" if lines[r].striking else "–", chance,
               right=True),
        Column("setting", "is", 10, lambda r: kind_of(lines[r]), stretch=14),
    )  # fmt: skip
    return Rows(columns, len(lines), tone=lambda r: "strong" if lines[r].striking else "")


def sentences(lines: Sequence[ResidueLine]) -> list[str]:
    """The most striking line, and how to test it."""
    if not lines:
        return []
    top = lines[0]
    if not top.striking and not top.clean:
        return [
            "Every request differs, so there is no clean one that a length could set them apart from; their "
            "rows have no residue in common."
        ]
    if not top.striking:
        return [
            f"No residue is striking: chance would part {top.divergent} divergent from {top.clean} clean "
            f"requests like this in more than {CHANCE:.0%} of runs, all that was tried allowed for."
        ]
    who = "clean" if top.of_clean else "divergent"
    what = f"{QUANTITIES[top.quantity]} = {top.residue} mod {top.modulus}"
    there = f"{top.divergent_there} of {top.divergent} divergent requests"
    if top.clean_there is not None:
        there += f" and {top.clean_there} of {top.clean} clean ones"
    return [
        f"{who.capitalize()} requests gather at {what}: {there} lie there (by chance: {top.chance:.0e}).",
        f"Predict and see: {key_of('pad')} pads the prompts to the residue under the cursor."
        if top.clean_there is not None
        else "A constant row is the edge of a tile, a window or a split.",
    ]
