"""The real rows of both arms at a located origin, as they were fetched with the capture.

    for rows in origin_numbers(trace_dir, finding=0):
        rows.name, rows.difference.max_ulps, rows.elements.a, rows.elements.b

Nothing is asked of a server: the rows lie beside the trace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from klbench.core.ulps import Elements, UlpDifference, compare_rows, elements_of
from klbench.engine.raw_tensors import TAGS, read_raw
from klbench.engine.ulp_rows import ORIGIN_ROWS
from klbench.errors import UndecidedError
from klbench.storage import file_inside

_NAME = re.compile(r"(\d+)/((?:in|out)\..+)/a")
_DTYPES = {tag: dtype for dtype, (tag, _) in TAGS.items()}


@dataclass(frozen=True, slots=True, eq=False)
class OriginRows:
    """One argument of the operator at the origin's row: `a` of the finding's arm, `b` of the scoring arm."""

    name: str
    """`in.ARGUMENT` or `out.ARGUMENT`."""
    dtype: str
    difference: UlpDifference
    elements: Elements


def origin_numbers(trace_dir: Path, finding: int) -> tuple[OriginRows, ...]:
    """The rows of one finding (counted from 0), outputs first. Raises KlbenchError where none were kept."""
    path = file_inside(trace_dir, ORIGIN_ROWS)
    if not path.exists():
        gone = not trace_dir.exists()
        raise UndecidedError(
            "the rows of this origin are not there",
            why=f"{trace_dir} is gone" if gone else "the capture could not fetch them: see its evidence",
            next="locate once more on a live server: the rows are fetched with the capture",
        )
    tensors, _ = read_raw(path)
    found: list[OriginRows] = []
    for key, a in tensors.items():
        named = _NAME.fullmatch(key)
        b = tensors.get(key[:-1] + "b")
        if named is None or int(named[1]) != finding or b is None or a.dtype != b.dtype:
            continue
        dtype = _DTYPES.get(a.dtype, a.dtype)
        left, right = (np.frombuffer(side.content, dtype=np.uint8) for side in (a, b))
        difference, elements = compare_rows(dtype, left, right), elements_of(dtype, left, right)
        if difference is not None and elements is not None:
            found.append(OriginRows(named[2], dtype, difference, elements))
    if not found:
        raise UndecidedError(
            "no rows of this finding were kept", why="they are fetched for the first few origins of a capture"
        )
    return tuple(sorted(found, key=lambda rows: (not rows.name.startswith("out."), rows.name)))
