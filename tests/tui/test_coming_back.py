"""Opening a session again begins where the user left it."""

import json

import pytest
from pilots import press, screen_text, settle, until, workbench


async def left_at(session, *keys):
    """Leave the workbench there; what was shown and selected."""
    async with workbench(session) as (app, pilot):
        text = await press(pilot, *keys)
        selected, screen = (app.model.helper.helper, app.model.request), type(app.screen).__name__
        await pilot.press("q")
        await settle(pilot)
        return text, selected, screen


@pytest.mark.parametrize(
    ("keys", "screen"),
    [
        ((), "MainScreen"),
        (("2", "down"), "MainScreen"),
        (("2", "down", "enter"), "TokensScreen"),
        (("2", "enter", "down", "down", "down"), "TokensScreen"),
        (("v",), "VerdictScreen"),
        (("l",), "LogScreen"),
    ],
)
async def test_a_session_opens_where_it_was_left(finished, keys, screen):
    text, selected, name = await left_at(finished, *keys)
    assert name == screen
    async with workbench(finished) as (app, pilot):
        for _ in range(3):
            await settle(pilot)
        assert (app.model.helper.helper, app.model.request) == selected
        assert type(app.screen).__name__ == screen
        assert screen_text(app) == text


async def test_another_helper_is_shown_again(finished):
    _, selected, _ = await left_at(finished, "1", "up")
    async with workbench(finished) as (app, pilot):
        await settle(pilot)
        first = app.model.helper.helper
        assert first == selected[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 5000,
        b'{"run": 1, "helper": "match", "request": 999999}',
        b'{"run": 7, "helper": "match"}',
        b'{"run": 1, "helper": "\\u001b[31m", "screen": "quit"}',
        b'{"run": 1, "helper": "prefill_cache_hit", "screen": "quit", "request": -5}',
        b'{"run": 1, "helper": "prefill_cache_hit", "screen": "tokens", "request": 0, "offset": 99999999}',
    ],
)
async def test_a_strange_place_is_no_trouble(finished, content):
    (finished / "view.json").write_bytes(content)
    async with workbench(finished) as (app, pilot):
        await until(pilot, lambda: app.model.measurement is not None)
        assert screen_text(app).startswith(" klbench")


async def test_the_place_is_private_and_written_only_when_it_changes(finished):
    await left_at(finished, "2", "down")
    file = finished / "view.json"
    assert file.stat().st_mode & 0o077 == 0
    assert json.loads(file.read_bytes())["screen"] == "main"
    before = file.stat().st_mtime_ns
    await left_at(finished)
    assert file.stat().st_mtime_ns == before
