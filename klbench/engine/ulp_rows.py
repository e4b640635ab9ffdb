"""Fetches the real rows of the operators around an origin and measures them in ulps."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from klbench.core.comparison import Pairs
from klbench.core.experts import EXPERTS, named, with_margin
from klbench.core.findings import Evidence, Finding, Localisation, Neighbour
from klbench.core.trace import Arm, Direction, Phase, Trace
from klbench.core.ulps import UlpDifference, as_floats, compare_rows
from klbench.engine.dump_process import DumpReader
from klbench.engine.raw_tensors import RawTensor, row_tensor, write_raw
from klbench.engine.traces import read_rows
from klbench.errors import KlbenchError

ORIGIN_ROWS = "origin-rows.safetensors"
"""In the folder of a trace: both arms' rows at its origins."""

_EXPERTS_OUT, _EXPERTS_IN = f"{EXPERTS}/0", f"{EXPERTS}/1"
_GATE_LOGITS = ("1", "router_logits")
"""What the dumper may call the router's logits among the inputs of sglang's TopK."""

_EXPERTS_BEHIND = 64
"""Rows that more of the generation is repeated for, to name the experts that follow from an origin."""

_FINDINGS = 8
"""Origins whose rows are fetched."""


async def measure_ulps(
    reader: DumpReader,
    dump_dir: Path,
    trace: Trace,
    found: Localisation,
    pairs: Mapping[int, Pairs],
    *,
    keep_in: Path | None = None,
    head_size: int | None = None,
) -> Localisation:
    """`found` with the largest difference in ulps of each output around the first origin and at each origin.

    `pairs` are each rank's. `head_size` is the number of elements of an attention head, by which an
    attention's rows are told apart. `keep_in` gets both arms' rows at the origins, inputs and outputs, as
    `ORIGIN_ROWS`. Rows that cannot be fetched leave None: the finding does not depend on them.
    """
    wanted: list[dict[str, Any]] = []
    if found.around_rank is not None and found.around_arm is not None and found.around_position is not None:
        ours = pairs.get(found.around_rank)
        node = _node(ours, found.around_position, found.around_arm, found.around_phase)
        for neighbour in found.around:
            if neighbour.output == "differs":
                key = f"around/{neighbour.operator}"
                operator = number_of(trace, neighbour.module, neighbour.call)
                wanted += _rows_of(trace, ours, key, operator, node)
    for number, finding in enumerate(found.findings[:_FINDINGS]):
        if finding.kind not in ("head", "not_aligned"):
            judged = Direction.IN if finding.kind == "gap" else Direction.OUT
            ours = pairs.get(finding.rank)
            node = node_of(ours, finding)
            for direction in Direction:
                wanted += _rows_of(
                    trace,
                    ours,
                    f"finding/{number}" if direction == judged else f"beside/{number}",
                    number_of(trace, _measured_module(finding), finding.call),
                    node,
                    direction,
                )
    for fact in _experts_of(found):
        about = fact.values
        ours = pairs.get(about["rank"])
        router = number_of(trace, about["module"], about["call"])
        node = _node(ours, about["position"], about["arm"], about["phase"])
        wanted += _rows_of(trace, ours, _EXPERTS_OUT, router, node)
        given = _rows_of(trace, ours, _EXPERTS_IN, router, node, Direction.IN)
        wanted += [want for want in given if want["argument"] in _GATE_LOGITS]
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
    heads = {
        f"finding/{number}": head_size
        for number, finding in enumerate(found.findings)
        if head_size is not None and _reads_kv(trace, finding)
    }
    measured = _measured(rows, heads)
    around = tuple(
        _with_ulps(neighbour, measured.get(f"around/{neighbour.operator}")) for neighbour in found.around
    )
    findings = tuple(
        _with_names(_with_difference(finding, measured.get(f"finding/{number}")), rows)
        for number, finding in enumerate(found.findings)
    )
    return dataclasses.replace(found, around=around, findings=findings)


def _keep(path: Path, wanted: list[dict[str, Any]], rows: dict[str, tuple[str, Any]]) -> None:
    """Writes the origins' rows: "finding/in.argument/a" of the finding's arm, "/b" of the scoring arm."""
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
    routers = {str(fact.values["module"]) for fact in _experts_of(found)}
    return sorted(around | routers | {_measured_module(finding) for finding in found.findings[:_FINDINGS]})


def _experts_of(found: Localisation) -> list[Evidence]:
    """What is known of experts that were chosen otherwise: one fact or none."""
    return [fact for finding in found.findings for fact in finding.evidence if fact.code == EXPERTS]


def row_of_experts(found: Localisation, latest: int) -> int:
    """The row whose experts are to be named; `latest` where there is none, or it lies far behind that row."""
    rows = [int(fact.values["position"]) for fact in _experts_of(found)]
    return next((row for row in rows if row <= latest + _EXPERTS_BEHIND), latest)


def _with_names(finding: Finding, rows: Mapping[str, tuple[str, Any]]) -> Finding:
    """`finding` with the experts that its evidence speaks of and their gate's margin, where fetched.

    What a router puts out beside them are floats; the dumper numbers its arguments otherwise than digests do.
    """
    chosen = {
        name[-1]: [int(expert) for expert in content.view(np.dtype(dtype))]
        for name, (dtype, content) in rows.items()
        if name.startswith(f"{_EXPERTS_OUT}/") and dtype in ("int32", "int64")
    }
    if set(chosen) != {"a", "b"}:
        return finding
    logits = {
        name[-1]: numbers
        for name, row in rows.items()
        if name.startswith(f"{_EXPERTS_IN}/") and (numbers := as_floats(*row)) is not None
    }

    def told(fact: Evidence) -> Evidence:
        said = named(fact, chosen["a"], chosen["b"])
        return with_margin(said, logits["a"], logits["b"]) if set(logits) == {"a", "b"} else said

    evidence = tuple(told(fact) if fact.code == EXPERTS else fact for fact in finding.evidence)
    return dataclasses.replace(finding, evidence=evidence)


