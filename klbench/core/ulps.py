"""How two rows of one dtype differ: in units in the last place, how many elements, and where they lie.

A difference of rounding is a few ulps at scattered elements. A wrong mask, window, slot or head changes many
elements by much, often whole blocks of them. An element far below the row's largest is measured in the ulps
that matter to the row: where a sum cancels to nearly zero its own ulps say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Pattern = Literal["equal", "scattered", "block", "whole"]

_FLOATS: dict[str, tuple[str, int]] = {
    # dtype: the unsigned type of its bits, and how many of them hold the mantissa
    "float64": ("<u8", 52),
    "float32": ("<u4", 23),
    "float16": ("<u2", 10),
    "bfloat16": ("<u2", 7),
    "float8_e4m3fn": ("u1", 3),
    "float8_e5m2": ("u1", 2),
}
_INTEGERS = {"int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1", "uint8": "u1", "bool": "u1"}
_FEW_ULPS = 8
_BLOCK = 8
"""A run of this many differing elements is a block."""


@dataclass(frozen=True, slots=True)
class UlpDifference:
    """`max_ulps` is over elements that are numbers in both rows; others are counted in `not_numbers`.

    It is |a - b| over the spacing of floats at the larger of |a|, |b| and the row's largest magnitude divided
    by 2^(mantissa bits), rounded up. For integers it is |a - b|.
    """

    elements: int
    differing: int
    max_ulps: int
    not_numbers: int
    first: int
    """The first differing element, -1 where none differs."""
    last: int
    longest_run: int
    """The longest stretch of neighbours that all differ."""
    pattern: Pattern
    parts: int = 0
    """Of how many equal parts (heads) the row is made; 0 where that is not known."""
    parts_differing: int = 0
    """Parts in which any element differs."""
    parts_whole: int = 0
    """Parts in which every element differs."""

    @property
    def structured(self) -> bool:
        """Whether it is more than rounding: many ulps, or NaN or infinity in one row only."""
        return self.max_ulps > _FEW_ULPS or self.not_numbers > 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "elements": self.elements,
            "differing": self.differing,
            "max_ulps": self.max_ulps,
            "not_numbers": self.not_numbers,
            "first": self.first,
            "last": self.last,
            "longest_run": self.longest_run,
            "pattern": self.pattern,
            "structured": self.structured,
            "parts": self.parts,
            "parts_differing": self.parts_differing,
            "parts_whole": self.parts_whole,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """Two rows element by element, all [n]: their values (NaN: no number), whether the bits differ,
    whether both are numbers, and how many ulps they are apart (0 where one is no number)."""

    a: npt.NDArray[np.float64]
    b: npt.NDArray[np.float64]
    differs: npt.NDArray[np.bool_]
    number: npt.NDArray[np.bool_]
    ulps: npt.NDArray[np.uint64]


def elements_of(dtype: str, a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> Elements | None:
    """The raw bytes of two rows, element by element; None where the dtype is unknown or their sizes differ.

    Two bit patterns that are both NaN count as different if their bits are; so do -0 and +0, by 0 ulps.
    """
    if a.shape != b.shape or a.ndim != 1:
        return None
    if dtype in _FLOATS:
        kind, mantissa = _FLOATS[dtype]
        bits = np.dtype(kind).itemsize
        if a.size % bits:
            return None
        left, right = (np.ascontiguousarray(row).view(kind).astype(np.uint64) for row in (a, b))
        finite = [_is_number(side, dtype, bits, mantissa) for side in (left, right)]
        values = [_values(side, bits, mantissa) for side in (left, right)]
        distance = _ulps(values[0], values[1], finite[0] & finite[1], mantissa)
        # What is no number has no value either.
        shown = [np.where(known, value, np.nan) for known, value in zip(finite, values, strict=True)]
        return Elements(shown[0], shown[1], left != right, finite[0] & finite[1], distance)
    if dtype in _INTEGERS:
        if a.size % np.dtype(_INTEGERS[dtype]).itemsize:
            return None
        whole = [np.ascontiguousarray(row).view(_INTEGERS[dtype]).astype(np.int64) for row in (a, b)]
        every = np.ones(len(whole[0]), dtype=np.bool_)
        floats = [side.astype(np.float64) for side in whole]
        return Elements(floats[0], floats[1], whole[0] != whole[1], every, _distance(*whole))
    return None


def compare_rows(
    dtype: str, a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], part_size: int | None = None
) -> UlpDifference | None:
    """How two rows differ as a whole; None where `elements_of` has none.

    `part_size` is the number of elements of a part of the row, a head; one that does not divide it is none.
    """
    found = elements_of(dtype, a, b)
    if found is None:
        return None
    places = np.flatnonzero(found.differs)
    counted = found.ulps[found.differs & found.number]
    run = _longest_run(found.differs)
    heads = _parts(found.differs, part_size)
    return UlpDifference(
        elements=len(found.differs),
        differing=len(places),
        max_ulps=int(counted.max()) if len(counted) else 0,
        not_numbers=int((found.differs & ~found.number).sum()),
        first=int(places[0]) if len(places) else -1,
        last=int(places[-1]) if len(places) else -1,
        longest_run=run,
        pattern=_pattern(len(found.differs), len(places), run),
        parts=len(heads),
        parts_differing=int(heads.any(axis=1).sum()),
        parts_whole=int(heads.all(axis=1).sum()),
    )


def as_floats(dtype: str, content: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64] | None:
    """The numbers in raw bytes; None for a dtype that is no float of ours, or with NaN or infinities."""
    if dtype not in _FLOATS:
        return None
    kind, mantissa = _FLOATS[dtype]
    size = np.dtype(kind).itemsize
    bits = np.ascontiguousarray(content).view(kind).astype(np.uint64)
    return _values(bits, size, mantissa) if _is_number(bits, dtype, size, mantissa).all() else None


def mantissa_bits(dtype: str) -> int:
    """How many bits of the mantissa a float of ours stores. Raises KeyError for another dtype."""
    return _FLOATS[dtype][1]


def _is_number(bits: npt.NDArray[np.uint64], dtype: str, size: int, mantissa: int) -> npt.NDArray[np.bool_]:
    """Whether each pattern is finite."""
    magnitude = bits & np.uint64((1 << (8 * size - 1)) - 1)
    if dtype == "float8_e4m3fn":
        # No infinities: only the all-ones pattern is no number.
        finite: npt.NDArray[np.bool_] = magnitude != np.uint64(0x7F)
    else:
        exponent = (1 << (8 * size - 1 - mantissa)) - 1
        finite = (magnitude >> np.uint64(mantissa)) != np.uint64(exponent)
    return finite


def _values(bits: npt.NDArray[np.uint64], size: int, mantissa: int) -> npt.NDArray[np.float64]:
    """The floats that the patterns stand for; NaN and infinities are not distinguished from numbers here."""
    sign = np.where((bits >> np.uint64(8 * size - 1)).astype(np.bool_), -1.0, 1.0)
    magnitude = bits & np.uint64((1 << (8 * size - 1)) - 1)
    exponent = (magnitude >> np.uint64(mantissa)).astype(np.int64)
    fraction = (magnitude & np.uint64((1 << mantissa) - 1)).astype(np.float64)
    bias = (1 << (8 * size - 2 - mantissa)) - 1
    whole = np.where(exponent > 0, float(1 << mantissa), 0.0) + fraction
    with np.errstate(over="ignore"):
        value: npt.NDArray[np.float64] = sign * np.ldexp(whole, np.maximum(exponent, 1) - bias - mantissa)
    return value


def _ulps(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], number: npt.NDArray[np.bool_], mantissa: int
) -> npt.NDArray[np.uint64]:
    size = np.where(number, np.maximum(np.abs(a), np.abs(b)), 0.0)
    largest = float(size.max(initial=0.0))
    if largest == 0.0:
        return np.zeros(len(a), dtype=np.uint64)
    _, exponent = np.frexp(np.maximum(size, np.ldexp(largest, -mantissa)))
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.where(number, np.abs(a - b), 0.0)
        steps = np.minimum(np.ceil(np.ldexp(apart, mantissa + 1 - exponent)), 2.0**62)
    result: npt.NDArray[np.uint64] = steps.astype(np.uint64)
    return result


def _distance(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """|a - b|, exact: it fits 64 bits without a sign."""
    low, high = np.minimum(a, b), np.maximum(a, b)
    result: npt.NDArray[np.uint64] = high.astype(np.uint64) - low.astype(np.uint64)
    return result


def _longest_run(differs: npt.NDArray[np.bool_]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], differs.astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0


def _parts(differs: npt.NDArray[np.bool_], size: int | None) -> npt.NDArray[np.bool_]:
    """[parts, size] of the row's elements; [0, 1] where it is not made of several such parts."""
    if not size or len(differs) % size or len(differs) == size:
        return np.zeros((0, 1), dtype=np.bool_)
    return differs.reshape(-1, size)


def _pattern(elements: int, differing: int, run: int) -> Pattern:
    if not differing:
        return "equal"
    if differing == elements and elements > 1:
        return "whole"
    # Where nearly everything differs long runs come by themselves.
    return "block" if run >= _BLOCK and run * 2 >= differing else "scattered"
