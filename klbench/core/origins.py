"""Candidates for origins at every row at once: leaf operators, gaps, state, the head.

Each is an operator with a mask over the paired rows. What they mean is said in localisation.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from klbench.core.comparison import ABSENT, Comparison, Pairs, Status, Statuses
from klbench.core.findings import Kind
from klbench.core.history import History
from klbench.core.state_rows import StateRows
from klbench.core.trace import Arm, Direction, Ints, Operator, Trace

Mask = npt.NDArray[np.bool_]

HEAD_OPERATORS = ("lm_head", "logits", "logprob")
"""Names of the head's own operators where a back end observes them."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """One operator and the rows where a difference is born in it."""

    kind: Kind
    operator: int
    column: int
    """Where the difference first shows, in execution order."""
    rows: Mask
    before: int | None = None
    """For a gap: operator A, the last to put out equal bits."""
    state: StateRows | None = None
    """For a state kind: the rows of state that are wrong."""
    unseen: int | None = None
    """For a gap: an operator with state that ran there or beside it, past the hooks."""


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """[operators, N] joint status of each operator's inputs and of its outputs."""

    inputs: Statuses
    outputs: Statuses


def judge(trace: Trace, comparison: Comparison) -> Judged:
    numbers = range(len(trace.operators))
    return Judged(
        np.stack([comparison.together(comparison.columns(number, Direction.IN)) for number in numbers]),
        np.stack([comparison.together(comparison.columns(number, Direction.OUT)) for number in numbers]),
    )


def leaves(trace: Trace) -> list[int]:
    """The innermost operators: those that no hooked child explains."""
    return [number for number, operator in enumerate(trace.operators) if not operator.container]


def is_logits(operator: Operator) -> bool:
    """Whether this call site takes the last hidden rows to logits: rows of its output are pruned.

    The operators of the head are functions of the logits processor and have its class, not its pruned rows.
    """
    return operator.module not in HEAD_OPERATORS and (
        operator.class_name == "LogitsProcessor" or operator.module.rsplit(".", 1)[-1] == "logits_processor"
    )


def compared_rows(pairs: Pairs, first_token: int) -> Mask:
    """Rows of the generation arm that score a token from `first_token` on: their logprobs were compared."""
    mask: Mask = (pairs.arm == Arm.GENERATION) & (pairs.position + 1 >= first_token)
    return mask


def leaf_origins(
    trace: Trace, comparison: Comparison, judged: Judged, history: dict[int, History], compared: Mask
) -> list[Origin]:
    """Leaves with equal (or, where none is observed, unknown) inputs, equal state and another output.

    Operators of the head are judged at the `compared` rows alone.
    """
    found = []
    nothing_before = _all_equal_before(comparison)
    for number in leaves(trace):
        columns = comparison.columns(number, Direction.OUT)
        if not len(columns) or is_logits(trace.operators[number]):
            continue
        born = judged.outputs[number] == Status.DIFFERS
        if not born.any():
            continue
        inputs = judged.inputs[number]
        unseen = (inputs == ABSENT) | (inputs == Status.UNOBSERVED)
        if number in history:
            # Where the history could not be seen the row is kept, and the finding says so.
            born &= history[number].status != Status.DIFFERS
        known = born & (inputs == Status.EQUAL)
        unknown = born & unseen & nothing_before[int(columns[0])]
        kind: Kind = "operator"
        if trace.operators[number].module in HEAD_OPERATORS:
            kind = "head"
            known, unknown = known & compared, unknown & compared
        if known.any():
            found.append(Origin(kind, number, int(columns[0]), known))
        if unknown.any():
            found.append(Origin("not_observed", number, int(columns[0]), unknown))
    return found


def _all_equal_before(comparison: Comparison) -> Mask:
    """[C, N] whether no column before c differs at row n."""
    differs = comparison.status == Status.DIFFERS
    before = np.zeros_like(differs)
    if len(differs) > 1:
        before[1:] = np.logical_or.accumulate(differs, axis=0)[:-1]
    result: Mask = ~before
    return result


