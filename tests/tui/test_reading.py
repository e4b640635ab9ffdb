"""Texts that are longer than their place: nothing is cut without a sign, and a key leads to all of it."""

import investigated
import pytest
from pilots import press, screen_text, settle, workbench

from klbench.core.text import cell_width
from klbench.tui.widgets.reading import Reading
from klbench.tui.widgets.text import Lines, sentence_lines

WIDTH = 40
LONG = "word " * 60


@pytest.fixture
def session(tmp_path):
    return investigated.investigated(tmp_path / "20251129-dense")


@pytest.mark.parametrize("size", [(80, 24), (160, 45)])
@pytest.mark.parametrize("key", ["v", "W", "O", "X"])
async def test_a_text_says_how_much_of_it_is_seen_and_a_key_leads_through_all_of_it(key, size, session):
    async with workbench(session, size=size) as (app, pilot):
        seen = await press(pilot, key)
        for text in app.screen.query(Reading):
            lines = [line.strip() for line in text.query_one(Lines).text.splitlines()]
            cut = text.max_scroll_y > 0
            assert (f"of {text.virtual_size.height} · > reads on" in seen) == cut, seen
            while text.max_scroll_y > text.scroll_offset.y:
                seen += await press(pilot, "greater_than_sign")
            assert all(line in seen for line in lines)
            if cut:
                assert "< reads back" in screen_text(app)
                here = text.scroll_offset.y
                await press(pilot, "less_than_sign")
                assert text.scroll_offset.y < here
                text.scroll_end(animate=False)
        assert "the text ends here" in await press(pilot, "greater_than_sign")


async def test_another_row_begins_its_text_at_its_beginning(session):
    async with workbench(session) as (app, pilot):
        await press(pilot, "v", "greater_than_sign", "greater_than_sign")
        assert app.screen.query_one("#why-body").scroll_offset.y > 0
        text = await press(pilot, "down")
        assert app.screen.query_one("#why-body").scroll_offset.y == 0
        assert "line 1" in text


@pytest.mark.parametrize("most", [3, 4, 5, 6, 9])
def test_what_to_do_next_is_said_to_its_end_and_what_leads_to_it_is_cut_with_a_mark(most):
    told = sentence_lines(
        [LONG, "Found: it", "Next: do a thing of some length here · press X"], WIDTH, most=most
    )
    assert len(told) == most
    assert all(cell_width(line) <= WIDTH for line in told)
    assert " ".join(told[-2:]).split()[-2:] == ["press", "X"]
    assert any("Found: it" in line for line in told)
    assert any(line.endswith(" …") for line in told)
    assert "…" not in told[-1] or most == 3


def test_a_next_step_that_is_too_long_itself_keeps_its_key():
    told = sentence_lines(["Found: it", f"Next: {LONG}· press X"], WIDTH, most=3)
    assert len(told) == 3
    assert told[-1].endswith("… · press X")
    assert sentence_lines([LONG], WIDTH, most=2)[-1].endswith("…")
    assert sentence_lines([f"{number}" for number in range(9)], WIDTH, most=2) == [" ▸ 0", "   8"]


def test_what_fits_is_not_changed():
    statements = ["One.", "", "Two · press X"]
    assert sentence_lines(statements, WIDTH, most=2) == [" ▸ One.", "   Two · press X"]
    assert sentence_lines(statements, WIDTH) == sentence_lines(statements, WIDTH, most=2)


async def test_the_key_of_the_next_step_is_seen_below_a_finding_of_seven_lines(session):
    async with workbench(session) as (app, pilot):
        await press(pilot, "w")
        lines = app.screen.query_one("#sentences")
        long = [
            "A finding " + "of many words " * 18,
            "Found: it · probable",
            "Next: make it, and see · press X",
        ]
        lines.say(long)
        await settle(pilot)
        shown = screen_text(app)
        assert "press X" in shown
        assert " …\n" in shown
        assert lines.size.height == len(lines.text.splitlines()) <= 6


async def test_a_wide_window_says_the_origin_and_the_next_step_a_narrow_one_leaves_the_step_to_the_guide(
    finished,
):
    for size, both in (((160, 45), True), ((80, 24), False), ((120, 40), False)):
        async with workbench(finished, size=size) as (_app, pilot):
            text = await press(pilot)
            assert "Origin of request" in text
            assert ("   Next: " in text) == both
            assert "Next: " in await press(pilot, "w")  # without the guide it stands here
