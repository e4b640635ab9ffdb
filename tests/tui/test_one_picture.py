"""A screen change sends one picture: what a screen draws before it has come to rest never leaves."""

import asyncio
import contextlib

import pytest
from pilots import press, screen_text, settle, until, workbench
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.app import App
from textual.message import Message

from klbench.tui.screens import one_picture


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """However slow this machine is just now, a picture is held back until all rests."""
    monkeypatch.setattr(one_picture, "_MOST_LOOKS", 1_000_000)


@contextlib.contextmanager
def pictures(app):
    """Collects what the app draws: the kind of each picture."""
    drawn, display = [], app._display

    def noted(screen, picture):
        if picture is not None and not app._batch_count:
            drawn.append(type(picture))
        display(screen, picture)

    app._display = noted
    try:
        yield drawn
    finally:
        app._display = display


@pytest.mark.parametrize("size", [(80, 24), (160, 45)])
@pytest.mark.parametrize(
    "key", ["t", "enter", "O", "v", "d", "b", "m", "X", "M", "l", "@", "W", "question_mark"]
)
async def test_opening_a_screen_and_coming_back_sends_one_picture_each(finished, key, size):
    async with workbench(finished, size=size) as (app, pilot):
        for one in (key, "escape"):
            before = app.screen
            with pictures(app) as drawn:
                await press(pilot, one)
                await until(pilot, lambda: not app.screen._looks_left)
            assert app.screen is not before
            assert drawn == [LayoutUpdate]


@pytest.mark.parametrize("key", ["j", "pagedown", "n", "G"])
async def test_a_key_that_moves_the_cursor_sends_what_changed_as_one_picture(finished, key):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "t")
        await until(pilot, lambda: not app.screen._looks_left)
        with pictures(app) as drawn:
            await press(pilot, key)
            await until(pilot, lambda: not app.screen._looks_left)
        await settle(pilot)
        assert drawn == [ChopsUpdate]


async def test_a_message_that_is_being_worked_off_holds_the_picture_back(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "v")
        hints, gate = app.screen.query_one("#hints"), asyncio.Event()
        assert not app.screen._is_busy
        hints.call_later(gate.wait)
        while hints.message_queue_size:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        assert app.screen._is_busy  # no queue has anything, and yet more is to come
        gate.set()
        await settle(pilot)
        assert not app.screen._is_busy


async def test_a_message_that_was_looked_at_and_not_yet_worked_off_is_one_that_waits():
    """Textual takes the next message from the queue to see whether it replaces the one before."""
    nothing = []

    class First(Message):
        pass

    class Second(Message):
        pass

    class Looks(App):
        def on_first(self) -> None:
            nothing.append(one_picture.has_nothing(self))

        def on_second(self) -> None:
            nothing.append(one_picture.has_nothing(self))

    async with Looks().run_test() as pilot:
        await settle(pilot)
        pilot.app.post_message(First())
        pilot.app.post_message(Second())
        while len(nothing) < 2:  # noqa: ASYNC110 - settling would send messages of its own
            await asyncio.sleep(0)
    assert nothing == [False, True]


async def test_a_window_of_another_size_is_drawn_once(finished):
    async with workbench(finished) as (app, pilot):
        with pictures(app) as drawn:
            await pilot.resize_terminal(160, 45)
            await until(pilot, lambda: not app.screen._looks_left)
        assert drawn == [LayoutUpdate]


async def test_a_screen_that_never_rests_is_drawn_all_the_same(finished, monkeypatch):
    monkeypatch.setattr(one_picture.OnePicture, "_is_busy", True)
    monkeypatch.setattr(one_picture, "_MOST_LOOKS", 5)
    async with workbench(finished) as (app, pilot):
        with pictures(app) as drawn:
            await press(pilot, "v")
            await until(pilot, lambda: not app.screen._looks_left)
        assert LayoutUpdate in drawn


async def test_a_covered_screen_draws_nothing_and_all_when_it_comes_back(finished):
    async with workbench(finished) as (app, pilot):
        main = app.screen
        await press(pilot, "v")
        with pictures(app) as drawn:
            main.refresh(layout=True)
            main.say("said meanwhile")
            await settle(pilot)
        assert not drawn
        assert "said meanwhile" not in screen_text(app)
        app.pop_screen()
        await until(pilot, lambda: app.screen is main and not main._looks_left)
        assert "said meanwhile" in screen_text(app)
