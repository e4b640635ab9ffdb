"""Compact: more rows at the same size, nothing that was said is lost, and it is remembered."""

import pytest
from pilots import press, screen_text, workbench

from klbench import settings
from klbench.settings import remembered


def rows(text: str) -> int:
    """How many rows of requests stand there."""
    return sum("/128 " in line for line in text.splitlines())


async def test_the_main_screen_has_twice_as_many_requests_at_80_x_24(finished, snapshot):
    async with workbench(finished) as (app, pilot):
        before = rows(screen_text(app))
        text = await press(pilot, "D")
        assert "compact: more rows, also from now on" in text
        text = await press(pilot, "j", "k")
        assert before == 5
        assert rows(text) >= 11
        for kept in ("5 of 32 diverged", "~/20251129-dense", "press o", "guide 4/7", "q quit"):
            assert kept in text, kept
        snapshot("compact-80x24", text)
        assert rows(await press(pilot, "D", "j", "k")) == before


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (160, 45)])
async def test_every_screen_keeps_what_its_lower_border_said(size, finished):
    async with workbench(finished, size=size) as (app, pilot):
        await press(pilot, "D", "enter")
        assert "row 1 of 128" in screen_text(app)
        assert " of " in await press(pilot, "escape", "l")
        assert "2 lines" in await press(pilot, "escape", "at")
        assert app._exception is None


async def test_it_is_remembered_and_a_file_may_say_otherwise(finished, tmp_path):
    async with workbench(finished) as (_app, pilot):
        await press(pilot, "D")
    assert remembered()["compact"] is True
    found = settings.load({})
    assert found["workbench.compact"] is True
    assert found.of("workbench.compact").origin == "remembered"
    async with workbench(finished, settings=found) as (app, pilot):
        assert rows(screen_text(app)) >= 11
        await press(pilot, "D")
    file = tmp_path / "config.toml"
    file.write_text("[workbench]\ncompact = true\n")
    assert settings.load({}, file)["workbench.compact"] is True
    assert settings.load({})["workbench.compact"] is False