def _measured_module(finding: Finding) -> str:
    """The module whose rows show the difference: the second of a gap."""
    return finding.module.rpartition(" -> ")[2]


def dump_pattern(modules: list[str]) -> str:
    """The dumper's names of these modules' tensors, and of the embedding's, without which no row pairs."""
    return rf"^non_intrusive__({'|'.join(map(re.escape, modules))}|[^ ]*embed[^.]*)\.(inputs|output)"


def number_of(trace: Trace, module: str, call: int) -> int | None:
    """The operator's number in `trace`, which another back end may have made than the one that found it."""
    for number, operator in enumerate(trace.operators):
        if (operator.module, operator.call) == (module, call):
            return number
    return None


def node_of(pairs: Pairs | None, finding: Finding) -> int | None:
    """The finding's first row among its rank's pairs, None where it was not computed like that."""
    return _node(pairs, finding.first_position, finding.arm, finding.phase)


def _node(pairs: Pairs | None, position: int, arm: str, phase: str | None) -> int | None:
    """A position that was computed twice (after a retraction) has a row in each phase; of several rows in one
    phase the latest is what later rows read. `phase` None: in any."""
    if pairs is None:
        return None
    here = (pairs.position == position) & (pairs.arm == Arm[arm.upper()])
    if phase is not None:
        here &= pairs.phase == Phase[phase.upper()]
    nodes = np.flatnonzero(here)
    return int(nodes[-1]) if len(nodes) else None


def _rows_of(
    trace: Trace,
    pairs: Pairs | None,
    key: str,
    operator: int | None,
    node: int | None,
    direction: Direction = Direction.OUT,
) -> list[dict[str, Any]]:
    """Both arms' rows of each argument of a call at one pair of rows, as `dumps rows` wants them."""
    if pairs is None or node is None or operator is None:
        return []
    wanted = []
    for side, row in (("a", pairs.decode_row[node]), ("b", pairs.scoring_row[node])):
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


def _reads_kv(trace: Trace, finding: Finding) -> bool:
    number = number_of(trace, finding.module, finding.call)
    return number is not None and trace.operators[number].state == "kv"


def _measured(rows: dict[str, tuple[str, Any]], heads: Mapping[str, int]) -> dict[str, UlpDifference]:
    """The largest difference of each key over its arguments; `heads` are the sizes of heads by key."""
    result: dict[str, UlpDifference] = {}
    for name, (dtype, a) in rows.items():
        if not name.endswith("/a"):
            continue
        other = rows.get(name[:-1] + "b")
        if other is None or other[0] != dtype:
            continue
        key = name.rsplit("/", 2)[0]
        difference = compare_rows(dtype, a, other[1], heads.get(key))
        if difference is not None and (key not in result or _size(difference) > _size(result[key])):
            result[key] = difference
    return result


def _size(difference: UlpDifference) -> tuple[int, int, int]:
    return difference.not_numbers, difference.max_ulps, difference.differing


def in_words(difference: UlpDifference) -> str:
    """How much of a row differs, by how much, and how it lies: a sentence."""
    ulps = "1 ulp" if difference.max_ulps == 1 else f"{difference.max_ulps} ulps"
    by = f"by {ulps} at most, " if difference.differing > difference.not_numbers else ""
    text = f"{difference.differing} of {difference.elements} elements differ, {by}{_shape(difference)}"
    if difference.not_numbers:
        text += f"; {difference.not_numbers} are NaN or infinite in one arm"
    return text + _likeness(difference)


def _likeness(difference: UlpDifference) -> str:
    """What it looks like, where it looks like one thing only: other partial sums may be many ulps apart."""
    if difference.not_numbers or (difference.structured and difference.pattern != "scattered"):
        return ": more than rounding."
    if not difference.structured and difference.pattern == "scattered":
        return ": as rounding does."
    return "."


def _shape(difference: UlpDifference) -> str:
    if difference.pattern == "whole":
        return "the whole row"
    some = 0 < difference.parts_differing < difference.parts
    if some and difference.parts_whole == difference.parts_differing:
        return f"{difference.parts_whole} whole of {difference.parts} heads"
    where = f", in {difference.parts_differing} of {difference.parts} heads" if some else ""
    if difference.pattern == "block":
        return f"{difference.longest_run} of them side by side{where}"
    return f"scattered{where}"


def _with_ulps(neighbour: Neighbour, difference: UlpDifference | None) -> Neighbour:
    return neighbour if difference is None else dataclasses.replace(neighbour, ulp_max=difference.max_ulps)


def _with_difference(finding: Finding, difference: UlpDifference | None) -> Finding:
    if difference is None or not difference.differing:
        return finding
    evidence = Evidence("ulps", in_words(difference), difference.as_dict())
    return dataclasses.replace(finding, ulp_max=difference.max_ulps, evidence=(*finding.evidence, evidence))


def head_size(config: Mapping[str, Any]) -> int | None:
    """Elements of an attention head as the model's config.json says, None where it does not."""
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    if isinstance(size := config.get("head_dim"), int) and size > 0:
        return size
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0) or hidden % heads:
        return None
    return hidden // heads
