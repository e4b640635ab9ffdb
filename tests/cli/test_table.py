"""Tables for a person: whole where they fit, blocks where the terminal is narrower; nothing is ever cut."""

from hypothesis import given
from hypothesis import strategies as st

from klbench.cli.table import columns, columns_or_blocks
from klbench.core.text import cell_width, visible

NAMES = ("session", "status", "found")
ROWS = [
    (
        "20261129-191730-demo-dense",
        "ended",
        "match clean · prefill_cache_hit diverged · origin layers.1 (probable)",
    ),
    ("20261129-201730-demo-moe", "running", ""),
]


def test_what_fits_is_a_table():
    assert columns_or_blocks(NAMES, ROWS, 200) == columns(NAMES, ROWS)


def test_in_80_columns_each_session_is_a_block():
    assert columns_or_blocks(NAMES, ROWS, 80) == [
        "20261129-191730-demo-dense",
        "  status ended · found match clean · prefill_cache_hit diverged · origin",
        "  layers.1 (probable)",
        "20261129-201730-demo-moe",
        "  status running",
    ]


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=30), st.text(max_size=60)), max_size=5),
    st.integers(24, 120),
)
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_lost(rows, width):
    lines = columns_or_blocks(("a", "b"), rows, width)
    assert all(cell_width(line) <= width for line in lines)
    together = "".join("".join(lines).split())
    for cell in (cell for row in rows for cell in row):
        assert "".join(visible(cell).split()) in together
