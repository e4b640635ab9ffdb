"""Is an attention's output the attention of its inputs? Recomputed in float64 from one request's own rows.

    found = judge_attention(rows, scales=(0.177,), window=None)
    found.verdict, found.side, found.back       "missing_key", "generation", 3

Where queries, keys and values are equal in both arms and the outputs are not, one of them rounds otherwise,
or is the attention of other keys. Errors are counted in units of rounding u (half the spacing of the dtype
at 1) of the sum of |weight x value|: each rounding inside a kernel adds at most one. One key among many
weighs less than that, so single keys are looked for by direction: without key j the output moves by
p/(1-p) (out - v_j), a vector that rounding does not happen to make in several rows.

Nothing is concluded unless at least one arm is the attention of its inputs: sinks, soft caps, quantised K/V
or an unknown scale make the reference useless, and that is the answer then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Verdict = Literal["rounding", "missing_key", "extra_key", "other_function", "unknown"]

ROUNDING_U = 6.0
"""A kernel rounds its blocks, its weights and its output: a handful of roundings."""
_REFERENCE_U = 4.0
"""An arm whose median row is further off is not the attention of its inputs."""
_OTHER_U = 16.0
_EXPLAINED, _UNEXPLAINED = 0.25, 0.75
"""What of the squared difference may be left where one key explains it, and where none does."""
_FEWEST_ROWS = 2
"""One row has one direction; that several rows agree on a key is no chance."""
_LARGEST = 20_000_000
"""Elements of one row's directions; more heads than fit are left out of the search for keys."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """One request's rows of one attention operator.

    `keys` [T, kv heads, d] and `values` [T, kv heads, dv] are of the positions `first_key` to first_key + T;
    `queries` [R, heads, d] and the outputs of both arms [R, heads, dv] are of the rows `positions` [R].
    `mantissa` is how many bits of the outputs' mantissa are stored.
    """

    positions: npt.NDArray[np.int64]
    queries: Floats
    keys: Floats
    values: Floats
    first_key: int
    decode_out: Floats
    scoring_out: Floats
    mantissa: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the reference says. `back`: the key so many rows before the row's own; `at`: its position."""

    verdict: Verdict
    sentence: str
    rows: int
    decode_u: float
    scoring_u: float
    side: str | None = None
    back: int | None = None
    at: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "sentence"}


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """One row's attention: weights [heads, keys], output and its scale, and the row's first key."""

    weights: Floats
    keys: slice
    out: Floats
    size: Floats
    beyond: Floats | None
    """Weights relative to all others [heads] of the key just before the window."""


def judge_attention(rows: AttentionRows, *, scales: Sequence[float], window: int | None) -> Judgement:
    """Compares both arms with the attention of the inputs; `window` as in trace.Operator."""
    best: tuple[float, float, list[_Reference]] | None = None
    for scale in scales:
        references = [_attend(rows, row, scale, window) for row in range(len(rows.positions))]
        off = min(
            float(np.median(_errors(rows, references, out))) for out in (rows.decode_out, rows.scoring_out)
        )
        if best is None or off < best[0]:
            best = off, scale, references
    if best is None or not len(rows.positions):
        return Judgement("unknown", "no row could be recomputed", 0, float("inf"), float("inf"))
    off, _, references = best
    decode, scoring = (
        float(_errors(rows, references, out).max()) for out in (rows.decode_out, rows.scoring_out)
    )
    count = len(rows.positions)
    if not off <= _REFERENCE_U:
        said = (
            "neither arm is the plain attention of its inputs: what the operator adds to it is not known here"
        )
        return Judgement("unknown", said, count, decode, scoring)
    for side, out in (("generation", rows.decode_out), ("scoring", rows.scoring_out)):
        key = _single_key(rows, references, out)
        if key is not None:
            return _key_judged(key, side, count, decode, scoring)
    if max(decode, scoring) > _OTHER_U:
        side = "generation" if decode > scoring else "scoring"
        said = (
            f"the {side} arm is not the attention of its inputs: recomputed in float64 it is off by "
            f"{max(decode, scoring):.0f} roundings, the other arm by {min(decode, scoring):.1f}"
        )
        return Judgement("other_function", said, count, decode, scoring, side)
    if max(decode, scoring) <= ROUNDING_U and _no_key(rows, references):
        said = (
            f"recomputed in float64, both arms are the attention of the same keys, up to {decode:.1f} and "
            f"{scoring:.1f} roundings, and no single key explains the difference"
        )
        return Judgement("rounding", said, count, decode, scoring)
    said = f"both arms are near the attention of their inputs ({decode:.1f} and {scoring:.1f} roundings)"
    return Judgement("unknown", said, count, decode, scoring)


