"""Every key of every screen does something that is seen, or says why it does nothing."""

import contextlib
from pathlib import Path

import pytest
from pilots import screen_text, workbench
from test_actions import SCREENS
from textual import events
from textual.widgets import Input
from ways import KINDS, PLACES, SIZES, WAYS, at, at_work, go

from klbench.tui.actions import ACTIONS, BY_ID, WIDGETS, of_screen
from klbench.tui.screens.overlay import Overlay
from klbench.tui.widgets.virtual_table import VirtualTable
from tests.settling import come_to_rest

_MIDDLE = ("home", "pagedown")
READY = {
    "column_left": ("right",),
    **{f"{inside}.{name}": _MIDDLE for inside in ("table", "lines")
       for name in ("up", "down", "page_up", "page_down", "first", "last")},
    "table.sort_reverse": ("s",),
    "table.scroll_left": ("right",),
    "lines.scroll_left": ("right",),
    "map.map_up": ("down",),
    "map.map_down": ("up",),
    "map.map_left": ("right",),
    "map.map_right": ("left",),
}  # fmt: skip
"""Keys that come first: in a list's first line there is nothing above it."""
NOTHING: dict[str, str] = {}
"""What does nothing where it is bound, and why that is right."""
ANYWHERE = ("filter", "choose", "copy_row", "copy_cell", "copy_rows", "sort_next", "sort_reverse")
"""What a table does on every screen that has one."""
SIDEWAYS = ("scroll_left", "scroll_right")
INSIDE = [
    ("main", "table", {a.id for a in of_screen("table")} - {*ANYWHERE, *SIDEWAYS}),
    ("commands", "table", set(SIDEWAYS)),  # its lines are longer than the window
    ("log", "lines", {a.id for a in of_screen("lines")}),
    ("origin", "map", {a.id for a in of_screen("map")}),
]
"""Screen, widget, and what of its keys is tried there."""


async def tap(pilot, *keys: str) -> None:
    """Press keys, without the pauses that Textual's own press makes between them."""
    app = pilot.app
    for key in keys:
        event = events.Key(key, key if len(key) == 1 else None)
        event.set_sender(app)
        app._driver.send_message(event)
        await come_to_rest(pilot)


def seen(app, told) -> tuple:
    """All that a key can change: the picture, what is open, where keys go, what the runner was told."""
    open_now = tuple(map(id, app.screen_stack))
    return screen_text(app), open_now, id(app.focused), len(told), app.theme, app.return_code


class Visit:
    """One screen of the workbench, come to anew where a key has led away from it."""

    def __init__(self, app, pilot, told, name: str) -> None:
        self.app, self.pilot, self.told, self.name = app, pilot, told, name
        self._here = None

    async def come(self) -> None:
        app = self.app
        changed = app.screen is not self._here or app.screen.has_class("has-zoom")
        if changed or isinstance(app.focused, Input) or app.model.held is not None:
            await go(app, self.pilot, self.name, press=tap)
            self._here = app.screen

    async def try_key(self, key: str, name: str) -> None:
        """Press it; what must not happen is nothing, an exit or a defect."""
        app = self.app
        await tap(self.pilot, *READY.get(name, ()))
        app.say("")
        await come_to_rest(self.pilot)
        before = seen(app, self.told)
        await tap(self.pilot, key)
        assert app._exception is None, name
        assert app.return_code is None, name
        assert not app.defects, name
        assert (seen(app, self.told) == before) == (name in NOTHING), f"{name}: {key}\n{screen_text(app)}"


@contextlib.asynccontextmanager
async def visit(tmp_path, monkeypatch, name):
    monkeypatch.delenv("TMUX", raising=False)
    async with at_work(tmp_path) as (app, pilot, told):
        yield Visit(app, pilot, told, name)


def test_every_kind_of_screen_has_a_way_that_leads_to_it():
    assert set(WAYS) == set(KINDS)
    assert set(PLACES) == set(SCREENS)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_screen_is_kept_as_text_at_three_sizes(name):
    for size in SIZES:
        file = f"{WAYS[name].text.replace('SIZE', at(size))}.txt"
        assert (Path(__file__).parent / "snapshots" / file).exists(), file


@pytest.mark.parametrize("place", [place for place in PLACES if place != "start"])
async def test_every_key_of_every_screen_does_something_or_says_why_not(place, tmp_path, monkeypatch):
    async with visit(tmp_path, monkeypatch, PLACES[place]) as here:
        await here.come()
        keys = [(key, action.id) for action in of_screen(place) for key in action.keys]
        if isinstance(here.app.focused, VirtualTable):
            keys += [(BY_ID[name].keys[0], f"table.{name}") for name in ANYWHERE]
        for key, name in keys:
            await here.come()
            await here.try_key(key, name)


@pytest.mark.parametrize(("place", "widget", "names"), INSIDE)
async def test_every_key_of_lists_logs_and_maps_does_something(place, widget, names, tmp_path, monkeypatch):
    async with visit(tmp_path, monkeypatch, PLACES[place]) as here:
        for action in of_screen(widget):
            for key in action.keys if action.id in names else ():
                await here.come()
                if widget == "map":
                    here.app.screen.query_one("LayerMap").focus()
                    await come_to_rest(here.pilot)
                await here.try_key(key, f"{widget}.{action.id}")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if issubclass(kind, Overlay)])
async def test_every_key_of_what_lies_over_a_screen_does_something(name, tmp_path, monkeypatch):
    async with visit(tmp_path, monkeypatch, name) as here:
        await here.come()
        keys = [key for binding in KINDS[name].BINDINGS for key in binding.key.split(",")]
        keys += {"Choice": ["down", "c"], "CellsScreen": ["down", "enter", "y"]}.get(name, ["z"])
        for key in keys:
            await here.come()
            if key in ("up", "pageup"):
                await tap(here.pilot, "pagedown")
            await here.try_key(key, f"{name}: {key}")


async def test_every_key_of_the_start_screen_does_something(monkeypatch):
    begun = []

    async def begin(self, start):  # noqa: ARG001
        begun.append(start)

    monkeypatch.setattr("klbench.tui.connection.Connection.begin", begin)
    for action in of_screen("start"):
        for key in action.keys:
            async with workbench(None) as (app, pilot):
                await tap(pilot, *{"leave_field": ("2",), "pane_1": ("2", "escape", "4")}.get(action.id, ()))
                app.say("")
                await come_to_rest(pilot)
                before = seen(app, begun)
                await tap(pilot, key)
                assert app._exception is None, action.id
                assert seen(app, begun) != before, f"{action.id}: {key}\n{screen_text(app)}"
    assert [start.options.fault for start in begun] == [None, "restore-key"]


def test_every_action_is_tried_somewhere():
    tried = {(widget, name) for _, widget, names in INSIDE for name in names}
    tried |= {("table", name) for name in ANYWHERE}
    assert tried == {(place, action.id) for action in ACTIONS for place in action.screens if place in WIDGETS}
    assert {place for action in ACTIONS for place in action.screens} == {*PLACES, *WIDGETS}
