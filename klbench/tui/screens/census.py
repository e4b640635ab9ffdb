"""The census: every stateless operator called again with 1, 2, 3, ... rows; where its bits change.

operator                       1 2 3 4 8 16 32 64 127  first  ulps
layers.1.self_attn.o_proj      · · · · ·  ·  ·  ≠   ≠     64    22
layers.0.self_attn.qkv_proj    · · · · ·  ·  ·  ·   ·      –     –
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from textual.widget import Widget

from klbench.core.text import cell_width, counted, elapsed, shortened, visible
from klbench.session import commands as cmd
from klbench.session.state import CensusState
from klbench.tui import wording
from klbench.tui.actions import bindings, key_of
from klbench.tui.messages import Send
from klbench.tui.screens.base import WorkScreen
from klbench.tui.verdict_words import mappings
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import NO_ROWS, Column, Rows, VirtualTable


class CensusScreen(WorkScreen):
    """The latest census; the operators that do most damage first."""

    place = "census"
    BINDINGS = bindings("census")
    AUTO_FOCUS = "#census-table"

    _drawn: CensusState | None = None

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        empty = "No census was taken: which operators depend on the row count?\n"
        empty += f"{key_of('take_census')} takes one, on a live server."
        yield Pane(VirtualTable(empty=empty, id="census-table"), title="operators × M", id="census")
        yield Sentences(id="sentences")

    def draw(self) -> None:
        taken, job = self.model.state.latest_census, self.model.state.job
        words = ["klbench", "census"]
        words += [f"{taken.result.get('rows')} rows", elapsed(taken.elapsed_s)] if taken is not None else []
        self.query_one("#title", Lines).show(
            shortened(visible(" " + " · ".join(words)), self.size.width, more=" · …")
        )
        table = self.query_one("#census-table", VirtualTable)
        if taken is not None and taken is not self._drawn:
            self._drawn = taken
            operators, tried = mappings(taken.result.get("operators")), tried_of(taken.result)
            table.show_rows(census_rows(operators, tried) if operators else NO_ROWS, cursor_key=0)
        said = sentences(taken.result) if taken is not None else []
        if job is not None and job.kind == "census":
            said = [wording.job(job, self.model.now), *said]
        self.query_one("#sentences", Sentences).say(said)
        summary = taken.result.get("summary") if taken is not None else None
        if isinstance(summary, Mapping):
            depend = counted(int(summary.get("not_invariant") or 0), "depends", "depend")
            entitle(self.query_one("#census", Pane), subtitle=f"{depend} on M")

    def do_take_census(self) -> None:
        self.post_message(Send(cmd.Census()))

    def do_cancel(self) -> None:
        self.post_message(Send(cmd.Cancel()))


def tried_of(result: Mapping[str, Any]) -> list[int]:
    """Every M that was tried."""
    tried = result.get("tried_M")
    return [m for m in tried if isinstance(m, int)] if isinstance(tried, list) else []


def census_rows(operators: Sequence[Mapping[str, Any]], tried: Sequence[int]) -> Rows:
    """One line an operator, a mark for each M."""

    def numbers(row: int, key: str) -> set[int]:
        items = operators[row].get(key)
        return {item for item in items if isinstance(item, int)} if isinstance(items, list) else set()

    def marks(row: int) -> str:
        own, changed = numbers(row, "tried_M"), numbers(row, "changed_M")
        cells = ["≠" if m in changed else "·" if m in own else " " for m in tried]
        return " ".join(f"{cell:>{len(str(m))}}" for cell, m in zip(cells, tried, strict=True))

    def name(row: int) -> str:
        call = operators[row].get("call")
        module = str(operators[row].get("module", "?")).removeprefix("model.")
        return module + (f" (call {call})" if call else "")

    def number(row: int, key: str) -> str:
        value = operators[row].get(key)
        return "–" if value is None else str(value)

    def status(row: int) -> str:
        entry = operators[row]
        words = str(entry.get("status", "?")).replace("_", " ")
        return f"{words}: {entry['reason']}" if entry.get("reason") else words

    def sortable(key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        values = [entry.get(key) for entry in operators]
        return np.asarray([v if isinstance(v, int) else np.nan for v in values], dtype=np.float64)

    heads = " ".join(map(str, tried))
    longest = max((cell_width(visible(name(row))) for row in range(len(operators))), default=0)
    columns = (
        Column("module", "operator", 24, name, stretch=min(max(longest - 24, 0), 50)),
        Column("marks", heads, max(len(heads), 1), marks),
        Column("first", "first", 5, lambda r: number(r, "first_M"), sortable("first_M"), right=True),
        Column("ulps", "ulps", 4, lambda r: number(r, "ulp_max"), sortable("ulp_max"), right=True,
               descends=True),
        Column("status", "status", 14, status, optional=1, stretch=80, sentence=True),
    )  # fmt: skip
    tones = {"not_invariant": "warn", "invariant": "", "stateful": "dim", "skipped": "dim"}
    return Rows(columns, len(operators), tone=lambda r: tones.get(str(operators[r].get("status")), "strong"))


def sentences(result: Mapping[str, Any]) -> list[str]:
    """What depends on the row count, what does not, and what could not be called again."""
    summary = result.get("summary")
    if not isinstance(summary, Mapping):
        return []
    changed, kept = int(summary.get("not_invariant") or 0), int(summary.get("invariant") or 0)
    left = sum(int(summary.get(key) or 0) for key in ("not_repeatable", "error", "skipped", "stateful"))
    said = [
        f"{counted(changed, 'operator changes', 'operators change')} a row's bits with the number of rows "
        f"(condition 1); {counted(kept, 'keeps', 'keep')} them."
    ]
    if left:
        said.append(
            f"{counted(left, 'was', 'were')} not called again, having a state or failing alone. Attention "
            f"and recurrent operators need the equal-M experiment: press {key_of('experiments')}."
        )
    return said
