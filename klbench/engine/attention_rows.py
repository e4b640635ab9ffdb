"""Recomputes an attention that was found to differ, from the request's own rows.

The judgement is core/attention_reference.py. Queries, keys and values are what the dumper wrote of the
operator's inputs in the scoring arm, where every position of the request is computed; only rows whose inputs
are equal in both arms are judged.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.attention_reference import AttentionRows, Judgement, judge_attention
from klbench.core.comparison import Pairs
from klbench.core.confirmation import reads_state
from klbench.core.findings import Evidence, Finding, Localisation
from klbench.core.model_traits import OPERATOR_CLASSES, operator_class
from klbench.core.trace import Arm, Direction, Ints, Trace
from klbench.core.ulps import as_floats, mantissa_bits
from klbench.engine.dump_process import DumpReader
from klbench.engine.traces import read_rows
from klbench.engine.ulp_rows import head_size, node_of
from klbench.errors import KlbenchError

_ROWS = 24
"""Rows of a finding that are recomputed."""
_BEHIND = 7
_MOST_KEYS = 16384
"""More keys are not fetched: each is a row of a file."""
_INPUTS = (("0", "q", "query"), ("1", "k", "key"), ("2", "v", "value"))
"""What the dumper may call them."""

Rows = Mapping[str, tuple[str, npt.NDArray[np.uint8]]]


def rows_behind(finding: Finding) -> int:
    """How many rows behind its first one the judgement wants: one alone cannot tell rounding from a key."""
    return _BEHIND if reads_state(finding) else 0


async def recompute_attention(
    reader: DumpReader,
    dump_dir: Path,
    trace: Trace,
    found: Localisation,
    pairs: Mapping[int, Pairs],
    model_config: Mapping[str, Any],
) -> Localisation:
    """`found` with what the reference says of each attention in it, where its rows were dumped.

    `pairs` are each rank's.
    """
    findings = list(found.findings)
    for number, finding in enumerate(findings):
        operator = _operator(trace, finding)
        ours = pairs.get(finding.rank)
        if operator is None or ours is None:
            continue
        try:
            judged = await _judged(reader, dump_dir, trace, ours, finding, operator, model_config)
        except (KlbenchError, OSError):
            continue
        if judged is not None:
            text = judged.sentence[0].upper() + judged.sentence[1:] + "."
            fact = Evidence("attention_reference", text, judged.as_dict())
            findings[number] = dataclasses.replace(finding, evidence=(*finding.evidence, fact))
    return dataclasses.replace(found, findings=tuple(findings))


def _operator(trace: Trace, finding: Finding) -> int | None:
    """The operator's number in the dumper's trace, where it is an attention whose output differs."""
    if finding.kind != "operator" or finding.latent:
        return None
    for number, operator in enumerate(trace.operators):
        if (operator.module, operator.call) == (finding.module, finding.call):
            attention = operator_class(operator.module, operator.class_name) is OPERATOR_CLASSES[1]
            return number if attention and not operator.container else None
    return None


async def _judged(
    reader: DumpReader,
    dump_dir: Path,
    trace: Trace,
    pairs: Pairs,
    finding: Finding,
    operator: int,
    model_config: Mapping[str, Any],
) -> Judgement | None:
    heads = head_size(model_config)
    nodes = _rows_from(pairs, node_of(pairs, finding))
    scoring = _scoring_rows(trace, pairs, int(pairs.position[nodes].max(initial=-1)))
    if heads is None or not len(nodes) or not 0 < len(scoring) <= _MOST_KEYS:
        return None
    wanted: list[dict[str, Any]] = []
    for place, node in enumerate(nodes):
        for side, row in (("a", pairs.decode_row[node]), ("b", pairs.scoring_row[node])):
            wanted += _wants(trace, pairs.rank, operator, int(row), f"{place}/{side}", Direction.IN)
            wanted += _wants(trace, pairs.rank, operator, int(row), f"{place}/{side}", Direction.OUT)
    for position, row in enumerate(scoring):
        wanted += _wants(trace, pairs.rank, operator, int(row), f"key/{position}", Direction.IN, (1, 2))
    out_file = dump_dir / "attention.safetensors"
    await reader.fetch_rows(dump_dir, wanted, out_file)

    def judge() -> Judgement | None:
        rows = _assembled(read_rows(out_file), pairs.position[nodes], len(scoring), heads)
        if rows is None:
            return None
        window = trace.operators[operator].window
        return judge_attention(rows, scales=_scales(model_config, heads), window=window)

    # Long prompts take seconds.
    return await asyncio.to_thread(judge)


def _rows_from(pairs: Pairs, node: int | None) -> Ints:
    """The pair `node` and those behind it, as long as each was computed after the one before and one position
    further on: rows that were computed again read another cache."""
    if node is None:
        return np.zeros(0, dtype=np.int64)
    nodes = np.arange(node, min(node + _ROWS, len(pairs)))
    follows = (np.diff(pairs.position[nodes]) == 1) & (np.diff(pairs.arm[nodes]) == 0)
    result: Ints = nodes[: 1 + int(np.logical_and.accumulate(follows).sum())]
    return result


def _scoring_rows(trace: Trace, pairs: Pairs, last: int) -> npt.NDArray[np.int64]:
    """The scoring arm's row of each position from 0 to `last`; nothing where one is missing."""
    here = np.flatnonzero(
        (trace.row_arm == Arm.SCORING)
        & (trace.row_request == pairs.request)
        & (trace.forward_rank[trace.row_forward] == pairs.rank)
        & (trace.row_position <= last)
    )
    here = here[np.argsort(trace.row_position[here], kind="stable")]
    whole = np.array_equal(trace.row_position[here], np.arange(last + 1))
    return here if whole else here[:0]


