"""The strip over token positions: no peak vanishes, nothing equal looks different."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from klbench.tui.widgets.strip import bars, column_of, pooled

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
