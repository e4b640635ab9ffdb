"""The constants of growth: what is linear is found exactly, what is not is said to be off."""

import msgspec
import pytest

from tests.bench.growth import Point, fitted, measured

ROWS = [128.0, 512.0, 2048.0, 8192.0, 384.0]
TENSORS = [4.0, 4.0, 4.0, 4.0, 12.0]


def test_constants_of_a_linear_cost_are_found_exactly():
    cost = [16.0 * rows + 200.0 * tensors for rows, tensors in zip(ROWS, TENSORS, strict=True)]
    fit = fitted(cost, ROWS, TENSORS, scale=cost)
    assert (fit.first, fit.second) == pytest.approx((16.0, 200.0))
    assert fit.worst == pytest.approx(0.0, abs=1e-9)


def test_a_constant_is_never_negative():
    cost = [16.0 * rows - 100.0 * tensors for rows, tensors in zip(ROWS, TENSORS, strict=True)]
    fit = fitted(cost, ROWS, TENSORS, scale=cost)
    assert fit.second == 0
    assert fit.first > 0
    assert fit.worst > 0.05


def test_a_cost_that_grows_with_the_square_is_far_off():
    cost = [rows**2 for rows in ROWS]
    assert fitted(cost, ROWS, TENSORS, scale=cost).worst > 0.5


def test_points_that_were_kept_come_back_as_they_were(tmp_path):
    one = Point(4, 128, 10, 2, 640, (12, 4), 300, (0.5, 0.75), (0.25, 0.375))
    (tmp_path / "points.jsonl").write_bytes(msgspec.json.encode(one) + b"\n")

    assert measured(tmp_path / "points.jsonl") == [one]
    assert measured(tmp_path / "none.jsonl") == []
