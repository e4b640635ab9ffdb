"""Unfolds the packed forwards of a trace file into the tensor table that `core.trace` knows.

Forwards that are alike share a layout: the list of their tensors, each with the group of rows it covers and
the piece of digests it has. Several tensors may have one piece (the output of one operator is the input of
the next), which is stored once and unfolded here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from klbench.core.trace import Ints

PACKED_COLUMNS = ("packed_forward", "packed_layout", "packed_first_row", "packed_rows")
LIST_COLUMNS = ("list_packed", "list_group", "list_row")
LAYOUT_COLUMNS = tuple(
    f"layout_{name}"
    for name in (
        *("number", "operator", "direction", "argument", "dtype"),
        *("row_bytes", "event", "group", "piece"),
    )
)
COLUMNS = (*PACKED_COLUMNS, *LIST_COLUMNS, *LAYOUT_COLUMNS)
_ENTRY = ("operator", "direction", "argument", "dtype", "row_bytes", "event")
_WHOLE, _ROWS = 0, 1


class BadPacking(ValueError):
    """The packed tables contradict each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Unfolded:
    """Tensors of the packed forwards; `start` counts from 0."""

    columns: dict[str, Ints]
    """Columns of table tensor, and `tensor_row`."""
    digest: npt.NDArray[np.uint64]


class _Shape:
    """What all forwards of one layout and one set of group sizes have in common."""

    def __init__(self, group: Ints, piece: Ints, sizes: Ints) -> None:
        self.counts = sizes[group]
        pieces = int(piece.max()) + 1 if len(piece) else 0
        piece_rows = np.full(pieces, -1, dtype=np.int64)
        piece_rows[piece] = self.counts
        if (piece_rows < 0).any() or (piece_rows[piece] != self.counts).any():
            raise BadPacking("a piece of digests has no tensor, or tensors of different lengths")
        piece_start = np.cumsum(piece_rows) - piece_rows
        self.digests = int(piece_rows.sum())
        self.total = int(self.counts.sum())
        place = np.arange(self.total) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        self.source = np.repeat(piece_start[piece], self.counts) + place
        group_start = np.cumsum(sizes) - sizes
        self.row_source = np.repeat(group_start[group], self.counts) + place


def unfold(columns: dict[str, Ints], digest: npt.NDArray[np.uint64]) -> Unfolded:
    """The tensor table of one rank's packed forwards. Raises BadPacking where it makes no sense."""
    layouts = _layouts(columns)
    forwards = len(columns["packed_forward"])
    lists = _lists(columns, forwards)
    parts: dict[str, list[Ints]] = {name: [] for name in (*_ENTRY, "forward", "rows", "row")}
    sources: list[Ints] = []
    shapes: dict[tuple[int, ...], _Shape] = {}
    place = 0
    for number in range(forwards):
        layout = int(columns["packed_layout"][number])
        rows = int(columns["packed_rows"][number])
        first = int(columns["packed_first_row"][number])
        if layout not in layouts or rows < 0 or rows > len(columns["row_forward"]):
            raise BadPacking("a packed forward names a layout or rows that are not there")
        entries = layouts[layout]
        own = lists.get(number, [])
        groups = [
            np.array([-1], dtype=np.int64),
            np.arange(first, first + rows, dtype=np.int64),
            *own,
        ]
        if len(entries["group"]) and not 0 <= int(entries["group"].max()) < len(groups):
            # A list without any row leaves no trace of itself.
            missing = int(entries["group"].max()) + 1 - len(groups)
            if missing > len(entries["group"]):
                raise BadPacking("a layout names a group of rows that is not there")
            groups += [np.zeros(0, dtype=np.int64)] * missing
        sizes = np.array([len(group) for group in groups], dtype=np.int64)
        key = (layout, *sizes.tolist())
        shape = shapes.get(key)
        if shape is None:
            shape = shapes[key] = _Shape(entries["group"], entries["piece"], sizes)
        if place + shape.digests > len(digest):
            raise BadPacking("there are fewer digests than the packed forwards need")
        for name in _ENTRY:
            parts[name].append(entries[name])
        parts["forward"].append(
            np.full(len(entries["group"]), columns["packed_forward"][number], dtype=np.int64)
        )
        parts["rows"].append(shape.counts)
        parts["row"].append(np.concatenate(groups)[shape.row_source])
        sources.append(shape.source + place)
        place += shape.digests
    if place != len(digest):
        raise BadPacking(f"{len(digest)} digests were stored and {place} are used")

    def joined(arrays: list[Ints]) -> Ints:
        return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)

    result = {f"tensor_{name}": joined(arrays) for name, arrays in parts.items()}
    result["tensor_start"] = np.cumsum(result["tensor_rows"]) - result["tensor_rows"]
    return Unfolded(result, digest[joined(sources)])


def _layouts(columns: dict[str, Ints]) -> dict[int, dict[str, Ints]]:
    number = columns["layout_number"]
    for name in ("group", "piece"):
        values = columns[f"layout_{name}"]
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) <= len(values):
            raise BadPacking(f"the column layout_{name} is out of bounds")
    cuts = np.flatnonzero(np.diff(number)) + 1
    result: dict[int, dict[str, Ints]] = {}
    for part in np.split(np.arange(len(number)), cuts):
        if len(part):
            result[int(number[part[0]])] = {
                name: columns[f"layout_{name}"][part] for name in (*_ENTRY, "group", "piece")
            }
    return result


def _lists(columns: dict[str, Ints], forwards: int) -> dict[int, list[Ints]]:
    """The row lists of each packed forward, those of group 2 first."""
    packed, group = columns["list_packed"], columns["list_group"]
    if len(packed) and not (
        int(packed.min()) >= 0 and int(packed.max()) < forwards and int(group.min()) > _ROWS
    ):
        raise BadPacking("a list of rows belongs to no packed forward")
    result: dict[int, list[Ints]] = {}
    cuts = np.flatnonzero((np.diff(packed) != 0) | (np.diff(group) != 0)) + 1
    for part in np.split(np.arange(len(packed)), cuts):
        if not len(part):
            continue
        own = result.setdefault(int(packed[part[0]]), [])
        missing = int(group[part[0]]) - 2 - len(own)
        if missing < 0 or missing > len(packed):
            raise BadPacking("the lists of rows are not in order")
        own += [np.zeros(0, dtype=np.int64)] * missing
        own.append(columns["list_row"][part])
    return result
