"""Hidden inputs: what a stateful operator may have read at each row, and whether both arms had the same.

Without state reads a row's history is judged by what was written from: the operator's own state inputs (k and
v of attention, everything of a recurrent operator) at all earlier positions that it may reach, each as last
computed before the read, in the order of time. Equal history and a different output leave the write, the
restore and the operator itself open. With state reads the digest of what was read decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from klbench.core.comparison import ABSENT, Comparison, Pairs, Status, Statuses
from klbench.core.trace import METADATA, Direction, Ints, Trace

_QUERY = ("0", "q", "query", "q_rope")
"""Inputs of attention that are no state: what is left of them is written to the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Per stateful operator and row; arrays are [N] in the order of the pairs."""

    status: Statuses
    """Status of everything the row may have read from earlier positions; ABSENT where there is nothing."""
    earlier_forward: npt.NDArray[np.bool_]
    """Whether it reads what another forward wrote, in either arm."""
    first_difference: Ints
    """The earliest position in reach whose state inputs differ; -1 where none does."""


def state_columns(trace: Trace, comparison: Comparison, operator: int) -> Ints:
    """The input columns that a stateful operator writes its state from."""
    columns = comparison.columns(operator, Direction.IN)
    if trace.operators[operator].state == "kv":
        query = [trace.arguments.index(name) for name in _QUERY if name in trace.arguments]
        columns = columns[~np.isin(comparison.argument[columns], query)]
    return columns


def histories(trace: Trace, pairs: Pairs, comparison: Comparison) -> dict[int, History]:
    """The history of every stateful operator at every row, by operator number."""
    stateful = [number for number, operator in enumerate(trace.operators) if operator.state is not None]
    if not stateful or not len(pairs):
        return {}
    own = np.stack([comparison.together(state_columns(trace, comparison, number)) for number in stateful])
    windows = [trace.operators[number].window for number in stateful]
    result: dict[int, History] = {}
    status, first = _reach(pairs.position, own, windows)
    starts = _forward_starts(trace, pairs)
    for index, number in enumerate(stateful):
        window = windows[index]
        low = np.zeros_like(pairs.position) if window is None else np.maximum(pairs.position - window, 0)
        result[number] = History(status[index], low < starts, first[index])
    if trace.observes_state:
        for number in stateful:
            result[number] = _read_history(trace, pairs, number, result[number])
    return result


def reach(pairs: Pairs, own: Statuses, window: int | None) -> Statuses:
    """[N] the joint status of all earlier rows in reach, whose own statuses are `own` [N]."""
    status, _ = _reach(pairs.position, own[None], [window])
    result: Statuses = status[0]
    return result


def _forward_starts(trace: Trace, pairs: Pairs) -> Ints:
    """[N] the first position of the request in the row's forward: the later of the two arms'."""

    def first_in_forward(rows: Ints) -> Ints:
        forward = trace.row_forward[rows]
        lowest = np.full(len(trace.forward_number), np.iinfo(np.int64).max)
        np.minimum.at(lowest, forward, pairs.position)
        return lowest[forward]

    return np.maximum(first_in_forward(pairs.decode_row), first_in_forward(pairs.scoring_row))


def _reach(position: Ints, own: Statuses, windows: list[int | None]) -> tuple[Statuses, Ints]:
    """[L, N] the joint status of all earlier positions in reach, and the first that differs.

    `own` is [L, N]: the status of each row's own state inputs. Rows are in the order of time; a position that
    is computed again overwrites what was there. A run is rows at positions that follow one another.
    """
    layers, nodes = own.shape
    length = int(position.max()) + 1
    held = np.full((layers, length), Status.UNOBSERVED, dtype=np.int8)
    status = np.full((layers, nodes), ABSENT, dtype=np.int8)
    first = np.full((layers, nodes), -1, dtype=np.int64)
    cuts = np.flatnonzero(np.diff(position) != 1) + 1
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), nodes], strict=True):
        here = position[begin:end]
        held[:, here] = np.where(own[:, begin:end] == ABSENT, Status.UNOBSERVED, own[:, begin:end])
        top = int(here[-1]) + 1
        differs = held[:, :top] == Status.DIFFERS
        missing = held[:, :top] == Status.UNOBSERVED
        for layer, window in enumerate(windows):
            low = np.zeros_like(here) if window is None else np.maximum(here - window, 0)
            bad = np.concatenate([[0], np.cumsum(differs[layer])])
            gone = np.concatenate([[0], np.cumsum(missing[layer])])
            any_bad, any_gone = bad[here] > bad[low], gone[here] > gone[low]
            found = np.where(any_bad, Status.DIFFERS, np.where(any_gone, Status.UNOBSERVED, Status.EQUAL))
            status[layer, begin:end] = np.where(here > low, found, ABSENT)
            places = np.flatnonzero(differs[layer])
            if len(places):
                next_bad = places[np.minimum(np.searchsorted(places, low), len(places) - 1)]
                first[layer, begin:end] = np.where(any_bad, next_bad, -1)
    return status, first


def _read_history(trace: Trace, pairs: Pairs, operator: int, fallback: History) -> History:
    """The history as it was read: equal where every argument's digest and range are the same in both arms."""
    mine = np.flatnonzero(trace.read_operator == operator)
    status = np.full(len(pairs), Status.UNOBSERVED, dtype=np.int8)
    if len(mine):
        arguments = len(trace.arguments)
        key = trace.read_row[mine] * arguments + trace.read_argument[mine]
        order = np.argsort(key, kind="stable")
        key, mine = key[order], mine[order]
        seen = np.zeros((len(pairs), arguments), dtype=np.int8)
        for argument in np.unique(trace.read_argument[mine]).tolist():
            if trace.arguments[argument] == METADATA:
                continue
            here = find_sorted(key, pairs.decode_row * arguments + argument)
            there = find_sorted(key, pairs.scoring_row * arguments + argument)
            both = (here >= 0) & (there >= 0)
            a, b = mine[here[both]], mine[there[both]]
            same = (
                (trace.read_digest[a] == trace.read_digest[b]).all(axis=1)
                & (trace.read_low[a] == trace.read_low[b])
                & (trace.read_high[a] == trace.read_high[b])
            )
            seen[both, argument] = np.where(same, 1, 2)
            seen[(here >= 0) != (there >= 0), argument] = 3
        status[(seen == 1).any(axis=1)] = Status.EQUAL
        status[(seen == 3).any(axis=1)] = Status.UNOBSERVED
        status[(seen == 2).any(axis=1)] = Status.DIFFERS
    return History(status, fallback.earlier_forward, fallback.first_difference)


def find_sorted(keys: Ints, wanted: Ints) -> Ints:
    """The place of each wanted key among sorted keys, -1 where it is not."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    result: Ints = np.where(keys[place] == wanted, place, -1)
    return result
