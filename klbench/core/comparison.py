"""Digests of paired rows side by side: one status per (tensor, row), tensors in execution order.

A *column* is one argument of one call site in one direction. Columns are sorted so that what comes first in a
forward comes first here, in whatever phases the trace has seen. Missing in one arm is never equal.

A tensor without rows, as the sinks of an attention, looks as if it had some where its size is a multiple of
the batch's rows. An input that one arm has in rows and the other as a whole tensor of just as many bytes is
one of those: it tells nothing of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from klbench.core.trace import Direction, Ints, Operator, Trace

Statuses = npt.NDArray[np.int8]


class Status(IntEnum):
    """Ordered so that the larger of several is what they are together, where anything was compared."""

    EQUAL = 0
    UNOBSERVED = 1
    """Only one arm has it, or the two are not of one dtype and size."""
    DIFFERS = 2


ABSENT = -1
"""Neither arm has it, or it has no rows."""

_BLOCK = 1 << 18
"""Digests worked on at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """N paired rows of one request on one rank, in the order of time; all arrays are [N]."""

    rank: int
    request: int
    decode_row: Ints
    """Row of the trace in the warming or generation arm."""
    scoring_row: Ints
    position: Ints
    arm: Ints
    phase: Ints

    def __len__(self) -> int:
        return len(self.decode_row)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """`status[c, n]` of column c at paired row n; columns are [C], in execution order."""

    operator: Ints
    direction: Ints
    argument: Ints
    status: Statuses

    def columns(self, operator: int, direction: Direction) -> Ints:
        return np.flatnonzero((self.operator == operator) & (self.direction == direction))

    def together(self, columns: Ints) -> Statuses:
        """[N] the status of several columns as one: ABSENT where no arm has any of them."""
        if not len(columns):
            return np.full(self.status.shape[1], ABSENT, dtype=np.int8)
        result: Statuses = self.status[columns].max(axis=0)
        return result


