"""How the differences of a helper are distributed: a histogram by decade, the tail, and the largest ones.

|Δ logprob|, nats     tokens    share
0, bit-equal             768  75.00 %  ██████████████████
1e-3 to 1e-2             201  19.63 %  ███████████████
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from textual.containers import Horizontal, VerticalScroll
from textual.widget import Widget

from klbench.core.statistics import Bin, Statistics, absolute_difference, statistics
from klbench.core.text import LOGPROB_WIDTH, delta, fit, kl, logprob, magnitude, visible_token
from klbench.core.thresholds import FRACTIONS_PAST
from klbench.tui import charts
from klbench.tui.actions import bindings
from klbench.tui.measurement import Measurement
from klbench.tui.messages import Perform
from klbench.tui.screens.analysis import AnalysisScreen, Subject
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import NO_ROWS, Column, Rows, VirtualTable

_LARGEST = 200


class DistributionScreen(AnalysisScreen):
    """Short windows show the histogram with what lies past each bin, tall ones the largest differences below,
    wide ones the tail beside them."""

    place = "distribution"
    heading = "distribution"
    BINDINGS = bindings("distribution")
    AUTO_FOCUS = "#histogram VerticalScroll"

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Pane(VerticalScroll(Lines(id="histogram-text")), title="tokens by difference", id="histogram")
        yield Horizontal(
            Pane(VirtualTable(id="tail-table"), title="the tail", id="tail"),
            Pane(VirtualTable(id="largest-table"), title="the largest differences", id="largest"),
            classes="row",
        )
        yield Sentences(id="sentences")

    def compute(self, subject: Subject) -> Any:
        measured = subject.measured
        return statistics(measured.columns), tail_of(measured), measured, largest_of(measured, _LARGEST)

    _largest: tuple[Measurement, npt.NDArray[np.int64]] | None = None
    """What the table of the largest differences shows."""

    def show(self, result: Any) -> None:
        numbers, tail, measured, largest = result
        self._largest = measured, largest
        width = self.size.width - 4
        self.query_one("#histogram-text", Lines).show(
            "\n".join(histogram_lines(numbers.histogram, tail, width))
        )
        drawn = width - _NUMBERS_WIDTH >= _LEAST_BAR
        says = "a bar grows with the logarithm of its tokens" if drawn else ""
        entitle(self.query_one("#histogram", Pane), subtitle=says)
        self.query_one("#tail-table", VirtualTable).show_rows(tail_rows(tail))
        self.query_one("#largest-table", VirtualTable).show_rows(largest_rows(measured, largest))
        self.query_one("#sentences", Sentences).say(sentences(numbers))

    def open_row(self, table: VirtualTable, row: int) -> None:
        """Open the request of a large difference, at its token."""
        if table.id != "largest-table" or self._largest is None:
            self.show_cells(table, row)
            return
        measured, largest = self._largest
        start, token = measured.columns.start, int(largest[row])
        self.model.request = int(np.searchsorted(start, token, side="right")) - 1
        self.model.offset = token - int(start[self.model.request])
        self.post_message(Perform("tokens"))

    def show_nothing(self, why: str) -> None:
        self._largest = None
        self.query_one("#histogram-text", Lines).show(" " + why)
        for table in self.query(VirtualTable):
            table.show_rows(NO_ROWS)
        self.query_one("#sentences", Sentences).say([])


_NUMBERS_WIDTH = 63
_LEAST_BAR = 6
"""In fewer cells a bar says nothing; the numbers stand alone."""


def histogram_lines(bins: Sequence[Bin], tail: Tail, width: int) -> list[str]:
    """A head and one line a bin, the empty ones too: its tokens, and what lies past its lower end."""
    total, top = sum(part.tokens for part in bins), max((part.tokens for part in bins), default=0)
    room = width - _NUMBERS_WIDTH
    past = {
        nats: (tokens, requests)
        for (_, nats), (_, tokens, _, requests, _) in zip(FRACTIONS_PAST, tail, strict=True)
    }
    lines = [f" {'|Δ logprob|, nats':<17} {'tokens':>9} {'share':>8}  {'past it':>9} {'requests':>8}"]
    for part in bins:
        share = part.tokens / total if total else 0.0
        shown = charts.bar(charts.logarithmic(part.tokens, top), max(room, 1))
        shared = f"{share:.2%}" if share >= 5e-5 or not part.tokens else f"{share:.0e}"
        known = past.get(part.low_nats)
        more = f"{known[0]:>9} {known[1]:>8}" if known is not None else " " * 18
        line = f" {fit(_range(part), 17)} {part.tokens:>9} {shared:>8}  {more}"
        lines.append((f"{line}  {shown}" if room >= _LEAST_BAR else line).rstrip())
    return lines


def _range(part: Bin) -> str:
    if part.high_nats is None:
        return f"{part.low_nats:.0g} and more"
    if part.high_nats == 0:
        return "0, bit-equal"
    low = "above 0" if part.low_nats == 0 else f"{part.low_nats:.0e}".replace("e-0", "e-")
    return f"{low} to {part.high_nats:.0e}".replace("e-0", "e-").replace("1e+00", "1")


Tail = tuple[tuple[str, int, float, int, float], ...]
"""Threshold in nats, tokens past it, their share, requests with such a token, the worst request's share."""


