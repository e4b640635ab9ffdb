"""The tables that set things side by side: all tokens of a run, two requests, a session before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.text import LOGPROB_WIDTH, delta, kl, logprob, visible, visible_token
from klbench.tui.filtering import search_by_value
from klbench.tui.measurement import Measurement
from klbench.tui.widgets.rows import Column, Rows

_DASH = "–"


def spelled(measured: Measurement, token_id: int) -> str:
    """A token in quotes with everything visible, or its number while its text is not known."""
    text = measured.text_of(token_id)
    return f"#{token_id}" if text is None else visible_token(text)


def shown_delta(nats: float, differs: bool) -> str:
    """The difference; bits that differ without a numeric difference (signed zeros) are no plain 0."""
    return "±0" if nats == 0 and differs else delta(nats)


@dataclass(frozen=True, slots=True, eq=False)
class AllTokens:
    """The tokens of several helpers one after another; arrays are [T]."""

    measured: tuple[Measurement, ...]
    source: npt.NDArray[np.int8]
    """Which of `measured`."""
    request: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]


def all_tokens(measured: Sequence[Measurement]) -> AllTokens:
    """Every token of the helpers, by helper, request and offset; a few may have lost their logprob."""
    source, request, offset, position = [], [], [], []
    for index, one in enumerate(measured):
        counts = np.diff(one.columns.start)
        of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        at = (np.arange(len(of), dtype=np.int64) - one.columns.start[:-1][of]).astype(np.int32)
        source.append(np.full(len(of), index, np.int8))
        request.append(of)
        offset.append(at)
        position.append(at + one.columns.prompt_len[of].astype(np.int32))

    def whole(parts: list[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    return AllTokens(
        tuple(measured),
        whole(source, np.int8),
        whole(request, np.int32),
        whole(offset, np.int32),
        whole(position, np.int32),
    )


def all_token_rows(tokens: AllTokens) -> Rows:
    """All tokens as rows; the columns stay as they were measured, nothing is made a Python object."""
    measured = tokens.measured

    def joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    if not measured:
        return Rows((), 0)
    ids = joined([m.columns.token_id for m in measured])
    decode = joined([m.columns.decode_nats for m in measured])
    prefill = joined([m.columns.prefill_nats for m in measured])
    deltas = joined([m.delta_nats for m in measured])
    differs = joined([m.differs for m in measured])
    k3 = joined([m.k3_nats for m in measured])
    compared = joined([m.columns.compared for m in measured])
    names = [m.columns.helper for m in measured]

    def token(row: int) -> str:
        return spelled(measured[int(tokens.source[row])], int(ids[row]))

    def text_of(token_id: int) -> str:
        return next((text for m in measured if (text := m.text_of(token_id)) is not None), f"#{token_id}")

    def known(row: int, shown: str) -> str:
        return shown if compared[row] else _DASH

    def helper_search(text: str) -> npt.NDArray[np.bool_]:
        wanted = [text.lower() in name for name in names]
        return np.asarray(wanted, np.bool_)[tokens.source]

    columns = (
        Column("helper", "helper", 17, lambda r: names[int(tokens.source[r])], tokens.source,
               search=helper_search),
        Column("request", "request", 7, lambda r: str(tokens.request[r]), tokens.request, right=True,
               names=("req", "#")),
        Column("position", "pos", 6, lambda r: str(tokens.position[r]), tokens.position, right=True),
        Column("offset", "offset", 6, lambda r: str(tokens.offset[r]), tokens.offset, right=True, optional=1),
        Column("token", "token", 12, token, stretch=28, names=("tok",),
               search=search_by_value(ids, text_of)),
        Column("delta", "Δ", 10, lambda r: known(r, shown_delta(float(deltas[r]), bool(differs[r]))),
               np.abs(deltas), right=True, descends=True, names=("d", "max")),
        Column("k3", "k3", 8, lambda r: known(r, kl(float(k3[r]))), k3, descends=True, right=True,
               names=("kl",)),
        Column("decode", "decode", LOGPROB_WIDTH, lambda r: known(r, logprob(float(decode[r]))), decode,
               right=True, optional=2),
        Column("prefill", "prefill", LOGPROB_WIDTH, lambda r: logprob(float(prefill[r])), prefill,
               right=True, optional=2),
        Column("id", "id", 8, lambda r: str(ids[r]), ids, right=True, optional=3),
    )  # fmt: skip
    return Rows(columns, len(ids), tone=lambda row: "strong" if differs[row] else "")


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """Two requests aligned by offset. Arrays are [max of the two lengths]; what one lacks is False there."""

    left: Measurement
    right: Measurement
    requests: tuple[int, int]
    counts: tuple[int, int]
    same_token: npt.NDArray[np.bool_]
    left_differs: npt.NDArray[np.bool_]
    right_differs: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.bool_]
    """[2, length] which of the tokens lost their logprob in either."""

    @property
    def parted_at(self) -> int | None:
        """Offset of the first other token; None where the common part is the same."""
        common = min(self.counts)
        parted = np.flatnonzero(~self.same_token[:common])
        return int(parted[0]) if len(parted) else None

    @property
    def only_one(self) -> npt.NDArray[np.int64]:
        """Offsets where one differs and the other does not, or the tokens are not the same."""
        common = np.arange(len(self.same_token)) < min(self.counts)
        other = (self.left_differs != self.right_differs) & ~self.lost.any(axis=0)
        other |= common & ~self.same_token
        return np.flatnonzero(other)


def beside(left: Measurement, left_request: int, right: Measurement, right_request: int) -> Beside:
    """The two requests by offset."""
    slices = left.columns.tokens_of(left_request), right.columns.tokens_of(right_request)
    counts = slices[0].stop - slices[0].start, slices[1].stop - slices[1].start
    length, common = max(counts), min(counts)
    same = np.zeros(length, np.bool_)
    same[:common] = left.columns.token_id[slices[0]][:common] == right.columns.token_id[slices[1]][:common]
    differs = np.zeros((2, length), np.bool_)
    differs[0, : counts[0]] = left.differs[slices[0]]
    differs[1, : counts[1]] = right.differs[slices[1]]
    lost = np.zeros((2, length), np.bool_)
    lost[0, : counts[0]] = ~left.columns.compared[slices[0]]
    lost[1, : counts[1]] = ~right.columns.compared[slices[1]]
    return Beside(left, right, (left_request, right_request), counts, same, differs[0], differs[1], lost)


def beside_rows(pair: Beside) -> Rows:
    """Offset by offset: token and difference of each, both logprobs where there is room."""
    sides = (pair.left, pair.right)
    where = [side.columns.tokens_of(request) for side, request in zip(sides, pair.requests, strict=True)]

    def padded(side: int, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        column = np.full(len(pair.same_token), np.nan)
        column[: pair.counts[side]] = values[where[side]]
        return column

    def token(side: int) -> Any:
        ids = sides[side].columns.token_id[where[side]]
        return lambda row: spelled(sides[side], int(ids[row])) if row < len(ids) else _DASH

    def difference(side: int, differs: npt.NDArray[np.bool_]) -> Any:
        values = sides[side].delta_nats[where[side]]

        def show(row: int) -> str:
            there = row < len(values) and not pair.lost[side, row]
            return shown_delta(float(values[row]), bool(differs[row])) if there else _DASH

        return show

    def number(side: int, values: npt.NDArray[Any], name: str, title: str) -> Column:
        column = padded(side, values)

        def show(row: int) -> str:
            lost = name.endswith("decode") and pair.lost[side, row]
            return logprob(float(column[row])) if row < pair.counts[side] and not lost else _DASH

        return Column(name, title, LOGPROB_WIDTH, show, column, right=True, optional=2)

    def note(row: int) -> str:
        if row >= min(pair.counts):
            return "one only"
        if not pair.same_token[row]:
            return "other token"
        if pair.lost[:, row].any():
            return "lost"
        left, right = bool(pair.left_differs[row]), bool(pair.right_differs[row])
        return "both" if left and right else "left" if left else "right" if right else ""

    def start(side: int) -> int:
        return int(sides[side].columns.prompt_len[pair.requests[side]])

    offsets = np.arange(len(pair.same_token))
    columns = (
        Column("offset", "offset", 6, str, offsets, right=True),
        Column("position", "pos", 6, lambda r: str(start(0) + r), offsets + start(0), right=True, optional=1),
        Column("left", "left token", 13, token(0), stretch=20, names=("tok",)),
        number(0, pair.left.columns.decode_nats, "decode", "decode"),
        number(0, pair.left.columns.prefill_nats, "prefill", "prefill"),
        Column("delta", "left Δ", 10, difference(0, pair.left_differs),
               np.abs(padded(0, pair.left.delta_nats)), right=True, descends=True),
        Column("right", "right token", 13, token(1), stretch=20),
        number(1, pair.right.columns.decode_nats, "rdecode", "decode"),
        number(1, pair.right.columns.prefill_nats, "rprefill", "prefill"),
        Column("rdelta", "right Δ", 10, difference(1, pair.right_differs),
               np.abs(padded(1, pair.right.delta_nats)), right=True, descends=True),
        Column("differ", "differ", 11, note),
    )  # fmt: skip
    marked = np.zeros(len(offsets), np.bool_)
    marked[pair.only_one] = True
    return Rows(columns, len(offsets), tone=lambda row: "strong" if marked[row] else "")


def change_rows(helpers: Mapping[str, Mapping[str, Any]]) -> Rows:
    """The helpers of a klbench.compare/1 document."""
    names = list(helpers)

    def part(row: int, side: str, key: str) -> object:
        return helpers[names[row]][side].get(key)

    def change(row: int, key: str) -> str:
        changed = helpers[names[row]].get("change")
        return _DASH if not changed else str(changed.get(key))

    def both(row: int, key: str) -> str:
        one, two = (part(row, side, key) for side in ("before", "after"))
        return f"{_DASH if one is None else one} → {_DASH if two is None else two}"

    def divergence(row: int) -> str:
        one, two = (part(row, side, "avg_kl_div") for side in ("before", "after"))
        return " → ".join(kl(value if isinstance(value, float | int) else None) for value in (one, two))

    columns = (
        Column("helper", "helper", 17, lambda r: names[r]),
        Column("status", "status", 19, lambda r: visible(both(r, "status"))),
        Column("differ", "differ", 11, lambda r: both(r, "divergent_tokens")),
        Column("fixed", "fixed", 6, lambda r: change(r, "fixed"), right=True),
        Column("new", "new", 6, lambda r: change(r, "introduced"), right=True),
        Column("kl", "avg KL", 17, divergence, optional=1),
        Column("decode", "decode moved", 12, lambda r: change(r, "decode_changed"), right=True, optional=2),
        Column("prefill", "prefill moved", 13, lambda r: change(r, "prefill_changed"), right=True,
               optional=2),
        Column("compared", "compared", 8, lambda r: change(r, "compared"), right=True, optional=3),
    )  # fmt: skip
    return Rows(columns, len(names), tone=lambda r: "strong" if helpers[names[r]].get("differs") else "")
