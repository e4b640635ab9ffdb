"""Several ranks that compute one request together: what one inherits from another, what shows on several.

With tensor parallelism each rank has some of the heads, experts and words, and the ranks add up or collect
what they have: inside a module, or in code between two of them that nobody hooks. There a difference of one
rank enters the others, whose own inputs are all equal. So, at the same row:

- a leaf whose inputs differ on another rank is no origin where its own are equal;
- a gap is one only where nothing before it differs on any rank;
- the head as a whole is one only where no rank's rows entering the logits, and none of its operators, differ.

What begins at one place on several ranks at once (a reduction that adds in another order) stays an origin of
each, and is one finding that names them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from klbench.core.comparison import Comparison, Pairs, Status
from klbench.core.findings import Evidence, Finding
from klbench.core.history import find_sorted
from klbench.core.origins import HEAD_OPERATORS, Mask, Origin, head_column, is_logits
from klbench.core.trace import Direction, Ints, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """Another rank as this one's N rows see it."""

    comparison: Comparison
    rows: Ints
    """[N] its row of the same position and time, -1 where it has none."""
    first: Ints
    """[N] where its first difference is: 2 c + 1 for this rank's column c, 2 c for one that this rank lacks
    and that comes before c; more than all of them where there is none."""

    def differs(self, columns: Ints) -> Mask:
        """[N] whether any of its `columns` differs at the row."""
        status = self.comparison.together(columns)
        if not len(status):
            return np.zeros(len(self.rows), dtype=np.bool_)
        mask: Mask = (status[self.rows] == Status.DIFFERS) & (self.rows >= 0)
        return mask


def same_rows(mine: Pairs, other: Pairs) -> Ints:
    """[N] the row of `other` that each of mine is: same arm, phase and position, computed as often before."""
    if not len(other):
        return np.full(len(mine), -1, dtype=np.int64)
    span = int(max(mine.position.max(initial=0), other.position.max())) + 1
    times = max(len(mine), len(other))

    def keys(pairs: Pairs) -> Ints:
        place = (pairs.arm * 16 + pairs.phase) * span + pairs.position
        order = np.argsort(place, kind="stable")
        new = np.flatnonzero(np.diff(place[order], prepend=-1))
        count = np.empty(len(place), dtype=np.int64)
        count[order] = np.arange(len(place)) - np.repeat(new, np.diff(new, append=len(place)))
        result: Ints = place * times + count
        return result

    there = keys(other)
    order = np.argsort(there, kind="stable")
    found = find_sorted(there[order], keys(mine))
    result: Ints = np.where(found >= 0, order[found], -1)
    return result


def beside(mine: tuple[Pairs, Comparison], other: tuple[Pairs, Comparison]) -> Beside:
    """The other rank's (pairs, comparison) as seen from mine."""
    comparison, rows = other[1], same_rows(mine[0], other[0])
    places = _places(mine[1], comparison)
    nowhere = 2 * len(mine[1].operator) + 1
    first = np.full(len(other[0]), nowhere, dtype=np.int64)
    for column, place in enumerate(places.tolist()):
        here = comparison.status[column] == Status.DIFFERS
        first[here] = np.minimum(first[here], place)
    if not len(first):
        return Beside(comparison, rows, np.full(len(mine[0]), nowhere, dtype=np.int64))
    return Beside(comparison, rows, np.where(rows >= 0, first[rows], nowhere))


def _places(mine: Comparison, other: Comparison) -> Ints:
    """[C of other] the place of each of its columns among mine, as in `Beside.first`."""
    known = {key: 2 * column + 1 for column, key in enumerate(_keys(mine))}
    places = np.empty(len(other.operator), dtype=np.int64)
    behind = 2 * len(known)
    for column, key in reversed(list(enumerate(_keys(other)))):
        places[column] = known.get(key, behind)
        behind = places[column] - places[column] % 2
    return places


def _keys(comparison: Comparison) -> list[tuple[int, ...]]:
    columns = (comparison.operator, comparison.direction, comparison.argument)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def inherited(trace: Trace, comparison: Comparison, origin: Origin, others: Sequence[Beside]) -> Mask:
    """Rows of a leaf, a gap or the head where another rank explains the difference."""
    found = np.zeros_like(origin.rows)
    for other in others:
        if origin.kind == "gap":
            found |= other.first < 2 * _begin(comparison, origin.column) + 1
        elif is_logits(trace.operators[origin.operator]):
            _, hidden = head_column(trace, other.comparison)
            found |= other.differs(np.concatenate([hidden, _head_outputs(trace, other.comparison)]))
        else:
            found |= other.differs(other.comparison.columns(origin.operator, Direction.IN))
            if origin.kind == "not_observed":
                found |= other.first < 2 * origin.column + 1
    return found & origin.rows


def _begin(comparison: Comparison, column: int) -> int:
    """The first column of the event that `column` belongs to: its arguments come at once."""
    operator, direction = int(comparison.operator[column]), Direction(int(comparison.direction[column]))
    return int(comparison.columns(operator, direction)[0])


def _head_outputs(trace: Trace, comparison: Comparison) -> Ints:
    numbers = [number for number, op in enumerate(trace.operators) if op.module in HEAD_OPERATORS]
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *(comparison.columns(number, Direction.OUT) for number in numbers)])


def as_one(findings: Sequence[Finding]) -> list[Finding]:
    """What begins at the same place and row on several ranks is one finding, the first of them."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        place = (finding.kinds, finding.module, finding.call, finding.arm, finding.phase)
        about = (*place, finding.first_position, finding.latent, finding.grade)
        groups.setdefault(about, []).append(finding)
    return [_said_of_all(group) for group in groups.values()]


def _said_of_all(group: Sequence[Finding]) -> Finding:
    ranks = sorted({finding.rank for finding in group})
    if len(ranks) < 2:
        return group[0]
    text = f"It begins at this row on the ranks {', '.join(map(str, ranks))} alike."
    fact = Evidence("ranks", text, {"ranks": ranks})
    return dataclasses.replace(group[0], evidence=(*group[0].evidence, fact))


def open_to_others(finding: Finding, ranks: Sequence[int]) -> Finding:
    """The finding where `ranks` could not be compared: it may be inherited from one of them."""
    if not ranks or finding.kind not in ("operator", "gap", "head") or "not_observed" in finding.kinds:
        return finding
    numbers = ", ".join(map(str, ranks))
    text = f"Rank {numbers} could not be compared: what it added may be what differs."
    fact = Evidence("ranks_not_compared", text, {"ranks": list(ranks)})
    return dataclasses.replace(
        finding, kinds=(*finding.kinds, "not_observed"), evidence=(*finding.evidence, fact)
    )
