"""What the plots of a report show, as small data, and the SVG that draws it.

Difference by position: the largest |prefill - decode| of each stretch of absolute positions, and how many of
its tokens diverge. Histogram: tokens by the decade of that difference. Map: layers by rows around an origin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from klbench.core.columns import HelperColumns
from klbench.core.kl import divergent
from klbench.core.text import magnitude, visible

BINS = 96
_DECADES = tuple(range(-9, 2))
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 860, 170, 70, 26, 12
_MOST_COLUMNS = 160


@dataclass(frozen=True, slots=True)
class PositionBin:
    """Tokens at absolute positions first .. last: how many, how many diverge, the largest difference."""

    first: int
    last: int
    tokens: int
    divergent: int
    max_abs_nats: float


@dataclass(frozen=True, slots=True)
class HelperPlots:
    """`histogram`: [from_nats, tokens] by decade; equal and not finite tokens are counted apart."""

    bins: list[PositionBin]
    histogram: list[tuple[float, int]]
    equal_tokens: int
    not_finite: int


def helper_plots(columns: HelperColumns) -> HelperPlots:
    """The plots' data of one helper: of its compared tokens."""
    counts, compared = np.diff(columns.start), columns.compared
    owner = np.repeat(np.arange(columns.requests), counts)
    offset = np.arange(len(columns.token_id)) - np.repeat(columns.start[:-1], counts)
    position = (columns.prompt_len[owner] + offset)[compared]
    prefill, decode = columns.prefill_nats[compared], columns.decode_nats[compared]
    finite = np.isfinite(decode) & np.isfinite(prefill)
    difference = np.zeros(len(position))
    np.subtract(prefill, decode, out=difference, where=finite, dtype=np.float64)
    difference = np.abs(difference)
    dirty = divergent(columns)[compared]
    equal = int(np.count_nonzero(~dirty))
    moved = difference[dirty & finite]
    decade = np.clip(np.floor(np.log10(np.maximum(moved, 1e-300))), _DECADES[0], _DECADES[-1]).astype(int)
    histogram = [(10.0**power, int(np.count_nonzero(decade == power))) for power in _DECADES]
    return HelperPlots(_bins(position, difference, dirty), histogram, equal, int(np.count_nonzero(~finite)))


def _bins(position: Any, difference: Any, dirty: Any) -> list[PositionBin]:
    if not len(position):
        return []
    first, last = int(position.min()), int(position.max())
    width = max(1, math.ceil((last - first + 1) / BINS))
    index = (position - first) // width
    count = int(index.max()) + 1
    tokens = np.bincount(index, minlength=count)
    marked = np.bincount(index[dirty], minlength=count)
    largest = np.zeros(count)
    np.maximum.at(largest, index, difference)
    return [
        PositionBin(
            first + number * width,
            min(last, first + (number + 1) * width - 1),
            int(tokens[number]),
            int(marked[number]),
            float(largest[number]),
        )
        for number in range(count)
    ]


# Drawing. Numbers only; what could be text from outside is escaped.


def position_svg(plots: HelperPlots) -> str:
    """Bars of the largest difference by position, on a logarithmic scale; a low bar of calm is bit-equal."""
    bins = plots.bins
    values = [part.max_abs_nats for part in bins if part.max_abs_nats > 0]
    low, high = _range(values)
    step = (_WIDTH - _LEFT) / max(1, len(bins))
    shapes = []
    for number, part in enumerate(bins):
        x = _LEFT + number * step
        title = (
            f"positions {part.first} to {part.last}: {part.divergent} of {part.tokens} tokens diverge, "
            f"at most {magnitude(part.max_abs_nats)} nats"
        )
        if part.divergent:
            height = max(3.0, _scaled(part.max_abs_nats, low, high) * (_HEIGHT - _BOTTOM - _TOP))
            shapes.append(_rect(x, _HEIGHT - _BOTTOM - height, step * 0.9, height, "mark", title))
        elif part.tokens:
            shapes.append(_rect(x, _HEIGHT - _BOTTOM - 2, step * 0.9, 2, "calm", title))
    labels = []
    if values:
        labels = [_label(4, _TOP + 10, f"{high:.0e}"), _label(4, _HEIGHT - _BOTTOM, f"{low:.0e}")]
    if bins:
        labels += [
            _label(_LEFT, _HEIGHT - 8, str(bins[0].first)),
            _label(_WIDTH - 60, _HEIGHT - 8, str(bins[-1].last)),
        ]
    return _svg(_HEIGHT, "largest difference by position", shapes + labels)


