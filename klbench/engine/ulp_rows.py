"""Fetches the real rows of the operators around an origin and measures them in ulps."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from klbench.core.comparison import Pairs
from klbench.core.findings import Evidence, Finding, Localisation, Neighbour
from klbench.core.trace import Arm, Direction, Trace
from klbench.core.ulps import UlpDifference, compare_rows
from klbench.engine.dump_process import DumpReader
from klbench.engine.raw_tensors import RawTensor, row_tensor, write_raw
from klbench.engine.traces import read_rows
from klbench.errors import KlbenchError

ORIGIN_ROWS = "origin-rows.safetensors"
"""In the folder of a trace: both arms' rows at its origins."""

_FINDINGS = 8
"""Origins whose rows are fetched."""


async def measure_ulps(
    reader: DumpReader,
    dump_dir: Path,
    trace: Trace,
    found: Localisation,
    pairs: Pairs,
    *,
    keep_in: Path | None = None,
) -> Localisation:
    """`found` with the largest difference in ulps of each output around the first origin and at each origin.

    `keep_in` gets both arms' rows at the origins, inputs and outputs, as `ORIGIN_ROWS`. Rows that cannot be
    fetched leave None: the finding does not depend on them.
    """
    wanted: list[dict[str, Any]] = []
    arm = Arm[found.around_arm.upper()] if found.around_arm is not None else None
    if arm is not None and found.around_position is not None:
        for neighbour in found.around:
            if neighbour.output == "differs":
                key = f"around/{neighbour.operator}"
                operator = _number(trace, neighbour.module, neighbour.call)
                wanted += _rows_of(trace, pairs, key, operator, found.around_position, arm)
    for number, finding in enumerate(found.findings[:_FINDINGS]):
        if finding.rank == pairs.rank and finding.kind not in ("head", "not_aligned"):
            judged = Direction.IN if finding.kind == "gap" else Direction.OUT
            for direction in Direction:
                wanted += _rows_of(
                    trace,
                    pairs,
                    f"finding/{number}" if direction == judged else f"beside/{number}",
                    _number(trace, finding.module, finding.call),
                    finding.first_position,
                    Arm[finding.arm.upper()],
                    direction,
                )
    if not wanted:
        return found
    out_file = dump_dir / "rows.safetensors"
    try:
        await reader.fetch_rows(dump_dir, wanted, out_file)
        rows = read_rows(out_file)
        if keep_in is not None:
            _keep(keep_in / ORIGIN_ROWS, wanted, rows)
    except (KlbenchError, OSError):
        return found
    measured = _measured(rows)
    around = tuple(
        _with_ulps(neighbour, measured.get(f"around/{neighbour.operator}")) for neighbour in found.around
    )
    findings = tuple(
        _with_difference(finding, measured.get(f"finding/{number}"))
        for number, finding in enumerate(found.findings)
    )
    return dataclasses.replace(found, around=around, findings=findings)


def _keep(path: Path, wanted: list[dict[str, Any]], rows: dict[str, tuple[str, Any]]) -> None:
    """Writes the origins' rows: "finding/in.argument/a" for the decode side, "/b" for the scoring arm."""
    kept: dict[str, RawTensor] = {}
    for want in wanted:
        place, number, _, side = want["key"].split("/")
        if place in ("finding", "beside") and want["key"] in rows:
            dtype, content = rows[want["key"]]
            direction = "in" if want["direction"] == Direction.IN else "out"
            name = f"{number}/{direction}.{want['argument']}/{side}"
            kept[name] = row_tensor(dtype, content.tobytes())
    write_raw(path, kept)


def modules_to_measure(found: Localisation) -> list[str]:
    """The modules whose rows `measure_ulps` asks for."""
    around = {neighbour.module for neighbour in found.around if neighbour.output == "differs"}
    return sorted(around | {finding.module for finding in found.findings[:_FINDINGS]})


def dump_pattern(modules: list[str]) -> str:
    """The dumper's names of these modules' tensors, and of the embedding's, without which no row pairs."""
    return rf"^non_intrusive__({'|'.join(map(re.escape, modules))}|[^ ]*embed[^.]*)\.(inputs|output)"


def _number(trace: Trace, module: str, call: int) -> int | None:
    """The operator's number in `trace`, which another back end may have made than the one that found it."""
    for number, operator in enumerate(trace.operators):
        if (operator.module, operator.call) == (module, call):
            return number
    return None


def _rows_of(
    trace: Trace,
    pairs: Pairs,
    key: str,
    operator: int | None,
    position: int,
    arm: Arm,
    direction: Direction = Direction.OUT,
) -> list[dict[str, Any]]:
    """Both arms' rows of each argument of a call, as `dumps rows` wants them."""
    nodes = np.flatnonzero((pairs.position == position) & (pairs.arm == arm))
    if not len(nodes) or operator is None:
        return []
    wanted = []
    for side, row in (("a", pairs.decode_row[nodes[0]]), ("b", pairs.scoring_row[nodes[0]])):
        forward = int(trace.row_forward[row])
        here = np.flatnonzero(
            (trace.tensor_forward == forward)
            & (trace.tensor_operator == operator)
            & (trace.tensor_direction == direction)
        )
        wanted += [
            {
                "key": f"{key}/{argument}/{side}",
                "rank": pairs.rank,
                "forward": int(trace.forward_number[forward]),
                "module": trace.operators[operator].module,
                "call": trace.operators[operator].call,
                "direction": int(direction),
                "argument": trace.arguments[argument],
                "row_in_batch": int(trace.row_in_batch[row]),
            }
            for argument in np.unique(trace.tensor_argument[here]).tolist()
        ]
    return wanted


def _measured(rows: dict[str, tuple[str, Any]]) -> dict[str, UlpDifference]:
    """The largest difference of each key over its arguments."""
    result: dict[str, UlpDifference] = {}
    for name, (dtype, a) in rows.items():
        if not name.endswith("/a"):
            continue
        other = rows.get(name[:-1] + "b")
        if other is None or other[0] != dtype:
            continue
        difference = compare_rows(dtype, a, other[1])
        key = name.rsplit("/", 2)[0]
        if difference is not None and (key not in result or _size(difference) > _size(result[key])):
            result[key] = difference
    return result


def _size(difference: UlpDifference) -> tuple[int, int, int]:
    return difference.not_numbers, difference.max_ulps, difference.differing


def _with_ulps(neighbour: Neighbour, difference: UlpDifference | None) -> Neighbour:
    return neighbour if difference is None else dataclasses.replace(neighbour, ulp_max=difference.max_ulps)


def _with_difference(finding: Finding, difference: UlpDifference | None) -> Finding:
    if difference is None or not difference.differing:
        return finding
    shape = {"scattered": "scattered", "block": "in a block", "whole": "the whole row"}[difference.pattern]
    text = (
        f"{difference.differing} of {difference.elements} elements differ, by at most {difference.max_ulps} "
        f"ulps, {shape}"
    )
    if difference.not_numbers:
        text += f"; {difference.not_numbers} are NaN or infinite in one arm"
    evidence = Evidence("ulps", text + ".", difference.as_dict())
    return dataclasses.replace(finding, ulp_max=difference.max_ulps, evidence=(*finding.evidence, evidence))
