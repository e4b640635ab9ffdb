"""One registry feeds keys, footer, palette and help: it is whole and it contradicts nothing."""

import importlib
import pkgutil

import pytest

from klbench.tui import actions, screens
from klbench.tui.actions import ACTIONS, WIDGETS, Situation
from klbench.tui.app import WorkbenchApp
from klbench.tui.screens.base import WorkScreen
from klbench.tui.screens.help import help_lines
from klbench.tui.widgets.key_hints import fitting
from klbench.tui.widgets.layer_map import LayerMap
from klbench.tui.widgets.log_view import LogView
from klbench.tui.widgets.virtual_table import VirtualTable


def kinds_of(kind: type[WorkScreen] = WorkScreen):
    """Every kind of screen; they are imported when they are opened, here all at once."""
    for module in pkgutil.iter_modules(screens.__path__, f"{screens.__name__}."):
        importlib.import_module(module.name)
    for screen in kind.__subclasses__():
        yield screen
        yield from kinds_of(screen)


SCREENS = {screen.place: screen for screen in kinds_of() if screen.place}


def test_the_registry_names_only_screens_that_exist():
    assert {place for action in ACTIONS for place in action.screens} == {*SCREENS, *WIDGETS}


@pytest.mark.parametrize("place", SCREENS)
def test_every_action_of_a_screen_has_somebody_who_does_it(place):
    for action in actions.of_screen(place):
        name = f"do_{action.id}"
        assert hasattr(SCREENS[place], name) or hasattr(WorkbenchApp, name), action.id


@pytest.mark.parametrize(
    ("place", "widget"), [("table", VirtualTable), ("lines", LogView), ("map", LayerMap)]
)
def test_every_action_of_a_widget_is_a_method_of_it(place, widget):
    for action in actions.of_screen(place):
        assert f"action_{action.id}" in vars(widget), action.id


@pytest.mark.parametrize("place", [*SCREENS, *WIDGETS])
def test_no_key_means_two_things_on_a_screen(place):
    keys = [key for action in actions.of_screen(place) for key in action.keys]
    assert len(keys) == len(set(keys))


def test_ids_are_unique_and_every_action_says_what_it_does():
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)
    assert all(action.help.endswith(".") and action.label for action in ACTIONS)


def test_no_key_is_one_that_terminals_or_users_own():
    owned = {"ctrl+c", "ctrl+s", "ctrl+v", "ctrl+z", "ctrl+q", "ctrl+m", "ctrl+j", "ctrl+i", "ctrl+h"}
    assert not owned & {key for action in ACTIONS for key in action.keys}


def test_what_cannot_be_done_says_why():
    nothing = Situation()
    refused = {
        action.id: action.enabled(nothing) for action in ACTIONS if action.enabled(nothing) is not True
    }
    assert {"locate", "run", "report", "tokens", "cancel", "verdict", "origin"} <= set(refused)
    assert all(isinstance(reason, str) and len(reason) > 10 for reason in refused.values())


def test_a_read_only_session_refuses_whatever_would_change_it():
    ready = Situation(
        session=True, live=True, server="ready", measured=True, request=0, request_diverged=True
    )
    readonly = Situation(
        session=True,
        live=True,
        server="ready",
        measured=True,
        request=0,
        request_diverged=True,
        readonly=True,
    )
    for name in ("run", "locate"):
        assert actions.BY_ID[name].enabled(ready) is True
        assert "read-only" in str(actions.BY_ID[name].enabled(readonly))
    assert "klbench report SESSION" in str(actions.BY_ID["report"].enabled(readonly))


@pytest.mark.parametrize("place", SCREENS)
def test_help_lists_every_action_of_its_screen(place):
    text = "\n".join(help_lines(place, Situation()))
    for action in actions.of_screen(place):
        assert action.label in text


def test_help_finds_by_words_and_says_when_it_finds_nothing():
    found = "\n".join(help_lines("main", Situation(), "locate"))
    assert "Capture the layers" in found
    assert "report" not in found.splitlines()[1]
    (nothing,) = help_lines("main", Situation(), "zebra")
    assert nothing == "no key of this screen and no topic of the manual has to do with 'zebra'"


@pytest.mark.parametrize("place", SCREENS)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_footer_fits_and_always_tells_how_to_get_help_and_out(place, width):
    shown = fitting(actions.hints(place), width)
    used = 1 + sum(len(f"{a.shown_key} {a.label}  ") for a in shown)
    assert used <= width + 2
    assert {"help", "quit"} <= {action.id for action in shown}


def test_the_readme_lists_the_keys_of_the_registry():
    from tests.tools.keys import key_table
    from tests.tools.readme import README, replaced

    text = README.read_text(encoding="utf-8")
    assert replaced(text, "keys", key_table()) == text, "uv run python -m tests.tools.keys"
