"""Where the user was in a session: kept beside it once a second, so that opening it again begins there.

    view.json  {"run": 1, "helper": "match", "request": 3, "screen": "tokens", "offset": 17}

Invariants: it is a convenience and never an error; it holds only as long as the run that it speaks of is the
latest, for then the user wants to see the new one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from textual.screen import Screen

from klbench.session.folder import SessionFolder, write_atomically
from klbench.storage import read_small
from klbench.tui.measurement import Measurement
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.widgets.virtual_table import VirtualTable

_SCREENS = frozenset(
    {
        "tokens", "all_tokens", "verdict", "origin", "log", "commands", "distribution", "positions",
        "residues", "experiments", "census",
    }
)  # fmt: skip
"""Those that the user comes back to; a dialog, the help or a comparison is not one."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One place in a session; text from the file is untrusted."""

    run: int
    helper: str
    request: int | None = None
    screen: str = "main"
    offset: int | None = None
    """The token under the cursor of the tokens' screen."""


class Places:
    """Keeps the place of the session that is shown, and leads back to it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._folder: SessionFolder | None = None
        self._wanted: Place | None = None
        self._kept: Place | None = None

    def turn_to(self, folder: SessionFolder) -> None:
        """Another session is shown from here on."""
        self._folder = folder
        self._wanted = self._kept = _read(_file(folder))

    def arrive(self, measurement: Measurement) -> str | None:
        """Put the selection back once its measurement is there; returns the screen to open."""
        place, model = self._wanted, self._model
        if place is None or model.run is None:
            return None
        if place.run != model.run.number:
            self._wanted = None
            return None
        if (measurement.run, measurement.columns.helper) != (place.run, place.helper):
            return None
        self._wanted = None
        model.chosen_helper = place.helper
        if place.request is not None and place.request < measurement.columns.requests:
            model.request = model.coming_back_to = place.request
            model.offset = place.offset if place.screen == "tokens" else None
        return place.screen if place.screen in _SCREENS else None

    def keep(self, stack: list[Screen[object]]) -> None:
        """Remember where the user is, if that is another place than before."""
        model = self._model
        if self._folder is None or self._wanted is not None or model.run is None or model.measurement is None:
            return
        shown = next((s for s in reversed(stack) if isinstance(s, WorkScreen) and s.place in _SCREENS), None)
        place = Place(
            run=model.run.number,
            helper=model.helper.helper,
            request=model.request,
            screen=shown.place if shown is not None else "main",
            offset=_token(shown) if shown is not None and shown.place == "tokens" else None,
        )
        if place != self._kept:
            self._kept = place
            with contextlib.suppress(OSError):
                write_atomically(_file(self._folder), msgspec.json.encode(place), durable=False)


def _token(screen: WorkScreen) -> int | None:
    """The token under the cursor; None while the screen is still being put together."""
    table = next(iter(screen.query("TokenView VirtualTable").results(VirtualTable)), None)
    return table.row if table is not None else None


def _file(folder: SessionFolder) -> Path:
    return folder.path / "view.json"


def _read(file: Path) -> Place | None:
    try:
        place = msgspec.json.decode(read_small(file), type=Place)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return place if (place.request is None or place.request >= 0) else None