def histogram_svg(plots: HelperPlots) -> str:
    """Tokens by the decade of their difference, on a logarithmic scale; the equal ones apart."""
    columns = [("equal", plots.equal_tokens, "calm")]
    columns += [(f"{nats:.0e}", count, "mark") for nats, count in plots.histogram]
    columns.append(("no number", plots.not_finite, "mark"))
    most = max((count for _, count, _ in columns), default=0)
    step = (_WIDTH - _LEFT) / len(columns)
    parts = []
    for number, (name, count, kind) in enumerate(columns):
        x = _LEFT + number * step
        height = 0.0 if not count else max(3.0, _share(count, most) * (_HEIGHT - _BOTTOM - _TOP - 12))
        top = _HEIGHT - _BOTTOM - height
        parts += [
            _rect(x, top, step * 0.8, height, kind, f"{name}: {count} tokens"),
            _label(x, _HEIGHT - 8, name),
            _label(x, top - 3, str(count)),
        ]
    return _svg(_HEIGHT, "tokens by size of their difference", parts)


_CELLS = {0: "calm", 1: "half", 2: "mark", 3: "origin", -1: "none"}
_STATES = {0: "equal", 1: "state differs", 2: "differs", 3: "origin", -1: "not observed"}


def map_svg(drawn: Mapping[str, Any]) -> str | None:
    """The layers x rows map of a located origin; None where it is not what it should be."""
    layers, positions, cells = drawn.get("layers"), drawn.get("positions"), drawn.get("cells")
    if not (isinstance(layers, list) and isinstance(positions, list) and isinstance(cells, list)):
        return None
    if len(cells) != len(layers) or not positions or len(layers) > 512:
        return None
    if any(not isinstance(row, list) or len(row) != len(positions) for row in cells):
        return None
    groups = _groups(len(positions))
    step, line = (_WIDTH - _LEFT - 40) / len(groups), 14 if len(layers) <= 64 else 6
    parts = []
    for number, (layer, row) in enumerate(zip(layers, cells, strict=True)):
        y = 4 + number * line
        parts.append(_label(4, y + line - 3, str(layer)[:10]))
        for column, group in enumerate(groups):
            # An origin must not vanish among its neighbours.
            state = max((cell for cell in row[group] if isinstance(cell, int)), default=-1)
            title = f"layer {layer}, rows {positions[group.start]} to {positions[group.stop - 1]}: "
            title += _STATES.get(state, "?")
            parts.append(
                _rect(_LEFT + 40 + column * step, y, step * 0.94, line - 2, _CELLS.get(state, "none"), title)
            )
    height = len(layers) * line + 24
    parts.append(_label(_LEFT + 40, height - 6, f"row {positions[0]}"))
    parts.append(_label(_WIDTH - 90, height - 6, f"row {positions[-1]}"))
    return _svg(height, "layers by rows", parts)


def _groups(count: int) -> list[slice]:
    width = max(1, math.ceil(count / _MOST_COLUMNS))
    return [slice(start, min(count, start + width)) for start in range(0, count, width)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 1e-9, 1.0
    low = 10.0 ** math.floor(math.log10(min(values)))
    high = 10.0 ** math.ceil(math.log10(max(values)))
    return low, max(high, low * 10)


def _scaled(value: float, low: float, high: float) -> float:
    if value <= 0:
        return 0.0
    return min(1.0, max(0.0, math.log10(value / low) / math.log10(high / low)))


def _share(count: int, most: int) -> float:
    return math.log10(1 + count) / math.log10(1 + most)


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{escape(visible(title))}</title></rect>"
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{escape(visible(text))}</text>'


def _svg(height: int, name: str, parts: Sequence[str]) -> str:
    base = (
        f'<line class="axis" x1="{_LEFT}" y1="{height - _BOTTOM}" x2="{_WIDTH}" y2="{height - _BOTTOM}"/>'
        if height == _HEIGHT
        else ""
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(name)}" '
        f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">{base}{"".join(parts)}</svg>'
    )
