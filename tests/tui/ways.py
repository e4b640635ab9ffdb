"""How every kind of screen is come to: a new kind without a way fails the tests that look at all of them."""

import contextlib
import importlib
import pkgutil
from dataclasses import dataclass

import investigated
import recorded
from pilots import press, scripted_runner, settle, until, workbench
from textual.screen import Screen

from klbench.session import comparing
from klbench.session.folder import SessionFolder
from klbench.session.reading import read_state
from klbench.tui import screens
from klbench.tui.screens.analysis import AnalysisScreen
from klbench.tui.screens.base import WorkScreen
from klbench.tui.screens.one_picture import OnePicture
from klbench.tui.screens.overlay import Overlay

SIZES = [(80, 24), (120, 40), (250, 70)]
BASES = (OnePicture, Overlay, WorkScreen, AnalysisScreen)
"""What screens are made of, and none themselves."""


def at(size) -> str:
    return f"{size[0]}x{size[1]}"


def kinds_of_screens() -> dict[str, type[Screen]]:
    """Every kind of screen by its name; they are imported when they are opened, here all at once."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(screens.__path__, f"{screens.__name__}.")
    ]
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Screen) and kind.__module__ == module.__name__
        if kind not in BASES
    }


KINDS = kinds_of_screens()
PLACES = {kind.place: name for name, kind in KINDS.items() if issubclass(kind, WorkScreen)}


@dataclass(frozen=True)
class Way:
    """The keys that lead from the main screen to a screen, and the files that show it as text at each of
    SIZES (SIZE stands for it)."""

    keys: tuple[str, ...]
    text: str


WAYS = {
    "StartScreen": Way((), "start-SIZE"),
    "MainScreen": Way((), "main-SIZE"),
    "TokensScreen": Way(("enter",), "tokens-SIZE"),
    "AllTokensScreen": Way(("t",), "all_tokens-SIZE"),
    "CompareScreen": Way(("c",), "compare-SIZE"),
    "BeforeAfterScreen": Way(("B",), "before_after-SIZE"),
    "OriginScreen": Way(("O",), "found-origin-SIZE"),
    "NumbersScreen": Way(("O", "f"), "numbers-SIZE"),
    "VerdictScreen": Way(("v",), "found-verdict-SIZE"),
    "DistributionScreen": Way(("d",), "found-distribution-SIZE"),
    "PositionsScreen": Way(("b",), "found-positions-SIZE"),
    "ResiduesScreen": Way(("m",), "found-residues-SIZE"),
    "ExperimentsScreen": Way(("X",), "found-experiments-SIZE"),
    "CensusScreen": Way(("M",), "found-census-SIZE"),
    "GuideScreen": Way(("W",), "found-guide-SIZE"),
    "LogScreen": Way(("l",), "log-SIZE"),
    "CommandsScreen": Way(("at",), "commands-SIZE"),
    "CellsScreen": Way(("c", "i"), "cells-SIZE"),
    "HelpScreen": Way(("question_mark",), "help-SIZE"),
    "Choice": Way(("q",), "quit-SIZE"),
}


@contextlib.asynccontextmanager
async def at_work(tmp_path, size=(80, 24), **options):
    """The workbench with a session in which whatever can be done, can be done now: measured, judged, located,
    its server up, its runner there, an earlier session to compare with. Gives the app, the pilot and what the
    runner is told."""
    path = investigated.at_work(tmp_path / "20251129-dense")
    before = SessionFolder(recorded.finished(tmp_path / "20251128-dense"))
    async with (
        scripted_runner(path) as told,
        workbench(path, size=size, readonly=False, **options) as (app, pilot),
    ):
        app.model.before = comparing.side_of(before, read_state(before))
        await until(pilot, lambda: app.model.live)
        app.show_all()
        await settle(pilot)
        yield app, pilot, told


async def go(app, pilot, name: str, press=press) -> None:
    """From wherever the user is to the screen of that name, as it is when it is opened."""
    while len(app.screen_stack) > 2:
        app.pop_screen()
    app.continue_updates()
    await settle(pilot)
    if app.screen.has_class("has-zoom"):
        app.screen.do_zoom()
    app.screen.focus_in("#requests")
    await settle(pilot)
    await press(pilot, *WAYS[name].keys)
    assert type(app.screen) is KINDS[name], type(app.screen)
