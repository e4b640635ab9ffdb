"""The palette leads to requests and layers, the map says what is under its cursor, a cell is copied alone."""

import numpy as np
import pytest
import recorded
from pilots import press, screen_text, settle, workbench

from klbench.core.ulps import compare_rows, elements_of
from klbench.engine.origin_numbers import OriginRows
from klbench.tui.places_to_go import layers_of, requests_of
from klbench.tui.screens.numbers import NumbersScreen
from klbench.tui.widgets.layer_map import LayerMap
from klbench.tui.widgets.virtual_table import VirtualTable

FIRST = recorded.first_dirty("prefill_cache_hit")


async def type_in_palette(pilot, text: str) -> str:
    await press(pilot, "ctrl+p")
    shown = await press(pilot, *("space" if letter == " " else letter for letter in text))
    await press(pilot, "enter")
    await settle(pilot)
    return shown


async def test_a_number_typed_in_the_palette_leads_to_that_request(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "enter")
        shown = await type_in_palette(pilot, "17")
        assert "request 17 · prefill_cache_hit" in shown
        assert "of 128 tokens differ · prompt" in shown
        assert app.screen.place == "main"
        assert app.model.request == 17
        assert app.screen.query_one("#requests-table", VirtualTable).row == 17


async def test_a_filter_that_hides_the_request_is_taken_away(finished):
    async with workbench(finished) as (app, pilot):
        table = app.screen.query_one("#requests-table", VirtualTable)
        table.filter("differ>0")
        await settle(pilot)
        assert 17 not in table.order
        await type_in_palette(pilot, "17")
        assert (table.row, table.filter_text) == (17, "")


async def test_a_request_of_another_helper_is_shown_with_its_helper(finished):
    async with workbench(finished) as (app, pilot):
        other = next(p for p in requests_of(app.model, "#3") if p.helper == "decode_cache_hit")
        app.screen.go_to_request(other.helper, other.request)
        await settle(pilot)
        assert (app.model.helper.helper, app.model.request) == ("decode_cache_hit", 3)
        assert "[2] requests · decode_cache_hit" in screen_text(app)


async def test_only_numbers_of_requests_that_there_are_lead_anywhere(finished):
    async with workbench(finished) as (app, _pilot):
        found = [(p.helper, p.request) for p in requests_of(app.model, " request 31 ")]
        assert found[0] == ("prefill_cache_hit", 31)
        helpers = {helper for helper, _ in found}
        assert helpers == {"match", "prefill_cache_hit", "decode_cache_hit"}, screen_text(app)
        for typed in ("32", "-1", "3 4", "", "99999999999999999999", "three"):
            assert requests_of(app.model, typed) == []


async def test_the_name_of_a_layer_leads_to_the_map_of_the_origin(finished):
    async with workbench(finished) as (app, pilot):
        shown = await type_in_palette(pilot, "layer 2")
        assert f"in the map of request {FIRST}'s origin" in shown
        assert app.screen.place == "origin"
        layers = app.screen.query_one(LayerMap)
        assert layers.has_focus
        assert layers.under_cursor == "layer 2 · rows 264 to 267 · inherited difference"
        assert "layer 2 · rows 264 to 267 · inherited difference" in screen_text(app)


async def test_the_name_of_an_operator_leads_to_its_row_around_the_origin(finished):
    async with workbench(finished) as (app, pilot):
        await type_in_palette(pilot, "q_norm")
        table = app.screen.query_one("#around-table", VirtualTable)
        assert (table.has_focus, table.row) == (True, 1)
        await type_in_palette(pilot, "o_proj")
        assert table.row == 3
        assert len(app.screen_stack) == 3
        assert any(place.name == "head" for place in layers_of(app.model))


async def test_without_an_origin_no_layer_is_offered(measuring):
    async with workbench(measuring) as (app, _pilot):
        assert list(layers_of(app.model)) == []


