"""Keys of the configuration: `[keys]` gives actions other keys, checked as strictly as every setting.

    [keys]
    locate = "K"                  # one key, or a list of them; the first is shown
    like = ["J", "f5"]

An action keeps its own keys where it is not named. Refused are: actions that there are not, keys that no
terminal sends or that belong to the terminal, and a key that would mean two things on one screen.
"""

from __future__ import annotations

import difflib
import os
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path

from klbench import settings
from klbench.errors import UsageError

_NAMED = frozenset(
    ("enter", "escape", "tab", "space", "up", "down", "left", "right", "home", "end", "pageup", "pagedown",
     "insert", "delete", "backspace")
)  # fmt: skip
_OWNED = {
    **{f"ctrl+{letter}": "terminals and users own it" for letter in "csvz"},
    **{f"ctrl+{letter}": "a terminal sends another key's bytes for it" for letter in "hijm"},
    "ctrl+p": "it opens the palette",
    "ctrl+q": "it leaves the workbench",
}
_INSIDE = {"origin": ("table", "map"), "main": ("table", "lines"), "log": ("lines",)}
"""Widgets whose keys work on a screen beside its own; a table on all others."""


def load(environment: Mapping[str, str] = os.environ, file: Path | None = None) -> settings.Settings:
    """The settings in force, the keys among them checked. Raises UsageError."""
    found = settings.load(environment, file)
    if found.bound:
        checked(found.bound)
    return found


def use(found: settings.Settings) -> None:
    """Have every text name the keys of these settings. Raises UsageError."""
    if found.bound:
        from klbench.tui.actions import rebind

        rebind(checked(found.bound))


def checked(bound: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The keys by their names in the registry. Raises UsageError that names everything that is wrong."""
    from klbench.tui.actions import BY_ID

    wrong: list[str] = []
    keys: dict[str, tuple[str, ...]] = {}
    for action, texts in bound.items():
        if action not in BY_ID:
            near = difflib.get_close_matches(action, [*BY_ID], 1, 0.5)
            wrong.append(
                f"keys.{action}: there is no such action" + (f"; did you mean {near[0]}?" if near else "")
            )
            continue
        named = []
        for text in texts:
            try:
                named.append(named_key(text))
            except ValueError as error:
                wrong.append(f"keys.{action}: {text!r} cannot be a key: {error}")
        keys[action] = tuple(named)
    if not wrong:
        wrong += conflicts(keys)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(
            f"the configuration is not understood: {wrong[0]}{more}",
            why="; ".join(wrong[1:6]),
            next="klbench help keys lists the actions; the table [keys] names them",
        )
    return keys


def named_key(text: str) -> str:
    """A key as the registry names it: `?` is question_mark. Raises ValueError with the reason why not."""
    from klbench.tui.actions import name_of_character

    key = text.strip().lower() if len(text.strip()) > 1 else text.strip()
    if len(key) == 1:
        if key not in string.ascii_letters + string.digits + string.punctuation:
            raise ValueError("only characters of ASCII are on every keyboard")
        return name_of_character(key)
    if key in _OWNED:
        raise ValueError(_OWNED[key])
    if key in _NAMED or re.fullmatch(r"f([1-9]|1[0-2])|ctrl\+[a-z]", key):
        return key
    kinds = f"one character, {', '.join(sorted(_NAMED))}, f1 to f12, ctrl+ and a letter"
    raise ValueError(f"no terminal sends it; there are {kinds}" if key else "it is empty")


def conflicts(keys: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Keys that would mean two things on one screen, and did not before, in words."""
    from klbench.tui.actions import BY_ID, shown

    found = []
    for one, two, place in _together() if keys else ():
        now = [keys.get(name, BY_ID[name].default_keys) for name in (one, two)]
        before = [BY_ID[name].default_keys for name in (one, two)]
        both = sorted(({*now[0]} & {*now[1]}) - ({*before[0]} & {*before[1]}))
        found += [f"keys: {shown(key)} would be both {one} and {two} on the screen {place!r}" for key in both]
    return list(dict.fromkeys(found))


def _together() -> Iterator[tuple[str, str, str]]:
    """Pairs of actions whose keys work at the same time, and the screen where they do."""
    from klbench.tui.actions import ALL, of_screen

    for place in ALL:
        own = [action.id for action in of_screen(place)]
        inside = [[action.id for action in of_screen(widget)] for widget in _INSIDE.get(place, ("table",))]
        for group in (own, *inside):
            for at, one in enumerate(group):
                yield from ((one, two, place) for two in group[at + 1 :])
        for group in inside:
            yield from ((one, two, place) for one in own for two in group)
