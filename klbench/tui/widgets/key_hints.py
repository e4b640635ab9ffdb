"""The footer: what can be pressed next, from the registry, most important first, never more than a line.

     enter tokens  o locate  v verdict  e report  ? help  q quit

What cannot be done now is left out here; help and the palette list it with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual.strip import Strip
from textual.widget import Widget

from klbench.core.text import cell_width
from klbench.tui.actions import Action

_ALWAYS = ("help", "quit")


def fitting(actions: Sequence[Action], width: int) -> list[Action]:
    """The hints that fit: help and quit always, of the others the most important."""
    kept = [action for action in actions if action.id in _ALWAYS]
    room = width - 1 - sum(_cells(action) for action in kept)
    for action in actions:
        if action not in kept and _cells(action) <= room:
            kept.append(action)
            room -= _cells(action)
    return [action for action in actions if action in kept and action.id not in _ALWAYS] + [
        action for action in actions if action.id in _ALWAYS
    ]


def _cells(action: Action) -> int:
    return cell_width(action.shown_key) + 1 + cell_width(action.label) + 2


class KeyHints(Widget):
    """One line. `show` draws only when the hints change."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"key-hints--key", "key-hints--label"}
    DEFAULT_CSS = """
    KeyHints { height: 1; dock: bottom; background: $panel; color: $foreground; }
    KeyHints > .key-hints--key { color: $accent; text-style: bold; }
    KeyHints > .key-hints--label { color: $foreground; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._actions: tuple[Action, ...] = ()

    def show(self, actions: Sequence[Action]) -> None:
        if tuple(actions) != self._actions:
            self._actions = tuple(actions)
            self.refresh()

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        if y:
            return Strip.blank(width, base)
        key = base + self.get_component_rich_style("key-hints--key", partial=True)
        label = base + self.get_component_rich_style("key-hints--label", partial=True)
        segments = [Segment(" ", base)]
        for action in fitting(self._actions, width):
            segments += [Segment(action.shown_key, key), Segment(f" {action.label}  ", label)]
        return Strip(segments).adjust_cell_length(width, base)
