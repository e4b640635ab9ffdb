"""The strip over token positions: no peak vanishes, nothing equal looks different."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from klbench.core.text import fit
from klbench.tui.widgets.strip import DifferenceStrip, bars, column_of, pooled

MAGNITUDES = hnp.arrays(
    np.float64, st.integers(1, 400), elements=st.just(0.0) | st.floats(1e-9, 10.0, allow_nan=False)
)


@given(MAGNITUDES, st.integers(1, 120))
def test_pooling_keeps_every_peak_in_its_column(magnitudes, columns):
    shown = pooled(magnitudes, columns)
    assert len(shown) == min(columns, len(magnitudes))
    for offset, magnitude in enumerate(magnitudes):
        assert shown[column_of(offset, len(magnitudes), columns)] >= magnitude


@given(MAGNITUDES)
def test_a_dot_is_equal_and_nothing_else_is_a_dot(magnitudes):
    for magnitude, glyph in zip(magnitudes, bars(magnitudes), strict=True):
        assert (glyph == "·") == (magnitude == 0)


def test_what_is_no_number_stands_out():
    assert bars(np.asarray([0.0, np.nan, np.inf, 1.0])) == "·!!█"
    assert bars(pooled(np.asarray([0.0, np.nan, 0.0, 1.0]), 2)) == "!█"


CAPTION = "token 268, offset 64, Δ +0.0002485, the first difference"


@given(st.integers(58, 160), st.integers(0, 150))
def test_the_number_under_the_cursor_is_shown_wherever_the_cursor_stands(width, at):
    strip = DifferenceStrip()
    strip._caption = CAPTION
    at = min(at, width - 10)
    line = fit(strip._caret_line(at, width), width)
    assert line[9 + at] == "^"
    assert "token 268, offset" in line
    assert width < 80 or "token 268, offset 64, Δ" in line
