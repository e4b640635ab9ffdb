"""A table over columns: what is under the cursor stays there, and a million rows cost what ten do."""

import numpy as np
import pytest
from pilots import screen_text
from rich.style import Style
from textual.app import App

from klbench.tui.filtering import FilterError
from klbench.tui.themes import DARK
from klbench.tui.widgets.table_lines import header_segments
from klbench.tui.widgets.virtual_table import Column, Rows, VirtualTable
from tests.settling import settle


class Bench(App):
    """A table alone."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def compose(self):
        yield VirtualTable(empty="Nothing here.\nr fills it.")

    def on_mount(self):
        self.register_theme(DARK)
        self.theme = DARK.name
        table = self.query_one(VirtualTable)
        table.show_rows(self.rows)
        table.focus()


async def press(pilot, *keys: str) -> None:
    """Press keys one by one, each when what the one before began has come to rest."""
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


def numbers(values, keys=None) -> Rows:
    values = np.asarray(values)
    columns = (
        Column("row", "#", 8, str, np.arange(len(values)), right=True),
        Column("value", "value", 12, lambda row: str(values[row]), values, right=True, descends=True),
        Column("extra", "extra", 30, lambda row: f"extra {row}", None, optional=1),
    )
    return Rows(columns, len(values), keys=None if keys is None else np.asarray(keys))


async def test_sorting_goes_by_value_is_stable_and_puts_nan_last_either_way():
    app = Bench(numbers([3.0, float("nan"), 10.0, 3.0, -1.0]))
    async with app.run_test() as pilot:
        table = app.query_one(VirtualTable)
        await press(pilot, "s", "s")
        assert table.order.tolist() == [2, 0, 3, 4, 1]
        await press(pilot, "S")
        assert table.order.tolist() == [4, 0, 3, 2, 1]
        await press(pilot, "s")
        assert table.order.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("width", "shown"), [(9, "latency ▲"), (8, "latency▲"), (7, "laten…▲"), (3, "l…▲"), (1, "▲")]
)
def test_a_narrow_column_shows_that_the_rows_are_sorted_by_it_and_which_way(width, shown):
    column = Column("latency", "latency", width, str, right=True)
    assert header_segments([column], "latency", False, Style())[1].text == shown
    assert header_segments([column], "latency", True, Style())[1].text == shown.replace("▲", "▼")
    assert len(header_segments([column], None, True, Style())[1].text) == width


async def test_sorting_keeps_the_row_under_the_cursor():
    app = Bench(numbers(np.random.default_rng(1).random(500)))
    async with app.run_test(size=(60, 12)) as pilot:
        table = app.query_one(VirtualTable)
        table.move_to(77)
        await press(pilot, "s", "s")
        assert table.row == 77
        assert "▌       77" in screen_text(app)


async def test_new_rows_keep_the_cursor_on_its_key_or_its_place():
    app = Bench(numbers([1, 2, 3, 4], keys=[10, 20, 30, 40]))
    async with app.run_test():
        table = app.query_one(VirtualTable)
        table.move_to(2)
        table.show_rows(numbers([9, 1, 2, 3, 4], keys=[50, 10, 20, 30, 40]))
        assert table.row == 3
        table.show_rows(numbers([9, 1, 2, 4, 5, 6], keys=[50, 10, 20, 40, 60, 70]))
        assert table.cursor == 3


async def test_paging_and_ends_keep_the_cursor_on_the_screen():
    app = Bench(numbers(np.arange(1000)))
    async with app.run_test(size=(60, 12)) as pilot:
        table = app.query_one(VirtualTable)
        for keys, row in (
            (["G"], 999),
            (["k"], 998),
            (["g"], 0),
            (["pagedown", "pagedown"], 20),
            (["j"], 21),
        ):
            await press(pilot, *keys)
            assert table.row == row
            assert any(line.startswith("▌") for line in screen_text(app).splitlines())


async def test_an_empty_table_says_which_key_fills_it():
    app = Bench(numbers([]))
    async with app.run_test(size=(60, 12)) as pilot:
        await press(pilot, "down", "s", "S", "enter", "G")
        assert "r fills it." in screen_text(app)


async def test_cells_are_text_never_markup_and_never_reach_the_terminal_raw():
    cells = ["[bold red]x[/]", "[/INST]", "\x1b]0;owned\x07", "a[b]c[/b]d", "\u202e"]
    rows = Rows((Column("cell", "cell [/x]", 20, lambda row: cells[row]),), len(cells))
    app = Bench(rows)
    async with app.run_test(size=(60, 12)) as pilot:
        await settle(pilot)
        text = screen_text(app)
        assert "[bold red]x[/]" in text
        assert "[/INST]" in text
        assert "a[b]c[/b]d" in text
        assert "␛]0;owned␇" in text
        assert not any(ord(c) < 32 and c != "\n" for c in text)


async def test_columns_that_do_not_fit_go_by_their_rank():
    app = Bench(numbers([1.0]))
    async with app.run_test(size=(60, 12)) as pilot:
        await settle(pilot)
        assert "extra 0" in screen_text(app)
    async with Bench(numbers([1.0])).run_test(size=(40, 12)) as pilot:
        await settle(pilot)
        text = screen_text(pilot.app)
        assert "extra" not in text
        assert "value" in text


async def test_of_a_million_rows_only_those_on_the_screen_become_text_and_a_thread_sorts_them():
    """What a key costs is measured by tests.bench.tui; here is what it may touch."""
    values = np.random.default_rng(2).random(1_000_000)
    asked: list[int] = []

    def told(row: int) -> str:
        asked.append(row)
        return str(values[row])

    columns = (
        Column("row", "#", 8, str, np.arange(len(values)), right=True),
        Column("value", "value", 12, told, values, right=True, descends=True),
    )
    app = Bench(Rows(columns, len(values)))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert set(asked) <= set(range(40))
        table = app.query_one(VirtualTable)
        for page in range(1, 51):
            asked.clear()
            table.action_page_down()
            await settle(pilot)
            assert table.row is not None
            assert table.row >= page * 30
            assert set(asked) <= set(range(table.row - 40, table.row + 41))
        given, row = table.order, table.row
        table.action_sort_next()
        table.action_sort_next()
        # The key has answered, and the rows stand as they were: only a message of the thread moves them.
        assert table.order is given
        assert table.arranging
        await settle(pilot)
        assert values[table.order[0]] == values.max()
        assert table.row == row
        table.filter("value>0.999")
        await settle(pilot)
        assert len(table.order) == np.count_nonzero(values > 0.999)
        assert table.describe_filter() == f"{len(table.order):,} of 1,000,000 · value>0.999"


def line_of(app, marker="▌") -> int:
    """The line of the screen that the cursor's mark is on."""
    return next(y for y, line in enumerate(screen_text(app).splitlines()) if line.startswith(marker))


