"""Is a gated delta rule's output the recurrence of its inputs? Recomputed in float64 from row 0 on.

    found = judge_delta_rule(rows, rule)
    found.verdict, found.side                   "other_function", "generation"

    x = silu(conv(mixed_qkv) + bias) -> q, k, v;  q, k = q / |q|, k / |k|
    g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b)
    S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  out = S^T q / sqrt(d_k)

Whether an arm restored the state, scanned in chunks or stepped through does not matter: the state is made
anew from all of the request's rows, and an output that fits it was made from the right one.

Errors are counted in roundings, per row and head: the length of the difference over what the output moves by
when all that a kernel holds is rounded once, to the dtype of its inputs and outputs. That is measured, not
estimated: the same recurrence is run a few times more with every intermediate result rounded at random. No
formula would do: slow gates sum the roundings of thousands of rows, the rule itself corrects what was written
wrongly along a key that comes again, and a query may look where the roundings are all that is left. So one
unit fits gates and tokens of every kind, and does not hide the loss of a row where much is remembered.

Nothing is concluded unless at least one arm is the recurrence of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from klbench.core.attention_reference import Judgement
from klbench.core.text import counted

Floats = npt.NDArray[np.float64]

ROUNDING_U = 4.0
"""sglang's kernels reach 2.8 on an H200 in the worst of 24 rows; emulated ones (scans in chunks, steps, with
bfloat16 between) 2.5, and 3.1 where nine tenths of every token are the same."""
_OTHER_U = 12.0
"""A state that is held in bfloat16 and rounded at each of hundreds of rows reaches 6; a row that is missing,
or a checkpoint of the row before, is off by 13 and more, most by 60, unless tokens are alike like that. On an
H200 a state of 31 rows before is off by 190, another sequence's by 550."""
_FEWEST_ROWS = 3
_TRIES = 3
"""Runs with random roundings: with the elements of a head's output they are hundreds of samples."""
_CHUNK = 64
"""Rows that are solved for at once: more cost more, fewer are not what linear algebra is fast at."""
_MOST_MANTISSA = 10
"""Of what is multiplied: tensor cores take float32 for no more."""
_NOTHING = 1e-30
"""Smaller numbers may be taken for zero."""
_NORM_EPS = 1e-6
"""What the kernels add to the squared length of q and k."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """The operator's parameters. `conv` [2 keys x d_k + values x d_v, width] is applied to the rows of
    mixed_qkv, oldest first; `a_log` and `dt_bias` [values]; the number of heads `values` is a multiple of
    `keys`."""

    conv: Floats
    bias: Floats | None
    silu: bool
    a_log: Floats
    dt_bias: Floats
    keys: int
    values: int
    d_k: int
    d_v: int


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRows:
    """One request's rows of one operator.

    `mixed` [T, channels] and `a`, `b` [T, values] are of the positions 0 to T; the outputs of both arms
    [R, values, d_v] are of the rows `positions` [R]. `mantissa` is how many bits of the mantissa are stored
    of mixed_qkv or of the outputs, the fewer of both. `same_inputs`: the generation arm is known to have been
    given at all earlier rows what the scoring arm was, whose rows these are.
    """

    positions: npt.NDArray[np.int64]
    mixed: npt.NDArray[np.float32]
    a: Floats
    b: Floats
    decode_out: Floats
    scoring_out: Floats
    mantissa: int
    same_inputs: bool = True


def judge_delta_rule(rows: DeltaRows, rule: DeltaRule) -> Judgement:
    """Compares both arms with the recurrence of the inputs."""
    count = len(rows.positions)
    if count < _FEWEST_ROWS:
        said = f"{counted(count, 'row')} with equal inputs are too few to recompute the recurrence by"
        return Judgement("unknown", said, count, float("inf"), float("inf"))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        decode, scoring = errors_in_roundings(rows, rule)
    most, least = max(decode, scoring), min(decode, scoring)
    if most <= ROUNDING_U:
        said = (
            "recomputed in float64 from row 0 on, both arms are the recurrence of the same inputs, up to "
            f"{decode:.1f} and {scoring:.1f} roundings in {count} rows"
        )
        return Judgement("rounding", said, count, decode, scoring)
    if most > _OTHER_U and least <= ROUNDING_U:
        side = "generation" if decode > scoring else "scoring"
        if side == "generation" and not rows.same_inputs:
            said = (
                f"the generation arm is off by {most:.0f} roundings, but what it was given at earlier rows "
                "is not known to be the same: its state may be right and another"
            )
            return Judgement("unknown", said, count, decode, scoring)
        said = (
            f"the {side} arm is not the recurrence of its inputs: recomputed in float64 from row 0 on it is "
            f"off by {most:.0f} roundings in one of {count} rows, the other arm by {least:.1f} at most"
        )
        return Judgement("other_function", said, count, decode, scoring, side)
    if not least <= ROUNDING_U:
        said = "neither arm is the plain gated delta rule of its inputs: what else it does is not known here"
    else:
        said = (
            f"both arms are near the recurrence of their inputs ({decode:.1f} and {scoring:.1f} roundings), "
            "too far for rounding alone and too near for another state"
        )
    return Judgement("unknown", said, count, decode, scoring)


def errors_in_roundings(rows: DeltaRows, rule: DeltaRule) -> tuple[float, float]:
    """The largest error of each arm over rows and heads; infinite where anything is no number.

    4000 rows of 32 heads of 128 x 128 cost 10 s on one core.
    """
    exact = recurrence(rows, rule)
    random = np.random.Generator(np.random.PCG64(0))
    moved = np.zeros(exact.shape[:2])
    for _ in range(_TRIES):
        moved += ((recurrence(rows, rule, random) - exact) ** 2).sum(axis=-1) / _TRIES
    unit = np.maximum(np.sqrt(moved), _NOTHING)
    decode, scoring = (
        float(np.nan_to_num(np.linalg.norm(out - exact, axis=-1) / unit, nan=np.inf).max())
        for out in (rows.decode_out, rows.scoring_out)
    )
    return decode, scoring


def recurrence(rows: DeltaRows, rule: DeltaRule, random: np.random.Generator | None = None) -> Floats:
    """The outputs [R, values, d_v]; with `random`, of kernels that round at random whatever they hold.

    Rows are solved for in chunks, exactly: (I + L) D = beta (V - K S), where L is what the rows of a chunk
    take from each other.
    """

    rounding = 2.0 ** -(min(rows.mantissa, _MOST_MANTISSA) + 1)

    def held(x: Floats) -> Floats:
        return x if random is None else x * (1.0 + rounding * random.uniform(-1.0, 1.0, x.shape))

    last = int(rows.positions.max())
    state = np.zeros((rule.values, rule.d_k, rule.d_v))
    out = np.zeros((len(rows.positions), rule.values, rule.d_v))
    start = 0
    while start <= last:
        stop = min(start + _CHUNK, last + 1)
        q, k, v = _heads(rows.mixed, rule, start, stop, held)
        gate = -np.exp(rule.a_log) * np.logaddexp(0.0, rows.a[start:stop] + rule.dt_bias)
        beta = held(1.0 / (1.0 + np.exp(-rows.b[start:stop]))).T[:, :, None]
        faded = np.cumsum(gate, axis=0).T
        since = faded[:, :, None] - faded[:, None, :]
        decay = np.exp(np.where(np.tri(stop - start) > 0, since, -np.inf))
        begun = np.exp(faded)[:, :, None]
        between = np.tril(decay * (k @ k.transpose(0, 2, 1)), -1)
        solved = held(np.linalg.inv(np.eye(stop - start) + beta * between))
        read = held(state)
        recalled = held(solved @ (beta * begun * (k @ read)))
        written = held(held(solved @ (beta * v)) - recalled)
        for row in np.flatnonzero((rows.positions >= start) & (rows.positions < stop)).tolist():
            at = int(rows.positions[row]) - start
            seen = held(decay[:, at] * (k @ q[:, at, :, None])[..., 0])
            made = begun[:, at] * (q[:, None, at] @ read)[:, 0] + (seen[:, None] @ written)[:, 0]
            out[row] = held(made * rule.d_k**-0.5)
        state = begun[:, -1:] * state + (k * decay[:, -1, :, None]).transpose(0, 2, 1) @ written
        start = stop
    return out


def _heads(
    mixed: npt.NDArray[np.float32], rule: DeltaRule, start: int, stop: int, held: Callable[[Floats], Floats]
) -> tuple[Floats, Floats, Floats]:
    """q, k [values, rows, d_k] and v [values, rows, d_v] of the rows from `start` to `stop`."""
    width = rule.conv.shape[1]
    rows = np.zeros((stop - start + width - 1, rule.conv.shape[0]))
    low = max(0, start - width + 1)
    rows[width - 1 - (start - low) :] = mixed[low:stop]
    x = np.zeros((stop - start, rule.conv.shape[0])) if rule.bias is None else rule.bias[None, :]
    for tap in range(width):
        x = x + rows[tap : tap + stop - start] * rule.conv[:, tap]
    if rule.silu:
        x = x / (1.0 + np.exp(-x))
    q, k, v = np.split(held(x), [rule.keys * rule.d_k, 2 * rule.keys * rule.d_k], axis=1)
    q, k = (held(_normal(part.reshape(len(x), rule.keys, rule.d_k), rule)) for part in (q, k))
    return q, k, v.reshape(len(x), rule.values, rule.d_v).transpose(1, 0, 2)


def _normal(x: Floats, rule: DeltaRule) -> Floats:
    """[values, rows, d_k] of length one, the heads of the keys repeated."""
    x = x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + _NORM_EPS)
    return np.repeat(x, rule.values // rule.keys, axis=1).transpose(1, 0, 2)