def gaps(trace: Trace, comparison: Comparison, compared: Mask) -> list[Origin]:
    """Rows whose first difference is an input, or the output of a container.

    What enters the head is judged at the `compared` rows alone.
    """
    differs = comparison.status == Status.DIFFERS
    if not len(differs):
        return []
    container = np.array([operator.container for operator in trace.operators], dtype=np.bool_)
    is_leaf = ~container[comparison.operator]
    is_output = comparison.direction == Direction.OUT
    first = np.where(differs.any(axis=0), differs.argmax(axis=0), -1)
    groups: dict[tuple[int | None, int], tuple[int, Mask]] = {}
    for column in np.unique(first[first >= 0]).tolist():
        if is_leaf[column] and is_output[column]:
            continue
        at = first == column
        for node_column in np.unique(_innermost(differs[:, at], column, is_leaf, is_output)).tolist():
            here = at.copy()
            here[at] = _innermost(differs[:, at], column, is_leaf, is_output) == node_column
            after = int(comparison.operator[node_column])
            if is_logits(trace.operators[after]) and is_output[node_column]:
                continue
            earlier = np.flatnonzero(is_leaf[:column] & is_output[:column])
            before = int(comparison.operator[earlier[-1]]) if len(earlier) else None
            _, rows = groups.get((before, after), (column, np.zeros(differs.shape[1], dtype=np.bool_)))
            groups[before, after] = (column, rows | here)
    found = []
    for (before, after), (column, rows) in groups.items():
        operator = trace.operators[after]
        if is_logits(operator) or operator.module in HEAD_OPERATORS:
            rows = rows & compared
        if rows.any():
            found.append(Origin("gap", after, column, rows, before=before))
    return found


def _innermost(differs: Mask, column: int, is_leaf: Mask, is_output: Mask) -> Ints:
    """For each row (columns of `differs`) whose first difference is `column`: the leaf input that shows it.

    A container's inputs come before its child's; the child is named, unless the difference never gets there
    before something is put out.
    """
    if is_output[column]:
        return np.full(differs.shape[1], column)
    leaf_input = (is_leaf & ~is_output)[:, None] & differs
    output = is_output[:, None] & differs
    leaf_input[:column] = False
    found = np.where(leaf_input.any(axis=0), leaf_input.argmax(axis=0), column)
    put_out = np.where(output.any(axis=0), output.argmax(axis=0), len(differs))
    result: Ints = np.where(found < put_out, found, column)
    return result


def scoring_rows(pairs: Pairs, divergent_positions: Ints) -> Mask:
    """Rows of the generation arm that scored a divergent token: the first row at the position before it."""
    mask = np.zeros(len(pairs), dtype=np.bool_)
    generated = np.flatnonzero(pairs.arm == Arm.GENERATION)
    _, first = np.unique(pairs.position[generated], return_index=True)
    nodes = generated[first]
    mask[nodes[np.isin(pairs.position[nodes] + 1, divergent_positions)]] = True
    return mask


def head_column(trace: Trace, comparison: Comparison) -> tuple[int, Ints]:
    """The operator that takes hidden rows to logits (-1: none) and its row inputs."""
    for number, operator in enumerate(trace.operators):
        if is_logits(operator):
            return number, comparison.columns(number, Direction.IN)
    return -1, np.zeros(0, dtype=np.int64)


def head(trace: Trace, pairs: Pairs, comparison: Comparison, divergent_positions: Ints) -> list[Origin]:
    """Rows whose hidden input to the logits is equal though their token's logprob differs."""
    number, columns = head_column(trace, comparison)
    if number < 0:
        return []
    rows = scoring_rows(pairs, divergent_positions)
    rows &= comparison.together(columns) == Status.EQUAL
    if trace.observes_head:
        # An operator of the head that differs says more than the head as a whole.
        for inner, operator in enumerate(trace.operators):
            if operator.module in HEAD_OPERATORS:
                inner_columns = comparison.columns(inner, Direction.OUT)
                rows &= comparison.together(inner_columns) != Status.DIFFERS
    return [Origin("head", number, len(comparison.operator), rows)] if rows.any() else []