def compare(trace: Trace, pairs: Pairs) -> Comparison:
    """Compares every row tensor of the paired rows, C x N.

    Works in blocks, so that what is temporary stays small: most of the time would go into fresh memory.
    """
    on_rank = trace.forward_rank[trace.tensor_forward] == pairs.rank
    first_row = np.full(len(on_rank), -1, dtype=np.int64)
    filled = trace.tensor_rows > 0
    first_row[filled] = trace.tensor_row[trace.tensor_start[filled]]
    tensors = np.flatnonzero(on_rank & (first_row >= 0))
    column_of_tensor, columns = _columns(trace, tensors)
    scoring_rows, node_to_scoring = np.unique(pairs.scoring_row, return_inverse=True)
    decode, scoring = _place(trace, tensors, column_of_tensor, (pairs.decode_row, scoring_rows), len(columns))
    shape = _shape_of_entry(trace, tensors, column_of_tensor, len(columns))
    whole = _Whole(
        trace, np.flatnonzero(on_rank & filled & (first_row < 0)), tensors, column_of_tensor, columns
    )
    status = np.empty((len(columns), len(pairs)), dtype=np.int8)
    step = max(1, _BLOCK // max(len(pairs), 1))
    for top in range(0, len(columns), step):
        here = decode[top : top + step]
        there = scoring[top : top + step].take(node_to_scoring, axis=1)
        # Whole rows are taken: the two halves of a digest come with one miss of the cache.
        a, b = trace.digest.take(here, axis=0), trace.digest.take(there, axis=0)
        equal = (a[..., 0] == b[..., 0]) & (a[..., 1] == b[..., 1])
        found = np.where(equal, np.int8(Status.EQUAL), np.int8(Status.DIFFERS))
        if shape is not None:
            found[shape[here] != shape[there]] = Status.UNOBSERVED
        # A place of -1 took the last digest: it says nothing.
        found[(here < 0) | (there < 0)] = Status.UNOBSERVED
        found[(here < 0) & (there < 0)] = ABSENT
        for column in whole.columns_in(top, top + step):
            found[
                column - top, whole.without_rows(column, pairs, here[column - top], there[column - top])
            ] = ABSENT
        status[top : top + step] = found
    return Comparison(columns[:, 0], columns[:, 1], columns[:, 2], status)


class _Whole:
    """The inputs that some forwards have in rows and others as a whole tensor."""

    def __init__(self, trace: Trace, whole: Ints, tensors: Ints, column: Ints, columns: Ints) -> None:
        self._trace = trace
        self._row_tensors, self._column_of = tensors, column
        self._tensors: dict[int, Ints] = {}
        arguments = len(trace.arguments) + 1
        whole = whole[trace.tensor_direction[whole] == Direction.IN]
        keys = _keys(trace, whole)
        own = (columns[:, 0] * 2 + columns[:, 1]) * arguments + columns[:, 2]
        for number in np.flatnonzero(np.isin(own, keys)).tolist():
            self._tensors[number] = whole[keys == own[number]]

    def columns_in(self, begin: int, end: int) -> list[int]:
        return [column for column in self._tensors if begin <= column < end]

    def without_rows(self, column: int, pairs: Pairs, here: Ints, there: Ints) -> npt.NDArray[np.bool_]:
        """[N] where one arm's forward has the whole tensor with as many bytes as the other has in rows.

        `here` and `there` are the places of the column's digests in both arms, -1 where there is none.
        """
        trace = self._trace
        whole = self._tensors[column]
        rows = self._row_tensors[self._column_of == column]
        whole_bytes = np.full(len(trace.forward_number), -1, dtype=np.int64)
        bytes_in_rows = np.full(len(trace.forward_number), -2, dtype=np.int64)
        whole_bytes[trace.tensor_forward[whole]] = trace.tensor_row_bytes[whole]
        forward = trace.tensor_forward[rows]
        bytes_in_rows[forward] = trace.tensor_row_bytes[rows] * trace.forward_rows[forward]
        decode, scoring = trace.row_forward[pairs.decode_row], trace.row_forward[pairs.scoring_row]
        result: npt.NDArray[np.bool_] = np.where(
            there < 0,
            (here >= 0) & (bytes_in_rows[decode] == whole_bytes[scoring]),
            (here < 0) & (whole_bytes[decode] == bytes_in_rows[scoring]),
        )
        return result


def _entries(trace: Trace, tensors: Ints) -> Ints:
    """The places in `digest` of the given tensors' rows, tensor by tensor."""
    counts = trace.tensor_rows[tensors]
    offset = np.repeat(trace.tensor_start[tensors] - (np.cumsum(counts) - counts), counts)
    result: Ints = np.arange(int(counts.sum())) + offset
    return result


def _place(
    trace: Trace, tensors: Ints, column: Ints, wanted: tuple[Ints, Ints], columns: int
) -> tuple[Ints, Ints]:
    """For each of two lists of rows, [columns, len(list)]: the place of each row's digest in each column.

    -1 where there is none.
    """
    tables = []
    place_of_row = []
    for rows in wanted:
        place = np.full(len(trace.row_forward), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        place_of_row.append(place)
        tables.append(np.full(columns * len(rows), -1, dtype=np.int64))
    counts = trace.tensor_rows[tensors]
    cuts = np.searchsorted(np.cumsum(counts), np.arange(_BLOCK, int(counts.sum()), _BLOCK))
    for block in np.split(np.arange(len(tensors)), np.unique(cuts)):
        entry = _entries(trace, tensors[block])
        entry_column = np.repeat(column[block], counts[block])
        row = trace.tensor_row.take(entry)
        for rows, place, table in zip(wanted, place_of_row, tables, strict=True):
            node = place.take(row)
            chosen = node >= 0
            table[entry_column[chosen] * len(rows) + node[chosen]] = entry[chosen]
    decode, scoring = (table.reshape(columns, len(rows)) for table, rows in zip(tables, wanted, strict=True))
    return decode, scoring


def _shape_of_entry(trace: Trace, tensors: Ints, column: Ints, columns: int) -> Ints | None:
    """A number per digest that stands for dtype and row size; None where each column has only one."""
    shape = trace.tensor_row_bytes[tensors] * (len(trace.dtypes) + 1) + trace.tensor_dtype[tensors]
    low, high = np.full(columns, np.iinfo(np.int64).max), np.full(columns, -1, dtype=np.int64)
    np.minimum.at(low, column, shape)
    np.maximum.at(high, column, shape)
    if np.array_equal(low, high):
        return None
    result = np.full(len(trace.digest), -1, dtype=np.int64)
    result[_entries(trace, tensors)] = np.repeat(shape, trace.tensor_rows[tensors])
    return result


def _keys(trace: Trace, tensors: Ints) -> Ints:
    """A number for each tensor's (operator, direction, argument)."""
    call = trace.tensor_operator[tensors] * 2 + trace.tensor_direction[tensors]
    result: Ints = call * (len(trace.arguments) + 1) + trace.tensor_argument[tensors]
    return result


def _columns(trace: Trace, tensors: Ints) -> tuple[Ints, Ints]:
    """Each tensor's column; the columns [C, 3] (operator, direction, argument) in execution order."""
    arguments = len(trace.arguments) + 1
    keys, found = np.unique(_keys(trace, tensors), return_inverse=True)
    order = _execution_order(trace, tensors, found, len(keys))
    rank = np.empty(len(keys), dtype=np.int64)
    rank[order] = np.arange(len(keys))
    sorted_keys = keys[order]
    operator, rest = np.divmod(sorted_keys, 2 * arguments)
    direction, argument = np.divmod(rest, arguments)
    return rank[found], np.stack([operator, direction, argument], axis=1)


def _execution_order(trace: Trace, tensors: Ints, column: Ints, columns: int) -> Ints:
    """Columns in the order of the forward that has most of them; others go behind what they followed."""
    if not len(tensors):
        return np.arange(columns)
    by_time = np.lexsort(
        (np.arange(len(tensors)), trace.tensor_event[tensors], trace.tensor_forward[tensors])
    )
    ordered = column[by_time]
    cuts = np.flatnonzero(np.diff(trace.tensor_forward[tensors][by_time])) + 1
    sequences = {part.tobytes(): part for part in np.split(ordered, cuts)}
    order: list[int] = []
    for sequence in sorted(sequences.values(), key=len, reverse=True):
        known = set(order)
        place = 0
        for value in sequence.tolist():
            if value in known:
                place = order.index(value) + 1
            else:
                order.insert(place, value)
                known.add(value)
                place += 1
    return np.array(order, dtype=np.int64)


def is_embedding(operator: Operator) -> bool:
    """Whether this call site turns token ids into rows: its output proves which token a row consumes."""
    name = operator.module.rsplit(".", 1)[-1]
    kind = operator.class_name
    if operator.container or "otary" in kind or "rotary" in name:
        return False
    return "Embedding" in kind or name in ("embed_tokens", "word_embeddings", "wte", "embeddings")
