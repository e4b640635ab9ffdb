"""Gaps in or beside operators that read state: a difference there may come from the state.

What lies between two children of such an operator (a mixer's convolution and scan, between its projections)
is the operator's own work: its state must be equal too, and then it is the operator that is named. Where an
operator with state was not seen at a row though it ran there, past the hooks, it may lie in any gap beside
it: all kinds remain, and none is ever confirmed.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from klbench.core.comparison import ABSENT, Comparison, Pairs, Status
from klbench.core.history import History, reach, state_columns
from klbench.core.origins import Judged, Mask, Origin
from klbench.core.trace import Direction, Trace


def beside_state(
    trace: Trace,
    pairs: Pairs,
    comparison: Comparison,
    judged: Judged,
    history: dict[int, History],
    candidates: list[Origin],
    of_state: list[Origin],
) -> list[Origin]:
    """The candidates; gaps in operators with state are these operators, and those beside unseen ones open.

    Rows whose state is to blame are left out: those of `of_state`, and those that inherit a difference.
    """
    around = _Around(trace, pairs, comparison, judged, history)
    found = [part for origin in candidates for part in around.parts(origin)]
    restored = {
        number: np.logical_or.reduce([o.rows for o in of_state if o.operator == number])
        for number in {origin.operator for origin in of_state}
    }
    left = []
    for origin in found:
        rows = origin.rows
        if origin.kind == "operator" and origin.operator in restored:
            rows = rows & ~restored[origin.operator]
        if rows.any():
            left.append(dataclasses.replace(origin, rows=rows))
    return left


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Around:
    trace: Trace
    pairs: Pairs
    comparison: Comparison
    judged: Judged
    history: dict[int, History]

    def parts(self, origin: Origin) -> list[Origin]:
        """The origin itself, or what its rows are where operators with state are near."""
        if origin.kind != "gap":
            return [origin]
        rest, found = origin.rows, []
        for number in self.history:
            if not self._contains(number, origin.operator):
                continue
            own = rest & self._seen(number) & (self.judged.inputs[number] == Status.EQUAL)
            rest = rest & ~own
            own = own & ~self._inherited(number, origin)
            if own.any():
                found.append(Origin("operator", number, origin.column, own))
        for number in self.history:
            if not self._near(number, origin):
                continue
            unseen = rest & ~self._seen_or_twin(number)
            rest = rest & ~unseen
            unseen = unseen & ~self._before_differs(number, origin)
            if unseen.any():
                found.append(dataclasses.replace(origin, rows=unseen, unseen=number))
        if rest.any():
            found.append(dataclasses.replace(origin, rows=rest))
        return found

    def _module(self, number: int) -> str:
        return self.trace.operators[number].module

    def _contains(self, number: int, other: int) -> bool:
        return f"{self._module(other)}.".startswith(f"{self._module(number)}.")

    def _near(self, number: int, gap: Origin) -> bool:
        """Whether the gap ends in, or beside, the operator's own children and siblings."""
        module = self._module(number)
        place = module.rpartition(".")[0] or module
        ends = [gap.operator, *([gap.before] if gap.before is not None else [])]
        return any(f"{self._module(end)}.".startswith(f"{place}.") for end in ends)

    def _seen(self, number: int) -> Mask:
        outputs = self.judged.outputs[number]
        seen: Mask = (outputs != ABSENT) & (outputs != Status.UNOBSERVED)
        return seen

    def _seen_or_twin(self, number: int) -> Mask:
        """Where the operator was compared, or one of the same kind and place (some models have two)."""
        operators = self.trace.operators
        place, state = self._module(number).rpartition(".")[0], operators[number].state
        seen = np.zeros(len(self.pairs), dtype=np.bool_)
        for other in self.history:
            if operators[other].state == state and self._module(other).rpartition(".")[0] == place:
                seen |= self._seen(other)
        return seen

    def _inherited(self, number: int, gap: Origin) -> Mask:
        """Where the operator's state differs, as it was read or, where that was not seen, as it was made."""
        status = self.history[number].status
        made_from = self.comparison.together(state_columns(self.trace, self.comparison, number))
        made = reach(self.pairs, made_from, self.trace.operators[number].window) == Status.DIFFERS
        made |= self._before_differs(number, gap)
        unread = (status == Status.UNOBSERVED) | (not self.trace.observes_state)
        inherited: Mask = (status == Status.DIFFERS) | (unread & made)
        return inherited

    def _before_differs(self, number: int, gap: Origin) -> Mask:
        """Where what was last put out before the gap differs at an earlier row in the operator's reach."""
        if gap.before is None:
            return np.zeros(len(self.pairs), dtype=np.bool_)
        put_out = self.comparison.together(self.comparison.columns(gap.before, Direction.OUT))
        differs: Mask = reach(self.pairs, put_out, self.trace.operators[number].window) == Status.DIFFERS
        return differs