async def test_the_map_says_what_is_under_its_cursor(finished):
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        assert "layer 1 · rows 265 to 267 · origin" in (text := await press(pilot, "o")), text
        layers = app.screen.query_one(LayerMap)
        layers.focus()
        assert "layer 0 · rows 265 to 267 · equal" in await press(pilot, "k")
        assert "layer 1 · rows 262 to 264 · state differs" in await press(pilot, "j", "left")
        await press(pilot, "right", "right", *["down"] * 9)
        assert layers.under_cursor == "head · rows 265 to 267 · inherited difference"
        for _ in range(300):
            layers.action_map_left()
        assert layers.under_cursor.startswith("head · rows 0 to ")


def test_every_row_of_a_map_has_one_column_and_every_column_its_rows():
    for count, width in ((1, 40), (7, 40), (29, 40), (30, 40), (1000, 40), (268, 120)):
        layers = LayerMap()
        layers._size = layers._size.__class__(width, 6)
        layers.positions = np.arange(count)
        stretches = [layers._stretch(column) for column in range(layers._columns)]
        assert [row for first, end in stretches for row in range(first, end)] == list(range(count))
        for column, (first, end) in enumerate(stretches):
            assert {layers._column(row) for row in range(first, end)} == {column}


async def test_one_cell_is_copied_alone_and_in_full(finished):
    async with workbench(finished) as (app, pilot):
        text = await press(pilot, "enter", "i")
        assert "cells of the row" in text
        table = app.screen.query_one(VirtualTable)
        names = [table.rows.columns[0].show(row) for row in range(table.rows.count)]
        await press(pilot, *["down"] * names.index("decode"))
        wanted = table.rows.columns[1].show(table.row)
        said = await press(pilot, "enter")
        assert "copied" in said
        assert (finished / "clipboard.txt").read_text() == wanted
        assert float(wanted) <= 0


async def test_the_cells_close_without_a_copy(finished):
    async with workbench(finished) as (_app, pilot):
        assert "[2] requests" in await press(pilot, "i", "escape")
        assert not (finished / "clipboard.txt").exists()


async def test_the_charts_say_the_numbers_of_the_column_under_the_cursor(finished):
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        await press(pilot, "b")
        profile = app.screen._profiles["offset"]
        for keys, step in (((), 0), (("right", "right"), 2), (("left",), 1)):
            await press(pilot, *keys)
            first = app.screen._profiles["position"]
            column = int(np.argmax(np.nan_to_num(first.share))) + step
            at = int(np.argmax(profile.share)) if not step else min(column, len(profile.share) - 1)
            low, high = int(profile.edges[at]), int(profile.edges[at + 1]) - 1
            where = f"at {low}" if low == high else f"at {low} to {high}"
            numbers = f"{profile.divergent[at]} of {profile.compared[at]} tokens differ"
            assert f"{where}: {numbers}" in screen_text(app)


async def test_the_cursor_of_the_charts_stays_in_them(finished):
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        await press(pilot, "b")
        app.screen._column = 0
        assert "─ at 0" in await press(pilot, "left")
        app.screen._column = 10_000
        text = await press(pilot, "right")
        assert " 127: " in text


@pytest.mark.parametrize("arm", ["warming", "generation"])
async def test_the_numbers_of_an_origin_stand_under_the_names_of_their_arms(arm, finished):
    bits = np.arange(16, dtype=np.float32)
    left, right = (row.view(np.uint8) for row in (bits, np.where(bits == 5, 5.5, bits).astype(np.float32)))
    rows = OriginRows(
        "out.0", "float32", compare_rows("float32", left, right), elements_of("float32", left, right)
    )
    async with workbench(finished) as (app, pilot):
        app.push_screen(NumbersScreen(app.model, [rows], "o_proj · row 7", arm))
        await settle(pilot)
        text = await press(pilot, "s")
    head = next(line for line in text.splitlines() if "difference" in line)
    assert head.split("│")[1].split() == ["element", "▲", arm, "arm", "scoring", "arm", "difference", "ulps"]
    assert " side" not in text