def tail_of(measured: Measurement) -> Tail:
    """What lies past each threshold; tokens without a finite difference lie past every one."""
    c = measured.columns
    size = absolute_difference(c)
    counts, compared = c.tokens_compared, c.compared
    owner = np.repeat(np.arange(c.requests), np.diff(c.start))
    found = []
    for name, nats in FRACTIONS_PAST:
        past = compared & ((size > nats) | ~np.isfinite(size))
        by_request = np.bincount(owner[past], minlength=c.requests)
        worst = float((by_request / np.maximum(counts, 1)).max(initial=0.0))
        share = float(past[compared].mean()) if compared.any() else 0.0
        found.append((name, int(past.sum()), share, int((by_request > 0).sum()), worst))
    return tuple(found)


def tail_rows(tail: Tail) -> Rows:
    columns = (
        Column("past", "past", 6, lambda r: tail[r][0]),
        Column("tokens", "tokens", 9, lambda r: str(tail[r][1]), right=True),
        Column("share", "share", 9, lambda r: f"{tail[r][2]:.3%}", right=True),
        Column("requests", "requests", 8, lambda r: str(tail[r][3]), right=True),
        Column("worst", "worst request", 13, lambda r: f"{tail[r][4]:.1%}", right=True),
    )
    return Rows(columns, len(tail), tone=lambda r: "" if tail[r][1] else "dim")


def largest_of(measured: Measurement, count: int) -> npt.NDArray[np.int64]:
    """[n] tokens that differ, the largest difference first; what is no finite number stands on top."""
    size = absolute_difference(measured.columns)
    size = np.where(np.isfinite(size), size, np.inf)
    differs = np.flatnonzero(measured.differs)
    if len(differs) > count:
        differs = differs[np.argpartition(-size[differs], count)[:count]]
    order: npt.NDArray[np.int64] = differs[np.lexsort((differs, -size[differs]))].astype(np.int64)
    return order


def largest_rows(measured: Measurement, tokens: npt.NDArray[np.int64]) -> Rows:
    """The tokens of `largest_of` with their places."""
    c = measured.columns
    owner = np.searchsorted(c.start, tokens, side="right") - 1
    offset = tokens - c.start[owner]
    position = c.prompt_len[owner] + offset

    def token(row: int) -> str:
        number = int(c.token_id[tokens[row]])
        text = measured.text_of(number)
        return f"#{number}" if text is None else visible_token(text)

    columns = (
        Column("request", "req", 5, lambda r: str(owner[r]), owner, right=True),
        Column("position", "pos", 6, lambda r: str(position[r]), position, right=True),
        Column("offset", "offset", 6, lambda r: str(offset[r]), offset, right=True),
        Column("token", "token", 12, token, stretch=20),
        Column("decode", "decode", LOGPROB_WIDTH, lambda r: logprob(float(c.decode_nats[tokens[r]])),
               right=True),
        Column("delta", "Δ", 10, lambda r: delta(float(measured.delta_nats[tokens[r]])), right=True),
    )  # fmt: skip
    return Rows(columns, len(tokens))


def sentences(numbers: Statistics) -> list[str]:
    """The mean with its interval, what it hides, and whether enough was measured."""
    if not numbers.tokens:
        return ["Nothing was compared."]
    mean = f"Mean k3 {kl(numbers.mean_nats)} nats"
    if numbers.interval_nats is not None:
        low, high = numbers.interval_nats
        mean += f" ({numbers.level:.0%} of resampled requests: {kl(low)} to {kl(high)})"
    if numbers.nan_count:
        mean = f"{numbers.nan_count} tokens have a logprob that is no number: no mean is given"
    largest = numbers.max_abs_nats
    tail = [f"{name} %: {magnitude(nats)}" for name, nats in numbers.percentiles_nats.items()]
    hidden = f"|Δ| at most {magnitude(largest)}" if largest is not None else "no finite difference"
    return [f"{mean}; {hidden}; percentiles {', '.join(tail)}.", _sentence(numbers.warning)]


def _sentence(text: str | None) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
