"""Where the differences lie: by absolute position, by offset, by distance from the cached prefix.

     100% ███▇
          ████
       0% ████▁▁····
    first 2  1
          268         284              300

A column is the part of its tokens that differs; the digits below count requests that begin to differ there.
The lower border says the numbers of the column under the cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from textual.containers import VerticalScroll
from textual.widget import Widget

from klbench.core.places import AXES, Axis, Profile, profile_of, sentence
from klbench.core.text import counted
from klbench.tui import charts
from klbench.tui.actions import bindings
from klbench.tui.screens.analysis import AnalysisScreen, Subject
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle

_LABEL = 7
_BORDERS = 3
_WIDEST = 6
"""Cells of a column: wider ones would look like one block."""
_TITLES: dict[Axis, str] = {
    "position": "by token position",
    "offset": "by offset in the generation",
    "from_cached": "by tokens after the cached prefix",
}


class PositionsScreen(AnalysisScreen):
    """One chart an axis; short windows leave the last one out, whose sentence stays."""

    place = "positions"
    heading = "positions"
    BINDINGS = bindings("positions")
    AUTO_FOCUS = ""

    _column: int | None = None
    """The column of the cursor in every chart; None for the fullest one of each."""
    _profiles: Mapping[Axis, Profile | None] = {}

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        for axis in AXES:
            body = VerticalScroll(Lines(id=f"{axis}-text"), can_focus=False)
            yield Pane(body, title=_TITLES[axis], id=f"{axis}-pane", classes="chart")
        yield Sentences(id="sentences")

    def compute(self, subject: Subject) -> Any:
        bins = max(subject.width - _LABEL - _BORDERS, 10)
        return {axis: profile_of(subject.measured.columns, axis, bins) for axis in AXES}

    def show(self, result: Any) -> None:
        self._profiles = result
        self._draw_charts()
        said = [sentence(profile) for axis in AXES if (profile := result[axis]) is not None]
        self.query_one("#sentences", Sentences).say(
            [words[:1].upper() + words[1:] + "." for words in dict.fromkeys(said)]
        )

    def _draw_charts(self) -> None:
        height = self._chart_height()
        for axis, profile in self._profiles.items():
            lines, under = [" no request restored a prefix"], ""
            if profile is not None:
                column = self._at(profile)
                room = self.size.width - _LABEL - _BORDERS
                lines, under = chart_lines(profile, height, column, room), column_words(profile, column)
            self.query_one(f"#{axis}-text", Lines).show("\n".join(lines))
            entitle(self.query_one(f"#{axis}-pane", Pane), subtitle=under)

    def _at(self, profile: Profile) -> int:
        """The column of the cursor in a chart."""
        if self._column is None:
            return int(np.argmax(np.nan_to_num(profile.share, nan=-1.0)))
        return min(self._column, len(profile.share) - 1)

    def do_column_left(self) -> None:
        self._move(-1)

    def do_column_right(self) -> None:
        self._move(1)

    def _move(self, step: int) -> None:
        charts_shown = [profile for profile in self._profiles.values() if profile is not None]
        if charts_shown:
            most = max(len(profile.share) for profile in charts_shown) - 1
            self._column = min(max(self._at(charts_shown[0]) + step, 0), most)
            self._draw_charts()

    def show_nothing(self, why: str) -> None:
        for axis in AXES:
            self.query_one(f"#{axis}-text", Lines).show(" " + why)
        self.query_one("#sentences", Sentences).say([])

    def _chart_height(self) -> int:
        """Lines of a chart's columns: two charts in a short window, three in a tall one."""
        charts_shown, around = (3, 9) if self.has_class("-tall") else (2, 7)
        return max((self.size.height - around) // charts_shown - 4, 2)


def column_words(profile: Profile, column: int) -> str:
    """`at 268 to 271: 19 of 20 tokens differ, 2 requests begin there`."""
    low, high = int(profile.edges[column]), int(profile.edges[column + 1]) - 1
    where = f"at {low}" if low == high else f"at {low} to {high}"
    if not (compared := int(profile.compared[column])):
        return f"{where}: nothing was compared"
    words = (
        f"{where}: {int(profile.divergent[column])} of {counted(compared, 'token differs', 'tokens differ')}"
    )
    begin = int(profile.first[column])
    return words + (f", {counted(begin, 'request begins', 'requests begin')} there" if begin else "")


def chart_lines(profile: Profile, height: int, column: int, room: int = 0) -> list[str]:
    """The columns with their scale, where divergences begin, and the axis; ^ or v marks `column`. Few columns
    are drawn wide, so that they fill `room` cells as far as whole ones can."""
    cells = min(max(room // max(len(profile.share), 1), 1), _WIDEST)
    body = [charts.wide(line, cells) for line in charts.columns(profile.share, height)]
    labels = ["100%", *[""] * (height - 2), "0%"]
    lines = [f" {label:>{_LABEL - 2}} {line}".rstrip() for label, line in zip(labels, body, strict=True)]
    lines.append(f" {'first':>{_LABEL - 2}} {charts.counts(profile.first.tolist(), cells)}".rstrip())
    lines.append(" " * _LABEL + charts.axis(profile.edges, cells=cells))
    # Under the column where no number of the axis stands, else over it.
    place = _LABEL + column * cells
    line, mark = (-1, "^") if not lines[-1][place : place + 1].strip() else (0, "v")
    text = lines[line].ljust(place + 1)
    lines[line] = text[:place] + mark + text[place + 1 :]
    return lines
