"""The start screen's forms: what they would start, and what cannot be understood."""

import pytest
from pilots import press, screen_text, settle, workbench
from textual.widgets import Input


async def attach_form(app, pilot, url, maps):
    await press(pilot, "3")
    app.screen.query_one("#url", Input).value = url
    app.screen.query_one("#path-maps", Input).value = maps
    await settle(pilot)
    return screen_text(app)


async def test_folders_of_the_server_are_mapped_in_the_attach_form():
    async with workbench(None, size=(120, 40)) as (app, pilot):
        text = await attach_form(app, pilot, "http://127.0.0.1:1", "/models=/mnt/m '/a b=/c d'")
        start = app.screen.attach()
        assert start.options.path_maps == ("/models=/mnt/m", "/a b=/c d")
        assert "--path-map /models=/mnt/m --path-map '/a b=/c d'" in " ".join(text.replace("│", "").split())


@pytest.mark.parametrize(
    ("maps", "says"),
    [("models=/m", "no pair of folders"), ("'/a", "cannot be split"), ("/a/../b=/c", "'..'")],
)
async def test_a_pair_that_is_none_is_refused_in_the_form(maps, says):
    async with workbench(None, size=(120, 40)) as (app, pilot):
        assert says in " ".join((await attach_form(app, pilot, "http://127.0.0.1:1", maps)).split())


async def test_a_pane_that_was_hidden_has_the_focus_before_the_other_one_is_hidden():
    async with workbench(None, size=(80, 24)) as (app, pilot):
        app.screen.do_pane_3()

        # A turn of the loop later, losing the focus and getting it would be two messages in either order.
        assert app.focused is app.screen.query_one("#url", Input)
        await settle(pilot)
        assert app.focused is app.screen.query_one("#url", Input)
