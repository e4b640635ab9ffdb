"""The same first rows computed cold in forwards of several row counts: does the number of rows matter?

    rungs = read_rungs(trace, site, positions=(2, 3), contents=(0, 0, 1, 0, 1, 0))
    judge_row_counts(rungs, arms=(4, 640))      RowCounts(outcome="changes", changed=(64, 640), ...)

For operators that cannot be called again alone, because they read a state or are no call at all (a gap). A
causal model's row needs nothing of the rows behind it, so a cold prompt cut at other lengths, or sent with
others, gives the same row in a forward of another M: its inputs are equal and its state is what the same
forward wrote. Each M is made with two contents of the rows behind: bits that follow the number of rows
alone are condition 1; bits that follow what the other rows hold may be a mask that looks ahead, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from klbench.core.findings import Evidence, Finding
from klbench.core.trace import METADATA, Direction, Operator, Trace

CODE = "row_counts"

Outcome = Literal["changes", "same_bits", "other_rows", "not_repeated", "not_possible"]
Bits = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """Where a row is looked at: an operator's call, or what lies before it (a gap)."""

    module: str
    call: int
    gap: bool

    @classmethod
    def of(cls, finding: Finding) -> Site:
        return cls(finding.module.split(" -> ")[-1], finding.call, finding.kind == "gap")


