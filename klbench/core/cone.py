"""What an origin's difference reaches: whether it arrives at a divergent token, and what it hides."""

from __future__ import annotations

import numpy as np

from klbench.core.comparison import ABSENT, Comparison, Pairs, Status
from klbench.core.findings import Masked
from klbench.core.history import History, state_columns
from klbench.core.origins import Judged, Mask, Origin, head_column, is_logits, leaves, scoring_rows
from klbench.core.trace import Direction, Ints, Phase, Trace


class Cone:
    """Follows differences forward, within a row by execution order and between rows through state.

    It errs to the side of reaching: within a row every later difference counts as reached, so only an origin
    whose difference dies for certain is latent.
    """

    def __init__(
        self,
        trace: Trace,
        pairs: Pairs,
        comparison: Comparison,
        history: dict[int, History],
        divergent_positions: Ints,
    ) -> None:
        differs = comparison.status == Status.DIFFERS
        self._nodes = len(pairs)
        columns = len(comparison.operator)
        self._never = columns + 1
        places = np.arange(columns)[:, None]
        self._last = np.where(differs, places, -1).max(axis=0, initial=-1)
        _, hidden = head_column(trace, comparison)
        self._head = int(hidden.min()) if len(hidden) else self._never
        seen = comparison.status[hidden].max(axis=0, initial=ABSENT) >= Status.EQUAL
        at_head = np.where(differs[hidden], hidden[:, None], -1).max(axis=0, initial=-1)
        # Where the rows entering the logits were not observed, any difference may have entered them.
        self._arrives = np.where(seen, at_head, self._last)
        self._divergent = scoring_rows(pairs, divergent_positions)
        stateful = list(history)
        self._out_column = np.full(len(stateful), columns, dtype=np.int64)
        self._out = np.zeros((len(stateful), self._nodes), dtype=np.bool_)
        self._written = np.full((len(stateful), self._nodes), -1, dtype=np.int64)
        for index, number in enumerate(stateful):
            out = comparison.columns(number, Direction.OUT)
            state = state_columns(trace, comparison, number)
            if len(out):
                self._out_column[index] = int(out[0])
                self._out[index] = differs[out].any(axis=0)
            if len(state):
                self._written[index] = np.where(differs[state], state[:, None], -1).max(axis=0)
        self._index = {number: i for i, number in enumerate(stateful)}

    def reaches(self, origin: Origin) -> bool:
        """Whether the difference may have reached a divergent token."""
        if origin.kind == "head" or origin.column >= self._head:
            # What enters the logits, or comes behind that, goes into its own row's token and into no other.
            return bool((origin.rows & self._divergent).any())
        tainted = np.zeros(len(self._out_column), dtype=np.bool_)
        if origin.kind == "state_write":
            # What it wrote is wrong though nothing visible differs at the row itself.
            tainted[self._index[origin.operator]] = True
        start = np.where(origin.rows, origin.column, self._never)
        if origin.kind == "state_write":
            start[:] = self._never
        for node in range(int(np.flatnonzero(origin.rows)[0]), self._nodes):
            reached = int(start[node])
            through_state = tainted & self._out[:, node]
            if through_state.any():
                reached = min(reached, int(self._out_column[through_state].min()))
            if reached == self._never:
                continue
            # A gap's column is the input that it spoils: it may be the state's, or that of the logits.
            if self._divergent[node] and self._arrives[node] >= reached:
                return True
            tainted |= self._written[:, node] >= reached
        return False


def masked_operators(
    trace: Trace,
    pairs: Pairs,
    judged: Judged,
    history: dict[int, History],
    because: str,
) -> list[Masked]:
    """Leaves that in some phase never saw equal inputs and state though both arms were observed.

    `because` is the module of the origin that they lie behind.
    """
    found = []
    for number in leaves(trace):
        operator = trace.operators[number]
        if is_logits(operator):
            continue
        seen: Mask = (judged.inputs[number] != ABSENT) & (judged.outputs[number] != ABSENT)
        fair = judged.inputs[number] != Status.DIFFERS
        if number in history:
            fair &= history[number].status != Status.DIFFERS
        for phase in Phase:
            rows = seen & (pairs.phase == phase)
            if rows.any() and not (rows & fair).any():
                found.append(
                    Masked(
                        module=operator.module,
                        call=operator.call,
                        layer=operator.layer,
                        rank=pairs.rank,
                        phase=phase.name.lower(),
                        first_position=int(pairs.position[rows].min()),
                        rows=int(rows.sum()),
                        because=because,
                    )
                )
    return found
