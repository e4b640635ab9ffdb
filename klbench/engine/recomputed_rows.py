"""Rows that an operator is recomputed from: which they are, and how they are asked for.

Inputs are those of the scoring arm, where every position of the request is computed; only rows whose inputs
are equal in both arms are judged. Whatever cannot be fetched or read leaves a finding as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.comparison import Pairs
from klbench.core.confirmation import reads_state
from klbench.core.findings import Finding, Localisation
from klbench.core.recomputed import may_be_recomputed, state_unseen
from klbench.core.trace import Arm, Direction, Ints, Trace
from klbench.core.ulps import as_floats
from klbench.errors import KlbenchError

MOST_ROWS = 16384
"""More of a request are not fetched: each is a row of a file."""
_BEHIND, _BEHIND_UNSEEN = 7, 63
"""Rows behind a finding's first one that more of the generation is repeated for. Where the state was not seen
all that is known of later rows is what is recomputed."""

Floats = npt.NDArray[np.float64]
Rows = Mapping[str, tuple[str, npt.NDArray[np.uint8]]]
Choose = Callable[[set[str]], Iterable[tuple[str, str]]]
"""(short name, the dumper's name) of those arguments that are wanted among all of a call."""


def rows_behind(finding: Finding) -> int:
    """How many rows behind its first one the judgement wants: one alone cannot tell rounding from a key."""
    if state_unseen(finding) and may_be_recomputed(finding):
        return max(_BEHIND, min(finding.count - 1, _BEHIND_UNSEEN))
    return _BEHIND if reads_state(finding) else 0


async def recomputed(
    found: Localisation,
    pairs: Mapping[int, Pairs],
    judged: Callable[[Finding, Pairs], Awaitable[Finding]],
) -> Localisation:
    """`found` with what `judged` makes of each finding whose rank has `pairs`."""
    findings = list(found.findings)
    for number, finding in enumerate(findings):
        if (ours := pairs.get(finding.rank)) is None:
            continue
        try:
            findings[number] = await judged(finding, ours)
        except (KlbenchError, OSError):
            continue
    return dataclasses.replace(found, findings=tuple(findings))


def rows_from(pairs: Pairs, node: int | None, most: int) -> Ints:
    """The pair `node` and those behind it, `most` in all, as long as each was computed after the one before
    and one position further on: rows that were computed again read another cache."""
    if node is None:
        return np.zeros(0, dtype=np.int64)
    nodes = np.arange(node, min(node + most, len(pairs)))
    follows = (np.diff(pairs.position[nodes]) == 1) & (np.diff(pairs.arm[nodes]) == 0)
    result: Ints = nodes[: 1 + int(np.logical_and.accumulate(follows).sum())]
    return result


def scoring_rows(trace: Trace, pairs: Pairs, last: int) -> Ints:
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


class Asking:
    """Rows of one operator's calls as `dumps rows` wants them, under `key/short name`."""

    def __init__(self, trace: Trace, pairs: Pairs, operator: int) -> None:
        self._trace = trace
        self._pairs = pairs
        self._operator = operator
        self._tensors = np.flatnonzero(trace.tensor_operator == operator)
        self._names: dict[tuple[int, Direction], set[str]] = {}
        self.wanted: list[dict[str, Any]] = []

    def row(self, row: int, key: str, direction: Direction, choose: Choose) -> None:
        """Asks for the chosen arguments of the call that computed the row."""
        trace, forward = self._trace, int(self._trace.row_forward[row])
        operator = trace.operators[self._operator]
        self.wanted += [
            {
                "key": f"{key}/{short}",
                "rank": self._pairs.rank,
                "forward": int(trace.forward_number[forward]),
                "module": operator.module,
                "call": operator.call,
                "direction": int(direction),
                "argument": name,
                "row_in_batch": int(trace.row_in_batch[row]),
            }
            for short, name in choose(self._named(forward, direction))
        ]

    def _named(self, forward: int, direction: Direction) -> set[str]:
        """The names of the arguments of the call in a forward."""
        if (forward, direction) not in self._names:
            trace, own = self._trace, self._tensors
            own = own[(trace.tensor_forward[own] == forward) & (trace.tensor_direction[own] == direction)]
            self._names[forward, direction] = {trace.arguments[int(trace.tensor_argument[i])] for i in own}
        return self._names[forward, direction]

    def both_arms(self, nodes: Ints, inputs: Choose) -> None:
        """Inputs and output of the rows that are judged, in both arms: `place/a/...` and `place/b/...`."""
        for place, node in enumerate(nodes):
            for side, rows in (("a", self._pairs.decode_row), ("b", self._pairs.scoring_row)):
                self.row(int(rows[node]), f"{place}/{side}", Direction.IN, inputs)
                self.row(int(rows[node]), f"{place}/{side}", Direction.OUT, _first)


def _first(names: set[str]) -> list[tuple[str, str]]:
    return [("out", name) for name in sorted(names)[:1]]


def equal_rows(rows: Rows, count: int, inputs: Iterable[str]) -> int:
    """How many of the rows that are judged have equal inputs in both arms, up to the first that has not."""
    equal = 0
    while equal < count and all(_same(rows, f"{equal}/{{}}/{part}") for part in inputs):
        equal += 1
    return equal


def _same(rows: Rows, name: str) -> bool:
    one, other = rows.get(name.format("a")), rows.get(name.format("b"))
    return one is not None and other is not None and one[0] == other[0] and np.array_equal(one[1], other[1])


def numbers(rows: Rows, name: str, size: int) -> Floats | None:
    """[heads, size] of one row."""
    found = rows.get(name)
    values = as_floats(*found) if found is not None else None
    return values.reshape(-1, size) if values is not None and values.size % size == 0 else None


def stacked(rows: Iterable[Floats | None]) -> Floats | None:
    """All of them as one array; None where one is missing or of another shape."""
    given = list(rows)
    whole = [row for row in given if row is not None]
    return np.stack(whole) if len(whole) == len(given) and len({row.shape for row in whole}) == 1 else None