@dataclass(frozen=True, slots=True)
class Rung:
    """One row of the request in one forward of `rows` rows; `content` says what stood behind it.

    `given` is everything that must be equal before a result may be compared; `result` are its bits, None
    where they were not captured.
    """

    position: int
    rows: int
    content: int
    given: Bits
    result: Bits | None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What the rungs say. `changed` are the M with other bits than the smallest M; `arms_differ` whether the
    M of both arms give other bits, None where one of them was not judged."""

    outcome: Outcome
    tried: tuple[int, ...]
    changed: tuple[int, ...]
    arms: tuple[int, ...]
    arms_differ: bool | None
    positions: tuple[int, ...]
    reason: str = ""


def read_rungs(
    trace: Trace, site: Site, *, rank: int, request: int, positions: Iterable[int], contents: Sequence[int]
) -> tuple[Rung, ...]:
    """The rows of `request` at `positions`, forward by forward, in the order in which they were made.

    `contents` names what stood behind the rows in each forward that holds them. Raises ValueError where the
    trace does not hold one forward for each.
    """
    found: list[Rung] = []
    for position in positions:
        rows = np.flatnonzero(
            (trace.row_request == request)
            & (trace.row_position == position)
            & (trace.forward_rank[trace.row_forward] == rank)
        )
        rows = rows[np.argsort(trace.forward_number[trace.row_forward[rows]], kind="stable")]
        if len(rows) != len(contents):
            raise ValueError(f"row {position} was captured in {len(rows)} forwards, not {len(contents)}")
        for row, content in zip(rows.tolist(), contents, strict=True):
            given, result = _bits_at(trace, site, row)
            count = int(trace.forward_rows[trace.row_forward[row]])
            found.append(Rung(position, count, content, given, result))
    return tuple(found)


def _bits_at(trace: Trace, site: Site, row: int) -> tuple[Bits, Bits | None]:
    forward = int(trace.row_forward[row])
    here = np.flatnonzero(trace.tensor_forward == forward)
    here = here[np.argsort(trace.tensor_event[here], kind="stable")]
    mine = [number for number, operator in enumerate(trace.operators) if _is(operator, site)]
    entries: list[tuple[int, int, int, Bits]] = []
    for tensor in here.tolist():
        start, count = int(trace.tensor_start[tensor]), int(trace.tensor_rows[tensor])
        (places,) = np.nonzero(trace.tensor_row[start : start + count] == row)
        if not len(places):
            continue
        operator = int(trace.tensor_operator[tensor])
        direction = int(trace.tensor_direction[tensor])
        low, high = trace.digest[start + int(places[0])].tolist()
        module = trace.operators[operator].module, trace.operators[operator].call
        argument = trace.arguments[int(trace.tensor_argument[tensor])]
        about = (*module, argument, int(trace.tensor_dtype[tensor]), int(trace.tensor_row_bytes[tensor]))
        entries.append((int(trace.tensor_event[tensor]), operator, direction, (*about, low, high)))
    own = [entry for entry in entries if entry[1] in mine]
    if site.gap:
        # Named by what comes behind it: that one's input, or what a container puts out.
        into = [entry for entry in own if entry[2] == Direction.IN]
        container = any(trace.operators[number].container for number in mine)
        ends = [entry for entry in own if entry[2] == Direction.OUT] if container else into
        first = min((event for event, *_ in ends), default=-1)
        given = tuple(sorted(e[3] for e in entries if e[0] < first and e[2] == Direction.OUT))
    else:
        ends = [entry for entry in own if entry[2] == Direction.OUT]
        given = tuple(sorted(entry[3] for entry in own if entry[2] == Direction.IN))
        given += _reads(trace, mine, row)
    result = tuple(sorted(entry[3] for entry in ends))
    return given, result or None


def _is(operator: Operator, site: Site) -> bool:
    return (operator.module, operator.call) == (site.module, site.call)


def _reads(trace: Trace, operators: Sequence[int], row: int) -> Bits:
    """What the operator read for the row, without what the backend was told: that names slots."""
    here = np.flatnonzero((trace.read_row == row) & np.isin(trace.read_operator, operators))
    return tuple(
        sorted(
            (trace.arguments[int(trace.read_argument[one])], *trace.read_digest[one].tolist())
            for one in here.tolist()
            if trace.arguments[int(trace.read_argument[one])] != METADATA
        )
    )


def judge_row_counts(rungs: Sequence[Rung], arms: tuple[int, ...]) -> RowCounts:
    """Compares each row with itself in the smallest forward; what has other inputs is not compared."""
    results: dict[int, dict[int, set[Bits]]] = {}
    tried: set[int] = set()
    changed: set[int] = set()
    arms_differ: bool | None = None
    positions: list[int] = []
    moved = by_content = False
    for position in sorted({rung.position for rung in rungs}):
        row = [rung for rung in rungs if rung.position == position and rung.result is not None]
        if not row:
            continue
        base = min(row, key=lambda rung: rung.rows)
        judged = [rung for rung in row if rung.given == base.given]
        if len({rung.rows for rung in judged}) < 2:
            continue
        positions.append(position)
        results = {}
        for rung in judged:
            assert rung.result is not None
            results.setdefault(rung.rows, {}).setdefault(rung.content, set()).add(rung.result)
        moved |= any(len(bits) > 1 for by in results.values() for bits in by.values())
        by_content |= any(len({b for bits in by.values() for b in bits}) > 1 for by in results.values())
        tried |= set(results)
        changed |= {rung.rows for rung in judged if rung.result != base.result}
        if len(arms) == 2 and all(rows in results for rows in arms):
            one, other = (next(iter(next(iter(results[rows].values())))) for rows in arms)
            arms_differ = bool(arms_differ) or one != other
    parts = (tuple(sorted(tried)), tuple(sorted(changed)), arms, arms_differ, tuple(positions))
    if not positions:
        why = "with another number of rows its inputs, or its state, were not equal either"
        return RowCounts("not_possible", *parts, reason=why)
    if moved:
        return RowCounts("not_repeated", *parts)
    if by_content:
        return RowCounts("other_rows", *parts)
    differ = arms_differ is True or (arms_differ is None and bool(changed))
    return RowCounts("changes" if differ else "same_bits", *parts)


def row_counts_evidence(found: RowCounts, module: str) -> Evidence:
    """The fact in a finding's evidence."""
    values = {
        "outcome": found.outcome,
        "tried_M": list(found.tried),
        "changed_M": list(found.changed),
        "arms_M": list(found.arms),
        "arms_differ": found.arms_differ,
        "positions": list(found.positions),
    }
    if found.outcome == "not_possible":
        text = f"The same rows in forwards of other row counts: not possible here: {found.reason}."
        return Evidence(CODE, text, values)
    rows = _listed([m for m in found.tried if m not in found.changed])
    said = (
        f"Computed cold in forwards of {_listed(found.tried)} rows, with equal inputs and state, "
        f"the rows at position {_listed(found.positions)} of {module}"
    )
    match found.outcome:
        case "changes":
            text = (
                f"{said} have the same bits with {rows} rows and others with {_listed(found.changed)}, "
                "whatever the rows behind them hold: the number of rows decides."
            )
        case "same_bits":
            text = f"{said} have the same bits: there the number of rows does not matter."
        case "other_rows":
            text = f"{said} follow what the other rows of the forward hold, at equal row counts."
        case _:
            text = f"{said} did not repeat themselves in equal forwards."
    return Evidence(CODE, text, values)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "no"
