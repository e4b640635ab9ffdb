"""Recomputes a gated delta rule that was found to differ, from the request's own rows.

The judgement is core/delta_rule_reference.py. The rows are what the dumper wrote of the operator's inputs in
the scoring arm, from position 0 on; the parameters are what our plugin wrote beside the dumps
(insitu/parameters.py). Where there are none the operator is another one, or the server is not ours: no
judgement.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from klbench.core.alignment import Alignment
from klbench.core.attention_reference import Judgement
from klbench.core.comparison import ABSENT, Pairs, Status
from klbench.core.delta_rule_reference import DeltaRows, DeltaRule, judge_delta_rule
from klbench.core.findings import Finding, Localisation
from klbench.core.history import histories
from klbench.core.recomputed import may_be_recomputed, with_recurrence
from klbench.core.trace import Direction, Trace
from klbench.core.ulps import as_floats, mantissa_bits
from klbench.engine.dump_process import DumpReader
from klbench.engine.raw_tensors import TAGS, RawTensor, read_raw
from klbench.engine.recomputed_rows import (
    MOST_ROWS,
    Asking,
    Floats,
    Rows,
    equal_rows,
    numbers,
    recomputed,
    rows_from,
    scoring_rows,
    stacked,
)
from klbench.engine.traces import read_rows
from klbench.engine.ulp_rows import node_of, number_of
from klbench.errors import UndecidedError

_ROWS = 256
"""Rows of a finding that are recomputed, as far as they were dumped: a state may go wrong at any of them."""
_MOST_PARAMETERS = 64 << 20
_MOST_NUMBERS = 1 << 28
"""Of all rows of mixed_qkv; in float32 they are 1 GiB."""
_MOST_STATE = 1 << 23
"""Numbers of one layer's state."""
_MOST_WORK = 1 << 34
"""Rows times numbers of the state: over a minute."""
_MOST_WIDTH = 64
"""Of a convolution; sglang has none that is wider."""
_INPUTS = ("mixed_qkv", "a", "b")
_DTYPES = {tag: dtype for dtype, (tag, _) in TAGS.items()}


class _About(msgspec.Struct, frozen=True):
    """What parameters.py says of a module."""

    num_q_heads: int
    num_k_heads: int
    num_v_heads: int
    head_q_dim: int
    head_k_dim: int
    head_v_dim: int
    activation: str | None


async def recompute_delta_rules(
    reader: DumpReader,
    dump_dir: Path,
    trace: Trace,
    found: Localisation,
    alignments: Mapping[int, Alignment],
) -> Localisation:
    """`found` with what the reference says of each gated delta rule in it, and what that leaves of its kinds.

    `alignments` of the trace are each rank's.
    """

    async def judged(finding: Finding, _: Pairs) -> Finding:
        operator = _operator(trace, finding)
        if operator is None:
            return finding
        rule = read_delta_rule(dump_dir / f"parameters-{finding.rank}.safetensors", finding.module)
        if rule is None:
            return finding
        ours = alignments[finding.rank]
        said = await _judged(reader, dump_dir, trace, ours, finding, operator, rule)
        return finding if said is None else with_recurrence(finding, said)

    return await recomputed(found, {rank: ours.pairs for rank, ours in alignments.items()}, judged)


def _operator(trace: Trace, finding: Finding) -> int | None:
    """The operator's number in the dumper's trace, where it or its state may be to blame."""
    if not may_be_recomputed(finding):
        return None
    number = number_of(trace, finding.module, finding.call)
    return number if number is not None and trace.operators[number].state is not None else None


def read_delta_rule(path: Path, module: str) -> DeltaRule | None:
    """The module's parameters, None where there are none. Raises UndecidedError for a damaged file."""
    if not path.exists():
        return None
    tensors, metadata = read_raw(path, _MOST_PARAMETERS)
    try:
        modules = msgspec.json.decode(metadata.get("modules", "{}"), type=dict[str, _About])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UndecidedError(f"{path} cannot be read", why=str(error)) from error
    about = modules.get(module)
    if about is None:
        return None
    conv, bias, a_log, dt_bias = (
        _floats(tensors.get(f"{module}/{name}")) for name in ("conv_weights", "bias", "A_log", "dt_bias")
    )
    keys, values, d_k, d_v = about.num_k_heads, about.num_v_heads, about.head_k_dim, about.head_v_dim
    if (about.num_q_heads, about.head_q_dim) != (keys, d_k) or min(keys, values, d_k, d_v) < 1:
        return None
    channels = 2 * keys * d_k + values * d_v
    if values % keys or values * d_k * d_v > _MOST_STATE or about.activation not in (None, "silu", "swish"):
        return None
    if conv is None or conv.ndim != 2 or len(conv) != channels or not 0 < conv.shape[1] <= _MOST_WIDTH:
        return None
    if a_log is None or dt_bias is None or not a_log.shape == dt_bias.shape == (values,):
        return None
    if bias is not None and bias.shape != (channels,):
        return None
    return DeltaRule(conv, bias, about.activation is not None, a_log, dt_bias, keys, values, d_k, d_v)