async def test_rows_that_come_above_move_neither_the_cursor_nor_its_line():
    app = Bench(numbers(np.arange(300), keys=np.arange(300)))
    async with app.run_test(size=(60, 20)) as pilot:
        table = app.query_one(VirtualTable)
        table.move_to(150)
        await settle(pilot)
        await press(pilot, "down", "down")
        before = line_of(app)
        table.show_rows(numbers(np.arange(400), keys=np.arange(-100, 300)))
        await settle(pilot)
        assert table.rows.key(table.row) == 152
        assert line_of(app) == before


async def test_a_filter_keeps_the_row_under_the_cursor_and_says_what_it_leaves():
    app = Bench(numbers(np.arange(300)))
    async with app.run_test(size=(60, 20)) as pilot:
        table = app.query_one(VirtualTable)
        table.move_to(150)
        table.filter("value>=100 value<200")
        await settle(pilot)
        assert (len(table.order), table.row) == (100, 150)
        table.filter("value>1000")
        await settle(pilot)
        assert "No row passes the filter value>1000" in screen_text(app)
        with pytest.raises(FilterError):
            table.filter("value>")
        assert table.filter_text == "value>1000"
        table.filter("")
        assert len(table.order) == 300


async def test_new_rows_with_other_columns_drop_a_filter_that_no_longer_fits():
    app = Bench(numbers(np.arange(30)))
    async with app.run_test(size=(60, 20)):
        table = app.query_one(VirtualTable)
        table.filter("value>3")
        table.show_rows(numbers(np.arange(50)))
        assert len(table.order) == 46
        table.show_rows(Rows((Column("other", "other", 5, str, np.arange(9)),), 9))
        assert (len(table.order), table.filter_text) == (9, "")


async def test_a_copy_is_the_row_or_all_rows_with_everything_visible():
    cells = ["plain", "tab\there", "\x1b[31m"]
    rows = Rows((Column("row", "#", 3, str), Column("cell", "cell", 20, lambda r: cells[r])), 3)
    app = Bench(rows)
    async with app.run_test(size=(60, 20)) as pilot:
        table = app.query_one(VirtualTable)
        await press(pilot, "down")
        assert table.as_text(whole=False) == "#\tcell\n1\ttab⇥here\n"
        assert table.as_text(whole=True) == "#\tcell\n0\tplain\n1\ttab⇥here\n2\t␛[31m\n"


async def test_a_line_that_goes_on_to_the_right_says_so():
    rows = Rows((Column("cell", "cell", 100, lambda _r: "x" * 100),), 30)
    app = Bench(rows)
    async with app.run_test(size=(60, 20)) as pilot:
        await settle(pilot)
        lines = screen_text(app).splitlines()
        assert lines[1].rstrip().endswith("x›")
        await press(pilot, *["right"] * 8)
        assert "›" not in screen_text(app)


async def test_the_scroll_bar_is_drawn_again_only_where_its_thumb_moves(monkeypatch):
    app = Bench(numbers(np.arange(100_000)))
    async with app.run_test(size=(60, 12)) as pilot:
        table = app.query_one(VirtualTable)
        bar, drawn = table.vertical_scrollbar, []
        await press(pilot, "pagedown")
        monkeypatch.setattr(bar, "refresh", lambda *_, **__: drawn.append(bar.position))
        await press(pilot, "pagedown")
        assert bar.position == table.scroll_offset.y > 0
        assert drawn == []
        await press(pilot, "end")
        assert drawn[-1] == bar.position == table.scroll_offset.y > 99_000
