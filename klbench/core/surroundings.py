"""What the origin screen draws: the operators around the first origin, and the map of layers by rows."""

from __future__ import annotations

import numpy as np

from klbench.core.comparison import ABSENT, Comparison, Pairs, Status, Statuses
from klbench.core.findings import Map, Neighbour
from klbench.core.history import History
from klbench.core.origins import Judged, Origin, leaves, scoring_rows
from klbench.core.trace import Arm, Ints, Trace

_AROUND = 8
_MAP_ROWS = 512

_WORDS = {
    ABSENT: "none",
    int(Status.EQUAL): "equal",
    int(Status.UNOBSERVED): "not_observed",
    int(Status.DIFFERS): "differs",
}


def neighbours(
    trace: Trace,
    comparison: Comparison,
    judged: Judged,
    history: dict[int, History],
    origin: Origin,
    node: int,
) -> tuple[Neighbour, ...]:
    """The leaves before and behind the origin at one row, in execution order."""
    place = {int(operator): index for index, operator in reversed(list(enumerate(comparison.operator)))}
    here = [number for number in leaves(trace) if number in place]
    here.sort(key=lambda number: place[number])
    centre = here.index(origin.operator) if origin.operator in here else len(here)
    return tuple(
        Neighbour(
            module=trace.operators[number].module,
            call=trace.operators[number].call,
            operator=number,
            layer=trace.operators[number].layer,
            inputs=_WORDS[int(judged.inputs[number, node])],
            state=_state(trace, history[number], node) if number in history else "none",
            output=_WORDS[int(judged.outputs[number, node])],
            origin=number == origin.operator,
        )
        for number in here[max(0, centre - _AROUND) : centre + _AROUND + 1]
    )


def _state(trace: Trace, history: History, node: int) -> str:
    """The history's word; without state reads it says no more than what the state was written from."""
    word = _WORDS[int(history.status[node])]
    return f"written_{word}" if word in ("equal", "differs") and not trace.observes_state else word


def layer_map(
    trace: Trace,
    pairs: Pairs,
    comparison: Comparison,
    history: dict[int, History],
    origins: list[Origin],
    divergent_positions: Ints,
) -> Map:
    """Layers and the head by rows, in the order of time; neighbouring rows share a cell where there are many.

    The worst of what lies in a cell is shown.
    """
    layer_of = np.array([-1 if op.layer is None else op.layer for op in trace.operators], dtype=np.int64)
    numbers = sorted({int(layer) for layer in layer_of if layer >= 0})
    column_layer = layer_of[comparison.operator]
    cells = np.full((len(numbers) + 1, len(pairs)), ABSENT, dtype=np.int8)
    for index, layer in enumerate(numbers):
        status = comparison.together(np.flatnonzero(column_layer == layer))
        row = np.where(status == Status.EQUAL, 0, np.where(status == Status.DIFFERS, 2, -1)).astype(np.int8)
        for number, seen in history.items():
            if layer_of[number] == layer:
                row[(row == 0) & (seen.status == Status.DIFFERS)] = 1
        cells[index] = row
    scored = pairs.arm == Arm.GENERATION
    cells[-1, scored] = 0
    cells[-1, scoring_rows(pairs, divergent_positions)] = 2
    for origin in origins:
        layer = int(layer_of[origin.operator])
        cells[numbers.index(layer) if layer in numbers else len(numbers), origin.rows] = 3
    return cells_as_map(tuple(str(layer) for layer in numbers), pairs, cells)


def cells_as_map(layers: tuple[str, ...], pairs: Pairs, cells: Statuses) -> Map:
    """The map of cells [layers and the head, N], with neighbouring rows together where there are many."""
    step = -(-len(pairs) // _MAP_ROWS) if len(pairs) else 1
    starts = np.arange(0, len(pairs), step)
    binned = np.maximum.reduceat(cells, starts, axis=1) if len(starts) else cells
    return Map(
        layers=(*layers, "head"),
        positions=tuple(int(position) for position in pairs.position[starts]),
        arms=tuple(Arm(int(arm)).name.lower() for arm in pairs.arm[starts]),
        cells=tuple(tuple(int(cell) for cell in row) for row in binned),
    )
