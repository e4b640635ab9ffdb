"""Recomputes an attention that was found to differ, from the request's own rows.

The judgement is core/attention_reference.py. Queries, keys and values are what the dumper wrote of the
operator's inputs in the scoring arm, where every position of the request is computed; only rows whose inputs
are equal in both arms are judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.attention_reference import AttentionRows, Judgement, judge_attention
from klbench.core.comparison import Pairs
from klbench.core.findings import Finding, Localisation
from klbench.core.model_traits import OPERATOR_CLASSES, operator_class
from klbench.core.recomputed import ATTENTION, with_judgement
from klbench.core.trace import Direction, Trace
from klbench.core.ulps import mantissa_bits
from klbench.engine.dump_process import DumpReader
from klbench.engine.recomputed_rows import (
    MOST_ROWS,
    Asking,
    Rows,
    equal_rows,
    numbers,
    recomputed,
    rows_from,
    scoring_rows,
    stacked,
)
from klbench.engine.traces import read_rows
from klbench.engine.ulp_rows import head_size, node_of, number_of

_ROWS = 24
"""Rows of a finding that are recomputed; each is searched for single keys."""
_INPUTS = (("0", "q", "query"), ("1", "k", "key"), ("2", "v", "value"))
"""What the dumper may call them."""


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

    async def judged(finding: Finding, ours: Pairs) -> Finding:
        operator = _operator(trace, finding)
        if operator is None:
            return finding
        said = await _judged(reader, dump_dir, trace, ours, finding, operator, model_config)
        return finding if said is None else with_judgement(finding, ATTENTION, said)

    return await recomputed(found, pairs, judged)


def _operator(trace: Trace, finding: Finding) -> int | None:
    """The operator's number in the dumper's trace, where it is an attention whose output differs."""
    if finding.kind != "operator" or finding.latent:
        return None
    number = number_of(trace, finding.module, finding.call)
    if number is None:
        return None
    operator = trace.operators[number]
    attention = operator_class(operator.module, operator.class_name) is OPERATOR_CLASSES[1]
    # A recurrence may be called attention, too.
    return number if attention and operator.state != "ssm" and not operator.container else None


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
    nodes = rows_from(pairs, node_of(pairs, finding), _ROWS)
    scoring = scoring_rows(trace, pairs, int(pairs.position[nodes].max(initial=-1)))
    if heads is None or not len(nodes) or not 0 < len(scoring) <= MOST_ROWS:
        return None
    asking = Asking(trace, pairs, operator)
    asking.both_arms(nodes, _named)
    for position, row in enumerate(scoring):
        asking.row(int(row), f"key/{position}", Direction.IN, _keys_and_values)
    out_file = dump_dir / "attention.safetensors"
    await reader.fetch_rows(dump_dir, asking.wanted, out_file)

    def judge() -> Judgement | None:
        rows = _assembled(read_rows(out_file), pairs.position[nodes], len(scoring), heads)
        if rows is None:
            return None
        window = trace.operators[operator].window
        return judge_attention(rows, scales=_scales(model_config, heads), window=window)

    # Long prompts take seconds.
    return await asyncio.to_thread(judge)


def _named(names: set[str]) -> list[tuple[str, str]]:
    known = [[name for name in its if name in names][:1] for its in _INPUTS]
    return [(str(number), name) for number, found in enumerate(known) for name in found]


def _keys_and_values(names: set[str]) -> list[tuple[str, str]]:
    return [(short, name) for short, name in _named(names) if short != "0"]


def _assembled(rows: Rows, positions: npt.NDArray[np.int64], keys: int, size: int) -> AttentionRows | None:
    """The rows as numbers, up to the first whose inputs differ; None where one is missing or no number."""
    equal = equal_rows(rows, len(positions), "012")
    if not equal:
        return None
    queries = [numbers(rows, f"{row}/b/0", size) for row in range(equal)]
    decode = [numbers(rows, f"{row}/a/out", size) for row in range(equal)]
    scoring = [numbers(rows, f"{row}/b/out", size) for row in range(equal)]
    key_rows = [numbers(rows, f"key/{position}/1", size) for position in range(keys)]
    value_rows = [numbers(rows, f"key/{position}/2", size) for position in range(keys)]
    parts = [stacked(part) for part in (queries, key_rows, value_rows, decode, scoring)]
    if any(part is None for part in parts):
        return None
    q, k, v, a, b = (part for part in parts if part is not None)
    if q.shape[1] % k.shape[1] or k.shape != v.shape or not q.shape == a.shape == b.shape:
        return None
    return AttentionRows(positions[:equal], q, k, v, 0, a, b, mantissa_bits(rows["0/b/out"][0]))


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