def _floats(tensor: RawTensor | None) -> Floats | None:
    if tensor is None:
        return None
    content = np.frombuffer(tensor.content, dtype=np.uint8)
    values = as_floats(_DTYPES[tensor.dtype], content)
    return None if values is None else values.reshape(tensor.shape)


async def _judged(
    reader: DumpReader,
    dump_dir: Path,
    trace: Trace,
    alignment: Alignment,
    finding: Finding,
    operator: int,
    rule: DeltaRule,
) -> Judgement | None:
    pairs = alignment.pairs
    nodes = rows_from(pairs, node_of(pairs, finding), _ROWS)
    scoring = scoring_rows(trace, pairs, int(pairs.position[nodes].max(initial=-1)))
    most = min(MOST_ROWS, _MOST_NUMBERS // len(rule.conv), _MOST_WORK // (rule.values * rule.d_k * rule.d_v))
    if not len(nodes) or not 0 < len(scoring) <= most:
        return None
    asking = Asking(trace, pairs, operator)
    asking.both_arms(nodes, _named)
    for position, row in enumerate(scoring):
        asking.row(int(row), f"row/{position}", Direction.IN, _named)
    out_file = dump_dir / "delta-rule.safetensors"
    await reader.fetch_rows(dump_dir, asking.wanted, out_file)

    # The dumper sees no state: what it was written from at all earlier rows is its history.
    history = histories(trace, pairs, alignment.comparison)[operator]
    same = int(history.status[nodes[0]]) in (Status.EQUAL, ABSENT)

    def judge() -> Judgement | None:
        rows = _assembled(read_rows(out_file), pairs.position[nodes], len(scoring), rule)
        if rows is None:
            return None
        return judge_delta_rule(dataclasses.replace(rows, same_inputs=same), rule)

    # Long prompts take seconds.
    return await asyncio.to_thread(judge)


def _named(names: set[str]) -> list[tuple[str, str]]:
    """mixed_qkv, a and b by their names, or as the three that are passed by position: what comes before them
    is no tensor."""
    if set(_INPUTS) <= names:
        return [(name, name) for name in _INPUTS]
    places = sorted((name for name in names if name.isdecimal()), key=int)
    return list(zip(_INPUTS, places, strict=True)) if len(places) == len(_INPUTS) else []


def _assembled(
    rows: Rows, positions: np.typing.NDArray[np.int64], count: int, rule: DeltaRule
) -> DeltaRows | None:
    """The rows as numbers, up to the first whose inputs differ; None where one is missing or no number."""
    equal = equal_rows(rows, len(positions), _INPUTS)
    if not equal:
        return None
    decode, scoring = (
        stacked(numbers(rows, f"{row}/{side}/out", rule.d_v) for row in range(equal)) for side in "ab"
    )
    a, b = (stacked(numbers(rows, f"row/{row}/{name}", rule.values) for row in range(count)) for name in "ab")
    mixed = np.empty((count, len(rule.conv)), dtype=np.float32)
    for row in range(count):
        values = numbers(rows, f"row/{row}/mixed_qkv", len(rule.conv))
        if values is None or len(values) != 1:
            return None
        mixed[row] = values[0]
    if a is None or b is None or decode is None or scoring is None:
        return None
    if not a.shape == b.shape == (count, 1, rule.values):
        return None
    if not decode.shape == scoring.shape == (equal, rule.values, rule.d_v):
        return None
    mantissa = min(mantissa_bits(rows[name][0]) for name in ("0/b/out", "0/b/mixed_qkv"))
    return DeltaRows(positions[:equal], mixed, a[:, 0], b[:, 0], decode, scoring, mantissa)
