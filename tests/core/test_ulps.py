"""Differences of rows in ulps, for every float format, against what numpy itself says is the next number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.core.ulps import compare_rows, elements_of


def raw(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def bfloat16(values: list[float]) -> np.ndarray:
    return raw((np.array(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@given(st.floats(-1000, 1000, width=16))
def test_the_next_float_is_one_ulp_away(dtype: str, value: float) -> None:
    a = np.array([value, 1.0], dtype=dtype)
    b = np.array([np.nextafter(a[0], np.dtype(dtype).type(np.inf)), 1.0], dtype=dtype)
    found = compare_rows(dtype, raw(a), raw(b))

    assert found is not None
    assert found.max_ulps == 1
    assert (found.differing, found.first, found.last) == (1, 0, 0)


def test_bfloat16_rounding_is_scattered_and_few_ulps() -> None:
    a = bfloat16([1.0, 2.0, -3.0, 4.0] * 8)
    b = bfloat16([1.0, 2.015625, -3.0, 4.0] * 8)
    found = compare_rows("bfloat16", a, b)

    assert found is not None
    assert (found.max_ulps, found.differing, found.elements) == (1, 8, 32)
    assert (found.pattern, found.structured) == ("scattered", False)


def test_a_wrong_head_is_a_block_of_many_ulps() -> None:
    a = np.ones(64, dtype=np.float32)
    b = a.copy()
    b[16:32] = 7.5
    found = compare_rows("float32", raw(a), raw(b))

    assert found is not None
    assert (found.pattern, found.longest_run, found.first, found.last) == ("block", 16, 16, 31)
    assert found.structured


def test_a_row_that_differs_everywhere_is_whole_and_an_equal_one_equal() -> None:
    a, b = np.ones(16, dtype=np.float32), np.full(16, 2, dtype=np.float32)

    assert compare_rows("float32", raw(a), raw(b)).pattern == "whole"  # type: ignore[union-attr]
    assert compare_rows("float32", raw(a), raw(a)).pattern == "equal"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("dtype", "nan"), [("float32", 0x7FC00000), ("bfloat16", 0x7FC0), ("float8_e4m3fn", 0x7F)]
)
def test_nan_is_counted_apart_and_never_measured(dtype: str, nan: int) -> None:
    kind = {"float32": np.uint32, "bfloat16": np.uint16, "float8_e4m3fn": np.uint8}[dtype]
    found = compare_rows(dtype, raw(np.array([nan, 1], kind)), raw(np.array([0, 1], kind)))

    assert found is not None
    assert (found.not_numbers, found.max_ulps, found.differing) == (1, 0, 1)
    assert found.structured


def test_signs_are_far_apart_and_signed_zeros_differ_by_no_ulp() -> None:
    ones = compare_rows("float32", raw(np.array([1], np.float32)), raw(np.array([-1], np.float32)))
    zeros = compare_rows("float32", raw(np.array([0.0], np.float32)), raw(np.array([-0.0], np.float32)))

    assert ones is not None
    assert zeros is not None
    assert ones.max_ulps == 1 << 24
    assert (zeros.max_ulps, zeros.differing) == (0, 1)


def test_a_sum_that_cancels_is_measured_by_what_matters_to_its_row() -> None:
    a = bfloat16([4.0, 0.0001, 2.0])
    b = bfloat16([4.0, -0.0001, 2.0])
    found = compare_rows("bfloat16", a, b)

    assert found is not None
    assert (found.max_ulps, found.structured) == (1, False)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", np.float16), ("float32", np.float32), ("float64", np.float64)]
)
@given(st.floats(0.001, 100), st.integers(0, 1000))
def test_ulps_count_the_floats_between_two_numbers_of_one_binade(
    dtype: str, kind: type, start: float, steps: int
) -> None:
    a = np.array([start], dtype=kind)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[a.itemsize]
    b = (a.view(bits) + bits(steps)).view(kind)
    found = compare_rows(dtype, raw(a), raw(b))

    assert found is not None
    if np.frexp(a)[1] == np.frexp(b)[1]:
        assert found.max_ulps == steps


def test_the_widest_distance_of_integers_does_not_overflow() -> None:
    ends = np.array([np.iinfo(np.int64).min]), np.array([np.iinfo(np.int64).max])
    found = compare_rows("int64", raw(ends[0]), raw(ends[1]))

    assert found is not None
    assert found.max_ulps == (1 << 64) - 1


def test_rows_that_cannot_be_compared_are_none() -> None:
    row = np.zeros(6, dtype=np.uint8)

    assert compare_rows("float32", row, row) is None
    assert compare_rows("complex64", row, row) is None
    assert compare_rows("uint8", row, row[:5]) is None


def test_elements_are_the_values_that_the_bits_stand_for() -> None:
    a = np.array([1.0, -2.5, np.nan, 0.0], dtype=np.float32)
    b = np.array([1.0, -2.5000002, 3.0, -0.0], dtype=np.float32)
    found = elements_of("float32", a.view(np.uint8), b.view(np.uint8))
    assert found is not None
    assert np.array_equal(found.a, a.astype(np.float64), equal_nan=True)
    assert np.array_equal(found.b, b.astype(np.float64))
    assert found.differs.tolist() == [False, True, True, True]
    assert found.number.tolist() == [True, True, False, True]
    assert found.ulps.tolist() == [0, 1, 0, 0]