def _attend(rows: AttentionRows, row: int, scale: float, window: int | None) -> _Reference:
    position = int(rows.positions[row])
    end = position - rows.first_key + 1
    low = 0 if window is None else max(0, position - window - rows.first_key)
    group = rows.queries.shape[1] // rows.keys.shape[1]
    query = rows.queries[row].reshape(rows.keys.shape[1], group, -1)
    scores = np.einsum("hgd,nhd->hgn", query, rows.keys[:end]) * scale
    scores -= scores[..., low:].max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    total = weights[..., low:].sum(axis=-1, keepdims=True)
    weights /= total
    seen = weights[..., low:]
    out = np.einsum("hgn,nhd->hgd", seen, rows.values[low:end])
    size = np.einsum("hgn,nhd->hgd", seen, np.abs(rows.values[low:end])).max(axis=-1)
    heads = rows.queries.shape[1]
    beyond = weights[..., low - 1].reshape(heads) if low > 0 else None
    return _Reference(
        seen.reshape(heads, -1), slice(low, end), out.reshape(heads, -1), size.reshape(heads), beyond
    )


def _errors(rows: AttentionRows, references: Sequence[_Reference], out: Floats) -> Floats:
    """[R] the largest error of each row in roundings."""
    unit = 2.0 ** -(rows.mantissa + 1)
    return np.array(
        [
            float((np.abs(out[row] - found.out).max(axis=-1) / (unit * np.maximum(found.size, 1e-300))).max())
            for row, found in enumerate(references)
        ]
    )


def _left(rows: AttentionRows, references: Sequence[_Reference], out: Floats) -> dict[tuple[str, int], float]:
    """The part of the squared difference that is left when a key explains it, by ("back" | "at" | "extra",
    which); keys that are not among those of every row are left out."""
    left: dict[tuple[str, int], float] = {}
    seen: dict[tuple[str, int], int] = {}
    whole = 0.0
    for row, found in enumerate(references):
        position, keys = int(rows.positions[row]), found.keys
        count = keys.stop - keys.start
        heads, depth = found.out.shape
        some = max(1, min(heads, _LARGEST // max(1, count * depth)))
        difference = (out[row] - found.out)[:some]
        group = heads // rows.values.shape[1]
        values = np.repeat(rows.values, group, axis=1)[:, :some].transpose(1, 0, 2)
        whole += float((difference**2).sum())
        ratio = found.weights[:some] / np.maximum(1.0 - found.weights[:some], 1e-12)
        moved = ratio[..., None] * (found.out[:some, None, :] - values[:, keys])
        squared = ((difference[:, None, :] - moved) ** 2).sum(axis=(0, 2))
        here = {
            ("back", position - rows.first_key - key): float(squared[key - keys.start])
            for key in range(keys.start, keys.stop)
        }
        here |= {
            ("at", rows.first_key + key): float(squared[key - keys.start])
            for key in range(keys.start, keys.stop)
        }
        if found.beyond is not None:
            share = (found.beyond / (1.0 + found.beyond))[:some]
            moved_by_one = share[:, None] * (values[:, keys.start - 1] - found.out[:some])
            here["extra", position - rows.first_key - keys.start + 1] = float(
                ((difference - moved_by_one) ** 2).sum()
            )
        for name, value in here.items():
            left[name] = left.get(name, 0.0) + value
            seen[name] = seen.get(name, 0) + 1
    if not whole:
        return {}
    return {name: value / whole for name, value in left.items() if seen[name] == len(references)}


def _single_key(rows: AttentionRows, references: Sequence[_Reference], out: Floats) -> tuple[str, int] | None:
    """The key that explains an arm's difference from the reference, where one does and its rival does not."""
    if len(references) < _FEWEST_ROWS:
        return None
    left = _left(rows, references, out)
    best = min(left, key=lambda name: left[name], default=None)
    return best if best is not None and left[best] <= _EXPLAINED else None


def _no_key(rows: AttentionRows, references: Sequence[_Reference]) -> bool:
    if len(references) < _FEWEST_ROWS:
        return False
    return all(
        min(_left(rows, references, out).values(), default=1.0) >= _UNEXPLAINED
        for out in (rows.decode_out, rows.scoring_out)
    )


def _key_judged(key: tuple[str, int], side: str, rows: int, decode: float, scoring: float) -> Judgement:
    kind, number = key
    verdict: Verdict = "extra_key" if kind == "extra" else "missing_key"
    where = f"the key at position {number}" if kind == "at" else f"the key {number} rows before its own"
    said = (
        f"recomputed in float64, the {side} arm's output is the attention "
        + (f"with {where}, beyond the window" if kind == "extra" else f"without {where}")
        + f" in each of {rows} rows"
    )
    back, at = (None, number) if kind == "at" else (number, None)
    return Judgement(verdict, said, rows, decode, scoring, side, back, at)
