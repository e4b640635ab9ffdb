"""The tables of the workbench: which columns a thing has, as text and as the raw values that sort it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from klbench.core.text import LOGPROB_WIDTH, delta, kl, logprob, magnitude, size, visible, visible_token
from klbench.session.state import CallLine, HelperState
from klbench.session.survey import SessionSummary
from klbench.tui.filtering import search_by_value
from klbench.tui.measurement import Measurement
from klbench.tui.widgets.virtual_table import Column, Rows
from klbench.tui.wording import TONES

_DASH = "–"
_PATH = re.compile(r"https?://[^/\s'\"]+/([^\s'\"?]+)")
_MODULE = re.compile(r"\s-m\s+(\S+)")
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?(layers\.\d+\.)")


def helper_rows(helpers: Sequence[HelperState], heading: str, lines: Sequence[str]) -> Rows:
    """One line a helper; it is composed, for a running helper has other columns than an ended one."""
    column = Column("helper", heading, 40, lambda row: lines[row], stretch=200)
    return Rows((column,), len(helpers), tone=lambda row: TONES.get(helpers[row].status, ""))


def request_rows(measured: Measurement, modulus: int = 0) -> Rows:
    """The requests of a helper; with a `modulus`, the residue of the cached tokens too."""
    c = measured.columns
    compared, differing, first = measured.compared, measured.differing, measured.first_offset
    position = np.where(first >= 0, c.prompt_len + first, -1)
    fraction = differing / np.maximum(compared, 1)

    def share(row: int) -> str:
        return "dropped" if c.dropped[row] else f"{differing[row]}/{compared[row]}"

    def or_dash(value: int) -> str:
        return str(value) if value >= 0 else _DASH

    def number(value: float, row: int, show: Callable[[float], str] = kl) -> str:
        return show(float(value)) if compared[row] else _DASH

    columns = [
        Column("request", "#", 4, str, np.arange(c.requests), right=True),
        Column("prompt", "prompt", 6, lambda r: str(c.prompt_len[r]), c.prompt_len, right=True, optional=1),
        Column("cached", "cached", 6, lambda r: str(c.cached_generation[r]), c.cached_generation, right=True),
        Column("kl", "kl", 7, lambda r: number(measured.kl_nats[r], r), measured.kl_nats, descends=True),
        Column("max", "max |Δ|", 7, lambda r: number(measured.max_abs_nats[r], r, magnitude),
               measured.max_abs_nats, descends=True),
        Column("differ", "differ", 7, share, fraction, right=True, descends=True, compared=differing),
        Column("first", "first", 5, lambda r: or_dash(int(first[r])), _last_if_negative(first), right=True),
        Column("position", "pos", 5, lambda r: or_dash(int(position[r])), _last_if_negative(position),
               right=True, optional=2, names=("position",)),
        Column("output", "output", 8, lambda r: str(c.output_len[r]), c.output_len, right=True, optional=3),
        Column("scoring", "cached (scoring)", 16, lambda r: str(c.cached_scoring[r]), c.cached_scoring,
               right=True, optional=4),
    ]  # fmt: skip
    if modulus > 1:
        residue = c.cached_generation % modulus
        title = f"mod {modulus}"
        columns.insert(
            3, Column("residue", title, max(len(title), 5), lambda r: str(residue[r]), residue, right=True)
        )

    def tone(row: int) -> str:
        return "strong" if differing[row] else "dim" if c.dropped[row] else ""

    return Rows(tuple(columns), c.requests, tone=tone)


def token_rows(measured: Measurement, request: int) -> Rows:
    """The generated tokens of a request, by offset."""
    c, where = measured.columns, measured.columns.tokens_of(request)
    ids, decode, prefill = c.token_id[where], c.decode_nats[where], c.prefill_nats[where]
    deltas, differs = measured.delta_nats[where], measured.differs[where]
    first = int(measured.first_offset[request])
    magnitudes = np.where(np.isnan(deltas), -1.0, np.abs(deltas))
    largest = int(np.argmax(magnitudes)) if len(ids) and first >= 0 else -1
    lost = bool(c.lost[request])
    k3 = measured.k3_nats[where]
    offsets, start = np.arange(len(ids), dtype=np.int64), int(c.prompt_len[request])

    def token(row: int) -> str:
        text = measured.text_of(int(ids[row]))
        return f"#{ids[row]}" if text is None else visible_token(text)

    def text_of(token_id: int) -> str:
        return measured.text_of(token_id) or f"#{token_id}"

    def known(row: int, shown: str) -> str:
        return _DASH if lost and row == 0 else shown

    def note(row: int) -> str:
        if lost and row == 0:
            return "lost"
        if np.isnan(deltas[row]) or np.isinf(deltas[row]):
            return "not finite"
        return "first" if row == first else "max" if row == largest else "differs" if differs[row] else ""

    columns = (
        Column("position", "pos", 6, lambda r: str(start + r), offsets + start, right=True),
        Column("offset", "offset", 6, str, offsets, right=True, optional=2),
        Column("token", "token", 10, token, stretch=30, names=("tok",),
               search=search_by_value(ids, text_of)),
        Column("decode", "decode", LOGPROB_WIDTH, lambda r: known(r, logprob(float(decode[r]))), decode,
               right=True),
        Column("prefill", "prefill", LOGPROB_WIDTH, lambda r: logprob(float(prefill[r])), prefill,
               right=True),
        Column("delta", "Δ", 10, lambda r: known(r, _delta(float(deltas[r]), bool(differs[r]))),
               np.abs(deltas), right=True, descends=True, names=("d",)),
        Column("note", "note", 7, note, optional=1),
        Column("k3", "k3", 8, lambda r: known(r, kl(float(k3[r]))), k3, optional=3, descends=True,
               names=("kl",)),
        Column("id", "id", 8, lambda r: str(ids[r]), ids, right=True, optional=4),
    )  # fmt: skip
    return Rows(columns, len(ids), tone=lambda row: "strong" if differs[row] else "")


def operator_rows(around: Sequence[Mapping[str, Any]]) -> Rows:
    """The operators around an origin, in the order in which they ran."""

    def text(row: int, key: str) -> str:
        value = around[row].get(key)
        return "" if value in (None, "none") else visible(str(value)).replace("_", " ")

    paths = [visible(str(item.get("module", "?"))) for item in around]
    own = next(
        (_LAYER.match(path) for item, path in zip(around, paths, strict=True) if item.get("origin")), None
    )

    def module(row: int) -> str:
        """The path without what all operators of a layer share; the layer stays where it is another one."""
        layer = _LAYER.match(paths[row])
        if layer is None:
            return paths[row]
        same = own is None or layer[0] == own[0]
        return ("" if same else layer[1]) + paths[row][layer.end() :]

    def ulp(row: int) -> str:
        value = around[row].get("ulp_max")
        return _DASH if value is None else visible(str(value))

    def operator(row: int) -> str:
        return f"{'◉' if around[row].get('origin') else ' '} {module(row)}"

    def longest(key: str, least: int) -> int:
        return min(max([least, *(len(text(row, key)) for row in range(len(around)))]), 16)

    width = max((len(operator(row)) for row in range(len(around))), default=10)
    columns = (
        Column("module", "  operator", min(max(width, 20), 26), operator, stretch=34),
        Column("inputs", "inputs", longest("inputs", 8), lambda r: text(r, "inputs")),
        Column("state", "state read", longest("state", 10), lambda r: text(r, "state")),
        Column("output", "output", longest("output", 8), lambda r: text(r, "output")),
        Column("ulp", "ulp", 5, ulp, right=True, optional=1),
    )

    def tone(row: int) -> str:
        if around[row].get("origin"):
            return "warn"
        return "strong" if str(around[row].get("output")) == "differs" else ""

    return Rows(columns, len(around), tone=tone)


def session_rows(summaries: Sequence[SessionSummary], age: Sequence[str]) -> Rows:
    """Known sessions, the newest first; `age` is how long ago each was made, in words."""
    created = np.asarray([summary.created_at for summary in summaries])
    sizes = np.asarray([summary.size_bytes for summary in summaries])

    def found(row: int) -> str:
        summary = summaries[row]
        return summary.brief or summary.found or summary.doing or "nothing measured"

    columns = (
        Column("age", "made", 10, lambda r: age[r], -created),
        Column("label", "what", 22, lambda r: summaries[r].label, stretch=8),
        Column("status", "state", 8, lambda r: summaries[r].status),
        Column("size", "size", 8, lambda r: size(int(sizes[r])), sizes, right=True, optional=1),
        Column("found", "found", 18, found, stretch=88, sentence=True),
    )
    return Rows(columns, len(summaries), tone=lambda r: "" if summaries[r].status == "ended" else "strong")


def call_rows(calls: Sequence[CallLine], times: Sequence[str]) -> Rows:
    """What the runner called, each a line that can be copied and repeated."""
    columns = (
        Column("at", "at", 8, lambda r: times[r], np.arange(len(calls))),
        Column("took", "took", 7, lambda r: f"{calls[r].elapsed_s:.2f} s",
               np.asarray([call.elapsed_s for call in calls]), right=True, descends=True),
        Column("outcome", "outcome", 13, lambda r: _outcome(calls[r].outcome)),
        Column("call", "call", 13, lambda r: called(calls[r].line), stretch=7),
        Column("line", "line", 400, lambda r: calls[r].line, copied_alone=True),
    )  # fmt: skip
    return Rows(columns, len(calls))


def called(line: str) -> str:
    """What a command is about in a word: the path of its URL, else the module or the program that it runs."""
    if (path := _PATH.search(line)) is not None:
        return visible(path[1])
    if (module := _MODULE.search(line)) is not None:
        return visible(module[1])
    return visible(line.partition(" ")[0].rpartition("/")[2])


def _outcome(outcome: str) -> str:
    """`200, 182.3 kB` for `200, 182345 bytes`; anything else as it is."""
    answered = re.fullmatch(r"(\d{3}), (\d+) bytes", outcome)
    return f"{answered[1]}, {size(int(answered[2]))}" if answered else outcome


def _delta(nats: float, differs: bool) -> str:
    """The difference; bits that differ without a numeric difference (signed zeros) are no plain 0."""
    return "±0" if nats == 0 and differs else delta(nats)


def _last_if_negative(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values that sort -1 (none) behind everything."""
    return np.where(values < 0, np.nan, values.astype(np.float64))
