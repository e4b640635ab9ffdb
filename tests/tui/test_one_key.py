"""Keys that come in one piece, as over a slow line: each is given to what the one before it opened."""

import itertools

import pytest
import textual.timer
from pilots import press, screen_text, settle, workbench
from textual import events
from textual.widgets import Input

from klbench.tui import one_key


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """However slow this machine is just now, a key waits for the one before."""
    monkeypatch.setattr(one_key, "_MOST_LOOKS", 1_000_000)


def at_once(app, *keys: str) -> None:
    """What arrives in one read of the terminal."""
    names = {"/": "slash", ">": "greater_than_sign", "-": "minus"}
    for key in keys:
        app._driver.send_message(events.Key(names.get(key, key), key if len(key) == 1 else None))


async def test_a_filter_that_comes_with_its_key_is_typed_and_no_letter_of_it_is_a_command(finished):
    async with workbench(finished) as (app, pilot):
        main = app.screen
        at_once(app, *"/kl>1e-3")
        await settle(pilot)
        assert app.screen is main
        assert app.focused.value == "kl>1e-3"


async def test_an_answer_that_comes_with_its_question_answers_it(finished):
    async with workbench(finished) as (app, pilot):
        at_once(app, "question_mark", *"locate")
        await settle(pilot)
        assert app.screen.query_one(Input).value == "locate"
        at_once(app, "escape", "t", "escape", "v")
        await settle(pilot)
        assert app.screen.place == "verdict"
        assert not app.typed


async def test_what_is_pasted_behind_a_key_comes_behind_it(finished):
    async with workbench(finished) as (app, pilot):
        at_once(app, "/")
        app._driver.send_message(events.Paste("tok:the"))
        await settle(pilot)
        assert app.focused.value == "tok:the"


async def test_a_cursor_key_that_is_held_does_not_wait_for_itself(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "t")
        before = app.screen
        at_once(app, *["j"] * 40, "enter")
        await settle(pilot)
        assert app.screen is not before
        assert "41" in screen_text(app)


async def test_no_key_waits_for_ever(finished, monkeypatch):
    monkeypatch.setattr(one_key, "_MOST_LOOKS", 3)
    monkeypatch.setattr(one_key.OneKey, "_rests", False)
    async with workbench(finished) as (app, pilot):
        at_once(app, "v", "d")
        while app.typed:
            await pilot.pause()
        await settle(pilot)
        assert app.screen.place == "distribution"


async def test_a_process_that_is_kept_waiting_loses_no_key_and_no_picture(finished, monkeypatch):
    """Textual takes the time twice as a timer starts: between, all that it waits for may have passed."""
    async with workbench(finished) as (app, pilot):
        passed = itertools.count()
        monkeypatch.setattr(textual.timer._time, "get_time", lambda: 1000.0 + next(passed) / 50)
        at_once(app, "j", "v")
        await settle(pilot)
        assert app.screen.place == "verdict"
        assert not app.screen._looks_left
