"""Charts of text: nothing that is there vanishes, nothing that is not there shows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from klbench.tui import charts


@given(part=st.floats(0, 1), width=st.integers(1, 90))
def test_a_bar_fits_and_what_is_not_zero_shows(part, width):
    shown = charts.bar(part, width)
    assert len(shown) <= width
    assert bool(shown) == (part > 0)
    assert charts.bar(1.0, width) == "█" * width


@given(shares=st.lists(st.one_of(st.floats(0, 1), st.just(float("nan"))), min_size=1, max_size=80),
       height=st.integers(1, 8))  # fmt: skip
def test_columns_tell_nothing_compared_equal_and_different_apart(shares, height):
    lines = charts.columns(np.array(shares), height)
    assert len(lines) == height
    assert {len(line) for line in lines} == {len(shares)}
    for place, share in enumerate(shares):
        cells = [line[place] for line in lines]
        if np.isnan(share):
            assert set(cells) == {" "}
        elif share == 0:
            assert cells[-1] == "·"
        else:
            assert cells[-1] in "▁▂▃▄▅▆▇█"
            # No gap: what is above a cell that is not full is empty.
            filled = [cell != " " for cell in cells]
            assert filled == sorted(filled)


@given(low=st.integers(0, 5000), width=st.integers(1, 50), bins=st.integers(1, 150))
def test_the_axis_names_values_under_their_own_columns(low, width, bins):
    edges = low + width * np.arange(bins + 1)
    line = charts.axis(edges)
    assert len(line) <= max(bins, len(str(int(edges[-1]))))
    if bins > 40:
        assert line.startswith(str(low))
        assert line.endswith(str(int(edges[-1]) - 1))


def test_one_token_of_a_million_still_has_a_bar():
    assert charts.bar(charts.logarithmic(1, 1_000_000), 20)
    assert charts.logarithmic(0, 1_000_000) == 0
    assert charts.logarithmic(1_000_000, 1_000_000) == 1


def test_counts_beyond_nine_are_a_plus():
    assert charts.counts([0, 1, 9, 10]) == " 19+"