def _wants(
    trace: Trace,
    rank: int,
    operator: int,
    row: int,
    key: str,
    direction: Direction,
    only: tuple[int, ...] = (0, 1, 2),
) -> list[dict[str, Any]]:
    """A row of the call's queries, keys and values, or of its output, as `dumps rows` wants them."""
    forward = int(trace.row_forward[row])
    here = np.flatnonzero(
        (trace.tensor_forward == forward)
        & (trace.tensor_operator == operator)
        & (trace.tensor_direction == direction)
    )
    names = {trace.arguments[int(trace.tensor_argument[tensor])] for tensor in here}
    chosen = []
    if direction == Direction.OUT:
        chosen = [("out", name) for name in sorted(names)[:1]]
    else:
        for number in only:
            found = [name for name in _INPUTS[number] if name in names]
            chosen += [(str(number), name) for name in found[:1]]
    return [
        {
            "key": f"{key}/{short}",
            "rank": rank,
            "forward": int(trace.forward_number[forward]),
            "module": trace.operators[operator].module,
            "call": trace.operators[operator].call,
            "direction": int(direction),
            "argument": name,
            "row_in_batch": int(trace.row_in_batch[row]),
        }
        for short, name in chosen
    ]


def _assembled(rows: Rows, positions: npt.NDArray[np.int64], keys: int, size: int) -> AttentionRows | None:
    """The rows as numbers, up to the first whose inputs differ; None where one is missing or no number."""
    equal = 0
    while equal < len(positions) and all(_same(rows, f"{equal}/{{}}/{part}") for part in "012"):
        equal += 1
    if not equal:
        return None
    queries = [_numbers(rows, f"{row}/b/0", size) for row in range(equal)]
    decode = [_numbers(rows, f"{row}/a/out", size) for row in range(equal)]
    scoring = [_numbers(rows, f"{row}/b/out", size) for row in range(equal)]
    key_rows = [_numbers(rows, f"key/{position}/1", size) for position in range(keys)]
    value_rows = [_numbers(rows, f"key/{position}/2", size) for position in range(keys)]
    parts = [_stacked(part) for part in (queries, key_rows, value_rows, decode, scoring)]
    if any(part is None for part in parts):
        return None
    q, k, v, a, b = (part for part in parts if part is not None)
    if q.shape[1] % k.shape[1] or k.shape != v.shape or not q.shape == a.shape == b.shape:
        return None
    return AttentionRows(positions[:equal], q, k, v, 0, a, b, mantissa_bits(rows["0/b/out"][0]))


def _same(rows: Rows, name: str) -> bool:
    one, other = rows.get(name.format("a")), rows.get(name.format("b"))
    return one is not None and other is not None and one[0] == other[0] and np.array_equal(one[1], other[1])


def _numbers(rows: Rows, name: str, size: int) -> npt.NDArray[np.float64] | None:
    """[heads, size] of one row."""
    found = rows.get(name)
    numbers = as_floats(*found) if found is not None else None
    return numbers.reshape(-1, size) if numbers is not None and numbers.size % size == 0 else None


def _stacked(rows: list[npt.NDArray[np.float64] | None]) -> npt.NDArray[np.float64] | None:
    whole = [row for row in rows if row is not None]
    return np.stack(whole) if len(whole) == len(rows) and len({row.shape for row in whole}) == 1 else None


def _scales(model_config: Mapping[str, Any], size: int) -> list[float]:
    """By what scores may be scaled; the rows themselves tell which of them it is."""
    text = model_config.get("text_config")
    config = text if isinstance(text, Mapping) else model_config
    scales = [size**-0.5]
    scalar, multiplier = config.get("query_pre_attn_scalar"), config.get("attention_multiplier")
    if isinstance(scalar, int | float) and scalar > 0:
        scales.append(float(scalar) ** -0.5)
    if isinstance(multiplier, int | float):
        scales.append(float(multiplier))
    return scales
